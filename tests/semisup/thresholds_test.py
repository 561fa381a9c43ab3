"""Thresholds: worked examples E1, E2 and E14 of (FL)^2."""

import numpy as np
import tensorflow as tf

from tff_fssl.semisup import thresholds

_E1 = np.array(
  [
    [0.97, 0.02, 0.01],
    [0.60, 0.30, 0.10],
    [0.20, 0.70, 0.10],
    [0.40, 0.35, 0.25],
    [0.05, 0.15, 0.80],
  ],
  np.float32,
)


def test_e1_thresholds_and_masks():
  adaptive = thresholds.adaptive_thresholds(_E1)
  np.testing.assert_allclose(adaptive.learning_status, 0.694, atol=1e-6)
  np.testing.assert_allclose(
    adaptive.of_class, [0.694, 0.475171, 0.393892], atol=1e-6
  )
  kept = thresholds.class_mask(_E1, adaptive.of_class)
  np.testing.assert_array_equal(kept, [True, False, True, False, True])
  np.testing.assert_array_equal(
    thresholds.fixed_mask(_E1, 0.95), [True] + 4 * [False]
  )
  np.testing.assert_array_equal(thresholds.pseudo_labels(_E1), [0, 0, 1, 0, 2])


def test_e2_fixed_passes_where_adaptive_fails():
  probs = np.array([[0.99, 0.01], [0.96, 0.04], [0.999, 0.001]], np.float32)
  adaptive = thresholds.adaptive_thresholds(probs)
  np.testing.assert_allclose(adaptive.learning_status, 0.983, atol=1e-6)
  np.testing.assert_allclose(adaptive.of_class, [0.983, 0.017], atol=1e-6)
  np.testing.assert_array_equal(
    thresholds.class_mask(probs, adaptive.of_class), [True, False, True]
  )
  assert np.all(thresholds.fixed_mask(probs, 0.95))


def test_e14_properties():
  rng = np.random.default_rng(0)
  for _ in range(20):
    probs = rng.dirichlet(np.ones(5), 17).astype(np.float32)
    adaptive = thresholds.adaptive_thresholds(probs)
    status, of_class = (np.asarray(t) for t in adaptive)
    assert 1 / 5 <= status <= 1
    assert np.all(of_class <= status + 1e-7)
    assert np.any(thresholds.class_mask(probs, of_class))
    order = rng.permutation(5)
    permuted = thresholds.adaptive_thresholds(probs[:, order])
    np.testing.assert_allclose(permuted.of_class, of_class[order], rtol=1e-6)


def test_only_the_strict_mask_drops_what_equals_the_threshold():
  probs = tf.constant([[0.75, 0.25], [0.5, 0.5]])
  np.testing.assert_array_equal(
    thresholds.fixed_mask(probs, 0.75), [True, False]
  )
  np.testing.assert_array_equal(
    thresholds.strict_mask(probs, 0.75), [False, False]
  )
  assert np.all(thresholds.strict_mask(probs, 0.0))


def test_no_examples():
  adaptive = thresholds.adaptive_thresholds(np.zeros([0, 3], np.float32))
  np.testing.assert_array_equal(adaptive.learning_status, 1.0)
  np.testing.assert_array_equal(adaptive.of_class, [1.0, 1.0, 1.0])
