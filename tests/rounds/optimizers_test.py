"""Optimizers of clients and server."""

import numpy as np
import pytest
import tensorflow as tf
import tiny_task

from tff_fssl.client import optimizer as optimizer_lib
from tff_fssl.interface.round_hparams import RoundHparams
from tff_fssl.rounds import optimizers


def test_clients_use_the_servers_sgd_unless_told_otherwise():
  hparams = RoundHparams(momentum=0.5, nesterov=False, weight_decay=0.1)
  assert optimizers.client_optimizer(hparams) == optimizers.sgd(hparams)
  assert optimizers.sgd(hparams).momentum == 0.5
  rmsprop = optimizers.client_optimizer(
    RoundHparams(client_optimizer='rmsprop', max_gradient_norm=2.0)
  )
  assert isinstance(rmsprop, optimizer_lib.RmsProp)
  assert rmsprop.max_gradient_norm == 2.0
  adam = optimizers.client_optimizer(
    RoundHparams(client_optimizer='adam', weight_decay=0.2)
  )
  assert isinstance(adam, optimizer_lib.Adam)
  assert adam.weight_decay == 0.2


def test_the_learning_rate_starts_from_its_initial_value():
  hparams = RoundHparams(learning_rate_schedule='cosine', schedule_rounds=10)
  first, last = (
    optimizers.learning_rate(hparams, 0.3, tf.constant(n), {}) for n in (1, 10)
  )
  assert float(first) == pytest.approx(0.3)
  assert float(last) < 0.1


@pytest.mark.parametrize('scenario', ['labels_at_server', 'labels_at_clients'])
def test_a_plateau_is_a_lower_rate_of_all_who_train(scenario):
  settings = {'learning_rate_schedule': 'plateau', 'schedule_divisor': 4.0}
  settings |= {'schedule_patience': 2, 'momentum': 0.0}

  def train(losses, **more):
    process = tiny_task.build(
      'fixmatch', scenario, norm='none', **settings, **more
    )
    state, fallen = process.initialize(), []
    for loss in losses:
      model, factor = process.plateau.follow(state.global_model_weights, loss)
      state = state._replace(global_model_weights=model)
      fallen.append(factor)
    for round_num in process.rounds(2):
      cohort = tiny_task.cohort(scenario, 3, round_num) if round_num > 0 else []
      cohort = [tiny_task.dataset(element) for element in cohort]
      state = process.next(state, cohort).state
    return fallen, state

  rates = {'client_learning_rate': 0.05, 'server_learning_rate': 0.05}
  fallen, state = train([1.0, 1.5, np.nan, 1.0], **rates)
  assert fallen == [None, None, None, 0.25]
  _, by_hand = train([], **{name: rate / 4 for name, rate in rates.items()})
  _, first = train([], **rates)
  weights, same, other = (
    [*s.global_model_weights.trainable] for s in (state, by_hand, first)
  )
  for w, s in zip(weights, same):
    np.testing.assert_allclose(w, s, atol=1e-6)
  assert any(np.abs(w - o).max() > 1e-4 for w, o in zip(weights, other))
