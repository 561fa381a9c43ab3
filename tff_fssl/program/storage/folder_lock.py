"""A lock on a folder, for one program at a time. TensorFlow-free.

The system releases it when the process ends, however that ends.
"""

import contextlib
import fcntl
import os
import stat
import time

from tff_fssl import durable
from tff_fssl.hparams import UsageError

NAME = '.lock'
_HOLDER = 'process '  # What a lock begins with.


def acquire(folder: str) -> int:
  """Locks a folder.

  Args:
    folder: An existing folder.

  Returns:
    The descriptor of the open lock; closing it releases the folder.

  Raises:
    UsageError: If another program has locked it, or it cannot be locked.
  """
  path = os.path.join(folder, NAME)
  is_new = not os.path.lexists(path)
  with durable.storage_errors():
    lock = os.open(
      path,
      os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK,
      0o666,
    )
  try:
    _lock_file(lock, folder)
  except BaseException:
    os.close(lock)
    raise
  me = f'{_HOLDER}{os.getpid()} on {os.uname().nodename}'
  text = f'{me}, {time.strftime("since %Y-%m-%d %H:%M:%S")}'.encode()
  try:
    with durable.storage_errors():
      durable.write_all(lock, text, path)
      os.ftruncate(lock, len(text))
  except BaseException as error:
    if is_new and isinstance(error, UsageError):
      with contextlib.suppress(OSError):
        os.unlink(path)
    os.close(lock)
    raise
  return lock


def is_held(folder: str) -> bool:
  """Whether a program has locked a folder, as far as can be told."""
  try:
    lock = os.open(os.path.join(folder, NAME), os.O_RDONLY | os.O_NONBLOCK)
  except OSError:
    return False
  try:
    fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
  except OSError:
    return True
  finally:
    os.close(lock)
  return False


def _lock_file(lock: int, folder: str) -> None:
  """Locks an open file; raises `UsageError` if it is not ours to lock."""
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
  try:
    is_current = os.path.samestat(os.fstat(lock), os.lstat(path))
  except FileNotFoundError:
    is_current = False
  if not is_current:
    # Another start has just failed, and removed the folder that it had made.
    raise UsageError(
      f'--output_dir={folder}: another program has just released it; give'
      ' the command again'
    )
