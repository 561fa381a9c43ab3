"""A client's work in a phase of a round, whatever brings the message."""

from collections.abc import Mapping, Sequence
import importlib
import json
import os
from typing import Any, NamedTuple

import numpy as np

UNKNOWN_LABEL = -1

# What the server says of its message, beside the program: see `check_about`.
_COUNTS = ('round', 'phase', 'client', 'slot')


class WorkError(Exception):
  """Data or a message that a client cannot work with."""


class Done(NamedTuple):
  """The result of a phase.

  Attributes:
    about: What the reply says that it is about.
    values: The values for the server.
    kept: Slot -> value that later phases of the round need here.
  """

  about: dict[str, Any]
  values: list[Any]
  kept: dict[int, Any]


def setting(
  node_config: Mapping[str, Any], name: str, default: str | None = None
) -> str:
  """Reads a setting of this client.

  Args:
    node_config: What `flower-supernode --node-config` gives.
    name: The name there. Without it, the environment variable `FSSL_NAME`
      counts, for runners that start the SuperNode themselves, such as NVFlare.
    default: The value if there is neither. None: there must be one.

  Returns:
    The value, as text.

  Raises:
    WorkError: If there is none.
  """
  variable = f'FSSL_{name.upper()}'
  value = node_config.get(name, os.environ.get(variable, default))
  if value is None:
    raise WorkError(
      f'this client has no {name}: give {name}=... in --node-config, or set the'
      f' environment variable {variable}'
    )
  return str(value)


def count(
  node_config: Mapping[str, Any], name: str, default: str | None = None
) -> int:
  """Reads a setting that is a number, 0 or more: see `setting`."""
  text = setting(node_config, name, default)
  if not text.isdecimal():
    raise WorkError(f'{name}={text}: must be a number, 0 or more')
  return int(text)


def load_program(folder: str = '') -> Any:
  """Loads the `artefact.Program` of a folder, or the one of this app."""
  artefact = importlib.import_module('fssl_app.artefact')
  return artefact.Program(folder or os.path.dirname(os.path.abspath(__file__)))


def check_about(program: Any, about: Mapping[str, Any]) -> Mapping[str, Any]:
  """Finds the phase that a message is for.

  Args:
    program: The program.
    about: What the message is about.

  Returns:
    The description of the phase.

  Raises:
    WorkError: If it is a message of another app, or of none.
  """
  if about.get('program') != program.digest:
    raise WorkError('the server has another version of the app')
  phases, seed = program.description['phases'], about.get('seed')
  if not (
    all(isinstance(about.get(name), int) for name in _COUNTS)
    and 0 <= about['phase'] < len(phases)
    and isinstance(about.get('share'), float)
    and isinstance(seed, list)
    and len(seed) == 2
  ):
    raise WorkError('the message is not one of this app')
  return phases[about['phase']]


def run(
  program: Any,
  about: Mapping[str, Any],
  sent: Sequence[Any],
  examples: tuple[Any, Any],
  kept: dict[int, Any],
) -> Done:
  """Runs a phase.

  Args:
    program: The program.
    about: What the message is about, as `check_about` accepts it.
    sent: Its values.
    examples: The result of `load_client`.
    kept: What the phase before has kept, in the same round.

  Returns:
    The result.

  Raises:
    WorkError: If the examples do not fit.
  """
  data = make_data(program, about, *examples)
  values, kept = program.work(int(about['phase']), sent, data, kept)
  names = ('round', 'phase', 'client', 'program')
  return Done({name: about[name] for name in names}, values, kept)


def make_data(
  program: Any,
  about: Mapping[str, Any],
  labeled: tuple[Any, Any] | None,
  unlabeled: Any,
) -> list[np.ndarray]:
  """Makes the arrays that the graphs take of a client's examples.

  Args:
    program: The program.
    about: What the message is about: the seed, and the client's place.
    labeled: (x, y), or None.
    unlabeled: x, or None.

  Returns:
    The arrays.

  Raises:
    WorkError: If the examples have another shape or type, or are too many, or
      labels are no classes.
  """
  specs = {spec['name']: spec for spec in program.description['data']}
  values: dict[str, Any] = {
    'seed': np.array(about['seed'], np.int32),
    'client_id': np.int32(about['client']),
    'slot': np.int32(about['slot']),
    'share': np.float32(about['share']),
  }
  spec = specs['unlabeled/x']
  nothing = np.zeros([0, *spec['shape'][1:]], spec['dtype'])
  about_data = json.loads(program.read('client.json'))
  known = (nothing, []) if labeled is None else labeled
  labeled_x, labeled_y = np.asarray(known[0]), np.asarray(known[1])
  x = nothing if unlabeled is None else np.asarray(unlabeled)
  _check_examples('labeled', labeled_x, nothing)
  _check_examples('unlabeled', x, nothing)
  labeled_y = _check_labels(
    labeled_x, labeled_y, len(about_data['class_names'])
  )
  y = np.full(len(x), UNKNOWN_LABEL, np.int32)
  if about_data['labels_at_server']:
    # No client trains on labels. Metrics alone use those that it has.
    x, y = np.concatenate([x, labeled_x]), np.concatenate([y, labeled_y])
    labeled_x, labeled_y = nothing, labeled_y[:0]
  elif about_data['labeled_also_unlabeled']:
    x = np.concatenate([x, labeled_x])
    y = np.full(len(x), UNKNOWN_LABEL, np.int32)
  values |= {'labeled/x': labeled_x, 'labeled/y': labeled_y}
  values |= {'unlabeled/x': x, 'unlabeled/y': y}
  count = len(values['labeled/x']) + len(values['unlabeled/x'])
  most = about_data['max_examples']
  if count > most:
    raise WorkError(
      f'there are {count} examples; the server rejects clients with more than'
      f' {most} (deploy again with a larger --max_client_examples)'
    )
  return [values[name] for name in program.data]


def _check_examples(kind: str, x: np.ndarray, nothing: np.ndarray) -> None:
  """Raises `WorkError` unless examples have the shape and type of `nothing`."""
  if x.shape[1:] != nothing.shape[1:] or x.dtype != nothing.dtype:
    raise WorkError(
      f'{kind} examples are {x.dtype} {list(x.shape)}, but must be'
      f' {nothing.dtype} [N, {", ".join(map(str, nothing.shape[1:]))}]'
    )


def _check_labels(x: np.ndarray, y: np.ndarray, num_classes: int) -> np.ndarray:
  """Returns labels as int32, or raises `WorkError`."""
  if y.shape != x.shape[:1]:
    raise WorkError(f'there are {len(x)} labeled examples and {len(y)} labels')
  if y.size and y.dtype.kind not in 'iu':
    raise WorkError(f'labels are {y.dtype}, but must be integers')
  # Some kernels would read a label beyond the last class as no class at all.
  wrong = y[(y < 0) | (y >= num_classes)]
  if len(wrong):
    raise WorkError(
      f'there is a label {wrong[0]}; labels are 0 to {num_classes - 1}'
    )
  return y.astype(np.int32)
