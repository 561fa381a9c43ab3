"""Texts in CSV files: `--dataset=text:PATH`, `--dataset=ag_news`."""

from collections.abc import Sequence
import os

import numpy as np

from tff_fssl import files
from tff_fssl.data import data_hparams
from tff_fssl.data import inspection
from tff_fssl.data import names
from tff_fssl.data import sources
from tff_fssl.data import text_views
from tff_fssl.data.sources import table
from tff_fssl.data.sources import tfds
from tff_fssl.hparams import UsageError

DataHparams = data_hparams.DataHparams
_TITLE, _TEXT = 'title', 'text'
# The number of texts that are converted at a time.
_BATCH = 2**14


def find(name: str, data_dir: str, settings: DataHparams) -> sources.Info:
  """Reads `text:PATH` (see `sources.find`)."""
  path = table.resolve_path(name, data_dir, names.TEXT)
  optional = (_TITLE, table.CLIENT, table.SPLIT)
  found = table.read(path, (_TEXT, table.LABEL), optional)
  texts = found.column(_TEXT)
  if _TITLE in found.cells:
    texts = list(map(' '.join, zip(found.column(_TITLE), texts)))
  marks = table.mark(
    path,
    found.column(table.LABEL),
    found.column(table.CLIENT),
    found.column(table.SPLIT),
    texts,
    settings.test_share,
    place=found.places.__getitem__,
  )
  return _info(name, path, path, texts, marks, settings)


def ag_news_folder(data_dir: str) -> str:
  """Returns the folder of AG News."""
  folder = os.path.expanduser(tfds.root_folder(data_dir))
  return os.path.join(folder, names.AG_NEWS)


def find_ag_news(
  name: str, data_dir: str, settings: DataHparams
) -> sources.Info:
  """Reads AG News (Zhang et al. 2015) as published (see `sources.find`).

  `ag_news` in `data_dir` contains `classes.txt`, `train.csv` and `test.csv`.
  Their columns are class (from 1), title and description, without a header.
  Without `train.csv`, a share of `test.csv` is for testing and the rest for
  training.
  """
  folder = ag_news_folder(data_dir)
  try:
    lines = files.read_text(os.path.join(folder, 'classes.txt')).split('\n')
  except files.FileError as error:
    raise UsageError(
      f'--dataset={name}: {error}; put AG News as published (train.csv,'
      f' test.csv, classes.txt) into {folder}'
    ) from error
  classes = [line.strip() for line in lines if line.strip()]
  labels, texts, splits = [], [], []
  is_whole = os.path.lexists(os.path.join(folder, 'train.csv'))
  for split in (table.TRAIN, table.TEST) if is_whole else (table.TEST,):
    path = os.path.join(folder, f'{split}.csv')
    first, rows = table.read_csv(path)
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
  marks = table.mark(
    folder,
    labels,
    [''] * len(labels),
    splits,
    texts,
    settings.test_share,
    class_names=classes,
  )
  about = 'AG News' if is_whole else 'AG News, but only its test.csv'
  return _info(name, folder, f'{about}, {folder}', texts, marks, settings)


def _info(
  name: str,
  where: str,
  about: str,
  texts: Sequence[str],
  marks: table.Marks,
  settings: DataHparams,
) -> sources.Info:
  """Returns the facts of texts."""
  inspection.refuse(where, marks.problems())

  def read() -> sources.DataSet:
    ordered = [texts[i] for i in marks.order]
    parts = [
      text_views.tokens(
        ordered[start : start + _BATCH],
        settings.vocabulary_size,
        settings.max_words,
      ).numpy()
      for start in range(0, len(ordered), _BATCH)
    ]
    x = np.concatenate(parts)
    if not x[: marks.num_train].any():
      raise UsageError(f'--dataset={name}: no training text has a word')
    return marks.data_set(name, x, about, settings.test_share)

  facts = marks.info(
    name=name,
    example_shape=(settings.max_words,),
    uses=marks.uses | set(data_hparams.TEXTS),
  )
  return sources.Info(**facts, read=read)
