"""What a start that failed has left."""

import pathlib


def files_in(folder: pathlib.Path) -> list[str]:
  """The files in a folder, at any depth, but for a run's lock.

  Where there are none, any run may start.
  """
  return [
    str(path.relative_to(folder))
    for path in sorted(folder.rglob('*'))
    if path.is_file() and path.name != '.lock'
  ]
