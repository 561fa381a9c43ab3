"""The file format of a checkpoint: named arrays, self-checking. TF-free.

    'tff_fssl checkpoint 1' and a line feed
    length of the header, 8 bytes, little-endian
    header, JSON: {"leaves": [{"path", "kind", "dtype", "shape"}, ...]}
    the leaves' bytes, in that order, C order, little-endian
    SHA-256 of all of it, 32 bytes

One file holds the whole state, so that a single rename makes it current.
"""

from collections.abc import Iterable, Iterator, Mapping
import hashlib
import json
import math
import os
import re
from typing import Any

import numpy as np

_MAGIC = b'tff_fssl checkpoint 1\n'
_DIGEST_SIZE = hashlib.sha256().digest_size


_NAME = re.compile(r'round_(-?\d+)\.ckpt')


class CheckpointError(Exception):
  """A file that cannot be used as the checkpoint that its name says."""


def path_of(folder: str, version: int) -> str:
  """The file of a version, which is the number of the last finished round."""
  return os.path.join(folder, f'round_{version}.ckpt')


def versions(folder: str) -> list[int]:
  """The versions in a folder, ascending; whole or not."""
  if not os.path.isdir(folder):
    return []
  matches = (_NAME.fullmatch(name) for name in os.listdir(folder))
  return sorted(int(match[1]) for match in matches if match)


def to_chunks(leaves: Mapping[str, Any]) -> Iterator[bytes | memoryview]:
  """The content of a checkpoint, piece by piece.

  Args:
    leaves: Path -> array, scalar or bytes.

  Yields:
    Pieces of the file.

  Raises:
    TypeError: If a leaf is something else.
  """
  described, contents = [], []
  for path, value in leaves.items():
    kind = 'bytes' if isinstance(value, bytes) else 'array'
    if kind == 'bytes':
      array = np.frombuffer(value, np.uint8)
    else:
      # Not ascontiguousarray, which makes scalars vectors.
      array = np.asarray(value, order='C')
    if array.dtype.kind not in 'biufc' and array.dtype.name != 'bfloat16':
      raise TypeError(f'{path}: a checkpoint cannot hold {array.dtype}')
    if array.dtype.byteorder == '>':
      array = array.astype(array.dtype.newbyteorder('<'))
    described.append(
      {
        'path': path,
        'kind': kind,
        'dtype': array.dtype.name,
        'shape': list(array.shape),
      }
    )
    contents.append(array)
  header = json.dumps({'leaves': described}).encode()
  digest = hashlib.sha256()
  for piece in (_MAGIC, len(header).to_bytes(8, 'little'), header):
    digest.update(piece)
    yield piece
  for array in contents:
    if array.size:
      piece = array.reshape(-1).view(np.uint8).data
      digest.update(piece)
      yield piece
  yield digest.digest()


def read(path: str) -> dict[str, Any]:
  """The leaves of a checkpoint.

  Args:
    path: The file.

  Returns:
    Path -> NumPy array (of shape [] for scalars) or bytes.

  Raises:
    CheckpointError: If the file is missing, truncated, damaged, or not a
      checkpoint; says which.
  """
  try:
    with open(path, 'rb') as file:
      content = file.read()
  except OSError as error:
    raise CheckpointError(f'it cannot be read ({error.strerror})') from error
  start = len(_MAGIC) + 8
  if content[: len(_MAGIC)] != _MAGIC[: len(content)]:
    raise CheckpointError('it is not a checkpoint of this program')
  if len(content) < start + _DIGEST_SIZE:
    raise CheckpointError('it is truncated')
  body = memoryview(content)[:-_DIGEST_SIZE]
  if hashlib.sha256(body).digest() != content[-_DIGEST_SIZE:]:
    raise CheckpointError('it is truncated or damaged (checksum)')
  offset = start + int.from_bytes(content[len(_MAGIC) : start], 'little')
  leaves = {}
  for leaf in json.loads(bytes(body[start:offset]))['leaves']:
    dtype = _dtype(leaf['dtype'])
    size = math.prod(leaf['shape']) * dtype.itemsize
    # A copy: aligned, writable, and it does not keep the file's bytes alive.
    raw = np.frombuffer(body[offset : offset + size], np.uint8).copy()
    value = raw.view(dtype).reshape(leaf['shape'])
    leaves[leaf['path']] = value.tobytes() if leaf['kind'] == 'bytes' else value
    offset += size
  return leaves


def read_latest(
  folder: str, among: Iterable[int] | None = None
) -> tuple[int, dict[str, Any]]:
  """The latest checkpoint of a folder that is whole.

  Args:
    folder: The folder.
    among: Versions that there are; all by default.

  Returns:
    Its version and leaves.

  Raises:
    CheckpointError: If there is none; says what is wrong with the earliest.
  """
  reason = 'there is none'
  among = versions(folder) if among is None else among
  for version in sorted(among, reverse=True):
    path = path_of(folder, version)
    try:
      return version, read(path)
    except CheckpointError as error:
      reason = f'{path}: {error}'
  raise CheckpointError(reason)


def _dtype(name: str) -> np.dtype:
  if name == 'bfloat16':
    import ml_dtypes  # pylint: disable=import-outside-toplevel

    return np.dtype(ml_dtypes.bfloat16)
  return np.dtype(name)
