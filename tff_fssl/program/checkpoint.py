"""Checkpoints: NPZ files that know their owner.

    header.json  {"tff_fssl": version that wrote it,
                  "name": name of the file, such as "round_4.ckpt",
                  "owner": {"flags": {name: text}, "model": {kind: [weight]}},
                  "kinds": {path: "bytes" or "bfloat16"}}
    PATH.npy     a leaf; `kinds` names those that NumPy's format cannot hold

The CRC-32 of each part tells whether it is whole. One file holds the whole
state, so that a single rename makes it current. The file's name says of which
round it is, so a file under another name is refused.

Rows that a server keeps of each client are in files of their own, of the same
format. A row, once written, is never changed: a client's row of another round
is in another file. So every checkpoint that is kept finds the rows of its
round, and a run that is killed and resumed has the rows that it had then.
"""

import collections
from collections.abc import Iterable, Iterator, Mapping, Sequence
import contextlib
import dataclasses
import errno
import io
import json
import math
import os
import re
from typing import Any
import zipfile

import numpy as np

import tff_fssl
from tff_fssl import durable
from tff_fssl import files
from tff_fssl import hparams
from tff_fssl.hparams import UsageError
from tff_fssl.program import config as config_lib

_HEADER = 'header.json'
# What files of tff_fssl 0.5.0 and older begin with.
_OLDER = b'tff_fssl checkpoint '
_BYTES, _BFLOAT16 = 'bytes', 'bfloat16'
_NAME = re.compile(r'round_(0|-?[1-9]\d{0,17})\.ckpt', re.ASCII)
_ROW_NAME = re.compile(
  r'client_(0|[1-9]\d{0,8})_round_([1-9]\d{0,8})\.row', re.ASCII
)

TRAINABLE, NON_TRAINABLE = 'trainable', 'non_trainable'
# An error names so many differences, and counts the others.
_NUM_SHOWN = 3

# Kind -> a line for each weight: its name, dtype and shape.
Model = dict[str, list[str]]


# Added to the name of a damaged checkpoint that was set aside.
DAMAGED = '.damaged'


class CheckpointError(Exception):
  """A file that cannot be used as the checkpoint that its name promises."""


class DamagedError(CheckpointError):
  """A checkpoint with a missing or changed part."""


class ForeignError(CheckpointError):
  """A file that is no checkpoint, or that of another run or model."""


@dataclasses.dataclass(frozen=True)
class Owner:
  """A run and its model.

  Attributes:
    flags: The run's flags that must not differ, as text, or None if there is no
      run.
    model: The model's weights, or None if not known.
  """

  flags: dict[str, str] | None = None
  model: Model | None = None

  def difference(self, other: 'Owner') -> str:
    """Describes how another owner differs, or '' if it does not.

    Args:
      other: The owner of a file. A value that this owner states and `other` not
        counts as a difference.
    """
    if self.flags is not None:
      if other.flags is None:
        return 'it does not say which run it belongs to'
      names, _ = config_lib.differences(other.flags, self.flags)
      if names:
        return 'it belongs to another run (' + (
          '; '.join(
            f'--{name}={_shown(other.flags, name)} there,'
            f' {_shown(self.flags, name)} here'
            for name in names[:_NUM_SHOWN]
          )
          + _more(len(names))
          + ')'
        )
    if self.model is not None:
      wrong = model_differences(other.model or {}, self.model)
      if wrong:
        return f'it belongs to another model ({wrong})'
    return ''

  def encode(self) -> dict[str, Any]:
    """Returns values for JSON, which `decode` reads."""
    return dataclasses.asdict(self)

  @classmethod
  def decode(cls, value: Mapping[str, Any]) -> 'Owner':
    """Reads values of `encode`, or raises KeyError, TypeError or ValueError."""
    given, model = value['flags'], value['model']
    if given is not None:
      if not isinstance(given, dict):
        raise TypeError('flags must be an object')
      given = {str(name): str(text) for name, text in given.items()}
    if model is not None:
      model = {
        kind: [str(weight) for weight in model[kind]]
        for kind in (TRAINABLE, NON_TRAINABLE)
      }
    return cls(given, model)


NOBODY = Owner()


@dataclasses.dataclass(frozen=True)
class Header:
  """The header of a checkpoint.

  Attributes:
    version: Version of the tff_fssl that wrote it.
    owner: The run and the model that it belongs to.
    kinds: Path -> kind of each leaf that is not an array of its own dtype.
  """

  version: str
  owner: Owner
  kinds: dict[str, str]


def path_of(folder: str, version: int) -> str:
  """Returns the file of a version, the number of the last finished round."""
  return os.path.join(folder, f'round_{version}.ckpt')


def is_name(name: str) -> bool:
  """Returns whether a file of this name is a checkpoint."""
  return _NAME.fullmatch(name) is not None


def versions(folder: str, *, set_aside: bool = False) -> list[int]:
  """Lists the versions in a folder, ascending, complete or not.

  Args:
    folder: The folder.
    set_aside: Whether damaged ones that were set aside count, too.

  Returns:
    The versions.

  Raises:
    UsageError: If the folder cannot be read.
  """
  try:
    names = os.listdir(folder)
  except (FileNotFoundError, NotADirectoryError):
    return []
  except OSError as error:
    raise files.FileError(folder, files.reason_of(error)) from error
  if set_aside:
    names = [name.removesuffix(DAMAGED) for name in names]
  matches = (_NAME.fullmatch(name) for name in names)
  return sorted({int(match[1]) for match in matches if match})


def write(
  path: str,
  leaves: Mapping[str, Any],
  owner: Owner = NOBODY,
) -> None:
  """Writes a checkpoint, completely or not at all.

  Args:
    path: The file.
    leaves: Path -> array, scalar or bytes.
    owner: The run and the model that it belongs to.

  Raises:
    TypeError: If a leaf is something else.
    UsageError: If the disk refuses.
  """
  durable.write_file(path, encode(leaves, owner, os.path.basename(path)))


def encode(
  leaves: Mapping[str, Any],
  owner: Owner = NOBODY,
  name: str = '',
) -> Iterator[bytes | memoryview]:
  """Yields the content of a checkpoint, piece by piece.

  Args:
    leaves: Path -> array, scalar or bytes.
    owner: The run and the model that it belongs to.
    name: The name of its file. '': any, as in older versions.

  Yields:
    Pieces of the file, at most one leaf at a time.

  Raises:
    TypeError: If a leaf is something else.
  """
  arrays, kinds = {}, {}
  for path, value in leaves.items():
    if isinstance(value, bytes):
      # NumPy would drop zero bytes at the end of a byte string.
      kinds[path], value = _BYTES, np.frombuffer(value, np.uint8)
    array = np.asarray(value)
    if array.dtype.name == _BFLOAT16:
      kinds[path], array = _BFLOAT16, array.view(np.uint16)
    if array.dtype.kind not in 'biufc':
      raise TypeError(f'{path}: a checkpoint cannot hold {array.dtype}')
    arrays[path] = array
  header = {
    'tff_fssl': tff_fssl.__version__,
    'name': name,
    'owner': owner.encode(),
    'kinds': kinds,
  }
  pieces = _Pieces()
  with zipfile.ZipFile(pieces, 'w') as archive:  # type: ignore[call-overload]
    # A ZipInfo has no time: equal states give equal files.
    archive.writestr(zipfile.ZipInfo(_HEADER), json.dumps(header))
    for path, array in arrays.items():
      part = zipfile.ZipInfo(f'{path}.npy')
      with archive.open(part, 'w', force_zip64=True) as file:
        np.lib.format.write_array(file, array, allow_pickle=False)
      yield from pieces.take()
  yield from pieces.take()


class _Pieces:
  """A file for writing whose content is taken piece by piece."""

  def __init__(self) -> None:
    self._pieces: list[bytes] = []

  def write(self, data: Any) -> int:
    self._pieces.append(bytes(data))
    return len(data)

  def flush(self) -> None:
    """Does nothing: `zipfile` needs it."""

  def take(self) -> list[bytes]:
    pieces, self._pieces = self._pieces, []
    return pieces


def read_header(path: str) -> Header:
  """Reads only the header of a checkpoint.

  Args:
    path: The file.

  Returns:
    Its header.

  Raises:
    DamagedError: If it is cut off or changed.
    ForeignError: If it is no checkpoint of this format, was renamed, or cannot
      be read.
  """
  with _reading(path) as (_, header):
    return header


def read(path: str) -> dict[str, Any]:
  """Reads the leaves of a checkpoint.

  Args:
    path: The file.

  Returns:
    Path -> NumPy array (of shape [] for scalars) or bytes.

  Raises:
    DamagedError: If it is cut off or changed.
    ForeignError: If it is no checkpoint of this format, was renamed, or cannot
      be read.
  """
  leaves: dict[str, Any] = {}
  with _reading(path) as (archive, header):
    for name in archive.namelist():
      if name == _HEADER:
        continue
      value = _array(archive.read(name))
      leaf = name.removesuffix('.npy')
      kind = header.kinds.get(leaf)
      if kind == _BFLOAT16:
        # NumPy knows it only after this import.
        import ml_dtypes  # pylint: disable=import-outside-toplevel

        value = value.view(ml_dtypes.bfloat16)
      leaves[leaf] = value.tobytes() if kind == _BYTES else value
  return leaves


def _array(content: bytes) -> np.ndarray:
  """Reads an NPY file, which may state a size that it does not have."""
  file = io.BytesIO(content)
  if np.lib.format.read_magic(file) != (1, 0):
    raise ValueError('not of NPY version 1.0')
  shape, _, dtype = np.lib.format.read_array_header_1_0(file)
  # NumPy takes memory for all of it before it reads.
  if math.prod(shape) * dtype.itemsize > len(content):
    raise ValueError('an array is larger than its file')
  file.seek(0)
  return np.lib.format.read_array(file, allow_pickle=False)


@contextlib.contextmanager
def _reading(path: str) -> Iterator[tuple[zipfile.ZipFile, Header]]:
  """Opens a checkpoint, and turns all errors into `CheckpointError`."""
  try:
    file = files.open_binary(path)
  except files.FileError as error:
    raise ForeignError(error.reason) from error
  with file:
    try:
      if file.read(len(_OLDER)) == _OLDER:
        raise ForeignError(
          'it has the former format, of tff_fssl 0.5.0 and older; continue the'
          ' run with that version, or begin again with --restart'
        )
      with zipfile.ZipFile(file) as archive:
        # Parts that are not compressed are no larger than the file.
        if any(part.compress_type for part in archive.infolist()):
          raise ValueError('compressed')
        fields = json.loads(archive.read(_HEADER))
        owner = Owner.decode(fields['owner'])
        name, written_as = os.path.basename(path), str(fields['name'])
        # A renamed file would pass off one round as another.
        if written_as not in ('', name):
          raise ForeignError(
            f'it was written as {written_as!r}, and renamed; give it that name'
            ' again'
          )
        yield archive, Header(str(fields['tff_fssl']), owner, fields['kinds'])
    except (CheckpointError, MemoryError):
      raise
    # NumPy, `zipfile` and decoders raise errors of many classes.
    except Exception as error:  # pylint: disable=broad-except
      if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
        raise ForeignError(files.reason_of(error)) from error
      raise DamagedError(
        f'it is truncated or damaged ({files.first_line(error)})'
      ) from error


def read_own(path: str, owner: Owner) -> dict[str, Any]:
  """Reads the leaves of a checkpoint, if it belongs to this owner.

  Args:
    path: The file.
    owner: The owner that it must belong to.

  Returns:
    The leaves, as `read` returns them.

  Raises:
    DamagedError: If it is cut off or changed.
    ForeignError: If it belongs to another run or model, and says how they
      differ.
  """
  check_owner(path, owner)
  return read(path)


def check_owner(path: str, owner: Owner) -> None:
  """Raises `ForeignError` if a checkpoint belongs to another owner."""
  difference = owner.difference(read_header(path).owner)
  if difference:
    raise ForeignError(difference)


def read_latest(
  folder: str,
  owner: Owner = NOBODY,
  among: Iterable[int] | None = None,
) -> tuple[int, dict[str, Any]]:
  """Reads the latest complete checkpoint in a folder.

  Args:
    folder: The folder.
    owner: The owner that it must belong to.
    among: Versions to choose from, by default all.

  Returns:
    Its version and leaves.

  Raises:
    CheckpointError: If there is none (with the damage of the earliest), or if a
      later one is not damaged but belongs to another owner.
  """
  reason = 'there is none'
  among = versions(folder) if among is None else among
  for version in sorted(among, reverse=True):
    path = path_of(folder, version)
    try:
      return version, read_own(path, owner)
    except DamagedError as error:
      reason = f'{path}: {error}'
    except ForeignError as error:
      raise ForeignError(f'{path}: {error}') from error
  raise CheckpointError(reason)


def flags_owner(given: Mapping[str, str]) -> Owner:
  """Returns the run with these flags, without those that may differ."""
  may_differ = config_lib.changeable_flags()
  return Owner({n: v for n, v in given.items() if n not in may_differ})


def run_owner(config: config_lib.Config) -> Owner:
  """Returns the run with this configuration."""
  return flags_owner(
    {n: hparams.format_value(v) for n, v in config.flags().items()}
  )


def model_owner(owner: Owner, model: Any) -> Owner:
  """Adds a Keras model's weights to an owner."""
  return dataclasses.replace(owner, model=describe_model(model))


def describe_model(model: Any) -> Model:
  """Describes the weights of a Keras model."""
  return {
    kind: [
      describe_weight(variable.path, variable.dtype, variable.shape)
      for variable in getattr(model, f'{kind}_weights')
    ]
    for kind in (TRAINABLE, NON_TRAINABLE)
  }


def describe_weight(name: str, dtype: Any, shape: Sequence[int]) -> str:
  """Describes a weight: 'conv1/kernel float32 [3, 3, 1, 32]'."""
  return f'{name} {np.dtype(dtype).name} {[int(n) for n in shape]}'


def model_differences(
  there: Mapping[str, Sequence[str]], here: Mapping[str, Sequence[str]]
) -> str:
  """Describes how the weights of two models differ, or '' if they do not."""
  wrong = []
  for kind in (TRAINABLE, NON_TRAINABLE):
    a, b = there.get(kind, []), here.get(kind, [])
    if len(a) != len(b):
      wrong.append(f'{len(a)} {kind}_variables there, {len(b)} here')
    else:
      wrong += [f'{x} there, {y} here' for x, y in zip(a, b) if x != y]
  if not wrong:
    return ''
  return '; '.join(wrong[:_NUM_SHOWN]) + _more(len(wrong))


def _more(count: int) -> str:
  return f'; and {count - _NUM_SHOWN} more' if count > _NUM_SHOWN else ''


def _shown(given: Mapping[str, str], name: str) -> str:
  return given.get(name, '(its default)')


def is_row_name(name: str) -> bool:
  """Returns whether a file of this name is a row."""
  return _ROW_NAME.fullmatch(name) is not None


class RowFiles:
  """The rows of a run."""

  def __init__(self, folder: str, owner: Owner = NOBODY):
    """Sets the folder, which is made when the first row is written.

    Args:
      folder: The folder.
      owner: The run and the model that the rows belong to.
    """
    self._folder, self._owner = folder, owner

  def write(
    self, client_id: int, round_num: int, row: Mapping[str, np.ndarray]
  ) -> None:
    """Writes the row that a client sent in a round, or raises `UsageError`."""
    durable.make_folder(self._folder)
    write(self._path(client_id, round_num), row, self._owner)

  def read(self, client_id: int, round_num: int) -> dict[str, np.ndarray]:
    """Reads the row that a client sent in a round.

    Args:
      client_id: The client.
      round_num: The round.

    Returns:
      Name -> array.

    Raises:
      UsageError: If the file is missing, damaged, renamed or another run's.
    """
    path = self._path(client_id, round_num)
    try:
      return read_own(path, self._owner)
    except CheckpointError as error:
      raise UsageError(
        f'{path}: {error}. The checkpoint of this run needs the row of client'
        f' {client_id} from round {round_num}; restore the file, or start again'
        ' with another --output_dir'
      ) from error

  def drop_after(self, round_num: int) -> None:
    """Removes the rows of rounds that are repeated."""
    # They are of rounds that are about to be repeated.
    for _, of_round, path in self._all():
      if of_round > round_num:
        durable.remove(path)
    # The folder appears with the first row.
    if os.path.isdir(self._folder):
      durable.remove_leftovers(self._folder, is_row_name)

  def retain_versions(self, versions: Iterable[int]) -> None:
    """Removes the rows that no kept checkpoint needs.

    Args:
      versions: The rounds of the checkpoints that are kept. Each needs the last
        row of each client up to its round. Rows of later rounds are kept.
    """
    versions = sorted(versions)
    of_client: dict[int, list[int]] = {}
    for client_id, round_num, _ in self._all():
      of_client.setdefault(client_id, []).append(round_num)
    for client_id, rounds in of_client.items():
      # Each checkpoint may be the one that a later start resumes from.
      needed = {
        max((r for r in rounds if r <= version), default=0)
        for version in versions
      }
      for round_num in rounds:
        if round_num not in needed and round_num <= max(versions, default=0):
          durable.remove(self._path(client_id, round_num))

  def _path(self, client_id: int, round_num: int) -> str:
    return os.path.join(
      self._folder, f'client_{client_id}_round_{round_num}.row'
    )

  def _all(self) -> list[tuple[int, int, str]]:
    """Lists (client, round, path) of each row, in order."""
    try:
      names = os.listdir(self._folder)
    except FileNotFoundError:
      return []
    except OSError as error:
      raise files.FileError(self._folder, files.reason_of(error)) from error
    matches = (_ROW_NAME.fullmatch(name) for name in names)
    return sorted(
      (int(m[1]), int(m[2]), os.path.join(self._folder, m[0]))
      for m in matches
      if m
    )


class OutsideRows:
  """Rows that a process keeps outside of its state."""

  def __init__(self, outside: Any, rows: RowFiles):
    """Puts a process and its files together.

    Args:
      outside: `FsslProcess.outside`, not None.
      rows: The files.
    """
    self._outside, self._rows = outside, rows

  def load(self, state: Any, client_ids: Sequence[int]) -> Any:
    """Loads the rows that a round needs into the state before it.

    Args:
      state: The process's state, of NumPy arrays.
      client_ids: The clients of the round.

    Returns:
      The state.

    Raises:
      UsageError: If a row cannot be read.
    """
    held = state.distributor
    table = self._outside.bring(
      held['table'], client_ids, int(held['round_num']), self._rows.read
    )
    return _replace_table(state, table)

  def store(self, state: Any) -> Any:
    """Stores the rows of the state after a round in files."""
    table = state.distributor['table']
    return _replace_table(state, self._outside.take(table, self._rows.write))

  def retain_versions(self, versions: Iterable[int]) -> None:
    """Removes the rows that no kept checkpoint needs, as `RowFiles` does."""
    self._rows.retain_versions(versions)


def _replace_table(state: Any, table: Any) -> Any:
  held = collections.OrderedDict(state.distributor, table=table)
  return state._replace(distributor=held)
