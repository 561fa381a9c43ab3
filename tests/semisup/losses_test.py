"""Losses: worked examples of the specs, and gradients against NumPy."""

import hypothesis
from hypothesis import strategies
import numpy as np
import pytest
import reference
import tensorflow as tf

from tff_fssl.semisup import losses

_LOGITS = tf.constant([[2.0, 0, -1], [0, 1, 0], [0.5, 0.5, 0]])
_PERTURBED = tf.constant([[1.0, 0.5, -1], [0.2, 0.4, 0.1], [0, 1, 2]])
_MASK = tf.constant([1.0, 1.0, 0.0])

# Losses with soft targets, per example, and what they should be.
_SOFT = {
  losses.soft_cross_entropy: lambda p, z: (
    -(p * reference.log_softmax(z)).sum(-1)
  ),
  losses.squared_error: lambda p, z: ((p - reference.softmax(z)) ** 2).mean(-1),
  losses.kl_divergence: lambda p, z: (
    p * (np.log(np.maximum(p, 1e-300)) - reference.log_softmax(z))
  ).sum(-1),
}
_soft_losses = pytest.mark.parametrize('loss_fn', _SOFT)


def test_fl2_e6_masked_consistency():
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


@_soft_losses
def test_soft_losses_against_numpy(loss_fn):
  rng = np.random.default_rng(0)
  probs, logits = rng.dirichlet(np.ones(4), 6), 3 * rng.normal(size=[6, 4])
  probs[0] = [0, 1, 0, 0]
  weights = np.array([1.0, 0, 1, 1, 0, 1])

  def mean(z):
    return (weights * _SOFT[loss_fn](probs, z)).sum() / weights.sum()

  z, p = (tf.constant(a, tf.float32) for a in (logits, probs))
  with tf.GradientTape() as tape:
    tape.watch([z, p])
    values = loss_fn(p, z)
    loss = losses.masked_mean(values, tf.constant(weights, tf.float32))
  np.testing.assert_allclose(
    values, _SOFT[loss_fn](probs, logits), rtol=1e-5, atol=1e-6
  )
  in_logits, in_targets = tape.gradient(loss, [z, p])
  np.testing.assert_allclose(
    in_logits, reference.gradient(mean, logits), rtol=1e-4, atol=1e-6
  )
  assert in_targets is None


@_soft_losses
def test_soft_losses_of_nothing_are_zero_with_zero_gradient(loss_fn):
  for size in (0, 3):
    logits = tf.ones([size, 4])
    with tf.GradientTape() as tape:
      tape.watch(logits)
      values = loss_fn(tf.fill([size, 4], 0.25), logits)
      loss = losses.masked_mean(values, tf.zeros([size]))
    assert float(loss) == 0.0
    np.testing.assert_array_equal(
      tape.gradient(loss, logits), np.zeros([size, 4])
    )


@hypothesis.given(strategies.integers(0, 2**32 - 1), strategies.integers(2, 12))
def test_properties_of_soft_losses(seed, num_classes):
  rng = np.random.default_rng(seed)
  probs = rng.dirichlet(np.full(num_classes, 0.3), 5).astype(np.float32)
  logits = rng.normal(size=[5, num_classes]).astype(np.float32) * 5
  labels = rng.integers(0, num_classes, 5)
  one_hot = np.eye(num_classes, dtype=np.float32)[labels]
  entropy = losses.cross_entropy(labels, logits)
  for loss_fn in (losses.soft_cross_entropy, losses.kl_divergence):
    np.testing.assert_allclose(
      loss_fn(one_hot, logits), entropy, rtol=1e-5, atol=1e-5
    )
  error = np.asarray(losses.squared_error(probs, logits))
  assert np.all((error >= 0) & (error <= 2 / num_classes + 1e-6))
  assert np.all(losses.kl_divergence(probs, logits) >= -1e-5)
  own = tf.nn.softmax(logits)
  np.testing.assert_allclose(losses.kl_divergence(own, logits), 0, atol=1e-5)
  np.testing.assert_array_equal(losses.squared_error(own, logits), 0)


def test_consistency_has_no_gradient_through_its_target():
  with tf.GradientTape() as tape:
    tape.watch(_LOGITS)
    loss = losses.masked_consistency(tf.nn.softmax(_LOGITS), _PERTURBED, _MASK)
  assert tape.gradient(loss, _LOGITS) is None
