"""Exports the model, with its card, as files that need no TFF.

Every figure in the card is one of the run's flags, partition or tables, so that
the same model of the same run always has the same card.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from typing import Any
import warnings

import jinja2
import numpy as np

import tff_fssl
from tff_fssl import durable
from tff_fssl import files
from tff_fssl import hparams
from tff_fssl import metrics
from tff_fssl.aggregators import hparams as aggregator_hparams
from tff_fssl.data import data_hparams
from tff_fssl.data import names as data_names
from tff_fssl.data import partition as partition_lib
from tff_fssl.data import sources
from tff_fssl.data import text_views
from tff_fssl.hparams import UsageError
from tff_fssl.lazy import tf
from tff_fssl.models import adapter
from tff_fssl.models import server_model
from tff_fssl.program import config as config_lib
from tff_fssl.program import console
from tff_fssl.program import experiment
from tff_fssl.program import exported
from tff_fssl.program import inputs
from tff_fssl.program import partitions
from tff_fssl.program import runs as runs_lib

# Packages that decide a model's output.
_PACKAGES = ('tensorflow', 'tensorflow-federated', 'keras', 'numpy')
# Kind -> the task, as model hubs call it.
_TASKS = {
  data_names.IMAGES: 'image-classification',
  data_names.VECTORS: 'tabular-classification',
  data_names.TEXTS: 'text-classification',
}
# Flags with values that may name a folder of the machine that trained.
_WITH_PATHS = ('availability_file', 'dataset', 'init_from', 'model')
# `model.tflite` is compared with the model on so many test examples, and may
# differ by so much, which rounding does not reach.
_NUM_COMPARED, _MOST_DIFFERENCE = 256, 1e-3
# What Markdown or HTML would take for markup.
_MARKUP = re.compile(r'([\\`*_{}\[\]<>|#~$])')
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


@dataclasses.dataclass(frozen=True)
class Subject:
  """The model that a card is about, and where it comes from.

  Attributes:
    config: The configuration of its run.
    data: The data set.
    partition: The holders of the examples.
    run: The run's tables.
    round_num: The round after which this was the model.
    is_best: Whether validation examples selected that round, not the end.
    num_weights: The number of weights that train.
    formula: The formula from examples to inputs of `model.keras`.
    has_tflite: Whether there is a `model.tflite`.
  """

  config: config_lib.Config
  data: sources.DataSet
  partition: partition_lib.Partition
  run: runs_lib.Run
  round_num: int
  is_best: bool
  num_weights: int
  formula: str
  has_tflite: bool = False

  def measured(self, column: str) -> float | None:
    """Returns a figure of the model's round, or None if it is not known."""
    rounds, values = self.run.curve(column)
    at = rounds == self.round_num
    return float(values[at][0]) if at.any() else None


def render(subject: Subject) -> str:
  """Writes the card.

  Args:
    subject: The model.

  Returns:
    Markdown, with the front matter that model hubs read.
  """
  environment = jinja2.Environment(
    loader=jinja2.PackageLoader('tff_fssl.program', '.'),
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
    # A misspelt name in the template is an error, not an empty text.
    undefined=jinja2.StrictUndefined,
  )
  environment.filters['md'] = _escaped
  environment.filters['yaml'] = lambda value: json.dumps(
    value, ensure_ascii=False
  )
  config, data = subject.config, subject.data
  accuracy = subject.measured('test/accuracy')
  content = environment.get_template('model_card.md.j2').render(
    subject=subject,
    config=config,
    data=data,
    data_name=config_lib.data_name(config.run.dataset),
    task=_TASKS[data.train.kind],
    network=_strip_folders(config.run.model),
    accuracy=accuracy,
    interval=accuracy is not None
    and metrics.accuracy_interval(accuracy, len(data.test)),
    percent=console.format_percent,
    rows_of_data=_rows_of_data(subject),
    flags=_flags(config),
    privacy=_privacy(subject),
    versions=inputs.installed(_PACKAGES),
  )
  return files.printable(content, lines=True)


def _escaped(text: Any) -> str:
  """Escapes a text of a data set or a flag as no markup."""
  return _MARKUP.sub(r'\\\1', ' '.join(str(text).split()))


def _rows_of_data(subject: Subject) -> dict[str, str]:
  """Describes the data and their holders."""
  config, data = subject.config, subject.data
  training = f'{len(data.train):,} for training, ' * (not config.is_private)
  describe = (
    partitions.describe_public if config.is_private else partitions.describe
  )
  held = describe(subject.partition)
  held.pop('names', None)  # Client names may identify people.
  # Notes on other sets begin with their folder.
  is_file = config.run.dataset.startswith((*data_names.PATHS, data_names.HUB))
  note = {'note': data.notes} if data.notes and not is_file else {}
  return {
    'examples': f'{training}{len(data.test):,} for testing:'
    f' {data.train.kind.noun} of {data_names.shape_text(data.example_shape)}',
    **note,
    'scenario': config.round.scenario.replace('_', ' '),
    'division': held.pop('partition'),
    'of the training examples': held.pop('examples'),
    **held,
  }


def _flags(config: config_lib.Config) -> list[str]:
  """Lists the flags that are not at their defaults."""
  usual = runs_lib.usual_flags(config.run.algorithm)
  ignored = config_lib.neutral_flags()
  result = []
  for name, value in sorted(config.flags().items()):
    text = hparams.format_value(value)
    if name in ignored or text == usual.get(name):
      continue
    # The card may be published, and a path can name a user.
    if name in _WITH_PATHS:
      text = _strip_folders(text)
    result.append(f'--{name}={text}')
  return result


def _strip_folders(text: str) -> str:
  """Reduces a path in a flag's value to its last name."""
  if text.startswith(data_names.HUB):
    return text
  return re.sub('[^:]*/(?=[^/])', '', text)


def _privacy(subject: Subject) -> str:
  """Says which guarantee of privacy training data have."""
  aggregator = subject.config.aggregator
  if not subject.config.aggregates:
    name = ''
  else:
    name = aggregator.aggregator
  if name == aggregator_hparams.DP:
    epsilon = subject.measured('aggregator/epsilon')
    spent = 'unknown epsilon' if epsilon is None else f'epsilon {epsilon:.4g}'
    return (
      'Updates were clipped and noised: client-level differential privacy'
      f' (replacement of all data of one client) with {spent} at delta'
      f' {aggregator.dp_delta:g}. It does not hold against those who know the'
      ' seed, and so not against readers of this card; in a deployment there is'
      ' none. Labels at the server, and a choice among rounds or runs by their'
      ' results, are not covered.'
    )
  simulated = (
    ' Secure sums were replaced by plain ones.'
    if name == aggregator_hparams.SECURE
    else ''
  )
  return (
    'There is no privacy guarantee: the weights may reveal training data.'
    + simulated
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

  def predict_on_device(self, examples: tf.Tensor) -> dict[str, tf.Tensor]:
    """Predicts as `predict`, but takes the numbers of a text's words."""
    if self._kind == data_names.VECTORS:
      examples = examples[:, tf.newaxis]  # The plain view is the only one.
    logits = self._logits(self._views.plain(examples))
    return {'probabilities': tf.nn.softmax(logits)}

  def _predict(self, examples: tf.Tensor) -> dict[str, tf.Tensor]:
    if self._kind == data_names.TEXTS:
      examples = text_views.tokens(
        examples,
        self._data.vocabulary_size,
        self._data.max_words,
        self._data.text_unit,
      )
    return self.predict_on_device(examples)


def export_model(
  task: experiment.Task,
  model: server_model.ServerModel,
  folder: str,
  round_num: int,
  run: runs_lib.Run,
  *,
  is_best: bool,
) -> str:
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

  Returns:
    What became of `model.tflite`, or '' without `--export_tflite`.

  Raises:
    UsageError: If the disk refuses.
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
  said = (
    _write_tflite(task, module, new) if task.config.run.export_tflite else ''
  )
  durable.write_file(
    os.path.join(new, exported.ABOUT_FILE),
    [json.dumps(describe(task, round_num), indent=2).encode()],
  )
  durable.write_file(
    os.path.join(new, exported.CARD_FILE),
    [
      _card(
        task,
        module,
        round_num,
        run,
        is_best,
        os.path.lexists(os.path.join(new, exported.TFLITE_FILE)),
      ).encode()
    ],
  )
  # The manifest must not reach the disk before the files that it vouches for.
  _sync(new)
  exported.write_manifest(new, round_num)
  exported.replace(folder)
  return said and f'{os.path.join(folder, exported.TFLITE_FILE)}: {said}'


def _write_tflite(
  task: experiment.Task, module: ServingModel, folder: str
) -> str:
  """Writes `model.tflite` if it predicts as the model, and says how well.

  It takes what `module` takes, but of texts the numbers of their words.
  """
  test = task.data.test.x
  x = test[:: -(-len(test) // _NUM_COMPARED)]
  if task.data.train.kind == data_names.VECTORS:
    x = x[:, 0]
  (given,) = module.predict.input_signature
  # Devices have no operations on text.
  name = 'words' if task.data.train.kind == data_names.TEXTS else given.name
  spec = tf.TensorSpec([None, *x.shape[1:]], x.dtype, name)
  on_device = tf.function(
    module.predict_on_device, autograph=False, input_signature=[spec]
  )
  try:
    # Its own warnings are about its new name.
    with warnings.catch_warnings(action='ignore'):
      content = tf.lite.TFLiteConverter.from_concrete_functions(
        [on_device.get_concrete_function()], module
      ).convert()
      found = _run_tflite(content, x)
  except Exception as error:  # pylint: disable=broad-except
    # It raises errors of many classes, and no file is worth the whole export.
    return f'not written, since {files.first_line(error)}'
  wanted = on_device(tf.constant(x))['probabilities'].numpy()
  difference = float(np.abs(found - wanted).max())
  # NaN is no small difference.
  if not difference <= _MOST_DIFFERENCE:
    return (
      f'not written, since its probabilities differ from the model by up to'
      f' {difference:.2g} on {len(x)} test examples'
    )
  durable.write_file(os.path.join(folder, exported.TFLITE_FILE), [content])
  return (
    f'{len(content) / 1e3:,.0f} KB; on {len(x)} test examples its probabilities'
    f' differ from the model by at most {difference:.1g}'
  )


def _run_tflite(content: bytes, x: np.ndarray) -> np.ndarray:
  """Predicts by LiteRT, float32 [N, classes]."""
  # The default delegate announces itself on the console.
  kinds = tf.lite.experimental.OpResolverType
  interpreter = tf.lite.Interpreter(
    model_content=content,
    experimental_op_resolver_type=kinds.BUILTIN_WITHOUT_DEFAULT_DELEGATES,
  )
  (taken,), (given,) = (
    interpreter.get_input_details(),
    interpreter.get_output_details(),
  )
  interpreter.resize_tensor_input(taken['index'], x.shape)
  interpreter.allocate_tensors()
  interpreter.set_tensor(taken['index'], np.ascontiguousarray(x))
  interpreter.invoke()
  return np.asarray(interpreter.get_tensor(given['index']))


def describe(task: experiment.Task, round_num: int) -> dict[str, Any]:
  """Returns what `about.json` says of a model, and of its inputs."""
  return {
    'tff_fssl': tff_fssl.__version__,
    'round': round_num,
    'classes': list(task.data.class_names),
    'example_shape': list(task.data.example_shape),
    'inputs_of_model.keras': _inputs(task),
    'prepared': {
      'bit_depth': task.data.bit_depth,
      'columns': getattr(task.config.info, 'columns', ()),
    },
    'flags': task.config.flags(),
  }


def _card(
  task: experiment.Task,
  module: ServingModel,
  round_num: int,
  run: runs_lib.Run,
  is_best: bool,
  has_tflite: bool,
) -> str:
  """Renders the model's card."""
  weights = module.network.trainable_variables
  return render(
    Subject(
      task.config,
      task.data,
      task.partition,
      run,
      round_num,
      is_best,
      sum(variable.shape.num_elements() for variable in weights),
      _inputs(task)['formula'],
      has_tflite,
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
