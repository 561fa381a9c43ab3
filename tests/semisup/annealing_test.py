"""Annealing: worked examples I6, I7, I15 of the specs; gradients."""

import hypothesis
from hypothesis import strategies
import numpy as np
import pytest
import reference
import tensorflow as tf

from tff_fssl import hparams
from tff_fssl.semisup import annealing
from tff_fssl.semisup import losses

# I6: step of 1000 -> the thresholds of linear, log, exp for 10 classes.
_I6 = {
  0: (0.100000, 0.100000, 0.106064),
  100: (0.190000, 0.454122, 0.109998),
  250: (0.325000, 0.742146, 0.121166),
  500: (0.550000, 0.926124, 0.173876),
  750: (0.775000, 0.978834, 0.357854),
  1000: (1.000000, 0.993936, 1.000000),
}


def _binary_logits(correct):
  """Logits of 2 classes with which label 0 has these probabilities."""
  correct = np.asarray(correct)
  return np.stack([np.log(correct / (1 - correct)), 0 * correct], -1)


@pytest.mark.parametrize('step', _I6)
def test_i6_and_i15_thresholds(step):
  thresholds = [
    annealing.tsa_threshold(step / 1000, s, 10) for s in annealing.TSA_SCHEDULES
  ]
  np.testing.assert_allclose(thresholds, _I6[step], atol=1e-6)


def test_i6_loss():
  logits = tf.constant(_binary_logits([0.05, 0.30, 0.60, 0.99]), tf.float32)
  labels = tf.zeros([4], tf.int32)
  loss, kept = annealing.tsa_cross_entropy(
    labels, logits, tf.constant(0.55), tf.ones([4])
  )
  np.testing.assert_array_equal(kept, [1, 1, 0, 0])
  np.testing.assert_allclose(loss, 2.099853, atol=1e-6)
  mean = tf.reduce_mean(losses.cross_entropy(labels, logits))
  np.testing.assert_allclose(mean, 1.180145, atol=1e-6)


def test_what_equals_the_threshold_is_kept():
  _, kept = annealing.tsa_cross_entropy(
    tf.constant([0]), tf.constant([[0.0, 0.0]]), tf.constant(0.5), tf.ones([1])
  )
  np.testing.assert_array_equal(kept, [1.0])


@pytest.mark.parametrize('schedule', ['linear', 'exp'])
@pytest.mark.parametrize('num_classes', [2, 7, 1000])
def test_the_end_of_training_drops_nothing(schedule, num_classes):
  threshold = annealing.tsa_threshold(1.0, schedule, num_classes)
  assert float(threshold) == 1.0
  logits = tf.one_hot([0, 1], num_classes) * 500
  _, kept = annealing.tsa_cross_entropy(
    tf.constant([0, 1]), logits, threshold, tf.ones([2])
  )
  np.testing.assert_array_equal(kept, [1.0, 1.0])


@pytest.mark.parametrize('schedule', annealing.TSA_SCHEDULES)
@pytest.mark.parametrize('size', [0, 3])
def test_nothing_kept_is_a_loss_of_zero_with_zero_gradient(schedule, size):
  logits = tf.constant(size * [[9.0, 0, 0]], tf.float32, [size, 3])
  with tf.GradientTape() as tape:
    tape.watch(logits)
    loss, kept = annealing.tsa_cross_entropy(
      tf.zeros([size], tf.int32),
      logits,
      annealing.tsa_threshold(0.1, schedule, 3),
      tf.ones([size]),
    )
  assert float(loss) == 0.0 and float(tf.reduce_sum(kept)) == 0.0
  np.testing.assert_array_equal(
    tape.gradient(loss, logits), np.zeros([size, 3])
  )


def test_gradient_against_numpy():
  rng = np.random.default_rng(1)
  logits, labels = rng.normal(size=[7, 4]), rng.integers(0, 4, 7)
  weights, threshold = np.array([1.0, 1, 0, 1, 1, 1, 0.5]), 0.4
  correct = np.exp(-reference.cross_entropy(labels, logits))
  kept = weights * (correct <= threshold)
  assert 0 < kept.sum() < weights.sum()

  def loss_fn(z):
    return (kept * reference.cross_entropy(labels, z)).sum() / kept.sum()

  z = tf.constant(logits, tf.float32)
  with tf.GradientTape() as tape:
    tape.watch(z)
    loss, _ = annealing.tsa_cross_entropy(
      tf.constant(labels, tf.int32),
      z,
      tf.constant(threshold),
      tf.constant(weights, tf.float32),
    )
  np.testing.assert_allclose(loss, loss_fn(logits), rtol=1e-5)
  np.testing.assert_allclose(
    tape.gradient(loss, z), reference.gradient(loss_fn, logits), atol=1e-6
  )


@hypothesis.given(
  strategies.floats(-2, 3),
  strategies.floats(0, 1),
  strategies.sampled_from(annealing.TSA_SCHEDULES),
  strategies.integers(2, 1000),
)
def test_thresholds_rise_within_bounds(progress, more, schedule, num_classes):
  early, late = (
    float(annealing.tsa_threshold(p, schedule, num_classes))
    for p in (progress, progress + more)
  )
  assert 1 / num_classes - 1e-6 <= early <= late + 1e-6
  assert late <= 1.0


def test_compiled_by_xla():
  @tf.function(jit_compile=True)
  def run(progress, logits):
    return annealing.tsa_cross_entropy(
      tf.constant([0, 0]),
      logits,
      annealing.tsa_threshold(progress, 'exp', 2),
      tf.ones([2]),
    )

  loss, kept = run(
    tf.constant(0.5), tf.constant([[0.0, 0.0], [5.0, 0.0]], tf.float32)
  )
  np.testing.assert_array_equal(kept, [1.0, 0.0])
  np.testing.assert_allclose(loss, np.log(2), rtol=1e-6)


def test_unknown_schedules():
  with pytest.raises(hparams.UsageError, match="did you mean 'linear'"):
    annealing.tsa_threshold(0.5, 'liner', 10)


def test_i7_mixmatch_ramp():
  weights = [
    75 * annealing.linear_ramp(64 * step, 2**20)
    for step in (0, 4096, 8192, 16384, 20000)
  ]
  np.testing.assert_allclose(weights, [0, 18.75, 37.5, 75, 75], atol=1e-6)


def test_no_ramp():
  assert float(annealing.linear_ramp(0.0, 0)) == 1.0


@pytest.mark.parametrize('length', [-1, float('nan')])
def test_lengths_out_of_range(length):
  with pytest.raises(hparams.UsageError, match='must be at least 0'):
    annealing.linear_ramp(1.0, length)
