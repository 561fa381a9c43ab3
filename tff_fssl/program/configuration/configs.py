"""The files of configs/, which come with the package.

The source tree has them in configs/, an installed package in tff_fssl/configs/.
"""

import os

import tff_fssl

_PREFIX = 'configs'


def _folder() -> str:
  """Returns the folder that holds them."""
  package = os.path.dirname(os.path.abspath(tff_fssl.__file__))
  installed = os.path.join(package, _PREFIX)
  # The wheel carries a copy of configs/ inside the package.
  if os.path.isdir(installed):
    return installed
  return os.path.join(os.path.dirname(package), _PREFIX)


def path_of(name: str) -> str:
  """Returns the path of a file, given its path in configs/."""
  return os.path.join(_folder(), name)


def names() -> list[str]:
  """Lists all flagfiles, sorted, as --flagfile=configs/X.flags takes them."""
  folder = _folder()
  return sorted(
    os.path.join(_PREFIX, os.path.relpath(os.path.join(path, file), folder))
    for path, _, files in os.walk(folder)
    for file in files
    if file.endswith('.flags')
  )


def find(path: str) -> str:
  """Finds the file that the name of a flagfile refers to.

  Args:
    path: The name. A file of the file system comes first.

  Returns:
    `path`, unless only the package has a file of that name (configs/X.flags).
  """
  name = os.path.normpath(path)
  if os.path.lexists(path) or name not in names():
    return path
  return path_of(os.path.relpath(name, _PREFIX))
