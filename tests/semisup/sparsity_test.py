import numpy as np
import tensorflow as tf

from tff_fssl.semisup import sparsity


def test_i5_small_elements_of_psi_do_not_count():
  psi = tf.constant([4e-6, 6e-6, -7e-6, -1e-6, 1e-5])
  (kept,) = sparsity.sparsify([psi], 5e-6)
  np.testing.assert_allclose(
    0.1 + kept.numpy(), [0.1, 0.100006, 0.099993, 0.1, 0.10001], atol=1e-9
  )


def test_nan_stays_and_without_threshold_all_stays():
  (kept,) = sparsity.sparsify([tf.constant([np.nan, 0.0, -0.5])], 1.0)
  np.testing.assert_array_equal(kept, [np.nan, 0.0, 0.0])
  (kept,) = sparsity.sparsify([tf.constant([1e-30, -2.0])], 0.0)
  np.testing.assert_array_equal(kept, tf.constant([1e-30, -2.0]))


def test_only_large_changes_arrive():
  base = [tf.constant([1.0, 1.0, 1.0, 1.0]), tf.constant([[0.0]])]
  new = [tf.constant([1.5, 1.25, 0.0, np.nan]), tf.constant([[0.125]])]
  after = sparsity.overwrite(base, new, 0.25)
  np.testing.assert_array_equal(after[0], [1.5, 1.0, 0.0, np.nan])
  np.testing.assert_array_equal(after[1], [[0.0]])
  # A NaN is sent, but nobody counts it: the client is left out.
  assert float(sparsity.share_sent(base, new, 0.25)) == np.float32(2 / 5)
  assert float(sparsity.share_sent(base, base, 0.0)) == 0.0
