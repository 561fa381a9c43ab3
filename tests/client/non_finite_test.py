"""Where training stops being finite is found, and named."""

import handmade
import numpy as np
import pytest
import tensorflow as tf

from tff_fssl.client import non_finite
from tff_fssl.client import optimizer
from tff_fssl.client import training
from tff_fssl.data import augment
from tff_fssl.interface import base
from tff_fssl.models import adapter


def _plain(x, seed=None):
  del seed
  return tf.cast(x, tf.float32)


_VIEWS = augment.Views(_plain, _plain, _plain)


def _model():
  return tf.keras.Sequential(
    [tf.keras.Input([1]), tf.keras.layers.Dense(2, name='logits')],
    name='net',
  )


def _prepare(client):
  x = client.unlabeled.x[:, 0]
  return base.Prepared(
    per_example={'score': tf.where(x < 0.0, np.nan, x), 'kept': x > 0.0},
    ranges={'share': tf.constant(0.5)},
    weight=tf.where(tf.reduce_any(x > 900.0), np.inf, 1.0),
  )


def _step(networks, batch):
  """Fails by its example: 2 in the loss, 3 in a gradient, 4 in the weights.

  With 7, the kernel falls by 3e38.
  """
  x = tf.reduce_max(batch.unlabeled.views['weak'])
  kernel, bias = networks.model.trainable_variables
  fill = lambda v, value: tf.fill(v.shape, tf.cast(value, tf.float32))
  gradients = [
    fill(kernel, 3e38 * tf.cast(tf.equal(x, 4.0), tf.float32))
    + fill(kernel, 1e38 * tf.cast(tf.equal(x, 7.0), tf.float32)),
    fill(bias, tf.where(tf.equal(x, 3.0), np.inf, 1.0)),
  ]
  loss = tf.where(tf.equal(x, 2.0), np.nan, 10.0 * x)
  return base.StepResult(
    gradients,
    {
      'loss_unlabeled': base.Mean.weighted(loss, 1),
      'empty': base.Mean.ratio(0, 0),
    },
  )


def _found(values, kernel=0.0):
  """What is found in two epochs from a kernel; after a run without fault."""
  algorithm = handmade.algorithm(
    step=_step,
    prepare=_prepare,
    streams=lambda: {base.UNLABELED: handmade.stream()},
  )
  network = adapter.Network(_model)
  config = training.LoopConfig(2, 1, 1, optimizer.Sgd())
  local = training.LocalTraining(network, algorithm, _VIEWS, config)
  watch = non_finite.Watch()

  @tf.function
  def run(weights, x):
    watch.reset()
    local.run(
      weights,
      base.Examples(x[:0], tf.zeros([0], tf.int32)),
      base.Examples(x, tf.zeros([len(values)], tf.int32)),
      learning_rate=tf.constant(3.0),
      seed=tf.constant([1, 2]),
      watch=watch,
    )

  weights = network.initial_weights()
  x = tf.constant(values, tf.float32)[:, None]
  run(weights, tf.ones_like(x))
  assert watch.found() is None
  start = (tf.fill([1, 2], kernel), tf.zeros([2]))
  run(weights._replace(trainable=start), x)
  return watch.found()


@pytest.mark.parametrize(
  'values, kernel, step, tensor, text',
  [
    ([1.0, -1.0], 0.0, 0, 'score', 'before local step 1, score'),
    ([1000.0], 0.0, 0, 'aggregation weight', 'before local step 1, aggr'),
    ([2.0], 0.0, 1, 'loss_unlabeled', 'at local step 1, loss_unlabeled'),
    ([3.0], 0.0, 1, 'gradient of net/logits/bias', 'bias (loss 30)'),
    ([4.0], 0.0, 1, 'weights of net/logits/kernel', 'kernel (loss 40)'),
    (
      [4.0],
      np.nan,
      0,
      'received net/logits/kernel',
      'step 1, received net/logits',
    ),
    (
      [7.0],
      3e38,
      2,
      'update of net/logits/kernel',
      'at local step 2, update of',
    ),
  ],
)
def test_what_is_found(values, kernel, step, tensor, text):
  found = _found(values, kernel)
  assert (found.step, found.tensor) == (step, tensor)
  assert text in str(found)


def test_the_first_step_counts():
  # One of the three examples of each pass fails: at a step from 1 to 3.
  found = _found([1.0, 3.0, 5.0])
  assert found.tensor == 'gradient of net/logits/bias' and 1 <= found.step <= 3
  assert found.loss == 30.0


def test_nothing_is_found_in_what_is_finite():
  assert _found([1.0, 5.0, 6.0]) is None
