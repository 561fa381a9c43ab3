"""Files that survive a kill and a power loss.

A file is written under another name, flushed to the disk and renamed. Then the
rename is flushed. Thus its own name always has either the complete old content
or the complete new content. All system calls that change a disk go through `os`
in this module (write, fsync, replace, ftruncate, unlink), so that tests can
stop at each of them.
"""

from collections.abc import Callable, Iterable, Iterator
import contextlib
import contextvars
import errno
import os
import stat

from tff_fssl.hparams import UsageError

_TEMPORARY = '.writing_'
_OUTPUT_DIR = '--output_dir'
# The flag of the innermost `storage_errors` that names one.
_flag = contextvars.ContextVar('flag', default=_OUTPUT_DIR)
_REASONS = {
  errno.ENOSPC: 'the disk is full; free some space',
  errno.EDQUOT: 'the disk quota is used up; free some space',
  errno.EROFS: 'the file system is read-only; choose another {}',
  errno.EACCES: 'no permission; choose another {}',
  errno.EPERM: 'no permission; choose another {}',
  errno.ENOTDIR: 'a file is in the way; choose another {}',
  errno.ENAMETOOLONG: 'the name is too long; choose another {}',
  errno.EISDIR: 'a folder is in the way; move it away',
  errno.EEXIST: 'a file is in the way; move it away',
  errno.ELOOP: 'a link that leads back to itself is in the way; move it away',
}


@contextlib.contextmanager
def storage_errors(flag: str = '') -> Iterator[None]:
  """Turns disk errors that a user can fix into a `UsageError`.

  Args:
    flag: The flag that names another place, also in the functions of this
      module that are called inside. '': that of the `storage_errors` around
      it, or else --output_dir.

  Yields:
    Once.

  Raises:
    UsageError: In place of an error of the disk.
  """
  flag = flag or _flag.get()
  token = _flag.set(flag)
  try:
    yield
  except OSError as error:
    reason = _REASONS.get(error.errno or 0)
    if reason is None:
      if error.filename is None:
        raise  # The error is not about a file.
      reason = f'{error.strerror}; fix this'
    resumes = ' (a run resumes from its last checkpoint)'
    raise UsageError(
      f'{error.filename or "writing"}: {reason.format(flag)}, then give the'
      f' command again{resumes if flag == _OUTPUT_DIR else ""}'
    ) from error
  finally:
    _flag.reset(token)


def write_file(
  path: str, chunks: Iterable[bytes | memoryview], *, flush: bool = True
) -> None:
  """Writes a file, completely or not at all.

  Args:
    path: The file. Its folder must exist.
    chunks: The content.
    flush: Whether it is also flushed to the disk. Without a flush, which is
      cheap, a power loss may leave an empty file, but a kill may not.

  Raises:
    UsageError: If the disk refuses, or the path is not a file. Then nothing
      has changed.
  """
  path = _target(path)
  folder, name = os.path.split(path)
  temporary = os.path.join(folder, f'{_TEMPORARY}{name}')
  with storage_errors():
    descriptor = _open(
      temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
    )
    try:
      try:
        for chunk in chunks:
          write_all(descriptor, chunk, temporary)
        if flush:
          _fsync(descriptor, temporary)
      finally:
        os.close(descriptor)
      os.replace(temporary, path)
    except Exception:
      with contextlib.suppress(OSError):
        os.unlink(temporary)
      raise
    if flush:
      sync_folder(folder)


def write_all(descriptor: int, data: bytes | memoryview, path: str) -> None:
  """Writes all of `data`, in as many calls as necessary."""
  view = memoryview(data).cast('B') if len(data) else memoryview(b'')
  while view:
    with _named(path):
      view = view[os.write(descriptor, view) :]


def append(path: str, data: bytes) -> None:
  """Appends to a file and flushes it.

  A kill may leave a part of `data`, which callers must recognize.

  Args:
    path: An existing file.
    data: The bytes to append.

  Raises:
    UsageError: If the disk refuses. The file is then cut back.
  """
  with storage_errors():
    descriptor = _open(path, os.O_WRONLY | os.O_APPEND)
    try:
      size = os.fstat(descriptor).st_size
      try:
        write_all(descriptor, data, path)
        _fsync(descriptor, path)
      except OSError:
        # A part could be a whole row, which readers would believe.
        with contextlib.suppress(OSError):
          os.ftruncate(descriptor, size)
        raise
    finally:
      os.close(descriptor)


def remove(path: str) -> None:
  """Removes a file, or raises `UsageError`."""
  with storage_errors():
    os.unlink(path)
    # Without it, a power loss can bring the file back.
    sync_folder(os.path.dirname(os.path.abspath(path)))


def rename(old: str, new: str) -> None:
  """Renames a file or a folder, or raises `UsageError`."""
  with storage_errors():
    os.replace(old, new)
    sync_folder(os.path.dirname(os.path.abspath(new)))


def make_folder(path: str) -> list[str]:
  """Makes a folder and its parents, if they are missing.

  Args:
    path: The folder.

  Returns:
    The absolute paths of the folders that were made, outermost first.

  Raises:
    UsageError: If the disk refuses, or something else is in the way.
  """
  with storage_errors():
    missing, folder = [], os.path.abspath(path)
    while not os.path.lexists(folder):
      missing.append(folder)
      folder = os.path.dirname(folder)
    os.makedirs(path, exist_ok=True)
    # A new folder is an entry in its parent, which a power loss may take back.
    for made in missing:
      sync_folder(os.path.dirname(made))
  return missing[::-1]


def sync_folder(folder: str) -> None:
  """Flushes a folder's entries, without which a rename may be lost."""
  sync_file(folder)


def sync_file(path: str) -> None:
  """Flushes a file that other code wrote."""
  descriptor = _open(path, os.O_RDONLY)
  try:
    _fsync(descriptor, path)
  finally:
    os.close(descriptor)


def remove_leftovers(folder: str, is_ours: Callable[[str], bool]) -> list[str]:
  """Removes temporary files of killed writes from a folder.

  Args:
    folder: The folder. Its subfolders are not searched.
    is_ours: Whether the caller writes files of this name. Other files stay.

  Returns:
    The names of the files that were removed.
  """
  left = []
  for name in sorted(os.listdir(folder)):
    path = os.path.join(folder, name)
    # Somebody else may have put a link or a folder of such a name there.
    if (
      name.startswith(_TEMPORARY)
      and is_ours(name.removeprefix(_TEMPORARY))
      and stat.S_ISREG(os.lstat(path).st_mode)
    ):
      remove(path)
      left.append(name)
  return left


def _target(path: str) -> str:
  """Resolves links to the absolute path to write.

  Raises:
    UsageError: If the path exists and is not a file. A rename would replace it
      by a file, even a device.
  """
  path = os.path.abspath(path)
  with storage_errors():
    if os.path.islink(path):
      path = os.path.realpath(path)
    try:
      mode = os.stat(path).st_mode
    except FileNotFoundError:
      return path
  if not stat.S_ISREG(mode):
    raise UsageError(
      f'{path}: cannot be written, since it exists and is not a file; move it'
      ' away, or give another name'
    )
  return path


def _open(path: str, mode: int) -> int:
  # O_NONBLOCK: a pipe would wait for its other end.
  return os.open(path, mode | os.O_CLOEXEC | os.O_NONBLOCK, 0o666)


def _fsync(descriptor: int, path: str) -> None:
  with _named(path):
    os.fsync(descriptor)


@contextlib.contextmanager
def _named(path: str) -> Iterator[None]:
  """Adds the file's name to errors of calls that know only its number."""
  try:
    yield
  except OSError as error:
    if error.filename is None:
      error.filename = path
    raise
