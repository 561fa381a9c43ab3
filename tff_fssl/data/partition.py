"""Partitions training examples among the server, validation and the clients.

NumPy only. A partition is a function of the labels, the settings and the seed.
The label split and the IID and Dirichlet partitions are those of (FL)^2's
published code.
"""

from collections.abc import Sequence
import dataclasses
import json
import os
from typing import Any

import numpy as np

from tff_fssl import durable
from tff_fssl.data import names
from tff_fssl.data import partition_settings
from tff_fssl.data import partition_splits
from tff_fssl.data import seeds
from tff_fssl.hparams import UsageError

_FORMAT = 'tff_fssl.partition'
_VERSION = 1


@dataclasses.dataclass(frozen=True, eq=False)
class Partition:
  """Indices into the training examples; no example is held twice.

  Attributes:
    server_labeled: int64, labelled examples at the server.
    validation: int64, examples for model selection, which nobody trains on.
    client_labeled: Labelled examples per client, int64, ascending.
    client_unlabeled: Unlabelled examples per client, int64, ascending.
    class_counts: int64 [clients, classes], how many examples of each true class
      a client holds.
    settings: The `PartitionSettings`, and `num_examples`.
  """

  server_labeled: np.ndarray
  validation: np.ndarray
  client_labeled: list[np.ndarray]
  client_unlabeled: list[np.ndarray]
  class_counts: np.ndarray
  settings: dict[str, Any]

  @property
  def num_clients(self) -> int:
    """The number of clients."""
    return len(self.client_unlabeled)

  def check_indices(self, num_examples: int) -> None:
    """Checks that this is a partition of `num_examples` training examples.

    Args:
      num_examples: The number of training examples.

    Raises:
      UsageError: If an index is out of range or occurs twice.
    """
    held = np.concatenate(self._held())
    if len(held) and not 0 <= held.min() <= held.max() < num_examples:
      raise UsageError(
        f'the partition has indices from {held.min()} to {held.max()}, but'
        f' there are {num_examples} training examples: it was made for other'
        ' data'
      )
    if len(np.unique(held)) != len(held):
      raise UsageError('the partition has some examples more than once')

  def to_json(self) -> str:
    """This partition as JSON text, which `from_json` reads."""
    return json.dumps(
      {
        'format': _FORMAT,
        'version': _VERSION,
        'settings': self.settings,
        'class_counts': self.class_counts.tolist(),
        'server_labeled': self.server_labeled.tolist(),
        'validation': self.validation.tolist(),
        'client_labeled': [a.tolist() for a in self.client_labeled],
        'client_unlabeled': [a.tolist() for a in self.client_unlabeled],
      }
    )

  @classmethod
  def from_json(cls, text: str) -> 'Partition':
    """The partition that `to_json` wrote.

    Args:
      text: JSON text.

    Returns:
      The partition.

    Raises:
      UsageError: If the text is not a partition, or its version is unknown.
    """
    try:
      fields = json.loads(text)
      if fields['format'] != _FORMAT:
        raise ValueError(f'its format is {fields["format"]!r}')
      if fields['version'] != _VERSION:
        raise ValueError(f'its version is {fields["version"]}, not {_VERSION}')
      return cls(
        server_labeled=_indices(fields['server_labeled']),
        validation=_indices(fields['validation']),
        client_labeled=[_indices(a) for a in fields['client_labeled']],
        client_unlabeled=[_indices(a) for a in fields['client_unlabeled']],
        class_counts=np.array(fields['class_counts'], np.int64),
        settings=_current(fields['settings']),
      )
    except (ValueError, KeyError, TypeError) as e:
      raise UsageError(
        f'not a partition of tff_fssl, or a damaged one: {e}'
      ) from e

  def has_same_examples(self, other: 'Partition') -> bool:
    """Whether everybody holds the same examples in both partitions."""
    return self.num_clients == other.num_clients and all(
      np.array_equal(mine, theirs)
      for mine, theirs in zip(self._held(), other._held(), strict=True)
    )

  def _held(self) -> list[np.ndarray]:
    """What the server, validation and each client hold."""
    return [
      self.server_labeled,
      self.validation,
      *self.client_labeled,
      *self.client_unlabeled,
    ]

  def save_json(self, path: str | os.PathLike[str]) -> None:
    """Writes `to_json` to a file atomically; creates its folder."""
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    durable.write_file(os.fspath(path), [self.to_json().encode()])


def build_partition(
  labels: np.ndarray,
  settings: partition_settings.PartitionSettings,
) -> Partition:
  """Splits training examples into labelled, validation and clients' examples.

  1.  Each class is shuffled, and its first examples are labelled, equally many
      in every class. With labels at the server, `num_labels` are labelled in
      total; with labels at clients, `num_labels` for each client that holds
      labels. If not all do, they are drawn; a larger number includes them.
  2.  The validation examples are the last ones of each shuffled class, equally
      many if classes have enough. (They are taken from the end, so that their
      number does not change which examples are labelled.)
  3.  The rest goes to the clients, unlabelled. `iid`: each gets
      floor(rest / clients) examples, drawn at random; a remainder is not used.
      `dirichlet`: for each class, in the order of step 1, p ~ Dirichlet(alpha)
      over clients is drawn; p = 0 for clients that already hold rest / clients
      or more; the class is cut at floor(cumsum(p) * size). The draw of all
      classes is repeated until every client holds `min_client_examples`, at
      most `partition_splits.MAX_DRAWS` times.
  4.  `client_labels=own`: step 1 labels nothing; instead each client that holds
      labels draws `num_labels` of its examples.
  5.  `full_labels`: all examples of a client that holds labels are labelled
      (the upper bound, if all clients do).

  Args:
    labels: int [N], the true classes of the training examples.
    settings: All else; the steps use its names.

  Returns:
    The partition.

  Raises:
    UsageError: If the settings cannot be satisfied; names the flags.
  """
  labels = np.asarray(labels)
  num_classes, num_clients = settings.num_classes, settings.num_clients
  num_labels, seed = settings.num_labels, settings.seed
  _check_labels(labels, num_classes)
  shuffled = _shuffled_classes(labels, num_classes, seed)

  at_server = settings.scenario == names.LABELS_AT_SERVER
  holders = _labeled_clients(settings)
  labeled, hidden = _split_labels(
    shuffled,
    1 if at_server else len(holders),
    0 if settings.labels_own else num_labels // num_classes,
  )
  hidden, validation = _split_validation(hidden, settings.num_validation, seed)
  all_have_labels = len(holders) == num_clients and not settings.labels_own
  unlabeled = _split_rest(
    hidden, settings, may_be_empty=bool(all_have_labels and num_labels)
  )
  client_labeled = [_indices([]) for _ in range(num_clients)]
  if not at_server:
    for client, held in zip(holders, labeled, strict=True):
      client_labeled[client] = held
  if settings.labels_own:
    _label_own(settings, holders, client_labeled, unlabeled)
  if settings.full_labels:
    for client in holders:
      held = np.concatenate([client_labeled[client], unlabeled[client]])
      client_labeled[client] = np.sort(held)
      unlabeled[client] = _indices([])
  return Partition(
    server_labeled=labeled[0] if at_server else _indices([]),
    validation=validation,
    client_labeled=client_labeled,
    client_unlabeled=unlabeled,
    class_counts=_class_counts(labels, client_labeled, unlabeled, num_classes),
    settings=_recorded(settings, len(labels)),
  )


def _split_rest(
  hidden: list[np.ndarray],
  settings: partition_settings.PartitionSettings,
  *,
  may_be_empty: bool,
) -> list[np.ndarray]:
  """Splits what is not labelled, per class, over the clients.

  Args:
    hidden: The examples of each class.
    settings: How to split.
    may_be_empty: Whether clients may get nothing, since all have labels.

  Returns:
    The examples of each client, ascending.

  Raises:
    UsageError: If there are too few; names the flags.
  """
  num_clients = settings.num_clients
  num_hidden = sum(len(c) for c in hidden)
  if num_hidden < num_clients and not may_be_empty:
    raise UsageError(
      f'--num_clients={num_clients}: only {num_hidden} training examples are'
      ' left for the clients; set it to at most that, or lower --num_labels'
      ' or --num_validation'
    )
  split = partition_splits.split(hidden, settings)
  return [_indices(np.sort(a)) for a in split]


def _class_counts(
  labels: np.ndarray,
  labeled: list[np.ndarray],
  unlabeled: list[np.ndarray],
  num_classes: int,
) -> np.ndarray:
  """int64 [clients, classes]: how many examples of a class a client holds."""
  counts = [
    np.bincount(labels[np.concatenate(held)], minlength=num_classes)
    for held in zip(labeled, unlabeled)
  ]
  return np.array(counts, np.int64)


def _labeled_clients(
  settings: partition_settings.PartitionSettings,
) -> list[int]:
  """The clients that hold labels, or that get them by `full_labels`."""
  every, num = settings.num_clients, settings.num_labeled_clients
  if settings.scenario == names.LABELS_AT_SERVER:
    return list(range(every)) if settings.full_labels else []
  if num == every:
    return list(range(every))
  rng = seeds.generator(settings.seed, seeds.Purpose.LABELED_CLIENTS)
  return sorted(rng.permutation(every)[:num].tolist())


def _label_own(
  settings: partition_settings.PartitionSettings,
  holders: list[int],
  labeled: list[np.ndarray],
  unlabeled: list[np.ndarray],
) -> None:
  """Labels examples of each client that holds labels, in place."""
  num = settings.num_labels
  fewest = min(holders, key=lambda client: len(unlabeled[client]))
  most = len(unlabeled[fewest])
  if most < num:
    raise UsageError(
      f'--num_labels={num} --client_labels={names.OWN}: client {fewest} has'
      f' {most} examples; set it to at most {most}, or lower --num_clients'
      + (
        ', or raise --min_client_examples'
        if settings.partition == names.DIRICHLET
        else ''
      )
    )
  for client in holders:
    purpose = seeds.Purpose.CLIENT_LABELS
    rng = seeds.generator(settings.seed, purpose, client)
    chosen = np.zeros(len(unlabeled[client]), bool)
    chosen[rng.permutation(len(chosen))[:num]] = True
    labeled[client] = unlabeled[client][chosen]
    unlabeled[client] = unlabeled[client][~chosen]


def _recorded(
  settings: partition_settings.PartitionSettings, num_examples: int
) -> dict[str, Any]:
  """The settings as JSON shows them."""
  result: dict[str, Any] = {}
  for field in dataclasses.fields(settings):
    kind: Any = field.type  # JSON knows no integers of NumPy.
    result[field.name] = kind(getattr(settings, field.name))
  return {**result, 'num_examples': num_examples}


def _current(settings: dict[str, Any]) -> dict[str, Any]:
  """Settings by their names of today."""
  renamed = {'split': 'partition'}
  return {renamed.get(name, name): value for name, value in settings.items()}


def _indices(values: Sequence[int] | np.ndarray) -> np.ndarray:
  return np.asarray(values, np.int64)


def _check_labels(labels: np.ndarray, num_classes: int) -> None:
  if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer):
    raise UsageError(
      f'labels must be integers [N], not {labels.dtype} {list(labels.shape)}'
    )
  if len(labels) and not 0 <= labels.min() <= labels.max() < num_classes:
    raise UsageError(
      f'labels go from {labels.min()} to {labels.max()}; with {num_classes}'
      f' classes, allowed are 0 to {num_classes - 1}'
    )


def _shuffled_classes(labels, num_classes, seed) -> list[np.ndarray]:
  rng = seeds.generator(seed, seeds.Purpose.LABEL_SPLIT)
  return [
    rng.permutation(np.flatnonzero(labels == c)) for c in range(num_classes)
  ]


def _split_labels(
  shuffled: list[np.ndarray], num_holders: int, per_holder: int
) -> tuple[list[np.ndarray], list[np.ndarray]]:
  """Labels examples: (labelled examples per holder, the rest per class)."""
  wanted = num_holders * per_holder
  for c, members in enumerate(shuffled):
    if len(members) < wanted:
      fewest = min(len(m) for m in shuffled)
      most = fewest // num_holders * len(shuffled)
      each = ' for each client' if num_holders > 1 else ''
      raise UsageError(
        f'--num_labels={per_holder * len(shuffled)}{each} needs {wanted}'
        f' examples of each class, but class {c} has {len(members)}; set it to'
        f' at most {most}'
      )
  labeled = [
    np.sort(
      np.concatenate(
        [members[i * per_holder : (i + 1) * per_holder] for members in shuffled]
      )
    )
    for i in range(num_holders)
  ]
  return [_indices(a) for a in labeled], [m[wanted:] for m in shuffled]


def _split_validation(
  hidden: list[np.ndarray], num_validation: int, seed: int
) -> tuple[list[np.ndarray], np.ndarray]:
  """Takes validation examples from the ends of the classes."""
  available = sum(len(members) for members in hidden)
  if num_validation > available:
    raise UsageError(
      f'--num_validation={num_validation}: only {available} training examples'
      ' are not labelled; set it to fewer, to leave some for the clients'
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
  return kept, _indices(np.sort(np.concatenate(taken)))
