"""Decoded images in a file that is mapped into memory.

A data set's images are decoded once, into a folder whose name is a hash of all
inputs. `images.bin` has the images, uint8 [N, H, W, C], and `index.json` the
rest. The folder is made under another name, flushed and renamed, so it is whole
or missing. Leftovers of a kill are removed when the next folder is made.

`index.json` ends with a CRC-32 of itself and of the images, which is checked
whenever they are opened: 0.1 seconds for the images of CIFAR-10 (1.6 GB/s).
"""

from collections.abc import Callable, Iterable
import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import re
import shutil
from typing import Any, NamedTuple
import zlib

import numpy as np

from tff_fssl import durable
from tff_fssl import files
from tff_fssl.hparams import UsageError

# Part of every key. Raise it when the conversion of images changes.
_VERSION = 3
_IMAGES, _INDEX, _LOCK = 'images.bin', 'index.json', 'lock'
_WRITING = '.writing'
_KEY = re.compile(r'[0-9a-f]{32}')
_OURS = re.compile(r'[0-9a-f]{32}\.writing')
_CHECKSUM = 'crc32'
_CHUNK = 2**24
# The deviation of a set whose images all have one color, to divide by.
_LEAST_DEVIATION = 1 / 255


@dataclasses.dataclass(frozen=True)
class Cached:
  """Decoded images.

  Attributes:
    path: Their folder.
    images: uint8 [N, H, W, C], mapped, read-only.
    facts: Facts about them from the maker.
    mean: Mean of the training images' pixels / 255, per channel.
    std: Standard deviation of the same, > 0.
  """

  path: str
  images: np.ndarray
  facts: dict[str, Any]
  mean: tuple[float, ...]
  std: tuple[float, ...]


# Writes an image, uint8 [H, W, C], at its position.
Put = Callable[[int, np.ndarray], None]
# Puts the images, and returns (number of images, number of training images,
# which come first, facts as values for JSON).
Make = Callable[[Put], tuple[int, int, dict[str, Any]]]


def key_of(*parts: Any) -> str:
  """Names a folder by a hash of all inputs of its images."""
  text = json.dumps([_VERSION, *parts], default=dataclasses.asdict)
  return hashlib.sha256(text.encode(errors='surrogatepass')).hexdigest()[:32]


def find(folder: str, key: str) -> Cached | None:
  """Opens decoded images, or returns None if they are missing.

  Args:
    folder: The folder of all caches.
    key: From `key_of`.

  Returns:
    The images.

  Raises:
    UsageError: If they are damaged.
  """
  path = os.path.join(folder, key)
  return _open(path) if os.path.lexists(path) else None


def _open(path: str) -> Cached:
  """Opens a folder of decoded images, or raises `UsageError`."""
  try:
    index = files.read_json(os.path.join(path, _INDEX))
    images = _map(os.path.join(path, _IMAGES), tuple(index['shape']))
    if index.pop(_CHECKSUM) != _checksum(index, images):
      raise ValueError('its checksum is another')
  except (KeyError, TypeError, ValueError) as error:
    raise UsageError(
      f'{path}: these decoded images are damaged ({files.first_line(error)});'
      ' remove this folder and give the command again'
    ) from error
  mean, std = tuple(index['mean']), tuple(index['std'])
  return Cached(path, images, index['facts'], mean, std)


def make(
  folder: str, key: str, shape: tuple[int, ...], most: int, put_all: Make
) -> Cached:
  """Makes decoded images, unless another program has made them meanwhile.

  Args:
    folder: The folder of all caches.
    key: From `key_of`.
    shape: (height, width, channels).
    most: The greatest number of images, for which space is reserved.
    put_all: Puts the images.

  Returns:
    The images.

  Raises:
    UsageError: If the disk refuses.
  """
  path = os.path.join(folder, key)
  with durable.storage_errors('--cache_dir'):
    os.makedirs(folder, exist_ok=True)
    with _locked(folder):
      if not os.path.lexists(path):
        _remove_leftovers(folder)
        _make(path, shape, most, put_all)
  return _open(path)


@contextlib.contextmanager
def _locked(folder: str):
  """Lets one program at a time make images in a folder."""
  descriptor = os.open(
    os.path.join(folder, _LOCK),
    os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK,
    0o666,
  )
  try:
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    yield
  finally:
    os.close(descriptor)


def _remove_leftovers(folder: str) -> None:
  """Removes unfinished folders of killed programs, within `_locked`."""
  for name in os.listdir(folder):
    path = os.path.join(folder, name)
    # No program leaves a link.
    if _OURS.fullmatch(name) and not os.path.islink(path):
      shutil.rmtree(path)


class Made(NamedTuple):
  """A folder of decoded images.

  Attributes:
    path: The folder.
    shape: (number of images, height, width, channels).
    num_bytes: The size of its files.
    time: When it was made, in seconds since 1970.
  """

  path: str
  shape: tuple[int, ...]
  num_bytes: int
  time: float


def made(folder: str) -> list[Made]:
  """Lists the decoded images in a folder of caches, the oldest first.

  Args:
    folder: The folder of all caches, which may be missing.

  Returns:
    Those that are whole.

  Raises:
    UsageError: If the folder cannot be read.
  """
  found = []
  with durable.storage_errors('--cache_dir'):
    for name in os.listdir(folder) if os.path.lexists(folder) else ():
      path = os.path.join(folder, name)
      if not _KEY.fullmatch(name) or os.path.islink(path):
        continue
      try:
        index = files.read_json(os.path.join(path, _INDEX))
        shape = tuple(index['shape'])
        states = [os.lstat(os.path.join(path, n)) for n in (_IMAGES, _INDEX)]
      # Another program may remove the folder meanwhile.
      except (OSError, KeyError, TypeError, ValueError):
        continue
      size = sum(state.st_size for state in states)
      found.append(Made(path, shape, size, states[1].st_mtime))
  return sorted(found, key=lambda one: (one.time, one.path))


def remove(folder: str, found: Iterable[Made]) -> None:
  """Removes decoded images, and leftovers of killed programs.

  A program that has mapped them keeps working, since the system keeps the files
  until nobody maps them.

  Args:
    folder: The folder of all caches.
    found: From `made`.

  Raises:
    UsageError: If the disk refuses.
  """
  if not os.path.isdir(folder):
    return
  with durable.storage_errors('--cache_dir'), _locked(folder):
    for one in found:
      # Renamed first, so that no program finds half of a folder.
      with contextlib.suppress(FileNotFoundError):
        os.rename(one.path, f'{one.path}{_WRITING}')
    _remove_leftovers(folder)


def _make(path: str, shape: tuple[int, ...], most: int, put_all: Make):
  new, size = f'{path}{_WRITING}', int(np.prod(shape))
  os.mkdir(new)
  try:
    images = os.path.join(new, _IMAGES)
    with open(images, 'wb') as file:
      # So that a full disk is noticed before hours of work.
      if most:
        os.posix_fallocate(file.fileno(), 0, most * size)

      def put(position: int, image: np.ndarray) -> None:
        file.seek(position * size)
        file.write(image.tobytes())

      count, num_train, facts = put_all(put)
      file.truncate(count * size)
    mean, std = moments(_map(images, (count, *shape))[:num_train])
    index: dict[str, Any] = {
      'shape': [count, *shape],
      'mean': mean,
      'std': std,
      'facts': facts,
    }
    index[_CHECKSUM] = _checksum(index, _map(images, (count, *shape)))
    with open(os.path.join(new, _INDEX), 'wb') as file:
      file.write(json.dumps(index).encode())
    for name in (_IMAGES, _INDEX):
      durable.sync_file(os.path.join(new, name))
    durable.sync_folder(new)
    os.rename(new, path)
    durable.sync_folder(os.path.dirname(path))
  except BaseException as error:
    shutil.rmtree(new, ignore_errors=True)
    if isinstance(error, OSError) and error.filename is None:
      # Calls on an open file do not know its name.
      error.filename = new
    raise


def _map(path: str, shape: tuple[int, ...]) -> np.ndarray:
  with files.open_binary(path) as file:
    size = os.fstat(file.fileno()).st_size
    if size != int(np.prod(shape)):
      raise files.FileError(path, f'it has {size:,} bytes')
    # An empty file cannot be mapped.
    if not size:
      return np.zeros(shape, np.uint8)
    return np.memmap(file, np.uint8, 'r', shape=shape)


def chunks(images: np.ndarray) -> Iterable[np.ndarray]:
  """Yields slices of images, each of about 16 MB."""
  rows = max(1, _CHUNK // max(1, int(np.prod(images.shape[1:]))))
  for start in range(0, len(images), rows):
    yield images[start : start + rows]


def _checksum(index: dict[str, Any], images: np.ndarray) -> int:
  """Computes CRC-32 of an index without its checksum, and of its images."""
  crc = zlib.crc32(json.dumps(index).encode())
  for chunk in chunks(images):
    crc = zlib.crc32(chunk.data, crc)
  return crc


def moments(
  images: np.ndarray,
) -> tuple[tuple[float, ...], tuple[float, ...]]:
  """Measures images.

  Args:
    images: uint8 [N, H, W, C].

  Returns:
    (mean, deviation) of pixels / 255, per channel. Deviations are at least
    1 / 255.
  """
  channels = images.shape[-1]
  # Exact and without a float for each pixel: counts of the 256 values.
  counts = np.zeros((channels, 256), np.int64)
  for chunk in chunks(images):
    for channel in range(channels):
      values = chunk[..., channel].ravel()
      counts[channel] += np.bincount(values, minlength=256)
  values = np.arange(256) / 255
  mean = counts @ values / max(1, counts[0].sum())
  square = counts @ values**2 / max(1, counts[0].sum())
  std = np.sqrt(np.maximum(square - mean**2, 0))
  std = np.maximum(std, _LEAST_DEVIATION)
  return tuple(mean.tolist()), tuple(std.tolist())
