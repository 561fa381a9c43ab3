"""The example of docs/embedding.md runs, and gives usable Keras models."""

import dataclasses
import importlib.util
import pathlib

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tff_fssl.models import adapter
from tff_fssl.models import evaluate
from tff_fssl.models.weights import Weights

_PATH = pathlib.Path(__file__).parents[2] / 'examples' / 'embed_fl2.py'
_layers = tf.keras.layers


@pytest.fixture(name='example')
def _example():
  spec = importlib.util.spec_from_file_location('embed_fl2', _PATH)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  previous = tff.framework.get_context_stack().current
  yield module
  tff.framework.set_default_context(previous)


def _backbone_model():
  """A model within a model, one of its layers frozen."""
  backbone = tf.keras.Sequential(
    [
      tf.keras.Input((32, 32, 3)),
      _layers.Conv2D(4, 3, strides=4, trainable=False),
      _layers.BatchNormalization(),
      _layers.ReLU(),
    ]
  )
  inputs = tf.keras.Input((32, 32, 3))
  hidden = _layers.GlobalAveragePooling2D()(backbone(inputs))
  return tf.keras.Model(inputs, _layers.Dense(4)(hidden))


@pytest.mark.parametrize(
  'small', [True, pytest.param(False, marks=pytest.mark.slow)]
)
def test_runs_and_its_weights_go_into_a_keras_model(example, small, tmp_path):
  if small:
    example.model_fn = _backbone_model
  process = example.build_process(
    dataclasses.replace(example.ROUNDS, client_epochs=1, server_epochs=1)
  )
  model = example.train(process, 1, tmp_path)
  x, y = example.make_images(50, seed=9)
  logits = model.predict(example.VIEWS.plain(tf.constant(x)), verbose=0)
  # Our evaluation of the weights that the model now has.
  weights = Weights(
    tuple(model.trainable_variables), tuple(model.non_trainable_variables), 1.0
  )
  ours = evaluate.build_evaluate_fn(example.model_fn, example.VIEWS)(
    weights, x, y
  )
  loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
  np.testing.assert_allclose(float(loss(y, logits)), ours['loss'], rtol=1e-4)
  assert np.mean(np.argmax(logits, -1) == y) == pytest.approx(ours['accuracy'])
  # It was trained, and its statistics were gathered. (A shift before batch
  # norm, as MobileNetV2 has them, has no gradient.)
  network = adapter.Network(example.model_fn, seed=0)
  initial = network.initial_weights()
  for new, old in zip(weights, initial[:2]):
    changed = [not np.allclose(a, b) for a, b in zip(new, old, strict=True)]
    assert np.mean(changed) > 0.8 if new is weights.trainable else any(changed)


def test_weights_of_a_keras_model_go_into_the_state(example):
  example.model_fn = _backbone_model
  process = example.build_process()
  tff.framework.set_default_context(example.fssl.runtime.build_context())
  model = example.model_fn()
  state = process.set_model_weights(
    process.initialize(),
    tff.learning.models.ModelWeights(
      model.trainable_weights, model.non_trainable_weights
    ),
  )
  for new, old in zip(
    state.global_model_weights.trainable, model.trainable_variables, strict=True
  ):
    np.testing.assert_array_equal(new, old)
