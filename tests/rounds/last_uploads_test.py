import numpy as np
import pytest
import tensorflow as tf

from tff_fssl import hparams
from tff_fssl.rounds import exchange
from tff_fssl.rounds import last_uploads

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
      last_uploads.read(table, 'psi', slot), [value, -value]
    )
    assert float(last_uploads.read(table, 'lowest', slot)) == value


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


def test_sizes():
  specs = {'psi': tf.TensorSpec([2_000_000], tf.float32)}
  last_uploads.check_size(specs, 25, '--slots')
  with pytest.warns(UserWarning, match='100 clients are 0.8 GB.*--slots'):
    last_uploads.check_size(specs, 100, '--slots')
  with pytest.raises(hparams.UsageError) as error:
    last_uploads.check_size(specs, 200, '--slots')
  assert '1.6 GB' in str(error.value)
  assert 'set --slots to at most 187' in str(error.value)


def test_flatten_and_back():
  tensors = [tf.constant([[1.0, 2.0]]), tf.constant(3.0), tf.constant([4.0])]
  flat = last_uploads.flatten(tensors)
  np.testing.assert_array_equal(flat, [1.0, 2.0, 3.0, 4.0])
  for a, b in zip(last_uploads.unflatten(flat, tensors), tensors, strict=True):
    np.testing.assert_array_equal(a, b)
    assert a.shape == b.shape
