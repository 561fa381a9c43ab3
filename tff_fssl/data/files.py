"""Files that are written whole or not at all."""

import os
import tempfile


def write_atomically(path: str | os.PathLike[str], content: bytes) -> None:
  """Writes a file such that a crash leaves all of it or nothing of it.

  Args:
    path: Where to; its folder is made if it is missing.
    content: What the file will hold.
  """
  path = os.path.abspath(path)
  folder = os.path.dirname(path)
  os.makedirs(folder, exist_ok=True)
  handle, temporary = tempfile.mkstemp(dir=folder, prefix='.writing_')
  try:
    with os.fdopen(handle, 'wb') as f:
      f.write(content)
      f.flush()
      os.fsync(f.fileno())
    os.replace(temporary, path)
  except BaseException:
    os.unlink(temporary)
    raise
  handle = os.open(folder, os.O_RDONLY)
  try:
    os.fsync(handle)
  finally:
    os.close(handle)
