"""Texts in CSV files: `--dataset=text:PATH`, `--dataset=ag_news`. TF-free."""

from collections.abc import Sequence
import dataclasses
import os
from typing import cast

import numpy as np

from tff_fssl import files
from tff_fssl.data import columns as columns_lib
from tff_fssl.data import data_hparams
from tff_fssl.data import listings
from tff_fssl.data import names
from tff_fssl.data import sources
from tff_fssl.data import tfds_sets
from tff_fssl.hparams import UsageError
from tff_fssl.hparams import closest

DataHparams = data_hparams.DataHparams
_TITLE, _TEXT = 'title', 'text'
_COLUMNS = (_TEXT, columns_lib.LABEL, _TITLE, columns_lib.CLIENT)
_ALL_COLUMNS = (*_COLUMNS, columns_lib.SPLIT)
# How many texts become numbers at a time.
_BATCH = 2**14


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class TextInfo(names.DataSetInfo):
  """A file of texts.

  Attributes:
    texts: Its texts.
    columns: What is said of them.
    settings: How they are read.
    notes: What to say with all results.
  """

  texts: Sequence[str]
  columns: columns_lib.Columns
  settings: DataHparams
  notes: str


def find(name: str, data_dir: str, settings: DataHparams) -> TextInfo:
  """Reads `text:PATH`; see `catalog.find`."""
  path = columns_lib.path_of(name, data_dir, names.TEXT)
  columns, rows = listings.read_csv(path)
  unknown = [column for column in columns if column not in _ALL_COLUMNS]
  missing = [column for column in _COLUMNS[:2] if column not in columns]
  if missing or unknown or len(set(columns)) < len(columns):
    hint = closest(unknown[0], missing or _ALL_COLUMNS) if unknown else ''
    raise UsageError(
      f'{path}: its columns are {", ".join(columns)[:80] or "none"}; its first'
      f' line must name {_TEXT} and {columns_lib.LABEL}, and may name {_TITLE},'
      f' {columns_lib.CLIENT} and {columns_lib.SPLIT}{hint}'
    )
  cells: dict[str, list[str]] = {column: [] for column in _ALL_COLUMNS}
  for line, values in rows:
    if len(values) != len(columns):
      raise UsageError(
        f'{path}, line {line}: has {len(values)} values for {len(columns)}'
        ' columns'
      )
    for column, value in zip(columns, values):
      cells[column].append(value.strip())
  texts, count = cells[_TEXT], len(cells[_TEXT])
  if _TITLE in columns:
    texts = list(map(' '.join, zip(cells[_TITLE], texts)))
  of_column = lambda column: cells[column] or [''] * count
  found = columns_lib.build(
    path,
    cells[columns_lib.LABEL],
    of_column(columns_lib.CLIENT),
    of_column(columns_lib.SPLIT),
    texts,
    settings.test_share,
  )
  return _info(name, texts, found, settings, path)


def ag_news_folder(data_dir: str) -> str:
  """Where AG News is, if it is there."""
  folder = os.path.expanduser(tfds_sets.folder_of(data_dir))
  return os.path.join(folder, names.AG_NEWS)


def find_ag_news(name: str, data_dir: str, settings: DataHparams) -> TextInfo:
  """Reads AG News (Zhang et al. 2015) as published; see `catalog.find`.

  `ag_news` in `data_dir` holds `train.csv` and `test.csv`, of class (from 1),
  title and description and without a header, and `classes.txt`. Without
  `train.csv`, a share of `test.csv` is for testing and the rest for training.
  """
  folder = ag_news_folder(data_dir)
  try:
    classes = files.read_text(os.path.join(folder, 'classes.txt')).split('\n')
  except files.FileError as error:
    raise UsageError(
      f'--dataset={name}: {error}; put AG News as published (train.csv,'
      f' test.csv, classes.txt) into {folder}'
    ) from error
  classes = [line.strip() for line in classes if line.strip()]
  labels, texts, splits = [], [], []
  is_whole = os.path.lexists(os.path.join(folder, 'train.csv'))
  for split in (listings.TRAIN, listings.TEST) if is_whole else ('test',):
    path = os.path.join(folder, f'{split}.csv')
    first, rows = listings.read_csv(path)
    for line, row in [(1, first), *rows]:
      number = row[0].strip() if row else ''
      if len(row) != 3 or number not in map(str, range(1, len(classes) + 1)):
        raise UsageError(
          f'{path}, line {line}: must be a class from 1 to {len(classes)}, a'
          ' title and a description, as AG News is published'
        )
      labels.append(classes[int(number) - 1])
      texts.append(' '.join(row[1:]))
      splits.append(split if is_whole else '')
  found = columns_lib.build(
    folder,
    labels,
    [''] * len(labels),
    splits,
    texts,
    settings.test_share,
    classes,
  )
  about = 'AG News' if is_whole else 'AG News, of which only test.csv is there'
  return _info(name, texts, found, settings, f'{about}, {folder}')


def _info(
  name: str,
  texts: Sequence[str],
  found: columns_lib.Columns,
  settings: DataHparams,
  about: str,
) -> TextInfo:
  """What is known of texts."""
  return TextInfo(
    name=name,
    num_classes=len(found.class_names),
    example_shape=(settings.max_words,),
    num_train=len(texts) - found.num_test,
    num_test=found.num_test,
    flip=False,
    mean=(),
    std=(),
    loader=f'{__name__}:load',
    uses=frozenset((*data_hparams.TEXTS, *found.uses)),
    texts=texts,
    columns=found,
    settings=settings,
    notes=found.notes(about, settings.test_share),
  )


def load(info: names.DataSetInfo, data_dir: str | None) -> sources.DataSet:
  """Makes numbers of words; see `sources.load`."""
  del data_dir  # The texts have been read.
  info = cast(TextInfo, info)
  # They need TensorFlow: not for `--help` and wrong flags.
  from tff_fssl.data import text_views  # pylint: disable=C0415

  x = np.concatenate(
    [
      text_views.tokens(
        list(info.texts[start : start + _BATCH]),
        info.settings.vocabulary_size,
        info.settings.max_words,
      ).numpy()
      for start in range(0, len(info.texts), _BATCH)
    ]
  )
  found = info.columns
  train, test = np.nonzero(~found.in_test)[0], np.nonzero(found.in_test)[0]
  if not x[train].any():
    raise UsageError(f'--dataset={info.name}: no training text has a word')
  return sources.DataSet(
    name=info.name,
    train=sources.Examples(x[train], found.y[train]),
    test=sources.Examples(x[test], found.y[test]),
    num_classes=info.num_classes,
    class_names=found.class_names,
    example_shape=info.example_shape,
    notes=info.notes,
    owners=found.owners[train] if found.client_names else None,
    client_names=found.client_names,
  )
