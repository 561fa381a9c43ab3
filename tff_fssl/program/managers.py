"""Implementations of the interfaces of `tff.program`.

TFF's `FileProgramStateManager` is not durable: it neither flushes nor removes
leftovers of killed saves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
import contextlib
import os
import struct
from typing import Any

from absl import logging
import tree

from tff_fssl import durable
from tff_fssl.hparams import UsageError
from tff_fssl.lazy import tf, tff
from tff_fssl.program import checkpoint
from tff_fssl.program import loggers


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
    owner: checkpoint.Owner = checkpoint.NOBODY,
    keep_also_fn: Callable[[], int | None] = lambda: None,
  ):
    """Opens a folder of checkpoints, and removes leftovers of killed saves.

    Args:
      root_dir: The folder, which is made if missing.
      keep_total: The number of latest versions that are kept, at least 1.
      warn: Called when a checkpoint cannot be used.
      owner: The owner of the states. Files of another owner are neither loaded
        nor removed.
      keep_also_fn: Called after each save, to return one more version to keep,
        or None.
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
    """Lists the saved versions in ascending order, or returns None."""
    return checkpoint.versions(self._root_dir) or None

  async def load(self, version: int, structure: Any) -> Any:
    """Loads a version.

    Args:
      version: The version of a saved state.
      structure: The structure of that state. Leaves with a shape and a dtype
        must match. A data source iterator tells which class reads its bytes.

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
      structure: The structure of the state. See `load`.

    Returns:
      (state, version), or (None, 0) if there is no version.

    Raises:
      UsageError: If all checkpoints are damaged, or one belongs to another
        owner and so must not be moved.
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
      # Moved only now, when an earlier version is known to be whole.
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
    # Values may still be computed when a save is asked for.
    state = await tff.program.materialize_value(program_state)
    leaves = {
      path: leaf.to_bytes() if _is_serializable(leaf) else leaf
      for path, leaf in _named_leaves(state)
    }
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


class LoggerReleaseManager(tff.program.ReleaseManager):
  """Lets programs of TFF release metrics to a logger.

  A logger that fails does not stop the program.
  """

  def __init__(
    self, logger: loggers.Logger, name: str, warn: Callable[[str], None]
  ):
    """Wraps a logger.

    Args:
      logger: The logger.
      name: Its name in the warning.
      warn: Called at the first failure. Nothing is logged after it.
    """
    self._logger: loggers.Logger | None = logger
    self._name, self._warn = name, warn

  async def release(self, value: Any, key: int) -> None:
    """Logs nested scalars, or references to scalars, of round `key`."""
    value = await tff.program.materialize_value(value)
    if self._logger is None:
      return
    try:
      self._logger.log(int(key), flatten(value))
    except Exception as error:  # pylint: disable=broad-except
      self._logger = None
      self._warn(loggers.failure(self._name, error))


def flatten(value: Any, prefix: str = '') -> dict[str, Any]:
  """Flattens nested mappings and named tuples, with names joined by '/'."""
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


def leaf_paths(structure: Any) -> list[str]:
  """Lists the paths of a state's leaves in its checkpoints."""
  return [path for path, _ in _named_leaves(structure)]


def _named_leaves(structure: Any) -> list[tuple[str, Any]]:
  return [
    ('/'.join(map(str, path)), leaf)
    for path, leaf in tree.flatten_with_path(structure)
  ]


def _is_serializable(leaf: Any) -> bool:
  # TFF does not export the base class.
  return isinstance(leaf, tff.program.FederatedDataSourceIterator)


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
  # Before any value is read, since another program may have other types.
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
        # Bytes are read by this class only: a file cannot choose one.
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
