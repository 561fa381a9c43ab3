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


@pytest.mark.parametrize('nesterov', [True, False])
@pytest.mark.parametrize('momentum', [0.0, 0.9])
def test_is_pytorchs_sgd(nesterov, momentum):
  """Against PyTorch's documented recurrence, two steps in float64 NumPy."""
  network = adapter.Network(
    lambda: tf.keras.Sequential(
      [tf.keras.Input([3]), tf.keras.layers.Dense(2)]
    ),
    seed=4,
  )
  sgd = optimizer.Sgd(
    momentum, nesterov, weight_decay=0.1, max_gradient_norm=1.0
  )
  slots = sgd.initialize(network)
  weights = [np.array(v, np.float64) for v in network.trainable_variables]
  buffers = [np.zeros_like(w) for w in weights]
  for step in range(2):
    gradients = [
      np.full(w.shape, 1.0 + step + i) for i, w in enumerate(weights)
    ]
    sgd.apply(
      network,
      slots,
      [tf.constant(g, tf.float32) for g in gradients],
      tf.constant(0.03),
    )
    norm = np.sqrt(sum(np.sum(g**2) for g in gradients))
    for i, w in enumerate(weights):
      gradient = gradients[i] / max(norm, 1.0) + 0.1 * w
      buffers[i] = momentum * buffers[i] + gradient
      change = gradient + momentum * buffers[i] if nesterov else buffers[i]
      weights[i] = w - 0.03 * change
  for variable, expected in zip(network.trainable_variables, weights):
    np.testing.assert_allclose(variable, expected, rtol=1e-5)


def test_rmsprop():
  """Against its recurrence in float64 NumPy, three steps."""
  network = adapter.Network(
    lambda: tf.keras.Sequential(
      [tf.keras.Input([3]), tf.keras.layers.Dense(2)]
    ),
    seed=4,
  )
  rmsprop = optimizer.RmsProp(weight_decay=0.1, max_gradient_norm=1.0)
  slots = rmsprop.initialize(network)
  weights = [np.array(v, np.float64) for v in network.trainable_variables]
  squares = [np.zeros_like(w) for w in weights]
  for step in range(3):
    gradients = [
      np.full(w.shape, 1.0 + step - i) for i, w in enumerate(weights)
    ]
    rmsprop.apply(
      network,
      slots,
      [tf.constant(g, tf.float32) for g in gradients],
      tf.constant(0.03),
    )
    norm = np.sqrt(sum(np.sum(g**2) for g in gradients))
    for i, w in enumerate(weights):
      gradient = gradients[i] / max(norm, 1.0) + 0.1 * w
      squares[i] = 0.9 * squares[i] + 0.1 * gradient**2
      weights[i] = w - 0.03 * gradient / (np.sqrt(squares[i]) + 1e-7)
  for variable, expected in zip(network.trainable_variables, weights):
    np.testing.assert_allclose(variable, expected, rtol=1e-5)


def test_rmsprop_is_kerass():
  """But for the place of epsilon: Keras 2.14 adds it under the root."""
  network = adapter.Network(
    lambda: tf.keras.Sequential(
      [tf.keras.Input([3]), tf.keras.layers.Dense(2)]
    ),
    seed=4,
  )
  variables = network.trainable_variables
  theirs = [tf.Variable(v) for v in variables]
  keras = tf.keras.optimizers.RMSprop(0.01)
  ours = optimizer.RmsProp()
  slots = ours.initialize(network)
  for step in range(4):
    gradients = [
      tf.random.stateless_normal(v.shape, [step, i])
      for i, v in enumerate(variables)
    ]
    ours.apply(network, slots, gradients, tf.constant(0.01))
    keras.apply_gradients(zip(gradients, theirs))
  for a, b in zip(variables, theirs):
    np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.parametrize('decay, bound', [(0.0, 0.0), (0.1, 1.0)])
def test_adam(decay, bound):
  """Against PyTorch's documented recurrence in float64 NumPy, three steps."""
  network = adapter.Network(
    lambda: tf.keras.Sequential(
      [tf.keras.Input([3]), tf.keras.layers.Dense(2)]
    ),
    seed=4,
  )
  adam = optimizer.Adam(weight_decay=decay, max_gradient_norm=bound)
  slots = adam.initialize(network)
  weights = [np.array(v, np.float64) for v in network.trainable_variables]
  means = [np.zeros_like(w) for w in weights]
  squares = [np.zeros_like(w) for w in weights]
  for step, rate in enumerate((0.0, 0.03, 0.01), start=1):
    gradients = [
      np.full(w.shape, 2.0 + step - 3 * i) for i, w in enumerate(weights)
    ]
    adam.apply(
      network,
      slots,
      [tf.constant(g, tf.float32) for g in gradients],
      tf.constant(rate),
    )
    norm = np.sqrt(sum(np.sum(g**2) for g in gradients))
    scale = max(norm, bound) / bound if bound else 1.0
    for i, w in enumerate(weights):
      gradient = gradients[i] / scale + decay * w
      means[i] = 0.9 * means[i] + 0.1 * gradient
      squares[i] = 0.999 * squares[i] + 0.001 * gradient**2
      root = np.sqrt(squares[i] / (1 - 0.999**step)) + 1e-8
      weights[i] = w - rate * means[i] / (1 - 0.9**step) / root
  assert float(slots[0]) == 3
  for variable, expected in zip(network.trainable_variables, weights):
    np.testing.assert_allclose(variable, expected, rtol=1e-5)
