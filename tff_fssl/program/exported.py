"""The files of an exported model, and whether they are complete.

`manifest.json` is written last. It names the round and the version, and the
size and SHA-256 of each other file. A folder is complete if all of this holds.
"""

import hashlib
import json
import math
import os
import shutil
from typing import Any

import tff_fssl
from tff_fssl import durable
from tff_fssl import files
from tff_fssl.hparams import UsageError

MANIFEST = 'manifest.json'
KERAS_FILE = 'model.keras'
TFLITE_FILE = 'model.tflite'
ABOUT_FILE = 'about.json'
CARD_FILE = 'README.md'
_FORMAT = 1
# Larger sizes of an example, and more numbers, would fill the memory.
_MOST_SIZE, _MOST_NUMBERS = 10**6, 2**28
# The numbers of float32 by which something can be divided, and medians.
_MOST_FLOAT, _LEAST_STD, _MOST_CENTER = 3.4e38, 1e-30, 1e300
# Beside the folder: a rename must not leave its file system.
_NEW, _OLD = '.writing_', '.replaced_'


def new_folder(folder: str) -> str:
  """Returns the folder in which the next export of `folder` is written."""
  return _beside(folder, _NEW)


def write_manifest(folder: str, round_num: int) -> None:
  """Describes a folder's files, already flushed, or raises `UsageError`."""
  manifest = {
    'format': _FORMAT,
    'tff_fssl': tff_fssl.__version__,
    'round': round_num,
    'files': {n: _measure(os.path.join(folder, n)) for n in _names(folder)},
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
    described = manifest['files']
    if manifest['format'] != _FORMAT or not {KERAS_FILE, ABOUT_FILE} <= {
      *described
    }:
      return f'{MANIFEST} is of another version'
    for name, about in described.items():
      # A downloaded manifest could name a file outside of the folder.
      if os.path.isabs(name) or '..' in name.split('/'):
        return f'{MANIFEST} names {name!r}'
      if _measure(os.path.join(folder, name)) != about:
        return f'{name} is not the file that was written'
    if round_num not in (None, manifest['round']):
      return f'it was exported after round {manifest["round"]}'
  except files.FileError as error:
    return f'{os.path.basename(error.path)}: {error.reason}'
  except (AttributeError, KeyError, TypeError):
    return f'{MANIFEST} is damaged'
  return ''


def check_replaceable(folder: str) -> None:
  """Refuses a folder with files that its export did not write (`UsageError`).

  They would be removed with the old model.
  """
  path = os.path.join(folder, MANIFEST)
  if os.path.lexists(path):
    ours = {MANIFEST, *files.read_json(path).get('files', ())}
    others = [name for name in _names(folder) if name not in ours]
    if others:
      raise UsageError(
        f'{folder}: it holds {others[0]!r}, which no export wrote, and which'
        ' the exported model would replace; move it away'
      )


def replace(folder: str) -> None:
  """Replaces a folder by its new export, or raises `UsageError`.

  Args:
    folder: The folder. Its `new_folder` is complete and flushed.
  """
  new, old = _beside(folder, _NEW), _beside(folder, _OLD)
  if os.path.exists(folder):
    durable.rename(folder, old)
  durable.rename(new, folder)
  shutil.rmtree(old, ignore_errors=True)


def remove_leftovers(folder: str) -> None:
  """Removes the leftovers of a killed export of `folder`."""
  new, old = _beside(folder, _NEW), _beside(folder, _OLD)
  shutil.rmtree(new, ignore_errors=True)
  # Killed between the two renames of `replace`: undo the first one.
  if os.path.exists(old) and not os.path.exists(folder):
    durable.rename(old, folder)
  shutil.rmtree(old, ignore_errors=True)


def read_about(folder: str) -> dict[str, Any]:
  """Reads the record of an exported model, or raises `UsageError`."""
  return files.read_json(os.path.join(folder, ABOUT_FILE), limit=2**24)


def read_checked_about(folder: str) -> dict[str, Any]:
  """Reads the record of a model that may be a stranger's.

  Args:
    folder: The folder of the model.

  Returns:
    The record, of which predictions need `classes`, `example_shape`,
    `inputs_of_model.keras`, `prepared` and `flags`. Other keys are not checked.

  Raises:
    UsageError: If one of these is missing, or not what an export writes.
  """
  about = read_about(folder)
  about.setdefault('prepared', {})
  try:
    _check_about(about)
  except (KeyError, TypeError, ValueError) as error:
    reason = f'{error} is missing' if isinstance(error, KeyError) else error
    raise files.FileError(os.path.join(folder, ABOUT_FILE), str(reason)) from (
      error
    )
  return about


def _check_about(about: dict[str, Any]) -> None:
  """Raises an error for a record that no export writes."""
  classes, shape = about['classes'], about['example_shape']
  inputs, prepared = about['inputs_of_model.keras'], about['prepared']
  _need(
    'classes', _are((str,), classes) and len({*classes}) == len(classes) >= 2
  )
  _need(
    'example_shape',
    _are((int,), shape)
    and 1 <= len(shape) <= 3
    and all(0 < size <= _MOST_SIZE for size in shape)
    and math.prod(shape) <= _MOST_NUMBERS,
  )
  _need('inputs_of_model.keras', isinstance(inputs, dict))
  _need('inputs_of_model.keras', ('mean' in inputs) == ('std' in inputs))
  for name in {'mean', 'std'} & {*inputs}:
    values = inputs[name]
    least = _LEAST_STD if name == 'std' else -_MOST_FLOAT
    _need(
      name,
      _are((int, float), values)
      and len(values) == shape[-1]
      and all(least <= value <= _MOST_FLOAT for value in values),
    )
  _need('prepared', isinstance(prepared, dict))
  depth, columns = prepared.get('bit_depth', 16), prepared.get('columns', [])
  _need('bit_depth', type(depth) is int and 8 <= depth <= 16)
  _need('columns', _are((list,), columns) and all(map(_is_column, columns)))
  sizes = [(len(values) or 1) + gaps for _, _, _, gaps, values in columns]
  _need('columns', not columns or sum(sizes) == shape[-1])
  flags = about['flags']
  _need('flags', isinstance(flags, dict))
  _need('flags', _are((str, int, float, bool), [*flags.values()]))
  _need('flags', isinstance(flags.get('dataset'), str))


def _is_column(values: list[Any]) -> bool:
  """Tells whether JSON values are those of a `columns.Column`."""
  kinds = (str,), (str,), (int, float), (bool,), (list,)
  return (
    len(values) == len(kinds)
    and all(type(value) in kind for value, kind in zip(values, kinds))
    and values[1] in ('number', 'date', 'category')
    and (values[1] == 'category') == bool(values[4])
    and abs(values[2]) < _MOST_CENTER
    and _are((str,), values[4])
  )


def _need(name: str, is_right: bool) -> None:
  if not is_right:
    raise ValueError(f'its {name} is not what an export writes')


def _are(kinds: tuple[type, ...], values: Any) -> bool:
  """Tells whether JSON's value is a list of values of some types."""
  return isinstance(values, list) and all(type(v) in kinds for v in values)


def _beside(folder: str, prefix: str) -> str:
  parent, name = os.path.split(os.path.normpath(folder))
  return os.path.join(parent, f'{prefix}{name}')


def _names(folder: str) -> list[str]:
  """Lists the relative paths of all files in a folder."""
  return sorted(
    os.path.relpath(os.path.join(parent, name), folder)
    for parent, _, names in os.walk(folder)
    for name in names
  )


def _measure(path: str) -> dict[str, Any]:
  """Measures size and SHA-256 of a file, or raises `FileError`."""
  try:
    with files.open_binary(path) as file:
      stream: Any = file
      digest = hashlib.file_digest(stream, 'sha256').hexdigest()
    return {'size': os.path.getsize(path), 'sha256': digest}
  except OSError as error:
    raise files.FileError(path, files.reason_of(error)) from error
