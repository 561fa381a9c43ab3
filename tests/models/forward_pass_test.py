"""Graphs of forward passes that are accepted or rejected.

`checks_test.py` has many more models, which pass through all checks.
"""

import pytest
import tensorflow as tf

from tff_fssl import hparams
from tff_fssl.models import forward_pass


class _Model(tf.keras.Model):
  """Applies a function to its Dense layer's outputs."""

  def __init__(self, function):
    super().__init__(name='tiny')
    self.dense = tf.keras.layers.Dense(2, name='dense')
    self.counter = self.add_weight('counter', [], trainable=False)
    self.function = function

  def call(self, inputs):
    return self.function(self, self.dense(inputs))


def _count(model, logits):
  model.counter.assign_add(1.0)
  return logits


def _check(function, **kwargs):
  with tf.Graph().as_default():
    model = _Model(function)
    model(tf.keras.Input([3]))
    may_change = [model.counter] if kwargs.get('may_count') else []
    forward_pass.check(model, model, [3], may_change=may_change)


def test_a_plain_pass_is_accepted():
  _check(lambda model, logits: logits)
  _check(_count, may_count=True)


@pytest.mark.parametrize(
  'function, words',
  [
    (
      lambda _, x: x + tf.random.normal([]),
      'draws from global random state .*RandomStandardNormal',
    ),
    (
      lambda _, x: tf.ensure_shape(
        tf.py_function(lambda y: y, [x], tf.float32), x.shape
      ),
      'calls Python',
    ),
    (_count, "changes '.*counter' in its forward pass"),
    (lambda _, x: tf.reshape(tf.nn.softmax(x), [-1, 2]), 'gives probabilities'),
    (
      lambda _, x: tf.cond(
        tf.reduce_sum(x) > 0, lambda: tf.random.shuffle(x), lambda: x
      ),
      'draws from global random state',
    ),
    (
      lambda model, x: (model.add_loss(tf.reduce_sum(x)), x)[1],
      'adds a loss that depends on its input',
    ),
  ],
)
def test_other_passes_are_rejected_in_one_line(function, words):
  with pytest.raises(hparams.UsageError, match=words) as caught:
    _check(function)
  assert '\n' not in str(caught.value)
