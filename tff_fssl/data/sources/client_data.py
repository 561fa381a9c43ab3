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

Neither TFF nor TensorFlow is needed to read them: they are read when flags are
checked, before TensorFlow is loaded.
"""

import collections
from collections.abc import Iterator, Mapping
import contextlib
import functools
import math
import os
import sqlite3
import struct
from typing import Any, BinaryIO
import urllib.parse

import numpy as np

from tff_fssl import files
from tff_fssl.data import data_hparams
from tff_fssl.data import names
from tff_fssl.data import pictures
from tff_fssl.data.sources import images
from tff_fssl.data.sources import table
from tff_fssl.hparams import UsageError

DataHparams = data_hparams.DataHparams
Row = images.Row
Split = images.Split
_TRAIN, _TEST = table.TRAIN, table.TEST
_SQLITE, _HDF5 = b'SQLite format 3\0', b'\x89HDF\r\n\x1a\n'
_RECORD_SUFFIXES = ('.tfrecord', '.tfrecords')
# Bytes of an HDF5 file that are read at a time, and of the largest image.
_CHUNK_BYTES, _MAX_IMAGE_BYTES = 2**24, 2**28
_HEADER, _FOOTER = struct.Struct('<QI'), struct.Struct('<I')
# Reversed polynomial of CRC-32C, and the mask of TFRecord's checksums.
_CASTAGNOLI, _MASK = 0x82F63B78, 0xA282EAD8
# Fields of a feature in TensorFlow's feature.proto -> (type, NumPy's type).
_LISTS = {
  'bytes_list': ('TYPE_BYTES', None),
  'float_list': ('TYPE_FLOAT', np.float32),
  'int64_list': ('TYPE_INT64', np.int64),
}


def find(name: str, data_dir: str, settings: DataHparams) -> images.ImagesInfo:
  """Finds a data set, and decodes it the first time (see `sources.find`)."""
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
  entries = files.list_folder(root)
  for entry in entries:
    for split in (_TRAIN, _TEST):
      if _is_of_split(entry, split):
        if split in found:
          raise UsageError(
            f'{root}: {os.path.basename(found[split])} and {entry} are both for'
            f' {split}; keep one of them there'
          )
        found[split] = os.path.join(root, entry)
  if _TRAIN not in found:
    return {'': root}
  # With a file for each client, the name of one may end like a split's.
  train = os.path.basename(found[_TRAIN])
  ending = train.partition('.')[2]
  if not entries[train] and f'.{ending}' in (*_RECORD_SUFFIXES, '.'):
    alike = [
      entry
      for entry, is_folder in entries.items()
      if not is_folder and entry.partition('.')[2] == ending
    ]
    if not all(_is_of_split(entry, _TRAIN, _TEST) for entry in alike):
      return {'': root}
  return found


def _is_of_split(entry: str, *splits: str) -> bool:
  """Tells whether the name of an entry ends in that of one of the splits."""
  return entry.partition('.')[0].lower().endswith(splits)


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
      features = parse_example(content)
      fields = self.choose(features)
      for field in fields:
        if field not in features:
          raise ValueError(f'it has no feature {field!r}')
      image, label = (read_value(features[f]) for f in fields)
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
        for number, content in enumerate(read_records(path, file)):
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


def _read_hdf5(path: str, fields: _Fields) -> Split:
  """Reads an HDF5 file."""
  import h5py  # pylint: disable=import-outside-toplevel

  def inside(group: Any, name: str) -> Any:
    # Soft and external links may lead into other files.
    if not isinstance(group.get(name, getlink=True), h5py.HardLink):
      raise ValueError(f'there is no {name!r} in {group.name}')
    return group[name]

  def clients(data: Any) -> Iterator[tuple[str, Any, Any]]:
    examples = inside(data, 'examples')
    for client in sorted(examples):
      group = inside(examples, client)
      image, label = (inside(group, name) for name in fields.choose(group))
      for values in (image, label):
        # They could read any file of this machine.
        if values.external or values.is_virtual:
          raise ValueError(f'{values.name} lies in another file')
      if not image.shape or label.shape[:1] != image.shape[:1]:
        raise ValueError(
          f'{group.name} has {list(image.shape)} images and'
          f' {list(label.shape)} labels'
        )
      if _bytes_each(image) > _MAX_IMAGE_BYTES:
        raise ValueError(f'{image.name} has {list(image.shape)} values')
      yield client, image, label

  @contextlib.contextmanager
  def opened() -> Iterator[Iterator[tuple[str, Any, Any]]]:
    """Opens the file, and yields (client, images, labels) of each client."""
    try:
      with files.open_binary(path) as file, h5py.File(file, 'r') as data:
        yield clients(data)
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
    with opened() as found:
      for client, pixels, labels in found:
        size = max(1, _CHUNK_BYTES // _bytes_each(pixels))
        for start in range(0, len(pixels), size):
          chunk = slice(start, start + size)
          pairs = zip(pixels[chunk], labels[chunk])
          for i, (image, label) in enumerate(pairs, start):
            if not isinstance(image, bytes):
              image = np.asarray(image)
            yield images.make_row(f'{client}/{i}', image, label, client)

  with opened() as found:
    count = sum(len(pixels) for _, pixels, _ in found)
  return Split(count, rows)


def _bytes_each(pixels: Any) -> int:
  """Computes the size of an image in an HDF5 dataset."""
  return max(1, math.prod(pixels.shape[1:]) * pixels.dtype.itemsize)


@functools.cache
def _example_class() -> Any:
  """Builds the message `tf.train.Example`, separate from TensorFlow's."""
  # pylint: disable=import-outside-toplevel
  from google.protobuf import descriptor_pb2  # type: ignore[import-untyped]
  from google.protobuf import descriptor_pool
  from google.protobuf import message_factory

  kind = descriptor_pb2.FieldDescriptorProto
  file = descriptor_pb2.FileDescriptorProto(
    name='example.proto', package='tff_fssl', syntax='proto3'
  )

  def add(message, *fields):
    added = file.message_type.add(name=message)
    for number, (name, type_name, label) in enumerate(fields, 1):
      is_message = not type_name.startswith('TYPE_')
      added.field.add(
        name=name,
        number=number,
        label=getattr(kind, label),
        type=kind.TYPE_MESSAGE if is_message else getattr(kind, type_name),
        type_name=f'.tff_fssl.{type_name}' if is_message else None,
      )

  one, many = 'LABEL_OPTIONAL', 'LABEL_REPEATED'
  for name, (type_name, _) in _LISTS.items():
    add(name, ('value', type_name, many))
  add('Feature', *((name, name, one) for name in _LISTS))
  # A map of protocol buffers is a list of such entries.
  add('Entry', ('key', 'TYPE_STRING', one), ('value', 'Feature', one))
  add('Features', ('feature', 'Entry', many))
  add('Example', ('features', 'Features', one))
  pool = descriptor_pool.DescriptorPool()
  pool.Add(file)
  return message_factory.GetMessageClass(
    pool.FindMessageTypeByName('tff_fssl.Example')
  )


def parse_example(content: bytes) -> dict[str, Any]:
  """Parses a serialized `tf.train.Example`, without TensorFlow.

  Args:
    content: The bytes.

  Returns:
    Name -> feature, for `read_value`.

  Raises:
    ValueError: If it is not an example.
  """
  from google.protobuf import message  # pylint: disable=C0415

  try:
    example = _example_class().FromString(content)
  except (message.DecodeError, TypeError) as error:
    raise ValueError('it is no tf.train.Example') from error
  return {entry.key: entry.value for entry in example.features.feature}


def read_value(feature: Any) -> np.ndarray | bytes:
  """Returns a feature's value: float32 [N], int64 [N], or bytes.

  Args:
    feature: From `parse_example`.

  Returns:
    The value.

  Raises:
    ValueError: If it has no value, or several strings.
  """
  for name, (_, dtype) in _LISTS.items():
    if feature.HasField(name):
      values = getattr(feature, name).value
      if dtype is not None:
        return np.fromiter(values, dtype, len(values))
      if len(values) == 1:
        return values[0]
      raise ValueError(f'it has {len(values)} strings of bytes, not one')
  raise ValueError('it is empty')


def read_records(path: str, file: BinaryIO) -> Iterator[bytes]:
  """Reads the records of a TFRecord file without compression.

  The checksum of a record's length is checked. The checksum of its content is
  not: in Python that would take longer than to decode an image.

  Args:
    path: Its name, for errors.
    file: The file, open at its start.

  Yields:
    Each record.

  Raises:
    files.FileError: If it is not a TFRecord file, or ends within a record.
  """
  position, size = 0, os.fstat(file.fileno()).st_size
  while header := file.read(_HEADER.size):
    torn = files.FileError(path, f'its record at byte {position:,} is damaged')
    if len(header) < _HEADER.size:
      raise torn
    length, checksum = _HEADER.unpack(header)
    if _masked_crc(header[:8]) != checksum:
      if position:
        raise torn
      raise files.FileError(path, 'it is no TFRecord file')
    position += _HEADER.size + length + _FOOTER.size
    if position > size:
      raise torn
    yield file.read(length)
    file.read(_FOOTER.size)


def _masked_crc(data: bytes) -> int:
  """Computes TFRecord's checksum of a few bytes."""
  # Without a table of 256 values, since a length has 8 bytes only.
  crc = 0xFFFFFFFF
  for byte in data:
    crc ^= byte
    for _ in range(8):
      crc = (crc >> 1) ^ (_CASTAGNOLI if crc & 1 else 0)
  crc ^= 0xFFFFFFFF
  return ((crc >> 15 | crc << 17) + _MASK) & 0xFFFFFFFF
