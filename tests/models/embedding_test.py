"""Networks without their classifier."""

import functools

import numpy as np
import pytest
import tensorflow as tf
import tiny_task

from tff_fssl.hparams import UsageError
from tff_fssl.models import adapter
from tff_fssl.models import embedding
from tff_fssl.models import networks


@pytest.mark.parametrize(
  'name, width, num_weights', [('resnet9', 512, 6_563_520), ('cnn', 128, None)]
)
def test_named_networks(name, width, num_weights):
  whole_fn = functools.partial(
    networks.build_network, name, (32, 32, 3), 10, 'none'
  )
  model_fn = embedding.remove_classifier(whole_fn)
  assert model_fn.num_classes() == model_fn.num_classes(10) == 10
  with tf.Graph().as_default():
    model, whole = model_fn(), whole_fn()
    assert model.output_shape == (None, width)
    assert len(model.weights) == len(whole.weights) - len(
      whole.layers[-1].weights
    )
    if num_weights:  # Table 6.
      assert model.count_params() == num_weights
  assert embedding.remove_classifier(model_fn) is model_fn


def test_batch_norm_stays_ours():
  model_fn = embedding.remove_classifier(tiny_task.model_fn)
  network = adapter.Network(model_fn, seed=1)
  assert network.is_static and network.num_outputs == 4
  before = [v.numpy() for v in network.non_trainable_variables]
  images = tf.random.stateless_uniform([5, *tiny_task.IMAGE_SHAPE], [1, 2])
  network.logits(images, training=True)
  for variable, old in zip(
    network.non_trainable_variables, before, strict=True
  ):
    np.testing.assert_array_equal(variable, old)
  assert len(network.moments(images)) == 1


def _subclassed():
  class Model(tf.keras.Model):
    def call(self, inputs):
      return inputs

  return Model()


@pytest.mark.parametrize(
  'model_fn',
  [
    _subclassed,
    lambda: tf.keras.Sequential([tf.keras.layers.Dense(3)]),
    lambda: tf.keras.Sequential(
      [tf.keras.Input([4]), tf.keras.layers.Dense(3), tf.keras.layers.ReLU()]
    ),
  ],
  ids=['subclassed', 'not built', 'no classifier'],
)
def test_other_models_are_refused(model_fn):
  with pytest.raises(UsageError, match='ends with a Dense layer'):
    adapter.Network(embedding.remove_classifier(model_fn))


def test_a_wrong_number_of_classes_is_refused():
  model_fn = embedding.remove_classifier(tiny_task.model_fn)
  with pytest.raises(UsageError, match='a data set of 7 classes'):
    model_fn.num_classes(7)
