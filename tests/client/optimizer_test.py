"""SGD and its schedule: worked example E8 of (FL)^2's spec."""

import numpy as np
import pytest
import tensorflow as tf

from tff_fssl.client import optimizer
from tff_fssl.models import adapter


@pytest.mark.parametrize(
  'round_num, rate',
  [
    (1, 0.03),
    (2, 0.029999884),
    (201, 0.025606602),
    (401, 0.015),
    (601, 0.004393398),
    (800, 1.16e-07),
    (900, 0.0),
    (-3, 0.03),
  ],
)
def test_e8_cosine(round_num, rate):
  value = optimizer.learning_rate(0.03, 'cosine', 800, tf.constant(round_num))
  np.testing.assert_allclose(
    value, rate, rtol=1e-3 if rate < 1e-6 else 1e-6, atol=1e-8
  )


def test_constant():
  value = optimizer.learning_rate(0.03, 'constant', 800, tf.constant(700))
  np.testing.assert_allclose(value, 0.03)


def _check(ours, recurrence, rates, gradient, bound=1.0):
  """Compares steps with a recurrence in float64 NumPy.

  Args:
    ours: The optimizer.
    recurrence: (step, clipped gradient, weight, state) -> the change by a
      learning rate of 1; it may change the state, a dictionary.
    rates: The learning rate of each step.
    gradient: (step, index of the weight) -> the entries of its gradient.
    bound: Of the norm of all gradients; 0: none.

  Returns:
    The optimizer's slots.
  """
  network = adapter.Network(
    lambda: tf.keras.Sequential(
      [tf.keras.Input([3]), tf.keras.layers.Dense(2)]
    ),
    seed=4,
  )
  slots = ours.initialize(network)
  weights = [np.array(v, np.float64) for v in network.trainable_variables]
  states = [{} for _ in weights]
  for step, rate in enumerate(rates):
    gradients = [
      np.full(w.shape, gradient(step, i)) for i, w in enumerate(weights)
    ]
    ours.apply(
      network,
      slots,
      [tf.constant(g, tf.float32) for g in gradients],
      tf.constant(rate),
    )
    norm = np.sqrt(sum(np.sum(g**2) for g in gradients))
    scale = max(norm, bound) / bound if bound else 1.0
    for i, w in enumerate(weights):
      change = recurrence(step, gradients[i] / scale, w, states[i])
      weights[i] = w - rate * change
  for variable, expected in zip(network.trainable_variables, weights):
    np.testing.assert_allclose(variable, expected, rtol=1e-5)
  return slots


@pytest.mark.parametrize('nesterov', [True, False])
@pytest.mark.parametrize('momentum', [0.0, 0.9])
def test_is_pytorchs_sgd(nesterov, momentum):
  def recurrence(step, gradient, weight, state):
    gradient = gradient + 0.1 * weight
    state['buffer'] = momentum * state.get('buffer', 0.0) + gradient
    if nesterov:
      return gradient + momentum * state['buffer']
    return state['buffer']

  sgd = optimizer.Sgd(
    momentum, nesterov, weight_decay=0.1, max_gradient_norm=1.0
  )
  _check(sgd, recurrence, [0.03] * 2, lambda step, i: 1.0 + step + i)


def test_rmsprop():
  def recurrence(step, gradient, weight, state):
    gradient = gradient + 0.1 * weight
    state['square'] = 0.9 * state.get('square', 0.0) + 0.1 * gradient**2
    return gradient / (np.sqrt(state['square']) + 1e-7)

  rmsprop = optimizer.RmsProp(weight_decay=0.1, max_gradient_norm=1.0)
  _check(rmsprop, recurrence, [0.03] * 3, lambda step, i: 1.0 + step - i)


@pytest.mark.parametrize('decay, bound', [(0.0, 0.0), (0.1, 1.0)])
def test_adam_is_pytorchs(decay, bound):
  def recurrence(step, gradient, weight, state):
    gradient = gradient + decay * weight
    state['mean'] = 0.9 * state.get('mean', 0.0) + 0.1 * gradient
    state['square'] = 0.999 * state.get('square', 0.0) + 0.001 * gradient**2
    root = np.sqrt(state['square'] / (1 - 0.999 ** (step + 1))) + 1e-8
    return state['mean'] / (1 - 0.9 ** (step + 1)) / root

  adam = optimizer.Adam(weight_decay=decay, max_gradient_norm=bound)
  slots = _check(
    adam,
    recurrence,
    [0.0, 0.03, 0.01],
    lambda step, i: 3.0 + step - 3 * i,
    bound,
  )
  assert float(slots[0]) == 3
