"""The server's state, as the process keeps it."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf
import two_sets

from tff_fssl.algorithms import supervised
from tff_fssl.interface import round_hparams
from tff_fssl.models.weights import Weights
from tff_fssl.rounds import states as states_lib

_WEIGHTS = Weights((tf.constant([1.0, 2.0]),), (), tf.constant(0.0))


class _Server:
  """A server that has nothing to train on, in round 1."""

  round_num = tf.constant(1)

  def apply(self, weights, update):
    trainable = tuple(w - u for w, u in zip(weights.trainable, update))
    return weights._replace(trainable=trainable)

  def train(self, weights, copy=0):
    del copy
    return weights


class _Aggregate:
  """An update of 1 for each weight, of one client."""

  update = (tf.ones([2]),)
  num_reports = tf.constant(1.0)


def test_memory_becomes_sets_and_control_values():
  states = states_lib.States(two_sets.Switching())
  model = states.start(_WEIGHTS)
  assert list(model.sets) == ['teacher'] and list(model.control) == ['mode']
  state = states.state(model)
  assert float(state.memory.mode) == 1.0
  assert states.model(state) == model


@pytest.mark.parametrize('mode, sent', [('student', False), ('teacher', True)])
def test_a_set_is_sent_when_its_broadcast_says_so(mode, sent):
  states = states_lib.States(two_sets.Switching(mode=mode))
  model = states.start(_WEIGHTS)
  assert list(states.sent(model)) == ['teacher']
  assert bool(states.is_sent('teacher', model)) == sent


class _Counting(two_sets.Switching):
  """Counts rounds in `mode`, also discarded ones."""

  def after_round(self, memory, round_num):
    return memory._replace(mode=memory.mode + tf.cast(round_num, tf.float32))


@pytest.mark.parametrize('average_decay', [0.0, 0.5])
def test_a_discarded_round_changes_what_is_due_and_nothing_else(average_decay):
  hparams = round_hparams.RoundHparams(average_decay=average_decay)
  states = states_lib.States(_Counting(round=hparams))
  model = states.start(_WEIGHTS)
  after = states.discard(model, tf.constant(3))
  assert float(after.control['mode']) == 1.0 + 3.0
  assert after._replace(control=model.control) == model
  counted = states.update(model, _Aggregate(), _Server())
  # It has switched to 0 before.
  assert float(counted.control['mode']) == 0.0 + 1.0


def test_rates_that_follow_a_loss_stay_until_the_next_one():
  hparams = round_hparams.RoundHparams(learning_rate_schedule='plateau')
  states = states_lib.States(_Counting(round=hparams))
  model, factor = states.plateau.follow(states.start(_WEIGHTS), 0.5)
  assert factor is None
  rates = {n: v for n, v in model.control.items() if n != 'mode'}
  assert rates == {
    'validation_lowest': 0.5,
    'validation_remaining': 5.0,
    'validation_rate': 1.0,
  }
  for after in (
    states.update(model, _Aggregate(), _Server()),
    states.discard(model, tf.constant(3)),
  ):
    assert list(after.control) == ['mode', *rates]
    assert {n: after.control[n] for n in rates} == rates


def test_other_predictions_are_by_their_own_weights():
  states = states_lib.States(two_sets.Switching())
  model = states.start(_WEIGHTS)
  teacher = _WEIGHTS._replace(trainable=(tf.constant([8.0, 9.0]),))
  model = model.replace_sets(teacher=teacher)
  found = states.prediction.also['teacher'].weights(model)
  np.testing.assert_array_equal(found.trainable[0], [8.0, 9.0])
  np.testing.assert_array_equal(
    states.prediction.weights(model).trainable[0], [1.0, 2.0]
  )


def test_the_average_follows_the_weights_that_predict():
  algorithm = supervised.Supervised(
    round=round_hparams.RoundHparams(average_decay=0.75)
  )
  states = states_lib.States(algorithm)
  model = states.update(states.start(_WEIGHTS), _Aggregate(), _Server())
  np.testing.assert_array_equal(model.trainable[0], [0.0, 1.0])
  np.testing.assert_allclose(model.sets['average'].trainable[0], [0.75, 1.75])
  assert states.statistics_of == ('average',)
  assert not states.sent(model)
  plain = dataclasses.replace(algorithm, round=round_hparams.RoundHparams())
  assert not states_lib.States(plain).start(_WEIGHTS).sets
