"""Splits examples over clients: evenly, or by Dirichlet draws. NumPy only."""

import numpy as np

from tff_fssl.data import names
from tff_fssl.data import partition_settings
from tff_fssl.data import seeds
from tff_fssl.hparams import UsageError

MAX_DRAWS = 1_000


def split(
  hidden: list[np.ndarray], settings: partition_settings.PartitionSettings
) -> list[np.ndarray]:
  """Splits examples over clients; `partition.build_partition` says how.

  Args:
    hidden: The examples of each class, int64.
    settings: How to split.

  Returns:
    The examples of each client, in no order.

  Raises:
    UsageError: If no such split is found; names the flags.
  """
  rng = seeds.generator(settings.seed, seeds.Purpose.PARTITION)
  if settings.partition == names.IID:
    return _split_iid(hidden, settings.num_clients, rng)
  return _split_dirichlet(
    hidden,
    settings.num_clients,
    settings.alpha,
    settings.min_client_examples,
    rng,
  )


def _split_iid(
  hidden: list[np.ndarray], num_clients: int, rng: np.random.Generator
) -> list[np.ndarray]:
  pool = rng.permutation(np.concatenate(hidden))
  size = len(pool) // num_clients
  return list(pool[: size * num_clients].reshape(num_clients, size))


def _split_dirichlet(
  hidden: list[np.ndarray],
  num_clients: int,
  alpha: float,
  min_client_examples: int,
  rng: np.random.Generator,
) -> list[np.ndarray]:
  """Draws until every client has enough examples, at most `MAX_DRAWS` times."""
  total = sum(len(members) for members in hidden)
  if num_clients * min_client_examples > total:
    raise UsageError(
      f'--min_client_examples={min_client_examples}: {num_clients} clients'
      f' would need {num_clients * min_client_examples} examples, but {total}'
      f' are left for them; set it to at most {total // num_clients}, or lower'
      ' --num_clients'
    )
  best = 0
  for _ in range(MAX_DRAWS):
    cuts = _draw_dirichlet(hidden, num_clients, alpha, total, rng)
    if cuts is None:
      continue
    sizes = sum(
      np.diff(of_class, prepend=0, append=len(members))
      for members, of_class in zip(hidden, cuts)
    )
    smallest = int(np.min(sizes))
    if smallest >= min_client_examples:
      return _cut(hidden, cuts)
    best = max(best, smallest)
  raise UsageError(
    f'--partition=dirichlet --alpha={alpha:g} --num_clients={num_clients}:'
    f' {MAX_DRAWS} draws gave no split in which every client has'
    f' --min_client_examples={min_client_examples} of the {total} examples; the'
    f' best had {best}. Set --min_client_examples={best} or less, raise'
    ' --alpha, or lower --num_clients'
  )


def _draw_dirichlet(
  hidden: list[np.ndarray],
  num_clients: int,
  alpha: float,
  total: int,
  rng: np.random.Generator,
) -> list[np.ndarray] | None:
  """Draws once where to cut each class.

  Args:
    hidden: The examples of each class.
    num_clients: The number of clients.
    alpha: Parameter of the Dirichlet distribution.
    total: The number of all examples.
    rng: The random generator.

  Returns:
    Per class, int64 [num_clients - 1]; None if a draw gave all examples of a
    class to clients that are full.
  """
  all_cuts = []
  sizes = np.zeros(num_clients, np.int64)
  for members in hidden:
    proportions = rng.dirichlet(np.full(num_clients, alpha))
    proportions[sizes >= total / num_clients] = 0
    mass = proportions.sum()
    # A very small alpha gives everything to one client (or underflows).
    if not mass > 0:
      return None
    ends = np.cumsum(proportions / mass) * len(members)
    cuts = np.minimum(ends[:-1].astype(np.int64), len(members))
    all_cuts.append(cuts)
    sizes += np.diff(cuts, prepend=0, append=len(members))
  return all_cuts


def _cut(
  hidden: list[np.ndarray], all_cuts: list[np.ndarray]
) -> list[np.ndarray]:
  """The examples of each client, class by class."""
  pieces = [np.split(members, cuts) for members, cuts in zip(hidden, all_cuts)]
  return [np.concatenate(of_client) for of_client in zip(*pieces)]
