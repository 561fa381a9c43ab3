"""Batch normalization by the batch's moments, against Keras's own."""

import numpy as np
import pytest
import tensorflow as tf

from tff_fssl.models import batch_norm

_LAYERS = tf.keras.layers


@pytest.mark.parametrize(
  'shape, axis', [([6, 4, 5, 3], -1), ([6, 4, 5, 3], 1), ([6, 3], -1)]
)
@pytest.mark.parametrize('has_scale', [True, False])
def test_normalizes_as_keras_does_in_training(shape, axis, has_scale):
  layer = _LAYERS.BatchNormalization(
    axis=axis, scale=has_scale, center=has_scale, gamma_initializer='he_normal'
  )
  inputs = 3 + tf.random.stateless_normal(shape, [1, 2])
  expected = layer(inputs, training=True)
  outputs, mean, variance, count = batch_norm.normalize_batch(layer, inputs)
  np.testing.assert_allclose(outputs, expected, atol=1e-5)
  others = [a for a in range(len(shape)) if a != axis % len(shape)]
  moments = tf.nn.moments(inputs, others)
  np.testing.assert_allclose(mean, moments[0], rtol=1e-5)
  np.testing.assert_allclose(variance, moments[1], rtol=1e-4)
  assert float(count) == np.prod([shape[a] for a in others])


def test_frozen_layers_are_not_listed():
  model = tf.keras.Sequential(
    [
      tf.keras.Input([3]),
      _LAYERS.BatchNormalization(name='frozen', trainable=False),
      tf.keras.Sequential(
        [tf.keras.Input([3]), _LAYERS.BatchNormalization(name='inner')]
      ),
      _LAYERS.Dense(3),
    ]
  )
  assert [x.name for x in batch_norm.trained_layers(model)] == ['inner']
