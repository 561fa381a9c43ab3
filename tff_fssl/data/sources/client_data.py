"""Files of TFF's `ClientData`: `--dataset=clientdata:PATH`.

PATH is one of:

*   a SQLite file of `tff.simulation.datasets.SqlClientData`. Its table
    `examples` has a split, a client and a serialized `tf.train.Example` a row.
    Splits are `train` and `test`, or `X_train` and `X_test` for several X
    (TFF's EMNIST: `digits_only`, `all`). PATH/X chooses X.
*   an HDF5 file `examples/CLIENT/FIELD`, like TFF's older EMNIST.
*   a folder with a TFRecord file of such examples for each client, as for
    `tff.simulation.datasets.FilePerUserClientData`.
*   a folder with two of these, with names that end in `train` and `test`.

Neither TFF nor TensorFlow is needed to read them.
"""

import collections
from collections.abc import Iterator, Mapping
import contextlib
import functools
import math
import os
import sqlite3
from typing import Any
import urllib.parse

import numpy as np

from tff_fssl import files
from tff_fssl.data import data_hparams
from tff_fssl.data import names
from tff_fssl.data import pictures
from tff_fssl.data.sources import images
from tff_fssl.data.sources import table
from tff_fssl.data.sources import tf_records
from tff_fssl.hparams import UsageError

DataHparams = data_hparams.DataHparams
Row = images.Row
Split = images.Split
_TRAIN, _TEST = table.TRAIN, table.TEST
_SQLITE, _HDF5 = b'SQLite format 3\0', b'\x89HDF\r\n\x1a\n'
_RECORD_SUFFIXES = ('.tfrecord', '.tfrecords')
# Bytes of an HDF5 file that are read at a time, and of the largest image.
_CHUNK_BYTES, _MAX_IMAGE_BYTES = 2**24, 2**28


def find(name: str, data_dir: str, settings: DataHparams) -> images.ImagesInfo:
  """Finds a data set, and decodes it the first time (see `catalog`)."""
  return images.find(locate(name, data_dir, settings))


def locate(name: str, data_dir: str, settings: DataHparams) -> images.Found:
  """Finds the files, without reading them.

  Args:
    name: `names.CLIENT_DATA` and a path.
    data_dir: The start of relative paths. '': the current folder.
    settings: The flags for reading.

  Returns:
    The data set.

  Raises:
    UsageError: If the files are missing.
  """
  root, choice = table.resolve_path(name, data_dir, names.CLIENT_DATA), ''
  file, _, last = root.rpartition('/')
  if last and os.path.isfile(file):
    root, choice = file, last
  try:
    parts = _parts(root)
    states = images.file_states(
      path for part in parts.values() for path in _files(part)
    )
  except UsageError as error:
    raise UsageError(f'--dataset={name}: {error}') from error
  return images.Found(
    name=name,
    root=root,
    key=(states, choice),
    settings=settings,
    open=lambda: images.open_splits(_open(parts, choice, settings), settings),
    uses=images.SHAPED
    | {'test_share', 'max_unreadable', 'image_field', 'label_field'},
  )


def _parts(root: str) -> dict[str, str]:
  """Maps splits to files or folders. '' means all splits."""
  if not os.path.isdir(root):
    return {'': root}
  found: dict[str, str] = {}
  for entry in files.list_folder(root):
    stem = entry.partition('.')[0].lower()
    for split in (_TRAIN, _TEST):
      if stem.endswith(split):
        if split in found:
          raise UsageError(
            f'{root}: {os.path.basename(found[split])} and {entry} are both for'
            f' {split}; keep one of them there'
          )
        found[split] = os.path.join(root, entry)
  return found if _TRAIN in found else {'': root}


def _files(part: str) -> list[str]:
  """Lists the files of a part, or raises `UsageError` if it has none."""
  if not os.path.isdir(part):
    return [part]
  found = [
    os.path.join(part, name)
    for name, is_folder in files.list_folder(part).items()
    if not is_folder
  ]
  if not found:
    raise UsageError(f'{part}: has no files; there must be one for each client')
  return found


def _open(
  parts: Mapping[str, str], choice: str, settings: DataHparams
) -> dict[str, Split]:
  """Opens the files, or raises `UsageError` if they are of another kind."""
  splits: dict[str, Split] = {}
  for split, path in parts.items():
    found = _splits(path, _Fields(settings))
    if not split:
      splits = _chosen(path, found, choice)
    elif len(found) == 1:
      # The file's name counts, not the split's.
      splits[split] = next(iter(found.values()))
    else:
      raise UsageError(
        f'{path}: has the splits {", ".join(found) or "none"}, although its'
        f' name is for {split}; give {names.CLIENT_DATA}{path}'
      )
  return splits


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


def _splits(path: str, fields: '_Fields') -> dict[str, Split]:
  """Opens the splits of a file or a folder, usually one."""
  if os.path.isdir(path):
    return {_TRAIN: _read_users(_files(path), fields)}
  with files.open_binary(path) as file:
    start = file.read(max(len(_SQLITE), len(_HDF5)))
  if start.startswith(_SQLITE):
    return _read_sql(path, fields)
  if start.startswith(_HDF5):
    return {_TRAIN: _read_hdf5(path, fields)}
  return {_TRAIN: _read_users([path], fields)}


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
        found, settings.image_field, settings.label_field
      )
    return self._names

  def row(self, name: str, owner: str, content: Any) -> Row:
    """Makes the row of a serialized example."""
    try:
      features = tf_records.parse(content)
      fields = self.choose(features)
      for field in fields:
        if field not in features:
          raise ValueError(f'it has no feature {field!r}')
      image, label = (tf_records.read_value(features[f]) for f in fields)
    except UsageError:
      raise
    except ValueError as error:
      return Row(name, b'', problem=files.first_line(error))
    if isinstance(image, bytes):
      image = pictures.parse_bytes(image)
    return images.make_row(name, image, label, owner)


def _read_users(paths: list[str], fields: _Fields) -> Split:
  """Reads TFRecord files, one for each client."""

  def records() -> Iterator[tuple[str, int, bytes]]:
    for path in paths:
      client = os.path.basename(path)
      for suffix in _RECORD_SUFFIXES:
        client = client.removesuffix(suffix)
      with files.open_binary(path) as file:
        for number, content in enumerate(tf_records.records(path, file)):
          yield client, number, content

  def rows() -> Iterator[Row]:
    for client, number, content in records():
      yield fields.row(f'{client}/{number}', client, content)

  return Split(sum(1 for _ in records()), rows)


def _read_sql(path: str, fields: _Fields) -> dict[str, Split]:
  """Reads the splits of a SQLite file."""
  # By default, SQLite would create a missing file, and repair a torn one.
  uri = f'file:{urllib.parse.quote(os.path.abspath(path))}?mode=ro'

  def query(text: str, *values: str) -> Iterator[tuple[Any, ...]]:
    try:
      with contextlib.closing(sqlite3.connect(uri, uri=True)) as connection:
        yield from connection.execute(text, values)
    except sqlite3.Error as error:
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

  # A hostile view could run forever.
  kinds = list(query("SELECT type FROM sqlite_master WHERE name = 'examples'"))
  if kinds != [('table',)]:
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


def _read_hdf5(path: str, fields: _Fields) -> Split:
  """Reads an HDF5 file."""
  import h5py  # pylint: disable=import-outside-toplevel

  def inside(group: Any, name: str) -> Any:
    # Soft and external links may lead into other files.
    if not isinstance(group.get(name, getlink=True), h5py.HardLink):
      raise ValueError(f'there is no {name!r} in {group.name}')
    return group[name]

  @contextlib.contextmanager
  def clients() -> Iterator[Iterator[tuple[str, Any, Any]]]:
    """Opens the file, and yields (client, images, labels) of each client."""
    with files.open_binary(path) as file, h5py.File(file, 'r') as data:
      examples = inside(data, 'examples')

      def each():
        for client in sorted(examples):
          group = inside(examples, client)
          image, label = (inside(group, name) for name in fields.choose(group))
          if not image.shape or label.shape[:1] != image.shape[:1]:
            raise ValueError(
              f'{group.name} has {list(image.shape)} images and'
              f' {list(label.shape)} labels'
            )
          if _bytes_each(image) > _MAX_IMAGE_BYTES:
            raise ValueError(f'{image.name} has {list(image.shape)} values')
          yield client, image, label

      yield each()

  @contextlib.contextmanager
  def readable() -> Iterator[None]:
    try:
      yield
    except UsageError:
      raise
    except Exception as error:  # pylint: disable=broad-except
      # HDF5 raises errors of many classes for bad content.
      reason = (
        'it cannot be read as HDF5 with examples/CLIENT/FIELD'
        f' ({files.first_line(error)})'
      )
      raise files.FileError(path, reason) from error

  def rows() -> Iterator[Row]:
    with readable(), clients() as found:
      for client, pixels, labels in found:
        size = max(1, _CHUNK_BYTES // _bytes_each(pixels))
        for start in range(0, len(pixels), size):
          chunk = slice(start, start + size)
          pairs = zip(pixels[chunk], labels[chunk])
          for i, (image, label) in enumerate(pairs, start):
            if not isinstance(image, bytes):
              image = np.asarray(image)
            yield images.make_row(f'{client}/{i}', image, label, client)

  with readable(), clients() as found:
    count = sum(len(pixels) for _, pixels, _ in found)
  return Split(count, rows)


def _bytes_each(pixels: Any) -> int:
  """Computes the size of an image in an HDF5 dataset."""
  return max(1, math.prod(pixels.shape[1:]) * pixels.dtype.itemsize)
