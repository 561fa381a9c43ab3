import numpy as np
import pytest
import tensorflow as tf

from tff_fssl import hparams
from tff_fssl.algorithms.fedmatch import upload_cache
from tff_fssl.interface import exchange

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
    slot, known = upload_cache.find(table, tf.constant(client_id))
    assert bool(known)
    value = client_id + offset
    np.testing.assert_array_equal(
      upload_cache.read(table, 'psi', slot, known), [value, -value]
    )
    assert float(upload_cache.read(table, 'lowest', slot, known)) == value


def test_who_has_not_taken_part_for_longest_is_forgotten():
  table = upload_cache.initialize(_SPECS, 3)
  table = upload_cache.write(table, _rows([7, 2]), tf.constant(1))
  _check(table, {2: 0.0, 7: 0.0})
  table = upload_cache.write(table, _rows([5, 7], 0.5), tf.constant(2))
  _check(table, {2: 0.0, 5: 0.5, 7: 0.5})
  table = upload_cache.write(table, _rows([9], 1.0), tf.constant(3))
  assert _remembered(table) == [5, 7, 9]
  _check(table, {5: 0.5, 7: 0.5, 9: 1.0})
  table = upload_cache.write(table, _rows([1, 2], 2.0), tf.constant(4))
  assert _remembered(table) == [1, 2, 9]
  _check(table, {1: 2.0, 2: 2.0, 9: 1.0})


def test_a_round_of_more_clients_than_slots():
  table = upload_cache.initialize(_SPECS, 2)
  table = upload_cache.write(table, _rows([4]), tf.constant(1))
  table = upload_cache.write(table, _rows([8, 3, 4, 1], 1.0), tf.constant(2))
  assert _remembered(table) == [1, 4]
  _check(table, {1: 1.0, 4: 1.0})


def test_the_order_of_rows_makes_no_difference():
  rng = np.random.default_rng(0)
  tables = [upload_cache.initialize(_SPECS, 4) for _ in range(2)]
  for round_num in range(1, 12):
    ids = rng.choice(9, 3, replace=False)
    tables = [
      upload_cache.write(t, _rows(i, round_num), tf.constant(round_num))
      for t, i in zip(tables, (ids, ids[::-1]))
    ]
    for a, b in zip(*map(tf.nest.flatten, tables), strict=True):
      np.testing.assert_array_equal(a, b)
    _check(tables[0], dict.fromkeys(ids.tolist(), round_num))


def test_nobody_writes_and_nobody_is_found():
  table = upload_cache.initialize(_SPECS, 2)
  after = upload_cache.write(table, _rows([]), tf.constant(1))
  for a, b in zip(tf.nest.flatten(table), tf.nest.flatten(after), strict=True):
    np.testing.assert_array_equal(a, b)
  for client_id in (-1, 0, 2**31 - 1):
    assert not bool(upload_cache.find(table, tf.constant(client_id))[1])


_FLAGS = ('--slots', '--where')


def test_where_values_are_kept():
  specs = {'psi': tf.TensorSpec([2_000_000], tf.float32)}
  for num_slots, where, expected in (
    (25, upload_cache.AUTO, False),
    (26, upload_cache.AUTO, True),
    (1000, upload_cache.AUTO, True),
    (1, upload_cache.FILES, True),
    (25, upload_cache.STATE, False),
  ):
    outside = upload_cache.is_outside(specs, num_slots, where, _FLAGS)
    assert outside == expected, (num_slots, where)
  assert not upload_cache.is_outside({}, 5, upload_cache.FILES, _FLAGS)
  with pytest.warns(UserWarning, match='100 clients are 0.8 GB.*--where=files'):
    upload_cache.is_outside(specs, 100, upload_cache.STATE, _FLAGS)
  with pytest.raises(hparams.UsageError) as error:
    upload_cache.is_outside(specs, 200, upload_cache.STATE, _FLAGS)
  message = str(error.value)
  assert '1.6 GB' in message
  assert 'give --where=files, or --slots of at most 187' in message


class _Disk:
  """Rows outside of a table, in memory."""

  def __init__(self, num_slots):
    table = upload_cache.initialize(_SPECS, num_slots, {'psi'})
    self.table = tf.nest.map_structure(lambda t: t.numpy(), table)
    self._rows = {}

  def bring(self, ids):
    slots = [int(upload_cache.find(self.table, i)[0]) for i in ids]
    rows = [self._rows[e] for e in upload_cache.entries(self.table, slots)]
    return upload_cache.add_rows(self.table, {'psi': slots}, zip(slots, rows))

  def write(self, ids, round_num, offset=0.0):
    written = upload_cache.write(
      self.bring([]), _rows(ids, offset), tf.constant(round_num)
    )
    written = tf.nest.map_structure(lambda t: t.numpy(), written)
    self.table, taken = upload_cache.drop_rows(written)
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
  slot, known = upload_cache.find(disk.table, tf.constant(2))
  for table in (disk.bring([]), disk.bring([5])):
    np.testing.assert_array_equal(
      upload_cache.read(table, 'psi', slot, known), [0.0, 0.0]
    )


@pytest.mark.parametrize('brought', [[], [5]])
def test_values_that_were_not_brought_are_no_zeros(brought):
  disk = _Disk(3)
  disk.write([7, 5], 1)
  table = disk.bring(brought)
  slots = tf.stack([upload_cache.find(table, i)[0] for i in (5, 7)])
  for read in (upload_cache.read, tf.function(upload_cache.read)):
    with pytest.raises(
      tf.errors.InvalidArgumentError, match='have not been brought'
    ):
      read(table, 'psi', slots, tf.constant([True, True]))
