"""How training examples are to be partitioned. TensorFlow-free."""

import dataclasses
import re

from tff_fssl.data import names
from tff_fssl.hparams import UsageError
from tff_fssl.hparams import closest

# With a still smaller alpha, NumPy's draws take forever.
_MIN_ALPHA, _MAX_ALPHA = 1e-6, 1e6


@dataclasses.dataclass(frozen=True)
class PartitionSettings:
  """The settings of `partition.build_partition`.

  Settings that no labels could satisfy raise `UsageError`, which names the flag
  and what is allowed.

  Attributes:
    num_classes: The number of classes, >= 2.
    num_clients: The number of clients, >= 1.
    num_labels: The number of labelled examples: in total, or with labels at the
      clients for each client that holds labels; a multiple of `num_classes`,
      unless `client_labels` is `own`. 0 is allowed only with `full_labels`.
    scenario: One of `names.SCENARIOS`.
    partition: One of `names.PARTITIONS`.
    alpha: Parameter of the Dirichlet distribution, > 0; a smaller one gives a
      more uneven split.
    min_client_examples: The least number of unlabelled examples of a client
      (`dirichlet`), >= 0.
    num_validation: The number of validation examples, >= 0.
    full_labels: Whether all examples of a client that holds labels are
      labelled.
    labeled_clients: With labels at the clients, how many hold labels: `all`, a
      number ('3'), or a share of the clients ('0.1': a tenth, at least one).
    client_labels: With labels at the clients, which examples are labelled.
      `balanced`: equally many of each class, whatever else the client holds;
      `own`: some of the client's examples, as their classes come.
    seed: Any integer.
  """

  num_classes: int
  num_clients: int
  num_labels: int
  scenario: str = names.LABELS_AT_SERVER
  partition: str = names.IID
  alpha: float = 0.1
  min_client_examples: int = 10
  num_validation: int = 0
  full_labels: bool = False
  labeled_clients: str = names.ALL_CLIENTS
  client_labels: str = names.BALANCED
  seed: int = 0

  def __post_init__(self):
    for flag, choice, allowed in (
      ('scenario', self.scenario, names.SCENARIOS),
      ('partition', self.partition, names.PARTITIONS),
      ('client_labels', self.client_labels, names.CLIENT_LABELS),
    ):
      if choice not in allowed:
        raise UsageError(
          f'--{flag}={choice}: allowed are {", ".join(allowed)}'
          f'{closest(str(choice), allowed)}'
        )
    for flag, count, minimum in (
      ('num_classes', self.num_classes, 2),
      ('num_clients', self.num_clients, 1),
      ('num_labels', self.num_labels, 0),
      ('min_client_examples', self.min_client_examples, 0),
      ('num_validation', self.num_validation, 0),
    ):
      if count < minimum:
        raise UsageError(f'--{flag}={count}: must be at least {minimum}')
    _ = (
      self.num_labeled_clients
    )  # Refuses what is neither a number nor a share.
    if self.num_labels % self.num_classes and not self.labels_own:
      below = self.num_labels - self.num_labels % self.num_classes
      raise UsageError(
        f'--num_labels={self.num_labels}: must be a multiple of the number of'
        f' classes ({self.num_classes}), for example'
        f' {below or self.num_classes} or {below + self.num_classes}'
      )
    if self.num_labels == 0 and not self.full_labels:
      raise UsageError(
        '--num_labels=0: must be at least'
        f' {1 if self.labels_own else self.num_classes}, or set --full_labels'
      )
    if (
      self.partition == names.DIRICHLET
      and not _MIN_ALPHA <= self.alpha <= _MAX_ALPHA
    ):
      raise UsageError(
        f'--alpha={self.alpha:g}: must be a number greater than 0, from'
        f' {_MIN_ALPHA:g} to {_MAX_ALPHA:g} (--partition=dirichlet)'
      )

  @property
  def labels_own(self) -> bool:
    """Whether clients hold labels of their own examples, as these come."""
    return (
      self.scenario == names.LABELS_AT_CLIENTS
      and self.client_labels == names.OWN
      and not self.full_labels
    )

  @property
  def num_labeled_clients(self) -> int:
    """The number of clients that hold labels; 0 if the server holds them."""
    if self.scenario == names.LABELS_AT_SERVER:
      return 0
    text = self.labeled_clients
    if text == names.ALL_CLIENTS:
      return self.num_clients
    if re.fullmatch(r'[0-9]{1,9}', text):
      if 1 <= int(text) <= self.num_clients:
        return int(text)
    elif re.fullmatch(r'0?\.[0-9]{1,9}', text) and float(text):
      return max(1, round(float(text) * self.num_clients))
    raise UsageError(
      f'--labeled_clients={text}: must be {names.ALL_CLIENTS}, a number from 1'
      f' to --num_clients={self.num_clients}, or a share of the clients such as'
      ' 0.1'
    )
