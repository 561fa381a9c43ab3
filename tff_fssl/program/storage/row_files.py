"""Rows that a server keeps of each client, in files of their own.

A row, once written, is never changed: a client's row of another round is in
another file. So every checkpoint that is kept finds the rows of its round, and
a run that is killed and resumed at a checkpoint has the rows that it had then.

The files have a checkpoint's format: they are written completely or not at all,
and a file that is damaged, or another run's, is noticed.
"""

import collections
from collections.abc import Iterable, Mapping, Sequence
import os
import re
from typing import Any

import numpy as np

from tff_fssl import durable
from tff_fssl import files
from tff_fssl.hparams import UsageError
from tff_fssl.program.storage import checkpoint

_NAME = re.compile(
  r'client_(0|[1-9]\d{0,8})_round_([1-9]\d{0,8})\.row', re.ASCII
)


def is_name(name: str) -> bool:
  """Returns whether a file of this name is a row."""
  return _NAME.fullmatch(name) is not None


class RowFiles:
  """The rows of a run."""

  def __init__(self, folder: str, owner: checkpoint.Owner = checkpoint.NOBODY):
    """Sets the folder, which is made when the first row is written.

    Args:
      folder: The folder.
      owner: The run and the model that the rows belong to.
    """
    self._folder, self._owner = folder, owner

  def write(
    self, client_id: int, round_num: int, row: Mapping[str, np.ndarray]
  ) -> None:
    """Writes the row that a client sent in a round, or raises `UsageError`."""
    durable.make_folder(self._folder)
    checkpoint.write(self._path(client_id, round_num), row, self._owner)

  def read(self, client_id: int, round_num: int) -> dict[str, np.ndarray]:
    """Reads the row that a client sent in a round.

    Args:
      client_id: The client.
      round_num: The round.

    Returns:
      Name -> array.

    Raises:
      UsageError: If the file is missing, damaged, renamed or another run's.
    """
    path = self._path(client_id, round_num)
    try:
      return checkpoint.read_own(path, self._owner)
    except checkpoint.CheckpointError as error:
      raise UsageError(
        f'{path}: {error}. The checkpoint of this run needs the row of client'
        f' {client_id} from round {round_num}; restore the file, or start again'
        ' with another --output_dir'
      ) from error

  def drop_after(self, round_num: int) -> None:
    """Removes the rows of rounds that are repeated."""
    # They are of rounds that are about to be repeated.
    for _, of_round, path in self._all():
      if of_round > round_num:
        durable.remove(path)
    # The folder appears with the first row.
    if os.path.isdir(self._folder):
      durable.remove_leftovers(self._folder, is_name)

  def retain_versions(self, versions: Iterable[int]) -> None:
    """Removes the rows that no kept checkpoint needs.

    Args:
      versions: The rounds of the checkpoints that are kept. Each needs the last
        row of each client up to its round. Rows of later rounds are kept.
    """
    versions = sorted(versions)
    of_client: dict[int, list[int]] = {}
    for client_id, round_num, _ in self._all():
      of_client.setdefault(client_id, []).append(round_num)
    for client_id, rounds in of_client.items():
      # Each checkpoint may be the one that a later start resumes from.
      needed = {
        max((r for r in rounds if r <= version), default=0)
        for version in versions
      }
      for round_num in rounds:
        if round_num not in needed and round_num <= max(versions, default=0):
          durable.remove(self._path(client_id, round_num))

  def _path(self, client_id: int, round_num: int) -> str:
    return os.path.join(
      self._folder, f'client_{client_id}_round_{round_num}.row'
    )

  def _all(self) -> list[tuple[int, int, str]]:
    """Lists (client, round, path) of each row, in order."""
    try:
      names = os.listdir(self._folder)
    except FileNotFoundError:
      return []
    except OSError as error:
      raise files.FileError(self._folder, files.reason_of(error)) from error
    matches = (_NAME.fullmatch(name) for name in names)
    return sorted(
      (int(m[1]), int(m[2]), os.path.join(self._folder, m[0]))
      for m in matches
      if m
    )


class OutsideRows:
  """Rows that a process keeps outside of its state."""

  def __init__(self, outside: Any, rows: RowFiles):
    """Puts a process and its files together.

    Args:
      outside: `FsslProcess.outside`, not None.
      rows: The files.
    """
    self._outside, self._rows = outside, rows

  def load(self, state: Any, client_ids: Sequence[int]) -> Any:
    """Loads the rows that a round needs into the state before it.

    Args:
      state: The process's state, of NumPy arrays.
      client_ids: The clients of the round.

    Returns:
      The state.

    Raises:
      UsageError: If a row cannot be read.
    """
    held = state.distributor
    table = self._outside.bring(
      held['table'], client_ids, int(held['round_num']), self._rows.read
    )
    return _replace_table(state, table)

  def store(self, state: Any) -> Any:
    """Stores the rows of the state after a round in files."""
    table = state.distributor['table']
    return _replace_table(state, self._outside.take(table, self._rows.write))

  def retain_versions(self, versions: Iterable[int]) -> None:
    """Removes the rows that no kept checkpoint needs, as `RowFiles` does."""
    self._rows.retain_versions(versions)


def _replace_table(state: Any, table: Any) -> Any:
  held = collections.OrderedDict(state.distributor, table=table)
  return state._replace(distributor=held)
