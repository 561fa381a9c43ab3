"""`tf.train.Example` and TFRecord files, without TensorFlow.

They are read when flags are checked, before TensorFlow is loaded. The messages
are those of TensorFlow's example.proto and feature.proto.
"""

from collections.abc import Iterator
import functools
import os
import struct
from typing import Any, BinaryIO

import numpy as np

from tff_fssl import files

_HEADER, _FOOTER = struct.Struct('<QI'), struct.Struct('<I')
# Reversed polynomial of CRC-32C, and the mask of TFRecord's checksums.
_CASTAGNOLI, _MASK = 0x82F63B78, 0xA282EAD8
_LISTS = {
  'bytes_list': ('TYPE_BYTES', None),
  'float_list': ('TYPE_FLOAT', np.float32),
  'int64_list': ('TYPE_INT64', np.int64),
}


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


def parse(content: bytes) -> dict[str, Any]:
  """Parses a serialized `tf.train.Example`.

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
    feature: From `parse`.

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


def records(path: str, file: BinaryIO) -> Iterator[bytes]:
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
