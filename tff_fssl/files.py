"""Reading files that anybody may have put there. TensorFlow-free.

What is to be read may be missing, a folder, a link that leads to itself, a
pipe that nobody writes to, a device without an end, or not what its name says.
Each of these becomes a `FileError`, which is one line, and none of them hangs.
"""

import errno
import json
import os
import stat
import sys
from typing import Any, BinaryIO

from tff_fssl.hparams import UsageError

if sys.version_info >= (3, 11):
  import tomllib
else:
  import tomli as tomllib

_LARGEST = 2**30
_REASONS = {
  errno.ENOENT: 'it does not exist (No such file or directory)',
  errno.ENOTDIR: 'it does not exist (a part of its path is not a folder)',
  errno.EACCES: 'there is no permission to read it',
  errno.EPERM: 'there is no permission to read it',
  errno.ELOOP: 'it is a link that leads back to itself',
  errno.ENAMETOOLONG: 'its name is too long',
}


class FileError(UsageError):
  """A file that cannot be read as what it should be.

  Attributes:
    path: The file.
    reason: What is wrong with it, in words.
  """

  def __init__(self, path: str, reason: str):
    """Makes the message, 'PATH: REASON'."""
    super().__init__(f'{path}: {reason}')
    self.path = path
    self.reason = reason


def first_line(error: BaseException) -> str:
  """What an exception of some library says, as a part of a line."""
  lines = [line.strip() for line in str(error).splitlines() if line.strip()]
  return lines[0] if lines else type(error).__name__


def printable(text: str, *, lines: bool = False) -> str:
  """Makes text from anywhere fit to be shown.

  A name in a file may hold codes that a terminal obeys, that turn the direction
  of writing, or that XML forbids.

  Args:
    text: The text.
    lines: Whether it may have several lines.

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
    FileError: If there is no such file, or it is something else.
  """
  try:
    # Before it is opened, which for a device may have an effect, ...
    _check_regular(path, os.stat(path).st_mode)
    # ... and without waiting for somebody to write to a pipe.
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
  """The content of a regular file.

  Args:
    path: The file.
    limit: How many bytes it may have.

  Returns:
    The bytes.

  Raises:
    FileError: If it cannot be read, is no regular file or is too large.
  """
  with open_binary(path) as file:
    try:
      content = file.read(limit + 1)
    except OSError as error:
      raise FileError(path, reason_of(error)) from error
  if len(content) > limit:
    raise FileError(
      path, f'it is larger than {limit:,} bytes, and so not what is expected'
    )
  return content


def read_text(path: str, *, limit: int = _LARGEST) -> str:
  """The content of a UTF-8 file; raises `FileError`."""
  content = read_bytes(path, limit=limit)
  try:
    return content.decode()
  except UnicodeDecodeError as error:
    line = content.count(b'\n', 0, error.start) + 1
    raise FileError(path, f'it is not UTF-8 text (line {line})') from error


def read_json(path: str, *, limit: int = _LARGEST) -> dict[str, Any]:
  """The JSON object in a file; raises `FileError`."""
  return parse_json(path, read_text(path, limit=limit))


def read_toml(path: str, *, limit: int = _LARGEST) -> dict[str, Any]:
  """The table in a TOML file; raises `FileError`."""
  try:
    return tomllib.loads(read_text(path, limit=limit))
  except tomllib.TOMLDecodeError as error:
    raise FileError(path, f'it is not TOML ({first_line(error)})') from error


def parse_json(path: str, text: str | bytes) -> dict[str, Any]:
  """The JSON object in the text of a file; raises `FileError`."""
  try:
    value = json.loads(text)
  # Deep nesting, which no file of ours has, ends Python's stack.
  except (ValueError, RecursionError) as error:
    reason = f'it is not JSON ({first_line(error)})'
    raise FileError(path, reason) from error
  if not isinstance(value, dict):
    raise FileError(path, 'it is not a JSON object')
  return value


def list_folder(folder: str) -> dict[str, bool]:
  """Lists a folder.

  Args:
    folder: The folder.

  Returns:
    Name -> whether it is a folder, sorted; without hidden ones.

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
  """Why a file cannot be read, in words."""
  reason = _REASONS.get(error.errno or 0)
  return reason or f'it cannot be read ({error.strerror or error})'


def _check_regular(path: str, mode: int) -> None:
  if stat.S_ISDIR(mode):
    raise FileError(path, 'it is a folder, not a file')
  if not stat.S_ISREG(mode):
    raise FileError(
      path, 'it is not a regular file (but a pipe, a socket or a device)'
    )
