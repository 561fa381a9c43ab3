"""`programs/predict.py`: classes of new files, by a trained model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
import csv
import dataclasses
import functools
import io
import itertools
import os
import pathlib
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from tff_fssl import durable
from tff_fssl import files
from tff_fssl import hparams
from tff_fssl import metrics
from tff_fssl.data import data_hparams
from tff_fssl.data import names as data_names
from tff_fssl.data import pictures
from tff_fssl.data.sources import columns as columns_lib
from tff_fssl.data.sources import folder as folder_lib
from tff_fssl.data.sources import table
from tff_fssl.data.sources import text as text_lib
from tff_fssl.hparams import UsageError
from tff_fssl.hparams import hparam
from tff_fssl.program import config as config_lib
from tff_fssl.program import console
from tff_fssl.program import evaluation
from tff_fssl.program import exported
from tff_fssl.program import flags
from tff_fssl.program import main as main_lib
from tff_fssl.program import output_tree

_USAGE = 'programs/predict.py RUN|MODEL DATA [--output=FILE.csv]'
_ABOUT = (
  'Predicts the classes of new examples by an exported model: MODEL is a'
  ' folder model/ or model_best/, or a copy of it, and RUN, the --output_dir of'
  " a run, has one; of a federation's run (docs/federation.md), the last"
  ' checkpoint predicts. DATA is an image, a folder of images (with all folders'
  ' in it), a CSV or Parquet file of the columns that the model was trained on,'
  ' or an NPZ file with x. They are prepared as in training. No label is'
  ' needed; where a column (label, diagnosis or the like), or class folders,'
  ' give some, the accuracy is shown, too.'
)
_ID, _CLASS, _TRUE, _PROBLEM = 'example', 'class', 'label', 'problem'
# More examples than any data set has, so that no flag is out of range.
_MANY = 10**9
# Prepared examples, float32 [N, ...] -> logits, float32 [N, classes].
_Logits: TypeAlias = Callable[[np.ndarray], Any]


@dataclasses.dataclass(frozen=True)
class PredictHparams:
  """Flags of `programs/predict.py`."""

  output: str = hparam(
    'predictions.csv',
    'CSV file to write: a row an example, with its path or row number, its'
    ' class, and the probability of each class.',
  )
  batch_size: int = hparam(
    256, 'Number of examples in a batch.', minimum=1, maximum=2**20
  )
  run_model_file: bool = hparam(
    False,
    'Run the Python file that --model=FILE.py:function of the training run'
    ' names. Only for models of your own.',
  )
  verbose: bool = hparam(False, "Show TensorFlow's messages.")

  def __post_init__(self):
    hparams.validate(self)


class Example(NamedTuple):
  """An example that was read.

  Attributes:
    name: Its path, or the number of its row.
    x: The example as views take it, or None if it cannot be read.
    label: The name of its class, or ''.
    problem: The reason why it cannot be read.
  """

  name: str
  x: np.ndarray | None
  label: str = ''
  problem: str = ''


class Model(NamedTuple):
  """An exported model, and how its inputs are prepared.

  Attributes:
    about: The record of the export.
    settings: The flags for reading.
    kind: The kind of examples.
    probabilities: Maps examples, [N, ...], to float32 [N, classes].
  """

  about: Mapping[str, Any]
  settings: data_hparams.DataHparams
  kind: data_names.Kind
  probabilities: Callable[[np.ndarray], np.ndarray]


@main_lib.command(
  _USAGE,
  _ABOUT,
  PredictHparams,
  missing='no model was given; give the folder of a run or model, and data',
  most=2,
)
def predict_main(own: PredictHparams, parsed: flags.ParsedFlags) -> None:
  """Predicts the classes of new examples."""
  if len(parsed.positional) < 2:
    raise UsageError(
      f'{parsed.positional[0]}: give the data to predict, too, as {_USAGE}'
    )
  main_lib.quiet(own.verbose)
  folder, data = parsed.positional
  model = load(folder, own)
  main_lib.prepare_output('output', own.output, '.csv')
  classes = model.about['classes']
  examples = read(data, model)
  text = io.StringIO()
  writer = csv.writer(text)
  writer.writerow(
    [_ID, _CLASS, _TRUE, _PROBLEM, *(f'p({name})' for name in classes)]
  )
  counts = dict.fromkeys(('examples', 'unreadable'), 0)
  judged: list[tuple[int, int]] = []
  while batch := list(itertools.islice(examples, own.batch_size)):
    found = [example.x for example in batch if example.x is not None]
    rows = iter(model.probabilities(np.stack(found)) if found else ())
    for example in batch:
      counts['examples'] += 1
      if example.x is None:
        counts['unreadable'] += 1
        row: list[Any] = ['', example.label, example.problem]
      else:
        p = next(rows)
        predicted = int(p.argmax())
        if example.label:
          judged.append((classes.index(example.label), predicted))
        row = [
          classes[predicted],
          example.label,
          '',
          *(f'{value:.4f}' for value in p),
        ]
      writer.writerow([example.name, *row])
  with durable.storage_errors('--output'):
    durable.write_file(own.output, [text.getvalue().encode()])
  console.show(console.table(_summary(counts, judged, own.output)))


def _summary(
  counts: Mapping[str, int], judged: Sequence[tuple[int, int]], output: str
) -> dict[str, str]:
  rows = {'examples': f'{counts["examples"]:,}', 'written': output}
  if counts['unreadable']:
    rows['unreadable'] = (
      f'{counts["unreadable"]:,}, whose rows say why, and have no class'
    )
  if judged:
    from tff_fssl.models import evaluate as evaluate_lib  # pylint: disable=C0415

    labels, predicted = np.transpose(judged)
    share = float(np.mean(labels == predicted))
    rows['accuracy'] = f'{share:.4f}, of {len(judged):,} with a label'
    if found := metrics.interval_of_few(share, len(judged)):
      rows['accuracy'] += f' (95% interval: {found[0]:.4f} to {found[1]:.4f})'
    figures = (metrics.BALANCED_ACCURACY, metrics.MACRO_F1)
    for name, value in evaluate_lib.score(figures, labels, predicted).items():
      rows[metrics.FIGURES[name]] = f'{value:.4f}'
  return rows


def load(folder: str, own: PredictHparams) -> Model:
  """Loads an exported model from its Keras file, without running code.

  Args:
    folder: The folder of the model, or of a run that has one.
    own: The batch size, and whether a Python file may run.

  Returns:
    The model.

  Raises:
    UsageError: If there is no whole exported model.
  """
  tree = output_tree.OutputTree(folder)
  # The server of a federation exports nothing, but says what a model takes.
  is_deployed = os.path.lexists(os.path.join(folder, exported.ABOUT_FILE))
  is_deployed &= os.path.lexists(tree.flags_file)
  if os.path.lexists(tree.flags_file) and not is_deployed:
    folder = tree.model
  problem = '' if is_deployed else exported.problem(folder)
  if problem:
    raise UsageError(
      f'{folder}: is not a whole exported model ({problem}); give a run that'
      ' has ended, or its model/'
    )
  about = exported.read_checked_about(folder)
  config = evaluation.parse_recorded(
    folder,
    evaluation.recorded_flags(about),
    own.run_model_file,
    _info(about),
  )
  is_standard = config.data.normalization == data_hparams.STANDARD
  if config.has_moments and is_standard and not config.data.mean:
    raise UsageError(
      f'{folder}: its {exported.ABOUT_FILE} has no mean and std, which'
      f' --normalization={data_hparams.STANDARD} needs'
    )

  # pylint: disable=import-outside-toplevel
  from scipy import special

  predict_fn = (_deployed if is_deployed else _exported)(folder, config)

  def probabilities(x: np.ndarray) -> np.ndarray:
    x = _normalized(about, config.data.normalization, x)
    return special.softmax(np.asarray(predict_fn(x)), axis=1)

  kind = data_names.kind_of(about['example_shape'])
  return Model(about, config.data, kind, probabilities)


def _exported(folder: str, config: config_lib.Config) -> _Logits:
  """Loads the Keras file of an exported model."""
  # pylint: disable=import-outside-toplevel
  from tff_fssl.models import evaluate as evaluate_lib
  from tff_fssl.models import server_model
  from tff_fssl.program import experiment
  from tff_fssl.program import warm_start

  model_fn = experiment.build_exported_fn(config)
  weights = warm_start.load(warm_start.find(folder), model_fn()).weights
  predict_fn = evaluate_lib.build_logits_fn(model_fn, config.info.input_shape)
  return functools.partial(predict_fn, server_model.ServerModel(*weights))


def _deployed(folder: str, config: config_lib.Config) -> _Logits:
  """Loads the last checkpoint of a federation's server."""
  # pylint: disable=import-outside-toplevel
  from tff_fssl.models import evaluate as evaluate_lib
  from tff_fssl.program import checkpoint
  from tff_fssl.program import experiment
  from tff_fssl.program import warm_start

  tree = output_tree.OutputTree(folder)
  prediction = experiment.prediction_of(config)
  if prediction.member:
    raise UsageError(
      f'{folder}: each client has a model of its own, so there is none to'
      ' predict with'
    )
  owner = checkpoint.flags_owner(tree.read_flags())
  frozen = warm_start.read_frozen(tree, owner)
  model_fn = experiment.build_model_fn(config, frozen)
  try:
    _, leaves = checkpoint.read_latest(
      tree.checkpoints, checkpoint.model_owner(owner, model_fn())
    )
  except checkpoint.CheckpointError as error:
    raise UsageError(
      f'{tree.checkpoints}: no checkpoint can be used: {error}'
    ) from error
  predict_fn = evaluate_lib.build_logits_fn(
    model_fn, config.info.input_shape, prediction=prediction
  )
  return functools.partial(predict_fn, warm_start.extract_model(leaves))


def _info(about: Mapping[str, Any]) -> data_names.DataSetInfo:
  """Makes the facts of data that this machine need not have."""
  every = {field.name for field in dataclasses.fields(data_hparams.DataHparams)}
  inputs = about['inputs_of_model.keras']
  return data_names.DataSetInfo(
    name=about['flags']['dataset'],
    num_classes=len(about['classes']),
    example_shape=tuple(about['example_shape']),
    num_train=_MANY,
    num_test=_MANY,
    num_server=_MANY,
    flip=False,
    mean=tuple(inputs.get('mean', ())),
    std=tuple(inputs.get('std', ())),
    uses=frozenset(every),
  )


def _normalized(
  about: Mapping[str, Any], normalization: str, x: np.ndarray
) -> np.ndarray:
  """Prepares a batch as the plain view does, float32 [N, ...]."""
  kind = data_names.kind_of(about['example_shape'])
  x = x.astype(np.float32)
  if kind == data_names.TEXTS:
    return x
  if kind == data_names.VECTORS:
    x = x[:, 0]
  elif normalization != data_hparams.NONE:
    x /= np.float32(255)
  if normalization == data_hparams.STANDARD:
    inputs = about['inputs_of_model.keras']
    x = (x - np.float32(inputs['mean'])) / np.float32(inputs['std'])
  return x


def read(data: str, model: Model) -> Iterator[Example]:
  """Reads new examples.

  Args:
    data: A file or a folder.
    model: What they are for.

  Returns:
    Yields the examples in order, those that cannot be read with the reason.

  Raises:
    UsageError: If they are of another kind than the model's, or cannot be read
      at all.
  """
  if model.kind == data_names.IMAGES and not data.endswith('.npz'):
    return _read_images(data, model)
  if os.path.isdir(data):
    raise UsageError(
      f'{data}: is a folder, but the model predicts {model.kind.noun}; give a'
      ' file'
    )
  if data.endswith('.npz'):
    return _read_arrays(data, model)
  rows = table.read_all(data)
  classes = model.about['classes']
  found = table.labels_for(
    rows,
    classes,
    field=model.settings.label_field,
    features=[column.name for column in _columns(model)],
  )
  # Words for an unknown class are no labels.
  labels = [label * (label in classes) for label in found]
  x = _texts(data, rows, model)
  if model.kind == data_names.VECTORS:
    x = _vectors(data, rows, model)
  return map(Example, rows.places, x, labels)


def _read_images(data: str, model: Model) -> Iterator[Example]:
  """Reads all images in a folder, or one."""
  root = pathlib.Path(data)
  if root.is_dir():
    paths = sorted(
      path
      for path in root.rglob('*')
      if pictures.is_image(path.name)
      and not any(map(folder_lib.is_litter, path.relative_to(root).parts))
    )
    if not paths:
      raise UsageError(f'{data}: has no images')
  else:
    files.open_binary(data).close()
    paths = [root]
  prepared = model.about.get('prepared', {})
  form = pictures.Form(
    tuple(model.about['example_shape']),
    model.settings.resize,
    prepared.get('bit_depth', pictures.MAX_DEPTH),
  )
  read_one = lambda path: pictures.read(path, form)
  classes = set(model.about['classes'])
  for path, picture in pictures.read_all(paths, read_one, form):
    name = str(path.relative_to(root)) if root.is_dir() else data
    label = path.parent.name if path.parent.name in classes else ''
    if isinstance(picture, str):
      yield Example(name, None, label, picture)
    else:
      yield Example(name, picture.pixels, label)


def _read_arrays(data: str, model: Model) -> Iterator[Example]:
  """Reads `x`, and `y` if it is there."""
  arrays = files.read_npz(data)
  x, shape = arrays.get('x'), tuple(model.about['example_shape'])
  is_vector = model.kind == data_names.VECTORS
  shapes = (shape, shape[1:]) if is_vector else (shape,)
  # Pixels from 0 to 1 would all become black.
  is_type = x is not None and (
    x.dtype.kind in 'fiu' if is_vector else x.dtype == model.kind.dtype
  )
  if x is None or x.shape[1:] not in shapes or not is_type:
    given = 'no x' if x is None else f'x {x.dtype} {list(x.shape)}'
    dtype = 'numbers' if is_vector else model.kind.dtype
    raise UsageError(
      f'{data}: has {given}; the model takes x, {dtype}, N of {list(shape)}'
    )
  with np.errstate(over='ignore'):
    x = x.reshape(len(x), *shape).astype(model.kind.dtype)
  wrong = ~np.isfinite(x).all(axis=tuple(range(1, x.ndim)))
  if wrong.any():
    raise UsageError(
      f'{data}: x has numbers that are not finite, first in row'
      f' {int(np.argmax(wrong)) + 1}'
    )
  names = [f'row {i + 1}' for i in range(len(x))]
  y = arrays.get('y')
  labels = [''] * len(x)
  if y is not None:
    if y.shape != (len(x),):
      raise UsageError(f'{data}: x has {len(x)} rows, y has shape {y.shape}')
    classes = model.about['classes']
    labels = [
      classes[int(v)]
      if y.dtype.kind in 'iu' and 0 <= v < len(classes)
      else str(v) * (str(v) in classes)
      for v in y.tolist()
    ]
  return map(Example, names, x, labels)


def _texts(data: str, rows: table.Table, model: Model) -> Any:
  """Converts the texts of a table to numbers of words."""
  if model.kind != data_names.TEXTS:
    return ()
  if 'text' not in rows.cells:
    raise UsageError(
      f'{data}: its columns are {", ".join(rows.cells)}; the model needs text'
    )
  from tff_fssl.data import text_views  # pylint: disable=C0415

  settings = model.settings
  return text_views.tokens(
    text_lib.texts_of(rows),
    settings.vocabulary_size,
    settings.max_words,
    settings.text_unit,
  ).numpy()


def _vectors(data: str, rows: table.Table, model: Model) -> np.ndarray:
  """Converts the rows of a table to vectors."""
  columns = _columns(model)
  if not columns:
    raise UsageError(
      f'{data}: the model was trained on vectors, not on a table; give an NPZ'
      ' file with x'
    )
  return columns_lib.encode(columns, rows.cells, data)[:, np.newaxis]


def _columns(model: Model) -> Sequence[columns_lib.Column]:
  """Returns the columns of the table that the model was trained on, or ()."""
  return columns_lib.parse(model.about.get('prepared', {}).get('columns', ()))
