"""Builds a learning process from an algorithm's parts."""

import collections
from collections.abc import Callable, Mapping
import dataclasses
import functools
import math
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from tff_fssl import hparams as hparams_lib
from tff_fssl.aggregators import guarded
from tff_fssl.aggregators import hparams as aggregator_hparams
from tff_fssl.aggregators import privacy
from tff_fssl.data import augment
from tff_fssl.finalizers import server_algorithm
from tff_fssl.finalizers import server_step
from tff_fssl.local import algorithm as algorithm_lib
from tff_fssl.local import objective
from tff_fssl.local import optimizer as optimizer_lib
from tff_fssl.local import training
from tff_fssl.models import adapter
from tff_fssl.models import server_model
from tff_fssl.models import statistics
from tff_fssl.rounds import client_data
from tff_fssl.rounds import client_work
from tff_fssl.rounds import communication as communication_lib
from tff_fssl.rounds import composer
from tff_fssl.rounds import exchange as exchange_lib
from tff_fssl.rounds import round_hparams as round_hparams_lib
from tff_fssl.rounds import screen
from tff_fssl.rounds import statistics_phase

RoundHparams = round_hparams_lib.RoundHparams
ServerDataFn = Callable[[], tf.data.Dataset]

# Keeps the server's seeds apart from the clients', which the data source makes.
_SERVER = 1


@dataclasses.dataclass(frozen=True)
class Parts:
  """The parts of an algorithm; with the defaults, a round is FedAvg's.

  Attributes:
    local: What clients do in a round.
    server_training: What the server does with its labels, if it has any.
    server: What the server does with what came from the clients.
    exchange: What else travels between server and clients; or a function of
      the population that makes it.
    prediction: How the model predicts.
    alone: Whether each client trains alone. The exchange's table then stands
      for the clients' own disks: in reality nothing travels, so that no bytes
      are counted, and no statistics are gathered over clients.
  """

  local: algorithm_lib.LocalAlgorithm
  server_training: algorithm_lib.LocalAlgorithm = objective.SUPERVISED
  server: server_algorithm.ServerAlgorithm = server_algorithm.FEDAVG
  exchange: exchange_lib.Exchange | exchange_lib.BuildExchange | None = None
  prediction: server_model.Prediction = server_model.Prediction()
  alone: bool = False


def build_process(
  model_fn: adapter.ModelFn,
  parts: Parts,
  *,
  views: augment.Views,
  element_spec: Any,
  server_data_fn: ServerDataFn | None,
  hparams: RoundHparams,
  seed: int,
  model_aggregator: tff.aggregators.WeightedAggregationFactory | None = None,
  num_classes: int | None = None,
  num_clients: int | None = None,
) -> composer.FsslProcess:
  """Builds the process of an algorithm.

  Its state is TFF's `LearningAlgorithmState`, whose `client_work` is the number
  of the next round; the first is `1 - num_pretraining_rounds`. In a round:

  1.  The server broadcasts weights and batch norm statistics.
  2.  Clients train (from round 1 on) and send updates and weights.
  3.  The aggregator combines them; the server optimizer applies the result.
  4.  With labels at the server, the server trains on them.
  5.  With static batch norm, a second client phase gathers statistics.

  An algorithm's parts may add to each of these.

  If clients took part but none sent a usable update, only the round number in
  the state changes.

  Args:
    model_fn: Builds a Keras model, images -> logits.
    parts: The algorithm.
    views: How stored examples become the network's inputs.
    element_spec: The spec of the one element that a client's data set has.
    server_data_fn: Returns the server's labelled data, a data set of one
      element OrderedDict(x, y); called inside a TFF computation. Needed if and
      only if labels are at the server.
    hparams: The round's hyper-parameters.
    seed: Seed of the initial weights and of the server's training.
    model_aggregator: Combines updates; the weighted mean by default. With a
      `privacy.PrivateMeanFactory`, or an aggregator that sums securely, nothing
      else about a client is released: no statistics, and no metrics except the
      number of clients.
    num_classes: Width of the model's output; None to skip the check.
    num_clients: The number of clients, whose ids are 0 .. num_clients - 1.
      Needed only by algorithms whose server tells clients apart.

  Returns:
    The process.

  Raises:
    UsageError: If arguments do not fit together, or the model is unsuitable.
  """
  at_server = not hparams.labels_at_clients
  if at_server != (server_data_fn is not None):
    raise hparams_lib.UsageError(
      f'scenario={hparams.scenario} and server_data_fn='
      f'{"None" if server_data_fn is None else "(given)"}: the server needs'
      ' labelled data if, and only if, labels are at the server'
    )
  if isinstance(model_aggregator, tff.aggregators.UnweightedAggregationFactory):
    raise hparams_lib.UsageError(
      f'model_aggregator={type(model_aggregator).__name__}: must be weighted;'
      ' for equal weights set client_weighting=uniform; for differential'
      ' privacy use aggregators.factory.build_aggregator, with which nothing is'
      ' released without noise'
    )
  parts = completed(parts, hparams)
  assembly = _Assembly(
    model_fn, parts, views, element_spec, server_data_fn, hparams, seed
  )
  assembly.check_network(num_classes)
  assembly.make_exchange(num_clients)
  return assembly.build(model_aggregator)


# The set that holds the moving average of the model's weights.
_AVERAGE = 'average'


def completed(parts: Parts, hparams: RoundHparams) -> Parts:
  """An algorithm's parts with those that any algorithm can be given."""
  if not hparams.average_decay or _AVERAGE in parts.prediction.also:
    return parts
  server = server_algorithm.with_moving_average(
    parts.server, _AVERAGE, hparams.average_decay
  )
  also = {**parts.prediction.also, _AVERAGE: server_model.of_set(_AVERAGE)}
  return dataclasses.replace(
    parts, server=server, prediction=parts.prediction._replace(also=also)
  )


class _Assembly:
  """The parts of a process, from the arguments of `build_process`."""

  def __init__(
    self,
    model_fn: adapter.ModelFn,
    parts: Parts,
    views: augment.Views,
    element_spec: Any,
    server_data_fn: ServerDataFn | None,
    hparams: RoundHparams,
    seed: int,
  ):
    self._model_fn, self._parts, self._views = model_fn, parts, views
    self._element_spec = element_spec
    self._server_data_fn = server_data_fn
    self._hparams, self._seed = hparams, seed
    self._at_server = not hparams.labels_at_clients
    self._tracked = hparams.batch_norm_statistics == 'moving_average'
    self._first_round = 1 - (
      hparams.num_pretraining_rounds if self._at_server else 0
    )
    self._image_shape = augment.image_shape(
      views, element_spec['unlabeled']['x']
    )
    self._sgd = optimizer_lib.Sgd(
      hparams.momentum,
      hparams.nesterov,
      hparams.weight_decay,
      hparams.max_gradient_norm,
    )
    self._keeps_momentum = bool(
      self._at_server and hparams.server_keeps_momentum and hparams.momentum
    )

  def _network(
    self, seed: int | None = None, trace: bool = False
  ) -> adapter.Network:
    """A network in the current graph; with initial weights if it has a seed."""
    return adapter.Network(
      self._model_fn,
      seed=seed,
      num_classes=self._expected_classes,
      image_shape=self._image_shape,
      track_moving_averages=self._tracked,
      compute_dtype=self._hparams.compute_dtype,
      trace=trace,
    )

  def check_network(self, num_classes: int | None) -> None:
    """Builds the network once, and notes what the round depends on."""
    self._expected_classes = num_classes
    with tf.Graph().as_default():
      network = self._network(self._seed, trace=True)
    if network.num_outputs < 2:
      raise hparams_lib.UsageError(
        f'model {network.model.name!r} gives one logit; it must give one for'
        ' each class, two for two classes'
      )
    self._num_classes = network.num_outputs
    self._has_batch_norm = bool(network.batch_norm_layers)
    self._is_static = network.is_static
    self._variances = network.variances
    self._num_trainable = len(network.trainable_variables)
    self._weight_specs = network.weight_specs

  def make_exchange(self, num_clients: int | None) -> None:
    """Makes the exchange, if there is one; call `check_network` before."""
    self._exchange: exchange_lib.Exchange | None = None
    exchange = self._parts.exchange
    if exchange is None:
      return
    if not isinstance(exchange, exchange_lib.Exchange):
      if not num_clients:
        raise hparams_lib.UsageError(
          f'num_clients={num_clients}: the server of this algorithm keeps'
          ' values for each client; give the number of clients, whose ids are'
          ' 0 to num_clients - 1'
        )
      population = exchange_lib.Population(num_clients, self._weight_specs)
      exchange = exchange(population)
    self._exchange = exchange
    self._element_spec = client_data.with_ids(
      self._element_spec, exchange.num_clients
    )

  def build(
    self, model_aggregator: tff.aggregators.WeightedAggregationFactory | None
  ) -> composer.FsslProcess:
    """The process."""
    initial_model = self._initial_model()
    model_type = initial_model.type_signature.result
    bounds = self._bounds()
    aggregator, is_confidential = self._aggregator(
      model_type, model_aggregator, bounds
    )
    exchange = self._exchange
    distributor = exchange_lib.build_distributor(
      model_type, self._parts.server, exchange, self._first_round
    )
    part = self._client_part(release_metrics=not is_confidential)
    work, report_bytes = client_work.build_client_work(
      distributor.next.type_signature.result.result.member,
      self._element_spec,
      part,
      first_round=self._first_round,
      bounds=bounds,
    )
    finalizer = self._finalizer(model_type, aggregator, work)
    phases, statistics_up = self._statistics_phases(model_type)
    state_type = tff.to_type(
      composer.LearningAlgorithmState(
        model_type,
        distributor.initialize.type_signature.result.member,
        tff.TensorType(np.int32),
        aggregator.initialize.type_signature.result.member,
        finalizer.initialize.type_signature.result.member,
      )
    )
    revise_state = None
    if not is_confidential:  # Else the server must not learn who failed.
      revise_state = _keep_if_all_failed(
        state_type,
        work.next.type_signature.result.measurements.member['train'],
      )
    end_round = None
    if exchange is not None:
      end_round = exchange_lib.build_accept(
        exchange, state_type.distributor, model_type
      )
    process = composer.compose_fssl_process(
      initial_model,
      distributor,
      work,
      aggregator,
      finalizer,
      start=self._parts.server.start,
      last_phases=phases,
      end_round=end_round,
      revise_state=revise_state,
      communication=self._communication(
        model_type,
        work.next.type_signature.result.result.member,
        has_statistics_phases=bool(phases),
        statistics_up=statistics_up,
        report_bytes=report_bytes,
      ),
    )
    process.num_classes = self._num_classes
    process.num_clients = exchange.num_clients if exchange else 0
    process.prediction = self._parts.prediction
    process.find_non_finite = client_work.build_find_non_finite(
      part, self._make_message
    )
    return process

  def _initial_model(self) -> tff.Computation:
    """`( -> ServerModel)`."""

    @tff.tensorflow.computation
    def initial_model() -> server_model.ServerModel:
      network = self._network(self._seed, trace=False)

      @tf.function
      def run() -> server_model.ServerModel:
        weights = network.initial_weights()
        if network.is_static and self._at_server:
          kind = self._hparams.batch_norm_statistics
          sums = statistics.gather(
            network,
            weights,
            self._read_server_data().x,
            self._views,
            kind=kind,
            batch_size=self._server_statistics_batch(),
          )
          weights = statistics.put(network, weights, sums, kind=kind)
        return self._parts.server.start(weights)

      initial: server_model.ServerModel = run()
      return initial

    return initial_model

  def _read_server_data(self) -> algorithm_lib.Examples:
    """The server's labelled examples."""
    assert self._server_data_fn is not None  # Checked by `build_process`.
    return client_data.read_examples(
      client_data.read_one(self._server_data_fn())
    )

  def _server_statistics_batch(self) -> int:
    # Only `batch_mean` statistics depend on the batch size.
    if self._hparams.batch_norm_statistics == statistics.BATCH_MEAN:
      return self._hparams.server_batch_size
    return self._hparams.statistics_batch_size

  def _rate_fn(self, initial: float) -> Callable[[tf.Tensor], tf.Tensor]:
    """Round number -> learning rate."""
    return functools.partial(
      optimizer_lib.learning_rate,
      initial,
      self._hparams.learning_rate_schedule,
      self._hparams.schedule_rounds,
    )

  def _uploaded_peers(self) -> dict[str, int]:
    """Name of each peer in the update -> the number of its tensors."""
    return {
      name: self._num_trainable
      for name, peer in self._parts.local.peers.items()
      if peer.uploaded
    }

  def _aggregator(
    self,
    model_type: tff.Type,
    model_aggregator: tff.aggregators.WeightedAggregationFactory | None,
    bounds: screen.Bounds,
  ) -> tuple[tff.templates.AggregationProcess, bool]:
    """The aggregator, and whether nothing but its sum may leave clients."""
    specs = tff.types.type_to_tf_tensor_specs(model_type)
    update_specs = tuple(specs.trainable)
    if self._tracked:
      update_specs += tuple(
        s for s in specs.non_trainable if s.dtype.is_floating
      )
    update_specs += tuple(specs.trainable) * len(self._uploaded_peers())
    factory = model_aggregator or tff.aggregators.MeanFactory()
    private = isinstance(factory, privacy.PrivateMeanFactory)
    if not private:
      factory = guarded.GuardedFactory(factory, bounds.weights)
    aggregator = factory.create(
      tff.types.tensorflow_to_type(update_specs), tff.TensorType(np.float32)
    )
    secure = guarded.sums_securely(aggregator)
    if private or secure:
      kind = aggregator_hparams.DP if private else aggregator_hparams.SECURE
      aggregator_hparams.check_confidential(
        kind,
        own_weights=self._parts.local.weighs,
        client_weighting=self._hparams.client_weighting,
        batch_norm=self._has_batch_norm,
        static=self._is_static,
      )
      if self._parts.local.signals or self._exchange is not None:
        raise hparams_lib.UsageError(
          f'--aggregator={kind}: clients of this algorithm also send values'
          ' that are not part of the sum of updates, and would be unprotected;'
          ' use another aggregator, or another algorithm'
        )
    return aggregator, private or secure

  def _client_part(self, release_metrics: bool) -> client_work.ClientPart:
    """What clients do."""
    hparams = self._hparams
    return client_work.ClientPart(
      make_training=self._client_training,
      learning_rate_fn=self._rate_fn(hparams.client_learning_rate),
      num_classes=self._num_classes,
      weigh_by_examples=hparams.client_weighting == 'examples',
      track_non_trainable=self._tracked,
      exchange=self._exchange,
      release_metrics=release_metrics,
    )

  def _client_batch_sizes(self) -> tuple[int, int]:
    """Unlabelled and labelled examples in a batch at a client."""
    local = self._parts.local
    return self._hparams.client_batch_sizes(local.trains_on_unlabeled)

  def _client_training(self) -> training.LocalTraining:
    """A client's training; makes variables."""
    hparams = self._hparams
    return training.LocalTraining(
      self._network(),
      self._parts.local,
      self._views,
      training.LoopConfig(
        hparams.client_epochs,
        *self._client_batch_sizes(),
        self._sgd,
        hparams.proximal_strength,
        hparams.jit_compile,
      ),
      {name: self._network() for name in self._parts.local.peers},
    )

  def _server_training(self) -> server_step.ServerTraining:
    """The server's training on its labels; makes variables."""
    hparams = self._hparams
    local = training.LocalTraining(
      self._network(),
      self._parts.server_training,
      self._views,
      training.LoopConfig(
        hparams.server_epochs,
        hparams.server_batch_size,
        hparams.server_batch_size,
        self._sgd,
        jit_compile=hparams.jit_compile,
        keeps_momentum=self._keeps_momentum,
      ),
    )
    rate_fn = self._rate_fn(hparams.server_learning_rate)

    def train(
      weights: adapter.Weights,
      round_num: tf.Tensor,
      momentum: server_step.Momentum,
    ) -> tuple[
      adapter.Weights,
      collections.OrderedDict[str, tf.Tensor],
      server_step.Momentum,
    ]:
      labeled = self._read_server_data()
      result = local.run(
        weights,
        labeled,
        algorithm_lib.Examples(labeled.x[:0], labeled.y[:0]),
        learning_rate=rate_fn(round_num),
        seed=training.fold_in(tf.stack([self._seed, round_num]), _SERVER),
        round_num=round_num,
        momentum=momentum,
      )
      metrics = collections.OrderedDict(
        (f'server_{name}', total / count)
        for name, (total, count) in sorted(result.ratios.items())
      )
      metrics['server_num_examples'] = result.num_examples
      metrics['server_non_finite'] = tf.cast(
        tf.logical_not(result.is_finite), tf.int32
      )
      trained = tuple(w - u for w, u in zip(weights.trainable, result.update))
      weights = weights._replace(
        trainable=trained, non_trainable=result.non_trainable
      )
      return weights, metrics, result.momentum

    return train

  def _finalizer(
    self,
    model_type: tff.Type,
    aggregator: tff.templates.AggregationProcess,
    work: tff.learning.templates.ClientWorkProcess,
  ) -> tff.learning.templates.FinalizerProcess:
    """The server's step."""
    of_clients = work.next.type_signature.result.measurements.member
    aggregate_type = tff.to_type(
      collections.OrderedDict(
        update=aggregator.next.type_signature.result.result.member,
        signals=of_clients['signals'],
        num_reports=of_clients['num_reports'],
      )
    )
    return server_step.build_server_step(
      model_type,
      aggregate_type,
      _server_optimizer(self._hparams),
      first_round=self._first_round,
      algorithm=self._parts.server,
      peer_sizes=self._uploaded_peers(),
      make_training=self._server_training if self._at_server else None,
      keeps_momentum=self._keeps_momentum,
      non_negative=self._variances,
    )

  def _statistics_phases(
    self, model_type: tff.Type
  ) -> tuple[list[tff.Computation], int]:
    """The phases of static batch norm; the bytes a client sends in them."""
    if not self._is_static or self._parts.alone:
      return [], 0
    gathering = statistics_phase.Gathering(
      self._network,
      self._views,
      kind=self._hparams.batch_norm_statistics,
      batch_size=self._hparams.statistics_batch_size,
      max_client_examples=_max_client_examples(self._hparams),
      num_classes=self._num_classes,
      server_data_fn=self._server_data_fn,
      server_batch_size=self._server_statistics_batch(),
    )
    phases = [
      statistics_phase.build_statistics_phase(
        model_type, self._element_spec, gathering, name
      )
      for name in ('', *self._parts.server.statistics_of)
    ]
    return [phase for phase, _ in phases], sum(up for _, up in phases)

  def _communication(
    self,
    model_type: tff.Type,
    upload_type: tff.Type,
    *,
    has_statistics_phases: bool,
    **sizes: int,
  ) -> tff.Computation:
    """How many bytes travel."""
    server = self._parts.server
    if self._parts.alone:
      return communication_lib.build_no_communication(model_type)
    return communication_lib.build_communication(
      model_type,
      upload_type,
      server=server,
      peer_sizes=self._uploaded_peers(),
      exchange=self._exchange,
      statistics_of=('', *server.statistics_of)
      if has_statistics_phases
      else (),
      **sizes,
    )

  def _bounds(self) -> screen.Bounds:
    """Bounds on what an honest client with `max_client_examples` can send."""
    local, hparams = self._parts.local, self._hparams
    sizes = self._client_batch_sizes()
    batch_sizes = [
      size
      for size, used in zip(
        sizes, (local.trains_on_unlabeled, local.trains_on_labels)
      )
      if used
    ]
    # The other streams repeat until the longest stream of batches ends.
    most_examples = _max_client_examples(hparams)
    steps = max(math.ceil(most_examples / b) for b in batch_sizes)
    most = float(hparams.client_epochs * steps * sum(batch_sizes))
    if not local.weighs and hparams.client_weighting == 'examples':
      allowed = guarded.AllowedWeights(most)
    else:
      allowed = guarded.AllowedWeights(1.0, all_or_nothing=not local.weighs)
    return screen.Bounds(allowed, most, local.signals, self._exchange)

  def _make_message(
    self, state: composer.LearningAlgorithmState, round_num: tf.Tensor
  ) -> exchange_lib.Message:
    """The message of a round, outside of TFF."""
    exchange = self._exchange
    return exchange_lib.make_message(
      exchange,
      self._parts.server,
      () if exchange is None else state.distributor['table'],
      server_model.ServerModel(*state.global_model_weights),
      round_num,
    )


def _keep_if_all_failed(
  state_type: tff.Type, train_type: tff.Type
) -> tff.Computation:
  """Restores the old model, and what made it, if no update was usable."""

  @tff.tensorflow.computation(state_type, state_type, train_type)
  def keep_if_all_failed(
    old: composer.LearningAlgorithmState,
    new: composer.LearningAlgorithmState,
    train: Mapping[str, tf.Tensor],
  ) -> composer.LearningAlgorithmState:
    num_failed = train['num_non_finite_clients'] + train['num_rejected_clients']
    failed = tf.logical_and(
      train['num_clients'] > 0, num_failed >= train['num_clients']
    )

    def kept(old: Any, new: Any) -> Any:
      return tf.nest.map_structure(
        lambda n, o: tf.where(failed, o, n), new, old
      )

    finalizer_state = kept(old.finalizer, new.finalizer)
    finalizer_state['round_num'] = new.finalizer['round_num']
    # A round without a usable update has no rows for an exchange, either.
    return new._replace(
      global_model_weights=kept(
        old.global_model_weights, new.global_model_weights
      ),
      aggregator=kept(old.aggregator, new.aggregator),
      finalizer=finalizer_state,
    )

  return keep_if_all_failed


def _max_client_examples(hparams: RoundHparams) -> int:
  return hparams.max_client_examples or round_hparams_lib.MAX_CLIENT_EXAMPLES


def _server_optimizer(
  hparams: RoundHparams,
) -> tff.learning.optimizers.Optimizer:
  rate = hparams.server_optimizer_learning_rate
  if hparams.server_optimizer == 'adam':
    return tff.learning.optimizers.build_adam(rate)
  if hparams.server_optimizer == 'yogi':
    return tff.learning.optimizers.build_yogi(rate)
  # TFF does not accept a momentum of 0.
  return tff.learning.optimizers.build_sgdm(
    rate, momentum=hparams.server_optimizer_momentum or None
  )
