"""Tables of patients, customers and the like: `--dataset=features:PATH.csv`.

A row is an example. Columns of numbers, dates and few different texts become
the numbers of a vector. What that takes is learned from training rows, kept
with the model, and the same for rows to come (`encode`). TensorFlow-free.
"""

from collections.abc import Mapping, Sequence
import datetime
from typing import Any, NamedTuple

import numpy as np

from tff_fssl.data import inspection
from tff_fssl.data import names
from tff_fssl.hparams import UsageError
from tff_fssl.hparams import closest

NUMBER, DATE, CATEGORY = 'number', 'date', 'category'
# A column of more different texts is refused, and one of more than a text for
# two rows.
MAX_CATEGORIES, _FEW = 50, 10
# Text of more words, in the mean, is no name of a category.
_MOST_WORDS = 3
# A column is of numbers, with mistakes, if so large a share of it is.
_MOSTLY = 0.8
_SECONDS = 86_400
Cells = Mapping[str, Sequence[str]]


class Column(NamedTuple):
  """A column that is used, as values for JSON.

  Attributes:
    name: Its name.
    kind: `NUMBER`, `DATE` (in days) or `CATEGORY`.
    center: The median, which is subtracted, and replaces missing values.
    has_gaps: Whether a further number says that the value is missing.
    values: The texts of a category, each of which is a number: 1 or 0.
  """

  name: str
  kind: str
  center: float = 0.0
  has_gaps: bool = False
  values: Sequence[str] = ()


def learn(
  where: str, cells: Cells, places: Sequence[str], in_test: np.ndarray
) -> tuple[list[Column], list[inspection.Problem]]:
  """Learns how columns become numbers.

  Args:
    where: The file, for messages.
    cells: Column -> text of each row, [N], '' or another word if missing.
    places: The name of each row in messages, [N].
    in_test: bool [N], rows from which nothing is learned.

  Returns:
    The columns that are used, and what was found.

  Raises:
    UsageError: If a column is of another kind, or none is left.
  """
  columns: list[Column] = []
  problems: list[inspection.Problem] = []
  without: dict[str, list[str]] = {'constant': [], 'empty': []}
  train = np.flatnonzero(~in_test).tolist()
  for name, texts in cells.items():
    known = {i: texts[i] for i in train if not _is_missing(texts[i])}
    different = set(known.values())
    if len(different) < 2:
      without['constant' if different else 'empty'].append(name)
      continue
    column = _column(where, name, known, places)
    columns.append(column._replace(has_gaps=len(known) < len(train)))
    values = list(known.values())
    if column.kind == NUMBER and _counts_rows(values):
      problems.append(
        inspection.Problem(
          f'column {name}: {len(values):,} different whole numbers without a'
          f' gap, as of an identifier; --drop={name} leaves it out',
          brief=f'{name} like an identifier',
        )
      )
  for what, found in without.items():
    if found:
      problems.append(
        inspection.Problem(
          f'{what} columns are left out: {inspection.shown(found)}',
          brief=f'{len(found):,} {what} columns left out',
        )
      )
  if not columns:
    raise UsageError(f'{where}: has no column with different values')
  return columns, problems


def encode(columns: Sequence[Column], cells: Cells, where: str) -> np.ndarray:
  """Converts rows to vectors.

  Args:
    columns: From `learn`.
    cells: Column -> text of each row, [N]. Further columns are ignored.
    where: The file, for messages.

  Returns:
    float32 [N, D]: a number for a column, two if it has gaps, and one for each
    text of a category. Texts that were not learned are 0 in all of them.

  Raises:
    UsageError: If a column is missing, or a value is no number.
  """
  missing = [column.name for column in columns if column.name not in cells]
  if missing:
    raise UsageError(
      f'{where}: has no column {missing[0]!r}, but {", ".join(cells)}'
      f'{closest(missing[0], cells)}'
    )
  parts = []
  for column in columns:
    texts = cells[column.name]
    gaps = np.array([_is_missing(text) for text in texts], bool)
    if column.kind == CATEGORY:
      places = {value: i for i, value in enumerate(column.values)}
      part = np.zeros((len(texts), len(places)))
      for row, text in enumerate(texts):
        if text in places:
          part[row, places[text]] = 1
      parts.append(part)
    else:
      values = np.full(len(texts), column.center)
      for i in np.flatnonzero(~gaps).tolist():
        values[i] = _number(column.kind, texts[i], f'{where}, row {i + 1}')
      # In float64: float32 would round large numbers before.
      parts.append((values - column.center)[:, None])
    if column.has_gaps:
      parts.append(gaps[:, None])
  return np.concatenate(parts, axis=1).astype(np.float32)


def describe(columns: Sequence[Column]) -> str:
  """Names the columns by their kinds, in one line."""
  kinds: dict[str, list[str]] = {}
  for column in columns:
    kinds.setdefault(column.kind, []).append(column.name)
  return '; '.join(
    f'{len(found)} of kind {kind} ({", ".join(found)})'
    for kind, found in kinds.items()
  )


def parse(values: Any) -> list[Column]:
  """Makes columns of their JSON values."""
  return [Column(*value) for value in values]


def _is_missing(text: str) -> bool:
  return text.casefold() in names.UNKNOWN_WORDS and text not in ('-1', '-1.0')


def _column(
  where: str, name: str, known: Mapping[int, str], places: Sequence[str]
) -> Column:
  """Finds the kind of a column, or raises `UsageError`."""
  different = set(known.values())
  for kind in (NUMBER, DATE):
    wrong = [i for i, text in known.items() if _parsed(kind, text) is None]
    if not wrong:
      values = [_parsed(kind, text) for text in known.values()]
      return Column(name, kind, float(np.median(np.array(values, float))))
    if len(wrong) < (1 - _MOSTLY) * len(known):
      raise UsageError(
        f'{where}, {places[wrong[0]]}: column {name} holds a {kind} in most'
        f' rows, but {known[wrong[0]]!r} here; correct it, or leave the column'
        f' out by --drop={name}'
      )
  most = max(_FEW, min(MAX_CATEGORIES, len(known) // 2))
  if len(different) <= most:
    return Column(name, CATEGORY, values=sorted(different))
  words = sum(len(text.split()) for text in different) / len(different)
  way = 'an identifier? Leave it out'
  if words > _MOST_WORDS:
    way = 'texts are a data set of their own (text:PATH); leave them out'
  raise UsageError(
    f'{where}: column {name} has {len(different):,} different texts, such as'
    f' {min(different)!r} (at most {most}): {way} by --drop={name}'
  )


def _parsed(kind: str, text: str) -> float | None:
  """Reads a number, or a date as days since 1970, or returns None."""
  try:
    if kind == NUMBER:
      value = float(text)
    else:
      date = datetime.datetime.fromisoformat(text)
      if date.tzinfo is None:
        date = date.replace(tzinfo=datetime.UTC)
      value = date.timestamp() / _SECONDS
  except ValueError:
    return None
  return value if abs(value) < 1e300 else None


def _number(kind: str, text: str, place: str) -> float:
  value = _parsed(kind, text)
  if value is None:
    raise UsageError(f'{place}: {text!r} is no {kind}')
  return value


def _counts_rows(values: Sequence[str]) -> bool:
  """Tells whether whole numbers are all different, without a gap."""
  try:
    numbers = sorted(map(int, values))
  except ValueError:
    return False
  return numbers == list(range(numbers[0], numbers[0] + len(numbers)))
