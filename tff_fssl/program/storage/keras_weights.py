"""The weights in a Keras file, read without Keras.

Before Keras reads weights, it builds the model that the file describes, and a
description can hold code (Lambda layers, any class by its name). Here only
numbers are read, by h5py, and only those that the given model expects: names,
shapes and dtypes are compared first. The layouts, all of Keras 2.14:

*   `.h5`, whole models and `save_weights`: groups by layer, whose attributes
    list layers and weights.
*   `.keras`, and `save_weights` to `.weights.h5`: groups by the class of the
    layer, counted in the model's order, with weights by number. In a `.keras`
    file, a zip archive, `config.json` has the layers' names.
"""

from collections.abc import Sequence
import contextlib
import io
import math
import re
from typing import Any, BinaryIO, NamedTuple
import zipfile

import h5py
import numpy as np

from tff_fssl import files
from tff_fssl.program.storage import checkpoint

_ZIP, _HDF5 = b'PK\x03\x04', b'\x89HDF\r\n\x1a\n'
_WEIGHTS_FILE, _CONFIG_FILE = 'model.weights.h5', 'config.json'
_MAX_CONFIG_BYTES = 2**26
# A file may also hold an optimizer's moments.
_MAX_OVERHEAD_BYTES, _MAX_FACTOR = 2**26, 8
_MAX_NAMES = 100_000
# The groups in which versions of Keras keep layers.
_CONTAINERS = ('_layer_checkpoint_dependencies', 'layers')
# The compressions that need no plugin, which would be code.
_FILTERS = (None, 'gzip', 'lzf')


class _WrongError(Exception):
  """Weights that are another model's, or stored as Keras does not."""


class _Layer(NamedTuple):
  """A layer with weights.

  Attributes:
    name: Name of the layer, or '' if not known.
    key: Name of the layer in the `.keras` layout.
    weights: (name or '', dataset or variable) of each weight, in Keras's order.
  """

  name: str
  key: str
  weights: list[tuple[str, Any]]


def is_keras_file(path: str) -> bool:
  """Says whether a file begins as `.keras` or `.h5`, or raises `FileError`."""
  with files.open_binary(path) as file:
    start = file.read(len(_HDF5))
  return start == _HDF5 or start.startswith(_ZIP)


def read(
  path: str, model: Any, *, new_head: bool = False
) -> list[np.ndarray | None]:
  """Reads the weights of a model from a Keras file.

  Args:
    path: The file.
    model: The Keras model that the weights are for, not nested. The names,
      classes and weights of its layers are compared.
    new_head: Whether the file may lack the last layer with weights, or have
      another one (for other classes).

  Returns:
    The weights, in the order of `model.weights`. None stands for weights of a
    last layer that is not in the file.

  Raises:
    FileError: If the file cannot be read, or its weights are not this model's.
  """
  try:
    with contextlib.ExitStack() as exits:
      file = exits.enter_context(files.open_binary(path))
      weights = _read(path, file, model, new_head, exits)
  except files.FileError:
    raise
  except _WrongError as error:
    raise files.FileError(path, str(error)) from error
  except Exception as error:  # pylint: disable=broad-except
    # Bad content makes zipfile and HDF5 raise errors of many types.
    reason = f'it cannot be read as a Keras file ({files.first_line(error)})'
    raise files.FileError(path, reason) from error
  return weights


def _read(
  path: str,
  file: BinaryIO,
  model: Any,
  new_head: bool,
  exits: contextlib.ExitStack,
) -> list[np.ndarray | None]:
  """Reads weights as `read` does, but may raise any exception."""
  names: dict[str, str] = {}
  if file.read(len(_ZIP)) == _ZIP:
    archive = exits.enter_context(zipfile.ZipFile(file))
    names = _layer_names(
      path, _extract(archive, _CONFIG_FILE, _MAX_CONFIG_BYTES)
    )
    num_bytes = sum(
      math.prod(v.shape) * np.dtype(v.dtype.as_numpy_dtype).itemsize
      for v in model.weights
    )
    limit = _MAX_FACTOR * num_bytes + _MAX_OVERHEAD_BYTES
    file = io.BytesIO(_extract(archive, _WEIGHTS_FILE, limit))
  file.seek(0)
  root = exits.enter_context(h5py.File(file, 'r'))
  here = _layers_of(model)
  there = _layers_in(root, here, names)
  try:
    pairs = _pair(there, here)
  except _WrongError:
    if not new_head:
      raise
    but_last = _pair_but_last(there, here)
    if but_last is None:
      raise
    pairs = but_last
  values = {id(v): _values(dataset) for dataset, v in pairs}
  return [values.get(id(v)) for v in model.weights]


def _extract(archive: zipfile.ZipFile, name: str, limit: int) -> bytes:
  """Extracts an archive's member that is not larger than expected."""
  if name not in archive.namelist():
    raise _WrongError(f'it is not a Keras model (it lacks {name})')
  with archive.open(name) as member:
    # The size in the archive's directory may lie, so read with a limit.
    content = member.read(limit + 1)
  if len(content) > limit:
    reason = f'its {name} is larger than expected (at most {limit:,} bytes)'
    raise _WrongError(reason)
  return content


def _layer_names(path: str, config: bytes) -> dict[str, str]:
  """Maps the key of each layer in the layout to the layer's name."""
  # Keras writes infinite arguments of layers.
  fields = files.parse_json(path, config, finite=False)
  layers = fields['config']['layers']
  keys = _keys([str(layer['class_name']) for layer in layers])
  return {k: str(layer['config']['name']) for k, layer in zip(keys, layers)}


def _keys(classes: Sequence[str]) -> list[str]:
  """Returns the keys that the `.keras` layout gives to layers of classes."""
  counts: dict[str, int] = {}
  keys = []
  for name in classes:
    snake = re.sub('(.)([A-Z][a-z]+)', r'\1_\2', name)
    snake = re.sub('([a-z])([A-Z])', r'\1_\2', snake).lower()
    count = counts.get(snake, 0)
    counts[snake] = count + 1
    keys.append(f'{snake}_{count}' if count else snake)
  return keys


def _layers_of(model: Any) -> list[_Layer]:
  """Lists the layers of a model that have weights."""
  keys = _keys([type(layer).__name__ for layer in model.layers])
  return [
    _Layer(
      layer.name, key, [(v.name.removesuffix(':0'), v) for v in layer.weights]
    )
    for layer, key in zip(model.layers, keys)
    if layer.weights
  ]


def _layers_in(
  root: h5py.File, here: Sequence[_Layer], names: dict[str, str]
) -> list[_Layer]:
  """Lists the layers of a file that have weights, in any layout."""
  legacy = root
  if 'layer_names' not in root.attrs:
    for container in _CONTAINERS:
      if container in root:
        group = _member(root, container)
        return _layers_by_class(group, here, names)
    legacy = _member(root, 'model_weights')
  layers = []
  for name in _text_list(legacy, 'layer_names'):
    group = _member(legacy, name)
    weights = [
      (weight.removesuffix(':0'), _member(group, weight))
      for weight in _text_list(group, 'weight_names')
    ]
    if weights:
      layers.append(_Layer(name, '', weights))
  return layers


def _layers_by_class(
  container: Any, here: Sequence[_Layer], names: dict[str, str]
) -> list[_Layer]:
  """Lists the layers of a file in the `.keras` layout."""
  own = {layer.key: layer for layer in here}
  layers = []
  for key in container:
    layer = _member(container, key)
    if 'vars' not in layer or not len(_member(layer, 'vars')):
      continue
    group = _member(layer, 'vars')
    # The file only numbers the weights: take the names from our layer.
    like = own[key].weights if key in own else []
    suffixes = [name.rpartition('/')[2] for name, _ in like]
    suffixes += [str(i) for i in range(len(suffixes), len(group))]
    prefix = names.get(key) or (own[key].name if key in own else key)
    weights = [
      (f'{prefix}/{suffix}', _member(group, str(index)))
      for index, suffix in zip(range(len(group)), suffixes)
    ]
    layers.append(_Layer(prefix, key, weights))
  return layers


def _pair(
  there: Sequence[_Layer], here: Sequence[_Layer]
) -> list[tuple[Any, Any]]:
  """Pairs (dataset, variable) of each weight, if the models are equal.

  Raises:
    _WrongError: If the models differ, with the first differences.
  """
  by_name = {layer.name: layer for layer in there}
  by_key = {layer.key: layer for layer in there if layer.key}
  # Our order, if the file has our layers; else its own order, for the message.
  if len(by_name) == len(there) and by_name.keys() == {x.name for x in here}:
    there = [by_name[layer.name] for layer in here]
  elif by_key.keys() == {layer.key for layer in here}:
    there = [by_key[layer.key] for layer in here]
  datasets = [pair for layer in there for pair in layer.weights]
  variables = [pair for layer in here for pair in layer.weights]
  for _, dataset in datasets:
    _check_dataset(dataset)
  if len(datasets) != len(variables):
    reason = f'{len(datasets)} weights there, {len(variables)} here'
  else:
    reason = checkpoint.model_differences(
      {checkpoint.TRAINABLE: _described(datasets)},
      {checkpoint.TRAINABLE: _described(variables)},
    )
  if reason:
    raise _WrongError(f'it belongs to another model ({reason})')
  return [(d, v) for (_, d), (_, v) in zip(datasets, variables)]


def _pair_but_last(
  there: Sequence[_Layer], here: Sequence[_Layer]
) -> list[tuple[Any, Any]] | None:
  """Pairs the weights of all layers but the last, if these are equal."""
  *first, last = here
  others = [x for x in there if last.name != x.name and last.key != x.key]
  # The file's own last layer may have another name.
  for candidates in (others, there[:-1]):
    if len(candidates) == len(first):
      with contextlib.suppress(_WrongError):
        return _pair(candidates, first)
  return None


def _described(weights: Sequence[tuple[str, Any]]) -> list[str]:
  return [checkpoint.describe_weight(n, w.dtype, w.shape) for n, w in weights]


def _member(group: Any, name: str) -> Any:
  """Opens the member of a group, and refuses links to elsewhere."""
  for part in name.split('/'):
    if not isinstance(group, h5py.Group) or part in ('', '.', '..'):
      raise _WrongError(f'it has no weight {name!r}')
    # Soft and external links could read any HDF5 file of this machine.
    if not isinstance(group.get(part, getlink=True), h5py.HardLink):
      raise _WrongError(
        f'it has no {name!r}, or only a link, which is not followed'
      )
    group = group[part]
  return group


def _text_list(group: Any, name: str) -> list[str]:
  """Reads an attribute that is a list of texts. Keras splits long ones."""
  parts = [name] if name in group.attrs else []
  while not parts or parts[-1] != name:
    part = f'{name}{len(parts)}'
    if part not in group.attrs:
      break
    parts.append(part)
  if not parts:
    raise _WrongError(f'it is not a Keras file (it lacks {name})')
  texts: list[str] = []
  for part in parts:
    # Before it is read: a small file can state a huge attribute.
    if math.prod(group.attrs.get_id(part).shape) > _MAX_NAMES:
      raise _WrongError(f'it has too many {part}')
    texts += [
      text.decode() if isinstance(text, bytes) else str(text)
      for text in np.ravel(group.attrs[part])
    ]
  return texts


def _check_dataset(dataset: Any) -> None:
  """Refuses datasets that read other files, or more than they state."""
  name = getattr(dataset, 'name', '?')
  if not isinstance(dataset, h5py.Dataset):
    raise _WrongError(f'{name!r} is not a weight')
  # Such datasets take their numbers from other files.
  if dataset.external or dataset.is_virtual:
    raise _WrongError(f'{name!r} lies in another file')
  # One chunk is decompressed whole, however few numbers are read.
  chunk = math.prod(dataset.chunks or (0,))
  if dataset.compression not in _FILTERS or chunk > max(dataset.size, 2**20):
    raise _WrongError(f'{name!r} is stored in a way that Keras does not use')
  if dataset.dtype.kind not in 'fiub':
    raise _WrongError(f'{name!r} does not hold numbers')


def _values(dataset: Any) -> np.ndarray:
  """Reads the numbers of a dataset with a checked shape."""
  try:
    return np.asarray(dataset[()])
  except Exception as error:  # pylint: disable=broad-except
    # HDF5 raises errors of many types for damaged files.
    raise _WrongError(f'{dataset.name!r} cannot be read') from error
