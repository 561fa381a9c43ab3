"""Accuracy of a weight set on examples in memory."""

import collections
from collections.abc import Callable
import functools

import numpy as np
import tensorflow as tf

from tff_fssl.data import augment
from tff_fssl.models import adapter

EvaluateFn = Callable[
  [adapter.Weights, np.ndarray, np.ndarray],
  collections.OrderedDict[str, float],
]


def build_evaluate_fn(
  model_fn: adapter.ModelFn,
  views: augment.Views,
  *,
  batch_size: int = 256,
) -> EvaluateFn:
  """Builds an evaluation for any number of examples, traced at first use.

  Args:
    model_fn: Builds the Keras model, images -> logits.
    views: The preprocessing; `plain` is used.
    batch_size: Examples in a batch. As long as there are no batch norm
      statistics, the moments of the batch are used.

  Returns:
    `(weights, x, y) -> OrderedDict(accuracy, loss)` with x as stored, [N, ...],
    y int [N], N >= 1; accuracy in [0, 1], loss the mean cross-entropy in nats.
  """

  @functools.cache
  def build(stored_shape, dtype):
    stored = tf.TensorSpec([None, *stored_shape], dtype)
    network = adapter.Network(
      model_fn, image_shape=augment.image_shape(views, stored)
    )

    @tf.function
    def evaluate(weights, images, labels):
      network.assign(weights)
      correct, loss = tf.constant(0.0), tf.constant(0.0)
      for start in tf.range(0, tf.shape(images)[0], batch_size):
        batch = views.plain(images[start : start + batch_size])
        target = labels[start : start + batch_size]
        logits = network.inference_logits(batch, weights.statistics_count)
        correct += tf.reduce_sum(
          tf.cast(tf.equal(tf.argmax(logits, -1, tf.int32), target), tf.float32)
        )
        loss += tf.reduce_sum(
          tf.nn.sparse_softmax_cross_entropy_with_logits(target, logits)
        )
      count = tf.cast(tf.shape(images)[0], tf.float32)
      return correct / count, loss / count

    return evaluate

  def fn(weights, x, y):
    weights = adapter.Weights(
      *(tf.nest.map_structure(tf.convert_to_tensor, part) for part in weights)
    )
    images, labels = tf.constant(x), tf.constant(y, tf.int32)
    evaluate = build(tuple(images.shape[1:]), images.dtype)
    accuracy, loss = evaluate(weights, images, labels)
    return collections.OrderedDict(accuracy=float(accuracy), loss=float(loss))

  return fn
