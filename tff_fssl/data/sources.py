"""Loads image data sets as arrays: from TFDS's files, or from scikit-learn."""

import dataclasses
import os
import pathlib
import re
import stat
from typing import Any

import numpy as np

from tff_fssl import files
from tff_fssl.data import names
from tff_fssl.hparams import UsageError
from tff_fssl.hparams import import_function

# TFDS's default folder.
_DEFAULT_DATA_DIR = os.path.join('~', 'tensorflow_datasets')
_READ_BATCH_SIZE = 1_000


def as_labels(labels: Any) -> np.ndarray:
  """Converts integer labels to int32.

  Args:
    labels: Integers of any width (NumPy's default is int64), or none.

  Returns:
    int32, of the same shape.

  Raises:
    UsageError: If they are not integers, or not in int32's range.
  """
  labels = np.asarray(labels)
  if labels.dtype == np.int32:
    return labels
  if labels.size and not np.issubdtype(labels.dtype, np.integer):
    raise UsageError(f'labels must be integers, not {labels.dtype}')
  info = np.iinfo(np.int32)
  if labels.size and (labels.min() < info.min or labels.max() > info.max):
    raise UsageError(
      f'labels go from {labels.min()} to {labels.max()}: must be in the range'
      ' of int32'
    )
  return labels.astype(np.int32)


@dataclasses.dataclass(frozen=True)
class Examples:
  """Labelled images.

  Attributes:
    x: uint8 [N, H, W, C].
    y: int32 [N], in [0, number of classes), or -1 for a training example whose
      class is not known. Other integer types are converted.
  """

  x: np.ndarray
  y: np.ndarray

  def __post_init__(self):
    object.__setattr__(self, 'y', as_labels(self.y))
    if self.x.dtype != np.uint8 or self.x.ndim != 4:
      raise UsageError(
        'images must be uint8 [N, H, W, C], not'
        f' {self.x.dtype} {list(self.x.shape)}'
      )
    if self.y.shape != self.x.shape[:1]:
      raise UsageError(
        f'labels of {len(self.x)} images must be integers [{len(self.x)}], not'
        f' {list(self.y.shape)}'
      )

  def __len__(self) -> int:
    return len(self.y)


@dataclasses.dataclass(frozen=True)
class DataSet:
  """A data set in memory.

  Attributes:
    name: Its name.
    train: Training examples, in their stored order.
    test: Test examples, in their stored order.
    num_classes: The number of classes.
    class_names: One name per class.
    image_shape: (height, width, channels).
    notes: A remark to give with all results on these data; '' if none.
    owners: int32 [number of training examples], whose each one is: an index
      into `client_names`, or -1 if nobody's. None: the data say nothing.
    client_names: The name of each natural client.
  """

  name: str
  train: Examples
  test: Examples
  num_classes: int
  class_names: tuple[str, ...]
  image_shape: tuple[int, int, int]
  notes: str = ''
  owners: np.ndarray | None = None
  client_names: tuple[str, ...] = ()

  def __post_init__(self):
    for split, examples in (('train', self.train), ('test', self.test)):
      if examples.x.shape[1:] != tuple(self.image_shape):
        raise UsageError(
          f'data set {self.name}: {split} images are'
          f' {list(examples.x.shape[1:])}, instead of'
          f' {list(self.image_shape)}'
        )
      lowest = names.UNKNOWN_LABEL if split == 'train' else 0
      if len(examples) and not (
        lowest <= examples.y.min() and examples.y.max() < self.num_classes
      ):
        raise UsageError(
          f'data set {self.name}: {split} labels go from {examples.y.min()} to'
          f' {examples.y.max()}, allowed are {lowest} to {self.num_classes - 1}'
        )


def load(name: str, data_dir: str | None = None) -> DataSet:
  """Loads a data set into memory. Never uses the network.

  Args:
    name: One of `names.DATA_SETS`.
    data_dir: The folder of TFDS's data sets; None: TFDS's default. `digits`
      needs no folder.

  Returns:
    The data set; the same arrays every time.

  Raises:
    UsageError: If the name is unknown, or the data set is missing, damaged or
      not the one that the name says.
  """
  info = names.data_set_info(name)
  if info.loader:
    return import_function(info.loader)(info, data_dir)
  return _load_tfds(info, data_dir)


def load_digits(info: names.DataSetInfo, data_dir: str | None) -> DataSet:
  """scikit-learn's 1,797 digits; every fifth of a class is a test example."""
  del data_dir  # The digits are part of scikit-learn.
  from sklearn import datasets  # pylint: disable=import-outside-toplevel

  digits = datasets.load_digits()
  # Values are counts of set pixels in 4 x 4 blocks, 0 to 16.
  images = np.rint(digits.images * (255 / 16)).astype(np.uint8)[..., None]
  labels = digits.target.astype(np.int32)
  # Taking every fifth example, sorted by class, gives a stratified split
  # without random draws.
  in_test = np.zeros(len(labels), bool)
  in_test[np.argsort(labels, kind='stable')[::5]] = True
  return DataSet(
    name=info.name,
    train=Examples(images[~in_test], labels[~in_test]),
    test=Examples(images[in_test], labels[in_test]),
    num_classes=info.num_classes,
    class_names=tuple(str(c) for c in digits.target_names),
    image_shape=info.image_shape,
    notes="scikit-learn's 8 x 8 digits; every fifth of a class is for testing",
  )


def _stored_version(root: pathlib.Path) -> str | None:
  """The newest version of a data set in its folder, if there is any."""
  try:
    if not stat.S_ISDIR(os.stat(root).st_mode):
      raise files.FileError(str(root), 'it is not a folder')
    entries = os.listdir(root)
  except FileNotFoundError:
    return None
  except OSError as error:
    raise files.FileError(str(root), files.reason_of(error)) from error
  found = [
    tuple(int(n) for n in name.split('.'))
    for name in entries
    if re.fullmatch(r'\d{1,9}\.\d{1,9}\.\d{1,9}', name, re.ASCII)
    and os.path.lexists(root / name / 'dataset_info.json')
  ]
  return '.'.join(str(n) for n in max(found)) if found else None


def _check_files(folder: pathlib.Path) -> None:
  """Raises `UsageError` for files on which TFDS would hang, such as pipes."""
  for path in sorted(folder.iterdir()):
    if not path.is_dir():
      files.open_binary(str(path)).close()


def _reason(error: Exception) -> str:
  return f'{type(error).__name__}: {files.first_line(error)}'


def _load_tfds(info: names.DataSetInfo, data_dir: str | None) -> DataSet:
  """Reads a TFDS data set that is on disk."""
  given = data_dir or os.environ.get('TFDS_DATA_DIR') or _DEFAULT_DATA_DIR
  folder = pathlib.Path(os.path.expanduser(given))
  fetch = (
    'python -c "import tensorflow_datasets as tfds;'
    f" tfds.load('{info.name}', data_dir='{given}')\""
  )
  # Checked before TFDS is called, since without files it would download them.
  version = _stored_version(folder / info.name)
  if version is None:
    raise UsageError(
      f'data set {info.name} is not in --data_dir={given}; to fetch it, run:'
      f' {fetch}'
    )
  _check_files(folder / info.name / version)
  import tensorflow_datasets as tfds  # pylint: disable=import-outside-toplevel

  damaged = (
    f'data set {info.name} {version} in --data_dir={given} cannot be read;'
    f' remove {folder / info.name / version} and run: {fetch} '
  )
  try:
    builder = tfds.builder(f'{info.name}:{version}', data_dir=str(folder))
    label = builder.info.features['label']
    class_names, num_classes = tuple(label.names), label.num_classes
    counts = {s: builder.info.splits[s].num_examples for s in ('train', 'test')}
    shape = tuple(builder.info.features['image'].shape)
  except Exception as e:  # pylint: disable=broad-except
    # TFDS passes on the errors of its parsers.
    raise UsageError(f'{damaged}({_reason(e)})') from e
  if num_classes != info.num_classes or shape != info.image_shape:
    raise UsageError(
      f'{folder / info.name / version} is not {info.name}: it has'
      f' {num_classes} classes and images of {list(shape)}, instead of'
      f' {info.num_classes} and {list(info.image_shape)}'
    )
  try:
    train, test = (
      _read_split(tfds, info, version, folder, split, counts[split])
      for split in ('train', 'test')
    )
  except Exception as e:  # pylint: disable=broad-except
    raise UsageError(f'{damaged}({_reason(e)})') from e
  return DataSet(
    name=info.name,
    train=train,
    test=test,
    num_classes=num_classes,
    class_names=class_names,
    image_shape=info.image_shape,
    notes=f'TFDS {info.name} {version}: {_first_line(builder)}',
  )


def _first_line(builder) -> str:
  lines = (builder.info.description or '').strip().splitlines()
  return lines[0] if lines else 'no description'


def _read_split(tfds, info, version, folder, split, count) -> Examples:
  """Reads a split in its stored order."""
  # Shards are read one after the other: interleaving would change the order.
  read_config = tfds.ReadConfig(
    interleave_cycle_length=1, try_autocache=False, skip_prefetch=True
  )
  dataset = tfds.load(
    f'{info.name}:{version}',
    split=split,
    data_dir=str(folder),
    download=False,
    shuffle_files=False,
    read_config=read_config,
  )
  dataset = dataset.map(lambda element: (element['image'], element['label']))
  x = np.empty((count, *info.image_shape), np.uint8)
  y = np.empty(count, np.int32)
  start = 0
  for images, labels in tfds.as_numpy(
    dataset.batch(_READ_BATCH_SIZE).prefetch(2)
  ):
    stop = start + len(labels)
    if stop > count:
      break
    x[start:stop], y[start:stop] = images, labels
    start = stop
  if start != count:
    raise ValueError(f'{split} should have {count} examples')
  return Examples(x, y)
