"""Texts in CSV files: `--dataset=text:PATH`, `--dataset=ag_news`."""

from collections.abc import Iterator, Sequence
import dataclasses
import os
import re

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
from tff_fssl.hparams import closest

DataHparams = data_hparams.DataHparams
_TITLE, _TEXT = 'title', 'text'
# The number of texts that are converted at a time.
_BATCH = 2**14
# Letters of Thai, Lao, Burmese, Khmer, Japanese and Chinese, more than a word
# has.
_NO_SPACES = re.compile(
  '[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff]{8}'
)


def find(name: str, data_dir: str, settings: DataHparams) -> sources.Info:
  """Reads `text:PATH` (see `sources.find`)."""
  path = table.resolve_path(name, data_dir, names.TEXT)
  found = table.read_all(path)
  roles, others = table.choose(list(found.cells), settings)
  unknown = [column for column in others if column not in (_TITLE, _TEXT)]
  if unknown or _TEXT not in others or table.LABEL not in roles:
    hint = closest(unknown[0], (_TEXT, table.LABEL, _TITLE)) if unknown else ''
    raise UsageError(
      f'{path}: its columns are {", ".join(found.cells)[:80] or "none"}; it'
      f' must have {_TEXT} and {table.LABEL} (or --label_field), and may have'
      f' {_TITLE}, {table.CLIENT} and {table.SPLIT}; --drop leaves others'
      f' out{hint}'
    )
  texts = texts_of(found)
  labels, clients, splits = (
    found.column(roles.get(role, '')) for role in table.USUAL
  )
  marks = table.mark(
    path,
    labels,
    clients,
    splits,
    texts,
    settings,
    place=found.places.__getitem__,
  )
  info = _info(name, path, path, texts, marks, settings, found.problems)
  return dataclasses.replace(
    info, uses=info.uses | table.CHOOSING, about={**info.about, **roles}
  )


def texts_of(found: table.Table) -> list[str]:
  """Returns the texts of a table, each after its title, if there is one."""
  texts = found.column(_TEXT)
  if _TITLE in found.cells:
    texts = list(map(' '.join, zip(found.column(_TITLE), texts)))
  return texts


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
    settings,
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
  problems: Sequence[inspection.Problem] = (),
) -> sources.Info:
  """Returns the facts of texts."""

  def read() -> sources.DataSet:
    ordered = [texts[i] for i in marks.order]
    parts = [
      text_views.tokens(
        ordered[start : start + _BATCH],
        settings.vocabulary_size,
        settings.max_words,
        settings.text_unit,
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
    uses=frozenset(data_hparams.TEXTS),
  )
  facts['problems'] += (*problems, *_unit_problems(texts, settings))
  return sources.Info(**facts, read=read, about={'where': where})


def _unit_problems(
  texts: Sequence[str], settings: DataHparams
) -> Iterator[inspection.Problem]:
  """Finds texts without content, or without spaces between words."""
  empty = sum(not text.strip() for text in texts)
  if empty:
    yield inspection.Problem(
      f'{empty:,} texts are empty', brief=f'{empty:,} texts empty'
    )
  count = sum(_NO_SPACES.search(text) is not None for text in texts)
  is_words = settings.text_unit == data_hparams.WORDS
  if is_words and count > len(texts) / 10:
    yield inspection.Problem(
      f'{count:,} of {len(texts):,} texts write words without spaces between'
      ' them, and the whole would count as one word: give'
      f' --text_unit={data_hparams.CHARACTERS}',
      brief=f'{count:,} texts without spaces',
    )
