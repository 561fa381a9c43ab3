"""Readers of files of unknown origin.

A path may be missing, or a folder, a link that leads to itself, a pipe without
a writer, a device without an end, or a file of another format than its name
says. Each of these becomes a `FileError` of one line, and none hangs.
"""

import codecs
import errno
import gzip
import io
import json
import math
import os
import stat
import tomllib
from typing import TYPE_CHECKING, Any, BinaryIO, NoReturn
import zipfile
import zlib

from tff_fssl.hparams import UsageError

if TYPE_CHECKING:
  import numpy as np

_LARGEST = 2**30
_GZIP, _ZIP = b'\x1f\x8b', b'PK\x03\x04'
# Whole numbers with more digits may be beyond the largest float.
_MOST_DIGITS = 300
_REASONS = {
  errno.ENOENT: 'it does not exist (No such file or directory)',
  errno.ENOTDIR: 'it does not exist (a part of its path is not a folder)',
  errno.EACCES: 'there is no permission to read it',
  errno.EPERM: 'there is no permission to read it',
  errno.ELOOP: 'it is a link that leads back to itself',
  errno.ENAMETOOLONG: 'its name is too long',
}


class FileError(UsageError):
  """A file that cannot be read as expected.

  Attributes:
    path: The file.
    reason: The problem, in words.
  """

  def __init__(self, path: str, reason: str):
    """Makes the message, 'PATH: REASON'."""
    super().__init__(f'{path}: {reason}')
    self.path = path
    self.reason = reason


def first_line(error: BaseException) -> str:
  """Returns the first line of a library's exception, or its type."""
  lines = [line.strip() for line in str(error).splitlines() if line.strip()]
  return lines[0] if lines else type(error).__name__


def printable(text: str, *, lines: bool = False) -> str:
  """Escapes text of unknown origin for display.

  A name in a file may contain codes that a terminal obeys, that change the
  direction of writing, or that XML forbids.

  Args:
    text: The text.
    lines: Whether line breaks are kept.

  Returns:
    The text, with unprintable characters escaped as Python escapes them.
  """
  if lines:
    return '\n'.join(map(printable, text.split('\n')))
  if text.isprintable():
    return text
  return ''.join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def open_binary(path: str) -> BinaryIO:
  """Opens a regular file for reading.

  Args:
    path: The file, or a link to it.

  Returns:
    The open file.

  Raises:
    FileError: If the path is missing or not a regular file.
  """
  try:
    # Opening a device may have an effect, so it is checked before, too.
    _check_regular(path, os.stat(path).st_mode)
    # O_NONBLOCK: a pipe would wait for a writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
      _check_regular(path, os.fstat(descriptor).st_mode)
      return os.fdopen(descriptor, 'rb')
    except BaseException:
      os.close(descriptor)
      raise
  except OSError as error:
    raise FileError(path, reason_of(error)) from error
  except ValueError as error:
    if isinstance(error, UsageError):
      raise
    # A name with a NUL, or one that the file system's encoding cannot write.
    raise FileError(path, 'no file can have this name') from error


def read_bytes(path: str, *, limit: int = _LARGEST) -> bytes:
  """Reads a regular file.

  Args:
    path: The file.
    limit: The greatest size, in bytes.

  Returns:
    The bytes.

  Raises:
    FileError: If it cannot be read, is not a regular file or is too large.
  """
  with open_binary(path) as file:
    try:
      content = file.read(limit + 1)
    except OSError as error:
      raise FileError(path, reason_of(error)) from error
  if len(content) > limit:
    raise FileError(
      path, f'it is larger than {limit:,} bytes, which is not expected here'
    )
  return content


def read_text(path: str, *, limit: int = _LARGEST, packed: bool = False) -> str:
  """Reads a text file.

  Args:
    path: The file, in UTF-8, or in UTF-16 with a byte order mark, which is left
      out.
    limit: The greatest size, in bytes.
    packed: Whether it may be a gzip file, or a zip file of one file.

  Returns:
    The text.

  Raises:
    FileError: If it cannot be read, is too large, or is not such text.
  """
  read = read_packed if packed else read_bytes
  content = read(path, limit=limit)
  is_wide = content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
  try:
    return content.decode('utf-16' if is_wide else 'utf-8-sig')
  except UnicodeDecodeError as error:
    line = content.count(b'\n', 0, error.start) + 1
    raise FileError(
      path,
      f'it is not UTF-8 text (line {line}); if it is Latin-1, as of older'
      ' programs, convert it: iconv -f latin1 -t utf8',
    ) from error


def read_packed(path: str, *, limit: int = _LARGEST) -> bytes:
  """Reads a file that may be a gzip file, or a zip file of one file.

  Args:
    path: The file.
    limit: The greatest size, in bytes, also after unpacking.

  Returns:
    The bytes, unpacked.

  Raises:
    FileError: If it cannot be read, is too large, or is not whole.
  """
  content = read_bytes(path, limit=limit)
  is_packed = content.startswith((_GZIP, _ZIP))
  return _unpacked(path, content, limit) if is_packed else content


def _unpacked(path: str, content: bytes, limit: int) -> bytes:
  """Unpacks a gzip file, or the only file in a zip file."""
  try:
    if content.startswith(_GZIP):
      file: Any = gzip.open(io.BytesIO(content))
    else:
      archive = zipfile.ZipFile(io.BytesIO(content))
      inside = [i for i in archive.infolist() if not i.is_dir()]
      if len(inside) != 1:
        raise ValueError(f'it packs {len(inside)} files, not one')
      file = archive.open(inside[0])
    unpacked = file.read(limit + 1)
  # zipfile raises NotImplementedError and RuntimeError, too.
  except (OSError, EOFError, ValueError, zlib.error, RuntimeError) as error:
    reason = f'it cannot be unpacked ({first_line(error)})'
    raise FileError(path, reason) from error
  except zipfile.BadZipFile as error:
    raise FileError(path, 'it is no whole zip file') from error
  if len(unpacked) > limit:
    raise FileError(path, f'it unpacks to more than {limit:,} bytes')
  return unpacked


def read_json(path: str, *, limit: int = _LARGEST) -> dict[str, Any]:
  """Reads the JSON object in a file, or raises `FileError`."""
  return parse_json(path, read_text(path, limit=limit))


def read_record(path: str, form: str) -> dict[str, Any] | None:
  """Reads a JSON object that says its format.

  Args:
    path: The file.
    form: The format that it must say, as `format`.

  Returns:
    The rest of the object. None if there is no file, as in runs of older
    versions.

  Raises:
    FileError: If it is not such a file.
  """
  if not os.path.lexists(path):
    return None
  values = read_json(path)
  if values.pop('format', None) != form:
    raise FileError(path, f'its format is not {form!r}')
  return values


def read_toml(path: str, *, limit: int = _LARGEST) -> dict[str, Any]:
  """Reads the table in a TOML file, or raises `FileError`."""
  text = read_text(path, limit=limit)
  try:
    return tomllib.loads(text)
  # Python refuses whole numbers of thousands of digits by a ValueError.
  except (ValueError, RecursionError) as error:
    raise FileError(path, f'it is not TOML ({first_line(error)})') from error


def parse_json(
  path: str, text: str | bytes, *, finite: bool = True
) -> dict[str, Any]:
  """Parses the JSON object in a file's text.

  Args:
    path: The file.
    text: Its text.
    finite: Whether NaN and numbers beyond the range of floats are refused. None
      of our files has such numbers, and readers need not expect them.

  Returns:
    The object.

  Raises:
    FileError: If it is not a JSON object.
  """
  numbers: dict[str, Any] = {}
  if finite:
    numbers = {
      'parse_constant': _refuse_number,
      'parse_float': _finite_float,
      'parse_int': _short_int,
    }
  try:
    value = json.loads(text, **numbers)
  # Deep nesting, which none of our files has, exhausts Python's stack.
  except (ValueError, RecursionError) as error:
    reason = f'it is not JSON ({first_line(error)})'
    raise FileError(path, reason) from error
  if not isinstance(value, dict):
    raise FileError(path, 'it is not a JSON object')
  return value


def _refuse_number(text: str) -> NoReturn:
  shown = text if len(text) <= 20 else f'{text[:20]}...'
  raise ValueError(f'it holds {shown}, which is not a number here')


def _finite_float(text: str) -> float:
  value = float(text)
  return value if math.isfinite(value) else _refuse_number(text)


def _short_int(text: str) -> int:
  return int(text) if len(text) <= _MOST_DIGITS else _refuse_number(text)


def read_npz(path: str) -> 'dict[str, np.ndarray]':
  """Reads arrays of numbers and text, or raises `FileError`."""
  # Slow to import. pylint: disable-next=import-outside-toplevel
  import numpy as np

  with open_binary(path) as file:
    try:
      with np.load(file, allow_pickle=False) as archive:
        return {name: archive[name] for name in archive.files}
    # NumPy, zipfile and decoders raise errors of many classes.
    except Exception as error:  # pylint: disable=broad-except
      reason = f'it is not a whole NPZ file ({first_line(error)})'
      if 'pickle' in str(error) and 'Object' in str(error):
        reason = (
          'it has arrays of Python objects, which are not read; rows of x must'
          ' be equally long, and text must be of a fixed width (dtype=str)'
        )
      raise FileError(path, reason) from error


def list_folder(folder: str) -> dict[str, bool]:
  """Lists a folder.

  Args:
    folder: The folder.

  Returns:
    Name -> whether it is a folder, sorted and without hidden entries.

  Raises:
    FileError: If it cannot be read.
  """
  try:
    with os.scandir(folder) as found:
      return {
        entry.name: entry.is_dir()
        for entry in sorted(found, key=lambda entry: entry.name)
        if not entry.name.startswith('.')
      }
  except OSError as error:
    raise FileError(folder, reason_of(error)) from error
  except ValueError as error:
    raise FileError(folder, 'no folder can have this name') from error


def reason_of(error: OSError) -> str:
  """Says in words why a file cannot be read."""
  reason = _REASONS.get(error.errno or 0)
  return reason or f'it cannot be read ({error.strerror or error})'


def _check_regular(path: str, mode: int) -> None:
  if stat.S_ISDIR(mode):
    raise FileError(path, 'it is a folder, not a file')
  if not stat.S_ISREG(mode):
    raise FileError(
      path, 'it is not a regular file (but a pipe, a socket or a device)'
    )
