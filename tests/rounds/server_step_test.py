"""The server's step alone, by hand-made updates."""

import collections

import contexts
import handmade
import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff
import tiny_plan

from tff_fssl.algorithms import supervised
from tff_fssl.interface import base
from tff_fssl.interface import channels
from tff_fssl.interface import round_hparams
from tff_fssl.models import server_model
from tff_fssl.rounds import server_step

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


def _build(model_type, sent_type, variances=(), **optimizer):
  """(model, sent) -> the step's result, after no round."""
  hparams = round_hparams.RoundHparams(
    num_pretraining_rounds=0,
    **{f'server_optimizer{name}': value for name, value in optimizer.items()},
  )
  plan = tiny_plan.bare(supervised.Supervised(round=hparams))
  plan.networks.variances = variances
  initialize = server_step.build_initialize(plan, model_type)
  state_type = initialize.type_signature.result
  step = server_step.build_step(plan, state_type, model_type, sent_type)
  return lambda model, sent: step(initialize(), model, sent)


@pytest.fixture(
  scope='module',
  params=[
    {'_learning_rate': 1.0, '_momentum': 0.5},
    {'': 'adam', '_learning_rate': 0.1},
  ],
)
def step(request):
  """The step, whose second non-trainable weight is a variance."""
  weights_type = tff.to_type(
    server_model.ServerModel(
      (_VECTOR,), (_VECTOR, _VECTOR), tff.TensorType(np.float32)
    )
  )
  sent_type = _aggregate_type(_VECTOR, _VECTOR, _VECTOR)
  return _build(weights_type, sent_type, [1], **request.param)


def _next(step, *update):
  update = tuple(np.full([2], u, np.float32) for u in update)
  return step(_WEIGHTS, _aggregate(*update))


def test_variances_stay_what_variances_can_be(step):
  _, weights, _ = _next(step, 0.1, 2.0, 2.0)
  np.testing.assert_allclose(weights.non_trainable[0], [-1.5, -1.0])
  np.testing.assert_allclose(weights.non_trainable[1], [0.0, 0.0])


@pytest.mark.parametrize(
  'update', [(np.nan, 0, 0), (0, np.inf, 0), (0, 0, np.nan)]
)
def test_updates_that_are_not_finite_are_skipped(step, update):
  state, model, metrics = _next(step, *update)
  assert metrics['update_skipped'] == 1
  assert metrics['update_norm'] == 0.0
  assert metrics['weights_norm'] == 5.0
  for a, b in zip(
    tf.nest.flatten(model), tf.nest.flatten(_WEIGHTS), strict=True
  ):
    np.testing.assert_array_equal(a, b)
  assert state['round_num'] == 2


def test_a_finite_update_whose_result_is_not_is_skipped():
  weights_type = tff.to_type(
    server_model.ServerModel((_VECTOR,), (), tff.TensorType(np.float32))
  )
  step = _build(weights_type, _aggregate_type(_VECTOR), _learning_rate=10.0)
  weights = _WEIGHTS._replace(non_trainable=())
  huge = (np.full([2], 3e38, np.float32),)
  _, model, metrics = step(weights, _aggregate(*huge))
  assert metrics['update_skipped'] == 1
  np.testing.assert_array_equal(model.trainable[0], [3.0, 4.0])


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
  teacher = base.AuxiliaryNetwork(uploaded=True)
  algorithm = handmade.algorithm(
    uploads=lambda setup: uploads, networks=lambda: {'teacher': teacher}
  )
  found = server_step._aggregate(tiny_plan.bare(algorithm), aggregate)
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
