"""Static batch norm: worked example E9 of (FL)^2's spec, pooling, no data."""

import numpy as np
import pytest
import tensorflow as tf

from tff_fssl.data import augment
from tff_fssl.models import adapter
from tff_fssl.models import statistics

_VIEWS = augment.Views(lambda x: x, None, None)
_E9 = ([1.0, 2, 3, 4], [10.0, 12, 14, 16], [0.0, 2.0])


def _one_channel() -> tf.keras.Model:
  """Batch norm of a single number."""
  return tf.keras.Sequential(
    [tf.keras.Input([1]), tf.keras.layers.BatchNormalization(epsilon=1e-5)]
  )


def _sums(network, weights, kind):
  total = statistics.zero_sums(network)
  for batch in _E9:
    images = tf.constant(batch)[:, None]
    sums = statistics.gather(
      network, weights, images, _VIEWS, kind=kind, batch_size=10
    )
    total = tf.nest.map_structure(tf.add, total, sums)
  return total


@pytest.mark.parametrize(
  'kind, mean, variance',
  [('batch_mean', 5.5, 3.444444), ('pooled', 6.4, None)],
)
def test_e9(kind, mean, variance):
  network = adapter.Network(_one_channel, seed=0)
  weights = network.initial_weights()
  assert float(weights.statistics_count) == 0.0
  new = statistics.put(
    network, weights, _sums(network, weights, kind), kind=kind
  )
  if variance is None:  # The spec's 35.6 is the unbiased one; ours is not.
    values = np.concatenate(_E9)
    variance = np.var(values)
    assert np.var(values, ddof=1) == pytest.approx(35.6)
  np.testing.assert_allclose(new.non_trainable[0], [mean], rtol=1e-6)
  np.testing.assert_allclose(new.non_trainable[1], [variance], rtol=1e-6)
  assert float(new.statistics_count) == (3.0 if kind == 'batch_mean' else 10.0)
  if kind == 'batch_mean':
    network.assign(new)
    logit = network.inference_logits(tf.constant([[5.0]]))
    np.testing.assert_allclose(logit, [[-0.269408]], atol=1e-6)


def test_medians_of_clients():
  """E9's three batches as clients: moments by hand."""
  network = adapter.Network(_one_channel, seed=0)
  weights = network.initial_weights()
  rows = []
  for images in (*_E9, []):
    images = tf.reshape(tf.constant(images, tf.float32), [-1, 1])
    sums = statistics.gather(
      network, weights, images, _VIEWS, kind='median', batch_size=10
    )
    rows.append(statistics.encode_row(sums))
  assert [len(row) for row in rows] == [1, 1, 1, 0]
  combined = statistics.combine_rows(network, tf.concat(rows, 0))
  new = statistics.put(network, weights, combined, kind='median')
  # Means 2.5, 13, 1; variances 1.25, 5, 1 about them.
  np.testing.assert_allclose(new.non_trainable[0], [2.5], rtol=1e-6)
  np.testing.assert_allclose(new.non_trainable[1], [1 + 1.5**2], rtol=1e-6)
  assert float(new.statistics_count) == 10.0
  # Alike clients: the pooled moments.
  alike = statistics.combine_rows(network, tf.concat([rows[0]] * 4, 0))
  new = statistics.put(network, weights, alike, kind='median')
  np.testing.assert_allclose(new.non_trainable[0], [2.5], rtol=1e-6)
  np.testing.assert_allclose(new.non_trainable[1], [1.25], rtol=1e-6)
  # Nobody: what was there.
  nothing = statistics.combine_rows(network, rows[3])
  kept = statistics.put(network, new, nothing, kind='median')
  np.testing.assert_allclose(kept.non_trainable[0], [2.5], rtol=1e-6)
  assert float(kept.statistics_count) == 16.0


def test_sums_that_are_not_finite_change_nothing():
  network = adapter.Network(_one_channel, seed=0)
  weights = network.initial_weights()
  sums = _sums(network, weights, 'pooled')
  for bad in (
    sums._replace(first=(tf.constant([np.inf]),)),
    sums._replace(second=(tf.constant([np.nan]),)),
  ):
    new = statistics.put(network, weights, bad, kind='pooled')
    for a, b in zip(tf.nest.flatten(new), tf.nest.flatten(weights)):
      np.testing.assert_array_equal(a, b)


def test_shift_keeps_large_means_exact():
  network = adapter.Network(_one_channel, seed=0)
  rng = np.random.default_rng(0)
  images = tf.constant(1000 + 0.1 * rng.standard_normal([500, 1]), tf.float32)
  weights = network.initial_weights()
  for _ in range(2):  # The second pass is shifted by the first one's mean.
    sums = statistics.gather(
      network, weights, images, _VIEWS, kind='pooled', batch_size=50
    )
    weights = statistics.put(network, weights, sums, kind='pooled')
  np.testing.assert_allclose(
    weights.non_trainable[1], [np.var(images)], rtol=1e-3
  )


def test_a_pass_over_nothing_keeps_the_old():
  network = adapter.Network(_one_channel, seed=0)
  weights = network.initial_weights()._replace(
    non_trainable=(tf.constant([3.0]), tf.constant([4.0])),
    statistics_count=tf.constant(7.0),
  )
  for images in (tf.zeros([0, 1]), tf.constant([[np.nan]])):
    sums = statistics.gather(
      network, weights, images, _VIEWS, kind='pooled', batch_size=10
    )
    assert float(sums.count) == 0.0
    new = statistics.put(network, weights, sums, kind='pooled')
    for old_value, value in zip(tf.nest.flatten(weights), tf.nest.flatten(new)):
      np.testing.assert_array_equal(old_value, value)


def test_pooled_equals_moments_of_all_images():
  model_fn = lambda: tf.keras.Sequential(
    [
      tf.keras.Input([4, 4, 2]),
      tf.keras.layers.BatchNormalization(),
      tf.keras.layers.Conv2D(3, 3),
      tf.keras.layers.BatchNormalization(),
      tf.keras.layers.GlobalAveragePooling2D(),
    ]
  )
  network = adapter.Network(model_fn, seed=3)
  images = tf.random.stateless_normal([20, 4, 4, 2], [1, 2])
  weights = network.initial_weights()
  sums = statistics.gather(
    network, weights, images, _VIEWS, kind='pooled', batch_size=8
  )
  new = statistics.put(network, weights, sums, kind='pooled')
  mean, variance = tf.nn.moments(images, [0, 1, 2])
  np.testing.assert_allclose(new.non_trainable[0], mean, atol=1e-6)
  np.testing.assert_allclose(new.non_trainable[1], variance, rtol=1e-5)
  assert float(new.statistics_count) == 20.0


@pytest.mark.parametrize('kind', ['pooled', 'batch_mean'])
def test_a_shared_layer_pools_its_calls_by_their_values(kind):
  def model_fn():
    layer = tf.keras.layers.BatchNormalization()
    images = tf.keras.Input([4, 4, 1])
    small = tf.keras.layers.AveragePooling2D(2)(images)
    outputs = [tf.keras.layers.Flatten()(layer(x)) for x in (images, small)]
    logits = tf.keras.layers.Dense(2)(tf.keras.layers.concatenate(outputs))
    return tf.keras.Model(images, logits)

  network = adapter.Network(model_fn, seed=0)
  weights = network.initial_weights()
  images = tf.random.stateless_normal([8, 4, 4, 1], [1, 2])
  sums = statistics.gather(
    network, weights, images, _VIEWS, kind=kind, batch_size=8
  )
  new = statistics.put(network, weights, sums, kind=kind)
  small = tf.nn.avg_pool2d(images, 2, 2, 'VALID')
  values = [np.ravel(images), np.ravel(small)]
  if kind == 'pooled':
    expected = np.var(np.concatenate(values))
  else:
    expected = np.mean([np.var(v, ddof=1) for v in values])
  np.testing.assert_allclose(new.non_trainable[1], [expected], rtol=1e-4)
