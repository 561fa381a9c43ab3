import dataclasses

import numpy as np
import pytest

from tff_fssl.data import names
from tff_fssl.data import partition_draw
from tff_fssl.data import partition_settings
from tff_fssl.data import partition_splits
from tff_fssl.hparams import UsageError


def _build(labels, num_classes=10, **kwargs):
  defaults = {'num_clients': 100, 'num_labels': num_classes}
  settings = partition_settings.PartitionSettings(
    num_classes, **(defaults | kwargs)
  )
  return partition_draw.build_partition(labels, settings)


def _labels(of_class, num_classes=10):
  return np.arange(of_class * num_classes) % num_classes


def _counts(partition, labels, held='client_unlabeled'):
  return np.array(
    [np.bincount(labels[a], minlength=10) for a in getattr(partition, held)]
  )


# FedMatch and ProtoFSSL spec, A5: rows are rolled; B4 and I16: counts.
_FEDMATCH = [244, 73, 15, 15, 15, 10, 15, 15, 15, 73]
_EXTREME = [243, 49, 49, 49, 25, 25, 25, 25, 0, 0]
_EXTREME_LABELS = [23, 5, 5, 5, 3, 3, 3, 3, 0, 0]


@pytest.mark.parametrize(
  'partition, size, counts',
  [
    ('fedmatch', 490, _FEDMATCH),
    ('extreme', 490, _EXTREME),
    ('extreme', 50, _EXTREME_LABELS),
    ('fedmatch', 100, [50, 15, 3, 3, 3, 2, 3, 3, 3, 15]),
    ('extreme', 100, [50, 10, 10, 10, 5, 5, 5, 5, 0, 0]),
  ],
)
def test_published_counts(partition, size, counts):
  for client in (0, 1, 9, 10, 37):
    row = partition_splits.row_counts(partition, client, size)
    assert row.tolist() == np.roll(counts, client % 10).tolist()


@pytest.mark.parametrize('partition', ['fedmatch', 'extreme'])
def test_row_counts_are_counts(partition):
  for size in range(600):
    row = partition_splits.row_counts(partition, 0, size)
    assert row.sum() == size and row.min() >= 0
    shares = partition_splits.row_counts(partition, 0, 100)
    assert np.all(np.abs(row - size * shares / 100)[1:] <= 0.5)


def test_fedmatch_on_the_papers_sizes():
  # ProtoFSSL: 5,400 of each class, 5 of each labelled at each of 100 clients.
  labels = _labels(5_400)
  p = _build(
    labels, partition='fedmatch', scenario='labels_at_clients', num_labels=50
  )
  np.testing.assert_array_equal(_counts(p, labels, 'client_labeled'), 5)
  wanted = [np.roll(_FEDMATCH, client % 10) for client in range(100)]
  np.testing.assert_array_equal(_counts(p, labels), wanted)


def test_extreme_on_the_papers_sizes():
  labels = _labels(5_400)
  p = _build(
    labels,
    partition='extreme',
    scenario='labels_at_clients',
    client_labels='own',
    num_labels=50,
  )
  for held, counts in (
    ('client_labeled', _EXTREME_LABELS),
    ('client_unlabeled', _EXTREME),
  ):
    wanted = [np.roll(counts, client % 10) for client in range(100)]
    np.testing.assert_array_equal(_counts(p, labels, held), wanted)


def test_exact_shares_use_no_class_up():
  # With 5 clients, class 0 is wanted by many; with SVHN's classes, by all.
  labels = np.repeat(
    np.arange(10), [499, 1385, 1058, 849, 745, 688, 572, 559, 504, 465]
  )
  for num_clients in (1, 5, 10, 23):
    p = _build(labels, partition='fedmatch', num_clients=num_clients)
    size = set(p.class_counts.sum(1))
    assert len(size) == 1
    for client, counts in enumerate(p.class_counts):
      row = partition_splits.row_counts('fedmatch', client, min(size))
      np.testing.assert_array_equal(counts, row)
    # One more for each, and a class would run out.
    more = sum(
      partition_splits.row_counts('fedmatch', k, min(size) + 1)
      for k in range(num_clients)
    )
    left = np.bincount(labels) - 1
    assert np.any(more > left)


def test_drawn_shares_follow_the_row_and_run_out():
  labels = _labels(5_600)
  p = _build(labels, partition='fedmatch', class_draws='multinomial')
  sizes = p.class_counts.sum(1)
  # 55,990 for 100 clients. Only the last ones can lack something.
  assert np.all(sizes <= 559) and np.all(sizes[:90] == 559)
  of_type = sum(np.roll(p.class_counts[k], -(k % 10)) for k in range(90))
  shares = of_type / of_type.sum()
  wanted = partition_splits.row_counts('fedmatch', 0, 100) / 100
  np.testing.assert_allclose(shares, wanted, atol=0.005)
  exact = _build(labels, partition='fedmatch')
  assert exact.dump_json() != p.dump_json()
  short = _build(
    np.repeat(np.arange(10), [99, *[500] * 9]),
    partition='fedmatch',
    class_draws='multinomial',
    num_clients=10,
  )
  assert short.class_counts[:, 0].sum() == 98  # All that is there.
  assert set(short.class_counts.sum(1)) != {458}


def test_shards_have_few_classes():
  # McMahan et al.: 60,000 examples, 200 shards of 300, two for each client.
  labels = _labels(6_001)
  p = _build(labels, partition='shards')
  assert set(p.class_counts.sum(1)) == {600}
  # Each shard is of one class.
  assert set(np.unique(p.class_counts)) == {0, 300, 600}
  assert (p.class_counts > 0).sum(1).max() == 2
  # They are drawn, not taken in turn.
  other = _build(labels, partition='shards', seed=1)
  assert other.class_counts.tolist() != p.class_counts.tolist()
  assert len({tuple(np.flatnonzero(c)) for c in p.class_counts}) > 20
  for shards_per_client in (1, 5):
    p = _build(labels, partition='shards', shards_per_client=shards_per_client)
    assert (p.class_counts > 0).sum(1).max() == shards_per_client
  with pytest.raises(UsageError, match=r'--shards_per_client=700: .* 70000 sh'):
    _build(labels, partition='shards', shards_per_client=700)


def _mean_divergence(partition):
  """KL from uniform, mean over clients."""
  shares = partition.class_counts / partition.class_counts.sum(1, keepdims=True)
  logs = np.log(10 * np.where(shares > 0, shares, 1))
  return np.mean(np.sum(shares * np.where(shares > 0, logs, 0), 1))


# FedSwitch spec, 5.3: the expected divergence of a client's classes from
# uniform, for concentrations alpha and alpha / classes.
@pytest.mark.parametrize(
  'alpha, meaning, divergence, equal_sizes',
  [
    *(
      row
      for equal_sizes in (False, True)
      for row in (
        (0.1, 'each', 1.456046, equal_sizes),
        (1.0, 'each', 0.373617, equal_sizes),
        (10.0, 'each', 0.044176, equal_sizes),
        (1.0, 'total', 1.456046, equal_sizes),
        (10.0, 'total', 0.373617, equal_sizes),
      )
    ),
    # Else most clients would have nothing.
    (0.1, 'total', 2.165455, True),
  ],
)
def test_dirichlet_has_the_expected_divergence(
  alpha, meaning, divergence, equal_sizes
):
  partitions = [
    _build(
      _labels(5_000),
      partition='dirichlet',
      alpha=alpha,
      alpha_meaning=meaning,
      equal_sizes=equal_sizes,
      min_client_examples=1,
      num_clients=50,
      seed=seed,
    )
    for seed in range(4)
  ]
  found = np.mean([_mean_divergence(p) for p in partitions])
  # Clients that are full, or classes that have run out, change it somewhat.
  assert abs(found - divergence) < 0.13 + 0.05 * divergence
  if equal_sizes:
    for p in partitions:
      assert set(p.class_counts.sum(1)) == {999}


def test_the_least_concentration_ends():
  p = _build(
    _labels(500),
    partition='dirichlet',
    equal_sizes=True,
    alpha=1e-5,
    alpha_meaning='total',
    num_clients=20,
  )
  assert set(p.class_counts.sum(1)) == {249}
  with pytest.raises(UsageError, match='--alpha=1e-06: .* from 1e-05 to 1e'):
    _build(
      _labels(500), partition='dirichlet', alpha=1e-6, alpha_meaning='total'
    )


@pytest.mark.parametrize('partition', ['fedmatch', 'extreme'])
def test_rows_are_of_ten_classes(partition):
  with pytest.raises(UsageError, match='of 10 classes, but the data have 5'):
    _build(_labels(100, 5), 5, partition=partition)


def test_every_class_of_a_mostly_unlabelled_set():
  # 10 known examples of each class, as in STL-10, where nearly all is unknown.
  labels = np.concatenate([_labels(10), np.full(1_000, names.UNKNOWN_LABEL)])
  for partition in ('iid', 'dirichlet', 'shards', 'fedmatch'):
    p = _build(
      labels,
      partition=partition,
      num_clients=10,
      num_labels=40,
      min_client_examples=0,
    )
    p.check(labels)
    assert set(labels[p.server_labeled]) == set(range(10))
    unknown = [np.sum(labels[a] == -1) for a in p.client_unlabeled]
    assert unknown == [100] * 10
    assert p.class_counts.sum() <= 60
  # All that is known is at the server.
  p = _build(labels, num_clients=10, num_labels=100)
  assert p.class_counts.sum() == 0
  assert {len(a) for a in p.client_unlabeled} == {100}


_NAMES = ('ann', 'bob', 'cem', 'nobody here', 'eva')
_OWNERS = np.repeat([0, 1, 2, 4, -1], [40, 10, 30, 80, 40])
_CLASSES = np.arange(200) % 4


def _natural(owners=_OWNERS, labels=_CLASSES, **kwargs):
  defaults = {'num_clients': 0, 'num_labels': 4, 'partition': 'natural'}
  settings = partition_settings.PartitionSettings(4, **(defaults | kwargs))
  return partition_draw.build_partition(labels, settings, owners, _NAMES)


def test_all_that_have_examples_are_clients():
  p = _natural()
  assert p.client_names == ('ann', 'bob', 'cem', 'eva')
  assert p.settings.num_clients == p.num_clients == 4
  for client, owner in enumerate((0, 1, 2, 4)):
    mine = np.flatnonzero(_OWNERS == owner)
    wanted = np.setdiff1d(mine, p.server_labeled)
    np.testing.assert_array_equal(p.client_unlabeled[client], wanted)
  # The server's labels are those of any partition.
  other = _natural(partition='iid', num_clients=3)
  np.testing.assert_array_equal(p.server_labeled, other.server_labeled)


def test_fewer_clients_are_drawn_and_more_include_them():
  drawn = [_natural(num_clients=n, seed=1).client_names for n in (1, 2, 3, 4)]
  assert [len(n) for n in drawn] == [1, 2, 3, 4]
  assert all(set(a) < set(b) for a, b in zip(drawn, drawn[1:]))
  assert (
    len({_natural(num_clients=2, seed=s).client_names for s in range(9)}) > 2
  )
  # What the others have is nobody's.
  p = _natural(num_clients=1, seed=1)
  owner = _NAMES.index(p.client_names[0])
  assert set(_OWNERS[p.client_unlabeled[0]]) == {owner}


def test_clients_label_their_own_and_keep_the_unknown():
  labels = _CLASSES.copy()
  labels[::3] = -1
  p = _natural(
    labels=labels,
    scenario='labels_at_clients',
    client_labels='own',
    num_labels=5,
    label_noise=0.5,
  )
  for client, owner in enumerate((0, 1, 2, 4)):
    assert len(p.client_labeled[client]) == 5
    assert np.all(labels[p.client_labeled[client]] >= 0)
    both = [p.client_labeled[client], p.client_unlabeled[client]]
    mine = np.flatnonzero(_OWNERS == owner)
    np.testing.assert_array_equal(np.sort(np.concatenate(both)), mine)
  assert len(p.wrong_labels) == 10
  # Nobody gets balanced labels of others, whatever their number.
  full, also = (
    _natural(
      labels=labels,
      scenario='labels_at_clients',
      full_labels=True,
      num_labels=num_labels,
    )
    for num_labels in (0, 8)
  )
  assert full.has_same_examples(also)
  for held, unlabeled in zip(full.client_labeled, full.client_unlabeled):
    assert np.all(labels[held] >= 0) and np.all(labels[unlabeled] == -1)


@pytest.mark.parametrize(
  'settings', [{'client_labels': 'own'}, {'full_labels': True}]
)
def test_clients_that_have_labels_are_those_that_label(settings):
  labels = np.where(np.isin(_OWNERS, [1, 4]), _CLASSES, -1)
  for seed in range(4):
    p = _natural(
      labels=labels,
      scenario='labels_at_clients',
      labeled_clients='2',
      seed=seed,
      **settings,
    )
    held = [name for name, a in zip(p.client_names, p.client_labeled) if len(a)]
    assert held == ['bob', 'eva']


@pytest.mark.parametrize(
  'kwargs, message',
  [
    ({'owners': None}, 'natural: the data set does not record owners'),
    ({'owners': np.full(200, -1)}, 'has 0 clients with examples'),
    ({'owners': _OWNERS[:3]}, r'owners of 200 examples .* not int64 \[3\]'),
    ({'num_clients': 5}, '--num_clients=5 .* has 4 clients with examples'),
    (
      {'scenario': 'labels_at_clients'},
      '--client_labels=balanced: .* set --client_labels=own',
    ),
    (
      {
        'scenario': 'labels_at_clients',
        'client_labels': 'own',
        'num_labels': 11,
      },
      r'client 1 \(bob\) has 10 examples to label; set it to at most 10, or'
      ' set --labeled_clients to at most 3',
    ),
    (
      {
        'labels': np.where(_OWNERS == 0, 0, -1),
        'scenario': 'labels_at_clients',
        'full_labels': True,
        'num_labels': 0,
        'labeled_clients': '2',
      },
      '--labeled_clients=2: only 1 clients have an example of known class',
    ),
  ],
)
def test_mistakes(kwargs, message):
  with pytest.raises(UsageError, match=message):
    _natural(**kwargs)


# SAGE's code on CIFAR-10 (spec, T1): counts of the first two clients.
@pytest.mark.parametrize(
  'alpha, of_class, first, second',
  [
    (
      0.1,
      500,
      [57, 38, 3, 0, 9, 0, 28, 7, 57, 51],
      [0, 11, 47, 37, 33, 49, 18, 55, 0, 0],
    ),
    (
      0.1,
      4_500,
      [446, 460, 0, 3, 13, 0, 441, 0, 435, 452],
      [0, 7, 466, 418, 423, 470, 1, 465, 0, 0],
    ),
    (1.0, 4_500, [439, 240, 19, 0, 86, 24, 349, 206, 435, 452], None),
  ],
)
def test_pairs_are_those_of_the_published_code(alpha, of_class, first, second):
  settings = partition_settings.PartitionSettings(
    10, 20, 10, partition=names.PAIRS, alpha=alpha
  )
  hidden = [np.full(of_class, c) for c in range(10)]
  rng = np.random.RandomState(0)
  split = partition_splits.split_pairs(hidden, settings, rng)
  assert np.bincount(split[0], minlength=10).tolist() == first
  if second:
    assert np.bincount(split[1], minlength=10).tolist() == second
  assert {len(client) for client in split} == {of_class // 2}


def test_labels_are_split_in_a_draw_of_their_own():
  labels = _labels(200)
  build = lambda **more: _build(
    labels,
    num_clients=20,
    num_labels=10,
    partition=names.PAIRS,
    alpha=0.1,
    scenario=names.LABELS_AT_CLIENTS,
    client_labels=names.SPLIT,
    **more,
  )
  partition = build()
  labeled = _counts(partition, labels, 'client_labeled')
  hidden = _counts(partition, labels)
  assert set(labeled.sum(1)) == {10} and set(hidden.sum(1)) == {90}
  assert labeled.sum(0).tolist() == [20] * 10
  shares = labeled / 10 - hidden / 90
  assert np.abs(shares).sum(1).mean() / 2 > 0.2
  # The labels do not depend on validation, the others not on the labels' draw.
  other = build(num_validation=100)
  for a, b in zip(partition.client_labeled, other.client_labeled, strict=True):
    np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
  'settings, text',
  [
    ({'num_clients': 5, 'partition': 'pairs'}, 'must be even; for example 6'),
    ({'labeled_clients': '2'}, 'omit --labeled_clients'),
    ({'num_labels': 3, 'num_clients': 9}, '27 labels of all clients cannot be'),
    ({'num_labels': 100}, 'needs 500 examples of each class'),
    ({'partition': 'pairs', 'alpha': 1e-6, 'num_labels': 2}, 'raise --alpha'),
  ],
)
def test_labels_that_cannot_be_split(settings, text):
  given = {
    'num_clients': 50,
    'scenario': names.LABELS_AT_CLIENTS,
    'client_labels': names.SPLIT,
  }
  labels = (
    np.repeat(np.arange(10), [400] + [1] * 9)
    if 'alpha' in settings
    else (_labels(20))
  )
  if 'alpha' in settings:
    given |= {'num_clients': 2, 'client_labels': names.OWN}
  with pytest.raises(UsageError, match=text):
    _build(labels, **(given | settings))


@pytest.mark.parametrize('num_classes', [1, 2, 3])
def test_exactly_k_classes_a_client(num_classes):
  hidden = [np.arange(100 * c, 100 * c + 60) for c in range(10)]
  settings = partition_settings.PartitionSettings(
    10, 10, 10, partition='classes', classes_per_client=num_classes
  )
  clients = partition_splits.split(hidden, settings)
  counts = np.array([np.bincount(c // 100, minlength=10) for c in clients])
  assert ((counts > 0).sum(axis=1) == num_classes).all()
  # Ten clients have all ten classes, which are given away whole.
  assert (counts.sum(axis=0) == 60).all()
  for of_class in counts.T:
    assert np.ptp(of_class[of_class > 0]) <= 1
  with pytest.raises(UsageError, match='--classes_per_client=11: must be at'):
    partition_settings.PartitionSettings(
      10, 10, 10, partition='classes', classes_per_client=11
    )


@pytest.mark.parametrize(
  'skew, sizes',
  [
    ('linear', [10, 20, 30, 40]),
    ('square', [3, 14, 30, 53]),
    ('exponential', [3, 9, 23, 65]),
  ],
)
def test_clients_of_unequal_sizes(skew, sizes):
  hidden = [np.arange(50), np.arange(50, 100)]
  settings = partition_settings.PartitionSettings(
    2, 4, 2, partition='sizes', size_skew=skew
  )
  clients = partition_splits.split(hidden, settings)
  np.testing.assert_allclose([*map(len, clients)], sizes, atol=1)
  assert sorted(np.concatenate(clients).tolist()) == list(range(100))
  with pytest.raises(UsageError, match='the smallest of 90 clients would have'):
    partition_splits.split(
      hidden, dataclasses.replace(settings, num_clients=90)
    )


def test_a_class_without_examples_does_not_stop_a_dirichlet_split():
  settings = partition_settings.PartitionSettings(
    2, 1, 2, partition='dirichlet'
  )
  hidden = [np.arange(20), np.arange(0)]
  assert [*map(len, partition_splits.split(hidden, settings))] == [20]


def test_given_shares_of_each_class():
  hidden = [np.arange(60), np.arange(100, 190), np.arange(200, 210)]
  settings = partition_settings.PartitionSettings(
    3, 3, 3, partition='given', class_shares='20,1,0; 40,1,0;\n 0,1,0'
  )
  clients = partition_splits.split(hidden, settings)
  counts = [np.bincount(c // 100, minlength=3).tolist() for c in clients]
  # Nobody has the third class.
  assert counts == [[20, 30, 0], [40, 30, 0], [0, 30, 0]]
  assert len(np.unique(np.concatenate(clients))) == 150
  # What does not divide evenly is given away, too.
  seven = [np.arange(7), np.arange(100, 107), np.arange(200, 207)]
  assert sum(map(len, partition_splits.split(seven, settings))) == 14


@pytest.mark.parametrize(
  'shares, text',
  [
    ('', 'it is empty'),
    ('1,2;1,2', 'it has 2'),
    ('1,2;1;1,2', "row 2 is '1'"),
    ('1,2;0,00;1,2', "row 2 is '0,00'"),
    ('1,2;1,2;1,-2', "row 3 is '1,-2'"),
    ('1,2;1,2;1,0.5', "row 3 is '1,0.5'"),
  ],
)
def test_wrong_shares_are_refused(shares, text):
  with pytest.raises(UsageError, match=f'--class_shares=.*: .*{text}'):
    partition_settings.PartitionSettings(
      2, 3, 2, partition='given', class_shares=shares
    )


def _merged(num_clients, owners, owner_names=(), **kwargs):
  settings = partition_settings.PartitionSettings(
    2, num_clients, 2, **{'partition': 'continuous', **kwargs}
  )
  return partition_splits.merge_owners(
    owners, owner_names, np.zeros(len(owners), np.int32), settings
  )


def test_groups_are_of_whole_owners():
  owners = np.array([*range(7)] * 3 + [-1])
  merged = _merged(3, owners, partition='grouped')
  assert merged[-1] == -1
  of_owner = merged[:-1].reshape(3, 7)
  assert (of_owner == of_owner[0]).all()
  assert sorted(np.bincount(of_owner[0])) == [2, 2, 3]
  other = _merged(3, owners, partition='grouped', seed=1)
  assert not np.array_equal(merged, other)


def test_clients_follow_numbers_as_strictly_as_wanted():
  owners = np.random.default_rng(0).integers(0, 100, 3000)
  ages = [str(age / 2) for age in range(100)]
  means = {}
  for strictness in (1.0, 0.5, 0.0):
    merged = _merged(3, owners, ages, strictness=strictness)
    assert np.bincount(merged).tolist() == [1000] * 3
    means[strictness] = [owners[merged == c].mean() for c in range(3)]
  strict = _merged(3, owners, ages)
  bounds = [
    (owners[strict == c].min(), owners[strict == c].max()) for c in range(3)
  ]
  assert bounds[0][1] <= bounds[1][0] and bounds[1][1] <= bounds[2][0]
  spread = [m[2] - m[0] for m in means.values()]
  assert spread[0] > spread[1] > 10 and abs(spread[2]) < 5


@pytest.mark.parametrize(
  'arguments, words',
  [
    ((2, None), 'does not record owners'),
    ((4, np.array([0, 1, 2, 0]), 'grouped'), 'has 3 owners of 4 examples'),
    ((2, np.array([0, 1]), 'continuous', ('a', '1')), "'a', are finite"),
    ((2, np.array([0, 1]), 'continuous', ('1', 'inf')), 'are finite numbers'),
  ],
)
def test_owners_that_make_no_clients_are_refused(arguments, words):
  num_clients, owners, *more = arguments
  settings = partition_settings.PartitionSettings(
    2, num_clients, 2, partition=more[0] if more else 'grouped'
  )
  labels = np.zeros(4 if owners is None else len(owners), np.int32)
  with pytest.raises(UsageError, match=words):
    partition_splits.merge_owners(owners, *more[1:] or [()], labels, settings)


def test_groups_hold_their_own_examples_in_a_partition():
  owners = np.repeat(np.arange(6), 10)
  p = partition_draw.build_partition(
    np.arange(60) % 2,
    partition_settings.PartitionSettings(
      2,
      2,
      4,
      scenario='labels_at_clients',
      client_labels='own',
      partition='grouped',
    ),
    owners,
    tuple('abcdef'),
  )
  held = [
    {*owners[own].tolist(), *owners[others].tolist()}
    for own, others in zip(p.client_labeled, p.client_unlabeled)
  ]
  assert not held[0] & held[1] and len(held[0]) == len(held[1]) == 3
  assert p.client_names == ()
