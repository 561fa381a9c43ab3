"""One pass in training mode over all views."""

import numpy as np
import tensorflow as tf
import tiny_norms

from tff_fssl.client import joint_pass


def test_it_sees_all_views_together():
  logits = joint_pass.logits(tiny_norms.network(), tiny_norms.views([1.0, 1.0]))
  assert [x.shape[0] for x in logits] == [2, 2, 2]
  values = np.array([1, 2, 4, 8, 16, 16])
  np.testing.assert_allclose(
    tf.concat(logits, 0)[:, 0],
    (values - values.mean()) / values.std(),
    atol=1e-5,
  )


def test_it_does_not_see_the_filler_of_a_client_without_labels():
  network = tiny_norms.network(track_moving_averages=True)
  *logits, labeled = joint_pass.logits(network, tiny_norms.views([0.0]))
  assert labeled.shape == [1, 2] and not np.any(labeled)
  values = np.array([1, 2, 4, 8])
  np.testing.assert_allclose(
    tf.concat(logits, 0)[:, 0],
    (values - values.mean()) / values.std(),
    atol=1e-5,
  )
  mean, _ = network.non_trainable_variables
  np.testing.assert_allclose(mean, [0.1 * values.mean()], rtol=1e-5)


def test_it_does_not_see_the_filler_of_a_client_with_labels_only():
  network = tiny_norms.network(track_moving_averages=True)
  batch = tiny_norms.views([1.0])
  streams = dict(batch.streams)
  streams['unlabeled'] = batch.unlabeled._replace(weights=tf.zeros([2]))
  weak, strong, labeled = joint_pass.logits(
    network, batch._replace(streams=streams)
  )
  assert not np.any(weak) and not np.any(strong)
  np.testing.assert_allclose(labeled, np.zeros([1, 2]), atol=1e-5)
  mean, _ = network.non_trainable_variables
  np.testing.assert_allclose(mean, [0.1 * 16], rtol=1e-5)
