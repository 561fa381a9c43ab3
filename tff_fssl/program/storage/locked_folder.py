"""Folders that one program at a time writes to.

The system releases the lock when the process ends, however that ends.
"""

import contextlib
import fcntl
import os
import stat
import time
from typing import Any

from tff_fssl import durable
from tff_fssl import files
from tff_fssl.hparams import UsageError

NAME = '.lock'
_HOLDER = 'process '  # What a lock begins with.


class PathInside:
  """An attribute of a folder: the path of something in it.

  Attributes:
    names: The names of the path's parts.
  """

  def __init__(self, *names: str):
    self.names = names

  def __get__(self, folder: Any, owner: type[Any] | None = None) -> str:
    return os.path.join(folder.path, *self.names)


class LockedFolder:
  """A folder that is locked from `lock` until the end of a `with` block.

  Attributes:
    path: The folder.
  """

  def __init__(self, path: str):
    """Sets the path. Neither makes nor locks anything."""
    self.path = path
    self._lock: int | None = None

  def lock(self) -> None:
    """Locks the folder, which exists.

    Raises:
      UsageError: If another program has locked it, or it cannot be locked.
    """
    path = os.path.join(self.path, NAME)
    is_new = not os.path.lexists(path)
    with contextlib.ExitStack() as exits:
      with durable.storage_errors():
        lock = os.open(
          path,
          # Neither a link nor a named pipe in place of the lock may trick or
          # block the program.
          os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK,
          0o666,
        )
      exits.callback(os.close, lock)
      # Locked before it is written: its text names the holder.
      _lock_file(lock, self.path)
      me = f'{_HOLDER}{os.getpid()} on {os.uname().nodename}'
      text = f'{me}, {time.strftime("since %Y-%m-%d %H:%M:%S")}'.encode()
      try:
        with durable.storage_errors():
          durable.write_all(lock, text, path)
          # The last holder's text may have been longer.
          os.ftruncate(lock, len(text))
      except UsageError:
        if is_new:
          with contextlib.suppress(OSError):
            os.unlink(path)
        raise
      self._lock = lock
      exits.pop_all()

  def close(self) -> None:
    """Lets another program use the folder."""
    if self._lock is not None:
      os.close(self._lock)
      self._lock = None

  def __enter__(self) -> Any:
    return self

  def __exit__(self, *exception: Any) -> None:
    self.close()

  def check_path(self) -> None:
    """Refuses a path that is not a folder (`UsageError`)."""
    try:
      mode = os.stat(self.path).st_mode
    except FileNotFoundError:
      if not os.path.islink(self.path):
        return
      reason = 'it is a broken link'
    except OSError as error:
      reason = files.reason_of(error)
    else:
      if stat.S_ISDIR(mode):
        return
      reason = 'it is not a folder'
    raise UsageError(f'--output_dir={self.path}: {reason}; choose another')


def is_held(folder: str) -> bool:
  """Returns whether a program has locked a folder, as far as is known."""
  try:
    lock = os.open(os.path.join(folder, NAME), os.O_RDONLY | os.O_NONBLOCK)
  except OSError:
    return False
  try:
    # A shared lock succeeds unless another program holds the folder.
    fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
  except OSError:
    return True
  finally:
    os.close(lock)
  return False


def _lock_file(lock: int, folder: str) -> None:
  """Locks an open file, or raises `UsageError` if that is not possible."""
  path = os.path.join(folder, NAME)
  holder = b'not a file'
  if stat.S_ISREG(os.fstat(lock).st_mode):
    holder = os.read(lock, 200)
  text = holder.decode(errors='replace').strip()
  if text and not text.startswith(_HOLDER):
    raise UsageError(
      f'{path}: is not the lock of a run; choose another --output_dir'
    )
  try:
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except OSError as error:
    if not isinstance(error, BlockingIOError):
      raise UsageError(
        f'--output_dir={folder}: the file system cannot lock files'
        f' ({error.strerror}); choose a folder on another one'
      ) from error
    raise UsageError(
      f'--output_dir={folder}: another program ({text or "unknown"}) is'
      ' writing to it; wait for it, end it, or choose another folder'
    ) from error
  if not os.fstat(lock).st_nlink:
    # Another start has just failed, and removed the folder that it had made.
    raise UsageError(
      f'--output_dir={folder}: another program has just released it; give'
      ' the command again'
    )
