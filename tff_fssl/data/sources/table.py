"""Tables with the class, the client and the split of each row.

Manifests of images, files of vectors and files of texts share the columns
`label`, `client` and `split`.
"""

import collections
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
import csv
import hashlib
import io
import os
import re
from typing import Any, NamedTuple

import numpy as np

from tff_fssl import files
from tff_fssl.data import data_hparams
from tff_fssl.data import inspection
from tff_fssl.data import names
from tff_fssl.data import sources
from tff_fssl.hparams import UsageError
from tff_fssl.hparams import closest

LABEL, CLIENT, SPLIT = 'label', 'client', 'split'
# Usual names of a table's columns, in lower case.
USUAL = {
  LABEL: ('label', 'class', 'target', 'y', 'diagnosis', 'outcome'),
  CLIENT: ('client', 'hospital', 'site', 'center', 'centre'),
  SPLIT: ('split',),
}
# The flags that `choose` reads.
CHOOSING = frozenset({'drop', *(f'{role}_field' for role in USUAL)})
TRAIN, TEST = 'train', 'test'
INDEX = '__index_level_'
# The file's size bounds a field's.
csv.field_size_limit(2**30)
_WHOLE = re.compile(r'\d+(?:\.0+)?', re.ASCII)
_SEPARATORS = (';', '\t', '|')
# So many lines within one field look like rows that a quote swallowed.
_LEAST_SWALLOWED = 3


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
    problems: What looks wrong in the file.
  """

  cells: dict[str, list[str]]
  places: list[str]
  problems: tuple[inspection.Problem, ...] = ()

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
  table = read_all(path)
  columns = list(table.cells)
  every = (*needed, *optional)
  unknown = [column for column in columns if column not in every]
  missing = [column for column in needed if column not in columns]
  if missing or unknown:
    hint = closest(unknown[0], missing or every) if unknown else ''
    raise UsageError(
      f'{path}: its columns are {", ".join(columns)[:80] or "none"}; it must'
      f' have {" and ".join(needed)}, and may have {", ".join(optional)}{hint}'
    )
  return table


def read_all(path: str) -> Table:
  """Reads a CSV or Parquet file of any columns (see `read`)."""
  is_parquet = path.endswith('.parquet')
  columns, found = (_read_parquet if is_parquet else read_csv)(path)
  rows = list(found)
  if len(set(columns)) < len(columns):
    raise UsageError(
      f'{path}: its columns are {", ".join(columns)[:80]}; each must have a'
      ' name of its own'
    )
  problems = () if is_parquet else tuple(_swallowed(rows, len(columns)))
  table = Table({column: [] for column in columns}, [], problems)
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


def choose(
  found: Sequence[str], settings: data_hparams.DataHparams
) -> tuple[dict[str, str], list[str]]:
  """Chooses the columns of labels, clients and splits, and all others.

  Args:
    found: All columns.
    settings: The flags `CHOOSING`. Columns without a flag are found by `USUAL`
      names.

  Returns:
    Role -> column, for those that exist, and the other columns, but for those
    that are dropped.

  Raises:
    UsageError: If a column does not exist.
  """
  dropped = [n.strip() for n in settings.drop.split(',') if n.strip()]
  by_case = {name.casefold(): name for name in found}
  roles = {}
  for role, names_of in USUAL.items():
    flag = getattr(settings, f'{role}_field')
    if flag and flag not in found:
      raise UsageError(
        f'--{role}_field={flag}: there is no such column; columns are'
        f' {", ".join(found)}{closest(flag, found)}'
      )
    name = flag or next((by_case[n] for n in names_of if n in by_case), '')
    if name and name not in dropped:
      roles[role] = name
  for name in dropped:
    if name not in found:
      raise UsageError(
        f'--drop={settings.drop}: there is no column {name!r}; columns are'
        f' {", ".join(found)}{closest(name, found)}'
      )
  used = {*roles.values(), *dropped}
  return roles, [name for name in found if name not in used]


def labels_for(
  table: Table,
  class_names: Collection[str],
  *,
  field: str = '',
  features: Collection[str] = (),
) -> list[str]:
  """Finds the classes of rows, for a model that exists already.

  Args:
    table: The rows.
    class_names: The model's classes.
    field: The column of the classes in training, or '' for one of a usual name.
    features: The columns that the model takes, which are no classes.

  Returns:
    The text of each row, [N], or '' if there is no such column. Whole numbers
    are written as the classes are.
  """
  by_case = {name.casefold(): name for name in table.cells}
  found = [by_case[name] for name in USUAL[LABEL] if name in by_case]
  free = [n for n in (field, *found) if n in table.cells and n not in features]
  labels = table.column(free[0] if free else '')
  # pandas writes whole numbers of a column with gaps as floats.
  whole = {
    text: text.partition('.')[0]
    for text in {*labels}
    if text not in class_names and _WHOLE.fullmatch(text)
  }
  return [whole.get(text, text) for text in labels]


def read_csv(path: str) -> tuple[list[str], Iterable[tuple[int, list[str]]]]:
  """Reads a table of text, as programs write it.

  Args:
    path: UTF-8 or UTF-16 text, as it is or in a gzip or zip file. Commas,
      semicolons, tabs or bars separate values. A quote within quotes is doubled
      or follows a backslash.

  Returns:
    (columns, (line, values) of each row).

  Raises:
    UsageError: If it cannot be read.
  """
  text = files.read_text(path, packed=True)
  header = text[: text.find('\n')]
  separator = ','
  if ',' not in header:
    separator = next((s for s in _SEPARATORS if s in header), ',')
  rows = _parse_csv(path, text, separator)
  return ([n.strip() for n in rows[0][1]], rows[1:]) if rows else ([], [])


def _parse_csv(
  path: str, text: str, separator: str
) -> list[tuple[int, list[str]]]:
  """Returns (first line, values) of each row, or raises `UsageError`."""
  first_error = None
  # MySQL and others write a backslash before a quote.
  for form in ({'doublequote': True}, {'escapechar': '\\'}):
    source = io.StringIO(text, newline='')
    reader = csv.reader(source, delimiter=separator, strict=True, **form)
    rows, line = [], 1
    try:
      for row in reader:
        if row:
          rows.append((line, row))
        line = reader.line_num + 1
      return rows
    except csv.Error as error:
      reason = str(error)
      if 'field larger' in reason:
        reason = f'more than {csv.field_size_limit():,} characters in a field'
      first_error = first_error or UsageError(
        f'{path}, line {line}: a row that begins here cannot be read'
        f' ({reason}, in line {reader.line_num}); put a field with quotes into'
        ' quotes, and double those within ("")'
      )
  raise first_error  # type: ignore[misc]


def _swallowed(
  rows: Iterable[tuple[int, list[str]]], num_columns: int
) -> Iterator[inspection.Problem]:
  """Finds fields that hold lines which look like rows."""
  for line, values in rows:
    inner = [text for value in values for text in value.splitlines()[1:-1]]
    alike = [
      text
      for text in inner
      if any(
        len(text.split(separator)) == num_columns > 1
        for separator in (',', *_SEPARATORS)
      )
    ]
    if len(alike) >= _LEAST_SWALLOWED and len(alike) > len(inner) / 2:
      yield inspection.Problem(
        f'line {line}: a quote begins a field of {len(inner) + 2:,} lines, of'
        f' which {len(alike):,} look like rows: close the quote, or double it'
        ' within quotes ("")',
        brief=f'{len(alike):,} rows within a field of line {line}',
        misleads=True,
      )


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
  columns = {
    name: values
    for name, values in read_parquet(path).to_pydict().items()
    # pandas writes the index of a filtered frame.
    if not name.startswith(INDEX)
  }
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
    uses: The flags of the split and of classes that have an effect.
    problems: What was found in the table.
  """

  y: np.ndarray
  owners: np.ndarray
  in_test: np.ndarray
  class_names: tuple[str, ...]
  client_names: tuple[str, ...]
  uses: frozenset[str]
  problems: tuple[inspection.Problem, ...]

  @property
  def order(self) -> np.ndarray:
    """Returns the places of the rows, int [N], training rows first."""
    return np.argsort(self.in_test, kind='stable')

  @property
  def num_train(self) -> int:
    """Returns the number of rows for training."""
    return int((~self.in_test).sum())

  def info(self, **facts: Any) -> dict[str, Any]:
    """Completes the facts of a `sources.Info`."""
    num_train = self.num_train
    return {
      'num_classes': len(self.class_names),
      'num_train': num_train,
      'num_test': len(self.y) - num_train,
      'flip': False,
      'mean': (),
      'std': (),
      'uses': self.uses | facts.pop('uses', frozenset()),
      'problems': self.problems,
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
    share = f'; {test_share:g} of it is for testing'
    share *= 'test_share' in self.uses
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
  settings: data_hparams.DataHparams,
  *,
  class_names: Sequence[str] = (),
  unknown: Collection[str] = names.UNKNOWN_WORDS,
  place: Callable[[int], str] = lambda row: f'row {row + 1}',
) -> Marks:
  """Numbers classes and clients, and splits.

  Args:
    where: The file, for messages.
    labels: The class of each row, [N], or '' or another word for an unknown
      one.
    clients: The client of each row, [N], or '' if it belongs to nobody.
    splits: 'train', 'test' or '' of each row, [N].
    contents: The content of each row. The split of a row with a label and
      without a split depends on its hash, so that equal rows are in one split.
    settings: The share of these rows for testing, and words that are classes.
    class_names: All classes, in order. (): the classes of the rows, sorted.
    unknown: Words for unknown classes, in lower case.
    place: Returns the name of a row in messages.

  Returns:
    The marks.

  Raises:
    UsageError: If a value is not allowed.
  """
  known, words = _known_labels(labels, class_names, settings, unknown)
  by_client = settings.split_by == names.CLIENT
  in_test = np.zeros(len(labels), bool)
  for i, (label, split, content) in enumerate(zip(known, splits, contents)):
    if split not in ('', TRAIN, TEST):
      raise UsageError(
        f'{where}, {place(i)}: its {SPLIT} is {split!r}; allowed are {TRAIN},'
        f' {TEST} and nothing'
      )
    if split == TEST and not label:
      given = f', but its {LABEL} is {labels[i]!r}' if labels[i] else ''
      raise UsageError(
        f'{where}, {place(i)}: a test example needs a label{given}'
      )
    # Only rows with labels can be for testing.
    drawn = bool(label) and not split
    whole = by_client and clients[i] or content
    in_test[i] = split == TEST or (
      drawn and is_in_share(whole, settings.test_share)
    )
  trained = {c for c, is_test in zip(clients, in_test) if not is_test}
  # In a split by client, those that are for testing alone are no clients.
  client_names = sorted_names(trained if by_client else set(clients))
  every = tuple(class_names) or sorted_names(set(known))
  y = _number(known, every)
  wrong = [i for i in np.flatnonzero(y < 0).tolist() if known[i]]
  if wrong:
    raise UsageError(
      f'{where}, {place(wrong[0])}: its {LABEL} is {known[wrong[0]]!r};'
      f' allowed are {inspection.shown(every)} and nothing'
    )
  owners = _number(clients, client_names)
  uses = {'split_by'} if client_names else set()
  if any(w and w.casefold() in unknown for w in set(labels) - {*class_names}):
    uses.add('class_words')
  if any(label and not split for label, split in zip(known, splits)):
    uses.add('test_share')
  problems = (
    *inspection.unknown_problems(words),
    *inspection.label_problems(every, y[~in_test], y[in_test]),
    *inspection.owner_problems(
      owners[~in_test], owners[in_test], 'test_share' in uses
    ),
  )
  return Marks(
    y, owners, in_test, every, client_names, frozenset(uses), problems
  )


def _known_labels(
  labels: Sequence[str],
  class_names: Sequence[str],
  settings: data_hparams.DataHparams,
  unknown: Collection[str],
) -> tuple[list[str], collections.Counter[str]]:
  """Returns labels, '' for unknown ones, and the words of the latter."""
  # Declared classes are classes, whatever they are called.
  is_unknown = {
    word: word not in class_names and settings.is_unknown(word, unknown)
    for word in set(labels)
  }
  words = collections.Counter(word for word in labels if is_unknown[word])
  known = ['' if is_unknown[label] else label for label in labels]
  # pandas writes whole numbers of a column with gaps as floats.
  if not class_names and all(
    _WHOLE.fullmatch(name) for name in {*known} - {''}
  ):
    known = [label.partition('.')[0] for label in known]
  return known, words


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
