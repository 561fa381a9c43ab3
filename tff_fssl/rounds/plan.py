"""The plan of a process, which the builders of all its parts read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
from typing import Any, TypeAlias

from tff_fssl.aggregators import privacy
from tff_fssl.aggregators import robust
from tff_fssl.data import augment
from tff_fssl.hparams import UsageError
from tff_fssl.interface import base
from tff_fssl.interface import channels
from tff_fssl.interface import exchange as exchange_lib
from tff_fssl.interface import groups as groups_lib
from tff_fssl.interface import round_hparams as round_hparams_lib
from tff_fssl.lazy import tf, tff
from tff_fssl.models import adapter
from tff_fssl.models import checks as model_checks
from tff_fssl.models import statistics
from tff_fssl.models.weights import Weights
from tff_fssl.rounds import client_data
from tff_fssl.rounds import network_factory
from tff_fssl.rounds import quota
from tff_fssl.rounds import states as states_lib

ServerDataFn: TypeAlias = 'Callable[[], tf.data.Dataset]'
Aggregator: TypeAlias = 'tff.aggregators.WeightedAggregationFactory'


@dataclasses.dataclass(frozen=True)
class DataSpec:
  """The data that a process trains on.

  Attributes:
    element_spec: The spec of the one element of a client's data set. See
      `data.clients`.
    views: Makes network inputs of stored examples.
    server_data_fn: Returns the server's labelled data, a data set of one
      element OrderedDict(x, y). It is called inside a TFF computation. None:
      clients hold the labels.
    num_classes: The width of the model's output. None skips the check.
    num_clients: The number of clients, whose ids are 0 .. num_clients - 1. Only
      algorithms whose server distinguishes clients need it.
  """

  element_spec: Any
  views: augment.Views
  server_data_fn: ServerDataFn | None = None
  num_classes: int | None = None
  num_clients: int | None = None


@dataclasses.dataclass(frozen=True)
class Plan:
  """What a process is made of.

  Attributes:
    algorithm: The algorithm.
    data: The data of clients and server.
    networks: Makes networks.
    states: The conversion of the algorithm's state. It has the algorithm's
      `setup`.
    aggregator: Combines what clients send.
    exchange: The table of clients, if the algorithm has one.
    groups: The groups of clients, if there are any. Each client starts from a
      row of `Groups.starts`.
    is_confidential: Whether clients send only update and weight, to the
      aggregator, and the only metric of theirs is their number.
  """

  algorithm: base.Algorithm
  data: DataSpec
  networks: network_factory.NetworkFactory
  states: states_lib.States
  aggregator: Aggregator
  exchange: exchange_lib.Exchange | None = None
  groups: groups_lib.Groups | None = None
  is_confidential: bool = False

  @property
  def hparams(self) -> round_hparams_lib.RoundHparams:
    """Returns the round's hyper-parameters."""
    return self.algorithm.round

  @property
  def setup(self) -> base.Setup:
    """Returns what the algorithm knows of its process."""
    return self.states.setup

  @property
  def data_type(self) -> tff.SequenceType:
    """Returns the type of a client's data."""
    return client_data.data_type(self.element_spec)

  @property
  def element_spec(self) -> Any:
    """Returns the spec of a client's element, with its id and slot if used."""
    spec = self.data.element_spec
    if self.exchange is not None:
      spec = client_data.add_ids(spec, self.exchange.num_clients)
    if self.groups is not None:
      spec = client_data.add_slots(spec, self.groups.needs_slots)
    return spec

  # What travels.

  @property
  def sent_networks(self) -> list[str]:
    """Returns the names of the auxiliary networks that clients upload."""
    declared = self.algorithm.networks()
    return [name for name, network in declared.items() if network.uploaded]

  @functools.cached_property
  def uploads(self) -> Mapping[str, channels.Upload]:
    """Returns each upload of the algorithm by name."""
    return self.algorithm.uploads(self.setup)

  @property
  def row_specs(self) -> dict[str, tf.TensorSpec]:
    """Returns the spec of each value of a client's row, none without rows."""
    rows = channels.sent_as(self.uploads, channels.ROWS)
    specs = {name: upload.spec for name, upload in rows.items()}
    if self.exchange is not None:
      specs |= self.exchange.row_specs
    return specs

  @functools.cached_property
  def kept(self) -> Mapping[int, tf.TensorSpec]:
    """Returns the weights that stay at the server, by index.

    They are trainable weights of the model, of which clients have zeros.
    """
    return self.networks.head if self.algorithm.head_stays else {}

  def select(self, tensors: Sequence[tf.Tensor]) -> tuple[tf.Tensor, ...]:
    """Selects what travels of the model's trainable weights, or of a change.

    Args:
      tensors: One for each trainable weight. Others may follow.

    Returns:
      All but those that stay at the server.
    """
    return tuple(t for i, t in enumerate(tensors) if i not in self.kept)

  def select_weights(self, weights: Weights) -> Weights:
    """Selects what travels of a network's weights."""
    return weights._replace(trainable=self.select(weights.trainable))

  def restore(self, tensors: Sequence[tf.Tensor]) -> tuple[tf.Tensor, ...]:
    """Inserts zeros for what `select` left out."""
    full = list(tensors)
    # In ascending order, each index is right when its tensor is inserted.
    for index, spec in sorted(self.kept.items()):
      full.insert(index, tf.zeros(spec.shape, spec.dtype))
    return tuple(full)

  def restore_weights(self, sent: Weights) -> Weights:
    """Inserts zeros for what `select_weights` left out."""
    return Weights(
      self.restore(sent.trainable),
      tuple(sent.non_trainable),
      sent.statistics_count,
    )

  # What is done.

  @property
  def is_private(self) -> bool:
    """Tells whether the aggregator accounts for what a round releases."""
    return isinstance(self.aggregator, privacy.PrivateMeanFactory)

  @property
  def can_discard(self) -> bool:
    """Tells whether rounds may fail, or have too few clients, to count."""
    # A confidential process does not know which clients failed. All count.
    return not self.is_confidential or bool(self.hparams.min_clients)

  @property
  def gathers_statistics(self) -> bool:
    """Tells whether clients gather statistics for static batch norm."""
    # Clients that train alone gather the statistics of their own models in
    # `finish`.
    return self.networks.is_static and not self.algorithm.alone

  @property
  def has_last_phases(self) -> bool:
    """Tells whether clients gather statistics after the round's update."""
    in_training = self.hparams.statistics_phase == round_hparams_lib.TRAINING
    return self.gathers_statistics and not in_training

  @property
  def server_keeps_momentum(self) -> bool:
    """Tells whether the server's training goes on with its last momentum."""
    return bool(
      self.data.server_data_fn is not None
      and self.hparams.server_keeps_momentum
      and self.hparams.momentum
    )

  @property
  def server_statistics_batch_size(self) -> int:
    """Returns the examples in a batch of the server's pass for statistics."""
    # Only `batch_mean` statistics depend on the batch size.
    if self.hparams.batch_norm_statistics == statistics.BATCH_MEAN:
      return self.hparams.server_batch_size
    return self.hparams.statistics_batch_size


def build_plan(
  model_fn: adapter.ModelFn,
  algorithm: base.Algorithm,
  data: DataSpec,
  *,
  seed: int,
  aggregator: Aggregator | None = None,
  checks: bool = True,
) -> Plan:
  """Builds the plan of a process.

  Args:
    model_fn: See `process.build_process`.
    algorithm: The algorithm.
    data: Describes the data.
    seed: Seed of the run.
    aggregator: The user's aggregator, if there is one.
    checks: Whether the model is checked as a process needs it.

  Returns:
    The plan.

  Raises:
    UsageError: If the model is unsuitable, there are an aggregator and several
      groups, or the algorithm cannot have the quota that its round has.
  """
  algorithm = quota.apply(algorithm)
  groups = _groups(algorithm, aggregator)
  aggregator = aggregator or tff.aggregators.MeanFactory()
  stored = data.element_spec['unlabeled']['x']
  networks = network_factory.NetworkFactory(
    network_factory.network_fn(model_fn, algorithm),
    algorithm.round,
    image_shape=augment.input_shape(data.views, stored),
    num_classes=data.num_classes,
    seed=seed,
    checks=checks,
  )
  with networks.probe() as network:
    model = network.model
  model_checks.check_scale(model, data.views, stored)
  setup = base.Setup(
    data.num_clients or 0,
    networks.weight_specs,
    num_classes=networks.num_classes,
    num_outputs=networks.num_outputs,
    feature_size=lambda: networks.feature_size,
    plain_mean=isinstance(aggregator, tff.aggregators.MeanFactory),
    robust=isinstance(aggregator, robust.RobustMeanFactory),
    seed=seed,
  )
  return Plan(
    algorithm,
    data,
    networks,
    states_lib.States(algorithm, setup),
    aggregator,
    _build_exchange(algorithm, setup, networks),
    groups,
  )


def _build_exchange(
  algorithm: base.Algorithm,
  setup: base.Setup,
  networks: network_factory.NetworkFactory,
) -> exchange_lib.Exchange | None:
  """Builds the exchange of an algorithm, if it has one."""
  build = algorithm.exchange()
  if build is None:
    return None
  specs = {
    name: networks.specs_of(declared.build)
    for name, declared in algorithm.networks().items()
    if declared.build is not None
  }
  return build(setup._replace(of_peers=specs))


def _groups(
  algorithm: base.Algorithm, aggregator: Aggregator | None
) -> groups_lib.Groups | None:
  """Returns the groups of clients, if the process aggregates in groups.

  An aggregator replaces the mean of a single group. Then the process has no
  groups.

  Args:
    algorithm: The algorithm.
    aggregator: The user's aggregator, if there is one.

  Returns:
    The groups, or None.

  Raises:
    UsageError: If there are an aggregator and several groups.
  """
  groups = algorithm.groups()
  if groups is None or aggregator is None:
    return groups
  if groups.num_groups > 1:
    raise UsageError(
      f'aggregator={type(aggregator).__name__}: this algorithm'
      f' forms {groups.num_groups} groups of clients, and the plain mean'
      ' of each; leave aggregator out, or take one group'
    )
  return None
