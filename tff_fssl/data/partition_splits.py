"""Splits of examples over clients, by classes or owners."""

from collections.abc import Sequence
import contextlib

import numpy as np

from tff_fssl.data import names
from tff_fssl.data import partition_settings
from tff_fssl.data import seeds
from tff_fssl.hparams import UsageError

MAX_DRAWS = 1_000

# Percent of each class at client 0. Client k has them rolled by k % 10 classes.
_ROWS = {
  names.FEDMATCH: np.array([50, 15, 3, 3, 3, 2, 3, 3, 3, 15]),
  names.EXTREME: np.array([50, 10, 10, 10, 5, 5, 5, 5, 0, 0]),
}


def split(
  hidden: list[np.ndarray],
  settings: partition_settings.PartitionSettings,
  purpose: seeds.Purpose = seeds.Purpose.PARTITION,
) -> list[np.ndarray]:
  """Splits examples over clients: see `partition_draw`.

  Args:
    hidden: The examples of each class, int64.
    settings: The split, by any partition except `natural`.
    purpose: The purpose of the random numbers.

  Returns:
    The examples of each client, in no order.

  Raises:
    UsageError: If no such split is found. Names the flags.

  Examples:
    >>> import numpy as np
    >>> from tff_fssl.data import partition_splits
    >>> from tff_fssl.data.partition_settings import PartitionSettings
    >>> hidden = [np.arange(0, 4), np.arange(10, 14)]
    >>> for partition in ('iid', 'shards'):
    ...   settings = PartitionSettings(2, 2, 2, partition=partition)
    ...   print(partition, partition_splits.split(hidden, settings))
    iid [array([10,  1,  2, 12]), array([ 3, 13,  0, 11])]
    shards [array([10, 11, 12, 13]), array([0, 1, 2, 3])]
  """
  rng = seeds.generator(settings.seed, purpose)
  if settings.partition == names.IID:
    return split_evenly(np.concatenate(hidden), settings.num_clients, rng)
  if settings.partition == names.SHARDS:
    return _split_shards(hidden, settings, rng)
  if settings.partition == names.PAIRS:
    return split_pairs(hidden, settings, rng)
  if settings.partition == names.CLASSES:
    return split_classes(hidden, settings, rng)
  if settings.partition == names.SIZES:
    return _split_sizes(np.concatenate(hidden), settings, rng)
  if settings.partition == names.GIVEN:
    return take(hidden, _given_counts(hidden, settings))
  if settings.partition in _ROWS:
    return take(hidden, _row_counts(hidden, settings, rng))
  if settings.equal_sizes:
    return take(hidden, _balanced_counts(hidden, settings, rng))
  return _split_dirichlet(hidden, settings, rng)


def split_evenly(
  examples: np.ndarray, num_clients: int, rng: np.random.Generator
) -> list[np.ndarray]:
  """Gives each client equally many examples, at random, without a remainder.

  Args:
    examples: int64 [N].
    num_clients: The number of clients, >= 1.
    rng: The random generator.

  Returns:
    Per client, int64 [floor(N / num_clients)], in random order.

  Examples:
    >>> import numpy as np
    >>> from tff_fssl.data import partition_splits
    >>> rng = np.random.default_rng(0)
    >>> partition_splits.split_evenly(np.arange(7), num_clients=3, rng=rng)
    [array([2, 4]), array([3, 6]), array([5, 0])]
  """
  pool = rng.permutation(examples)
  size = len(pool) // num_clients
  return list(pool[: size * num_clients].reshape(num_clients, size))


def split_classes(
  hidden: list[np.ndarray],
  settings: partition_settings.PartitionSettings,
  rng: np.random.Generator,
) -> list[np.ndarray]:
  """Gives each client examples of exactly so many classes.

  Client k has class k, modulo the number of classes, and others drawn at
  random. Clients that have a class share its examples equally ("#C = k" of
  NIID-Bench, Li et al. 2022). Examples of a class that no client has are left
  out.

  Args:
    hidden: The examples of each class, int64.
    settings: The number of clients, and `classes_per_client`.
    rng: The random generator.

  Returns:
    The examples of each client, class by class.

  Examples:
    >>> import numpy as np
    >>> from tff_fssl.data import partition_splits
    >>> from tff_fssl.data.partition_settings import PartitionSettings
    >>> settings = PartitionSettings(
    ...   3, num_clients=3, num_labels=3, classes_per_client=2
    ... )
    >>> hidden = [np.full(6, c) for c in range(3)]
    >>> rng = np.random.default_rng(0)
    >>> for client in partition_splits.split_classes(hidden, settings, rng):
    ...   print(np.bincount(client, minlength=3))
    [2 3 0]
    [2 3 0]
    [2 0 6]
  """
  num_classes, num_clients = len(hidden), settings.num_clients
  has = np.zeros((num_clients, num_classes), bool)
  for client, row in enumerate(has):
    first = client % num_classes
    others = rng.permutation(np.delete(np.arange(num_classes), first))
    row[[first, *others[: settings.classes_per_client - 1]]] = True
  parts: list[list[np.ndarray]] = [[] for _ in range(num_clients)]
  for members, clients in zip(hidden, map(np.flatnonzero, has.T)):
    pieces = np.array_split(members, max(1, len(clients)))
    for client, piece in zip(clients.tolist(), pieces):
      parts[client].append(piece)
  return [np.concatenate(own) for own in parts]


def _split_sizes(
  examples: np.ndarray,
  settings: partition_settings.PartitionSettings,
  rng: np.random.Generator,
) -> list[np.ndarray]:
  """Gives the k-th client, from 1, k, k^2 or e^k parts of the examples."""
  place = np.arange(1, settings.num_clients + 1)
  parts = {
    names.LINEAR: place,
    names.SQUARE: place**2,
    # Relative to the last client's, for e^k may be infinite.
    names.EXPONENTIAL: np.exp(place - settings.num_clients),
  }[settings.size_skew]
  bounds = np.rint(np.cumsum(parts) / np.sum(parts) * len(examples))
  found = np.split(rng.permutation(examples), bounds[:-1].astype(int))
  smallest = min(map(len, found))
  if not smallest:
    raise UsageError(
      f'--size_skew={settings.size_skew}: the smallest of'
      f' {settings.num_clients} clients would have no example; lower'
      f' --num_clients{settings.or_more_unlabeled}, or choose linear'
    )
  return found


def split_pairs(
  hidden: list[np.ndarray],
  settings: partition_settings.PartitionSettings,
  rng: np.random.Generator | np.random.RandomState,
) -> list[np.ndarray]:
  """Divides equal parts of the examples between two clients each.

  This is the partition of SAGE's code (Liu et al., CVPR 2025), with all of its
  draws: each of the parts, which are IID, is divided by Dirichlet(alpha,
  alpha), class by class, until both clients have a quarter of it. Then all
  examples, in the order of the clients, are cut into clients of equal size. A
  client's surplus therefore goes to its partner, and its lack is filled from
  there.

  Args:
    hidden: The examples of each class, int64.
    settings: The number of clients, which is even, and `concentration`.
    rng: The random generator. `RandomState(0)` gives the published counts.

  Returns:
    The examples of each client.

  Raises:
    UsageError: If no such split is found. Names the flags.

  Examples:
    >>> import numpy as np
    >>> from tff_fssl.data import partition_splits
    >>> from tff_fssl.data.partition_settings import PartitionSettings
    >>> settings = PartitionSettings(2, 2, 2, partition='pairs', alpha=0.1)
    >>> rng = np.random.RandomState(0)
    >>> hidden = [np.zeros(50, np.int64), np.ones(50, np.int64)]
    >>> for client in partition_splits.split_pairs(hidden, settings, rng):
    ...   print(np.bincount(client, minlength=2))
    [ 0 50]
    [50  0]
  """
  sizes = [len(members) for members in hidden]
  total, num_clients = sum(sizes), settings.num_clients
  # Each example's place, so that its class is known after the shuffle.
  order = np.arange(total)
  rng.shuffle(order)
  pool, classes = (
    np.concatenate(hidden),
    np.repeat(np.arange(len(sizes)), sizes),
  )
  size = int(2 / num_clients * total)
  bounds = size * np.arange(1, num_clients // 2)
  parts = []
  for chunk in np.split(order, bounds):
    members = [chunk[classes[chunk] == c] for c in range(len(sizes))]
    parts += _divide_in_two(members, settings, rng)
  return np.array_split(pool[np.concatenate(parts)], num_clients)


def _divide_in_two(
  members: list[np.ndarray],
  settings: partition_settings.PartitionSettings,
  rng: np.random.Generator | np.random.RandomState,
) -> list[np.ndarray]:
  """Draws until the smaller of two clients has a quarter of the examples."""
  total = sum(map(len, members))
  for _ in range(MAX_DRAWS):
    halves: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
    sizes = np.zeros(2)
    for own in members:
      shares = rng.dirichlet([settings.concentration] * 2)
      shares = shares * (sizes < total / 2)
      # Where both are full, no example is left.
      mass = shares.sum() or 1.0
      pieces = np.split(own, [int(shares[0] / mass * len(own))])
      for half, piece in zip(halves, pieces, strict=True):
        half.append(piece)
      sizes += [len(piece) for piece in pieces]
    if np.min(sizes) >= int(0.25 * total):
      return [np.concatenate(half) for half in halves]
  raise UsageError(
    f'--partition=pairs --alpha={settings.alpha:g}: {MAX_DRAWS} draws gave no'
    ' two clients with a quarter of their examples each; raise --alpha, or'
    ' lower --num_clients'
  )


def choose_owners(
  owners: np.ndarray | None,
  labels: np.ndarray,
  settings: partition_settings.PartitionSettings,
) -> np.ndarray:
  """Chooses the owners that are clients.

  They are all owners with an example, or `num_clients` of them, drawn at
  random. A larger number includes the owners of a smaller one.

  Args:
    owners: int [N], the owner of each example, or negative. None: the data set
      has no owners.
    labels: int [N].
    settings: The number of clients, and the seed.

  Returns:
    int64 [clients], ascending.

  Raises:
    UsageError: If the data set has no owners, or too few.

  Examples:
    >>> import numpy as np
    >>> from tff_fssl.data import partition_splits
    >>> from tff_fssl.data.partition_settings import PartitionSettings
    >>> owners, labels = np.array([5, 7, -1, 5, 9]), np.zeros(5, np.int32)
    >>> for num_clients in (0, 1, 2):  # 0: all of them.
    ...   settings = PartitionSettings(2, num_clients, 2, partition='natural')
    ...   print(partition_splits.choose_owners(owners, labels, settings))
    [5 7 9]
    [5]
    [5 7]
  """
  owners = _check_owners(owners, labels, settings)
  present = np.unique(owners[owners >= 0]).astype(np.int64)
  wanted = settings.num_clients or len(present)
  if not 1 <= wanted <= len(present):
    raise UsageError(
      f'--num_clients={settings.num_clients} --partition=natural: the data set'
      f' has {len(present)} clients with examples; 0 takes all of them'
    )
  rng = seeds.generator(settings.seed, seeds.Purpose.NATURAL_CLIENTS)
  return np.sort(rng.permutation(present)[:wanted])


def merge_owners(
  owners: np.ndarray | None,
  owner_names: Sequence[str],
  labels: np.ndarray,
  settings: partition_settings.PartitionSettings,
) -> np.ndarray:
  """Makes clients of the owners of examples.

  `grouped`: each client is a group of whole owners, drawn at random, equally
  many each. `continuous`: the owners' names are numbers. Examples are sorted by
  `strictness` * z + (1 - `strictness`) * noise, where z is the standardized
  number and the noise is standard normal, and cut into equal parts
  (`ContinuousPartitioner` of Flower Datasets).

  Args:
    owners: int [N], the owner of each example, or negative: of no client.
    owner_names: Their names.
    labels: int [N].
    settings: The number of clients, `strictness` and the seed.

  Returns:
    int64 [N], the client of each example, or -1.

  Raises:
    UsageError: If there are no owners, too few, or not called by numbers.

  Examples:
    >>> import numpy as np
    >>> from tff_fssl.data import partition_splits
    >>> from tff_fssl.data.partition_settings import PartitionSettings
    >>> settings = PartitionSettings(2, 2, 2, partition='continuous')
    >>> owners, ages = np.array([2, 0, 1, 0]), ['30', '71.5', '50']
    >>> labels = np.zeros(4, np.int32)
    >>> partition_splits.merge_owners(owners, ages, labels, settings)
    array([1, 0, 1, 0])
  """
  owners = _check_owners(owners, labels, settings)
  rng = seeds.generator(settings.seed, seeds.Purpose.NATURAL_CLIENTS)
  known = np.flatnonzero(owners >= 0)
  num_clients, present = settings.num_clients, np.unique(owners[known])
  available = known if settings.partition == names.CONTINUOUS else present
  if len(available) < num_clients:
    raise UsageError(
      f'--num_clients={num_clients} --partition={settings.partition}: the data'
      f' set has {len(present)} owners of {len(known)} examples; lower'
      ' --num_clients'
    )
  merged = np.full(len(owners), -1)
  if settings.partition == names.GROUPED:
    groups = np.array_split(rng.permutation(present), num_clients)
    for client, group in enumerate(groups):
      merged[np.isin(owners, group)] = client
    return merged
  values = np.full(len(known), np.nan)
  with contextlib.suppress(ValueError):
    values = np.array([float(owner_names[i]) for i in owners[known]])
  if not np.isfinite(values).all():
    raise UsageError(
      f'--partition=continuous: not all owners of examples, such as'
      f' {owner_names[present[0]]!r}, are finite numbers; name a column of'
      ' numbers, --client_field=COLUMN, or choose grouped'
    )
  keys = (values - values.mean()) / (values.std() or 1.0)
  keys *= settings.strictness
  keys += (1 - settings.strictness) * rng.standard_normal(len(known))
  order = known[np.argsort(keys, kind='stable')]
  for client, part in enumerate(np.array_split(order, num_clients)):
    merged[part] = client
  return merged


def _check_owners(
  owners: np.ndarray | None,
  labels: np.ndarray,
  settings: partition_settings.PartitionSettings,
) -> np.ndarray:
  """Returns the owners as an array, or raises `UsageError`."""
  if owners is None:
    raise UsageError(
      f'--partition={settings.partition}: the data set does not record owners'
      ' of examples; iid, dirichlet and shards make clients of any data set'
    )
  owners = np.asarray(owners)
  if owners.shape != labels.shape or not np.issubdtype(
    owners.dtype, np.integer
  ):
    raise UsageError(
      f'owners of {len(labels)} examples must be integers [{len(labels)}], not'
      f' {owners.dtype} {list(owners.shape)}'
    )
  return owners


def split_by_owner(
  hidden: list[np.ndarray], owners: np.ndarray, clients: np.ndarray
) -> list[np.ndarray]:
  """Gives each client its own examples, and drops examples of others.

  Args:
    hidden: Groups of examples, int64.
    owners: int [N], the owner of each example.
    clients: The owners that are clients, ascending.

  Returns:
    The examples of each client, ascending, perhaps none.

  Examples:
    >>> import numpy as np
    >>> from tff_fssl.data import partition_splits
    >>> owners, clients = np.array([5, 7, -1, 5, 9]), np.array([5, 7])
    >>> hidden = [np.array([0, 1, 2]), np.array([3, 4])]
    >>> partition_splits.split_by_owner(hidden, owners, clients)
    [array([0, 3]), array([1])]
  """
  pool = np.sort(np.concatenate(hidden))
  # A client's examples stay ascending.
  pool = pool[np.argsort(owners[pool], kind='stable')]
  starts = np.searchsorted(owners[pool], clients, 'left')
  stops = np.searchsorted(owners[pool], clients, 'right')
  return [pool[start:stop] for start, stop in zip(starts, stops)]


def take(hidden: list[np.ndarray], counts: np.ndarray) -> list[np.ndarray]:
  """Gives each client the next examples of each class, while they last.

  Args:
    hidden: The examples of each class, int64.
    counts: int64 [clients, classes], a client's numbers of examples, >= 0.

  Returns:
    The examples of each client, class by class.

  Examples:
    >>> import numpy as np
    >>> from tff_fssl.data import partition_splits
    >>> hidden = [np.array([10, 11, 12]), np.array([20, 21])]
    >>> counts = np.array([[2, 0], [1, 1]])
    >>> partition_splits.take(hidden, counts)
    [array([10, 11]), array([12, 20])]
  """
  pieces = [
    np.split(members, np.minimum(np.cumsum(sizes), len(members)))[:-1]
    for members, sizes in zip(hidden, counts.T)
  ]
  return [np.concatenate(own) for own in zip(*pieces)]


def _given_counts(
  hidden: list[np.ndarray], settings: partition_settings.PartitionSettings
) -> np.ndarray:
  """Cuts each class in proportion to its column of `class_shares`."""
  # Python's integers, so that no product overflows.
  parts = np.cumsum(np.array(settings.shares, object), axis=0)
  sizes = np.array([len(members) for members in hidden], object)
  # A class without shares goes to no client.
  ends = (parts * sizes // np.maximum(parts[-1], 1)).astype(np.int64)
  return np.diff(ends, axis=0, prepend=0)


def row_counts(partition: str, client: int, size: int) -> np.ndarray:
  """Computes the counts of each class at a client of `fedmatch` or `extreme`.

  Shares of the row are rounded to the nearest number, halves to the odd one.
  The client's main class takes the difference. Only this rounding of halves
  gives all counts that ProtoFSSL publishes.

  Args:
    partition: `names.FEDMATCH` or `names.EXTREME`.
    client: The client.
    size: The sum of the counts.

  Returns:
    int64 [10].

  Examples:
    >>> from tff_fssl.data import partition_splits
    >>> for client in (0, 1):
    ...   print(partition_splits.row_counts('fedmatch', client, size=490))
    [244  73  15  15  15  10  15  15  15  73]
    [ 73 244  73  15  15  15  10  15  15  15]
  """
  counts, rest = np.divmod(size * _ROWS[partition], 100)
  counts += (rest > 50) | ((rest == 50) & (counts % 2 == 0))
  counts[0] += size - counts.sum()
  return np.roll(counts, client % len(counts))


def _row_counts(
  hidden: list[np.ndarray],
  settings: partition_settings.PartitionSettings,
  rng: np.random.Generator,
) -> np.ndarray:
  """Computes counts [clients, classes] of `fedmatch` or `extreme`."""
  clients = range(settings.num_clients)
  available = np.array([len(members) for members in hidden])
  size = int(available.sum()) // settings.num_clients
  if settings.class_draws == names.MULTINOMIAL:
    row = _ROWS[settings.partition] / 100
    return np.array(
      [rng.multinomial(size, np.roll(row, k % 10)) for k in clients]
    )
  in_row = np.bincount(np.arange(settings.num_clients) % 10, minlength=10)
  while True:
    # If a client labels its own examples, both parts follow the row.
    labeled = min(settings.num_labels, size) if settings.labels_own else 0
    rows = np.array(
      [
        row_counts(settings.partition, k, labeled)
        + row_counts(settings.partition, k, size - labeled)
        # The rows of clients repeat after ten.
        for k in range(10)
      ]
    )
    if np.all(in_row @ rows <= available):
      return rows[np.arange(settings.num_clients) % 10]
    # Rounded counts may need more examples of a class than exist.
    size -= 1


def _balanced_counts(
  hidden: list[np.ndarray],
  settings: partition_settings.PartitionSettings,
  rng: np.random.Generator,
) -> np.ndarray:
  """Draws counts [clients, classes] for clients of one size.

  An exhausted class is not drawn, and the others' proportions grow.
  """
  left = np.array([len(members) for members in hidden])
  size = int(left.sum()) // settings.num_clients
  concentration = np.full(len(left), settings.concentration)
  counts = np.zeros((settings.num_clients, len(left)), np.int64)
  for row in counts:
    proportions = rng.dirichlet(concentration)
    while missing := int(size - row.sum()):
      open_ = np.where(left > 0, proportions, 0)
      # A very small alpha gives all to one class, which may be exhausted.
      open_ = open_ if open_.sum() > 0 else left.astype(float)
      drawn = rng.multinomial(missing, open_ / open_.sum())
      drawn = np.minimum(drawn, left)
      row += drawn
      left -= drawn
  return counts


def _split_shards(
  hidden: list[np.ndarray],
  settings: partition_settings.PartitionSettings,
  rng: np.random.Generator,
) -> list[np.ndarray]:
  """Cuts the examples, sorted by class, and draws shards for each client."""
  pool = np.concatenate(hidden)
  each = settings.shards_per_client
  count = settings.num_clients * each
  if len(pool) < count:
    raise UsageError(
      f'--shards_per_client={each}: {settings.num_clients} clients would need'
      f' {count} shards of one example or more, but {len(pool)} examples remain'
      f' for them; lower it, or --num_clients{settings.or_more_unlabeled}'
    )
  bounds = np.arange(1, count) * len(pool) // count
  shards = np.split(pool, bounds)
  drawn = rng.permutation(count).reshape(-1, each)
  return [np.concatenate([shards[i] for i in row]) for row in drawn]


def _split_dirichlet(
  hidden: list[np.ndarray],
  settings: partition_settings.PartitionSettings,
  rng: np.random.Generator,
) -> list[np.ndarray]:
  """Draws until every client has enough examples, at most `MAX_DRAWS` times."""
  num_clients = settings.num_clients
  min_client_examples = settings.min_client_examples
  total = sum(len(members) for members in hidden)
  if num_clients * min_client_examples > total:
    raise UsageError(
      f'--min_client_examples={min_client_examples}: {num_clients} clients'
      f' would need {num_clients * min_client_examples} examples, but {total}'
      f' remain for them; set it to at most {total // num_clients}, or lower'
      f' --num_clients{settings.or_more_unlabeled}'
    )
  best = 0
  for _ in range(MAX_DRAWS):
    counts = _draw_dirichlet(hidden, num_clients, settings.concentration, rng)
    if counts is None:
      continue
    smallest = int(counts.sum(axis=1).min())
    if smallest >= min_client_examples:
      return take(hidden, counts)
    best = max(best, smallest)
  raise UsageError(
    f'--partition=dirichlet --alpha={settings.alpha:g}'
    f' --num_clients={num_clients}: {MAX_DRAWS} draws gave no split in which'
    f' every client has --min_client_examples={min_client_examples} of the'
    f' {total} examples; the best had {best}. Set'
    f' --min_client_examples={best} or less, raise --alpha, or lower'
    f' --num_clients{settings.or_more_unlabeled}'
  )


def _draw_dirichlet(
  hidden: list[np.ndarray],
  num_clients: int,
  alpha: float,
  rng: np.random.Generator,
) -> np.ndarray | None:
  """Draws the number of examples of each class at each client once.

  Args:
    hidden: The examples of each class.
    num_clients: The number of clients.
    alpha: Parameter of the Dirichlet distribution.
    rng: The random generator.

  Returns:
    int64 [clients, classes], or None if a draw gave all examples of a class to
    full clients.
  """
  full = sum(len(members) for members in hidden) / num_clients
  counts = np.zeros((num_clients, len(hidden)), np.int64)
  sizes = np.zeros(num_clients, np.int64)
  for members, own in zip(hidden, counts.T):
    proportions = rng.dirichlet(np.full(num_clients, alpha))
    # After the draw, so that those of other classes stay the same.
    if not len(members):
      continue
    proportions[sizes >= full] = 0
    mass = proportions.sum()
    # A very small alpha gives everything to one client (or underflows).
    if not mass > 0:
      return None
    ends = np.cumsum(proportions / mass) * len(members)
    cuts = np.minimum(ends[:-1].astype(np.int64), len(members))
    own[:] = np.diff(cuts, prepend=0, append=len(members))
    sizes += own
  return counts
