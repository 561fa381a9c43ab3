"""Simulates kills, torn writes, a full disk and power loss at a system call.

For tests and benchmarks/kill_resume.py. It replaces the functions of `os` by
which `tff_fssl.durable` changes disks.
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

# What can happen at a call. The process is killed before it, or when half of a
# write is done; the disk is full from this call on; or the power fails before
# it: then either only flushed data is on the disk, or all names are as well,
# but without the content that was not flushed.
KILL, TEAR, FULL = 'kill', 'tear', 'full'
POWER, POWER_NAMES = 'power', 'power_names'


class Killed(BaseException):
  """Stands for a kill in tests: no `except Exception` catches it."""


class Call(NamedTuple):
  """A call that changes a disk.

  Attributes:
    name: Name of the call, one of `CALLS`.
    path: The file or folder; the new name of a renamed file.
  """

  name: str
  path: str


class _File:
  """The flushed content of a file."""

  content = b''


def _die() -> NoReturn:
  raise Killed()


class FaultyDisk:
  """Records the calls that change disks, and makes one of them fail.

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
      stop_at: Index of the call that fails, from 0; None: no call fails.
      how: What happens at this call.
      root: The folder that loses data when the power fails.
      die: Ends the process.
      flushes: Whether fsync really flushes, which takes time; a kill does not
        need it, since it loses nothing that was written.
    """
    self.calls: list[Call] = []
    self._stop_at, self._how = stop_at, how
    self._root, self._die, self._flushes = root, die, flushes
    self._is_dead = self._is_full = False
    # What is certainly on the disk: folder -> name -> file; and the files that
    # exist now, by their numbers.
    self._entries: dict[str, dict[str, _File]] = {}
    self._files: dict[int, _File] = {}

  @contextlib.contextmanager
  def installed(self) -> Iterator[FaultyDisk]:
    """Puts this object between the process and its disk."""
    self.start()
    with contextlib.ExitStack() as exits:
      for name in CALLS:
        call = functools.partial(self._call, name)
        exits.enter_context(mock.patch.object(os, name, call))
      yield self

  def start(self, stop_at: int | None = None) -> None:
    """Counts calls from here on; everything written so far counts as flushed.

    Args:
      stop_at: As in the constructor; None leaves it unchanged.
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
      # The file is gone, and its number may be given to another file.
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
    """Reduces the files below the root to what is certainly on the disk."""
    for folder in [folder for folder, _, _ in os.walk(self._root)]:
      present = self._present(folder)
      kept = self._entries.get(folder, {}) if self._how == POWER else present
      for name in present:
        _REAL['unlink'](os.path.join(folder, name))
      for name, file in kept.items():
        with open(os.path.join(folder, name), 'wb') as new:
          new.write(file.content)
