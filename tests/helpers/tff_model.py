"""A Keras 3 model as TFF's own algorithms take it.

`tff.learning.models.from_keras_model` takes models of Keras 2 alone.
"""

import collections

import tensorflow as tf
import tensorflow_federated as tff

_OD = collections.OrderedDict


@tf.function
def _mean(total_and_count):
  return tf.math.divide_no_nan(total_and_count[0], total_and_count[1])


class KerasModel(tff.learning.models.VariableModel):
  """Trains by cross entropy; reports the mean loss and the accuracy."""

  def __init__(self, network, input_spec):
    self._network = network
    self._input_spec = input_spec
    self._sums = _OD(
      (name, [tf.Variable(0.0, trainable=False) for _ in range(2)])
      for name in ('loss', 'accuracy')
    )
    self._num_examples = tf.Variable(0, trainable=False)

  @property
  def trainable_variables(self):
    return [v.value for v in self._network.trainable_weights]

  @property
  def non_trainable_variables(self):
    return [v.value for v in self._network.non_trainable_weights]

  @property
  def local_variables(self):
    return [*self._sums['loss'], *self._sums['accuracy'], self._num_examples]

  @property
  def input_spec(self):
    return self._input_spec

  def predict_on_batch(self, x, training=True):
    return self._network(x, training=training)

  def forward_pass(self, batch_input, training=True):
    x, y = (
      batch_input.values() if isinstance(batch_input, dict) else batch_input
    )
    logits, y = self.predict_on_batch(x, training), tf.reshape(y, [-1])
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits)
    size = tf.cast(tf.size(y), tf.float32)
    is_right = tf.cast(tf.argmax(logits, -1, tf.int32) == y, tf.float32)
    for name, values in (('loss', losses), ('accuracy', is_right)):
      self._sums[name][0].assign_add(tf.reduce_sum(values))
      self._sums[name][1].assign_add(size)
    self._num_examples.assign_add(tf.size(y))
    return tff.learning.models.BatchOutput(
      tf.math.divide_no_nan(tf.reduce_sum(losses), size), logits, tf.size(y)
    )

  def report_local_unfinalized_metrics(self):
    sums = _OD(
      (name, [v.read_value() for v in variables])
      for name, variables in self._sums.items()
    )
    return _OD(**sums, num_examples=self._num_examples.read_value())

  def metric_finalizers(self):
    return _OD(
      loss=_mean, accuracy=_mean, num_examples=tf.function(lambda x: x)
    )

  def reset_metrics(self):
    for variable in self.local_variables:
      variable.assign(tf.zeros_like(variable))
