"""Durable managers that implement the interfaces of `tff.program`.

TFF's own are not durable: `FileProgramStateManager` neither flushes nor removes
what killed saves left; `CSVFileReleaseManager` appends to torn rows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
import contextlib
import os
import re
import struct
from typing import Any

from absl import logging
import tree

from tff_fssl import durable
from tff_fssl import files
from tff_fssl.hparams import UsageError
from tff_fssl.lazy import tf, tff
from tff_fssl.program.storage import checkpoint
from tff_fssl.program.storage import csv_table
from tff_fssl.program.storage import ownership

_LINE = re.compile(r'round (0|-?[1-9]\d{0,17}): ', re.ASCII)


class DurableProgramStateManager(tff.program.ProgramStateManager):
  """Saves program states as files, one per version, and keeps the last few.

  A version is the number of a round (negative or 0 in pre-training). A save is
  complete or has not happened, whenever the program or the machine dies.
  """

  def __init__(
    self,
    root_dir: str,
    *,
    keep_total: int = 3,
    warn: Callable[[str], None] = logging.warning,
    owner: ownership.Owner = ownership.NOBODY,
    keep_also_fn: Callable[[], int | None] = lambda: None,
  ):
    """Opens a folder of checkpoints; removes what killed saves left there.

    Args:
      root_dir: The folder; made if missing.
      keep_total: How many of the latest versions are kept, at least 1.
      warn: Called when a checkpoint cannot be used.
      owner: The owner of the states. Files of another owner are neither loaded
        nor removed.
      keep_also_fn: Called after each save; returns one more version to keep, or
        None.
    """
    if keep_total < 1:
      raise ValueError(f'keep_total={keep_total}: must be at least 1')
    durable.make_folder(root_dir)
    durable.remove_leftovers(root_dir, checkpoint.is_name)
    self._root_dir = root_dir
    self._owner = owner
    self._keep_also_fn = keep_also_fn
    self._keep_total = keep_total
    self._warn = warn

  async def get_versions(self) -> list[int] | None:
    """Returns the saved versions, ascending, or None."""
    return checkpoint.versions(self._root_dir) or None

  async def load(self, version: int, structure: Any) -> Any:
    """Loads a version.

    Args:
      version: The version of a saved state.
      structure: The structure of that state. Leaves with a shape and a dtype
        must match; a data source iterator tells which class reads its bytes.

    Returns:
      The state, with NumPy arrays.

    Raises:
      ProgramStateNotFoundError: If there is no such version.
      CheckpointError: If it is damaged, belongs to another owner, or has
        another structure.
    """
    path = checkpoint.path_of(self._root_dir, version)
    if not os.path.lexists(path):
      raise tff.program.ProgramStateNotFoundError(version)
    leaves = await asyncio.to_thread(checkpoint.read_own, path, self._owner)
    return fill_structure(leaves, structure)

  async def load_latest(self, structure: Any) -> tuple[Any, int]:
    """Loads the latest complete version.

    Later versions that are damaged are reported, and moved out of the way.

    Args:
      structure: The structure of the state; see `load`.

    Returns:
      (state, version), or (None, 0) if there is no version.

    Raises:
      UsageError: If there are checkpoints, but none can be used; or if one is
        not damaged but belongs to another owner, so that it must not be moved.
    """
    damaged = {}
    for version in reversed(checkpoint.versions(self._root_dir)):
      try:
        state = await self.load(version, structure)
      except checkpoint.DamagedError as error:
        damaged[version] = str(error)
        continue
      except checkpoint.CheckpointError as error:
        raise UsageError(
          f'{checkpoint.path_of(self._root_dir, version)} cannot be used:'
          f' {error}. Move it away, or choose another --output_dir'
        ) from error
      for other, reason in damaged.items():
        path = checkpoint.path_of(self._root_dir, other)
        durable.rename(path, path + checkpoint.DAMAGED)
        self._warn(
          f'{path} cannot be used: {reason}. It was renamed to'
          f' {os.path.basename(path)}{checkpoint.DAMAGED}; going back to round'
          f' {version}.'
        )
      return state, version
    if damaged:
      version, reason = max(damaged.items())
      path = checkpoint.path_of(self._root_dir, version)
      raise UsageError(
        f'none of the {len(damaged)} checkpoints in {self._root_dir} can be'
        f' used; {os.path.basename(path)}: {reason}. To start from the'
        ' beginning, remove them or choose another --output_dir'
      )
    return None, 0

  async def save(self, program_state: Any, version: int) -> None:
    """Saves a version, then removes the oldest ones.

    Args:
      program_state: The state: arrays, scalars, data source iterators, or
        references to these, in any containers that `tree` knows.
      version: The version, larger than all saved ones.

    Raises:
      ProgramStateExistsError: If there is such a version.
      UsageError: If the disk refuses.
    """
    path = checkpoint.path_of(self._root_dir, version)
    if os.path.lexists(path):
      raise tff.program.ProgramStateExistsError(
        version=version, path=self._root_dir
      )
    state = await tff.program.materialize_value(program_state)
    leaves = _list_leaves(state)
    await asyncio.to_thread(checkpoint.write, path, leaves, self._owner)
    await asyncio.to_thread(self._remove_old)

  def _remove_old(self) -> None:
    """Removes the owner's versions that are not kept."""
    kept = self._keep_also_fn()
    for old in checkpoint.versions(self._root_dir)[: -self._keep_total]:
      path = checkpoint.path_of(self._root_dir, old)
      if old == kept:
        continue
      with contextlib.suppress(checkpoint.CheckpointError):
        checkpoint.check_owner(path, self._owner)
        # One call removes one file: a kill cannot leave half of it.
        durable.remove(path)


class CsvReleaseManager(tff.program.ReleaseManager):
  """Releases nested scalars as a row of a `CsvTable`; joins names with '/'."""

  def __init__(self, path: str):
    """Opens the table, or makes it; cuts off a torn last line.

    Args:
      path: The file; its folder must exist.

    Raises:
      UsageError: If the file is not such a table.
    """
    self.table = csv_table.CsvTable(path)

  async def release(self, value: Any, key: int) -> None:
    """Appends a row; rows of `key` and later ones are removed first.

    Args:
      value: Nested mapping of scalars, or of references to scalars.
      key: The round.
    """
    value = await tff.program.materialize_value(value)
    await asyncio.to_thread(self.table.append, key, flatten(value))


class LinesReleaseManager(tff.program.ReleaseManager):
  """Releases lines of text that begin with 'round N: '."""

  def __init__(self, path: str):
    """Sets the file, which is made when there is something to write.

    Args:
      path: The file; its folder must exist.

    Raises:
      UsageError: If the path holds something else.
    """
    self.path = path
    self._read()

  async def release(self, value: Sequence[str], key: int) -> None:
    """Appends lines; those of round `key` and later ones are removed first.

    Args:
      value: The lines, without their 'round N: '.
      key: The round.
    """
    lines = [line for of_round, line in self._read() if of_round < key]
    lines += [f'round {key}: {line}\n' for line in value]
    await asyncio.to_thread(
      durable.write_file, self.path, [''.join(lines).encode()]
    )

  def _read(self) -> list[tuple[int, str]]:
    """Reads (round, line) of all lines; raises `UsageError`."""
    if not os.path.lexists(self.path):
      return []
    lines = re.findall('[^\n]*\n|[^\n]+$', files.read_text(self.path))
    matches = [_LINE.match(line) for line in lines]
    result = []
    for line_num, (line, match) in enumerate(zip(lines, matches), 1):
      if match is None or not line.endswith('\n'):
        raise UsageError(
          f'{self.path}, line {line_num}: does not begin with "round N: ", or'
          ' has no line end; the file was changed: put it right, or move it'
          ' away'
        )
      result.append((int(match[1]), line))
    return result


class BestEffortReleaseManager(tff.program.ReleaseManager):
  """Releases through another manager, whose failure does not stop a run."""

  def __init__(
    self,
    manager: tff.program.ReleaseManager,
    name: str,
    warn: Callable[[str], None],
  ):
    """Wraps a manager.

    Args:
      manager: The manager.
      name: Name of the manager in the warning.
      warn: Called at the first failure; nothing more is released after it.
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
      # Any error: training and the CSV files matter more.
      self._manager = None
      self._warn(failure(self._name, error))


def failure(name: str, error: Exception) -> str:
  """Warns that something which failed is skipped from now on."""
  return f'{name} stops: {type(error).__name__}: {files.first_line(error)}'


def flatten(value: Any, prefix: str = '') -> dict[str, Any]:
  """Flattens nested mappings and named tuples, joining names by '/'."""
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


def _is_serializable(leaf: Any) -> bool:
  # TFF does not export the base class.
  return isinstance(leaf, tff.program.FederatedDataSourceIterator)


def _list_leaves(state: Any) -> dict[str, Any]:
  return {
    path: leaf.to_bytes() if _is_serializable(leaf) else leaf
    for path, leaf in _named_leaves(state)
  }


def fill_structure(leaves: Mapping[str, Any], structure: Any) -> Any:
  """Puts a checkpoint's leaves in their places.

  Args:
    leaves: The leaves, as `checkpoint.read` returns them.
    structure: See `DurableProgramStateManager.load`.

  Returns:
    The state, with NumPy arrays.

  Raises:
    CheckpointError: If they do not match `structure`.
  """
  expected = _named_leaves(structure)
  names = [path for path, _ in expected]
  if sorted(names) != sorted(leaves):
    odd = sorted(set(names) ^ set(leaves))
    raise checkpoint.ForeignError(
      f'it belongs to another program: {odd[0]!r} is in only one of the two'
    )
  values = []
  for path, like in expected:
    value = leaves[path]
    if _is_serializable(like):
      try:
        values.append(type(like).from_bytes(value))
      except (ValueError, struct.error) as error:
        raise checkpoint.ForeignError(f'{path!r}: {error}') from error
      continue
    shape, dtype = getattr(like, 'shape', None), getattr(like, 'dtype', None)
    dtype = getattr(dtype, 'as_numpy_dtype', dtype)
    # Lengths may be unknown.
    if not tf.TensorShape(shape).is_compatible_with(value.shape) or (
      dtype is not None and dtype != value.dtype
    ):
      raise checkpoint.ForeignError(
        f'it belongs to another program: {path!r} is {value.dtype}'
        f' {list(value.shape)}, not {like}'
      )
    values.append(value)
  return tree.unflatten_as(structure, values)
