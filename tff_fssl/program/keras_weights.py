"""The weights in a Keras file.

Keras reads only numbers here: `load_weights` neither builds the model that a
file describes nor runs code of it (Lambda layers, any class by its name). It
refuses links to other files, and arrays that state more than they hold.
"""

import contextlib
import os
import tempfile
from typing import Any
import warnings

import h5py
import numpy as np

from tff_fssl import files

_ZIP, _HDF5 = b'PK\x03\x04', b'\x89HDF\r\n\x1a\n'


def is_keras_file(path: str) -> bool:
  """Says whether a file begins as `.keras` or `.h5`, or raises `FileError`."""
  with files.open_binary(path) as file:
    start = file.read(len(_HDF5))
  return start == _HDF5 or start.startswith(_ZIP)


def read(
  path: str, model: Any, *, new_head: bool = False
) -> list[np.ndarray | None]:
  """Reads the weights of a model from a Keras file, whatever its name.

  Args:
    path: The file: of `save` or `save_weights`, of Keras 3 or 2.
    model: The Keras model that the weights are for.
    new_head: Whether the file may lack the last layer with weights, or have
      another one (for other classes).

  Returns:
    The weights, in the order of `model.weights`. None stands for weights of a
    last layer that is not in the file.

  Raises:
    FileError: If the file cannot be read, or its weights are not this model's.
  """
  with files.open_binary(path) as file:
    is_zip = file.read(len(_ZIP)) == _ZIP
  try:
    ending = '.keras' if is_zip else _hdf5_ending(path)
    with tempfile.TemporaryDirectory() as folder:
      # Keras tells formats apart by the ending.
      link = os.path.join(folder, f'model{ending}')
      os.symlink(os.path.abspath(path), link)
      own = model.get_weights()
      try:
        return _read(path, link, model, new_head)
      finally:
        model.set_weights(own)
  except files.FileError:
    raise
  except Exception as error:  # pylint: disable=broad-except
    # Bad content makes zipfile and HDF5 raise errors of many types.
    reason = f'it cannot be read as a Keras file ({files.first_line(error)})'
    raise files.FileError(path, reason) from error


def _hdf5_ending(path: str) -> str:
  """Returns the ending by which Keras knows an HDF5 file's layout."""
  with h5py.File(path, 'r') as file:
    of_keras_2 = 'layer_names' in file.attrs or 'model_weights' in file
  return '.h5' if of_keras_2 else '.weights.h5'


def _reason(error: Exception) -> str:
  """Says in one line what Keras could not load, and why."""
  lines = [line for line in str(error).splitlines() if line.strip()]
  return ' '.join(lines[:2])[:400] or type(error).__name__


def _read(
  path: str, link: str, model: Any, new_head: bool
) -> list[np.ndarray | None]:
  """Reads weights as `read` does, but may raise any exception."""
  attempts: list[dict[str, bool]] = [{}]
  if new_head:
    attempts.append({'skip_mismatch': True})
    if link.endswith('/model.h5'):
      attempts.append({'skip_mismatch': True, 'by_name': True})
  layers = [layer for layer in model.layers if layer.weights]
  head = {id(v) for v in layers[-1].weights} if new_head else set()
  reason = ''
  for options in attempts:
    # What the file does not hold stays NaN.
    for variable in model.weights:
      missing = np.nan if 'float' in variable.dtype else 0
      variable.assign(np.full(variable.shape, missing))
    try:
      with warnings.catch_warnings(), contextlib.redirect_stdout(None):
        warnings.simplefilter('ignore')
        model.load_weights(link, **options)
    except ValueError as error:
      reason = reason or _reason(error)
      continue
    values = [np.asarray(v) for v in model.weights]
    lacking = [
      v
      for v, value in zip(model.weights, values, strict=True)
      if 'float' in v.dtype and np.all(np.isnan(value))
    ]
    if all(id(v) in head for v in lacking):
      # A head is read whole or not at all.
      gone = head if lacking else set()
      return [
        None if id(v) in gone else value
        for v, value in zip(model.weights, values, strict=True)
      ]
    reason = reason or f'it has no {lacking[0].path}'
  raise files.FileError(path, f'it belongs to another model ({reason})')
