"""The files of an exported model, and whether they are complete.

`manifest.json` is written last. It names the round and the version, and the
size and SHA-256 of each other file. A folder is complete if all of this holds.
"""

import hashlib
import json
import os
import re
import shutil
from typing import Any

import tff_fssl
from tff_fssl import durable
from tff_fssl import files
from tff_fssl.hparams import UsageError

MANIFEST = 'manifest.json'
KERAS_FILE = 'model.keras'
ABOUT_FILE = 'about.json'
CARD_FILE = 'README.md'
_FORMAT = 1
# The files of an export. Any other file in its folder belongs to somebody else.
_OURS = re.compile(
  r'saved_model\.pb|fingerprint\.pb|keras_metadata\.pb|assets|variables'
  r'|variables/variables\.(index|data-\d{5}-of-\d{5})'
  r'|model\.keras|about\.json|manifest\.json|README\.md'
  # Temporary names under which TensorFlow and `durable` write them.
  r'|variables/variables_temp.*|\.writing_(about\.json|manifest\.json|README\.md)'
)
# Beside the folder: a rename must not leave its file system.
_NEW, _OLD = '.writing_', '.replaced_'


def new_folder(folder: str) -> str:
  """Returns the folder in which the next export of `folder` is written."""
  return _beside(folder, _NEW)


def write_manifest(folder: str, round_num: int) -> None:
  """Describes a folder's files, already flushed, or raises `UsageError`."""
  described = {}
  for name in _names(folder):
    path = os.path.join(folder, name)
    if not os.path.isdir(path):
      size, digest = _measure(path)
      described[name] = {'size': size, 'sha256': digest}
  manifest = {
    'format': _FORMAT,
    'tff_fssl': tff_fssl.__version__,
    'round': round_num,
    'files': described,
  }
  durable.write_file(
    os.path.join(folder, MANIFEST), [json.dumps(manifest, indent=2).encode()]
  )


def problem(folder: str, round_num: int | None = None) -> str:
  """Says why a folder is not a complete exported model, or '' if it is one.

  Args:
    folder: The folder.
    round_num: The round that it must have been exported after. None: any.
  """
  try:
    manifest = files.read_json(os.path.join(folder, MANIFEST))
    if manifest['format'] != _FORMAT:
      return f'its format is {manifest["format"]!r}, not {_FORMAT}'
    described = {
      str(name): (int(about['size']), str(about['sha256']))
      for name, about in manifest['files'].items()
    }
    of_round = int(manifest['round'])
    if KERAS_FILE not in described or ABOUT_FILE not in described:
      return f'{MANIFEST} does not name all files'
    for name, expected in described.items():
      # A hostile manifest could name a file outside of the folder.
      if '..' in name.split('/') or not _OURS.fullmatch(name):
        return f'{MANIFEST} names {name!r}'
      if _measure(os.path.join(folder, name)) != expected:
        return f'{name} is not the file that was written'
  except files.FileError as error:
    return f'{os.path.basename(error.path)}: {error.reason}'
  except (KeyError, TypeError, ValueError, AttributeError):
    return f'{MANIFEST} is damaged'
  if round_num is not None and of_round != round_num:
    return f'it was exported after round {of_round}'
  return ''


def check_replaceable(folder: str) -> None:
  """Refuses a folder with files of no export (`UsageError`)."""
  for path in (folder, _beside(folder, _NEW), _beside(folder, _OLD)):
    if not os.path.lexists(path):
      continue
    odd = ''
    if os.path.islink(path) or not os.path.isdir(path):
      odd = 'it is not a folder'
    else:
      others = [n for n in _names(path) if not _OURS.fullmatch(n)]
      if others:
        odd = f'it holds {others[0]!r}, which no export wrote'
    if odd:
      raise UsageError(
        f'{path}: {odd}, which the exported model would replace; move it away'
      )


def replace(folder: str) -> None:
  """Replaces a folder by its new export, or raises `UsageError`.

  Args:
    folder: The folder. Its `new_folder` is complete and flushed.
  """
  new, old = _beside(folder, _NEW), _beside(folder, _OLD)
  check_replaceable(folder)
  if os.path.exists(folder):
    durable.rename(folder, old)
  durable.rename(new, folder)
  shutil.rmtree(old, ignore_errors=True)


def remove_leftovers(folder: str) -> None:
  """Removes the leftovers of a killed export of `folder`.

  Raises:
    UsageError: If other files are in the way.
  """
  new, old = _beside(folder, _NEW), _beside(folder, _OLD)
  check_replaceable(folder)
  shutil.rmtree(new, ignore_errors=True)
  # Killed between the two renames of `replace`: undo the first one.
  if os.path.exists(old) and not os.path.exists(folder):
    durable.rename(old, folder)
  shutil.rmtree(old, ignore_errors=True)


def read_about(folder: str) -> dict[str, Any]:
  """Reads the record of an exported model, or raises `UsageError`."""
  return files.read_json(os.path.join(folder, ABOUT_FILE), limit=2**24)


def _beside(folder: str, prefix: str) -> str:
  parent, name = os.path.split(os.path.normpath(folder))
  return os.path.join(parent, f'{prefix}{name}')


def _names(folder: str) -> list[str]:
  """Lists relative paths of everything in a folder."""
  return sorted(
    os.path.relpath(os.path.join(path, name), folder)
    for path, folders, names in os.walk(folder)
    for name in [*folders, *names]
  )


def _measure(path: str) -> tuple[int, str]:
  """Measures size and SHA-256 of a file, or raises `FileError`."""
  digest, size = hashlib.sha256(), 0
  with files.open_binary(path) as file:
    try:
      while chunk := file.read(2**20):
        digest.update(chunk)
        size += len(chunk)
    except OSError as error:
      raise files.FileError(path, files.reason_of(error)) from error
  return size, digest.hexdigest()
