"""A CSV file with one row per round that survives kills.

Each row is appended by a single write and flushed. A kill may leave a part of a
row at the end, without its line feed: it is cut off on opening. Anything else
that this module would not write is refused: somebody changed it, and cutting it
off could lose rows. To add a column, the whole file is
rewritten.
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
# Longer than any row, so that the last one is in it.
_TAIL_BYTES = 2**14
_LINE = re.compile(r'round (0|-?[1-9]\d{0,17}): ', re.ASCII)
_KEY_TEXT = re.compile(r'0|-?[1-9]\d{0,17}', re.ASCII)


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
    UsageError: If the file cannot be read or is not such a table.
  """
  if not os.path.lexists(path):
    return [], []
  columns, rows, _ = _parse(path, files.read_bytes(path))
  return columns, [row for row, _ in rows]


def check(path: str, saved: int | None, *, every_round: bool) -> None:
  """Checks that a table is as a run, killed or not, can have left it.

  Args:
    path: The file, which may be missing.
    saved: The last round with a saved state, if any. Rows up to it are
      complete, and cannot be made again.
    every_round: Whether the table has a row for every round. The first ones may
      be missing, since the file may have been moved away once.

  Raises:
    UsageError: If the file cannot be read or is not such a table, a cell is not
      a number, or a row is missing.
  """
  if not os.path.lexists(path):
    return
  content = files.read_bytes(path)
  columns, rows, end = _parse(path, content)
  for row, _ in rows:
    for name in columns:
      try:
        number(row, name)
      except UsageError as error:
        raise UsageError(f'{path}: {error}') from error
  missing = None
  torn, comma, _ = content[end:].decode(errors='replace').partition(',')
  if saved is not None and comma and _KEY_TEXT.fullmatch(torn):
    missing = int(torn) if int(torn) <= saved else None
  if every_round and rows:
    missing = _first_gap([int(row[KEY]) for row, _ in rows], saved)
  if missing is not None:
    raise UsageError(
      f'{path}: the row of round {missing} is missing or torn, though the round'
      ' was saved; restore the row, or move the file away (training then'
      ' continues without its rows)'
    )


def _first_gap(keys: Sequence[int], saved: int | None) -> int | None:
  """Returns the first missing round after that of the first row, if any."""
  for expected, key in enumerate(keys, keys[0]):
    if key != expected:
      return expected
  return keys[-1] + 1 if saved is not None and keys[-1] < saved else None


def last_key(path: str) -> int | None:
  """Returns the key of the last complete row, and reads only the file's end.

  Args:
    path: The file.

  Returns:
    The key, or None if the file is missing or has no row.

  Raises:
    UsageError: If the file cannot be read or is not such a table.
  """
  if not os.path.lexists(path):
    return None
  with files.open_binary(path) as file:
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - _TAIL_BYTES))
    lines = file.read(_TAIL_BYTES).split(b'\n')[:-1]
  # The header or the end of a row may be the first of them.
  text = lines[-1].partition(b',')[0].decode(errors='replace') if lines else ''
  if len(lines) > 1 and _KEY_TEXT.fullmatch(text):
    return int(text)
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
  """

  def __init__(self, path: str):
    """Opens or makes a table, and cuts off a torn last line.

    Args:
      path: The file.

    Raises:
      UsageError: If the file is not such a table, or has been changed since it
        was written. The file is left unchanged.
    """
    self.path = path
    if not os.path.lexists(path):
      durable.write_file(path, [_encode_row([KEY])])
    content = files.read_bytes(path)
    self.columns, rows, self._size = _parse(path, content)
    if self._size != len(content):
      durable.truncate(path, self._size)
    self._offsets = [(int(row[KEY]), end) for row, end in rows]
    self._header_size = len(_encode_row(self.columns))

  @property
  def last_key(self) -> int | None:
    """Returns the key of the last row, if any."""
    return self._offsets[-1][0] if self._offsets else None

  def check_after(self, key: int, last: int | None = None) -> None:
    """Checks that rows of later keys are rows that a kill can have left.

    Args:
      key: The last key to keep.
      last: The largest possible key. None: the keys must be consecutive, from
        `key` + 1 on.

    Raises:
      UsageError: If they are not: somebody has changed the table, and the rows
        may still be needed.
    """
    # A kill leaves at most the rows since the last checkpoint.
    later = [k for k, _ in self._offsets if k > key]
    expected = list(range(key + 1, key + 1 + len(later)))
    if later != expected if last is None else later[-1:] > [last]:
      raise UsageError(
        f'{self.path}: after round {key}, which was saved last, there are rows'
        f' that the run cannot have written (round {later[-1]}); the file was'
        ' changed: fix it, or move it away'
      )

  def truncate_after(self, key: int) -> int:
    """Removes rows of later keys.

    Args:
      key: The last key to keep.

    Returns:
      The number of removed rows.
    """
    kept = [(k, end) for k, end in self._offsets if k <= key]
    removed = len(self._offsets) - len(kept)
    if removed:
      self._size = kept[-1][1] if kept else self._header_size
      durable.truncate(self.path, self._size)
      self._offsets = kept
    return removed

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
      self._add_columns(new)
    row = {name: format_cell(value) for name, value in metrics.items()}
    row[KEY] = str(round_num)
    data = _encode_row([row.get(name, '') for name in self.columns])
    durable.append(self.path, data)
    self._size += len(data)
    self._offsets.append((round_num, self._size))

  def _add_columns(self, names: list[str]) -> None:
    """Rewrites the table with additional columns."""
    _, rows = read(self.path)
    self.columns = [*self.columns, *names]
    lines = [_encode_row(self.columns)]
    lines += [
      _encode_row([row.get(name, '') for name in self.columns]) for row in rows
    ]
    durable.write_file(self.path, lines)
    self._header_size = self._size = len(lines[0])
    self._offsets = []
    for row, line in zip(rows, lines[1:]):
      self._size += len(line)
      self._offsets.append((int(row[KEY]), self._size))


class RoundLines:
  """A text file with lines that begin with 'round N: '."""

  def __init__(self, path: str):
    """Sets the file, which is made when there is something to write.

    Args:
      path: The file, in an existing folder.

    Raises:
      UsageError: If the path holds something else.
    """
    self.path = path
    self._read()

  def log(self, round_num: int, lines: Sequence[str]) -> None:
    """Appends lines, after removing those of the same and of later rounds.

    Args:
      round_num: The round.
      lines: The lines, without their 'round N: '.
    """
    kept = [line for old, line in self._read() if old < round_num]
    kept += [f'round {round_num}: {line}\n' for line in lines]
    durable.write_file(self.path, [''.join(kept).encode()])

  def _read(self) -> list[tuple[int, str]]:
    """Returns (round, line) of all lines, or raises `UsageError`."""
    if not os.path.lexists(self.path):
      return []
    lines = re.findall('[^\n]*\n|[^\n]+$', files.read_text(self.path))
    matches = [_LINE.match(line) for line in lines]
    result = []
    for line_num, (line, match) in enumerate(zip(lines, matches), 1):
      if match is None or not line.endswith('\n'):
        raise UsageError(
          f'{self.path}, line {line_num}: does not begin with "round N: ", or'
          ' has no line end; the file was changed: fix it, or move it'
          ' away'
        )
      result.append((int(match[1]), line))
    return result


def _encode_row(cells: list[str]) -> bytes:
  line = io.StringIO()
  csv.writer(line, lineterminator='\n').writerow(cells)
  return line.getvalue().encode()


def _parse(
  path: str, content: bytes
) -> tuple[list[str], list[tuple[dict[str, str], int]], int]:
  """Returns (columns, [(row, offset of its end)], end of the last row).

  Raises:
    UsageError: If a complete line is not one that this module writes.
  """

  def refuse(line_num: int, reason: str) -> UsageError:
    return UsageError(
      f'{path}, line {line_num}: {reason}; the file was changed, or is not a'
      " table of a run: fix the line, or move the file away (the run's"
      ' checkpoints do not need it)'
    )

  # The rest after the last line feed is a torn row, or empty.
  lines = content.split(b'\n')[:-1]
  if not lines:
    raise refuse(1, 'the line with the names of the columns is missing')
  columns = _cells(lines[0])
  if not columns or columns[0] != KEY:
    raise refuse(1, f'the first column is not {KEY!r}')
  if len(set(columns)) != len(columns) or not all(columns):
    raise refuse(1, 'a column has no name, or two have the same')
  end, rows, last = len(lines[0]) + 1, [], None
  for line_num, line in enumerate(lines[1:], 2):
    cells = _cells(line)
    if cells is None:
      raise refuse(line_num, 'it is empty, or is not valid CSV text')
    if len(cells) != len(columns):
      raise refuse(
        line_num, f'it has {len(cells)} cells instead of {len(columns)}'
      )
    if not _KEY_TEXT.fullmatch(cells[0]):
      raise refuse(line_num, f'{cells[0]!r} is not the number of a round')
    key = int(cells[0])
    if last is not None and key <= last:
      raise refuse(line_num, f'round {key} follows round {last}')
    end, last = end + len(line) + 1, key
    rows.append((dict(zip(columns, cells)), end))
  return columns, rows, end


def _cells(line: bytes) -> list[str] | None:
  """Splits a line into cells, and returns None if it cannot be a row."""
  # Blocks of zeros are what some file systems leave after a crash.
  if not line or b'\0' in line or b'\r' in line:
    return None
  try:
    return next(csv.reader([line.decode()], strict=True), None)
  except (UnicodeDecodeError, csv.Error):
    return None
