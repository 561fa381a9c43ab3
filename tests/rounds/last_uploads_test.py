import numpy as np
import pytest
import tensorflow as tf

from tff_fssl import hparams
from tff_fssl.rounds import exchange
from tff_fssl.rounds import last_uploads
from tff_fssl.semisup import names

_SPECS = {
  'psi': tf.TensorSpec([2], tf.float32),
  'lowest': tf.TensorSpec([], tf.float32),
}


def _rows(ids, offset=0.0):
  values = np.array(ids, np.float32) + offset
  return exchange.Rows(
    tf.constant(ids, tf.int32),
    {
      'psi': tf.constant(np.stack([values, -values], 1)),
      'lowest': tf.constant(values),
    },
  )


def _remembered(table):
  return sorted(int(i) for i in table['owner'] if i >= 0)


def _check(table, offsets):
  """Each remembered client has what it sent last."""
  for client_id, offset in offsets.items():
    slot, known = last_uploads.find(table, tf.constant(client_id))
    assert bool(known)
    value = client_id + offset
    np.testing.assert_array_equal(
      last_uploads.read(table, 'psi', slot, known), [value, -value]
    )
    assert float(last_uploads.read(table, 'lowest', slot, known)) == value


def test_who_has_not_taken_part_for_longest_is_forgotten():
  table = last_uploads.initialize(_SPECS, 3)
  table = last_uploads.write(table, _rows([7, 2]), tf.constant(1))
  _check(table, {2: 0.0, 7: 0.0})
  table = last_uploads.write(table, _rows([5, 7], 0.5), tf.constant(2))
  _check(table, {2: 0.0, 5: 0.5, 7: 0.5})
  table = last_uploads.write(table, _rows([9], 1.0), tf.constant(3))
  assert _remembered(table) == [5, 7, 9]
  _check(table, {5: 0.5, 7: 0.5, 9: 1.0})
  table = last_uploads.write(table, _rows([1, 2], 2.0), tf.constant(4))
  assert _remembered(table) == [1, 2, 9]
  _check(table, {1: 2.0, 2: 2.0, 9: 1.0})


def test_a_round_of_more_clients_than_slots():
  table = last_uploads.initialize(_SPECS, 2)
  table = last_uploads.write(table, _rows([4]), tf.constant(1))
  table = last_uploads.write(table, _rows([8, 3, 4, 1], 1.0), tf.constant(2))
  assert _remembered(table) == [1, 4]
  _check(table, {1: 1.0, 4: 1.0})


def test_the_order_of_rows_makes_no_difference():
  rng = np.random.default_rng(0)
  tables = [last_uploads.initialize(_SPECS, 4) for _ in range(2)]
  for round_num in range(1, 12):
    ids = rng.choice(9, 3, replace=False)
    tables = [
      last_uploads.write(t, _rows(i, round_num), tf.constant(round_num))
      for t, i in zip(tables, (ids, ids[::-1]))
    ]
    for a, b in zip(*map(tf.nest.flatten, tables), strict=True):
      np.testing.assert_array_equal(a, b)
    _check(tables[0], dict.fromkeys(ids.tolist(), round_num))


def test_nobody_writes_and_nobody_is_found():
  table = last_uploads.initialize(_SPECS, 2)
  after = last_uploads.write(table, _rows([]), tf.constant(1))
  for a, b in zip(tf.nest.flatten(table), tf.nest.flatten(after), strict=True):
    np.testing.assert_array_equal(a, b)
  for client_id in (-1, 0, 2**31 - 1):
    assert not bool(last_uploads.find(table, tf.constant(client_id))[1])


_FLAGS = ('--slots', '--where')


def test_where_values_are_kept():
  specs = {'psi': tf.TensorSpec([2_000_000], tf.float32)}
  for num_slots, where, expected in (
    (25, names.AUTO, False),
    (26, names.AUTO, True),
    (1000, names.AUTO, True),
    (1, names.FILES, True),
    (25, names.STATE, False),
  ):
    outside = last_uploads.is_outside(specs, num_slots, where, _FLAGS)
    assert outside == expected, (num_slots, where)
  assert not last_uploads.is_outside({}, 5, names.FILES, _FLAGS)
  with pytest.warns(UserWarning, match='100 clients are 0.8 GB.*--where=files'):
    last_uploads.is_outside(specs, 100, names.STATE, _FLAGS)
  with pytest.raises(hparams.UsageError) as error:
    last_uploads.is_outside(specs, 200, names.STATE, _FLAGS)
  message = str(error.value)
  assert '1.6 GB' in message
  assert 'give --where=files, or --slots of at most 187' in message


class _Disk:
  """Rows outside of a table, in memory."""

  def __init__(self, num_slots):
    table = last_uploads.initialize(_SPECS, num_slots, {'psi'})
    self.table = tf.nest.map_structure(lambda t: t.numpy(), table)
    self._rows = {}

  def bring(self, ids):
    slots = [int(last_uploads.find(self.table, i)[0]) for i in ids]
    rows = [self._rows[e] for e in last_uploads.entries(self.table, slots)]
    return last_uploads.with_rows(self.table, {'psi': slots}, zip(slots, rows))

  def write(self, ids, round_num, offset=0.0):
    written = last_uploads.write(
      self.bring([]), _rows(ids, offset), tf.constant(round_num)
    )
    written = tf.nest.map_structure(lambda t: t.numpy(), written)
    self.table, taken = last_uploads.without_rows(written)
    self._rows.update(taken)


def test_values_outside_of_the_table():
  disk = _Disk(3)
  disk.write([7, 2], 1)
  disk.write([5, 7], 2, 0.5)
  disk.write([9], 3, 1.0)  # Client 2 is forgotten.
  assert _remembered(disk.table) == [5, 7, 9]
  assert disk.table['window']['psi']['values'].shape == (0, 2)
  _check(disk.bring([9, 5, 7]), {5: 0.5, 7: 0.5, 9: 1.0})
  _check(disk.bring([7]), {7: 0.5})
  # Who is not known needs nothing.
  slot, known = last_uploads.find(disk.table, tf.constant(2))
  for table in (disk.bring([]), disk.bring([5])):
    np.testing.assert_array_equal(
      last_uploads.read(table, 'psi', slot, known), [0.0, 0.0]
    )


@pytest.mark.parametrize('brought', [[], [5]])
def test_values_that_were_not_brought_are_no_zeros(brought):
  disk = _Disk(3)
  disk.write([7, 5], 1)
  table = disk.bring(brought)
  slots = tf.stack([last_uploads.find(table, i)[0] for i in (5, 7)])
  for read in (last_uploads.read, tf.function(last_uploads.read)):
    with pytest.raises(
      tf.errors.InvalidArgumentError, match='have not been brought'
    ):
      read(table, 'psi', slots, tf.constant([True, True]))
