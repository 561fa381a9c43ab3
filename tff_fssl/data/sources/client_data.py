"""SQLite files of TFF's `ClientData`: `--dataset=clientdata:PATH`.

PATH is a file of `tff.simulation.datasets.SqlClientData`. Its table `examples`
has a split, a client and a serialized `tf.train.Example` a row. Splits are
`train` and `test`, or `X_train` and `X_test` for several X (TFF's EMNIST:
`digits_only`, `all`). PATH/X chooses X.
"""

import collections
from collections.abc import Iterator, Mapping
import contextlib
import functools
import os
import sqlite3
from typing import Any
import urllib.parse

import numpy as np

from tff_fssl import files
from tff_fssl.data import data_hparams
from tff_fssl.data import names
from tff_fssl.data import pictures
from tff_fssl.data import sources
from tff_fssl.data.sources import images
from tff_fssl.data.sources import table
from tff_fssl.hparams import UsageError
from tff_fssl.lazy import tf

DataHparams = data_hparams.DataHparams
Row = images.Row
Split = images.Split
_TRAIN = table.TRAIN
_MAGIC = b'SQLite format 3\0'


def find(name: str, data_dir: str, settings: DataHparams) -> sources.Info:
  """Finds a data set, and decodes it the first time (see `sources.find`)."""
  return images.find(locate(name, data_dir, settings))


def locate(name: str, data_dir: str, settings: DataHparams) -> images.Found:
  """Finds the file, without reading it.

  Args:
    name: `names.CLIENT_DATA` and a path.
    data_dir: The start of relative paths. '': the current folder.
    settings: The flags for reading.

  Returns:
    The data set.

  Raises:
    UsageError: If the file is missing.
  """
  root, choice = table.resolve_path(name, data_dir, names.CLIENT_DATA), ''
  file, _, last = root.rpartition('/')
  if last and os.path.isfile(file):
    root, choice = file, last
  try:
    states = images.file_states([root])
  except UsageError as error:
    raise UsageError(f'--dataset={name}: {error}') from error
  return images.Found(
    name=name,
    root=root,
    key=(states, choice),
    settings=settings,
    open=lambda: images.open_splits(
      _chosen(root, _splits(root, _Fields(settings)), choice), settings
    ),
    partition=names.NATURAL,
    uses=images.SHAPED
    | {'class_words'}
    | {'test_share', 'max_unreadable', 'image_field', 'label_field'},
  )


def _chosen(
  path: str, found: Mapping[str, Split], choice: str
) -> dict[str, Split]:
  """Chooses the splits of one set, by their plain names."""
  sets = {
    name.removesuffix(_TRAIN).rstrip('_'): name
    for name in found
    if name.endswith(_TRAIN)
  }
  # A single split of any name is the whole set.
  if not sets and not choice and len(found) == 1:
    return dict(found)
  if not choice and len(sets) == 1:
    (choice,) = sets
  if choice not in sets:
    options = ' or '.join(
      f'{names.CLIENT_DATA}{path}/{name}'.rstrip('/') for name in sorted(sets)
    )
    raise UsageError(
      f'{path}: its splits are {", ".join(sorted(found)) or "none"}; give'
      f' {options or "a file with train and test"}'
    )
  prefix = sets[choice].removesuffix(_TRAIN)
  return {
    name.removeprefix(prefix): split
    for name, split in found.items()
    if name.startswith(prefix)
  }


class _Fields:
  """The fields with the image and the label of an example."""

  def __init__(self, settings: DataHparams):
    self._settings = settings
    self._names: tuple[str, str] | None = None

  def choose(self, found: Mapping[str, Any]) -> tuple[str, str]:
    """Chooses (image, label) by the first example, or raises `UsageError`."""
    if self._names is None:
      settings = self._settings
      self._names = images.choose_fields(
        sorted(found), settings.image_field, settings.label_field
      )
    return self._names

  def row(self, name: str, owner: str, content: Any) -> Row:
    """Makes the row of a serialized example."""
    try:
      features = _parse_example(content)
      fields = self.choose(features)
      for field in fields:
        if field not in features:
          raise ValueError(f'it has no feature {field!r}')
      image, label = (_read_value(features[f]) for f in fields)
    except UsageError:
      raise
    except ValueError as error:
      return Row(name, b'', problem=files.first_line(error))
    if isinstance(image, bytes):
      image = pictures.parse_bytes(image)
    return images.make_row(self._settings, name, image, label, owner)


def _splits(path: str, fields: _Fields) -> dict[str, Split]:
  """Opens the splits."""
  with files.open_binary(path) as file:
    if file.read(len(_MAGIC)) != _MAGIC:
      raise files.FileError(path, 'it is no SQLite file')
  # By default, SQLite would create a missing file, and repair a torn one.
  uri = f'file:{urllib.parse.quote(os.path.abspath(path))}?mode=ro'

  def query(text: str, *values: str) -> Iterator[tuple[Any, ...]]:
    try:
      with contextlib.closing(sqlite3.connect(uri, uri=True)) as connection:
        yield from connection.execute(text, values)
    # The message of an error may quote bytes that are no text.
    except (sqlite3.Error, UnicodeError) as error:
      reason = f'it is no SQLite file of TFF, or damaged ({error})'
      raise files.FileError(path, reason) from error

  def rows(split: str) -> Iterator[Row]:
    numbers: collections.Counter[str] = collections.Counter()
    for client, content in query(
      'SELECT client_id, serialized_example_proto FROM examples'
      ' WHERE split_name = ?',
      split,
    ):
      client = str(client)
      yield fields.row(f'{client}/{numbers[client]}', client, content)
      numbers[client] += 1

  # A hostile view, or column that is computed, could run forever.
  kinds = list(query("SELECT type FROM sqlite_master WHERE name = 'examples'"))
  columns = query("SELECT hidden FROM pragma_table_xinfo('examples')")
  if kinds != [('table',)] or any(hidden for (hidden,) in columns):
    raise files.FileError(
      path, "it has no table examples, as TFF's SQLite files have"
    )
  return {
    str(split): Split(count, functools.partial(rows, split))
    for split, count in query(
      'SELECT split_name, COUNT(*) FROM examples GROUP BY split_name'
      ' ORDER BY split_name'
    )
  }


def _parse_example(content: Any) -> Mapping[str, Any]:
  """Parses a `tf.train.Example`, or raises `ValueError`."""
  from google.protobuf import message  # pylint: disable=C0415

  try:
    return tf.train.Example.FromString(content).features.feature
  except (message.DecodeError, TypeError) as error:
    raise ValueError('it is no tf.train.Example') from error


def _read_value(feature: Any) -> np.ndarray | bytes:
  """Returns a feature's value: float32 [N], int64 [N], or bytes.

  Raises:
    ValueError: If it has no value, or several strings.
  """
  kind = feature.WhichOneof('kind')
  values = getattr(feature, kind).value if kind else []
  if not len(values):
    raise ValueError('it is empty')
  if kind != 'bytes_list':
    dtype = np.float32 if kind == 'float_list' else np.int64
    return np.fromiter(values, dtype, len(values))
  if len(values) > 1:
    raise ValueError(f'it has {len(values)} strings of bytes, not one')
  return values[0]
