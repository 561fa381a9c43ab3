import numpy as np
import pytest

from tff_fssl.data import partition_draw
from tff_fssl.data import partition_settings
from tff_fssl.hparams import UsageError

_NAMES = ('ann', 'bob', 'cem', 'nobody here', 'eva')
_OWNERS = np.repeat([0, 1, 2, 4, -1], [40, 10, 30, 80, 40])
_LABELS = np.arange(200) % 4


def _build(owners=_OWNERS, labels=_LABELS, **kwargs):
  defaults = {'num_clients': 0, 'num_labels': 4, 'partition': 'natural'}
  settings = partition_settings.PartitionSettings(4, **(defaults | kwargs))
  return partition_draw.build_partition(labels, settings, owners, _NAMES)


def test_all_that_have_examples_are_clients():
  p = _build()
  assert p.client_names == ('ann', 'bob', 'cem', 'eva')
  assert p.settings.num_clients == p.num_clients == 4
  for client, owner in enumerate((0, 1, 2, 4)):
    mine = np.flatnonzero(_OWNERS == owner)
    wanted = np.setdiff1d(mine, p.server_labeled)
    np.testing.assert_array_equal(p.client_unlabeled[client], wanted)
  # The server's labels are those of any partition.
  other = _build(partition='iid', num_clients=3)
  np.testing.assert_array_equal(p.server_labeled, other.server_labeled)


def test_fewer_clients_are_drawn_and_more_include_them():
  drawn = [_build(num_clients=n, seed=1).client_names for n in (1, 2, 3, 4)]
  assert [len(n) for n in drawn] == [1, 2, 3, 4]
  assert all(set(a) < set(b) for a, b in zip(drawn, drawn[1:]))
  assert len({_build(num_clients=2, seed=s).client_names for s in range(9)}) > 2
  # What the others have is nobody's.
  p = _build(num_clients=1, seed=1)
  owner = _NAMES.index(p.client_names[0])
  assert set(_OWNERS[p.client_unlabeled[0]]) == {owner}


def test_clients_label_their_own_and_keep_the_unknown():
  labels = _LABELS.copy()
  labels[::3] = -1
  p = _build(
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
    _build(
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
  'kwargs, message',
  [
    ({'owners': None}, 'natural: the data set does not say whose'),
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
      'client 1 has 10 examples to label; set it to at most 10',
    ),
  ],
)
def test_mistakes(kwargs, message):
  with pytest.raises(UsageError, match=message):
    _build(**kwargs)
