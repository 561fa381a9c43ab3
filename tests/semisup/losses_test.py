"""Losses: worked example E6 of (FL)^2's spec."""

import numpy as np
import tensorflow as tf

from tff_fssl.semisup import losses

_LOGITS = tf.constant([[2.0, 0, -1], [0, 1, 0], [0.5, 0.5, 0]])
_PERTURBED = tf.constant([[1.0, 0.5, -1], [0.2, 0.4, 0.1], [0, 1, 2]])
_MASK = tf.constant([1.0, 1.0, 0.0])


def test_e6_masked_consistency():
  probs = tf.nn.softmax(_LOGITS)
  np.testing.assert_allclose(
    losses.kl_divergence(probs, _PERTURBED),
    [0.171808, 0.070474, 0.484193],
    atol=1e-6,
  )
  with tf.GradientTape() as tape:
    tape.watch(_PERTURBED)
    loss = losses.masked_consistency(probs, _PERTURBED, _MASK)
  np.testing.assert_allclose(loss, 0.080761, atol=1e-6)
  np.testing.assert_allclose(
    tape.gradient(loss, _PERTURBED),
    [
      [-0.089899, 0.078004, 0.011895],
      [0.035977, -0.061808, 0.025831],
      [0, 0, 0],
    ],
    atol=1e-6,
  )
  cold = losses.masked_consistency(probs, _PERTURBED, _MASK, temperature=0.5)
  np.testing.assert_allclose(cold, 0.039420, atol=1e-6)


def test_consistency_has_no_gradient_through_its_target():
  with tf.GradientTape() as tape:
    tape.watch(_LOGITS)
    loss = losses.masked_consistency(tf.nn.softmax(_LOGITS), _PERTURBED, _MASK)
  assert tape.gradient(loss, _LOGITS) is None


def test_kl_of_certainty_is_finite():
  divergence = losses.kl_divergence(
    tf.constant([[1.0, 0.0]]), tf.constant([[0.0, 0.0]])
  )
  np.testing.assert_allclose(divergence, [np.log(2)], rtol=1e-6)


def test_masked_mean_of_nothing_is_zero_with_zero_gradient():
  values = tf.constant([1.0, 2.0])
  with tf.GradientTape() as tape:
    tape.watch(values)
    mean = losses.masked_mean(values, tf.zeros([2]))
  assert float(mean) == 0.0
  np.testing.assert_array_equal(tape.gradient(mean, values), [0.0, 0.0])


def test_cross_entropy():
  np.testing.assert_allclose(
    losses.cross_entropy(tf.constant([1]), tf.constant([[0.0, 0.0]])),
    [np.log(2)],
    rtol=1e-6,
  )
