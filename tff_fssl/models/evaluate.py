"""Accuracy of a weight set on examples in memory."""

import collections
from collections.abc import Callable
import functools

import numpy as np
import tensorflow as tf

from tff_fssl.data import augment
from tff_fssl.models import adapter
from tff_fssl.models import server_model

EvaluateFn = Callable[
  [server_model.ServerModel, np.ndarray, np.ndarray],
  collections.OrderedDict[str, float],
]


def build_evaluate_fn(
  model_fn: adapter.ModelFn,
  views: augment.Views,
  *,
  prediction: server_model.Prediction = server_model.Prediction(),
  batch_size: int = 256,
) -> EvaluateFn:
  """Builds an evaluation for any number of examples, traced at first use.

  Args:
    model_fn: Builds the Keras model, images -> logits.
    views: The preprocessing; `plain` is used.
    prediction: How the model predicts.
    batch_size: Examples in a batch. As long as there are no batch norm
      statistics, the moments of the batch are used.

  Returns:
    `(model, x, y) -> OrderedDict(accuracy, loss)` with x as stored, [N, ...],
    y int [N], N >= 1; accuracy in [0, 1], loss the mean cross-entropy in nats;
    then `NAME/accuracy` and `NAME/loss` for each of `prediction.also`.
  """

  @functools.cache
  def build(stored_shape, dtype):
    stored = tf.TensorSpec([None, *stored_shape], dtype)
    network = adapter.Network(
      model_fn, image_shape=augment.image_shape(views, stored)
    )

    def evaluate_one(way, model, images, labels):
      network.assign(way.weights(model))
      correct, loss = tf.constant(0.0), tf.constant(0.0)
      for start in tf.range(0, tf.shape(images)[0], batch_size):
        batch = views.plain(images[start : start + batch_size])
        target = labels[start : start + batch_size]
        logits = way.logits(network, model, batch)
        correct += tf.reduce_sum(
          tf.cast(tf.equal(tf.argmax(logits, -1, tf.int32), target), tf.float32)
        )
        loss += tf.reduce_sum(
          tf.nn.sparse_softmax_cross_entropy_with_logits(target, logits)
        )
      count = tf.cast(tf.shape(images)[0], tf.float32)
      return correct / count, loss / count

    @tf.function
    def evaluate(model, images, labels):
      result = collections.OrderedDict()
      for name, way in {'': prediction, **prediction.also}.items():
        prefix = f'{name}/' if name else ''
        accuracy, loss = evaluate_one(way, model, images, labels)
        result[f'{prefix}accuracy'] = accuracy
        result[f'{prefix}loss'] = loss
      return result

    return evaluate

  def fn(model, x, y):
    model = tf.nest.map_structure(
      tf.convert_to_tensor, server_model.ServerModel(*model)
    )
    images, labels = tf.constant(x), tf.constant(y, tf.int32)
    evaluate = build(tuple(images.shape[1:]), images.dtype)
    result = evaluate(model, images, labels)
    return collections.OrderedDict((k, float(v)) for k, v in result.items())

  return fn
