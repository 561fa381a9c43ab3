"""Vectors in NPZ or Parquet files, and tables: `--dataset=features:PATH`.

Columns are `x`, (N, D), and `y`, N classes as text or integers. Optional
columns are `client`, `split`, `x_weak` and `x_strong`. The last two are views,
(N, D) or (N, K, D). An NPZ file may also have `class_names`, the names of the
integers in `y`. CSV files, and Parquet files without `x`, are tables: see
`columns`.
"""

import collections
from collections.abc import Iterable, Iterator, Mapping, Sequence
import dataclasses
import math
from typing import Any, cast

import numpy as np

from tff_fssl import files
from tff_fssl.data import data_hparams
from tff_fssl.data import image_cache
from tff_fssl.data import names
from tff_fssl.data import sources
from tff_fssl.data.sources import columns as columns_lib
from tff_fssl.data.sources import table
from tff_fssl.hparams import UsageError
from tff_fssl.hparams import closest

_X, _Y, _WEAK, _STRONG, _CLASSES = 'x', 'y', 'x_weak', 'x_strong', 'class_names'
_VECTORS = (_X, _WEAK, _STRONG)
_COLUMNS = (*_VECTORS, _Y, table.CLIENT, table.SPLIT)
_TABLES = ('.csv', '.csv.gz', '.tsv', '.csv.zip')
# Of n training examples, no number is further than sqrt(n - 1) deviations from
# its mean (Samuelson's inequality).
MAX_DEVIATIONS = 1e4
# Of float32 numbers that differ; smaller ones are taken for constant.
_LEAST_STD = 1e-30
# Name -> values, one for each example.
_Arrays = Mapping[str, np.ndarray]


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class VectorInfo(sources.Info):
  """A file of vectors.

  Attributes:
    x: float32 [N, V, D], training examples first.
    rows: int [N], the row of each example in the file, from 0.
    num_weak: The number of weak views among the V, after the plain one.
    num_strong: The number of strong views, after the weak ones.
    columns: The columns of a table, else ().
  """

  x: np.ndarray
  rows: np.ndarray
  num_weak: int
  num_strong: int
  columns: Sequence[columns_lib.Column] = ()


def find(
  name: str, data_dir: str, settings: data_hparams.DataHparams
) -> VectorInfo:
  """Reads the whole file (see `sources.find`)."""
  path = table.resolve_path(name, data_dir, names.FEATURES)
  if path.endswith(_TABLES):
    return _find_table(name, path, settings)
  ending = next((end for end in _READERS if path.endswith(end)), None)
  if ending is None:
    raise UsageError(
      f'--dataset={name}: a file of vectors ends with {", ".join(_READERS)}, a'
      f' table with {", ".join(_TABLES)}'
    )
  arrays = {
    column: values
    for column, values in _READERS[ending](path).items()
    if not column.startswith(table.INDEX)
  }
  if ending == '.parquet' and _X not in arrays:
    return _find_table(name, path, settings)
  known = (*_COLUMNS, *([_CLASSES] if ending == '.npz' else []))
  unknown = [column for column in arrays if column not in known]
  if _X not in arrays or unknown:
    hint = closest(unknown[0], known) if unknown else ''
    raise UsageError(
      f'{path}: has {", ".join(arrays) or "nothing"}; it must have {_X}, and'
      f' may have {", ".join(known[1:])}{hint}'
    )
  class_names = [
    str(c) for c in _flat(path, arrays.pop(_CLASSES, np.array([])))
  ]
  x, num_weak, num_strong = _views(path, arrays)
  marks = table.mark(
    path,
    _labels(path, arrays.get(_Y), len(x), class_names),
    _texts(path, arrays.get(table.CLIENT), len(x), table.CLIENT),
    _texts(path, arrays.get(table.SPLIT), len(x), table.SPLIT),
    (row.tobytes() for row in x[:, 0]),
    settings,
    class_names=class_names,
  )
  rows = marks.order
  x = x[rows]

  def read() -> sources.DataSet:
    mean, std = moments(x[: marks.num_train, 0])
    return marks.data_set(name, x, path, settings.test_share, mean, std)

  uses = frozenset().union(
    () if num_weak else data_hparams.WEAK_VECTORS,
    () if num_strong else data_hparams.STRONG_VECTORS,
  )
  facts = marks.info(name=name, example_shape=x.shape[1:], uses=uses)
  return VectorInfo(
    **facts,
    read=read,
    x=x,
    rows=rows,
    num_weak=num_weak,
    num_strong=num_strong,
  )


def _find_table(
  name: str, path: str, settings: data_hparams.DataHparams
) -> VectorInfo:
  """Reads a table (see `sources.describe`)."""
  cells, places, problems = table.read_all(path)
  roles, features = table.choose(list(cells), settings)
  if table.LABEL not in roles:
    raise UsageError(
      f'{path}: its columns are {", ".join(cells)}; name that of the classes by'
      ' --label_field'
    )
  column = lambda role: (
    cells[roles[role]] if role in roles else [''] * len(places)
  )
  used = {feature: cells[feature] for feature in features}
  marks = table.mark(
    path,
    column(table.LABEL),
    column(table.CLIENT),
    column(table.SPLIT),
    _numbered(map('\x1f'.join, zip(*cells.values()))),
    settings,
    place=places.__getitem__,
  )
  columns, found = columns_lib.learn(path, used, places, marks.in_test)
  rows = marks.order
  x = columns_lib.encode(columns, used, path)[rows, np.newaxis]
  about = {
    **roles,
    'columns': columns_lib.describe(columns),
  }

  def read() -> sources.DataSet:
    mean, std = moments(x[: marks.num_train, 0])
    text = ', '.join(f'{role} {column}' for role, column in roles.items())
    return marks.data_set(
      name, x, f'{path}: {text}', settings.test_share, mean, std
    )

  facts = marks.info(
    name=name,
    example_shape=x.shape[1:],
    uses=frozenset(
      {*data_hparams.WEAK_VECTORS, *data_hparams.STRONG_VECTORS}
      | table.CHOOSING
    ),
  )
  facts['problems'] += (*problems, *found)
  return VectorInfo(
    **facts,
    read=read,
    about=about,
    x=x,
    rows=rows,
    num_weak=0,
    num_strong=0,
    columns=columns,
  )


def _numbered(rows: Iterable[str]) -> Iterator[str]:
  """Appends to each row how often it was there before.

  Rows of a table may be equal although they are of different people. If all of
  them were in one split, this would be no sample of the table.
  """
  before: collections.Counter[str] = collections.Counter()
  for row in rows:
    yield f'{row}\x1f{before[row]}'
    before[row] += 1


def check_range(
  info: names.DataSetInfo,
  mean: Sequence[float],
  std: Sequence[float],
  positions: np.ndarray | None = None,
) -> None:
  """Rejects vectors that `vector_views` would not accept.

  Args:
    info: The file.
    mean: The mean of each number.
    std: The deviation of each number.
    positions: Places in `VectorInfo.x` to check, by default all.

  Raises:
    UsageError: If a vector is not accepted. Names its row.
  """
  info = cast(VectorInfo, info)
  if positions is None:
    positions = np.arange(len(info.x))
  step = max(1, 2**22 // max(1, info.x[:1].size))
  for start in range(0, len(positions), step):
    chosen = positions[start : start + step]
    distances = np.abs((info.x[chosen] - np.asarray(mean)) / np.asarray(std))
    far = distances.max(axis=(1, 2)) > MAX_DEVIATIONS
    if far.any():
      row = int(info.rows[chosen[np.argmax(far)]]) + 1
      raise UsageError(
        f'--dataset={info.name}, row {row}: a number is more than'
        f' {MAX_DEVIATIONS:,.0f} standard deviations from its mean; correct it'
        ' or remove the row'
      )


def moments(x: np.ndarray) -> tuple[tuple[float, ...], tuple[float, ...]]:
  """Measures vectors.

  Args:
    x: float32 [N, D], N >= 1.

  Returns:
    (mean, deviation) of each number. Constant numbers have the deviation 1.
  """
  pieces = lambda: (chunk.astype(np.float64) for chunk in image_cache.chunks(x))
  mean = np.asarray(sum(piece.sum(axis=0) for piece in pieces())) / len(x)
  square = sum(((piece - mean) ** 2).sum(axis=0) for piece in pieces()) / len(x)
  std = np.sqrt(square)
  # Rounding may give a constant number a tiny deviation, and another mean.
  constant = (x == x[0]).all(axis=0)
  mean = np.where(constant, x[0], mean)
  std = np.where(constant | (std < _LEAST_STD), 1.0, std)
  return tuple(mean.tolist()), tuple(std.tolist())


def _views(path: str, arrays: _Arrays) -> tuple[np.ndarray, int, int]:
  """Joins the views: (float32 [N, V, D], number of weak, number of strong)."""
  parts: list[np.ndarray] = []
  for name in _VECTORS:
    values = arrays.get(name)
    if values is None:
      parts.append(parts[0][:, :0])
      continue
    given = f'{path}: {name} is {values.dtype} {list(values.shape)}'
    is_number = values.dtype.kind in 'fiu'
    if name != _X and values.ndim == 3:
      pass
    elif values.ndim == 2:
      values = values[:, np.newaxis]
    else:
      is_number = False
    if not is_number or 0 in values.shape[1:]:
      raise UsageError(
        f'{given}; it must be numbers (N, D)'
        + (
          ', or (N, K, D)' if name != _X else f'; views are {_WEAK}, {_STRONG}'
        )
      )
    if parts and (len(values), values.shape[2]) != parts[0].shape[::2]:
      raise UsageError(
        f'{given}, but {_X} has {len(parts[0]):,} vectors of'
        f' {parts[0].shape[2]} numbers'
      )
    parts.append(_finite(path, name, values))
  # Splits depend on hashes of rows, which need one layout of bytes.
  x = np.ascontiguousarray(np.concatenate(parts, axis=1))
  return x, parts[1].shape[1], parts[2].shape[1]


def _finite(path: str, name: str, values: np.ndarray) -> np.ndarray:
  """Converts to float32, and rejects numbers that are not finite then."""
  # Numbers over float32's range become infinite, and are rejected below.
  with np.errstate(over='ignore'):
    values = values.astype(np.float32)
  wrong = ~np.isfinite(values).all(axis=(1, 2))
  if wrong.any():
    raise UsageError(
      f'{path}: {name} has numbers that are not finite (NaN, infinite or over'
      f' 3e38) in {int(wrong.sum()):,} rows, first in row'
      f' {int(np.argmax(wrong)) + 1}'
    )
  return values


def _flat(path: str, values: np.ndarray) -> list[Any]:
  """Converts a column to a list, and bytes in it to text."""
  if values.ndim != 1 or values.dtype.kind not in 'iufUSO':
    raise UsageError(
      f'{path}: a column is {values.dtype} {list(values.shape)}; a column'
      ' other than vectors must have one text or number for each example'
    )
  try:
    return [
      value.decode() if isinstance(value, bytes) else value
      for value in values.tolist()
    ]
  except UnicodeDecodeError as error:
    raise files.FileError(path, 'it has text that is not UTF-8') from error


def _texts(
  path: str, values: np.ndarray | None, count: int, name: str
) -> list[str]:
  """Converts a column to text, with '' for missing values."""
  if values is None:
    return [''] * count
  found = _flat(path, values)
  if len(found) != count:
    raise UsageError(
      f'{path}: {name} has {len(found):,} values for {count:,} vectors'
    )
  return ['' if v is None or v != v else str(v).strip() for v in found]


def _labels(
  path: str, values: np.ndarray | None, count: int, known: Sequence[str]
) -> list[str]:
  """Converts the classes to text, with '' for unknown classes."""
  if values is not None and values.ndim == 2:
    is_one_hot = _is_one_hot(values)
    raise UsageError(
      f'{path}: {_Y} is {values.dtype} {list(values.shape)}'
      + (', one-hot' if is_one_hot else '')
      + '; it must be one class for each example, (N,)'
      + (': y.argmax(1)' if is_one_hot else '')
    )
  if values is not None and values.dtype == bool:
    values = values.astype(str)
  labels = _texts(path, values, count, _Y)
  if values is None or not all(
    isinstance(value, int | float) for value in values.tolist() if value
  ):
    return labels
  # Integers with missing values are read as floats.
  numbers = [_number(label or str(names.UNKNOWN_LABEL)) for label in labels]
  for row, number in enumerate(numbers, 1):
    too_large = number >= (len(known) if known else math.inf)
    # Beyond 2^53, neighbours are the same float.
    inexact = isinstance(number, float) and not (
      number.is_integer() and number <= 2**53
    )
    if number < names.UNKNOWN_LABEL or inexact or too_large:
      most = f' to {len(known) - 1}' if known else ' up'
      raise UsageError(
        f'{path}, row {row}: class {number:g}; classes are integers from'
        f' 0{most}, or -1 if not known'
      )
  places = [int(number) for number in numbers]
  name = lambda place: known[place] if known else str(place)
  return ['' if place < 0 else name(place) for place in places]


def _number(text: str) -> int | float:
  """Reads a number, without rounding integers."""
  try:
    return int(text)
  except ValueError:
    return float(text)


def _is_one_hot(values: np.ndarray) -> bool:
  """Tells whether each row has one 1 and zeros."""
  try:
    values = values.astype(np.float64)
  except (TypeError, ValueError):
    # Texts.
    return False
  is_bit = ((values == 0) | (values == 1)).all()
  return bool(is_bit and (values.sum(axis=1) == 1).all())


def _read_parquet(path: str) -> _Arrays:
  """Reads columns. Vectors are lists of numbers."""
  columns = table.read_parquet(path)

  def flat(column):
    values = column.to_pylist()
    # Booleans are refused by their dtype, as in NPZ.
    is_bool = any(isinstance(value, bool) for value in values)
    return np.array(values, bool if is_bool else object)

  return {
    name: _stack(path, name, columns.column(name).combine_chunks())
    if name in _VECTORS
    else flat(columns.column(name))
    for name in columns.column_names
  }


def _stack(path: str, name: str, values: Any) -> np.ndarray:
  """Converts an Arrow array of lists, or of lists of lists."""
  shape = [len(values)]
  # Lists, large lists and lists of a fixed size have this method.
  while hasattr(values, 'value_lengths'):
    sizes = np.unique(values.value_lengths().drop_null().to_numpy())
    if values.null_count or len(sizes) > 1:
      given = 'nothing' if values.null_count else f'{sizes[1]} numbers'
      raise UsageError(
        f'{path}: rows of {name} differ: one has'
        f' {sizes[0] if len(sizes) else 0} numbers, another {given}'
      )
    shape.append(int(sizes[0]) if len(sizes) else 0)
    values = values.flatten()
  if values.null_count:
    raise UsageError(f'{path}: a number of {name} is missing')
  return values.to_numpy(zero_copy_only=False).reshape(shape)


_READERS = {'.npz': files.read_npz, '.parquet': _read_parquet}
