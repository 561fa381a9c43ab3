"""Durable managers on `tff.program`'s interfaces.

TFF's own are not durable: `FileProgramStateManager` neither flushes nor removes
what killed saves left, `CSVFileReleaseManager` appends to torn rows.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
import os
from typing import Any

from absl import logging
import tensorflow_federated as tff
import tree

from tff_fssl import durable
from tff_fssl.hparams import UsageError
from tff_fssl.program import checkpoint
from tff_fssl.program import csv_table

_DAMAGED = '.damaged'
# What is saved by its own `to_bytes`. (TFF does not export the base class.)
_SERIALIZABLE = tff.program.FederatedDataSourceIterator


class DurableProgramStateManager(tff.program.ProgramStateManager):
  """Program states as files, one a version, of which the last few are kept.

  A version is the number of a round (which may be negative: pre-training). A
  save is whole or has not happened, whenever the program or the machine dies.
  """

  def __init__(
    self,
    root_dir: str,
    *,
    keep_total: int = 3,
    warn: Callable[[str], None] = logging.warning,
  ):
    """Opens a folder of checkpoints; removes what killed saves left there.

    Args:
      root_dir: The folder; made if missing.
      keep_total: How many versions are kept, the latest ones, at least 1.
      warn: Told when a checkpoint cannot be used.
    """
    if keep_total < 1:
      raise ValueError(f'keep_total={keep_total}: must be at least 1')
    durable.make_folder(root_dir)
    durable.remove_leftovers(root_dir)
    self._root_dir = root_dir
    self._keep_total = keep_total
    self._warn = warn

  async def get_versions(self) -> list[int] | None:
    """The saved versions, ascending, or None."""
    return checkpoint.versions(self._root_dir) or None

  async def load(self, version: int, structure: Any) -> Any:
    """Loads a version.

    Args:
      version: Of a saved state.
      structure: Of that state; a leaf with a shape and a dtype must match, a
        data source iterator says what class its bytes are read by.

    Returns:
      The state, with NumPy arrays.

    Raises:
      ProgramStateNotFoundError: If there is no such version.
      CheckpointError: If it is damaged, or of another structure.
    """
    path = checkpoint.path_of(self._root_dir, version)
    if not os.path.exists(path):
      raise tff.program.ProgramStateNotFoundError(version)
    leaves = await asyncio.to_thread(checkpoint.read, path)
    return _to_structure(leaves, structure)

  async def load_latest(self, structure: Any) -> tuple[Any, int]:
    """Loads the latest version that is whole.

    Later ones that are not are said so of, and moved out of the way.

    Args:
      structure: As `load`'s.

    Returns:
      (state, version), or (None, 0) if there is none at all.

    Raises:
      UsageError: If there are checkpoints, but none can be used.
    """
    damaged = {}
    for version in reversed(checkpoint.versions(self._root_dir)):
      try:
        state = await self.load(version, structure)
      except checkpoint.CheckpointError as error:
        damaged[version] = str(error)
        continue
      for other, reason in damaged.items():
        path = checkpoint.path_of(self._root_dir, other)
        durable.rename(path, path + _DAMAGED)
        self._warn(
          f'{path} cannot be used: {reason}. It was renamed to'
          f' {os.path.basename(path)}{_DAMAGED}; going back to round {version}.'
        )
      return state, version
    if damaged:
      version, reason = max(damaged.items())
      path = checkpoint.path_of(self._root_dir, version)
      raise UsageError(
        f'none of the {len(damaged)} checkpoints in {self._root_dir} can be'
        f' used; {os.path.basename(path)}: {reason}. To start anew, remove them'
        ' or choose another --output_dir'
      )
    return None, 0

  async def save(self, program_state: Any, version: int) -> None:
    """Saves a version, then removes the oldest ones.

    Args:
      program_state: The state: arrays, scalars, data source iterators, or
        references to such, in any containers that `tree` knows.
      version: Larger than all saved ones.

    Raises:
      ProgramStateExistsError: If there is such a version.
      UsageError: If the disk refuses.
    """
    path = checkpoint.path_of(self._root_dir, version)
    if os.path.exists(path):
      raise tff.program.ProgramStateExistsError(
        version=version, path=self._root_dir
      )
    state = await tff.program.materialize_value(program_state)
    leaves = _to_leaves(state)
    await asyncio.to_thread(
      durable.write_file, path, checkpoint.to_chunks(leaves)
    )
    for old in checkpoint.versions(self._root_dir)[: -self._keep_total]:
      # One file, one call: a kill here leaves it or has removed it.
      durable.remove(checkpoint.path_of(self._root_dir, old))


class CsvReleaseManager(tff.program.ReleaseManager):
  """Releases nested scalars as a row of a `CsvTable`, names joined by '/'."""

  def __init__(self, path: str):
    """Opens the table, or makes it; repairs a torn end.

    Args:
      path: The file; its folder exists.

    Raises:
      UsageError: If the file is not such a table.
    """
    self.table = csv_table.CsvTable(path)

  async def release(self, value: Any, key: int) -> None:
    """Appends a row; rows of `key` and later ones are removed first.

    Args:
      value: Nested mapping of scalars, or of references to such.
      key: The round.
    """
    value = await tff.program.materialize_value(value)
    await asyncio.to_thread(self.table.append, key, flatten(value))


class LinesReleaseManager(tff.program.ReleaseManager):
  """Releases lines of text that begin with 'round N: '."""

  def __init__(self, path: str):
    """Names the file, which is made when there is something to write.

    Args:
      path: The file; its folder exists.
    """
    self.path = path

  async def release(self, value: Sequence[str], key: int) -> None:
    """Appends lines; those of round `key` and later ones are removed first.

    Args:
      value: The lines, without what they begin with.
      key: The round.
    """
    lines = []
    if os.path.exists(self.path):
      with open(self.path, encoding='utf-8') as file:
        lines = [
          line for line in file if int(line.split(':')[0].split()[1]) < key
        ]
    lines += [f'round {key}: {line}\n' for line in value]
    await asyncio.to_thread(
      durable.write_file, self.path, [''.join(lines).encode()]
    )


class BestEffortReleaseManager(tff.program.ReleaseManager):
  """Releases as another manager does, whose failure does not stop a run."""

  def __init__(
    self,
    manager: tff.program.ReleaseManager,
    name: str,
    warn: Callable[[str], None],
  ):
    """Wraps a manager.

    Args:
      manager: The manager.
      name: What it is called in the warning.
      warn: Told of the first failure, after which nothing more is released.
    """
    self._manager: tff.program.ReleaseManager | None = manager
    self._name = name
    self._warn = warn

  async def release(self, value: Any, key: int) -> None:
    """Releases the value, if nothing has failed so far."""
    if self._manager is None:
      return
    try:
      await self._manager.release(value, key)
    except Exception as error:  # pylint: disable=broad-except
      # Whatever it is, training and the CSV files matter more.
      self._manager = None
      self._warn(f'{self._name} stops: {type(error).__name__}: {error}')


def flatten(value: Any, prefix: str = '') -> dict[str, Any]:
  """Nested mappings (and named tuples) as one, names joined by '/'."""
  if hasattr(value, '_asdict'):
    value = value._asdict()
  if isinstance(value, (list, tuple)):
    value = {str(index): item for index, item in enumerate(value)}
  if not isinstance(value, Mapping):
    return {prefix: value}
  result: dict[str, Any] = {}
  for name, item in value.items():
    result |= flatten(item, f'{prefix}/{name}' if prefix else str(name))
  return result


def _named_leaves(structure: Any) -> list[tuple[str, Any]]:
  return [
    ('/'.join(map(str, path)), leaf)
    for path, leaf in tree.flatten_with_path(structure)
  ]


def _to_leaves(state: Any) -> dict[str, Any]:
  return {
    path: leaf.to_bytes() if isinstance(leaf, _SERIALIZABLE) else leaf
    for path, leaf in _named_leaves(state)
  }


def _to_structure(leaves: Mapping[str, Any], structure: Any) -> Any:
  """Puts leaves in their places, if they are those of `structure`."""
  expected = _named_leaves(structure)
  names = [path for path, _ in expected]
  if sorted(names) != sorted(leaves):
    odd = sorted(set(names) ^ set(leaves))
    raise checkpoint.CheckpointError(
      f'it is of another program: it and this one differ in {odd[0]!r}'
    )
  values = []
  for path, like in expected:
    value = leaves[path]
    if isinstance(like, _SERIALIZABLE):
      values.append(type(like).from_bytes(value))
      continue
    shape, dtype = getattr(like, 'shape', None), getattr(like, 'dtype', None)
    dtype = getattr(dtype, 'as_numpy_dtype', dtype)
    if (shape is not None and tuple(shape) != value.shape) or (
      dtype is not None and dtype != value.dtype
    ):
      raise checkpoint.CheckpointError(
        f'it is of another program: {path!r} is {value.dtype}'
        f' {list(value.shape)}, not {like}'
      )
    values.append(value)
  return tree.unflatten_as(structure, values)
