"""Reads a client's own images, vectors or texts from its disk."""

from collections.abc import Sequence
import importlib
import json
import os
import pathlib
from typing import Any

from fssl_app import artefact
from fssl_app import work
import numpy as np

UNLABELED = 'unlabeled'
_TABLES = ('.csv', '.tsv', '.csv.gz', '.csv.zip', '.parquet')


class ReadError(Exception):
  """Data that cannot be read: the message says what to do."""


def read(
  path: str, folder: str = ''
) -> tuple[tuple[np.ndarray, np.ndarray] | None, Any]:
  """Reads examples.

  Args:
    path: A folder with images (CLASS/*.jpg, unlabeled/*.jpg), a table with
      columns text and label, or with those that the model takes and label, or
      a file .npz with arrays x and y, where x are examples as the network's
      views take them. Labels are names of classes, in an .npz file also their
      numbers; '', -1, NaN, unlabeled and the like: not known.
    folder: The folder of the program, unless it is in this app.

  Returns:
    ((x, y) with labels or None, x without labels or None).

  Raises:
    ReadError: If it is something else.
  """
  about = json.loads(work.load_program(folder).read('client.json'))
  if os.path.isdir(path):
    x, labels = _read_images(path, about)
  elif path.endswith(_TABLES):
    x, labels = _read_table(path, about)
  elif path.endswith('.npz'):
    x, labels = _read_arrays(path)
  else:
    raise ReadError(
      f'{path}: is neither a folder of images nor a file'
      f' {", ".join(_TABLES)} or .npz; edit load_client.py to read it'
    )
  y = np.array([_class_of(label, about, path) for label in labels], np.int32)
  known = y >= 0
  return (
    (x[known], y[known]) if known.any() else None,
    x[~known] if not known.all() else None,
  )


def _class_of(label: Any, about: dict[str, Any], path: str) -> int:
  """Returns the number of a class, or -1 if the label is not known."""
  names = about['class_names']
  if isinstance(label, int) and 0 <= label < len(names):
    return label
  word = '' if label is None else str(label).strip()
  if word not in names and word.casefold() in about['unknown_words']:
    return -1
  if str(label) not in names:
    raise ReadError(f'{path}: {label!r} is no class; classes are {names}')
  number: int = names.index(str(label))
  return number


def _read_images(
  folder: str, about: dict[str, Any]
) -> tuple[np.ndarray, Sequence[str]]:
  """Reads class folders, as `--dataset=folder:` does."""
  pictures = _import('pictures', folder)
  form = pictures.Form(
    tuple(about['example_shape']), about['resize'], about['bit_depth']
  )
  found, labels = [], []
  for path in sorted(pathlib.Path(folder).glob('*/*')):
    if not path.name.startswith('.') and pictures.is_image(path.name):
      found.append(pictures.read(path, form).pixels)
      labels.append(path.parent.name)
  if not found:
    raise ReadError(f'{folder}: has no images in CLASS/ or {UNLABELED}/')
  return np.stack(found), labels


def _read_arrays(path: str) -> tuple[np.ndarray, list[Any]]:
  """Reads x, and y if it is there."""
  try:
    arrays = artefact.read_npz(path)
  except artefact.ArtefactError as error:
    raise ReadError(str(error)) from error
  x = arrays.get('x')
  if x is None or not x.ndim:
    raise ReadError(f'{path}: must have an array x, and may have y')
  y = arrays.get('y', np.full([len(x)], work.UNKNOWN_LABEL))
  if y.shape != x.shape[:1]:
    raise ReadError(f'{path}: x has {len(x)} rows, y has shape {y.shape}')
  return x, y.tolist()


def _read_table(
  path: str, about: dict[str, Any]
) -> tuple[np.ndarray, Sequence[str]]:
  """Reads a table, as `--dataset=text:` and `--dataset=features:` do."""
  table = _import('sources.table', path)
  rows = table.read_all(path)
  columns_lib = _import('sources.columns', path)
  columns = columns_lib.parse(about['columns'])
  labels = table.labels_for(
    rows,
    about['class_names'],
    field=about['label_field'],
    features=[column.name for column in columns],
  )
  if columns:
    x = columns_lib.encode(columns, rows.cells, path)
    return x[:, np.newaxis], labels
  if 'text' not in rows.cells:
    raise ReadError(f'{path}: must have a column text, and may have label')
  words = _import('text_views', path).tokens(
    _import('sources.text', path).texts_of(rows),
    about['vocabulary_size'],
    about['max_words'],
    about['text_unit'],
  )
  return words.numpy(), labels


def _import(name: str, path: str) -> Any:
  """Imports a reader of the simulation, for equal examples."""
  try:
    return importlib.import_module(f'tff_fssl.data.{name}')
  except ImportError as error:
    raise ReadError(
      f'{path}: its reader is in tff_fssl, which cannot be imported ({error});'
      ' install it without its dependencies (pip install --no-deps), and Pillow'
      ' for images, or edit load_client.py'
    ) from error
