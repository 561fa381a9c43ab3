"""A CSV file with one row per round that survives kills.

Each row is appended by a single write and flushed. A kill may leave a part of a
row at the end, without its line feed: it is removed on opening. A table that
cannot be read otherwise is damaged, and refused.
"""

from collections.abc import Mapping, Sequence
import csv
import io
import os
import re
from typing import Any

import numpy as np

from tff_fssl import durable
from tff_fssl import files
from tff_fssl.hparams import UsageError

KEY = 'round'
_LINE = re.compile(r'round (-?\d+): ', re.ASCII)


def format_cell(value: Any) -> str:
  """Formats a value: the shortest text that is read as the same value.

  Args:
    value: A Python or NumPy scalar, an array of shape [], or None if unknown.

  Returns:
    The text: '' for None, 'nan' for not a number.
  """
  if value is None:
    return ''
  if isinstance(value, str):
    return value
  value = np.asarray(value)
  if value.ndim:
    raise TypeError(f'a cell holds a scalar, not shape {list(value.shape)}')
  if value.dtype.kind in 'biu':
    return str(int(value))
  if value.dtype.kind != 'f':
    raise TypeError(f'a cell holds a number or text, not {value.dtype}')
  return str(value[()])


def read(path: str) -> tuple[list[str], list[dict[str, str]]]:
  """Reads the columns and the complete rows of a table.

  Args:
    path: The file.

  Returns:
    (columns, rows), both empty if the file is missing.

  Raises:
    UsageError: If the file cannot be read or is damaged.
  """
  return _read(path)[:2]


def _read(path: str) -> tuple[list[str], list[dict[str, str]], bytes]:
  """Returns (columns, rows, what a kill has left of a further row)."""
  if not os.path.lexists(path):
    return [], [], b''
  content, _, torn = files.read_bytes(path).rpartition(b'\n')
  try:
    columns, *lines = csv.reader(content.decode().split('\n'), strict=True)
    rows = [dict(zip(columns, line, strict=True)) for line in lines]
    keys = [int(row[KEY]) for row in rows]
    if columns[0] != KEY or keys != sorted(set(keys)):
      raise ValueError('its rounds are not in order')
  # No number, no text, no header, no table.
  except (ValueError, LookupError, csv.Error) as error:
    raise UsageError(
      f'{path}: is not a table of a run, or damaged'
      f' ({files.first_line(error)}); restore it, or move it away (the'
      " run's checkpoints do not need it)"
    ) from error
  return columns, rows, torn


def last_key(path: str) -> int | None:
  """Returns the key of the last complete row, if any. Raises `UsageError`."""
  rows = read(path)[1]
  return int(rows[-1][KEY]) if rows else None


def column(rows: Sequence[Mapping[str, str]], name: str) -> np.ndarray:
  """Returns a column as float64 [rows], or NaN where it is empty or missing.

  Args:
    rows: The rows of a table.
    name: The name of the column.

  Returns:
    The values.

  Raises:
    UsageError: If a cell is not a number.
  """
  return np.array([number(row, name) for row in rows], np.float64)


def number(row: Mapping[str, str], name: str) -> float:
  """Converts a cell, or NaN if empty or missing. Raises `UsageError`."""
  text = row.get(name) or 'nan'
  try:
    return float(text)
  except ValueError as error:
    raise UsageError(
      f'column {name} of round {row.get(KEY)} holds {text!r}, which is not a'
      ' number; fix it, or move the table away'
    ) from error


class CsvTable:
  """An open table.

  Attributes:
    path: The file.
    columns: The names of the columns, that of the key first.
    last_key: The key of the last row, if any.
  """

  def __init__(self, path: str):
    """Opens or makes a table, and removes a torn last line.

    Args:
      path: The file.

    Raises:
      UsageError: If the file is damaged. It is left unchanged.
    """
    self.path = path
    self.last_key: int | None = None
    self.columns, rows, torn = _read(path)
    if torn or not self.columns:
      self.columns = self.columns or [KEY]
      self._rewrite(rows)
    elif rows:
      self.last_key = int(rows[-1][KEY])

  def truncate_after(self, key: int) -> int:
    """Removes rows of later keys.

    Args:
      key: The last key to keep.

    Returns:
      The number of removed rows.
    """
    if self.last_key is None or self.last_key <= key:
      return 0
    rows = read(self.path)[1]
    kept = [row for row in rows if int(row[KEY]) <= key]
    self._rewrite(kept)
    return len(rows) - len(kept)

  def log(self, round_num: int, metrics: Mapping[str, Any]) -> None:
    """Appends a row, after removing rows of the same and of later rounds.

    Args:
      round_num: The row's key.
      metrics: Column -> scalar. See `format_cell`. New columns are allowed.

    Raises:
      UsageError: If the disk refuses. The table is then unchanged.
    """
    # A resumed run repeats rounds, and replaces their rows.
    self.truncate_after(round_num - 1)
    new = [name for name in metrics if name not in self.columns]
    if new:
      rows = read(self.path)[1]
      self.columns = [*self.columns, *new]
      self._rewrite(rows)
    row = {name: format_cell(value) for name, value in metrics.items()}
    durable.append(self.path, self._encode({**row, KEY: str(round_num)}))
    self.last_key = round_num

  def _rewrite(self, rows: Sequence[Mapping[str, str]]) -> None:
    header = self._encode({name: name for name in self.columns})
    durable.write_file(self.path, [header, *map(self._encode, rows)])
    self.last_key = int(rows[-1][KEY]) if rows else None

  def _encode(self, row: Mapping[str, str]) -> bytes:
    line = io.StringIO()
    cells = [row.get(name, '') for name in self.columns]
    csv.writer(line, lineterminator='\n').writerow(cells)
    return line.getvalue().encode()


class RoundLines:
  """A text file with lines that begin with 'round N: '."""

  def __init__(self, path: str):
    """Sets the file, which is made when there is something to write.

    Args:
      path: The file, in an existing folder.
    """
    self.path = path

  def log(self, round_num: int, lines: Sequence[str]) -> None:
    """Appends lines, after removing those of the same and of later rounds.

    Args:
      round_num: The round.
      lines: The lines, without their 'round N: '.
    """
    old = ''
    if os.path.lexists(self.path):
      old = files.read_text(self.path)
    kept = [
      line
      for line in old.splitlines(keepends=True)
      if (match := _LINE.match(line)) and int(match[1]) < round_num
    ]
    kept += [f'round {round_num}: {line}\n' for line in lines]
    durable.write_file(self.path, [''.join(kept).encode()])
