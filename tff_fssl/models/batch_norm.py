"""Batch normalization with the batch's moments, without moving averages."""

from __future__ import annotations

import functools
import math
from typing import Any

from tff_fssl.lazy import tf


@functools.cache
def layer_types() -> tuple[Any, ...]:
  """Returns Keras's classes of batch normalization layers."""
  return (
    tf.keras.layers.BatchNormalization,
    tf.keras.layers.experimental.SyncBatchNormalization,
    tf.compat.v1.keras.layers.BatchNormalization,
  )


def trained_layers(
  model: tf.keras.Model,
) -> tuple[tf.keras.layers.Layer, ...]:
  """Lists the model's batch normalization layers, except frozen ones."""
  return tuple(
    layer
    for layer in model._flatten_layers()  # pylint: disable=protected-access
    if isinstance(layer, layer_types()) and layer.trainable
  )


def normalize_batch(
  layer: tf.keras.layers.Layer, inputs: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor, tf.Tensor]:
  """Computes a batch normalization layer's outputs with the batch's moments.

  Args:
    layer: One of `layer_types`.
    inputs: Float tensor of any rank.

  Returns:
    The outputs, the mean float32 [channels], the biased variance float32
    [channels] and the number of values per channel, float32 scalar.
  """
  inputs = tf.cast(inputs, layer.compute_dtype)
  axis = [a % inputs.shape.rank for a in layer.axis]
  channels = math.prod(inputs.shape[a] for a in axis)
  count = tf.cast(tf.size(inputs), tf.float32) / channels
  gamma, beta = layer.gamma, layer.beta
  if inputs.shape.rank == 4 and axis == [3]:
    # Much faster on images than `tf.nn.moments`.
    outputs, mean, variance = tf.compat.v1.nn.fused_batch_norm(
      inputs,
      tf.ones([channels]) if gamma is None else gamma,
      tf.zeros([channels]) if beta is None else beta,
      epsilon=layer.epsilon,
      is_training=True,
    )
    # Makes it biased.
    variance *= (count - 1.0) / tf.maximum(count, 1.0)
  else:
    others = [a for a in range(inputs.shape.rank) if a not in axis]
    shape = [d if a in axis else 1 for a, d in enumerate(inputs.shape)]
    floats = tf.cast(inputs, tf.float32)
    mean, variance = tf.nn.moments(floats, others)

    def expand(values: tf.Tensor | None) -> tf.Tensor | None:
      return None if values is None else tf.reshape(values, shape)

    outputs = tf.cast(
      tf.nn.batch_normalization(
        floats,
        expand(mean),
        expand(variance),
        expand(beta),
        expand(gamma),
        layer.epsilon,
      ),
      inputs.dtype,
    )
  return outputs, mean, variance, count
