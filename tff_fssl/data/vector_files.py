"""Vectors in NPZ, Parquet or TFRecord: `--dataset=features:PATH`. TF-free.

Columns: `x`, (N, D); `y`, N classes as text or integers; may be: `x_weak` and
`x_strong`, (N, D) or (N, K, D), views of the vectors; `client`; `split`. In an
NPZ file also `class_names`, of which integers in `y` are then places.
"""

from collections.abc import Mapping, Sequence
import dataclasses
from typing import Any, cast
import zipfile

import numpy as np

from tff_fssl import files
from tff_fssl.data import columns as columns_lib
from tff_fssl.data import data_hparams
from tff_fssl.data import image_cache
from tff_fssl.data import names
from tff_fssl.data import sources
from tff_fssl.hparams import UsageError
from tff_fssl.hparams import closest

DataHparams = data_hparams.DataHparams
_X, _Y, _WEAK, _STRONG, _CLASSES = 'x', 'y', 'x_weak', 'x_strong', 'class_names'
_VECTORS = (_X, _WEAK, _STRONG)
_COLUMNS = (*_VECTORS, _Y, columns_lib.CLIENT, columns_lib.SPLIT)
_KINDS = ('.npz', '.parquet', '.tfrecord')
# No number of n training examples is further than sqrt(n - 1) deviations from
# their mean (Samuelson's inequality).
MAX_DEVIATIONS = 1e4
# Name -> values, one for each example.
_Table = Mapping[str, np.ndarray]


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class VectorInfo(names.DataSetInfo):
  """A file of vectors.

  Attributes:
    x: float32 [N, V, D], those for training first.
    rows: Of each of them, its row in the file, from 0; int [N].
    num_weak: How many of the V views are weak ones, after the plain one.
    num_strong: How many are strong ones, after these.
    columns: What is said of the vectors.
    notes: What to say with all results.
  """

  x: np.ndarray
  rows: np.ndarray
  num_weak: int
  num_strong: int
  columns: columns_lib.Columns
  notes: str


def find(name: str, data_dir: str, settings: DataHparams) -> VectorInfo:
  """Reads the file, whole; see `catalog.find`."""
  path = columns_lib.path_of(name, data_dir, names.FEATURES)
  reader = {
    '.npz': _read_npz,
    '.parquet': _read_parquet,
    '.tfrecord': _read_tfrecord,
  }
  ending = next((kind for kind in _KINDS if path.endswith(kind)), None)
  if ending is None:
    raise UsageError(
      f'--dataset={name}: a file of vectors ends with {", ".join(_KINDS)}'
    )
  table = dict(reader[ending](path))
  known = (*_COLUMNS, *([_CLASSES] if ending == '.npz' else []))
  unknown = [column for column in table if column not in known]
  if _X not in table or unknown:
    hint = closest(unknown[0], known) if unknown else ''
    raise UsageError(
      f'{path}: holds {", ".join(table) or "nothing"}; it must hold {_X}, and'
      f' may hold {", ".join(known[1:])}{hint}'
    )
  class_names = [str(c) for c in _flat(path, table.pop(_CLASSES, np.array([])))]
  x, num_weak, num_strong = _views(path, table)
  of_column = lambda column: _texts(path, table.get(column), len(x), column)
  found = columns_lib.build(
    path,
    _labels(path, table.get(_Y), len(x), class_names),
    of_column(columns_lib.CLIENT),
    of_column(columns_lib.SPLIT),
    (row.tobytes() for row in x[:, 0]),
    settings.test_share,
    class_names,
  )
  rows = np.argsort(found.in_test, kind='stable')
  uses = [*found.uses]
  uses += () if num_weak else data_hparams.WEAK_VECTORS
  uses += () if num_strong else data_hparams.STRONG_VECTORS
  return VectorInfo(
    name=name,
    num_classes=len(found.class_names),
    example_shape=x.shape[1:],
    num_train=len(x) - found.num_test,
    num_test=found.num_test,
    flip=False,
    mean=(),
    std=(),
    loader=f'{__name__}:load',
    uses=frozenset(uses),
    x=x[rows],
    rows=rows,
    num_weak=num_weak,
    num_strong=num_strong,
    columns=found,
    notes=found.notes(path, settings.test_share),
  )


def load(info: names.DataSetInfo, data_dir: str | None) -> sources.DataSet:
  """Splits the vectors, and measures them; see `sources.load`."""
  del data_dir  # The file has been read.
  info = cast(VectorInfo, info)
  found, num_train = info.columns, info.num_train
  # Slices, so that there is one copy in memory.
  y, owners = (values[info.rows] for values in (found.y, found.owners))
  mean, std = moments(info.x[:num_train, 0])
  return sources.DataSet(
    name=info.name,
    train=sources.Examples(info.x[:num_train], y[:num_train]),
    test=sources.Examples(info.x[num_train:], y[num_train:]),
    num_classes=info.num_classes,
    class_names=found.class_names,
    example_shape=info.example_shape,
    notes=info.notes,
    owners=owners[:num_train] if found.client_names else None,
    client_names=found.client_names,
    mean=mean,
    std=std,
  )


def check_range(
  info: names.DataSetInfo,
  mean: Sequence[float],
  std: Sequence[float],
  positions: np.ndarray | None = None,
) -> None:
  """Refuses vectors that `vector_views` would not accept.

  Args:
    info: The file.
    mean: Of each number.
    std: Likewise.
    positions: Which of `VectorInfo.x` are looked at; None: all.

  Raises:
    UsageError: If there is one; names its row.
  """
  info = cast(VectorInfo, info)
  if positions is None:
    positions = np.arange(len(info.x))
  step = _at_a_time(info.x)
  for start in range(0, len(positions), step):
    chosen = positions[start : start + step]
    distances = np.abs((info.x[chosen] - np.asarray(mean)) / np.asarray(std))
    far = distances.max(axis=(1, 2)) > MAX_DEVIATIONS
    if far.any():
      row = int(info.rows[chosen[np.argmax(far)]]) + 1
      raise UsageError(
        f'--dataset={info.name}, row {row}: a number is more than'
        f' {MAX_DEVIATIONS:,.0f} standard deviations from its mean; put this'
        ' right or leave the row out'
      )


def _at_a_time(x: np.ndarray) -> int:
  """How many vectors are looked at at a time."""
  return max(1, 2**22 // max(1, x[:1].size))


def moments(x: np.ndarray) -> tuple[tuple[float, ...], tuple[float, ...]]:
  """Measures vectors.

  Args:
    x: float32 [N, D], N >= 1.

  Returns:
    (mean, deviation) of each number; a constant one has the deviation 1.
  """
  pieces = lambda: (chunk.astype(np.float64) for chunk in image_cache.chunks(x))
  mean = sum(piece.sum(axis=0) for piece in pieces()) / len(x)
  square = sum(((piece - mean) ** 2).sum(axis=0) for piece in pieces()) / len(x)
  std = np.sqrt(square)
  # What is left of a constant number is rounding.
  std = np.where(std > 1e-6 * np.abs(mean) + 1e-30, std, 1.0)
  return tuple(mean.tolist()), tuple(std.tolist())


def _views(path: str, table: _Table) -> tuple[np.ndarray, int, int]:
  """(float32 [N, V, D], how many weak and how many strong views)."""
  parts: list[np.ndarray] = []
  for name in _VECTORS:
    values = table.get(name)
    if values is None:
      parts.append(np.zeros((len(parts[0]), 0, parts[0].shape[2]), np.float32))
      continue
    is_number = values.dtype.kind in 'fiu'
    if values.ndim == 2:
      values = values[:, np.newaxis]
    if not is_number or values.ndim != 3 or 0 in values.shape[1:]:
      raise UsageError(
        f'{path}: {name} is {values.dtype} {list(table[name].shape)}; it must'
        ' be numbers (N, D)' + (', or (N, K, D)' if name != _X else '')
      )
    if name == _X and values.shape[1] > 1:
      raise UsageError(
        f'{path}: {_X} is {list(values.shape)}; it must be (N, D), one vector'
        f' for each example; views of it are {_WEAK} and {_STRONG}'
      )
    if parts and (len(values), values.shape[2]) != parts[0].shape[::2]:
      raise UsageError(
        f'{path}: {name} is {list(table[name].shape)}, but {_X} has'
        f' {len(parts[0]):,} vectors of {parts[0].shape[2]} numbers'
      )
    parts.append(_finite(path, name, values))
  x = np.ascontiguousarray(np.concatenate(parts, axis=1))
  return x, parts[1].shape[1], parts[2].shape[1]


def _finite(path: str, name: str, values: np.ndarray) -> np.ndarray:
  """float32; refuses what is not finite in it."""
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
  """A column as a list; text that came as bytes is decoded."""
  if values.ndim != 1 or values.dtype.kind not in 'iufUSO':
    raise UsageError(
      f'{path}: a column is {values.dtype} {list(values.shape)}; besides'
      ' vectors there must be one text or number for each example'
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
  """A column as text; '' where it has nothing."""
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
  """The classes as text; '' where they are not known."""
  if values is not None and values.ndim == 2:
    is_one_hot = _is_one_hot(values)
    raise UsageError(
      f'{path}: {_Y} is {values.dtype} {list(values.shape)}'
      + (', one-hot' if is_one_hot else '')
      + '; it must be one class for each example, (N,)'
      + (': y.argmax(1)' if is_one_hot else '')
    )
  labels = _texts(path, values, count, _Y)
  if values is None or not all(
    isinstance(value, int | float) for value in values.tolist() if value
  ):
    return labels
  # A column of integers in which some are missing comes as floats.
  numbers = [float(label or names.UNKNOWN_LABEL) for label in labels]
  for row, number in enumerate(numbers, 1):
    too_large = known and number >= len(known)
    if number < names.UNKNOWN_LABEL or not number.is_integer() or too_large:
      most = f' to {len(known) - 1}' if known else ' up'
      raise UsageError(
        f'{path}, row {row}: class {number:g}; classes are integers from'
        f' 0{most}, or -1 if not known'
      )
  places = [int(number) for number in numbers]
  name = lambda place: known[place] if known else str(place)
  return ['' if place < 0 else name(place) for place in places]


def _is_one_hot(values: np.ndarray) -> bool:
  """Whether each row has one 1 and zeros."""
  try:
    values = values.astype(np.float64)
  except (TypeError, ValueError):  # Texts.
    return False
  is_bit = ((values == 0) | (values == 1)).all()
  return bool(is_bit and (values.sum(axis=1) == 1).all())


def _read_npz(path: str) -> _Table:
  with files.open_binary(path) as file:
    try:
      with np.load(file, allow_pickle=False) as archive:
        return {name: archive[name] for name in archive.files}
    except (
      ValueError,
      OSError,
      EOFError,
      KeyError,
      TypeError,
      AttributeError,
      NotImplementedError,
      MemoryError,
      zipfile.BadZipFile,
      zipfile.zlib.error,  # type: ignore[attr-defined]
    ) as error:
      reason = f'it is not a whole NPZ file ({files.first_line(error)})'
      if 'pickle' in str(error) and 'Object' in str(error):
        reason = (
          'it has arrays of Python objects, which are not read; rows of x must'
          ' be equally long, and text must be of a fixed width (dtype=str)'
        )
      raise files.FileError(path, reason) from error


def _read_parquet(path: str) -> _Table:
  from pyarrow import parquet  # pylint: disable=import-outside-toplevel

  with files.open_binary(path) as file:
    try:
      table = parquet.read_table(file)
    except Exception as error:  # pylint: disable=broad-except
      # Of pyarrow, of many classes.
      reason = f'it is not Parquet ({files.first_line(error)})'
      raise files.FileError(path, reason) from error
  return {
    name: _of_lists(path, name, table.column(name).combine_chunks())
    if name in _VECTORS
    else np.array(table.column(name).to_pylist(), object)
    for name in table.column_names
  }


def _of_lists(path: str, name: str, values: Any) -> np.ndarray:
  """An Arrow array of lists, or of lists of lists, as an array."""
  from pyarrow import types  # pylint: disable=import-outside-toplevel

  shape, is_list = (
    [len(values)],
    lambda of: (
      types.is_list(of)
      or types.is_large_list(of)
      or types.is_fixed_size_list(of)
    ),
  )
  while is_list(values.type):
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


def _read_tfrecord(path: str) -> _Table:
  """`tf.train.Example`s; all have the features of the first one."""
  with files.open_binary(path):
    pass  # TensorFlow would wait for a pipe.
  import tensorflow as tf  # pylint: disable=import-outside-toplevel

  try:
    records = tf.data.TFRecordDataset(path)
    first = next(iter(records.take(1)), None)
    if first is None:
      raise files.FileError(path, 'it has no records')
    example = tf.train.Example.FromString(first.numpy())
    spec = {
      name: tf.io.FixedLenFeature(*_form(name, feature))
      for name, feature in example.features.feature.items()
    }
    batches = [
      tf.io.parse_example(batch, spec) for batch in records.batch(2**12)
    ]
  except UsageError:
    raise
  except Exception as error:  # pylint: disable=broad-except
    # Of protocol buffers and of TensorFlow.
    reason = f'its records are torn or differ ({files.first_line(error)})'
    raise files.FileError(path, reason[:200]) from error
  table = {
    name: np.concatenate([batch[name].numpy() for batch in batches])
    for name in spec
  }
  size = table[_X].shape[1] if _X in table and table[_X].ndim == 2 else 0
  for name in (_WEAK, _STRONG):  # K views of D numbers, one after another.
    if name in table and size and table[name].ndim == 2:
      if table[name].shape[1] % size:
        raise UsageError(
          f'{path}: {name} has {table[name].shape[1]} numbers, no multiple of'
          f" {_X}'s {size}"
        )
      table[name] = table[name].reshape(len(table[name]), -1, size)
  return table


def _form(name: str, feature: Any) -> tuple[list[int], str]:
  """(shape, type) of a feature of a `tf.train.Example`."""
  kind = feature.WhichOneof('kind')
  dtype = {'float_list': 'float32', 'int64_list': 'int64'}.get(kind, 'string')
  count = len(getattr(feature, kind).value) if kind else 0
  return ([count] if name in _VECTORS or count != 1 else []), dtype
