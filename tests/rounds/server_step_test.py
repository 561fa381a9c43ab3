"""The server's step alone, by hand-made updates."""

import collections

import contexts
import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tff_fssl.algorithms import supervised
from tff_fssl.interface import channels
from tff_fssl.interface import round_hparams
from tff_fssl.models import server_model
from tff_fssl.rounds import server_step
from tff_fssl.rounds import states

_STATES = states.States(supervised.Supervised())
_VECTOR = tff.TensorType(np.float32, [2])
_WEIGHTS = server_model.ServerModel(
  (np.array([3.0, 4.0], np.float32),),
  (np.array([0.5, 1.0], np.float32), np.array([0.5, 1.0], np.float32)),
  np.float32(1.0),
)


_context = contexts.of_each_module()


def _aggregate(*update, uploads=(), num_reports=np.float32(1.0)):
  return collections.OrderedDict(
    update=collections.OrderedDict(model=update),
    uploads=collections.OrderedDict(uploads),
    num_reports=num_reports,
  )


def _aggregate_type(*update):
  return tff.to_type(_aggregate(*update, num_reports=np.float32))


@pytest.fixture(scope='module', params=['sgd', 'adam'])
def step(request):
  """The step, whose second non-trainable weight is a variance."""
  optimizer = {
    'sgd': tff.learning.optimizers.build_sgdm(1.0, momentum=0.5),
    'adam': tff.learning.optimizers.build_adam(0.1),
  }[request.param]
  weights_type = tff.to_type(
    server_model.ServerModel(
      (_VECTOR,), (_VECTOR, _VECTOR), tff.TensorType(np.float32)
    )
  )
  return server_step.build_server_step(
    weights_type,
    _aggregate_type(_VECTOR, _VECTOR, _VECTOR),
    optimizer,
    first_round=1,
    states=_STATES,
    non_negative=[1],
  )


def _next(step, *update):
  update = tuple(np.full([2], u, np.float32) for u in update)
  return step.next(step.initialize(), _WEIGHTS, _aggregate(*update))


def test_variances_stay_what_variances_can_be(step):
  weights = _next(step, 0.1, 2.0, 2.0).result
  np.testing.assert_allclose(weights.non_trainable[0], [-1.5, -1.0])
  np.testing.assert_allclose(weights.non_trainable[1], [0.0, 0.0])


@pytest.mark.parametrize(
  'update', [(np.nan, 0, 0), (0, np.inf, 0), (0, 0, np.nan)]
)
def test_updates_that_are_not_finite_are_skipped(step, update):
  output = _next(step, *update)
  assert output.measurements['update_skipped'] == 1
  assert output.measurements['update_norm'] == 0.0
  assert output.measurements['weights_norm'] == 5.0
  for a, b in zip(
    tf.nest.flatten(output.result), tf.nest.flatten(_WEIGHTS), strict=True
  ):
    np.testing.assert_array_equal(a, b)
  assert output.state['round_num'] == 2


def test_a_finite_update_whose_result_is_not_is_skipped():
  weights_type = tff.to_type(
    server_model.ServerModel((_VECTOR,), (), tff.TensorType(np.float32))
  )
  step = server_step.build_server_step(
    weights_type,
    _aggregate_type(_VECTOR),
    tff.learning.optimizers.build_sgdm(10.0),
    first_round=1,
    states=_STATES,
  )
  weights = _WEIGHTS._replace(non_trainable=())
  huge = (np.full([2], 3e38, np.float32),)
  output = step.next(step.initialize(), weights, _aggregate(*huge))
  assert output.measurements['update_skipped'] == 1
  np.testing.assert_array_equal(output.result.trainable[0], [3.0, 4.0])


def test_all_that_clients_send_has_a_name():
  uploads = {
    'report': channels.Upload(0.0, 1.0),
    'summed': channels.Upload(how=channels.SUM, spec=tf.TensorSpec([2])),
    'rows': channels.Upload(how=channels.ROWS, spec=tf.TensorSpec([2])),
  }
  vector = tf.constant([1.0, 2.0])
  aggregate = collections.OrderedDict(
    _aggregate(vector, uploads={'report': 0.5}),
    rows={
      'is_valid': tf.constant([True, False, True]),
      'values': {'rows': tf.eye(3), 'of_exchange': tf.eye(3)},
    },
  )
  aggregate['update'].update(summed=3 * vector, teacher=[2 * vector])
  found = server_step._aggregated(aggregate, ['teacher'], uploads, tuple)
  assert set(found.values) == {'teacher', *uploads}
  assert found['report'] == 0.5
  np.testing.assert_array_equal(found['teacher'][0], [2.0, 4.0])
  np.testing.assert_array_equal(found['summed'], [3.0, 6.0])
  np.testing.assert_array_equal(found['rows'], [[1, 0, 0], [0, 0, 1]])
  with pytest.raises(KeyError, match='of_exchange'):
    found['of_exchange']  # pylint: disable=pointless-statement


@pytest.mark.parametrize('name', ['sgd', 'adam', 'yogi'])
def test_the_servers_optimizer_moves_against_the_update(name):
  optimizer = server_step.build_optimizer(
    round_hparams.RoundHparams(server_optimizer=name)
  )
  weights, update = (tf.constant([1.0]),), (tf.constant([0.5]),)
  state = optimizer.initialize((tf.TensorSpec([1]),))
  _, after = optimizer.next(state, weights, update)
  assert float(after[0][0]) < 1.0
