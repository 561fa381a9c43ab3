"""The configuration of a run, and its consequences."""

import dataclasses
from typing import Any

from tff_fssl import hparams
from tff_fssl.aggregators import hparams as aggregator_hparams
from tff_fssl.algorithms import registry
from tff_fssl.data import clients
from tff_fssl.data import data_hparams
from tff_fssl.data import names as data_names
from tff_fssl.data import partition_settings
from tff_fssl.interface import round_hparams
from tff_fssl.models import names as model_names
from tff_fssl.program import run_hparams
from tff_fssl.program import usage
from tff_fssl.rounds import participation_hparams


@dataclasses.dataclass(frozen=True)
class Config:
  """The configuration of a run.

  Attributes:
    run: Hyper-parameters of the run.
    round: Hyper-parameters of a round.
    aggregator: Hyper-parameters of the aggregation.
    algorithm: Hyper-parameters of the algorithm, an `entry.hparams`.
    data: How the images of the data set are read.
    participation: Hyper-parameters of the participation in rounds.
    info: The data set, as far as it is known without loading it.
  """

  run: run_hparams.RunHparams
  round: round_hparams.RoundHparams
  aggregator: aggregator_hparams.AggregatorHparams
  algorithm: Any
  data: data_hparams.DataHparams
  participation: participation_hparams.ParticipationHparams
  info: data_names.DataSetInfo

  @property
  def entry(self) -> registry.Entry:
    """Returns the algorithm's registry entry."""
    return registry.REGISTRY[self.run.algorithm]

  @property
  def prefix(self) -> str:
    """Returns the prefix of the algorithm's flags."""
    return self.entry.prefix

  @property
  def first_round(self) -> int:
    """Returns the number of the first round, below 1 with pre-training."""
    return 1 - self.round.num_pretraining_rounds

  @property
  def trains_clients(self) -> bool:
    """Says whether rounds have a cohort."""
    # --algorithm, which is read last, is the reason if they have none.
    return (
      self.run.full_labels or self.round.scenario in self.entry.trains_clients
    )

  @property
  def trains_alone(self) -> bool:
    """Says whether clients train alone, without a common model."""
    return self.entry.is_alone

  @property
  def learns_unlabeled(self) -> bool:
    """Says whether clients train on unlabelled examples."""
    return self.trains_clients and self.entry.learns_unlabeled

  @property
  def uses_unlabeled(self) -> bool:
    """Says whether these are trained on, or batch norm uses them."""
    return self.learns_unlabeled or (
      self.trains_clients and self.run.norm == model_names.STATIC_BATCH_NORM
    )

  @property
  def streams(self) -> bool:
    """Says whether the time at which clients have examples matters."""
    return not self.run.full_labels and self.uses_unlabeled

  @property
  def has_moments(self) -> bool:
    """Says whether networks see values minus their mean, or may."""
    kind = self.info.kind
    return kind != data_names.TEXTS and (
      kind != data_names.IMAGES
      or self.data.normalization == data_hparams.STANDARD
    )

  @property
  def has_episodes(self) -> bool:
    """Says whether clients learn from some labels of each class at a time."""
    return bool(self.entry.capabilities.labels_of_class)

  @property
  def aggregates(self) -> bool:
    """Says whether rounds combine updates of clients."""
    return not self.trains_alone and self.trains_clients

  @property
  def is_private(self) -> bool:
    """Says whether only the sum over clients may be released."""
    protects = self.aggregator.aggregator in aggregator_hparams.PRIVATE
    return self.aggregates and protects

  @property
  def sets_weights(self) -> bool:
    """Says whether the algorithm sets the weights of clients."""
    return bool(self.algorithm.sets_weights)

  @property
  def own_weights_off_flag(self) -> str:
    """Gives the flag, with its value, by which no algorithm sets weights."""
    return f'--{self.prefix}{self.entry.capabilities.without_own_weights}'

  @property
  def keeps_client_state(self) -> bool:
    """Says whether each client has a state, by its identity."""
    return self.entry.keeps_client_state(self.algorithm)

  @property
  def sends_signals(self) -> bool:
    """Says whether clients send numbers outside of the sum of updates."""
    name = self.entry.capabilities.signals
    has_signals = bool(name) and bool(getattr(self.algorithm, name))
    return has_signals or (self.aggregates and self.keeps_client_state)

  @property
  def signals_off_flag(self) -> str:
    """Names the flag that turns these off, if there is one."""
    flag = self.entry.capabilities.without_signals
    return f'--{self.prefix}{flag}' if flag else ''

  @property
  def has_groups(self) -> bool:
    """Says whether groups of clients are aggregated separately."""
    groups = self.algorithm.groups()
    return groups is not None and groups.num_groups > 1

  @property
  def model_norm(self) -> str:
    """Returns the norm of the network: 'bn', 'gn' or 'none'."""
    is_static = self.run.norm == model_names.STATIC_BATCH_NORM
    return model_names.BATCH_NORM if is_static else self.run.norm

  @property
  def partition_settings(self) -> partition_settings.PartitionSettings:
    """Returns the partition's settings, or raises `UsageError`."""
    return hparams.build_from(
      self.run,
      partition_settings.PartitionSettings,
      num_classes=self.info.num_classes,
      scenario=self.round.scenario,
    )

  @property
  def streaming(self) -> clients.Streaming:
    """Says when clients have which of their unlabelled examples."""
    run = self.run
    return clients.Streaming(
      run.streaming_steps, run.streaming_rounds, run.streaming_cycles, run.seed
    )

  def groups(self) -> tuple[tuple[Any, str], ...]:
    """Returns all hyper-parameters, each with the prefix of its flags."""
    return (
      (self.run, ''),
      (self.data, ''),
      (self.round, ''),
      (self.participation, ''),
      (self.aggregator, ''),
      (self.algorithm, self.prefix),
    )

  def idle(self) -> dict[str, str]:
    """Finds the flags that change nothing. See `usage.find_idle`."""
    found: dict[str, str] = {}
    for group, prefix in self.groups():
      found |= usage.find_idle(group, prefix, self)
    return found

  def flags(self) -> dict[str, Any]:
    """Returns every flag that has an effect: they repeat the run."""
    idle = self.idle()
    return {
      f'{prefix}{field.name}': getattr(group, field.name)
      for group, prefix in self.groups()
      for field in hparams.documented_fields(group)
      if f'{prefix}{field.name}' not in idle
    }
