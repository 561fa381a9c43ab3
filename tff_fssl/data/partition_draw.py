"""Partitions training examples among the server, validation and the clients.

A partition is a function of the labels, the settings and the seed. The label
split and the IID and Dirichlet partitions are those of (FL)^2's published code.
docs/partitions.md names the sources of the others. The steps:

1.  Each class is shuffled. Its first examples are labelled, equally many in
    every class: `num_labels` in total at the server, or `num_labels` for each
    client that holds labels. If only some clients hold labels, they are drawn
    (with `own` or `natural`, from those that have enough examples to label),
    and a larger number includes the clients of a smaller one. With
    `client_label_classes`, each client gets equally many labels of so many
    classes. These are the classes that the fewest clients have so far, in
    random order. The sets of classes are then assigned to clients at random.
    `client_labels=split`: the labelled examples of all clients are split as
    step 3 splits the others, in a draw of their own. Where the data put
    examples at the server, no client gets these. The server's labels are
    `num_labels` of them, or all (0).
2.  The validation examples are the last ones of each shuffled class, equally
    many if classes have enough. (At the end, their number does not change the
    labelled examples.) Where the server has examples, they are some of these.
    With `split_by=client`, whole owners are drawn before step 1, until they
    have enough examples of known class; their other examples are not used.
    `num_unlabeled` draws so many of the remaining examples
    (with `natural`, of the clients' examples). With `own` labels, it also draws
    the examples that step 5 labels. The others are not used. A larger number
    includes the examples of a smaller one.
3.  The rest goes to the clients, unlabelled. `iid`: each gets
    floor(rest / clients) random examples, without the remainder. `dirichlet`:
    for each class, in the order of step 1, p ~ Dirichlet(alpha) over clients is
    drawn, p is set to 0 for clients with rest / clients examples or more, and
    the class is cut at floor(cumsum(p) * size). The draw of all classes is
    repeated until every client has `min_client_examples`, at most
    `partition_splits.MAX_DRAWS` times. docs/partitions.md describes the other
    partitions. Examples of unknown class are split evenly, as with `iid`, but
    with `natural` they stay with their owners.
4.  `client_test_fraction`: each client holds out that share of its examples of
    known class for evaluation, in proportion for each class. The number is
    rounded, but a client with two or more holds out at least one, and not all.
5.  `client_labels=own`: step 1 labels nothing. Instead each client that holds
    labels draws `num_labels` of its examples of known class. If its classes
    are exact shares (`class_draws`), its labels are, too.
6.  `full_labels`: all examples of known class of a client that holds labels
    are labelled (the upper bound, if all clients do).
7.  `label_noise`: that share of the labelled examples, drawn at random, gets a
    wrong label, drawn evenly from the other classes. A larger share includes
    the wrong labels of a smaller one.
"""

from collections.abc import Sequence
import dataclasses
from typing import Any

import numpy as np

from tff_fssl.data import names
from tff_fssl.data import partition as partition_lib
from tff_fssl.data import partition_settings
from tff_fssl.data import partition_splits
from tff_fssl.data import seeds
from tff_fssl.data import sources
from tff_fssl.hparams import UsageError

_NONE = np.zeros(0, np.int64)
# In place of the label of an example that nobody trains on.
_UNUSED = -2


def build_partition(
  labels: np.ndarray,
  settings: partition_settings.PartitionSettings,
  owners: np.ndarray | None = None,
  client_names: Sequence[str] = (),
  server: np.ndarray | None = None,
) -> partition_lib.Partition:
  """Partitions training examples, in the steps above.

  Args:
    labels: int [N], the true classes of the training examples, or
      `names.UNKNOWN_LABEL`.
    settings: All settings, by whose names the steps are described.
    owners: int [N], the owner of each example, or -1 (`natural`, `split_by`).
    client_names: The names of the owners.
    server: bool [N], the examples that the data put at the server. None: the
      labels of the server are drawn from all examples. All: nobody knows here
      what clients have, and they get nothing.

  Returns:
    The partition.

  Raises:
    UsageError: If the settings cannot be satisfied. Names the flags.

  Examples:
    >>> import numpy as np
    >>> from tff_fssl.data import partition_draw
    >>> from tff_fssl.data.partition_settings import PartitionSettings
    >>> labels = np.arange(300) % 3
    >>> settings = PartitionSettings(
    ...   3, num_clients=4, num_labels=6, partition='dirichlet', alpha=0.3
    ... )
    >>> partition = partition_draw.build_partition(labels, settings)
    >>> partition.class_counts
    array([[ 0, 11, 31],
           [97,  0,  0],
           [ 0, 86,  0],
           [ 1,  1, 67]])
  """
  labels = np.asarray(labels)
  num_classes = settings.num_classes
  _check_labels(labels, num_classes)
  if server is not None and server.all():
    return _partition_server(labels, settings)
  server = np.zeros(len(labels), bool) if server is None else server
  validation, pool, owners = _hold_out_owners(labels, owners, settings, server)
  owners, natural, client_names = _clients_of_owners(
    labels, owners, client_names, settings
  )
  if len(natural):
    settings = dataclasses.replace(settings, num_clients=len(natural))
  rng = seeds.generator(settings.seed, seeds.Purpose.LABEL_SPLIT)
  shuffled = [
    rng.permutation(np.flatnonzero(pool == c)) for c in range(num_classes)
  ]
  at_server = settings.scenario == names.LABELS_AT_SERVER
  labeled, others, hidden = _split_known(
    shuffled, settings, server, settings.num_validation - len(validation)
  )
  num_holders = settings.num_labeled_clients
  num_holders += settings.num_clients * (at_server and settings.full_labels)
  unknown = np.flatnonzero((pool == names.UNKNOWN_LABEL) & ~server)
  unlabeled = _split_unlabeled(
    hidden, unknown, settings, num_holders, owners, natural
  )
  client_test = _hold_out(labels, settings, unlabeled)
  client_labeled = _label_clients(
    labels, settings, client_names, labeled, unlabeled
  )
  return _make(
    labels,
    settings,
    server_labeled=labeled[0] if at_server else _NONE,
    validation=np.sort(np.concatenate([validation, others])),
    client_labeled=client_labeled,
    client_unlabeled=unlabeled,
    client_names=tuple(client_names),
    client_test=client_test,
  )


def _clients_of_owners(
  labels: np.ndarray,
  owners: np.ndarray | None,
  owner_names: Sequence[str],
  settings: partition_settings.PartitionSettings,
) -> tuple[np.ndarray | None, np.ndarray, Sequence[str]]:
  """Finds the owners that are clients: (owners of examples, those, names)."""
  if settings.partition not in names.OF_OWNERS:
    return owners, _NONE, ()
  if settings.partition == names.NATURAL:
    natural = partition_splits.choose_owners(owners, labels, settings)
    return owners, natural, [owner_names[i] for i in natural.tolist()]
  owners = partition_splits.merge_owners(owners, owner_names, labels, settings)
  return owners, np.arange(settings.num_clients), ()


def _check_labels(labels: np.ndarray, num_classes: int) -> None:
  """Raises `UsageError` for labels that are not classes of their examples."""
  if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer):
    raise UsageError(
      f'labels must be integers [N], not {labels.dtype} {list(labels.shape)}'
    )
  sources.check_labels(labels, names.UNKNOWN_LABEL, num_classes)


def _make(
  labels: np.ndarray,
  settings: partition_settings.PartitionSettings,
  **held: Any,
) -> partition_lib.Partition:
  """Makes a partition of those who hold examples, and draws wrong labels."""
  partition = partition_lib.Partition(
    **held,
    class_counts=partition_lib.count_classes(
      labels,
      held['client_labeled'],
      held['client_unlabeled'],
      settings.num_classes,
    ),
    settings=settings,
    num_examples=len(labels),
  )
  labeled = partition.labeled
  rng = seeds.generator(settings.seed, seeds.Purpose.LABEL_NOISE)
  # All draws are made for any noise, so that a larger one adds wrong labels.
  order = rng.permutation(len(labeled))
  shifts = rng.integers(1, settings.num_classes, len(labeled))
  count = round(settings.label_noise * len(labeled))
  drawn = np.sort(order[:count])
  wrong = (labels[labeled[drawn]] + shifts[drawn]) % settings.num_classes
  return dataclasses.replace(
    partition,
    wrong_examples=labeled[drawn],
    wrong_labels=wrong.astype(np.int64),
  )


def _draw_unlabeled(
  groups: list[np.ndarray],
  settings: partition_settings.PartitionSettings,
  num_holders: int,
) -> list[np.ndarray]:
  """Keeps the examples that `num_unlabeled` draws.

  Args:
    groups: The examples that clients may get, in any groups.
    settings: The number of examples, and the seed.
    num_holders: The number of clients with labels. With `labels_own`, examples
      for their labels are drawn as well.

  Returns:
    The drawn examples of each group, in the same order.

  Raises:
    UsageError: If the groups have too few. Names the flags.
  """
  if not settings.num_unlabeled:
    return groups
  # Sorted, so that the draw does not depend on the groups.
  pool = np.sort(np.concatenate(groups))
  num_own = settings.num_labels * num_holders if settings.labels_own else 0
  wanted = settings.num_unlabeled + num_own
  if wanted > len(pool):
    labels = f' besides their {num_own} labels' if num_own else ''
    raise UsageError(
      f'--num_unlabeled={settings.num_unlabeled}: only'
      f' {max(len(pool) - num_own, 0)} training examples remain for the'
      f' clients{labels}; set it to at most that, or to 0 for all, or lower'
      ' --num_labels or --num_validation'
    )
  rng = seeds.generator(settings.seed, seeds.Purpose.UNLABELED)
  is_drawn = np.zeros(pool[-1] + 1, bool)
  is_drawn[rng.permutation(pool)[:wanted]] = True
  return [group[is_drawn[group]] for group in groups]


def _split_unlabeled(
  hidden: list[np.ndarray],
  unknown: np.ndarray,
  settings: partition_settings.PartitionSettings,
  num_holders: int,
  owners: np.ndarray | None,
  natural: np.ndarray,
) -> list[np.ndarray]:
  """Splits unlabelled examples, per class, over the clients.

  Args:
    hidden: The examples of each class.
    unknown: The examples of unknown class.
    settings: The split.
    num_holders: The number of clients with labels. If all clients have labels
      besides their share, the share may be empty.
    owners: int [N], the owner of each example (`natural`).
    natural: The owners that are clients, or none for other splits.

  Returns:
    The examples of each client, ascending.

  Raises:
    UsageError: If the examples are too few. Names the flags.
  """
  if len(natural):
    assert owners is not None
    hidden = partition_splits.split_by_owner(
      [*hidden, unknown], owners, natural
    )
    return _draw_unlabeled(hidden, settings, num_holders)
  *hidden, unknown = _draw_unlabeled([*hidden, unknown], settings, num_holders)
  num_clients = settings.num_clients
  all_have_labels = num_holders == num_clients and not settings.labels_own
  may_be_empty = bool(all_have_labels and settings.num_labels)
  num_hidden = sum(len(c) for c in hidden) + len(unknown)
  if num_hidden < num_clients and not may_be_empty:
    raise UsageError(
      f'--num_clients={num_clients}: only {num_hidden} training examples'
      ' remain for the clients; set it to at most that, or lower --num_labels'
      ' or --num_validation'
    )
  split = partition_splits.split(hidden, settings)
  rng = seeds.generator(settings.seed, seeds.Purpose.UNKNOWN_LABELS)
  also = partition_splits.split_evenly(unknown, num_clients, rng)
  shares = [np.sort(np.concatenate(a)) for a in zip(split, also)]
  if settings.num_unlabeled and not any(map(len, shares)):
    raise UsageError(
      f'--num_unlabeled={settings.num_unlabeled} --partition='
      f'{settings.partition}: has shares that so few examples do not allow;'
      ' raise --num_unlabeled, or lower --num_clients'
    )
  if not any(map(len, shares)) and not may_be_empty:
    sizes = [len(members) for members in hidden]
    fewest = int(np.argmin(sizes))
    raise UsageError(
      f'--partition={settings.partition}: no client gets an example, since'
      f' class {fewest} has only {sizes[fewest]} left for {num_clients}'
      ' clients; lower --num_labels, --num_validation or --num_clients'
    )
  return shares


def _hold_out(
  labels: np.ndarray,
  settings: partition_settings.PartitionSettings,
  unlabeled: list[np.ndarray],
) -> list[np.ndarray]:
  """Removes each client's evaluation examples from its share, in place."""
  held_out: list[np.ndarray] = []
  if not settings.client_test_fraction:
    return held_out
  for client, share in enumerate(unlabeled):
    purpose = seeds.Purpose.CLIENT_TEST
    rng = seeds.generator(settings.seed, purpose, client)
    known = rng.permutation(share[labels[share] != names.UNKNOWN_LABEL])
    most = max(len(known) - 1, 0)
    wanted = round(settings.client_test_fraction * len(known))
    wanted = min(max(wanted, 1), most)
    # Quotas are rounded down. The largest remainders get the rest, and equal
    # remainders are ordered at random.
    sizes = np.bincount(labels[known], minlength=settings.num_classes)
    exact = sizes * (wanted / max(len(known), 1))
    quotas = np.floor(exact).astype(np.int64)
    order = rng.permutation(settings.num_classes)
    order = order[np.argsort((quotas - exact)[order], kind='stable')]
    quotas[order[: wanted - quotas.sum()]] += 1
    chosen = [known[labels[known] == c][:q] for c, q in enumerate(quotas)]
    held_out.append(np.sort(np.concatenate(chosen)))
    unlabeled[client] = np.setdiff1d(share, held_out[-1], assume_unique=True)
  if not sum(map(len, held_out)):
    raise UsageError(
      f'--client_test_fraction={settings.client_test_fraction:g}: no client has'
      ' two unlabelled examples of known class, to hold out one; lower'
      ' --num_labels or --num_clients, or set it to 0'
    )
  return held_out


def _labeled_clients(
  settings: partition_settings.PartitionSettings, num_known: np.ndarray
) -> list[int]:
  """Draws the clients that hold labels, also by `full_labels`.

  Args:
    settings: The number of these clients, and the seed.
    num_known: int [clients], the numbers of examples that clients could label.

  Returns:
    The clients, ascending. Clients that label their own examples come from
    those that have enough, while there are any.

  Raises:
    UsageError: If too few natural clients have an example to label.
  """
  every, num = settings.num_clients, settings.num_labeled_clients
  if settings.scenario == names.LABELS_AT_SERVER:
    return list(range(every)) if settings.full_labels else []
  if num == every:
    return list(range(every))
  rng = seeds.generator(settings.seed, seeds.Purpose.LABELED_CLIENTS)
  order = rng.permutation(every)
  if settings.labels_own or settings.partition in names.OF_OWNERS:
    can_label = num_known >= (settings.num_labels if settings.labels_own else 1)
    order = order[np.argsort(~can_label[order], kind='stable')]
    if can_label.sum() < num and not settings.labels_own:
      raise UsageError(
        f'--labeled_clients={settings.labeled_clients}: only {can_label.sum()}'
        ' clients have an example of known class; set it to at most that'
      )
  return sorted(order[:num].tolist())


def _label_clients(
  labels: np.ndarray,
  settings: partition_settings.PartitionSettings,
  client_names: Sequence[str],
  labeled: list[np.ndarray],
  unlabeled: list[np.ndarray],
) -> list[np.ndarray]:
  """Returns the labelled examples of each client.

  Those that clients take from their own ones are removed from `unlabeled`.
  """
  known = [np.flatnonzero(labels[a] != names.UNKNOWN_LABEL) for a in unlabeled]
  holders = _labeled_clients(settings, np.array([*map(len, known)]))
  client_labeled = [_NONE] * settings.num_clients
  if settings.scenario != names.LABELS_AT_SERVER:
    for client, held in zip(holders, labeled, strict=True):
      client_labeled[client] = held
  if settings.labels_own:
    _check_own(settings, holders, client_names, [*map(len, known)])
    _label_own(labels, settings, holders, known, client_labeled, unlabeled)
  if settings.full_labels:
    _label_all(labels, holders, client_labeled, unlabeled)
  return client_labeled


def _check_own(
  settings: partition_settings.PartitionSettings,
  holders: list[int],
  client_names: Sequence[str],
  num_known: Sequence[int],
) -> None:
  """Refuses clients with fewer examples than labels (`UsageError`)."""
  num = settings.num_labels
  fewest = min(holders, key=lambda client: num_known[client])
  most = num_known[fewest]
  if most >= num:
    return
  remedies = [f'set it to at most {most}'] if most else []
  if num_able := sum(known >= num for known in num_known):
    remedies.append(f'set --labeled_clients to at most {num_able}')
  remedies.append('lower --num_clients')
  if settings.partition == names.DIRICHLET and not settings.equal_sizes:
    remedies.append('raise --min_client_examples')
  name = f' ({client_names[fewest]})' if client_names else ''
  raise UsageError(
    f'--num_labels={num} --client_labels={names.OWN}: client {fewest}{name} has'
    f' {most} examples to label; {", or ".join(remedies)}'
    + settings.or_more_unlabeled
  )


def _label_own(
  labels: np.ndarray,
  settings: partition_settings.PartitionSettings,
  holders: list[int],
  known: list[np.ndarray],
  labeled: list[np.ndarray],
  unlabeled: list[np.ndarray],
) -> None:
  """Labels examples of each client that holds labels, in place."""
  num = settings.num_labels
  for client in holders:
    purpose = seeds.Purpose.CLIENT_LABELS
    rng = seeds.generator(settings.seed, purpose, client)
    order = rng.permutation(known[client])
    if settings.has_rows and settings.class_draws == names.EXACT:
      classes = labels[unlabeled[client][order]]
      counts = partition_splits.row_counts(settings.partition, client, num)
      chosen = np.concatenate(
        [order[classes == c][:n] for c, n in enumerate(counts)]
      )
      # Held-out examples may leave too few of a class: others fill up.
      order = np.concatenate([chosen, order[~np.isin(order, chosen)]])
    is_labeled = np.zeros(len(unlabeled[client]), bool)
    is_labeled[order[:num]] = True
    labeled[client] = unlabeled[client][is_labeled]
    unlabeled[client] = unlabeled[client][~is_labeled]


def _label_all(
  labels: np.ndarray,
  holders: list[int],
  labeled: list[np.ndarray],
  unlabeled: list[np.ndarray],
) -> None:
  """Labels all examples of clients that hold labels, in place."""
  for client in holders:
    is_known = labels[unlabeled[client]] != names.UNKNOWN_LABEL
    also = unlabeled[client][is_known]
    labeled[client] = np.sort(np.concatenate([labeled[client], also]))
    unlabeled[client] = unlabeled[client][~is_known]


def _split_labels(
  shuffled: list[np.ndarray],
  settings: partition_settings.PartitionSettings,
  num_holders: int,
) -> tuple[list[np.ndarray], list[np.ndarray]]:
  """Labels examples: (labelled examples per holder, the rest per class).

  Args:
    shuffled: The examples of each class.
    settings: The numbers of labels and of their classes, and the seed.
    num_holders: The number of holders of labels: 1 for the server, or clients.

  Raises:
    UsageError: If a class has too few examples. Names the flags.
  """
  if settings.labels_split:
    return _split_all_labels(shuffled, settings)
  at_server = settings.scenario == names.LABELS_AT_SERVER
  # A natural client cannot get labels of examples that it does not own.
  is_natural = settings.partition in names.OF_OWNERS and not at_server
  takes_own = settings.labels_own or is_natural
  per_class = 0 if takes_own else settings.num_labels // settings.label_classes
  counts = _label_counts(settings, num_holders, per_class)
  wanted, holders = counts.sum(0), np.count_nonzero(counts, axis=0)
  for c, members in enumerate(shuffled):
    if len(members) < wanted[c]:
      most = min(len(m) // n for m, n in zip(shuffled, holders) if n)
      each = ' for each client' if num_holders > 1 else ''
      some = 'each class' if len(set(wanted)) == 1 else 'some classes'
      raise UsageError(
        f'--num_labels={counts[0].sum()}{each} needs {wanted[c]} examples of'
        f' {some}, but class {c} has {len(members)}; set it to at most'
        f' {most * settings.label_classes}'
      )
  labeled = partition_splits.take(shuffled, counts)
  return list(map(np.sort, labeled)), [m[n:] for m, n in zip(shuffled, wanted)]


def _partition_server(
  labels: np.ndarray, settings: partition_settings.PartitionSettings
) -> partition_lib.Partition:
  """Partitions the examples of a server whose clients are elsewhere."""
  if not settings.num_clients:
    raise UsageError('--num_clients=0: give how many clients there are')
  rng = seeds.generator(settings.seed, seeds.Purpose.LABEL_SPLIT)
  own = [
    rng.permutation(np.flatnonzero(labels == c))
    for c in range(settings.num_classes)
  ]
  labeled, validation = _split_own(own, settings)
  at_server = settings.scenario == names.LABELS_AT_SERVER
  nothing = [_NONE] * settings.num_clients
  return _make(
    labels,
    settings,
    server_labeled=labeled if at_server else _NONE,
    validation=validation,
    client_labeled=nothing,
    client_unlabeled=nothing,
    client_test=nothing * bool(settings.client_test_fraction),
  )


def _split_known(
  shuffled: list[np.ndarray],
  settings: partition_settings.PartitionSettings,
  server: np.ndarray,
  num_validation: int,
) -> tuple[list[np.ndarray], np.ndarray, list[np.ndarray]]:
  """Labels examples, and sets some aside for validation.

  Args:
    shuffled: The examples of each class.
    settings: The numbers, and the seed.
    server: bool [N], the examples that the data put at the server.
    num_validation: The number of validation examples to be found here.

  Returns:
    (labelled examples of each holder, those for validation, the rest of each
    class, for the clients).
  """
  hidden = [members[~server[members]] for members in shuffled]
  own = [members[server[members]] for members in shuffled]
  if server.any() and settings.scenario == names.LABELS_AT_SERVER:
    labeled, validation = _split_own(own, settings)
    return [labeled], validation, hidden
  settings.check_labels()
  num_holders = settings.num_labeled_clients or 1
  all_labeled, hidden = _split_labels(hidden, settings, num_holders)
  if server.any():
    return all_labeled, _split_own(own, settings)[1], hidden
  hidden, validation = _split_validation(hidden, num_validation, settings.seed)
  return all_labeled, validation, hidden


def _split_own(
  own: list[np.ndarray], settings: partition_settings.PartitionSettings
) -> tuple[np.ndarray, np.ndarray]:
  """Splits the server's examples, per class: (labelled, for validation)."""
  at_server = settings.scenario == names.LABELS_AT_SERVER
  total, seed = sum(map(len, own)), settings.seed
  num_labels = settings.num_labels if at_server else 0
  wanted = settings.num_validation + (num_labels or at_server)
  if wanted > total:
    labels = f' --num_labels={num_labels}' if at_server else ''
    raise UsageError(
      f'--num_validation={settings.num_validation}{labels}: the data set puts'
      f' {total} labelled examples at the server, which has no others; lower'
      f' them to at most {total} together'
      + (', or omit --num_labels for all of them' if num_labels else '')
    )
  if num_labels:
    (labeled,), rest = _split_labels(own, settings, 1)
    return labeled, _split_validation(rest, settings.num_validation, seed)[1]
  rest, validation = _split_validation(own, settings.num_validation, seed)
  return np.sort(np.concatenate(rest)), validation


def _split_all_labels(
  shuffled: list[np.ndarray], settings: partition_settings.PartitionSettings
) -> tuple[list[np.ndarray], list[np.ndarray]]:
  """Labels examples as `_split_labels` does, and splits them by partition."""
  num_clients = settings.num_clients
  each = settings.num_labels * num_clients // settings.num_classes
  fewest = min(map(len, shuffled))
  if fewest < each:
    raise UsageError(
      f'--num_labels={settings.num_labels} for each client needs {each}'
      f' examples of each class, but one has {fewest}; set it to at most'
      f' {fewest * settings.num_classes // num_clients}'
    )
  labeled = partition_splits.split(
    [members[:each] for members in shuffled],
    # A client may have no labels.
    dataclasses.replace(settings, min_client_examples=0),
    seeds.Purpose.LABEL_PARTITION,
  )
  return list(map(np.sort, labeled)), [m[each:] for m in shuffled]


def _label_counts(
  settings: partition_settings.PartitionSettings,
  num_holders: int,
  per_class: int,
) -> np.ndarray:
  """Draws the number of labels of each class, int64 [holders, classes]."""
  counts = np.zeros((num_holders, settings.num_classes), np.int64)
  if settings.label_classes == settings.num_classes:
    return counts + per_class
  rng = seeds.generator(settings.seed, seeds.Purpose.LABEL_CLASSES)
  uses = np.zeros(settings.num_classes, np.int64)
  for row in counts:
    order = rng.permutation(settings.num_classes)
    # The classes with the fewest uses, in random order.
    order = order[np.argsort(uses[order], kind='stable')]
    chosen = order[: settings.label_classes]
    row[chosen] = per_class
    uses[chosen] += 1
  # Successive rows have different classes by construction: shuffle them.
  return rng.permutation(counts)


def _hold_out_owners(
  labels: np.ndarray,
  owners: np.ndarray | None,
  settings: partition_settings.PartitionSettings,
  server: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
  """Draws whole owners for validation, if it is split by them.

  Args:
    labels: int [N].
    owners: int [N], or None.
    settings: The number of validation examples, and the seed.
    server: bool [N], the server's examples: if there are some, validation is
      on these, and no owner is drawn.

  Returns:
    The validation examples, int64, ascending; `labels` and `owners`, with
    `_UNUSED` and -1 for all examples of these owners.

  Raises:
    UsageError: If there are too few owners. Names the flags.
  """
  is_wanted = settings.num_validation and settings.split_by == names.CLIENT
  if not is_wanted or server.any():
    return _NONE, labels, owners
  given = f'--split_by={names.CLIENT}'
  if owners is None:
    raise UsageError(
      f'{given}: the data set does not record the clients of its examples; omit'
      ' it'
    )
  wanted, is_known = settings.num_validation, labels != names.UNKNOWN_LABEL
  able, sizes = np.unique(owners[is_known & (owners >= 0)], return_counts=True)
  rng = seeds.generator(settings.seed, seeds.Purpose.VALIDATION_CLIENTS)
  order = rng.permutation(len(able))
  ends = np.cumsum(sizes[order])
  # A client at least is left to train.
  most = int(ends[-2]) if len(ends) > 1 else 0
  if wanted > most:
    raise UsageError(
      f'--num_validation={wanted} {given}: {len(able)} clients have examples of'
      f' known class, and all but one of them {most}; set it to at most that'
    )
  chosen = able[order[: np.searchsorted(ends, wanted) + 1]]
  # The last one may have more than are wanted.
  *whole, last = (np.flatnonzero(is_known & (owners == c)) for c in chosen)
  missing = wanted - sum(map(len, whole))
  validation = np.concatenate([*whole, rng.permutation(last)[:missing]])
  is_held = np.isin(owners, chosen)
  return (
    np.sort(validation),
    np.where(is_held, _UNUSED, labels),
    np.where(is_held, -1, owners),
  )


def _split_validation(
  hidden: list[np.ndarray], num_validation: int, seed: int
) -> tuple[list[np.ndarray], np.ndarray]:
  """Takes validation examples from the ends of the classes."""
  available = sum(len(members) for members in hidden)
  if num_validation > available:
    raise UsageError(
      f'--num_validation={num_validation}: only {available} training examples'
      ' are not labelled; set it to less, so that some remain for the clients'
    )
  quotas = np.zeros(len(hidden), np.int64)
  sizes = np.array([len(members) for members in hidden])
  # A remainder is taken from randomly chosen classes.
  order = seeds.generator(seed, seeds.Purpose.VALIDATION).permutation(
    len(hidden)
  )
  while (rest := num_validation - quotas.sum()) > 0:
    open_classes = order[sizes[order] > quotas[order]]
    share = rest // len(open_classes)
    if share:
      quotas[open_classes] += np.minimum(share, (sizes - quotas)[open_classes])
    else:
      quotas[open_classes[:rest]] += 1
  kept = [m[: len(m) - q] for m, q in zip(hidden, quotas)]
  taken = [m[len(m) - q :] for m, q in zip(hidden, quotas)]
  return kept, np.sort(np.concatenate(taken))
