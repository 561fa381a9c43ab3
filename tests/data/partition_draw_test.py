import functools

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import numpy as np
import pytest

from tff_fssl.data import names
from tff_fssl.data import partition as partition_lib
from tff_fssl.data import partition_draw
from tff_fssl.data import partition_settings
from tff_fssl.hparams import UsageError


def _labels(counts, seed=0):
  labels = np.repeat(np.arange(len(counts)), counts)
  return np.random.default_rng(seed).permutation(labels).astype(np.int32)


def _build(labels, num_classes=10, **kwargs):
  defaults = {'num_clients': 10, 'num_labels': num_classes}
  return partition_draw.build_partition(
    labels,
    partition_settings.PartitionSettings(num_classes, **(defaults | kwargs)),
  )


def _held(partition):
  return np.concatenate(
    [
      partition.server_labeled,
      partition.validation,
      *partition.client_labeled,
      *partition.client_unlabeled,
      *partition.client_test,
    ]
  )


def _sizes(partition):
  return [len(a) for a in partition.client_unlabeled]


# (FL)^2 spec, E13. SVHN's classes are not balanced; only its size matters.
@pytest.mark.parametrize(
  'num_classes,size,num_labels,unlabeled,per_client,unused',
  [
    (10, 50_000, 10, 49_990, 499, 90),
    (10, 50_000, 40, 49_960, 499, 60),
    (10, 73_257, 40, 73_217, 732, 17),
    (10, 73_257, 250, 73_007, 730, 7),
    (100, 50_000, 100, 49_900, 499, 0),
    (100, 50_000, 400, 49_600, 496, 0),
  ],
)
def test_counts_of_the_papers_settings(
  num_classes, size, num_labels, unlabeled, per_client, unused
):
  labels = np.arange(size) % num_classes
  p = _build(labels, num_classes, num_clients=100, num_labels=num_labels)
  assert size - len(p.server_labeled) == unlabeled
  assert _sizes(p) == [per_client] * 100
  assert size - len(_held(p)) == unused
  counts = np.bincount(labels[p.server_labeled], minlength=num_classes)
  assert counts.tolist() == [num_labels // num_classes] * num_classes


def _draw_settings(draw):
  """(labels, settings, owners) of any partition."""
  partition = draw(st.sampled_from(names.PARTITIONS))
  has_rows = partition in (names.FEDMATCH, names.EXTREME)
  num_classes = 10 if has_rows else draw(st.integers(2, 6))
  counts = draw(
    st.lists(st.integers(25, 60), min_size=num_classes, max_size=num_classes)
  )
  labels = np.repeat(
    np.arange(-1, num_classes), [draw(st.integers(0, 90)), *counts]
  )
  rng = np.random.default_rng(draw(st.integers(0, 99)))
  labels = rng.permutation(labels)
  kwargs = {
    'partition': partition,
    'num_clients': draw(st.integers(1, 6)),
    'num_labels': num_classes * draw(st.integers(1, 2)),
    'scenario': draw(st.sampled_from(names.SCENARIOS)),
    'alpha': draw(st.floats(0.05, 100)),
    'alpha_meaning': draw(st.sampled_from(names.ALPHA_MEANINGS)),
    'equal_sizes': draw(st.booleans()),
    'min_client_examples': 0,
    'class_draws': draw(st.sampled_from(names.CLASS_DRAWS)),
    'shards_per_client': draw(st.integers(1, 4)),
    'classes_per_client': draw(st.integers(1, 2)),
    'size_skew': draw(st.sampled_from([names.LINEAR, names.SQUARE])),
    'num_validation': draw(st.integers(0, 5)),
    'num_unlabeled': draw(st.sampled_from([0, 0, 7, 42, 70, 10**4])),
    'full_labels': draw(st.booleans()),
    'labeled_clients': draw(st.sampled_from(['all', '1', '0.5'])),
    'client_labels': draw(st.sampled_from(names.CLIENT_LABELS)),
    'label_noise': draw(st.sampled_from([0.0, 0.2, 1.0])),
    'client_test_fraction': draw(st.sampled_from([0.0, 0.0, 0.2, 0.9])),
    'seed': draw(st.integers(-(2**70), 2**70)),
  }
  owners = rng.integers(-1, 7, len(labels))
  kwargs['num_clients'] += (
    kwargs['num_clients'] % 2 * (partition == names.PAIRS)
  )
  shares = rng.integers(0, 4, (kwargs['num_clients'], num_classes))
  shares[:, 0] += 1
  rows = [','.join(map(str, row)) for row in shares.tolist()]
  kwargs['class_shares'] = ';'.join(rows)
  if kwargs['client_labels'] == names.SPLIT:
    kwargs['labeled_clients'] = 'all'
  if partition in names.OF_OWNERS:
    if partition == names.NATURAL:
      kwargs['num_clients'] = draw(st.sampled_from([0, 1, 6]))
    kwargs['client_labels'] = names.OWN
    if kwargs['full_labels']:
      kwargs['num_labels'] = 0
  elif (
    kwargs['scenario'] == names.LABELS_AT_CLIENTS
    and kwargs['client_labels'] != names.SPLIT
    and draw(st.booleans())
  ):
    chosen = draw(st.integers(1, num_classes))
    kwargs['client_label_classes'] = chosen
    kwargs['num_labels'] = chosen * draw(st.integers(1, 3))
  return labels, num_classes, kwargs, owners


_NAMES = tuple('1234567')


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_invariants(data):
  labels, num_classes, kwargs, owners = _draw_settings(data.draw)

  def build(**changed):
    return partition_draw.build_partition(
      labels,
      partition_settings.PartitionSettings(num_classes, **kwargs | changed),
      owners,
      _NAMES,
    )

  try:
    p = build()
  except UsageError as error:
    # Clients have too few examples to label, for shards, or to hold out, or
    # there are too few, or too few of each class, to draw.
    assert str(error).startswith(
      (
        '--num_labels=',
        '--shards_per_client=',
        '--size_skew=',
        '--client_test_fraction=',
        '--num_unlabeled=',
        '--partition=pairs',
      )
    )
    return
  held = _held(p)
  assert len(np.unique(held)) == len(held)
  p.check(labels)
  at_clients = p.settings.scenario == names.LABELS_AT_CLIENTS
  assert len(p.validation) == p.settings.num_validation
  assert p.num_clients == p.settings.num_clients == len(p.class_counts)
  assert at_clients or len(p.server_labeled) == p.settings.num_labels
  assert not (at_clients and len(p.server_labeled))
  unknown = np.flatnonzero(labels == -1)
  for known in (p.labeled, p.validation, *p.client_test):
    assert not np.isin(known, unknown).any()
  holders = [c for c, a in enumerate(p.client_labeled) if len(a)]
  for client, both in enumerate(zip(p.client_labeled, p.client_unlabeled)):
    labeled, unlabeled = both
    assert np.all(np.diff(labeled) > 0) and np.all(np.diff(unlabeled) > 0)
    classes = labels[np.concatenate(both)]
    counts = [np.sum(classes == c) for c in range(num_classes)]
    assert p.class_counts[client].tolist() == counts
    if p.settings.full_labels and client in holders:
      assert np.isin(unlabeled, unknown).all()
    elif client in holders and not p.settings.labels_split:
      assert len(labeled) == p.settings.num_labels
  # Who holds labels does not depend on the examples that clients have.
  if not (p.settings.full_labels or p.settings.labels_split):
    assert len(holders) == p.settings.num_labeled_clients
  if p.settings.num_unlabeled:
    _check_drawn(p, build)
  else:
    _check_sizes(p, labels, unknown, owners)
  _check_label_classes(p, labels)
  _check_noise(p, labels, build)
  assert build().dump_json() == p.dump_json()
  back = partition_lib.Partition.parse_json(p.dump_json())
  assert back.dump_json() == p.dump_json() and back.settings == p.settings
  if p.settings.labels_own or p.settings.full_labels:
    return
  leaves_some = p.settings.has_rows or (
    p.settings.partition in (names.CLASSES, names.GIVEN)
  )
  if p.settings.labels_split and leaves_some:
    return
  # Neither the partition nor validation changes which examples are labelled.
  if p.settings.partition not in names.OF_OWNERS:
    plain = build(partition='iid', num_validation=0)
    np.testing.assert_array_equal(plain.labeled, p.labeled)
    np.testing.assert_array_equal(plain.wrong_labels, p.wrong_labels)


def _check_sizes(p, labels, unknown, owners):
  """How many examples clients have."""
  sizes = p.class_counts.sum(1)
  if p.client_test:
    sizes = sizes + [len(a) for a in p.client_test]
  sizes_unknown = [np.isin(a, unknown).sum() for a in p.client_unlabeled]
  own = p.settings
  known = len(labels) - len(unknown) - len(p.validation)
  if own.partition == names.NATURAL:
    elsewhere = np.concatenate([p.server_labeled, p.validation])
    assert len(p.client_names) == p.num_clients
    for client, name in enumerate(p.client_names):
      mine = np.flatnonzero(owners == _NAMES.index(name))
      has = np.concatenate(
        [
          p.client_labeled[client],
          p.client_unlabeled[client],
          *p.client_test[client : client + 1],
        ]
      )
      assert set(has) == set(mine) - set(elsewhere)
    return
  if own.partition in names.OF_OWNERS:
    taken = np.concatenate([p.server_labeled, p.validation])
    owned = np.setdiff1d(np.flatnonzero(owners >= 0), taken)
    assert sizes.sum() + sum(sizes_unknown) == len(owned)
    return
  assert set(sizes_unknown) == {len(unknown) // own.num_clients}
  given = len(p.labeled) if not own.labels_own else 0
  if own.full_labels:  # Besides the balanced ones, all of the clients' shares.
    return
  shares = sizes - (0 if own.labels_own else [len(a) for a in p.client_labeled])
  rest = known - given
  if own.partition == names.IID:
    assert set(shares) == {rest // own.num_clients}
  elif own.partition == names.DIRICHLET and own.equal_sizes:
    assert set(shares) == {rest // own.num_clients}
  elif own.partition == names.DIRICHLET:
    assert shares.sum() == rest
  elif own.partition == names.PAIRS:
    assert shares.sum() == rest and shares.max() - shares.min() <= 1
  elif own.partition == names.SIZES:
    assert shares.sum() == rest and (np.diff(shares) >= -1).all()
  elif own.partition in (names.CLASSES, names.GIVEN):
    assert shares.sum() <= rest
  elif own.partition == names.SHARDS:
    assert shares.sum() == rest
    assert shares.max() - shares.min() <= own.shards_per_client
  elif own.class_draws == names.EXACT:
    assert len(set(shares)) == 1
  else:
    assert shares.max() <= rest // own.num_clients


def _shares(p):
  """What clients hold, but for what they got because it is labelled."""
  has_own = p.settings.labels_own or p.settings.partition in names.OF_OWNERS
  all_held = [*p.client_unlabeled, *p.client_test]
  if has_own or not p.settings.full_labels:
    all_held += p.client_labeled * has_own
    return np.concatenate(all_held)
  bare = np.concatenate(p.client_labeled)
  num_given = p.settings.num_labels * p.settings.num_labeled_clients
  # Which of them are the balanced ones does not show.
  return np.concatenate([bare[num_given:], *all_held])


def _check_drawn(p, build):
  """How many examples are drawn for the clients, and that more include them."""
  own, shares = p.settings, _shares(p)
  num_own = own.num_labels * own.num_labeled_clients * own.labels_own
  left_out = own.num_unlabeled + num_own - len(shares)
  if own.partition in names.OF_OWNERS:
    assert left_out == 0
  elif own.partition in (
    names.SHARDS,
    names.PAIRS,
    names.DIRICHLET,
    names.IID,
    names.SIZES,
  ):
    # Known and unknown classes have a remainder each.
    assert 0 <= left_out < 2 * own.num_clients
  assert left_out >= 0
  if own.full_labels or own.partition not in (*names.OF_OWNERS, names.SHARDS):
    return
  try:
    more = _shares(build(num_unlabeled=own.num_unlabeled + 9, label_noise=0.0))
  except UsageError:
    return
  lost = np.setdiff1d(shares, more)
  # Examples of unknown class that are the remainder of the larger number.
  assert len(lost) < own.num_clients


def _check_label_classes(p, labels):
  """Whose labels are of which classes."""
  own = p.settings
  if own.full_labels or own.labels_own or own.client_label_classes == 0:
    return
  counts = np.array(
    [
      np.bincount(labels[held], minlength=own.num_classes)
      for held in p.client_labeled
      if len(held)
    ]
  )
  assert set(counts.flat) <= {0, own.num_labels // own.client_label_classes}
  assert set((counts > 0).sum(1)) == {own.client_label_classes}
  assert np.ptp((counts > 0).sum(0)) <= 1


def _check_noise(p, labels, build):
  """Which labels are wrong."""
  assert len(p.wrong_labels) == round(p.settings.label_noise * len(p.labeled))
  assert np.isin(p.wrong_examples, p.labeled).all()
  assert np.all(labels[p.wrong_examples] != p.wrong_labels)
  given = p.given_labels(labels, p.labeled)
  changed = p.labeled[given != labels[p.labeled]]
  np.testing.assert_array_equal(changed, p.wrong_examples)
  more = build(label_noise=1.0)
  both = more.given_labels(labels, p.wrong_examples)
  np.testing.assert_array_equal(both, p.wrong_labels)


_KINDS = [
  ('iid', {}),
  ('dirichlet', {'alpha': 0.5, 'min_client_examples': 1}),
  ('dirichlet', {'equal_sizes': True}),
  ('fedmatch', {}),
  ('fedmatch', {'class_draws': 'multinomial'}),
  ('extreme', {}),
  ('shards', {}),
  ('natural', {}),
]


def _of_owners(labels, **kwargs):
  owners = np.arange(len(labels)) % 10
  return partition_draw.build_partition(
    labels,
    partition_settings.PartitionSettings(10, **{'num_labels': 20} | kwargs),
    owners,
    'abcdefghij',
  )


@pytest.mark.parametrize('partition, more', _KINDS)
def test_unlabelled_examples_can_be_few(partition, more):
  labels = _labels([100] * 10)
  build = functools.partial(
    _of_owners, labels, num_clients=10, partition=partition, **more
  )
  plain = build(num_validation=30)
  few, again, other = (
    build(num_validation=30, num_unlabeled=300, **more)
    for more in ({}, {}, {'seed': 1})
  )
  # Labels and validation stay; clients share what is drawn.
  np.testing.assert_array_equal(few.server_labeled, plain.server_labeled)
  np.testing.assert_array_equal(few.validation, plain.validation)
  held = np.concatenate(few.client_unlabeled)
  is_whole = partition != 'extreme' and more != {'class_draws': 'multinomial'}
  is_whole &= (partition, more) != ('fedmatch', {})
  assert len(held) == 300 if is_whole else 100 < len(held) <= 300
  assert not np.isin(held, [*few.labeled, *few.validation]).any()
  # Classes as they come, not equally many of each.
  if is_whole:
    counts = few.class_counts.sum(0)
    assert np.all(np.abs(counts - 30) < 20) and len(set(counts)) > 1
  assert few.has_same_examples(again) and not few.has_same_examples(other)
  # All that is left is what there is without the number.
  assert build(num_validation=30, num_unlabeled=950).has_same_examples(plain)
  with pytest.raises(UsageError, match='=951: only 950 .* --num_validation'):
    build(num_validation=30, num_unlabeled=951)


@pytest.mark.parametrize('partition', ['iid', 'dirichlet', 'shards', 'natural'])
def test_more_unlabelled_examples_include_those_of_fewer(partition):
  build = functools.partial(
    _of_owners,
    _labels([100] * 10),
    num_clients=5,
    partition=partition,
    min_client_examples=0,
  )
  all_held = [
    set(np.concatenate(build(num_unlabeled=n).client_unlabeled).tolist())
    for n in (10, 25, 100, 300, 0)
  ]
  sizes = [len(held) for held in all_held]
  assert sizes == [10, 25, 100, 300, 490 if partition == 'natural' else 980]
  assert all(a < b for a, b in zip(all_held, all_held[1:]))


def test_the_number_does_not_count_labels():
  labels = _labels([100] * 10)
  build = functools.partial(_build, labels, **_CLIENTS, num_unlabeled=200)
  p = build()
  assert [len(a) for a in p.client_labeled] == [10] * 10
  assert _sizes(p) == [20] * 10
  np.testing.assert_array_equal(p.labeled, _build(labels, **_CLIENTS).labeled)
  # Of what clients have, so many stay unlabelled.
  own = build(client_labels='own', labeled_clients='4', num_labels=5)
  assert sum(_sizes(own)) == 200 and len(own.labeled) == 20
  with pytest.raises(UsageError, match='only 980 .* besides their 20 labels'):
    build(
      client_labels='own',
      labeled_clients='4',
      num_labels=5,
      num_unlabeled=981,
    )
  # What is held out is part of it, and all of it can be labelled.
  p = build(client_test_fraction=0.5)
  assert _sizes(p) == [10] * 10 == [len(a) for a in p.client_test]
  full = build(full_labels=True, num_labels=0)
  assert [len(a) for a in full.client_labeled] == [20] * 10
  unknown = np.where(np.arange(1000) % 2, labels, -1)
  mixed = _build(unknown, num_unlabeled=200)
  held = unknown[np.concatenate(mixed.client_unlabeled)]
  assert 60 < np.sum(held == -1) < 140 and 180 < len(held) <= 200


def test_labels_of_clients_are_of_few_classes():
  labels = _labels([100] * 10)
  build = functools.partial(_build, labels, **_CLIENTS, num_labels=10)
  p = build(client_label_classes=2)
  counts = np.array(
    [np.bincount(labels[a], minlength=10) for a in p.client_labeled]
  )
  assert sorted(counts.flat) == [0] * 80 + [5] * 20
  assert counts.sum(0).tolist() == [10] * 10
  # Its other examples are of all classes.
  assert np.all((p.class_counts - counts).sum(1) == 90)
  assert np.median(((p.class_counts - counts) > 0).sum(1)) == 10
  pairs = [tuple(np.flatnonzero(c)) for c in counts]
  others = build(client_label_classes=2, seed=1)
  assert pairs != [
    tuple(np.unique(labels[a]).tolist()) for a in others.client_labeled
  ]
  assert build(client_label_classes=2).dump_json() == p.dump_json()
  # All classes, in other words; also where some clients hold labels.
  assert build(client_label_classes=10).has_same_examples(build())
  some = build(client_label_classes=5, labeled_clients='3')
  assert len(_holders(some)) == 3
  for client in _holders(some):
    assert len(np.unique(labels[some.client_labeled[client]])) == 5
  # The server's are of all classes, and so are a client's own.
  assert _build(labels, client_label_classes=2).has_same_examples(
    _build(labels)
  )
  own = build(client_label_classes=2, client_labels='own', num_labels=7)
  assert len(own.labeled) == 70


def test_large_alpha_is_even_and_small_alpha_is_not():
  labels = _labels([1000] * 10)
  even = _build(labels, partition='dirichlet', alpha=1e6)
  counts = even.class_counts
  assert np.all(np.abs(counts - 99.9) <= 5)
  uneven = _build(
    labels,
    partition='dirichlet',
    alpha=1e-3,
    min_client_examples=1,
    num_clients=5,
  )
  top = uneven.class_counts.max(axis=0) / uneven.class_counts.sum(axis=0)
  assert np.mean(top) > 0.95  # Nearly all of a class is on one client.


def test_dirichlet_of_the_paper():
  # Spec, section 5.1: alpha .1: sizes 10 to about 2300, about 4.3 classes a
  # client; alpha .3: about 40 to 1550, about 7 classes.
  labels = _labels([5000] * 10)
  classes = {}
  for alpha in (0.1, 0.3):
    runs = [
      _build(
        labels,
        num_clients=100,
        num_labels=40,
        partition='dirichlet',
        alpha=alpha,
        seed=seed,
      )
      for seed in range(3)
    ]
    assert min(min(_sizes(p)) for p in runs) >= 10
    assert 1000 < max(max(_sizes(p)) for p in runs) < 3500
    classes[alpha] = np.mean([(p.class_counts > 0).sum(1).mean() for p in runs])
  assert 3.8 < classes[0.1] < 5
  assert 6.2 < classes[0.3] < 7.8


def test_validation_is_balanced_as_far_as_possible():
  labels = _labels([100, 100, 3])
  p = _build(labels, 3, num_clients=2, num_labels=3, num_validation=31)
  counts = np.bincount(labels[p.validation])
  assert counts[2] == 2
  assert sorted(counts[:2].tolist()) == [14, 15]
  even = _build(_labels([50] * 3), 3, num_labels=3, num_validation=30)
  assert np.bincount(_labels([50] * 3)[even.validation]).tolist() == [10] * 3


def test_full_labels_keep_the_clients_examples():
  labels = _labels([100] * 10)
  plain = _build(labels)
  full = _build(labels, full_labels=True)
  for a, b in zip(plain.client_unlabeled, full.client_labeled):
    np.testing.assert_array_equal(a, b)
  np.testing.assert_array_equal(plain.server_labeled, full.server_labeled)
  none = _build(labels, full_labels=True, num_labels=0)
  assert len(none.server_labeled) == 0
  assert len(none.client_labeled[0]) == 100


_CLIENTS = {'scenario': names.LABELS_AT_CLIENTS}


def _holders(partition):
  return [c for c, held in enumerate(partition.client_labeled) if len(held)]


@pytest.mark.parametrize(
  'text, num', [('all', 10), ('1', 1), ('3', 3), ('10', 10), ('0.25', 2)]
)
def test_some_clients_hold_labels(text, num):
  labels = _labels([100] * 5)
  p = _build(labels, 5, **_CLIENTS, labeled_clients=text, num_labels=15)
  assert len(_holders(p)) == num
  assert [len(held) for held in p.client_labeled if len(held)] == [15] * num
  for client in _holders(p):
    each = np.bincount(labels[p.client_labeled[client]])
    assert each.tolist() == [3] * 5
  # What they do not hold is shared out, without labels.
  assert _sizes(p) == [(500 - 15 * num) // 10] * 10
  p.check(labels)
  assert p.settings.labeled_clients == text


def test_more_labeled_clients_include_those_of_fewer():
  labels = _labels([100] * 5)
  held = [
    set(_holders(_build(labels, 5, **_CLIENTS, labeled_clients=str(n))))
    for n in range(1, 11)
  ]
  assert all(a < b for a, b in zip(held, held[1:]))
  # Neither always the first ones, nor always the same.
  drawn = [
    _holders(_build(labels, 5, **_CLIENTS, labeled_clients='3', seed=s))
    for s in range(4)
  ]
  assert len(set(map(tuple, drawn))) > 1
  shares = [
    len(_holders(_build(labels, 5, **_CLIENTS, labeled_clients=share)))
    for share in ('0.01', '.1', '0.5', '0.99')
  ]
  assert shares == [1, 1, 5, 10]


@pytest.mark.parametrize('partition', ['iid', 'dirichlet', 'shards'])
def test_clients_label_some_of_their_own_examples(partition):
  labels = _labels([100] * 5)
  settings = {**_CLIENTS, 'partition': partition, 'alpha': 0.3, 'seed': 4}
  p = _build(
    labels,
    5,
    **settings,
    labeled_clients='4',
    client_labels='own',
    num_labels=7,  # No multiple of the classes.
  )
  hidden = _build(
    labels, 5, **settings, num_labels=0, full_labels=True, labeled_clients='1'
  )
  assert len(_holders(p)) == 4
  for client, shares in enumerate(zip(p.client_labeled, p.client_unlabeled)):
    labeled, unlabeled = shares
    assert len(labeled) == (7 if client in _holders(p) else 0)
    assert np.all(np.diff(labeled) > 0) and np.all(np.diff(unlabeled) > 0)
    # Its share is the one that it has without labels.
    share = np.concatenate(
      [hidden.client_labeled[client], hidden.client_unlabeled[client]]
    )
    np.testing.assert_array_equal(np.sort(np.concatenate(shares)), share)
  assert (
    partition_lib.Partition.parse_json(p.dump_json()).settings == p.settings
  )
  other = _build(
    labels,
    5,
    **settings | {'seed': 5},
    labeled_clients='4',
    client_labels='own',
    num_labels=7,
  )
  assert other.dump_json() != p.dump_json()


def test_some_clients_have_all_labels_and_the_others_none():
  p = _build(
    _labels([100] * 5),
    5,
    **_CLIENTS,
    labeled_clients='3',
    full_labels=True,
    num_labels=0,
  )
  assert len(_holders(p)) == 3
  assert [
    (len(a), len(b)) for a, b in zip(p.client_labeled, p.client_unlabeled)
  ] == [(50, 0) if c in _holders(p) else (0, 50) for c in range(10)]


def test_all_labels_at_clients_leaves_nothing_unlabelled():
  labels = _labels([10] * 2)
  p = _build(
    labels, 2, num_clients=5, num_labels=4, scenario='labels_at_clients'
  )
  assert _sizes(p) == [0] * 5
  assert all(len(a) == 4 for a in p.client_labeled)


@pytest.mark.parametrize(
  'kwargs,message',
  [
    ({'num_labels': 41}, r'--num_labels=41: .* multiple .*\(10\).* 40 or 50'),
    ({'num_labels': 5}, r'example 10 or'),
    ({'num_labels': 0}, '--num_labels=0: .*--full_labels'),
    ({'num_labels': -10}, '--num_labels=-10: must be at least 0'),
    ({'num_labels': 510}, 'class 0 has 50; set it to at most 500'),
    (
      {'num_labels': 100, 'scenario': 'labels_at_clients'},
      'for each client needs 100 examples of each class.* at most 50',
    ),
    ({'scenario': 'labels_at_sever'}, "did you mean 'labels_at_server'"),
    ({'partition': 'dirichlett'}, "did you mean 'dirichlet'"),
    ({'partition': 'dirichlet', 'alpha': 0.0}, '--alpha=0: .* greater than 0'),
    ({'partition': 'dirichlet', 'alpha': -1.0}, '--alpha=-1'),
    ({'partition': 'dirichlet', 'alpha': float('nan')}, '--alpha=nan'),
    *(
      ({**_CLIENTS, 'labeled_clients': text}, f'--labeled_clients={text}: must')
      for text in (
        *('', '0', '11', '1.0', '0.0', '-1', 'some', 'nan', '1e-1', '٣'),
        '9' * 5000,
      )
    ),
    (
      {**_CLIENTS, 'client_labels': 'owned'},
      "--client_labels=owned: .*did you mean 'own'",
    ),
    (
      {**_CLIENTS, 'client_labels': 'own', 'num_labels': 51},
      '--num_labels=51 --client_labels=own: client .* has 50 examples to label;'
      ' set it to at most 50, or lower --num_clients$',
    ),
    (
      {
        **_CLIENTS,
        'client_labels': 'own',
        'num_labels': 200,
        'partition': 'dirichlet',
      },
      'own: client .* or raise --min_client_examples',
    ),
    (
      {**_CLIENTS, 'client_labels': 'own', 'num_labels': 0},
      '--num_labels=0: must be at least 1, or',
    ),
    (
      {**_CLIENTS, 'labeled_clients': '2', 'num_labels': 250},
      '--num_clients=10: only 0',
    ),
    (
      {**_CLIENTS, 'client_label_classes': 11},
      r'--client_label_classes=11: must be at most .* \(10\), or 0',
    ),
    ({'client_label_classes': -1}, '--client_label_classes=-1: must be at le'),
    (
      {**_CLIENTS, 'client_label_classes': 3},
      '--num_labels=10: .* multiple of --client_label_classes=3.* 9 or 12',
    ),
    (
      {**_CLIENTS, 'client_label_classes': 4, 'num_labels': 0},
      '--num_labels=0: must be at least 4, or',
    ),
    (
      {**_CLIENTS, 'client_label_classes': 2, 'num_labels': 60},
      'for each client needs 60 examples of each class, .* at most 50',
    ),
    (
      {
        **_CLIENTS,
        'client_label_classes': 4,
        'num_labels': 80,
        'num_clients': 8,
      },
      'for each client needs 60 examples of some classes, .* at most 48',
    ),
    ({'num_unlabeled': -1}, '--num_unlabeled=-1: must be at least 0'),
    (
      {'num_unlabeled': 9},
      '--num_unlabeled=9: is less .* --num_clients=10; set it to at least that',
    ),
    ({'num_unlabeled': 491}, '--num_unlabeled=491: only 490 .* or to 0'),
    (
      {'num_unlabeled': 10, 'partition': 'extreme'},
      '--num_unlabeled=10 --partition=extreme: .* raise --num_unlabeled',
    ),
    (
      {'num_unlabeled': 90, 'partition': 'dirichlet'},
      '--min_client_examples=10: .* lower --num_clients, or raise --num_unlab',
    ),
    (
      {'num_unlabeled': 10, 'partition': 'shards'},
      'lower it, or --num_clients, or raise --num_unlabeled',
    ),
    (
      {
        **_CLIENTS,
        'client_labels': 'own',
        'labeled_clients': '1',
        'num_labels': 40,
        'num_unlabeled': 10,
      },
      'client . has 5 examples to label; .*, or raise --num_unlabeled',
    ),
    ({'num_clients': 0}, '--num_clients=0: must be at least 1'),
    ({'num_clients': 491}, '--num_clients=491: only 490'),
    ({'num_validation': 491}, '--num_validation=491: only 490'),
    ({'num_validation': 490}, '--num_clients=10: only 0'),
    (
      {'partition': 'dirichlet', 'min_client_examples': 50},
      '--min_client_examples=50: .* at most 49',
    ),
    (
      {'partition': 'dirichlet', 'num_clients': 40, 'alpha': 0.3},
      'Set --min_client_examples=[1-9] or less, raise --alpha',
    ),
  ],
)
def test_impossible_settings_are_refused(kwargs, message):
  with pytest.raises(UsageError, match=message):
    _build(_labels([50] * 10), **kwargs)


@pytest.mark.parametrize('partition', [names.FEDMATCH, names.EXTREME])
def test_a_class_that_has_run_out_is_named(partition):
  labels = _labels([60] * 7 + [51] + [60] * 2)
  build = lambda n, **more: _build(
    labels, partition=partition, num_labels=n, **more
  )
  assert _sizes(build(500)) == [1] * 10
  with pytest.raises(
    UsageError,
    match=f'^--partition={partition}: .*class 7 has only 0 .* --num_labels',
  ):
    build(510)
  with pytest.raises(UsageError, match='^--num_unlabeled=50 --partition='):
    build(510, num_unlabeled=50)
  # Clients that hold labels need no other examples.
  p = _build(
    _labels([10, *[13] * 9]),
    partition=partition,
    scenario=names.LABELS_AT_CLIENTS,
  )
  assert _sizes(p) == [0] * 10
  # Those of unknown class are examples, too.
  labels = np.concatenate([labels, np.full(10, -1, np.int32)])
  assert _sizes(build(510)) == [1] * 10


def test_the_minimum_that_a_refusal_names_is_feasible():
  kwargs = {'partition': 'dirichlet', 'num_clients': 40, 'alpha': 0.3}
  labels = _labels([50] * 10)
  with pytest.raises(UsageError) as e:
    _build(labels, **kwargs)
  best = int(str(e.value).split('Set --min_client_examples=')[1].split()[0])
  p = _build(labels, min_client_examples=best, **kwargs)
  assert min(_sizes(p)) == best


def test_labels_out_of_range_are_refused():
  with pytest.raises(UsageError, match='labels go from 0 to 9'):
    _build(_labels([50] * 10), 5)
  with pytest.raises(UsageError, match='integers'):
    _build(np.zeros(10))


@pytest.mark.parametrize('scenario', names.SCENARIOS)
def test_held_out_examples_are_a_share_of_each_class_of_each_client(scenario):
  labels = _labels([300, 100, 50])
  build = functools.partial(
    _build, labels, 3, num_clients=4, scenario=scenario, full_labels=False
  )
  plain, p = build(), build(client_test_fraction=0.2)
  for client, test in enumerate(p.client_test):
    # Nothing else changes: the share of a client is cut in two.
    whole = np.concatenate([p.client_unlabeled[client], test])
    np.testing.assert_array_equal(
      np.sort(whole), plain.client_unlabeled[client]
    )
    np.testing.assert_array_equal(
      p.client_labeled[client], plain.client_labeled[client]
    )
    assert len(test) == round(0.2 * len(whole))
    counts = np.bincount(labels[test], minlength=3)
    exact = 0.2 * np.bincount(labels[whole], minlength=3)
    assert np.all(np.abs(counts - exact) < 1)
  again, other = (
    build(client_test_fraction=0.2),
    build(client_test_fraction=0.2, seed=1),
  )
  assert p.has_same_examples(again) and not p.has_same_examples(plain)
  assert p.client_test[0].tolist() != other.client_test[0].tolist()


def test_each_client_of_two_holds_out_one():
  # Owners 0 to 3 have 1, 2, 3 and 8 examples; one of owner 3 is of no class.
  owners = np.repeat(np.arange(4), [1, 2, 3, 8])
  labels = np.arange(14) % 2
  labels[-1] = -1
  settings_of = functools.partial(
    partition_settings.PartitionSettings,
    2,
    0,
    2,
    partition=names.NATURAL,
    scenario=names.LABELS_AT_CLIENTS,
    client_labels=names.OWN,
    full_labels=True,
  )
  for fraction, expected in ((0.01, [0, 1, 1, 1]), (0.9, [0, 1, 2, 6])):
    p = partition_draw.build_partition(
      labels, settings_of(client_test_fraction=fraction), owners, 'abcd'
    )
    assert [len(a) for a in p.client_test] == expected
    for test, trained in zip(p.client_test, p.client_labeled, strict=True):
      assert len(test) == 0 or len(trained) > 0
  with pytest.raises(
    UsageError, match='^--client_test_fraction=0.2: no client'
  ):
    partition_draw.build_partition(
      labels[:4],
      settings_of(client_test_fraction=0.2),
      np.arange(4),
      'abcd',
    )
  with pytest.raises(UsageError, match='--client_test_fraction=1: .* 0 to 0.9'):
    settings_of(client_test_fraction=1.0)


@pytest.mark.parametrize('num', [15, 16])
def test_labels_of_clients_own_are_filled_up(num):
  labels = _labels([40] * 10)
  p = _build(
    labels,
    scenario=names.LABELS_AT_CLIENTS,
    partition=names.FEDMATCH,
    client_labels=names.OWN,
    client_test_fraction=0.5,
    num_labels=num,
  )
  # What is held out has rounded shares of its own, and may take an example
  # that the shares of the labels need.
  assert [len(a) for a in p.client_test] == [20] * 10
  assert [len(a) for a in p.client_labeled] == [num] * 10
  assert _sizes(p) == [20 - num] * 10
  assert len(np.unique(_held(p))) == 400


def test_labels_of_clients_own_are_those_that_are_left():
  p = _build(
    _labels([40] * 10),
    scenario=names.LABELS_AT_CLIENTS,
    client_labels=names.OWN,
    client_test_fraction=0.5,
  )
  assert [len(a) for a in p.client_test] == [20] * 10
  assert [len(a) for a in p.client_labeled] == [10] * 10
  assert _sizes(p) == [10] * 10


@pytest.mark.parametrize('num_labels', [0, 4])
@pytest.mark.parametrize('partition', [names.IID, names.NATURAL])
def test_a_server_with_examples_has_no_others(num_labels, partition):
  labels = _labels([50, 30, 20, 30])[:120] - 1
  server = np.arange(len(labels)) % 4 == 0
  p = partition_draw.build_partition(
    labels,
    partition_settings.PartitionSettings(
      3, 2, num_labels * 3, num_validation=3, partition=partition
    ),
    np.where(server, -1, np.arange(len(labels)) % 4 % 2),
    ('ann', 'bob'),
    server,
  )
  own = np.flatnonzero(server & (labels >= 0))
  assert (
    np.isin(p.server_labeled, own).all() and np.isin(p.validation, own).all()
  )
  assert len(p.server_labeled) == (num_labels * 3 or len(own) - 3)
  # Clients have all others, but what `iid` cannot divide.
  assert (~server).sum() - sum(_sizes(p)) in (0, 1, 2)
  assert not server[np.concatenate(p.client_unlabeled)].any()
  again = partition_lib.Partition.parse_json(p.dump_json())
  assert p.has_same_examples(again)


def test_labels_of_clients_are_none_of_the_servers():
  labels = np.arange(80) % 2
  server = np.arange(80) < 20
  p = partition_draw.build_partition(
    labels,
    partition_settings.PartitionSettings(
      2, 3, 4, names.LABELS_AT_CLIENTS, num_validation=4
    ),
    server=server,
  )
  assert not len(p.server_labeled) and server[p.validation].all()
  assert not server[np.concatenate(p.client_labeled)].any()
  assert not server[np.concatenate(p.client_unlabeled)].any()


def test_more_than_the_server_has_is_refused():
  server = np.arange(80) < 20
  for numbers in ({'num_labels': 22}, {'num_labels': 0, 'num_validation': 20}):
    settings_of = partition_settings.PartitionSettings(
      2, 3, **{'num_validation': 0, **numbers}
    )
    with pytest.raises(UsageError, match='puts 20 labelled.* at most 20 tog'):
      partition_draw.build_partition(
        np.arange(80) % 2, settings_of, server=server
      )


def test_clients_that_are_elsewhere_get_nothing():
  settings_of = partition_settings.PartitionSettings(2, 3, 4, num_validation=2)
  p = partition_draw.build_partition(
    np.arange(12) % 2, settings_of, server=np.ones(12, bool)
  )
  assert _sizes(p) == [0, 0, 0] and not p.class_counts.any()
  assert (len(p.server_labeled), len(p.validation)) == (4, 2)
  assert p.has_same_examples(partition_lib.Partition.parse_json(p.dump_json()))


def _by_client(**settings):
  """30 clients of 10 examples, a third of unknown class."""
  labels = np.where(np.arange(300) % 3, np.arange(300) % 2, -1)
  owners = np.arange(300) % 30
  owners[::50] = -1
  partition = partition_draw.build_partition(
    labels,
    partition_settings.PartitionSettings(
      2, **{'num_labels': 20, 'split_by': 'client', **settings}
    ),
    owners,
    [f'c{i}' for i in range(30)],
  )
  return partition, labels, owners


@pytest.mark.parametrize('split', ['natural', 'iid'])
def test_validation_of_whole_clients(split):
  sizes = {'num_clients': 0 if split == 'natural' else 5, 'partition': split}
  partition, labels, owners = _by_client(num_validation=50, **sizes)
  partition.check(labels)
  validated = set(owners[partition.validation].tolist())
  trained = np.concatenate([partition.labeled, *partition.client_unlabeled])
  assert len(partition.validation) == 50
  assert not validated & set(owners[trained].tolist())
  # No client is held out in vain.
  _, counts = np.unique(
    owners[(labels >= 0) & np.isin(owners, list(validated))], return_counts=True
  )
  assert counts.sum() - counts.max() < 50 <= counts.sum()
  if split == 'natural':
    assert len(partition.client_names) == 30 - len(validated)
    assert not {f'c{i}' for i in validated} & set(partition.client_names)
  # Of fewer examples, clients are some of these.
  fewer, *_ = _by_client(num_validation=20, **sizes)
  assert set(owners[fewer.validation].tolist()) <= validated
  # The file says so.
  again = partition_lib.Partition.parse_json(partition.dump_json())
  assert again.settings.split_by == 'client'


def test_validation_leaves_a_client():
  with pytest.raises(UsageError, match='^--num_validation=199 .*: 20 clients'):
    _by_client(num_validation=199, num_clients=0, partition='natural')
  settings = partition_settings.PartitionSettings(
    2, 5, 20, num_validation=9, split_by='client'
  )
  with pytest.raises(UsageError, match='does not record the clients'):
    partition_draw.build_partition(np.arange(300) % 2, settings)
