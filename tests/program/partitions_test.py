import dataclasses

import numpy as np
import pytest

from tff_fssl.data import partition as partition_lib
from tff_fssl.data import partition_draw
from tff_fssl.data import partition_settings
from tff_fssl.hparams import UsageError
from tff_fssl.program import partitions

_LABELS = np.arange(400) % 4


def _build(labels=_LABELS, **kwargs):
  defaults = {'num_clients': 4, 'num_labels': 8}
  settings = partition_settings.PartitionSettings(4, **(defaults | kwargs))
  return partition_draw.build_partition(
    labels, settings, np.arange(len(labels)) // 100, tuple('abcd')
  )


def test_unevenness():
  p = _build()
  for counts, distance in (
    ([[3, 3], [5, 5]], 0),
    ([[2, 0], [0, 2]], 0.5),
    # All: 1/4 and 3/4; clients are off by 1/4, 3/4 and 1/4.
    ([[0, 8], [4, 0], [0, 4]], 5 / 12),
    ([[2, 0], [0, 2], [0, 0]], 0.5),  # Nothing is known of the last one.
  ):
    of = dataclasses.replace(p, class_counts=np.array(counts))
    assert partitions.unevenness(of)[0] == pytest.approx(distance)
  most = dataclasses.replace(p, class_counts=np.array([[3, 0], *[[0, 3]] * 3]))
  assert partitions.unevenness(most) == pytest.approx((0.375, 0.375))
  nothing = dataclasses.replace(p, class_counts=np.zeros([3, 2], np.int64))
  assert partitions.unevenness(nothing) == (0, 0)


def test_description():
  rows = partitions.describe(_build(num_validation=20, seed=3))
  assert rows['partition'] == 'IID, seed 3'
  assert rows['examples'] == (
    '400: 8 labelled at the server, 20 for validation, 372 at clients'
  )
  assert rows['clients'] == '4, with 93 examples'
  assert rows['classes'] == '4 of 4 at a client'
  assert 'names' not in rows and 'labels' not in rows
  few = _build(
    scenario='labels_at_clients', client_label_classes=2, num_unlabeled=100
  )
  rows = partitions.describe(few)
  assert rows['examples'] == '400: 132 at clients, 268 not used'
  assert rows['labels'] == '8 at 4 of 4 clients, of 2 classes each'
  labels = _LABELS.copy()
  labels[300:] = -1
  rows = partitions.describe(
    _build(
      labels,
      partition='natural',
      scenario='labels_at_clients',
      client_labels='own',
      labeled_clients='2',
      num_clients=3,
      num_labels=5,
      label_noise=0.2,
      seed=1,
    )
  )
  assert rows['names'] == 'a, b, d'
  assert rows['examples'] == (
    '400: 300 at clients, 100 of them of unknown class, 100 not used'
  )
  assert rows['labels'] == '5 at 2 of 3 clients'
  assert rows['wrong labels'] == '2 of 10'
  assert rows['classes'] == '0 to 4 (median 4) of 4 at a client'


def test_comparison():
  p = _build(label_noise=0.25)
  same = partition_lib.Partition.parse_json(p.dump_json())
  assert list(partitions.compare(p, same)) == ['differences']
  other = _build(num_clients=5, label_noise=0.25)
  rows = partitions.compare(p, other)
  assert rows['settings'] == 'num_clients 4 / 5'
  assert rows['labelled'] == 'the same 8 examples'
  assert rows['wrong labels'] == 'the same 2 examples'
  assert rows['validation'] == 'none'
  # 20, 40, 60 and 78 do not come to the client of the same number; the second
  # partition has no use for 2.
  assert rows['moved'].startswith('200 of 400 examples')
  server = partitions._holders(p) == 0
  np.testing.assert_array_equal(np.flatnonzero(server), p.server_labeled)
  rows = partitions.compare(p, _build(seed=1))
  assert rows['settings'] == 'label_noise 0.25 / 0.0, seed 0 / 1'
  assert rows['labelled'].startswith('8 / 8 examples, ')
  with pytest.raises(UsageError, match='400 examples, the other of 200'):
    partitions.compare(p, _build(_LABELS[:200]))


def test_held_out_examples():
  p = _build(client_test_fraction=0.25)
  rows = partitions.describe(p)
  count = sum(map(len, p.client_test))
  assert f', {count} held out at clients' in rows['examples']
  assert rows['held out'] == '24 at a client, for evaluation'
  moved = partitions.compare(p, _build())['moved']
  assert moved.startswith(f'{count} of 400 examples')
