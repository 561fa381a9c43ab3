"""The natural partition: each example stays with its owner. NumPy only."""

import numpy as np

from tff_fssl.data import partition_settings
from tff_fssl.data import seeds
from tff_fssl.hparams import UsageError


def choose(
  owners: np.ndarray | None,
  labels: np.ndarray,
  settings: partition_settings.PartitionSettings,
) -> np.ndarray:
  """The owners that are clients.

  All that have an example; or `num_clients` of them, drawn at random. A larger
  number includes those of a smaller one.

  Args:
    owners: int [N], whose each example is, negative for nobody's; None if the
      data set does not say.
    labels: int [N].
    settings: The number of clients, and the seed.

  Returns:
    int64 [clients], ascending.

  Raises:
    UsageError: If there are no owners, or too few.
  """
  if owners is None:
    raise UsageError(
      '--partition=natural: the data set does not say whose its examples are;'
      ' iid, dirichlet and shards make clients of any data set'
    )
  owners = np.asarray(owners)
  if owners.shape != labels.shape or not np.issubdtype(
    owners.dtype, np.integer
  ):
    raise UsageError(
      f'owners of {len(labels)} examples must be integers [{len(labels)}], not'
      f' {owners.dtype} {list(owners.shape)}'
    )
  present = np.unique(owners[owners >= 0]).astype(np.int64)
  wanted = settings.num_clients or len(present)
  if not 1 <= wanted <= len(present):
    raise UsageError(
      f'--num_clients={settings.num_clients} --partition=natural: the data set'
      f' has {len(present)} clients with examples; 0 takes them all'
    )
  rng = seeds.generator(settings.seed, seeds.Purpose.NATURAL_CLIENTS)
  return np.sort(rng.permutation(present)[:wanted])


def split(
  hidden: list[np.ndarray], owners: np.ndarray, clients: np.ndarray
) -> list[np.ndarray]:
  """The examples of each client, ascending; those of others are not used.

  Args:
    hidden: The examples to split, int64, in any groups.
    owners: int [N], whose each example is.
    clients: The owners that are clients, ascending.

  Returns:
    The examples of each client, ascending; perhaps none.
  """
  pool = np.sort(np.concatenate(hidden))
  pool = pool[np.argsort(owners[pool], kind='stable')]
  starts = np.searchsorted(owners[pool], clients, 'left')
  stops = np.searchsorted(owners[pool], clients, 'right')
  return [pool[start:stop] for start, stop in zip(starts, stops)]
