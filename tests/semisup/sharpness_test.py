"""Perturbations: worked example E5 of (FL)^2's spec."""

import numpy as np
import tensorflow as tf
import tiny_norms

from tff_fssl.semisup import sharpness

_W, _G = tf.constant([0.5, -1.0, 0.0]), tf.constant([0.2, -0.1, 0.4])
_B, _GB = tf.constant([3.0, -2.0]), tf.constant([0.3, -0.05])


def _perturb(weights, gradients, scaled):
  return sharpness.perturbation(
    weights, gradients, rho=0.1, eta=0.01, scaled=scaled
  )


def test_e5_asam():
  eps_w, eps_b = _perturb([_W, _B], [_G, _GB], [True, False])
  np.testing.assert_allclose(eps_w, [0.015467, -0.030330, 0.000012], atol=1e-6)
  np.testing.assert_allclose(eps_b, [0.089197, -0.014866], atol=1e-6)
  scaled = tf.concat([eps_w / (tf.abs(_W) + 0.01), eps_b], 0)
  np.testing.assert_allclose(tf.norm(scaled), 0.1, rtol=1e-5)


def test_e5_weights_only():
  (eps,) = _perturb([_W], [_G], [True])
  np.testing.assert_allclose(eps, [0.036226, -0.071038, 0.000028], atol=1e-6)


def test_e5_sam():
  eps_w, eps_b = _perturb([_W, _B], [_G, _GB], [False, False])
  np.testing.assert_allclose(eps_w, [0.036364, -0.018182, 0.072727], atol=1e-6)
  np.testing.assert_allclose(eps_b, [0.054545, -0.009091], atol=1e-6)


def test_no_gradient_gives_no_perturbation():
  (eps,) = _perturb([_W], [tf.zeros([3])], [True])
  np.testing.assert_array_equal(eps, [0.0, 0.0, 0.0])


def test_e14_scaling_the_loss_changes_nothing():
  (eps,) = _perturb([_W], [_G], [True])
  (scaled,) = _perturb([_W], [7.0 * _G], [True])
  np.testing.assert_allclose(eps, scaled, rtol=1e-6)


def test_which_variables_are_scaled():
  model = tf.keras.Sequential(
    [
      tf.keras.Input([4]),
      tf.keras.layers.Dense(3),
      tf.keras.layers.BatchNormalization(),
    ]
  )
  scaled = {
    v.name.split('/')[-1]: sharpness.is_scaled(v)
    for v in model.trainable_variables
  }
  assert scaled == {
    'kernel': True,
    'bias': False,
    'gamma': True,
    'beta': False,
  }


def test_the_pass_at_the_ascent_does_not_move_moving_averages():
  network = tiny_norms.network(track_moving_averages=True)
  before = [np.array(v) for v in network.non_trainable_variables]
  images = tf.constant([[1.0], [4.0]])
  sharpness.loss_and_gradients_at_ascent(
    network,
    [tf.ones(v.shape) for v in network.trainable_variables],
    lambda: tf.reduce_sum(network.logits(images, training=True)[:, 0]),
    rho=0.1,
    eta=0.01,
    adaptive=True,
  )
  for old, new in zip(before, network.non_trainable_variables, strict=True):
    np.testing.assert_array_equal(new, old)
