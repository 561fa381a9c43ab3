"""What the server sends, and clients' rows on their way to it."""

import collections

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff
import tiny_plan

from tff_fssl.aggregators import collecting
from tff_fssl.interface import exchange
from tff_fssl.interface import groups as groups_lib
from tff_fssl.models import server_model
from tff_fssl.models.weights import Weights
from tff_fssl.rounds import messages

_NUM_CLIENTS = 40


def _accept(table, rows, model, round_num):
  """Keeps what each client sent, and where its row stood."""
  del model, round_num
  where = rows.client_id[:, tf.newaxis]
  count = tf.shape(rows.client_id)[0]
  return collections.OrderedDict(
    value=tf.tensor_scatter_nd_update(table['value'], where, rows.values['v']),
    position=tf.tensor_scatter_nd_update(
      table['position'], where, tf.range(count)
    ),
  )


_KEEPING = exchange.Exchange(
  initialize=lambda: collections.OrderedDict(
    value=tf.zeros([_NUM_CLIENTS, 2]),
    position=tf.fill([_NUM_CLIENTS], -1),
  ),
  message=lambda table, model, round_num: (),
  receive=lambda message, client_id: {},
  row_specs={'v': tf.TensorSpec([2], tf.float32)},
  accept=_accept,
  num_clients=_NUM_CLIENTS,
)


@pytest.fixture(scope='module')
def end_round():
  """(rows of a cohort, counts) -> (the table after a first round, metrics)."""
  model = server_model.ServerModel((), (), tf.constant(0.0))
  model_type = tff.types.tensorflow_to_type(
    tf.nest.map_structure(tf.type_spec_from_value, model)
  )

  @tff.tensorflow.computation
  def initialize():
    return collections.OrderedDict(
      table=_KEEPING.initialize(), round_num=tf.constant(1)
    )

  state_type = initialize.type_signature.result
  row_type = messages.row_type(_KEEPING.row_specs)
  collect, rows_type = collecting.build_collect(row_type)
  accept = messages.build_accept(_KEEPING, state_type, rows_type, model_type)

  @tff.federated_computation(
    tff.FederatedType(state_type, tff.SERVER),
    tff.FederatedType(row_type, tff.CLIENTS),
    tff.FederatedType(model_type, tff.SERVER),
    tff.FederatedType(np.bool_, tff.SERVER),
  )
  def comp(state, rows, model, counts):
    return tff.federated_map(accept, (state, collect(rows), model, counts))

  def call(rows, counts=True):
    state, metrics = comp(initialize(), rows, model, counts)
    assert state['round_num'] == 2
    return state['table'], metrics

  return call


def _row(client_id, is_valid=True):
  value = np.array([client_id, -client_id], np.float32)
  return collections.OrderedDict(
    is_valid=is_valid,
    client_id=np.int32(client_id),
    values=collections.OrderedDict(v=value),
  )


# Around multiples of the number of rows that are copied at once.
@pytest.mark.parametrize('count', [0, 1, 9, 10, 11, 20, 23])
def test_all_rows_arrive_in_the_cohorts_order(end_round, count):
  ids = [(7 * i + 3) % _NUM_CLIENTS for i in range(count)]
  table, metrics = end_round([_row(i) for i in ids])
  expected = np.full(_NUM_CLIENTS, -1)
  expected[ids] = range(count)
  np.testing.assert_array_equal(table['position'], expected)
  for client_id in ids:
    np.testing.assert_array_equal(
      table['value'][client_id], [client_id, -client_id]
    )
  assert metrics['num_rows'] == count
  assert metrics['num_disputed_rows'] == 0


def test_invalid_rows_and_disputed_ids_are_left_out(end_round):
  rows = [_row(1), _row(2), _row(3, is_valid=False), _row(2), _row(4)]
  # An invalid row disputes nothing.
  rows.append(_row(4, is_valid=False))
  table, metrics = end_round(rows)
  assert np.flatnonzero(table['position'] >= 0).tolist() == [1, 4]
  assert table['position'][[1, 4]].tolist() == [0, 1]
  assert (metrics['num_rows'], metrics['num_disputed_rows']) == (2, 2)


def test_a_round_that_does_not_count_has_no_rows(end_round):
  table, metrics = end_round([_row(1), _row(2), _row(2)], counts=False)
  assert np.all(table['position'] == -1)
  assert (metrics['num_rows'], metrics['num_disputed_rows']) == (0, 0)


def test_a_client_of_a_group_receives_its_row():
  weights = Weights(
    (tf.constant([1.0, 2.0]),), (tf.constant(5.0),), tf.constant(1.0)
  )
  rows = tf.nest.map_structure(lambda t: tf.stack([t, 10 * t]), weights)
  groups = groups_lib.Groups(
    2, 2, lambda model: rows, lambda slot, seed: groups_lib.Place(slot, slot)
  )
  plan = tiny_plan.bare(groups=groups)
  model = server_model.ServerModel(*weights)
  message = messages.make_message(plan, (), model, tf.constant(1))
  data = {'slot': tf.constant(1), 'seed': tf.zeros([2], tf.int32)}
  received = messages.read_message(plan, message, data)
  np.testing.assert_array_equal(received.weights.trainable[0], [10.0, 20.0])
  assert float(received.weights.statistics_count) == 10.0
