"""Exports the trained model as files that need neither this package nor TFF."""

from __future__ import annotations

import json
import os
from typing import Any

import numpy as np

import tff_fssl
from tff_fssl import durable
from tff_fssl.data import data_hparams
from tff_fssl.data import names as data_names
from tff_fssl.data import text_views
from tff_fssl.hparams import UsageError
from tff_fssl.lazy import tf
from tff_fssl.models import adapter
from tff_fssl.models import server_model
from tff_fssl.program import experiment
from tff_fssl.program import exported
from tff_fssl.program import model_card
from tff_fssl.program import runs as runs_lib

# What the network takes of an example.
_FORMULAS = {
  (data_names.IMAGES, data_hparams.STANDARD): '(image / 255 - mean) / std',
  (data_names.IMAGES, data_hparams.SCALE): 'image / 255',
  (data_names.IMAGES, data_hparams.NONE): 'image',
  (data_names.VECTORS, data_hparams.STANDARD): '(features - mean) / std',
  (data_names.VECTORS, data_hparams.NONE): 'features',
}
_DISK_ERRORS = (
  tf.errors.ResourceExhaustedError,
  tf.errors.PermissionDeniedError,
)


class ServingModel(tf.Module):
  """Images, vectors or texts in, probabilities out."""

  def __init__(self, task: experiment.Task, model: server_model.ServerModel):
    """Puts the model into the task's network and into constants."""
    super().__init__(name='serving')
    self.prediction = experiment.prediction_of(task.config)
    self.network = adapter.Network(task.model_fn, trace=False)
    self.network.assign(self.prediction.weights(model))
    self._views = task.views
    self._data = task.config.data
    self._kind = task.data.train.kind
    constants = tf.nest.map_structure(tf.constant, model)
    # A function, since TensorFlow would save an attribute.
    self._logits = lambda inputs: self.prediction.logits(
      self.network, constants, inputs
    )
    # TensorFlow saves the attributes of the module.
    self.variables_to_save = [
      *self.network.trainable_variables,
      *self.network.non_trainable_variables,
      *self.network.frozen_variables.values(),
      self.network.statistics_count,
    ]
    spec = {
      data_names.IMAGES: tf.TensorSpec(
        [None, *task.data.example_shape], tf.uint8, 'images'
      ),
      data_names.VECTORS: tf.TensorSpec(
        [None, task.data.example_shape[-1]], tf.float32, 'features'
      ),
      data_names.TEXTS: tf.TensorSpec([None], tf.string, 'texts'),
    }[self._kind]
    self.predict = tf.function(
      self._predict, autograph=False, input_signature=[spec]
    )

  def _predict(self, examples: tf.Tensor) -> dict[str, tf.Tensor]:
    if self._kind == data_names.TEXTS:
      examples = text_views.tokens(
        examples,
        self._data.vocabulary_size,
        self._data.max_words,
        self._data.text_unit,
      )
    elif self._kind == data_names.VECTORS:
      examples = examples[:, tf.newaxis]  # The plain view is the only one.
    logits = self._logits(self._views.plain(examples))
    return {'probabilities': tf.nn.softmax(logits)}


def export_model(
  task: experiment.Task,
  model: server_model.ServerModel,
  folder: str,
  round_num: int,
  run: runs_lib.Run,
  *,
  is_best: bool,
) -> None:
  """Writes the folder of a model, replacing an earlier export.

  It holds a SavedModel with preprocessing. Its signature `serving_default` maps
  `images`, uint8 [N, H, W, C], `features`, float32 [N, D], or `texts`, string
  [N], to `probabilities`, float32 [N, classes]. `model.keras` is the network
  alone, with `Prediction.head` if there is one, and `about.json` describes its
  inputs, the classes and the run. `README.md` is the model's card.
  `exported.problem` tells by `manifest.json` whether the export is complete.

  Args:
    task: Data and model.
    model: The trained model.
    folder: The folder to write.
    round_num: The round after which the model is exported.
    run: The tables of the run, for the card.
    is_best: Whether validation examples selected the round.

  Raises:
    UsageError: If the disk refuses, or the folder holds files that no export
      wrote.
  """
  new = exported.new_folder(folder)
  exported.remove_leftovers(folder)
  model = server_model.ServerModel(*model)
  module = ServingModel(task, model)
  network = _exported_network(task, module, model)
  try:
    # Into a new folder: the old model stays until this one is whole.
    tf.saved_model.save(module, new, {'serving_default': module.predict})
    network.save(os.path.join(new, exported.KERAS_FILE))
  except _DISK_ERRORS as e:
    raise UsageError(
      f'{new}: the model cannot be written ({e.message}); the run is saved: fix'
      ' this, and give the command again'
    ) from e
  config = task.config
  about = {
    'tff_fssl': tff_fssl.__version__,
    'round': round_num,
    'classes': list(task.data.class_names),
    'example_shape': list(task.data.example_shape),
    'inputs_of_model.keras': _inputs(task),
    'flags': config.flags(),
  }
  durable.write_file(
    os.path.join(new, exported.ABOUT_FILE),
    [json.dumps(about, indent=2).encode()],
  )
  durable.write_file(
    os.path.join(new, exported.CARD_FILE),
    [_card(task, module, round_num, run, is_best).encode()],
  )
  # The manifest must not reach the disk before the files that it vouches for.
  _sync(new)
  exported.write_manifest(new, round_num)
  exported.replace(folder)


def _card(
  task: experiment.Task,
  module: ServingModel,
  round_num: int,
  run: runs_lib.Run,
  is_best: bool,
) -> str:
  """Renders the model's card."""
  weights = module.network.trainable_variables
  return model_card.render(
    model_card.Subject(
      task.config,
      task.data,
      task.partition,
      run,
      round_num,
      is_best,
      sum(variable.shape.num_elements() for variable in weights),
      _inputs(task)['formula'],
    )
  )


def _inputs(task: experiment.Task) -> dict[str, Any]:
  """Describes the network's input, for use without the SavedModel."""
  kind, settings = task.data.train.kind, task.config.data
  if kind == data_names.TEXTS:
    return {
      'formula': f'for each of the first max_words {settings.text_unit} (lower'
      ' case; words are runs of letters, marks and digits): 1 +'
      ' Fingerprint64(word) %'
      ' (vocabulary_size - 1); then 0',
      'vocabulary_size': settings.vocabulary_size,
      'max_words': settings.max_words,
      'text_unit': settings.text_unit,
    }
  formula = _FORMULAS[kind, settings.normalization]
  if settings.normalization != data_hparams.STANDARD:
    return {'formula': formula}
  return {'formula': formula, 'mean': task.data.mean, 'std': task.data.std}


def _exported_network(
  task: experiment.Task, module: ServingModel, model: server_model.ServerModel
) -> tf.keras.Model:
  """Returns the Keras model that predicts as `module` does."""
  network = task.network
  network.set_weights(module.network.model.get_weights())
  head = module.prediction.head
  if head is None:
    return network
  whole = head.build(network, task.data.num_classes)
  for name, values in head.values(model).items():
    whole.get_layer(name).set_weights([np.asarray(value) for value in values])
  return whole


def _sync(folder: str) -> None:
  """Flushes a folder that TensorFlow wrote, file by file."""
  for path, _, names in os.walk(folder):
    for name in names:
      durable.sync_file(os.path.join(path, name))
    durable.sync_folder(path)
