"""The settings of a partition of training examples."""

from collections.abc import Mapping
import dataclasses
import re
from typing import Any

from tff_fssl.data import names
from tff_fssl.hparams import UsageError
from tff_fssl.hparams import closest

# NumPy's draws with a smaller alpha take forever.
_MIN_ALPHA, _MAX_ALPHA = 1e-6, 1e6
# The number of classes in FedMatch's and ProtoFSSL's rows.
_ROW_CLASSES = 10
_MAX_CLIENTS = 10**6
# Clients need examples to train on.
MAX_TEST_FRACTION = 0.9


@dataclasses.dataclass(frozen=True)
class PartitionSettings:
  """The settings of `partition_draw.build_partition`.

  Settings that no labels could satisfy raise `UsageError`, which names the flag
  and the allowed values.

  Attributes:
    num_classes: The number of classes, >= 2.
    num_clients: The number of clients, >= 1. With `natural`, 0 means all.
    num_labels: The number of labelled examples at the server, or of each client
      that holds labels. It is a multiple of `label_classes`, unless
      `client_labels` is `own`. 0: none (`full_labels`), or, at the server, all
      that the data set puts there.
    scenario: One of `names.SCENARIOS`.
    partition: One of `names.PARTITIONS`.
    alpha: Parameter of the Dirichlet distribution, > 0. A smaller one gives a
      more uneven split.
    alpha_meaning: The meaning of `alpha`, one of `names.ALPHA_MEANINGS`. See
      `concentration`.
    equal_sizes: Whether `dirichlet` gives each client equally many examples.
    min_client_examples: The least number of unlabelled examples of a client
      (`dirichlet` without `equal_sizes`), >= 0.
    class_draws: The method of drawing the numbers of examples of each class
      with `fedmatch` and `extreme`, one of `names.CLASS_DRAWS`.
    shards_per_client: The number of a client's shards (`shards`), >= 1.
    classes_per_client: The number of a client's classes (`classes`), >= 1.
    size_skew: The growth of clients' sizes (`sizes`), one of
      `names.SIZE_SKEWS`.
    class_shares: The clients' shares of each class (`given`), which are whole
      numbers, '9,1; 1,9': rows are clients, columns are classes.
    strictness: How far clients' examples follow the owners' numbers
      (`continuous`), in [0, 1]. 0: not at all.
    num_validation: The number of validation examples, >= 0.
    split_by: What validation takes whole, one of `names.SPLIT_UNITS`: with
      `client`, examples of owners of whom no other example is used.
    num_unlabeled: The number of remaining examples that all clients together
      get besides their labels, before any are held out. At least one for each
      client, or 0 for all. With `full_labels`, these are labelled.
    full_labels: Whether all examples of a client that holds labels are
      labelled.
    labeled_clients: With labels at the clients, the clients that hold labels:
      `all`, a number ('3'), or a share of the clients ('0.1': a tenth, at least
      one).
    client_labels: With labels at the clients, the choice of labelled examples.
      `balanced`: equally many of each class, independently of the client's
      other examples. `own`: some of the client's examples, of any classes.
      `split`: those of all clients, equally many of each class, are split by
      `partition`, in a draw of their own.
    labeled_also_unlabeled: Whether clients also train on their labelled
      examples as if these had no labels.
    client_label_classes: The number of classes of a client's `balanced` labels,
      which are drawn for each client. 0: all.
    label_noise: The share of the labelled examples whose label is wrong, in
      [0, 1].
    client_test_fraction: The share of each client's examples that is held out
      for evaluation at the client, in [0, `MAX_TEST_FRACTION`].
    seed: Any integer.

  Examples:
    >>> from tff_fssl.data.partition_settings import PartitionSettings
    >>> settings = PartitionSettings(
    ...   num_classes=10,
    ...   num_clients=20,
    ...   num_labels=50,
    ...   scenario='labels_at_clients',
    ...   labeled_clients='0.1',
    ...   partition='dirichlet',
    ... )
    >>> settings.title, settings.num_labeled_clients
    ('Dirichlet(0.1)', 2)
  """

  num_classes: int
  num_clients: int
  num_labels: int
  scenario: str = names.LABELS_AT_SERVER
  partition: str = names.IID
  alpha: float = 0.1
  alpha_meaning: str = names.EACH
  equal_sizes: bool = False
  min_client_examples: int = 10
  class_draws: str = names.EXACT
  shards_per_client: int = 2
  classes_per_client: int = 2
  size_skew: str = names.LINEAR
  class_shares: str = ''
  strictness: float = 1.0
  num_validation: int = 0
  split_by: str = names.EXAMPLE
  num_unlabeled: int = 0
  full_labels: bool = False
  labeled_clients: str = names.ALL_CLIENTS
  client_labels: str = names.BALANCED
  labeled_also_unlabeled: bool = False
  client_label_classes: int = 0
  label_noise: float = 0.0
  client_test_fraction: float = 0.0
  seed: int = 0

  def __post_init__(self):
    is_natural = self.partition == names.NATURAL
    for flag, allowed in (
      ('scenario', names.SCENARIOS),
      ('partition', names.PARTITIONS),
      ('client_labels', names.CLIENT_LABELS),
      ('alpha_meaning', names.ALPHA_MEANINGS),
      ('class_draws', names.CLASS_DRAWS),
      ('size_skew', names.SIZE_SKEWS),
      ('split_by', names.SPLIT_UNITS),
    ):
      choice = getattr(self, flag)
      if choice not in allowed:
        raise UsageError(
          f'--{flag}={choice}: allowed are {", ".join(allowed)}'
          f'{closest(str(choice), allowed)}'
        )
    for flag, least in (
      ('num_classes', 2),
      ('num_clients', 0 if is_natural else 1),
      ('num_labels', 0),
      ('min_client_examples', 0),
      ('num_validation', 0),
      ('num_unlabeled', 0),
      ('client_label_classes', 0),
      ('shards_per_client', 1),
      ('classes_per_client', 1),
    ):
      if getattr(self, flag) < least:
        raise UsageError(
          f'--{flag}={getattr(self, flag)}: must be at least {least}'
        )
    for flag, most in (
      ('label_noise', 1),
      ('strictness', 1),
      ('client_test_fraction', MAX_TEST_FRACTION),
    ):
      share = getattr(self, flag)
      if not 0 <= share <= most:
        raise UsageError(
          f'--{flag}={share:g}: must be a share, from 0 to {most:g}'
        )
    self._check_partition()
    # The property rejects values that are neither a number nor a share.
    _ = self.num_labeled_clients
    self._check_numbers()

  def _check_numbers(self) -> None:
    """Rejects numbers of examples that cannot be divided as required."""
    if self.client_label_classes > self.num_classes:
      raise UsageError(
        f'--client_label_classes={self.client_label_classes}: must be at most'
        f' the number of classes ({self.num_classes}), or 0 for all of them'
      )
    each = self.label_classes
    if self.labels_split:
      self._check_split_labels()
    elif self.num_labels % each and not self.labels_own:
      below = self.num_labels - self.num_labels % each
      what = f'the number of classes ({each})'
      if each < self.num_classes:
        what = f'--client_label_classes={each}'
      raise UsageError(
        f'--num_labels={self.num_labels}: must be a multiple of {what}, for'
        f' example {below or each} or {below + each}'
      )
    if self.scenario == names.LABELS_AT_CLIENTS:
      self.check_labels()
    # With `natural`, the number of clients is not known before the data.
    if 0 < self.num_unlabeled < self.num_clients:
      raise UsageError(
        f'--num_unlabeled={self.num_unlabeled}: is less than one example for'
        f' each of --num_clients={self.num_clients}; set it to at least that,'
        ' or to 0 for all remaining examples'
      )

  def check_labels(self, num_server: int = 0) -> None:
    """Refuses to train without labels (`UsageError`).

    Args:
      num_server: The labelled examples that the data set puts at the server.
    """
    if self.num_labels == 0 and not self.full_labels and not num_server:
      least = 1 if self.labels_own else self.label_classes
      raise UsageError(
        f'--num_labels=0: must be at least {least}, or set --full_labels'
      )

  def _check_split_labels(self) -> None:
    """Rejects labels of all clients that classes cannot share equally."""
    if self.labeled_clients != names.ALL_CLIENTS or self.client_label_classes:
      raise UsageError(
        '--client_labels=split: all clients hold labels, of the classes that'
        ' the partition gives them; omit --labeled_clients and'
        ' --client_label_classes'
      )
    if self.num_labels * self.num_clients % self.num_classes:
      raise UsageError(
        f'--num_labels={self.num_labels} --client_labels=split:'
        f' {self.num_labels * self.num_clients} labels of all clients cannot be'
        f' divided equally among {self.num_classes} classes; choose a multiple'
        ' of the number of classes'
      )

  def _check_partition(self) -> None:
    """Rejects settings that the chosen partition does not support."""
    if (
      self.partition in names.WITH_ALPHA
      and not _MIN_ALPHA <= self.concentration <= _MAX_ALPHA
    ):
      scale = self.num_classes if self.alpha_meaning == names.TOTAL else 1
      raise UsageError(
        f'--alpha={self.alpha:g}: must be a number greater than 0, from'
        f' {_MIN_ALPHA * scale:g} to {_MAX_ALPHA * scale:g}'
        f' (--partition={self.partition})'
      )
    if self.partition == names.PAIRS and self.num_clients % 2:
      raise UsageError(
        f'--num_clients={self.num_clients} --partition=pairs: must be even; for'
        f' example {self.num_clients + 1}'
      )
    if (
      self.partition == names.CLASSES
      and self.classes_per_client > self.num_classes
    ):
      raise UsageError(
        f'--classes_per_client={self.classes_per_client}: must be at most the'
        f' number of classes ({self.num_classes})'
      )
    if self.partition == names.GIVEN:
      _ = self.shares  # Reading them rejects a wrong table.
    if self.has_rows and self.num_classes != _ROW_CLASSES:
      raise UsageError(
        f'--partition={self.partition}: has shares of {_ROW_CLASSES} classes,'
        f' but the data have {self.num_classes}; dirichlet and shards split any'
        ' number'
      )
    if (
      self.partition in names.OF_OWNERS
      and self.scenario == names.LABELS_AT_CLIENTS
      and not (self.labels_own or self.full_labels)
    ):
      raise UsageError(
        f'--client_labels={self.client_labels}: with'
        f' --partition={self.partition}, clients hold only their own examples;'
        ' set --client_labels=own'
      )

  @property
  def concentration(self) -> float:
    """Returns each class's concentration in the Dirichlet distribution.

    It is `alpha` or, as Hsu et al. (2019) write it, `alpha` / `num_classes`.
    """
    if self.alpha_meaning == names.TOTAL:
      return self.alpha / self.num_classes
    return self.alpha

  @property
  def shares(self) -> list[list[int]]:
    """Reads each client's row of `class_shares`, or raises."""
    rows = [re.sub(r'\s', '', row) for row in self.class_shares.split(';')]
    wrong = f'it has {len(rows)}' if any(rows) else 'it is empty'
    if len(rows) == self.num_clients:
      number = '[0-9]{1,9}'
      of_row = re.compile(
        f'(?=.*[1-9]){number}(,{number}){{{self.num_classes - 1}}}'
      )
      places = [i for i, row in enumerate(rows) if not of_row.fullmatch(row)]
      if not places:
        return [[*map(int, row.split(','))] for row in rows]
      wrong = f'row {places[0] + 1} is {rows[places[0]]!r:.60}'
    raise UsageError(
      f'--class_shares={self.class_shares:.60}: must have a row for each of'
      f' --num_clients={self.num_clients}, with a whole number for each of'
      f" {self.num_classes} classes, not all 0, as in '9,1; 1,9', but {wrong}"
    )

  @property
  def has_rows(self) -> bool:
    """Tells whether shares of classes are rows from a paper."""
    return self.partition in (names.FEDMATCH, names.EXTREME)

  @property
  def title(self) -> str:
    """Describes the partition: 'IID', 'Dirichlet(0.3)', ..."""
    alpha = f'{self.alpha:g}'
    if self.alpha_meaning == names.TOTAL:
      alpha += f'/{self.num_classes}'
    sizes = ' of equal sizes' if self.equal_sizes else ''
    drawn = ', drawn' if self.class_draws == names.MULTINOMIAL else ''
    return {
      names.IID: 'IID',
      names.DIRICHLET: f'Dirichlet({alpha}){sizes}',
      names.FEDMATCH: f"FedMatch's shares{drawn}",
      names.EXTREME: f"ProtoFSSL's extreme shares{drawn}",
      names.SHARDS: f'shards of classes, {self.shards_per_client} a client',
      names.CLASSES: f'{self.classes_per_client} classes a client',
      names.SIZES: f'IID, {self.size_skew} sizes',
      names.GIVEN: 'given shares of classes',
      names.PAIRS: f'pairs of clients by Dirichlet({alpha})',
      names.NATURAL: 'natural',
      names.GROUPED: 'groups of owners',
      names.CONTINUOUS: f'by numbers, strictness {self.strictness:g}',
    }[self.partition]

  @property
  def _used_client_labels(self) -> str:
    """Returns `client_labels`, or '' where it has no effect."""
    at_clients = self.scenario == names.LABELS_AT_CLIENTS
    return self.client_labels if at_clients and not self.full_labels else ''

  @property
  def labels_own(self) -> bool:
    """Tells whether clients hold labels of their own examples."""
    return self._used_client_labels == names.OWN

  @property
  def labels_split(self) -> bool:
    """Tells whether the labels of all clients are split by the partition."""
    return self._used_client_labels == names.SPLIT

  @property
  def label_classes(self) -> int:
    """Returns the number of classes of the labels at each holder.

    `labels_own` has no such number.
    """
    if self.scenario == names.LABELS_AT_CLIENTS:
      return self.client_label_classes or self.num_classes
    return self.num_classes

  @property
  def or_more_unlabeled(self) -> str:
    """Returns a remedy for too few examples, to end messages with."""
    return ', or raise --num_unlabeled' if self.num_unlabeled else ''

  @property
  def num_labeled_clients(self) -> int:
    """Returns the number of clients with labels, 0 if the server has them."""
    if self.scenario == names.LABELS_AT_SERVER:
      return 0
    text = self.labeled_clients
    if text == names.ALL_CLIENTS:
      return self.num_clients
    # Not known before the data.
    most = self.num_clients or _MAX_CLIENTS
    if re.fullmatch(r'[0-9]{1,9}', text):
      if 1 <= int(text) <= most:
        return int(text)
    elif re.fullmatch(r'0?\.[0-9]{1,9}', text) and float(text):
      return max(1, round(float(text) * self.num_clients))
    raise UsageError(
      f'--labeled_clients={text}: must be {names.ALL_CLIENTS}, a number from 1'
      f' to --num_clients={most}, or a share of the clients such as 0.1'
    )

  def recorded(self) -> dict[str, Any]:
    """Returns the settings as values for JSON, and for `parse_record`."""
    result: dict[str, Any] = {}
    for field in dataclasses.fields(self):
      # JSON knows no integers of NumPy.
      kind: Any = field.type
      result[field.name] = kind(getattr(self, field.name))
    return result

  @classmethod
  def parse_record(cls, record: Mapping[str, Any]) -> 'PartitionSettings':
    """Reads the settings of this version or an older one.

    Args:
      record: Names and values. Missing ones have their defaults.

    Returns:
      The settings.

    Raises:
      UsageError: If a value is not allowed.
    """
    given: dict[str, Any] = {}
    for field in dataclasses.fields(cls):
      if field.name in record:
        value, kind = record[field.name], field.type
        # Other programs write 1.0 as 1.
        if kind is float and type(value) is int:
          value = float(value)
        if type(value) is not kind:
          raise UsageError(f'its {field.name} is {value!r}')
        given[field.name] = value
    needed = {'num_classes', 'num_clients', 'num_labels', 'partition'}
    missing = needed - given.keys()
    if missing:
      raise UsageError(f'its {min(missing)} is missing')
    return cls(**given)
