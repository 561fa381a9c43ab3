"""What a run is made of: digests of its data, and the software on its machine.

`inputs.json` is written when a run starts. Digests tell whether data are the
same. They depend neither on the machine nor on where the data are.
"""

from collections.abc import Sequence
import dataclasses
import importlib.metadata
import json
import os
import platform

import numpy as np

import tff_fssl
from tff_fssl import durable
from tff_fssl import files
from tff_fssl.data import inspection
from tff_fssl.data import partition as partition_lib
from tff_fssl.data import sources

_FORMAT = 'tff_fssl.inputs'
_TRAINING, VALIDATION = 'training', 'validation'
# So many bytes are read of a mapped file, evenly spread over it.
_SAMPLE_BYTES = 2**25
_PACKAGES = ('tensorflow', 'tensorflow-federated', 'numpy')
# Hexadecimal digits of a digest.
_LENGTH = 32


@dataclasses.dataclass(frozen=True)
class Inputs:
  """What a run is made of.

  Attributes:
    classes: The name of each class.
    digests: Part of the data, such as 'test labels' -> its digest.
    partition: The digest of the partition.
    made_by: Package, or 'cores' -> its version, or their number.
  """

  classes: tuple[str, ...]
  digests: dict[str, str]
  partition: str
  made_by: dict[str, str]

  @property
  def public(self) -> 'Inputs':
    """Drops what depends on the examples of clients."""
    kept = {
      name: digest
      for name, digest in self.digests.items()
      if not name.startswith(_TRAINING)
    }
    return dataclasses.replace(self, digests=kept, partition='')

  def differences(self, other: 'Inputs') -> list[str]:
    """Names the parts of the data that differ.

    Args:
      other: Other inputs. Parts that one of the two lacks are not compared, nor
        what validates in another partition.

    Returns:
      The names, such as 'test labels'.
    """
    differing = [
      name
      for name, digest in self.digests.items()
      if other.digests.get(name, digest) != digest
      and (self.partition == other.partition or not name.startswith(VALIDATION))
    ]
    return ['names of classes'] * (self.classes != other.classes) + differing

  def write(self, path: str) -> None:
    """Writes the file, or raises `UsageError` if the disk refuses."""
    content = {'format': _FORMAT, **dataclasses.asdict(self)}
    durable.write_file(path, [(json.dumps(content, indent=2) + '\n').encode()])


def measure(
  data: sources.DataSet, partition: partition_lib.Partition
) -> Inputs:
  """Digests a data set and its partition.

  Labels and the partition are read whole, and so are examples in memory. Of
  examples in a file that is mapped into memory, a sample is read.

  Args:
    data: The data set, with examples as they are stored.
    partition: The partition of its training examples.

  Returns:
    The inputs.
  """
  held = partition.validation
  digests = {}
  for split, x, y in (
    (_TRAINING, _sample(data.train.x), data.train.y),
    (
      VALIDATION,
      data.train.x[held[:: _step(data.train.x, len(held))]],
      data.train.y[held],
    ),
    ('test', _sample(data.test.x), data.test.y),
  ):
    digests[f'{split} {data.train.kind.noun}'] = _digest(x)
    digests[f'{split} labels'] = _digest(y)
  partition_digest = _digest(*partition.parts())
  return Inputs(data.class_names, digests, partition_digest, _made_by())


def read(path: str) -> Inputs | None:
  """Reads the file.

  Args:
    path: The file.

  Returns:
    The content. None if there is no file, as in runs of older versions.

  Raises:
    FileError: If it is not such a file.
  """
  values = files.read_record(path, _FORMAT)
  if values is None:
    return None
  return Inputs(**{**values, 'classes': tuple(values['classes'])})


def installed(packages: Sequence[str]) -> str:
  """Lists the versions of this package, of Python and of others.

  Args:
    packages: Names on the package index. Packages that are not installed are
      skipped.

  Returns:
    'tff_fssl 0.1.0, Python 3.11.2, ...'.
  """
  found = [
    f'tff_fssl {tff_fssl.__version__}',
    f'Python {platform.python_version()}',
  ]
  for package in packages:
    try:
      found.append(f'{package} {importlib.metadata.version(package)}')
    except importlib.metadata.PackageNotFoundError:
      continue
  return ', '.join(found)


def _step(x: np.ndarray, number: int) -> int:
  """Returns the distance of the examples that are read, of so many."""
  if not isinstance(x, np.memmap):
    return 1
  size = x.itemsize * int(np.prod(x.shape[1:]))
  return max(1, -(-number * size // _SAMPLE_BYTES))


def _sample(x: np.ndarray) -> np.ndarray:
  """Returns the examples that are read."""
  return x[:: _step(x, len(x))]


def _digest(*arrays: np.ndarray) -> str:
  return inspection.checksum(*arrays)[:_LENGTH]


def _made_by() -> dict[str, str]:
  """Names versions, and the number of cores, on which rounding depends."""
  return {
    'tff_fssl': tff_fssl.__version__,
    'python': platform.python_version(),
    **{name: importlib.metadata.version(name) for name in _PACKAGES},
    'cores': str(len(os.sched_getaffinity(0))),
  }
