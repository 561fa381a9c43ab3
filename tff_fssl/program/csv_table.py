"""A CSV file with one row a round that survives kills. TensorFlow-free.

Rows are appended in single writes and flushed. On opening, whatever a kill left
of a row is cut off. A column that is new makes the file be rewritten, whole.
"""

from collections.abc import Mapping
import csv
import io
import os
from typing import Any

import numpy as np

from tff_fssl import durable
from tff_fssl.hparams import UsageError

KEY = 'round'


def to_cell(value: Any) -> str:
  """A value as text: the shortest that its own type reads back as the same.

  Args:
    value: A Python or NumPy scalar, or an array of shape []; None is not known.

  Returns:
    The text; '' for None, 'nan' for not a number.
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
  """The columns and the whole rows of a table, which is left as it is."""
  if not os.path.exists(path):
    return [], []
  with open(path, 'rb') as file:
    content = file.read()
  columns, rows, _ = _parse(content)
  return columns, [row for row, _ in rows]


def column(rows: list[dict[str, str]], name: str) -> np.ndarray:
  """A column as float64 [rows]; NaN where it is empty or missing."""
  return np.array([float(row.get(name) or 'nan') for row in rows], np.float64)


class CsvTable:
  """An open table.

  Attributes:
    path: The file.
    columns: The names of the columns, the key's first.
  """

  def __init__(self, path: str):
    """Opens a table, or makes an empty one; repairs a torn end.

    Args:
      path: The file.

    Raises:
      UsageError: If the file is not such a table.
    """
    self.path = path
    if not os.path.exists(path):
      durable.write_file(path, [_to_bytes([KEY])])
    with open(path, 'rb') as file:
      content = file.read()
    self.columns, rows, self._size = _parse(content)
    if not self.columns:
      raise UsageError(
        f'{path} is not a table of a run (its first column is not {KEY!r});'
        ' move it away'
      )
    if self._size != len(content):
      durable.truncate(path, self._size)
    self._offsets = [(int(row[KEY]), end) for row, end in rows]
    self._header_size = len(_to_bytes(self.columns))

  @property
  def last_key(self) -> int | None:
    """The key of the last row; None if there is none."""
    return self._offsets[-1][0] if self._offsets else None

  def truncate_after(self, key: int) -> int:
    """Removes rows of later keys.

    Args:
      key: The last key to be kept.

    Returns:
      How many rows were removed.
    """
    kept = [(k, end) for k, end in self._offsets if k <= key]
    removed = len(self._offsets) - len(kept)
    if removed:
      self._size = kept[-1][1] if kept else self._header_size
      durable.truncate(self.path, self._size)
      self._offsets = kept
    return removed

  def append(self, key: int, values: Mapping[str, Any]) -> None:
    """Appends a row, after removing those of its key and of later ones.

    Args:
      key: The row's key.
      values: Column -> scalar; see `to_cell`. New columns are allowed.

    Raises:
      UsageError: If the disk refuses; the table is then as it was.
    """
    self.truncate_after(key - 1)
    new = [name for name in values if name not in self.columns]
    if new:
      self._add_columns(new)
    row = {name: to_cell(value) for name, value in values.items()}
    row[KEY] = str(key)
    data = _to_bytes([row.get(name, '') for name in self.columns])
    durable.append(self.path, data)
    self._size += len(data)
    self._offsets.append((key, self._size))

  def _add_columns(self, names: list[str]) -> None:
    """Rewrites the table with further columns."""
    _, rows = read(self.path)
    self.columns = [*self.columns, *names]
    lines = [_to_bytes(self.columns)]
    lines += [
      _to_bytes([row.get(name, '') for name in self.columns]) for row in rows
    ]
    durable.write_file(self.path, lines)
    self._header_size = self._size = len(lines[0])
    self._offsets = []
    for row, line in zip(rows, lines[1:]):
      self._size += len(line)
      self._offsets.append((int(row[KEY]), self._size))


def _to_bytes(cells: list[str]) -> bytes:
  line = io.StringIO()
  csv.writer(line, lineterminator='\n').writerow(cells)
  return line.getvalue().encode()


def _parse(
  content: bytes,
) -> tuple[list[str], list[tuple[dict[str, str], int]], int]:
  """(columns, [(row, offset of its end)], offset of the last whole row's end).

  Rows count up to the first that is not whole: no end of line, a wrong number
  of cells, a key that is not a larger whole number.
  """
  lines = content.split(b'\n')[:-1]
  if not lines:
    return [], [], 0
  columns = _cells(lines[0])
  if not columns or columns[0] != KEY:
    return [], [], 0
  end, rows, last = len(lines[0]) + 1, [], None
  for line in lines[1:]:
    cells = _cells(line)
    if cells is None or len(cells) != len(columns):
      break
    try:
      key = int(cells[0])
    except ValueError:
      break
    if last is not None and key <= last:
      break
    end, last = end + len(line) + 1, key
    rows.append((dict(zip(columns, cells)), end))
  return columns, rows, end


def _cells(line: bytes) -> list[str] | None:
  """A line's cells; None if it holds what no row does."""
  if b'\0' in line:
    return None
  try:
    return next(csv.reader([line.decode()]), None)
  except (UnicodeDecodeError, csv.Error):
    return None
