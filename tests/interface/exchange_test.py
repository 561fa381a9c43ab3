"""The table of clients, as an algorithm declares it."""

import numpy as np
import tensorflow as tf

from tff_fssl.interface import exchange


def _counting(**changes):
  """Counts the rows of each of three clients, and tells each its count."""
  counting = exchange.Exchange(
    initialize=lambda: tf.zeros([3], tf.int32),
    message=lambda table, model, round_num: table + round_num,
    receive=lambda message, client_id: {'count': message[client_id]},
    row_specs={'one': tf.TensorSpec([], tf.int32)},
    accept=lambda table, rows, model, round_num: tf.tensor_scatter_nd_add(
      table, rows.client_id[:, None], rows.values['one']
    ),
    num_clients=3,
  )
  return counting._replace(**changes)


def test_by_default_all_travels_and_nothing_more_is_checked():
  table = _counting()
  assert not (table.is_clients_own or table.not_counted)
  assert table.is_possible is None and table.outside is None


def test_a_row_goes_to_its_client():
  table = _counting()
  rows = exchange.Rows(tf.constant([2, 0]), {'one': tf.constant([5, 1])})
  kept = table.accept(table.initialize(), rows, None, tf.constant(1))
  np.testing.assert_array_equal(kept, [1, 0, 5])
  message = table.message(kept, None, tf.constant(10))
  assert table.receive(message, tf.constant(2))['count'] == 15


def test_rows_outside_are_brought_back():
  files = {}

  def take(table, write):
    for client_id, value in enumerate(table):
      write(client_id, 1, {'one': value})
    return np.zeros_like(table)

  outside = exchange.Outside(
    bring=lambda table, ids, round_num, read: tf.constant(
      [int(read(i, round_num)['one']) if i in ids else 0 for i in range(3)]
    ),
    take=take,
  )
  left = outside.take(
    np.int32([7, 8, 9]),
    lambda client_id, round_num, row: files.update(
      {(client_id, round_num): row}
    ),
  )
  assert not left.any() and exchange.MAX_TABLE_BYTES < 2**31
  brought = outside.bring(left, [2], 1, lambda *key: files[key])
  np.testing.assert_array_equal(brought, [0, 0, 9])
