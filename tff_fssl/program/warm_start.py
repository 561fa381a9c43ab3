"""Weights that a new run starts from (`--init_from`).

TensorFlow is imported only when weights are read, so that a wrong path is
refused at once.
"""

from collections.abc import Callable, Mapping, Sequence
import contextlib
import os
import tempfile
from typing import Any, NamedTuple
import warnings

import h5py
import numpy as np

from tff_fssl import files
from tff_fssl.algorithms import registry
from tff_fssl.hparams import UsageError
from tff_fssl.models import server_model
from tff_fssl.models.weights import Weights
from tff_fssl.program import checkpoint
from tff_fssl.program import config as config_lib
from tff_fssl.program import exported
from tff_fssl.program import flags
from tff_fssl.program import output_tree
from tff_fssl.rounds import states

_ZIP, _HDF5 = b'PK\x03\x04', b'\x89HDF\r\n\x1a\n'
_SUFFIXES = '.keras, .h5'
# In a checkpoint.
_WEIGHTS = 'process/global_model_weights'
_TABLE = 'process/distributor/table'
_ADVICE = (
  'Give the --model, --norm, --dataset and --train_layers of their run, or'
  ' weights of this model'
)
# Flags that tell users which model a checkpoint holds.
_MODEL_FLAGS = ('model', 'norm', 'dataset', 'train_layers')


def is_keras_file(path: str) -> bool:
  """Says whether a file begins as `.keras` or `.h5`, or raises `FileError`."""
  with files.open_binary(path) as file:
    start = file.read(len(_HDF5))
  return start == _HDF5 or start.startswith(_ZIP)


def read_keras(
  path: str, model: Any, *, new_head: bool = False
) -> list[np.ndarray | None]:
  """Reads the weights of a model from a Keras file, whatever its name.

  Args:
    path: The file: of `save` or `save_weights`, of Keras 3 or 2.
    model: The Keras model that the weights are for.
    new_head: Whether the file may lack the last layer with weights, or have
      another one (for other classes).

  Returns:
    The weights, in the order of `model.weights`. None stands for weights of a
    last layer that is not in the file.

  Raises:
    FileError: If the file cannot be read, or its weights are not this model's.
  """
  with files.open_binary(path) as file:
    is_zip = file.read(len(_ZIP)) == _ZIP
  try:
    ending = '.keras' if is_zip else _hdf5_ending(path)
    with tempfile.TemporaryDirectory() as folder:
      # Keras tells formats apart by the ending.
      link = os.path.join(folder, f'model{ending}')
      os.symlink(os.path.abspath(path), link)
      own = model.get_weights()
      try:
        return _read(path, link, model, new_head)
      finally:
        model.set_weights(own)
  except files.FileError:
    raise
  except Exception as error:  # pylint: disable=broad-except
    # Bad content makes zipfile and HDF5 raise errors of many types.
    reason = f'it cannot be read as a Keras file ({files.first_line(error)})'
    raise files.FileError(path, reason) from error


def _hdf5_ending(path: str) -> str:
  """Returns the ending by which Keras knows an HDF5 file's layout."""
  with h5py.File(path, 'r') as file:
    of_keras_2 = 'layer_names' in file.attrs or 'model_weights' in file
  return '.h5' if of_keras_2 else '.weights.h5'


def _reason(error: Exception) -> str:
  """Says in one line what Keras could not load, and why."""
  lines = [line for line in str(error).splitlines() if line.strip()]
  return ' '.join(lines[:2])[:400] or type(error).__name__


def _read(
  path: str, link: str, model: Any, new_head: bool
) -> list[np.ndarray | None]:
  """Reads weights as `read` does, but may raise any exception."""
  attempts: list[dict[str, bool]] = [{}]
  if new_head:
    attempts.append({'skip_mismatch': True})
    if link.endswith('/model.h5'):
      attempts.append({'skip_mismatch': True, 'by_name': True})
  layers = [layer for layer in model.layers if layer.weights]
  head = {id(v) for v in layers[-1].weights} if new_head else set()
  reason = ''
  for options in attempts:
    # What the file does not hold stays NaN.
    for variable in model.weights:
      missing = np.nan if 'float' in variable.dtype else 0
      variable.assign(np.full(variable.shape, missing))
    try:
      with warnings.catch_warnings(), contextlib.redirect_stdout(None):
        warnings.simplefilter('ignore')
        model.load_weights(link, **options)
    except ValueError as error:
      reason = reason or _reason(error)
      continue
    values = [np.asarray(v) for v in model.weights]
    lacking = [
      v
      for v, value in zip(model.weights, values, strict=True)
      if 'float' in v.dtype and np.all(np.isnan(value))
    ]
    if all(id(v) in head for v in lacking):
      # A head is read whole or not at all.
      gone = head if lacking else set()
      return [
        None if id(v) in gone else value
        for v, value in zip(model.weights, values, strict=True)
      ]
    reason = reason or f'it has no {lacking[0].path}'
  raise files.FileError(path, f'it belongs to another model ({reason})')


class Source(NamedTuple):
  """The source of weights.

  Attributes:
    about: Description of the source for users.
    keras: The Keras file, or '' for a run.
    leaves: Leaves of the run's checkpoint.
    model: Descriptions of the weights of the run's model, or None if not known.
    frozen: Weights of the run's layers that do not train.
    config: The configuration of a run with a model that predicts in its own
      way.
  """

  about: str
  keras: str = ''
  leaves: Mapping[str, Any] = {}
  model: checkpoint.Model | None = None
  frozen: Mapping[str, np.ndarray] = {}
  config: config_lib.Config | None = None


def find(init_from: str) -> Source:
  """Finds the weights that `--init_from` names.

  Args:
    init_from: A run's folder, for its last complete checkpoint, an exported
      model's folder, or a Keras file.

  Returns:
    The source.

  Raises:
    UsageError: If it is something else, or the run has no complete checkpoint.
  """
  tree = output_tree.OutputTree(init_from)
  if os.path.lexists(tree.flags_file):
    return _find_run(tree)
  if os.path.isdir(init_from):
    if os.path.lexists(os.path.join(init_from, exported.MANIFEST)):
      problem = exported.problem(init_from)
      if problem:
        raise UsageError(
          f'--init_from={init_from}: is not a whole exported model ({problem})'
        )
      inside = os.path.join(init_from, exported.KERAS_FILE)
      return Source(inside, inside)
    reason = 'it is none'
    if os.path.lexists(os.path.join(init_from, 'saved_model.pb')):
      reason = 'it is a SavedModel, which is not loaded since it could run code'
  else:
    try:
      if is_keras_file(init_from):
        return Source(init_from, init_from)
      reason = 'it is none'
    except files.FileError as error:
      reason = error.reason
  raise UsageError(
    f"--init_from={init_from}: must be a run's folder (with"
    f" {output_tree.FLAGS}), an exported model's (with {exported.KERAS_FILE}"
    f' and {exported.MANIFEST}) or a Keras file ({_SUFFIXES}); {reason}'
  )


def _find_run(tree: output_tree.OutputTree) -> Source:
  """Reads the last complete checkpoint of a run, or raises `UsageError`."""
  given = flags.read_flagfile(tree.flags_file)
  entry = registry.REGISTRY.get(given.get('algorithm', ''))
  # An unknown algorithm may be a user's; its model is tried.
  if entry is not None and entry.is_alone:
    raise UsageError(
      f'--init_from={tree.path}: in this run of --algorithm={entry.name} each'
      ' client has a model of its own, so there is none to start from; give'
      ' another run or model'
    )
  try:
    round_num, leaves = checkpoint.read_latest(
      tree.checkpoints, checkpoint.flags_owner(given)
    )
    header = checkpoint.read_header(
      checkpoint.path_of(tree.checkpoints, round_num)
    )
  except checkpoint.CheckpointError as error:
    raise UsageError(
      f'--init_from={tree.path}: no checkpoint of this run can be read'
      f' ({error}); you may give its exported model instead, if there is one:'
      f' --init_from={tree.model}'
    ) from error
  made = ' '.join(f'--{n}={given[n]}' for n in _MODEL_FLAGS if n in given)
  about = f'{tree.path}, round {round_num} ({made})'
  config = None
  if entry is not None and entry.predicts_otherwise:
    argv = [f'--flagfile={tree.flags_file}']
    config = config_lib.build_config(flags.parse(argv, config_lib.groups()))
  return Source(
    about,
    leaves=leaves,
    model=header.owner.model,
    frozen=read_frozen(tree, checkpoint.flags_owner(given)) or {},
    config=config,
  )


class Loaded(NamedTuple):
  """The initial weights of a new run.

  Attributes:
    weights: `Weights` of NumPy arrays, batch norm statistics included.
      Weights from a Keras model have a `statistics_count` of 1: the model has
      statistics, but does not say over how many examples.
    frozen: The weights of layers that do not train, as `frozen_variables` names
      them.
    new_layer: The last layer, if the file has another one, or ''.
  """

  weights: Any
  frozen: Mapping[str, np.ndarray]
  new_layer: str = ''


def read_frozen(
  tree: output_tree.OutputTree, owner: checkpoint.Owner
) -> Mapping[str, np.ndarray] | None:
  """Reads the weights of layers that do not train, or None if all layers do.

  Args:
    tree: The run.
    owner: Its flags.

  Returns:
    Weights as `frozen_variables` names them.

  Raises:
    UsageError: If they are missing, damaged or another run's.
  """
  if not (owner.flags or {}).get('train_layers'):
    return None
  try:
    return checkpoint.read_own(tree.frozen, owner)
  except checkpoint.CheckpointError as error:
    raise UsageError(
      f'{tree.frozen}: {error}; it holds the weights of layers that do not'
      ' train (--train_layers), without which this run cannot continue; restore'
      ' it, or start a new run'
    ) from error


def load(
  source: Source,
  model: Any,
  *,
  frozen: Mapping[str, Any] = {},
  whole: Any = None,
  new_weights: Callable[[], Sequence[np.ndarray]] | None = None,
) -> Loaded:
  """Reads weights for `model`.

  Args:
    source: The result of `find`.
    model: The network that the weights are for.
    frozen: Its weights that do not train, by name (`frozen_variables`).
    whole: The exported model of the algorithm, if it has layers after those of
      the network. Those layers are skipped.
    new_weights: Gives the weights of a new network, in Keras's order. The last
      layer takes them if that of a file is another one (it had other classes),
      or missing. None: this is refused.

  Returns:
    The weights.

  Raises:
    UsageError: If they belong to another network, or are not finite.
  """
  if source.keras:
    loaded = _load_keras(source.keras, model, frozen, whole, new_weights)
  else:
    wrong = checkpoint.model_differences(
      source.model or {}, checkpoint.describe_model(model)
    )
    if wrong:
      raise UsageError(
        f'--init_from: the weights of {source.about} do not fit the model that'
        f' the flags give: {wrong}. {_ADVICE}'
      )
    loaded = Loaded(_predicting(source), source.frozen)
  # One NaN would spread to all weights in the first round.
  held = [*loaded.weights[0], *loaded.weights[1], *loaded.frozen.values()]
  if not all(np.all(np.isfinite(w)) for w in held):
    raise UsageError(
      f'--init_from: the weights of {source.about} are not all finite; use'
      ' weights of an earlier round'
    )
  return loaded


def _load_keras(
  path: str,
  model: Any,
  frozen: Mapping[str, Any],
  whole: Any,
  new_weights: Callable[[], Sequence[np.ndarray]] | None,
) -> Loaded:
  """Loads weights as `load` does, from a Keras file."""
  whole = whole or model
  # A network with layers after its own has no classifier.
  may_be_new = new_weights is not None and whole is model
  try:
    found = read_keras(path, whole, new_head=may_be_new)
  except files.FileError as error:
    raise UsageError(f'--init_from={error}. {_ADVICE}') from error
  values: dict[Any, Any] = {
    v.value.ref(): value for v, value in zip(whole.weights, found, strict=True)
  }
  new_layer = ''
  if new_weights is not None and any(value is None for value in found):
    for variable, value in zip(model.weights, new_weights(), strict=True):
      if values[variable.value.ref()] is None:
        values[variable.value.ref()] = value
        new_layer = variable.path.rpartition('/')[0]
  names = {v.ref(): name for name, v in frozen.items()}
  trainable, non_trainable = (
    tuple(values[ref] for v in weights if (ref := v.value.ref()) not in names)
    for weights in (model.trainable_weights, model.non_trainable_weights)
  )
  return Loaded(
    Weights(trainable, non_trainable, np.float32(1.0)),
    {name: values[ref] for ref, name in names.items()},
    new_layer,
  )


def _predicting(source: Source) -> Any:
  """Returns the weights with which the model of a run predicts."""
  model = extract_model(source.leaves)
  if source.config is None:
    return model.weights
  config = source.config
  algorithm = config.entry.configure(config.algorithm, config.round)
  prediction = states.States(algorithm).prediction
  trainable, non_trainable, count = prediction.weights(model)
  return model.weights._replace(
    trainable=tuple(map(np.asarray, trainable)),
    non_trainable=tuple(map(np.asarray, non_trainable)),
    statistics_count=np.float32(count),
  )


def extract_model(leaves: Mapping[str, Any]) -> Any:
  """Returns the model among the leaves of a checkpoint.

  Args:
    leaves: The leaves of the checkpoint, as `checkpoint.read` returns them.

  Returns:
    The `ServerModel`.

  Raises:
    UsageError: If the checkpoint holds none.
  """
  tree = _below(leaves, _WEIGHTS)
  if 'statistics_count' not in tree:
    raise UsageError('the checkpoint holds no weights of a model')

  def tensors(numbered):
    return tuple(numbered[str(index)] for index in range(len(numbered)))

  def weights(inner):
    return Weights(
      tensors(inner.get('trainable', {})),
      tensors(inner.get('non_trainable', {})),
      inner['statistics_count'],
    )

  return server_model.ServerModel(*weights(tree))._replace(
    sets={
      name: weights(inner) if 'statistics_count' in inner else inner
      for name, inner in tree.get('sets', {}).items()
    },
    control=tree.get('control', {}),
  )


def extract_table(leaves: Mapping[str, Any]) -> Any:
  """Returns the exchange's table among the leaves, as nested dicts.

  Args:
    leaves: The leaves of the checkpoint, as `checkpoint.read` returns them.

  Returns:
    The table, or empty if the algorithm has no exchange.
  """
  return _below(leaves, _TABLE)


def _below(leaves: Mapping[str, Any], root: str) -> dict[str, Any]:
  """Returns the leaves with paths that start with `root`, nested."""
  prefix = f'{root}/'
  tree: dict[str, Any] = {}
  for path, leaf in leaves.items():
    if path.startswith(prefix):
      *folders, name = path.removeprefix(prefix).split('/')
      inner = tree
      for folder in folders:
        inner = inner.setdefault(folder, {})
      inner[name] = leaf
  return tree
