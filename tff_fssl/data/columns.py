"""Columns that say of each example what it is and whose. TensorFlow-free.

What a file of vectors and one of texts have in common: labels, clients and
splits as text, as a folder's manifest has them.
"""

from collections.abc import Iterable, Sequence
import os
from typing import NamedTuple

import numpy as np

from tff_fssl.data import inspection
from tff_fssl.data import listings
from tff_fssl.data import names
from tff_fssl.hparams import UsageError

LABEL, CLIENT, SPLIT = 'label', 'client', 'split'


def path_of(dataset: str, data_dir: str, prefix: str) -> str:
  """The file that `--dataset` names; a relative path starts at `data_dir`."""
  path = os.path.expanduser(dataset.removeprefix(prefix))
  if not path:
    raise UsageError(f'--dataset={dataset}: give the file, {prefix}PATH')
  return os.path.join(os.path.expanduser(data_dir), path)


class Columns(NamedTuple):
  """The columns of a file, as numbers.

  Attributes:
    y: int32 [N], the classes; -1 if not known.
    owners: int32 [N], the clients; -1 if nobody's.
    in_test: bool [N], whether an example is for testing.
    class_names: The name of each class.
    client_names: The name of each client; () if there are none.
    uses_share: Whether a share decides which examples are for testing.
  """

  y: np.ndarray
  owners: np.ndarray
  in_test: np.ndarray
  class_names: tuple[str, ...]
  client_names: tuple[str, ...]
  uses_share: bool

  @property
  def uses(self) -> tuple[str, ...]:
    """The flags of how they are split that change something."""
    return ('test_share',) if self.uses_share else ()

  @property
  def num_test(self) -> int:
    """How many examples are for testing."""
    return int(self.in_test.sum())

  def notes(self, path: str, test_share: float) -> str:
    """What is to be said of all results."""
    share = f'{test_share:g} of it is for testing'
    return f'{path}; {share}' if self.uses_share else path


def build(
  where: str,
  labels: Sequence[str],
  clients: Sequence[str],
  splits: Sequence[str],
  contents: Iterable[str | bytes],
  test_share: float,
  class_names: Sequence[str] = (),
) -> Columns:
  """Numbers classes and clients, and splits.

  Args:
    where: The file, for messages.
    labels: The class of each example, [N]; '' if it is not known.
    clients: Whose each one is, [N]; '' if nobody's.
    splits: 'train', 'test' or '' of each one, [N].
    contents: What an example is. Where it has a label and no split, its hash
      decides, so that equal examples are on one side.
    test_share: The share of these that are for testing.
    class_names: All classes, in their order. (): those that there are, sorted.

  Returns:
    The columns.

  Raises:
    UsageError: If a value is not allowed, or the data cannot be trained on.
  """
  for values, wrong, allowed in (
    (splits, {'', listings.TRAIN, listings.TEST}, 'train, test and nothing'),
    (labels, {'', *class_names}, f'{inspection.shown(class_names)} and nothing')
    if class_names
    else ((), set(), ''),
  ):
    for row, value in enumerate(values, 1):
      if value not in wrong:
        raise UsageError(
          f'{where}, row {row}: {value!r} is not allowed; allowed are {allowed}'
        )
  class_names = tuple(class_names) or listings.sorted_names(set(labels))
  client_names = listings.sorted_names(set(clients))
  in_test = np.zeros(len(labels), bool)
  for i, content in enumerate(contents):
    if splits[i]:
      in_test[i] = splits[i] == listings.TEST
    elif labels[i]:  # What has no label can only be trained on.
      in_test[i] = listings.in_share(content, test_share)
    if in_test[i] and not labels[i]:
      raise UsageError(f'{where}, row {i + 1}: a test example needs a label')
  y = _numbers(labels, class_names)
  inspection.refuse(
    where, inspection.label_problems(class_names, y[~in_test], y[in_test])
  )
  return Columns(
    y,
    _numbers(clients, client_names),
    in_test,
    class_names,
    client_names,
    any(label and not split for label, split in zip(labels, splits)),
  )


def _numbers(values: Sequence[str], known: Sequence[str]) -> np.ndarray:
  """The place of each value in `known`, int32 [N]; -1 if it is not there."""
  place = {name: i for i, name in enumerate(known)}
  unknown = names.UNKNOWN_LABEL
  return np.array([place.get(value, unknown) for value in values], np.int32)
