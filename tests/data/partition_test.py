import json

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import numpy as np
import pytest

from tff_fssl.data import names
from tff_fssl.data import partition as partition_lib
from tff_fssl.data import partition_plot
from tff_fssl.data import partition_settings
from tff_fssl.hparams import UsageError


def _labels(counts, seed=0):
  labels = np.repeat(np.arange(len(counts)), counts)
  return np.random.default_rng(seed).permutation(labels).astype(np.int32)


def _build(labels, num_classes=10, **kwargs):
  defaults = {'num_clients': 10, 'num_labels': num_classes}
  return partition_lib.build_partition(
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


@settings(max_examples=40, deadline=None)
@given(
  counts=st.lists(st.integers(6, 60), min_size=2, max_size=6),
  num_clients=st.integers(1, 6),
  per_class=st.integers(1, 2),
  partition=st.sampled_from(names.PARTITIONS),
  alpha=st.floats(0.05, 100),
  scenario=st.sampled_from(names.SCENARIOS),
  num_validation=st.integers(0, 5),
  full_labels=st.booleans(),
  seed=st.integers(-(2**70), 2**70),
)
def test_invariants(
  counts,
  num_clients,
  per_class,
  partition,
  alpha,
  scenario,
  num_validation,
  full_labels,
  seed,
):
  labels = _labels(counts)
  at_clients = scenario == names.LABELS_AT_CLIENTS
  kwargs = {
    'num_clients': num_clients,
    'num_labels': per_class * len(counts),
    'scenario': scenario,
    'partition': partition,
    'alpha': alpha,
    'min_client_examples': 0,
    'num_validation': num_validation,
    'full_labels': full_labels,
    'seed': seed,
  }
  holders = num_clients if at_clients else 1
  room = sum(counts) - holders * per_class * len(counts) - num_validation
  if min(counts) < holders * per_class or room < num_clients:
    return
  p = _build(labels, len(counts), **kwargs)
  held = _held(p)
  assert len(np.unique(held)) == len(held)
  p.check_indices(len(labels))
  assert len(p.validation) == num_validation
  assert p.num_clients == num_clients
  rest = sum(counts) - len(p.server_labeled) - num_validation
  if at_clients:
    assert len(p.server_labeled) == 0
  else:
    assert len(p.server_labeled) == per_class * len(counts)
  totals = p.class_counts.sum(axis=1)
  if partition == names.DIRICHLET:
    assert totals.sum() == rest  # Nothing is left over.
  else:
    assert len(set(totals)) == 1
    assert 0 <= rest - totals.sum() < num_clients
  for labeled, unlabeled in zip(p.client_labeled, p.client_unlabeled):
    if full_labels:
      assert len(unlabeled) == 0
    elif at_clients:
      each = np.bincount(labels[labeled], minlength=len(counts))
      assert each.tolist() == [per_class] * len(counts)
    else:
      assert len(labeled) == 0
    assert np.all(np.diff(unlabeled) > 0)
  again = _build(labels, len(counts), **kwargs)
  np.testing.assert_array_equal(_held(again), held)
  back = partition_lib.Partition.from_json(p.to_json())
  np.testing.assert_array_equal(_held(back), held)
  assert back.settings == p.settings == again.settings
  np.testing.assert_array_equal(back.class_counts, p.class_counts)


def test_seeds_differ_but_only_where_they_should():
  labels = _labels([500] * 10)
  a, b = _build(labels, seed=0), _build(labels, seed=1)
  assert a.server_labeled.tolist() != b.server_labeled.tolist()
  # Neither the partition nor validation changes which examples are labelled.
  c = _build(labels, seed=0, partition='dirichlet', alpha=1, num_validation=300)
  np.testing.assert_array_equal(a.server_labeled, c.server_labeled)


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
  p.check_indices(500)
  assert json.loads(p.to_json())['settings']['labeled_clients'] == text


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


@pytest.mark.parametrize('partition', names.PARTITIONS)
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
  assert partition_lib.Partition.from_json(p.to_json()).settings == p.settings
  other = _build(
    labels,
    5,
    **settings | {'seed': 5},
    labeled_clients='4',
    client_labels='own',
    num_labels=7,
  )
  assert other.to_json() != p.to_json()


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
      '--num_labels=51 --client_labels=own: client .* has 50 examples; set it'
      ' to at most 50, or lower --num_clients$',
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


def test_json_file_and_its_version(tmp_path):
  p = _build(_labels([50] * 10))
  p.save_json(tmp_path / 'deep' / 'partition.json')
  assert [f.name for f in (tmp_path / 'deep').iterdir()] == ['partition.json']
  text = (tmp_path / 'deep' / 'partition.json').read_text()
  assert text == p.to_json()
  fields = json.loads(text)
  assert fields['settings']['seed'] == 0
  assert fields['settings']['num_examples'] == 500
  with pytest.raises(UsageError, match='version is 99'):
    partition_lib.Partition.from_json(json.dumps(fields | {'version': 99}))
  # Older versions called it `split`.
  fields['settings']['split'] = fields['settings'].pop('partition')
  older = partition_lib.Partition.from_json(json.dumps(fields))
  assert older.settings == p.settings and older.has_same_examples(p)
  assert not _build(_labels([50] * 10), seed=1).has_same_examples(p)
  for bad in ('{"a": 1}', text[:-9], '[]'):
    with pytest.raises(UsageError, match='not a partition'):
      partition_lib.Partition.from_json(bad)


def test_foreign_indices_are_refused():
  p = _build(_labels([50] * 10))
  with pytest.raises(UsageError, match='made for other data'):
    p.check_indices(400)


@pytest.mark.parametrize('num_clients', [3, 120, 1_500])
def test_plot(tmp_path, num_clients):
  p = _build(_labels([200] * 10), num_clients=num_clients)
  partition_plot.plot(p, tmp_path / 'partition.png')
  assert (tmp_path / 'partition.png').read_bytes()[:4] == b'\x89PNG'


def test_many_clients_are_drawn_by_means():
  counts = np.array([[1, 0], [3, 2], [5, 4], [7, 6], [9, 8]])
  np.testing.assert_array_equal(
    partition_plot._means(counts, 2), [[2, 1], [6, 5], [9, 8]]
  )
  np.testing.assert_array_equal(partition_plot._means(counts[:, 0], 3), [3, 8])
