"""A disk that kills, tears, fills up or loses power, at a chosen system call.

For tests and benchmarks/kill_resume.py: stands before the calls of `os` that
`tff_fssl.durable` changes disks with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
import contextlib
import errno
import functools
import os
from typing import Any, NamedTuple, NoReturn
from unittest import mock

CALLS = ('write', 'fsync', 'replace', 'ftruncate', 'unlink')
_REAL = {name: getattr(os, name) for name in CALLS}

# What can happen at a call: the process is killed before it; is killed when
# half of a write is done; finds the disk full, then and from then on; or the
# power fails before it, when nothing has reached the disk that was not flushed,
# or all names have, but no content.
KILL, TEAR, FULL = 'kill', 'tear', 'full'
POWER, POWER_NAMES = 'power', 'power_names'


class Killed(BaseException):
  """What is left of a program after a kill: nothing catches it."""


class Call(NamedTuple):
  """A call that changes a disk.

  Attributes:
    name: Of `CALLS`.
    path: The file or folder; of a renamed file, its new name.
  """

  name: str
  path: str


class _File:
  """A file as far as it was flushed."""

  content = b''


def _die() -> NoReturn:
  raise Killed()


class FaultyDisk:
  """Records the calls that change disks, and lets one of them go wrong.

  Attributes:
    calls: The calls so far, since `start` if that was called.
  """

  def __init__(
    self,
    stop_at: int | None = None,
    how: str = KILL,
    *,
    root: str = '',
    die: Callable[[], Any] = _die,
    flushes: bool = False,
  ):
    """Chooses the call.

    Args:
      stop_at: The call at which it happens, counted from 0; None: it does not.
      how: What happens.
      root: The folder that forgets when the power fails.
      die: Ends the process.
      flushes: Whether fsync takes the time that it takes; a kill loses nothing
        that is not flushed.
    """
    self.calls: list[Call] = []
    self._stop_at, self._how = stop_at, how
    self._root, self._die, self._flushes = root, die, flushes
    self._is_dead = self._is_full = False
    # What is on the disk for certain: folder -> name -> file, and the files
    # that are there now by their numbers.
    self._entries: dict[str, dict[str, _File]] = {}
    self._files: dict[int, _File] = {}

  @contextlib.contextmanager
  def installed(self) -> Iterator[FaultyDisk]:
    """Puts it between the process and its disk."""
    self.start()
    with contextlib.ExitStack() as exits:
      for name in CALLS:
        call = functools.partial(self._call, name)
        exits.enter_context(mock.patch.object(os, name, call))
      yield self

  def start(self, stop_at: int | None = None) -> None:
    """Counts from here on; all that is on the disk counts as flushed.

    Args:
      stop_at: As the constructor's; None leaves it.
    """
    self.calls.clear()
    if stop_at is not None:
      self._stop_at = stop_at
    if self._how in (POWER, POWER_NAMES):
      for folder, _, names in os.walk(self._root):
        for name in names:
          self._flush_file(os.path.join(folder, name))
        self._flush_folder(folder)

  def _call(self, name: str, *args: Any, **kwargs: Any) -> Any:
    if self._is_dead:
      self._die()
    on_descriptor = name in ('write', 'fsync', 'ftruncate')
    target = args[1] if name == 'replace' else args[0]
    path = os.readlink(f'/proc/self/fd/{target}') if on_descriptor else target
    self.calls.append(Call(name, path))
    if len(self.calls) - 1 == self._stop_at:
      self._fail(name, *args)
    if self._is_full and name == 'write':
      raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if name == 'fsync':
      if self._how in (POWER, POWER_NAMES):
        flush = self._flush_folder if os.path.isdir(path) else self._flush_file
        flush(path)
      return _REAL['fsync'](*args) if self._flushes else None
    if not on_descriptor and os.path.exists(path):
      # The file ends, and its number may go to another.
      self._files.pop(os.stat(path).st_ino, None)
    return _REAL[name](*args, **kwargs)

  def _fail(self, name: str, *args: Any) -> None:
    if self._how == FULL:
      self._is_full = True
      raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    self._is_dead = True
    if self._how == TEAR and name == 'write':
      _REAL['write'](args[0], args[1][: len(args[1]) // 2])
    if self._how in (POWER, POWER_NAMES):
      self._lose_power()
    self._die()

  def _file(self, path: str) -> _File:
    return self._files.setdefault(os.stat(path).st_ino, _File())

  def _flush_file(self, path: str) -> None:
    with open(path, 'rb') as file:
      self._file(path).content = file.read()

  def _flush_folder(self, folder: str) -> None:
    self._entries[folder] = self._present(folder)

  def _present(self, folder: str) -> dict[str, _File]:
    paths = {name: os.path.join(folder, name) for name in os.listdir(folder)}
    return {n: self._file(p) for n, p in paths.items() if os.path.isfile(p)}

  def _lose_power(self) -> None:
    """Makes the files below the root what is on the disk for certain."""
    for folder in [folder for folder, _, _ in os.walk(self._root)]:
      present = self._present(folder)
      kept = self._entries.get(folder, {}) if self._how == POWER else present
      for name in present:
        _REAL['unlink'](os.path.join(folder, name))
      for name, file in kept.items():
        with open(os.path.join(folder, name), 'wb') as new:
          new.write(file.content)
