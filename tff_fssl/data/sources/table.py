"""Tables with the class, the client and the split of each row.

Manifests of images, files of vectors and files of texts share the columns
`label`, `client` and `split`.
"""

from collections.abc import Callable, Iterable, Sequence
import csv
import hashlib
import io
import os
from typing import Any, NamedTuple

import numpy as np

from tff_fssl import files
from tff_fssl.data import inspection
from tff_fssl.data import names
from tff_fssl.data import sources
from tff_fssl.hparams import UsageError
from tff_fssl.hparams import closest

LABEL, CLIENT, SPLIT = 'label', 'client', 'split'
TRAIN, TEST = 'train', 'test'
_SEPARATORS = (';', '\t', '|')


def resolve_path(dataset: str, data_dir: str, prefix: str) -> str:
  """Returns the path in `--dataset`, relative to `data_dir`."""
  path = os.path.expanduser(dataset.removeprefix(prefix))
  if not path:
    raise UsageError(f'--dataset={dataset}: give the path, {prefix}PATH')
  return os.path.join(os.path.expanduser(data_dir), path)


class Table(NamedTuple):
  """The cells of a file, as stripped text.

  Attributes:
    cells: Column -> text of each row, [N].
    places: The name of each row in messages, [N].
  """

  cells: dict[str, list[str]]
  places: list[str]

  def column(self, name: str) -> list[str]:
    """Returns a column, with '' if the file does not have it."""
    return self.cells.get(name) or [''] * len(self.places)


def read(path: str, needed: Sequence[str], optional: Sequence[str]) -> Table:
  """Reads a CSV file with a header, or a Parquet file.

  Args:
    path: The file, which is Parquet if it ends with .parquet.
    needed: Required columns.
    optional: Further allowed columns.

  Returns:
    The columns of the file.

  Raises:
    UsageError: If it cannot be read, or has other columns.
  """
  is_parquet = path.endswith('.parquet')
  columns, rows = (_read_parquet if is_parquet else read_csv)(path)
  every = (*needed, *optional)
  unknown = [column for column in columns if column not in every]
  missing = [column for column in needed if column not in columns]
  if missing or unknown or len(set(columns)) < len(columns):
    hint = closest(unknown[0], missing or every) if unknown else ''
    raise UsageError(
      f'{path}: its columns are {", ".join(columns)[:80] or "none"}; it must'
      f' have {" and ".join(needed)}, and may have {", ".join(optional)}{hint}'
    )
  table = Table({column: [] for column in columns}, [])
  for number, values in rows:
    place = f'{"row" if is_parquet else "line"} {number}'
    if len(values) != len(columns):
      raise UsageError(
        f'{path}, {place}: has {len(values)} values for {len(columns)} columns'
      )
    for cells, value in zip(table.cells.values(), values):
      cells.append(value.strip())
    table.places.append(place)
  return table


def read_csv(path: str) -> tuple[list[str], Iterable[tuple[int, list[str]]]]:
  """Reads (columns, (line, values) of each row), or raises `UsageError`."""
  # Spreadsheets write a byte order mark before the first name.
  text = files.read_text(path).removeprefix('\ufeff')
  reader = csv.reader(io.StringIO(text, newline=''), strict=True)
  try:
    rows = [(reader.line_num, row) for row in reader if row]
  except csv.Error as error:
    raise UsageError(f'{path}, line {reader.line_num}: {error}') from error
  if not rows:
    return [], []
  header = rows[0][1]
  separator = next((s for s in _SEPARATORS if s in header[0]), '')
  if len(header) == 1 and separator:
    raise UsageError(
      f'{path}: its columns are separated by {separator!r} ({header[0]}); they'
      " must be separated by ','"
    )
  return [name.strip() for name in header], rows[1:]


def read_parquet(path: str) -> Any:
  """Reads a `pyarrow.Table`, or raises `files.FileError`."""
  from pyarrow import parquet  # pylint: disable=import-outside-toplevel

  with files.open_binary(path) as file:
    try:
      return parquet.read_table(file)
    except Exception as error:  # pylint: disable=broad-except
      # pyarrow raises errors of many classes.
      reason = f'it is not Parquet ({files.first_line(error)})'
      raise files.FileError(path, reason) from error


def _read_parquet(
  path: str,
) -> tuple[list[str], Iterable[tuple[int, list[str]]]]:
  columns = read_parquet(path).to_pydict()
  rows = zip(*([_text(v) for v in values] for values in columns.values()))
  return list(columns), enumerate(map(list, rows), 1)


def _text(value: Any) -> str:
  # Integers with missing values are read as floats.
  if isinstance(value, float):
    # NaN stands for a missing value.
    if value != value:
      return ''
    return str(int(value)) if value.is_integer() else str(value)
  return '' if value is None else str(value)


class Marks(NamedTuple):
  """Classes, clients and splits of rows, as numbers.

  Attributes:
    y: int32 [N], the classes, or -1 if unknown.
    owners: int32 [N], the clients, or -1 if a row belongs to nobody.
    in_test: bool [N], true for testing.
    class_names: The name of each class.
    client_names: The name of each client, perhaps ().
    uses_share: Whether a share of the rows is drawn for testing.
  """

  y: np.ndarray
  owners: np.ndarray
  in_test: np.ndarray
  class_names: tuple[str, ...]
  client_names: tuple[str, ...]
  uses_share: bool

  @property
  def uses(self) -> frozenset[str]:
    """Returns the flags of the split that have an effect."""
    return frozenset({'test_share'} if self.uses_share else ())

  def problems(self) -> list[inspection.Problem]:
    """Finds empty splits and missing classes."""
    train, test = self.y[~self.in_test], self.y[self.in_test]
    return list(inspection.label_problems(self.class_names, train, test))

  @property
  def order(self) -> np.ndarray:
    """Returns the places of the rows, int [N], training rows first."""
    return np.argsort(self.in_test, kind='stable')

  @property
  def num_train(self) -> int:
    """Returns the number of rows for training."""
    return int((~self.in_test).sum())

  def info(self, **facts: Any) -> dict[str, Any]:
    """Completes the facts of a `names.DataSetInfo`."""
    num_train = self.num_train
    return {
      'num_classes': len(self.class_names),
      'num_train': num_train,
      'num_test': len(self.y) - num_train,
      'flip': False,
      'mean': (),
      'std': (),
      **facts,
    }

  def data_set(
    self,
    name: str,
    x: np.ndarray,
    about: str,
    test_share: float,
    mean: tuple[float, ...] = (),
    std: tuple[float, ...] = (),
  ) -> sources.DataSet:
    """Makes the data set.

    Args:
      name: Its name.
      x: The examples, in the order of `order`.
      about: A remark for all results.
      test_share: As for `mark`.
      mean: As in `sources.DataSet`.
      std: As in `sources.DataSet`.

    Returns:
      The data set. Its examples are slices of `x`.
    """
    num_train = self.num_train
    y, owners = self.y[self.order], self.owners[self.order]
    share = f'; {test_share:g} of it is for testing' * self.uses_share
    return sources.DataSet(
      name=name,
      train=sources.Examples(x[:num_train], y[:num_train]),
      test=sources.Examples(x[num_train:], y[num_train:]),
      num_classes=len(self.class_names),
      class_names=self.class_names,
      example_shape=x.shape[1:],
      notes=about + share,
      owners=owners[:num_train] if self.client_names else None,
      client_names=self.client_names,
      mean=mean,
      std=std,
    )


def mark(
  where: str,
  labels: Sequence[str],
  clients: Sequence[str],
  splits: Sequence[str],
  contents: Iterable[str | bytes],
  test_share: float,
  *,
  class_names: Sequence[str] = (),
  place: Callable[[int], str] = lambda row: f'row {row + 1}',
) -> Marks:
  """Numbers classes and clients, and splits.

  Args:
    where: The file, for messages.
    labels: The class of each row, [N], or '' if unknown.
    clients: The client of each row, [N], or '' if it belongs to nobody.
    splits: 'train', 'test' or '' of each row, [N].
    contents: The content of each row. The split of a row with a label and
      without a split depends on its hash, so that equal rows are in one split.
    test_share: The share of these rows for testing.
    class_names: All classes, in order. (): the classes of the rows, sorted.
    place: Returns the name of a row in messages.

  Returns:
    The marks.

  Raises:
    UsageError: If a value is not allowed.
  """
  allowed = {'', TRAIN, TEST}
  in_test = np.zeros(len(labels), bool)
  for i, (label, split, content) in enumerate(zip(labels, splits, contents)):
    if split not in allowed:
      raise UsageError(
        f'{where}, {place(i)}: its {SPLIT} is {split!r}; allowed are {TRAIN},'
        f' {TEST} and nothing'
      )
    if split == TEST and not label:
      raise UsageError(f'{where}, {place(i)}: a test example needs a label')
    # Only rows with labels can be for testing.
    is_drawn = not split and label and is_in_share(content, test_share)
    in_test[i] = split == TEST or is_drawn
  class_names = tuple(class_names) or sorted_names(set(labels))
  client_names = sorted_names(set(clients))
  y = _number(labels, class_names)
  unknown = [i for i in np.flatnonzero(y < 0).tolist() if labels[i]]
  if unknown:
    raise UsageError(
      f'{where}, {place(unknown[0])}: its {LABEL} is {labels[unknown[0]]!r};'
      f' allowed are {inspection.shown(class_names)} and nothing'
    )
  return Marks(
    y,
    _number(clients, client_names),
    in_test,
    class_names,
    client_names,
    any(label and not split for label, split in zip(labels, splits)),
  )


def _number(values: Sequence[str], known: Sequence[str]) -> np.ndarray:
  """Finds the place of each value in `known`, int32 [N], or -1."""
  places = {name: i for i, name in enumerate(known)}
  unknown = names.UNKNOWN_LABEL
  return np.array([places.get(value, unknown) for value in values], np.int32)


def sorted_names(found: set[str]) -> tuple[str, ...]:
  """Sorts names except '', and numbers by their size."""
  result = sorted(found - {''})
  if all(name.isascii() and name.isdigit() for name in result):
    # Python refuses to parse very long numbers.
    result.sort(key=lambda name: (len(name.lstrip('0')), name.lstrip('0')))
  return tuple(result)


def is_in_share(content: str | bytes, share: float) -> bool:
  """Tells whether a content's hash is in a share of all hashes."""
  if isinstance(content, str):
    # Names of files may contain bytes that are not UTF-8.
    content = content.encode(errors='surrogateescape')
  digest = hashlib.blake2b(content, digest_size=8).digest()
  return int.from_bytes(digest, 'big') < share * 2**64
