"""A network with batch norm on a few numbers."""

import tensorflow as tf
import tiny_steps

from tff_fssl.models import adapter
from tff_fssl.models.weights import Weights


def network(**options):
  """A network of batch norm and a dense layer, for vectors of one number."""

  def build():
    norm = tf.keras.layers.BatchNormalization(
      center=False, scale=False, epsilon=1e-6, momentum=0.9
    )
    dense = tf.keras.layers.Dense(2, use_bias=False, trainable=True)
    return tf.keras.Sequential([tf.keras.Input([1]), norm, dense])

  result = adapter.Network(build, **options)
  kernel = tf.constant([[1.0, -1.0]])
  statistics = result.initial_weights().non_trainable
  result.assign(Weights((kernel,), statistics, tf.constant(1.0)))
  return result


def views(weights):
  """A batch of two unlabelled examples, and labelled ones of these weights."""

  return tiny_steps.batch(
    unlabeled=tiny_steps.examples(weak=[[1.0], [2.0]], strong=[[4.0], [8.0]]),
    labeled=tiny_steps.examples(
      labels=[0] * len(weights), weights=weights, weak=[[16.0]] * len(weights)
    ),
  )
