"""Votes and consistency: I1 and I2 of the FedMatch specification."""

import numpy as np
import pytest
import tensorflow as tf

from tff_fssl.semisup import agreement
from tff_fssl.semisup import losses
from tff_fssl.semisup import thresholds

LOCAL = np.array(
  [
    [0.80, 0.10, 0.05, 0.05],
    [0.05, 0.10, 0.05, 0.80],
    [0.10, 0.76, 0.10, 0.04],
    [0.60, 0.20, 0.10, 0.10],
    [0.05, 0.05, 0.86, 0.04],
  ],
  np.float32,
)
HELPERS = np.stack(
  [
    [
      [0.10, 0.70, 0.10, 0.10],
      [0.10, 0.20, 0.40, 0.30],
      [0.30, 0.30, 0.20, 0.20],
      [0.90, 0.05, 0.03, 0.02],
      [0.40, 0.40, 0.10, 0.10],
    ],
    [
      [0.20, 0.60, 0.10, 0.10],
      [0.10, 0.50, 0.20, 0.20],
      [0.25, 0.25, 0.25, 0.25],
      [0.90, 0.05, 0.03, 0.02],
      [0.30, 0.10, 0.30, 0.30],
    ],
  ],
  axis=1,
).astype(np.float32)
BOTH = tf.ones([2])


@pytest.mark.parametrize(
  'weights, tie, expected',
  [
    # Of three classes with a vote each: the lowest, or the local network's.
    ([1.0, 1.0], 'lowest', [1, 1, 0, 0, 0]),
    ([1.0, 1.0], 'local', [1, 3, 0, 0, 0]),
    # One helper: each disagreement is a tie.
    ([1.0, 0.0], 'lowest', [0, 2, 0, 0, 0]),
    ([1.0, 0.0], 'local', [0, 3, 1, 0, 2]),
    ([0.0, 0.0], 'lowest', [0, 3, 1, 0, 2]),
    ([0.0, 0.0], 'local', [0, 3, 1, 0, 2]),
  ],
)
def test_i1_votes(weights, tie, expected):
  labels = agreement.agreed_labels(LOCAL, HELPERS, tf.constant(weights), tie)
  np.testing.assert_array_equal(labels, expected)


@pytest.mark.parametrize(
  'threshold, kept', [(0.75, [1, 1, 1, 0, 1]), (0.85, [0, 0, 0, 0, 1])]
)
def test_i1_only_the_local_network_is_asked_for_confidence(threshold, kept):
  np.testing.assert_array_equal(
    thresholds.fixed_mask(LOCAL, threshold), np.array(kept, bool)
  )


def test_a_tie_between_others_goes_to_the_lowest():
  helpers = tf.one_hot([[2, 2, 1, 1]], 4)
  labels = agreement.agreed_labels(
    tf.one_hot([3], 4), helpers, tf.ones([4]), 'local'
  )
  assert labels.numpy() == [1]


_MASK = tf.constant([1.0, 1.0, 1.0, 0.0, 1.0])


@pytest.mark.parametrize(
  'weights, mean',
  [([1, 0], 1.022385), ([0, 1], 0.836039), ([1, 1], 0.929212), ([0, 0], 0.0)],
)
def test_i2_divergence_from_helpers(weights, mean):
  of_examples = agreement.divergence_from_helpers(
    HELPERS, tf.constant(weights, tf.float32), tf.math.log(LOCAL)
  )
  actual = losses.masked_mean(of_examples, _MASK)
  np.testing.assert_allclose(actual, mean, atol=1e-6)


def test_i2_rows():
  rows = agreement.divergence_from_helpers(
    HELPERS, tf.constant([1.0, 0.0]), tf.math.log(LOCAL)
  ).numpy()
  np.testing.assert_allclose(
    rows[[0, 1, 2, 4]], [1.292822, 0.745472, 0.511240, 1.540006], atol=1e-6
  )


def test_the_gradient_is_of_the_local_network_alone():
  """With respect to logits: the local prediction minus the helpers' mean."""
  logits, helpers = tf.math.log(LOCAL), tf.constant(HELPERS)
  with tf.GradientTape() as tape:
    tape.watch([logits, helpers])
    total = tf.reduce_sum(
      agreement.divergence_from_helpers(helpers, BOTH, logits)
    )
  of_logits, of_helpers = tape.gradient(total, [logits, helpers])
  np.testing.assert_allclose(of_logits, LOCAL - HELPERS.mean(1), atol=1e-6)
  assert of_helpers is None
