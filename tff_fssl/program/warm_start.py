"""Weights that a new run starts from (`--init_from`).

TensorFlow-free until they are read: a wrong path is refused at once. Hence no
types of TensorFlow here: models are `tf.keras.Model`, weights
`adapter.Weights`.
"""

from collections.abc import Mapping, Sequence
import os
from typing import Any, NamedTuple

import numpy as np

from tff_fssl.hparams import UsageError
from tff_fssl.program import checkpoint
from tff_fssl.program import flags
from tff_fssl.program import output_tree

KERAS_FILE = 'model.keras'  # In an exported model's folder.
_SUFFIXES = ('.keras', '.h5')
_WEIGHTS = 'process/global_model_weights'  # In a checkpoint.
_MODEL_FLAGS = ('model', 'norm', 'dataset')
_NUM_SHOWN = 3


class Source(NamedTuple):
  """Where weights come from.

  Attributes:
    about: What it is, for people.
    keras: The Keras model, a file or a folder; '' for a run.
    leaves: What the run's checkpoint holds.
  """

  about: str
  keras: str = ''
  leaves: Mapping[str, Any] = {}


def find(init_from: str) -> Source:
  """Finds what `--init_from` names, and reads it if it is a run.

  Args:
    init_from: A run's folder, whose last whole checkpoint counts; or a Keras
      model: a file, an exported model's folder, Keras's SavedModel.

  Returns:
    The source.

  Raises:
    UsageError: If it is none of these, or the run has no whole checkpoint.
  """
  tree = output_tree.OutputTree(init_from)
  if os.path.exists(tree.flags_file):
    try:
      round_num, leaves = checkpoint.read_latest(tree.checkpoints)
    except checkpoint.CheckpointError as error:
      raise UsageError(
        f'--init_from={init_from}: no checkpoint of this run can be read'
        f' ({error}); its exported model, if there is one, will do as well:'
        f' --init_from={tree.model}'
      ) from error
    given = flags.read_flagfile(tree.flags_file)
    made = ' '.join(f'--{n}={given[n]}' for n in _MODEL_FLAGS if n in given)
    return Source(f'{init_from}, round {round_num} ({made})', leaves=leaves)
  inside = os.path.join(init_from, KERAS_FILE)
  if os.path.isfile(inside):
    return Source(inside, inside)
  if os.path.isfile(os.path.join(init_from, 'saved_model.pb')) or (
    os.path.isfile(init_from) and init_from.endswith(_SUFFIXES)
  ):
    return Source(init_from, init_from)
  reason = 'it is none' if os.path.exists(init_from) else 'it does not exist'
  raise UsageError(
    f"--init_from={init_from}: must be a run's folder (with"
    f" {output_tree.FLAGS}), an exported model's (with {KERAS_FILE}) or a whole"
    f' Keras model ({", ".join(_SUFFIXES)}, SavedModel); {reason}'
  )


def load(source: Source, model: Any) -> Any:
  """Reads weights for `model`, batch norm statistics included.

  Args:
    source: What `find` found.
    model: The network that they are for.

  Returns:
    The weights, as NumPy arrays. Those of a Keras model have a
    `statistics_count` of 1: it has statistics, and does not say of how much.

  Raises:
    UsageError: If they are another network's, or not finite.
  """
  from tff_fssl.models import adapter  # pylint: disable=import-outside-toplevel

  if source.keras:
    other = _load_keras(source.keras)
    weights = adapter.Weights(
      tuple(v.numpy() for v in other.trainable_variables),
      tuple(v.numpy() for v in other.non_trainable_variables),
      np.float32(1.0),
    )
  else:
    other, weights = None, from_leaves(source.leaves)
  wrong = [
    *_differences('trainable_variables', weights.trainable, model, other),
    *_differences('non_trainable_variables', weights[1], model, other),
  ]
  if wrong:
    more = f'; and {len(wrong) - _NUM_SHOWN} more' * (len(wrong) > _NUM_SHOWN)
    raise UsageError(
      f'--init_from: the weights of {source.about} are not those of the model'
      f' that the flags give: {"; ".join(wrong[:_NUM_SHOWN])}{more}. Give the'
      ' --model, --norm and --dataset that they were trained with, or weights'
      ' of this model'
    )
  if not all(np.all(np.isfinite(w)) for kind in weights[:2] for w in kind):
    raise UsageError(
      f'--init_from: the weights of {source.about} are not all finite; take'
      ' those of an earlier round'
    )
  return weights


def from_leaves(leaves: Mapping[str, Any]) -> Any:
  """The model's weights in a checkpoint, as `checkpoint.read` gives it."""
  from tff_fssl.models import adapter  # pylint: disable=import-outside-toplevel

  def part(name):
    prefix = f'{_WEIGHTS}/{name}/'
    count = sum(path.startswith(prefix) for path in leaves)
    return tuple(leaves[f'{prefix}{index}'] for index in range(count))

  return adapter.Weights(
    part('trainable'),
    part('non_trainable'),
    leaves[f'{_WEIGHTS}/statistics_count'],
  )


def _differences(
  kind: str,
  values: Sequence[np.ndarray],
  model: Any,
  other: Any,
) -> list[str]:
  """How values differ from a model's variables, in words.

  Args:
    kind: Which variables of a model.
    values: What they are to become.
    model: The model.
    other: The model that the values are of, if its names are known.

  Returns:
    A phrase for each difference.
  """
  variables = getattr(model, kind)
  if len(values) != len(variables):
    return [f'{len(values)} {kind} there, {len(variables)} here']
  pairs = [
    (_describe(named.name, value), _describe(variable.name, variable))
    for named, value, variable in zip(
      getattr(other or model, kind), values, variables
    )
  ]
  return [
    f'{there} there, {here} here' for there, here in pairs if there != here
  ]


def _describe(name: str, tensor: Any) -> str:
  dtype = np.dtype(getattr(tensor.dtype, 'as_numpy_dtype', tensor.dtype)).name
  return f'{name.removesuffix(":0")} {dtype} {list(tensor.shape)}'


def _load_keras(path: str) -> Any:
  """A whole Keras model; raises `UsageError`."""
  import tensorflow as tf  # pylint: disable=import-outside-toplevel

  try:
    model = tf.keras.models.load_model(path, compile=False)
  except Exception as error:  # pylint: disable=broad-except
    # Whatever a file's content makes Keras raise: its types are many.
    reason = str(error).partition('\n')[0] or type(error).__name__
    raise UsageError(
      f'--init_from={path}: Keras cannot load it as a whole model ({reason});'
      ' save one with model.save'
    ) from error
  if not isinstance(model, tf.keras.Model):
    raise UsageError(
      f'--init_from={path}: is a SavedModel that Keras did not write; give the'
      f' exported folder with its {KERAS_FILE}, or a .keras file'
    )
  return model
