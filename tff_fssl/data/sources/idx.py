"""Folders of MNIST's kind of files: `--dataset=idx:DIR`.

DIR has `train-images-idx3-ubyte`, `train-labels-idx1-ubyte`, and the same with
`t10k` for testing, as they are or with `.gz`. Debian's package
`dataset-fashion-mnist` has such a folder.
"""

from collections.abc import Iterator
import functools
import os

import numpy as np

from tff_fssl import files
from tff_fssl.data import names
from tff_fssl.data import sources
from tff_fssl.data.data_hparams import DataHparams
from tff_fssl.data.sources import images
from tff_fssl.data.sources import table
from tff_fssl.hparams import UsageError

# Debian's, of the package dataset-fashion-mnist.
FASHION_MNIST = '/usr/share/datasets/fashion-mnist'
_SPLITS = {table.TRAIN: 'train', table.TEST: 't10k'}
_KINDS = {'images': 'idx3', 'labels': 'idx1'}
# Unsigned bytes, the only type of these files that is read.
_UINT8 = 0x08


def find(name: str, data_dir: str, settings: DataHparams) -> sources.Info:
  """Finds a folder, and decodes it the first time (see `sources.describe`)."""
  root = table.resolve_path(name, data_dir, names.IDX)
  try:
    paths = [path_of(root, split, kind) for split in _SPLITS for kind in _KINDS]
    states = images.file_states(paths)
  except UsageError as error:
    raise UsageError(f'--dataset={name}: {error}') from error
  return images.find(
    images.Found(
      name=name,
      root=root,
      key=(states,),
      settings=settings,
      open=lambda: images.open_splits(
        {
          split: images.Split(
            len(read_array(path_of(root, split, 'labels'))),
            functools.partial(rows, root, split),
          )
          for split in _SPLITS
        },
        settings,
      ),
      uses=images.SHAPED | {'max_unreadable'},
    )
  )


def path_of(root: str, split: str, kind: str) -> str:
  """Finds the file of 'train' or 'test', and of 'images' or 'labels'.

  Raises:
    files.FileError: If there is none.
  """
  name = f'{_SPLITS[split]}-{kind}-{_KINDS[kind]}-ubyte'
  for ending in ('', '.gz'):
    path = os.path.join(root, f'{name}{ending}')
    if os.path.lexists(path):
      return path
  raise files.FileError(root, f'it has neither {name} nor {name}.gz')


def rows(root: str, split: str) -> Iterator[images.Row]:
  """Reads the rows of 'train' or 'test'.

  Args:
    root: The folder.
    split: The split.

  Yields:
    Its rows, in the order of the files.

  Raises:
    files.FileError: If a file is damaged, or the two differ in their numbers.
  """
  pixels = read_array(path_of(root, split, 'images'))
  labels = read_array(path_of(root, split, 'labels'))
  if labels.ndim != 1 or pixels.ndim != 3 or len(pixels) != len(labels):
    raise files.FileError(
      path_of(root, split, 'images'),
      f'its images are {list(pixels.shape)}, its labels {list(labels.shape)}',
    )
  for number, (image, label) in enumerate(zip(pixels, labels.tolist())):
    yield images.Row(str(number), image, label)


def read_array(path: str) -> np.ndarray:
  """Reads an IDX file of bytes.

  Args:
    path: The file, perhaps a gzip file.

  Returns:
    uint8, of the shape that the file states.

  Raises:
    files.FileError: If it is no such file, or not whole.
  """
  content = files.read_packed(path)
  rank = content[3] if len(content) > 3 else 0
  start = 4 + 4 * rank
  if content[:3] != bytes([0, 0, _UINT8]) or len(content) < start:
    raise files.FileError(path, 'it is no IDX file of unsigned bytes')
  shape = np.frombuffer(content, '>u4', rank, 4).tolist()
  values = np.frombuffer(content, np.uint8, offset=start)
  # Python's integers do not overflow.
  size = 1
  for side in shape:
    size *= side
  if size != len(values):
    raise files.FileError(
      path, f'it has {len(values):,} bytes, but states {shape}'
    )
  return values.reshape(shape)
