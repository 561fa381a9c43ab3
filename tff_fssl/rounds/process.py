"""The construction of an algorithm's learning process."""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
import dataclasses
from typing import Any, TypeAlias

import numpy as np

from tff_fssl import hparams as hparams_lib
from tff_fssl.aggregators import collecting
from tff_fssl.aggregators import grouped
from tff_fssl.aggregators import guarded
from tff_fssl.aggregators import hparams as aggregator_hparams
from tff_fssl.aggregators import privacy
from tff_fssl.aggregators import robust
from tff_fssl.data import augment
from tff_fssl.interface import base
from tff_fssl.interface import channels
from tff_fssl.interface import groups as groups_lib
from tff_fssl.interface import round_hparams as round_hparams_lib
from tff_fssl.lazy import tf, tff
from tff_fssl.models import adapter
from tff_fssl.models import server_model
from tff_fssl.rounds import checks
from tff_fssl.rounds import client_data
from tff_fssl.rounds import client_side
from tff_fssl.rounds import client_work
from tff_fssl.rounds import communication as communication_lib
from tff_fssl.rounds import composer
from tff_fssl.rounds import delivery as delivery_lib
from tff_fssl.rounds import messages
from tff_fssl.rounds import network_factory
from tff_fssl.rounds import screen
from tff_fssl.rounds import server as server_lib
from tff_fssl.rounds import states as states_lib

RoundHparams = round_hparams_lib.RoundHparams
ServerDataFn: TypeAlias = 'Callable[[], tf.data.Dataset]'


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


def build_process(
  model_fn: adapter.ModelFn,
  algorithm: base.Algorithm,
  data: DataSpec,
  *,
  seed: int,
  aggregator: tff.aggregators.WeightedAggregationFactory | None = None,
) -> composer.FsslProcess:
  """Builds the learning process of an algorithm.

  Its state is TFF's `LearningAlgorithmState`, whose `client_work` is the number
  of the next round. The first round is `1 - num_pretraining_rounds`, and
  `process.rounds(10)` counts them. In a round:

  1.  The server broadcasts weights and batch norm statistics.
  2.  Clients train (from round 1 on) and upload updates and weights.
  3.  The aggregator combines them. The server optimizer applies the result.
  4.  With labels at the server, the server trains on them.
  5.  With static batch norm, further client phases gather statistics: one for
      the model, and one for each set of weights that has its own.

  An algorithm may add to each of these. With groups of clients, their elements
  may need a `slot`, too: see `groups`.

  If clients took part but none sent a usable update, or there are fewer usable
  clients than `min_clients`, the round changes nothing but its number, and what
  is due by that: ProtoFSSL's sent prototypes and FedMatch's choice of helpers.

  Args:
    model_fn: Builds a Keras model, images -> logits.
    algorithm: The algorithm. Its `round` says where the labels are.
    data: Describes the data.
    seed: Seed of the initial weights and of the server's training.
    aggregator: Combines updates, by default into their weighted mean. With a
      `privacy.PrivateMeanFactory`, or an aggregator that sums securely, only
      the number of clients is released besides the aggregate.

  Returns:
    The process.

  Raises:
    UsageError: If arguments do not fit together, or the model is unsuitable.

  Examples:
    >>> import tff_fssl as fssl
    >>> shape, digits = (8, 8, 1), fssl.load('digits').train
    >>> process = fssl.build_process(
    ...   lambda: fssl.build_network('linear', shape, num_classes=10),
    ...   fssl.FixMatch(
    ...     round=fssl.RoundHparams(scenario=fssl.LABELS_AT_CLIENTS)
    ...   ),
    ...   fssl.DataSpec(
    ...     fssl.element_spec(shape),
    ...     fssl.build_views(shape, mean=(0,), std=(1,), flip=False),
    ...   ),
    ...   seed=0,
    ... )
    >>> def load_client(round_num, client_id):
    ...   x, y = digits.x[client_id::9], digits.y[client_id::9]
    ...   return (x[:20], y[:20]), (x[20:], None)  # Labelled, unlabelled.
    >>> source = fssl.build_data_source(
    ...   process, load_client, seed=0, num_clients=9, clients_per_round=2
    ... )
    >>> cohort = source.iterator().select(2)
    >>> state, metrics = process.next(process.initialize(), cohort)
    >>> int(metrics['client_work']['train']['num_clients'])
    2
  """
  _check(algorithm, data, aggregator)
  return _Assembly(model_fn, algorithm, data, seed, aggregator).build()


def get_map_reduce_form(
  process: tff.learning.templates.LearningProcess,
) -> tff.backends.mapreduce.MapReduceForm:
  """Compiles a process's `next` to TFF's MapReduceForm.

  MapReduceForm describes a round with one client phase by a few TensorFlow
  functions. Clients run `work`. `zero`, `accumulate` and `merge` combine their
  results. The server runs `update`. The check of clients' values
  (`aggregators.guarded`) becomes part of `work`, so a server that does not
  trust clients' programs must repeat it on the values that it receives.

  Args:
    process: A process of `build_process`.

  Returns:
    The form.

  Raises:
    UsageError: If a round has two client phases. The error names alternatives.
  """
  if getattr(process, 'num_phases', 1) > 1:
    raise hparams_lib.UsageError(
      'MapReduceForm has one client phase a round: a broadcast, work, a sum.'
      ' Static batch norm (--norm=sbn) has a second one, since statistics of'
      " the round's new weights can only be gathered once these are known and"
      ' broadcast: build the process with --statistics_phase=training, which'
      ' takes those of the weights before, with group norm (--norm=gn), or with'
      ' moving averages (--norm=bn)'
    )
  # Grappler would replace loops by cycles of nodes. TensorFlow infers shapes of
  # functions with these in the order of addresses in memory, and sometimes
  # fails ("Missing src context").
  config = tf.compat.v1.ConfigProto()
  config.graph_options.rewrite_options.disable_meta_optimizer = True
  return tff.backends.mapreduce.get_map_reduce_form_for_computation(
    process.next, config
  )


def _check(
  algorithm: base.Algorithm,
  data: DataSpec,
  aggregator: tff.aggregators.WeightedAggregationFactory | None,
) -> None:
  """Raises `UsageError` if arguments of `build_process` do not fit together."""
  if not isinstance(algorithm, base.Algorithm):
    name = getattr(algorithm, '__name__', None)
    raise hparams_lib.UsageError(
      f'algorithm={name or repr(algorithm)}: give an instance of an algorithm'
      f'{f", {name}()" if name else ""}'
    )
  scenario = algorithm.round.scenario
  if scenario not in algorithm.scenarios:
    raise hparams_lib.UsageError(
      f'--scenario={scenario}: {algorithm.name} is not defined for it, only for'
      f' {", ".join(algorithm.scenarios)}'
    )
  if algorithm.round.labels_at_clients != (data.server_data_fn is None):
    given = 'None' if data.server_data_fn is None else '(given)'
    raise hparams_lib.UsageError(
      f'scenario={scenario} and server_data_fn={given}: the server needs'
      ' labelled data if, and only if, labels are at the server'
    )
  if isinstance(aggregator, tff.aggregators.UnweightedAggregationFactory):
    raise hparams_lib.UsageError(
      f'aggregator={type(aggregator).__name__}: must be weighted;'
      ' for equal weights set client_weighting=uniform; for differential'
      ' privacy use aggregators.factory.build_aggregator, with which nothing is'
      ' released without noise'
    )


def _groups(
  algorithm: base.Algorithm,
  aggregator: tff.aggregators.WeightedAggregationFactory | None,
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
    raise hparams_lib.UsageError(
      f'aggregator={type(aggregator).__name__}: this algorithm'
      f' forms {groups.num_groups} groups of clients, and the plain mean'
      ' of each; leave aggregator out, or take one group'
    )
  return None


class _Assembly:
  """The components of a process, from the arguments of `build_process`."""

  def __init__(
    self,
    model_fn: adapter.ModelFn,
    algorithm: base.Algorithm,
    data: DataSpec,
    seed: int,
    aggregator: tff.aggregators.WeightedAggregationFactory | None,
  ):
    self._algorithm = algorithm
    self._model_aggregator = aggregator or tff.aggregators.MeanFactory()
    self._hparams = hparams = algorithm.round
    stored = data.element_spec['unlabeled']['x']
    self._networks = network_factory.NetworkFactory(
      network_factory.network_fn(model_fn, algorithm),
      hparams,
      image_shape=augment.input_shape(data.views, stored),
      num_classes=data.num_classes,
      seed=seed,
    )
    self._states = states_lib.States(
      algorithm, self._make_setup(data.num_clients, seed)
    )
    self._server = server_lib.ServerSide(
      self._networks,
      algorithm,
      self._states,
      data.views,
      data.server_data_fn,
      seed,
    )
    self._exchange = messages.build_exchange(
      algorithm, self._states.setup, self._networks.specs_of
    )
    self._element_spec = data.element_spec
    if self._exchange is not None:
      self._element_spec = client_data.add_ids(
        data.element_spec, self._exchange.num_clients
      )
    groups = _groups(algorithm, aggregator)
    self._delivery = delivery_lib.Delivery(
      groups, self._networks.head if algorithm.head_stays else {}
    )
    if groups is not None:
      self._element_spec = client_data.add_slots(
        self._element_spec, groups.needs_slots
      )
    self._bounds = screen.build_bounds(
      algorithm, self._states.setup, self._exchange, groups
    )
    self._clients = client_side.ClientSide(
      self._networks,
      algorithm,
      self._states,
      data.views,
      self._element_spec,
      self._exchange,
      self._delivery,
    )

  def _make_setup(self, num_clients: int | None, seed: int) -> base.Setup:
    """Describes the process to the algorithm."""
    networks = self._networks
    return base.Setup(
      num_clients or 0,
      networks.weight_specs,
      num_classes=networks.num_classes,
      num_outputs=networks.num_outputs,
      feature_size=lambda: networks.feature_size,
      plain_mean=isinstance(
        self._model_aggregator, tff.aggregators.MeanFactory
      ),
      robust=isinstance(self._model_aggregator, robust.RobustMeanFactory),
      seed=seed,
    )

  def build(self) -> composer.FsslProcess:
    """Builds the process."""
    initial_model = self._server.build_initial_model()
    model_type = initial_model.type_signature.result
    aggregator, is_confidential = self._aggregator(model_type)
    exchange = self._exchange
    distributor = messages.build_distributor(
      model_type,
      self._states,
      exchange,
      self._hparams.first_round,
      self._delivery,
    )
    message_type = distributor.next.type_signature.result.result.member
    checks.check_names(
      self._algorithm,
      self._states,
      server_model.ServerModel(*tff.types.type_to_tf_tensor_specs(model_type)),
      tff.structure.name_list(message_type.sets),
    )
    part = self._clients.part(release_metrics=not is_confidential)
    work, report_bytes = client_work.build_client_work(
      message_type,
      self._element_spec,
      part,
      first_round=self._hparams.first_round,
      bounds=self._bounds,
    )
    aggregate_type = aggregator.next.type_signature.result.result.member
    collect_rows, rows_type = self._collect_rows()
    finalizer = self._finalizer(model_type, aggregate_type, work, rows_type)
    phases, statistics_up = self._clients.statistics_phases(
      model_type, message_type, self._server
    )
    state_type = tff.to_type(
      composer.LearningAlgorithmState(
        model_type,
        distributor.initialize.type_signature.result.member,
        tff.TensorType(np.int32),
        aggregator.initialize.type_signature.result.member,
        finalizer.initialize.type_signature.result.member,
      )
    )
    min_clients = self._hparams.min_clients
    # Even without `min_clients`, a round whose updates all fail is discarded.
    counts = composer.build_counts(
      work.next.type_signature.result.measurements.member,
      min_clients=min_clients,
      is_confidential=is_confidential,
    )
    end_round = None
    if exchange is not None:
      end_round = messages.build_accept(
        exchange, state_type.distributor, model_type, rows_type
      )
    process = composer.compose_fssl_process(
      initial_model,
      distributor,
      work,
      aggregator,
      finalizer,
      start=self._states.start,
      weights_of=self._states.prediction.weights,
      last_phases=phases,
      end_round=end_round,
      collect_rows=collect_rows,
      counts=counts,
      discard=self._states.discard,
      reports_too_few=bool(min_clients),
      keeps_aggregator=self._is_private,
      communication=self._communication(
        model_type,
        work.next.type_signature.result.result.member,
        statistics_up=statistics_up,
        report_bytes=report_bytes,
      ),
    )
    self._describe(process, part, phases)
    return process

  @property
  def _is_private(self) -> bool:
    return isinstance(self._model_aggregator, privacy.PrivateMeanFactory)

  def _collect_rows(self) -> tuple[Any, tff.Type | None]:
    """Returns `collecting.build_collect`'s result, if clients send rows."""
    specs = messages.row_specs(self._exchange, self._bounds.uploads)
    if not specs:
      return None, None
    return collecting.build_collect(messages.row_type(specs))

  def _describe(
    self,
    process: composer.FsslProcess,
    part: client_work.ClientPart,
    phases: Sequence[composer.LastPhase],
  ) -> None:
    """Sets the attributes that describe the process."""
    process.first_round = self._hparams.first_round
    process.num_classes = self._networks.num_classes
    if self._exchange is not None:
      process.num_clients = self._exchange.num_clients
      process.outside = self._exchange.outside
    process.needs_slots = 'slot' in self._element_spec
    process.prediction = self._states.prediction
    process.min_clients = self._hparams.min_clients
    own = phases if self._clients.has_second_phase else ()
    process.num_phases = 1 + len(own)
    process.find_non_finite = client_work.build_find_non_finite(
      part, self._make_message
    )
    process.find_rejected = client_work.build_find_rejected(
      part, self._make_message, self._bounds
    )
    # Clients without the last layer, or with models of their own, have no
    # version of the server's model.
    if not (self._algorithm.head_stays or self._algorithm.alone):
      process.local_model = client_work.build_local_model(
        part, self._make_message, self._clients.own_statistics
      )

  def _aggregator(
    self, model_type: tff.Type
  ) -> tuple[tff.templates.AggregationProcess, bool]:
    """Makes the aggregator.

    Args:
      model_type: The type of the `ServerModel`.

    Returns:
      (the aggregator, whether clients may release nothing besides its sum).
    """
    specs = tff.types.type_to_tf_tensor_specs(model_type)
    model_specs = self._delivery.select_update(specs.trainable)
    if self._networks.tracks_moving_averages:
      model_specs += tuple(
        s for s in specs.non_trainable if s.dtype.is_floating
      )
    uploads = self._bounds.uploads
    sums = channels.sent_as(uploads, channels.SUM)
    combined: dict[str, Any] = {
      channels.MODEL: model_specs,
      **dict.fromkeys(self._bounds.networks, tuple(specs.trainable)),
      **{name: upload.spec for name, upload in sums.items()},
    }
    factory = self._model_aggregator
    groups = self._delivery.groups
    if groups is not None:
      factory = grouped.GroupedMeanFactory(
        groups.num_groups, groups.num_starts, self._networks.num_trainable
      )
      combined[channels.PLACE] = tf.TensorSpec([2], tf.float32)
    private = self._is_private
    # A private mean has its own screen: see `aggregators.privacy`.
    if not private:
      factory = guarded.GuardedFactory(factory, self._bounds.weights)
    aggregator = factory.create(
      tff.types.tensorflow_to_type(channels.sort_by_name(combined)),
      tff.TensorType(np.float32),
    )
    secure = guarded.sums_securely(aggregator)
    if private or secure:
      kind = aggregator_hparams.DP if private else aggregator_hparams.SECURE
      aggregator_hparams.check_confidential(
        kind,
        own_weights=self._algorithm.sets_weights,
        client_weighting=self._hparams.client_weighting,
        batch_norm=self._networks.has_batch_norm,
        static=self._networks.is_static,
        also_sends=len(sums) < len(uploads) or self._exchange is not None,
      )
    return aggregator, private or secure

  def _finalizer(
    self,
    model_type: tff.Type,
    combined_type: tff.Type,
    work: tff.learning.templates.ClientWorkProcess,
    rows_type: tff.Type | None,
  ) -> tff.learning.templates.FinalizerProcess:
    """Makes the server's step."""
    of_clients = work.next.type_signature.result.measurements.member
    aggregate = collections.OrderedDict(
      update=combined_type,
      uploads=of_clients['uploads'],
      num_reports=of_clients['num_reports'],
    )
    if channels.sent_as(self._bounds.uploads, channels.ROWS):
      aggregate['rows'] = rows_type
    return self._server.build_step(
      model_type,
      tff.to_type(aggregate),
      self._bounds.networks,
      self._bounds.uploads,
      self._delivery.restored,
    )

  def _communication(
    self,
    model_type: tff.Type,
    upload_type: tff.Type,
    **sizes: int,
  ) -> tff.Computation:
    """Builds the computation of the bytes that travel."""
    if self._algorithm.alone:
      return communication_lib.build_no_communication(model_type)
    return communication_lib.build_communication(
      model_type,
      upload_type,
      states=self._states,
      networks=self._bounds.networks,
      uploads=self._bounds.uploads,
      exchange=self._exchange,
      kept_bytes=self._delivery.kept_bytes,
      has_statistics_phases=self._clients.has_second_phase,
      **sizes,
    )

  def _make_message(
    self, state: composer.LearningAlgorithmState, round_num: tf.Tensor
  ) -> messages.Message:
    """Makes the message of a round, outside of TFF."""
    exchange = self._exchange
    return messages.make_message(
      exchange,
      self._states,
      () if exchange is None else state.distributor['table'],
      server_model.ServerModel(*state.global_model_weights),
      round_num,
      self._delivery,
    )
