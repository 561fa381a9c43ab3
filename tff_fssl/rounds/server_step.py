"""The server's step: it applies the update, then trains on its labels."""

from __future__ import annotations

import collections
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

from tff_fssl import seeds
from tff_fssl.interface import base
from tff_fssl.interface import channels
from tff_fssl.interface import groups as groups_lib
from tff_fssl.interface import names
from tff_fssl.interface import round_hparams as round_hparams_lib
from tff_fssl.lazy import tf, tff
from tff_fssl.models import server_model
from tff_fssl.models.weights import Weights, all_finite, zero_unless
from tff_fssl.rounds import states as states_lib

Momentum = tuple[tf.Tensor, ...]
Sets = Mapping[str, Weights]
Restore = Callable[[Sequence[tf.Tensor]], tuple[tf.Tensor, ...]]


class ServerTraining(Protocol):
  """The server's training, inside a computation."""

  def __call__(
    self,
    weights: Weights,
    round_num: tf.Tensor,
    momentum: Momentum,
    copy: int,
    sets: Sets,
    /,
  ) -> tuple[Weights, _Metrics, Momentum, Sets]:
    """Trains.

    Args:
      weights: The model's.
      round_num: The round.
      momentum: That of copy 0 in the previous round, zeros in the first round.
      copy: The number of the training, if the server trains several times.
      sets: The weights from which auxiliary networks start.

    Returns:
      (weights, metrics, momentum, weights of auxiliary networks).
    """


_Metrics = collections.OrderedDict[str, tf.Tensor]
# OrderedDict(round_num, optimizer, momentum).
_State = collections.OrderedDict[str, Any]


class _Server(base.Server):
  """The server in one step, and the states that it changes."""

  def __init__(
    self,
    state: Mapping[str, Any],
    optimizer: tff.learning.optimizers.Optimizer,
    train: ServerTraining | None,
    non_negative: Collection[int],
    auxiliary: Sequence[tf.Tensor],
    setup: base.Setup,
  ):
    self._optimizer, self._train = optimizer, train
    self._non_negative, self._auxiliary = non_negative, auxiliary
    self.round_num = state['round_num']
    self.seed = seeds.fold_in(
      seeds.server_seed(setup.seed, self.round_num), seeds.UPDATE
    )
    self.setup = setup
    self._optimizer_state = state['optimizer']
    self._old_momentum = self._momentum = tuple(state['momentum'])
    self._of_copies: list[_Metrics] = []
    self.metrics: _Metrics = collections.OrderedDict()

  def next_state(self) -> _State:
    """Returns the state after the step."""
    return collections.OrderedDict(
      round_num=self.round_num + 1,
      optimizer=self._optimizer_state,
      momentum=self._momentum,
    )

  def apply(self, weights: Weights, update: Sequence[tf.Tensor]) -> Weights:
    """Applies an update, unless it or the result is not finite."""
    num_trainable = len(weights.trainable)
    old = (
      self._optimizer_state,
      tuple(weights.trainable),
      tuple(weights.non_trainable),
    )
    new = self._optimizer.next(old[0], old[1], update[:num_trainable])
    non_trainable = old[2]
    if len(update) > num_trainable:
      changes = iter(update[num_trainable:])
      non_trainable = tuple(
        _changed(w, next(changes), index in self._non_negative)
        if w.dtype.is_floating
        else w
        for index, w in enumerate(old[2])
      )
    new = (*new, non_trainable)
    applied = all_finite((update, new))
    self._optimizer_state, trainable, non_trainable = tf.nest.map_structure(
      lambda n, o: tf.where(applied, n, o), new, old
    )
    # Changes of moving averages have other units, and are not in the norm.
    norm = tf.linalg.global_norm([*update[:num_trainable], *self._auxiliary])
    self.metrics.update(
      update_skipped=tf.cast(tf.logical_not(applied), tf.int32),
      update_norm=tf.where(applied, norm, 0.0),
      weights_norm=tf.linalg.global_norm(weights.trainable),
    )
    return Weights(
      tuple(trainable), tuple(non_trainable), weights.statistics_count
    )

  def train(self, weights: Weights, copy: int = 0) -> Weights:
    """Trains on the server's labels, if there are any."""
    return self._train_copy(weights, {}, copy)[0]

  def train_networks(
    self, weights: Weights, networks: Mapping[str, Weights]
  ) -> tuple[Weights, Mapping[str, Weights]]:
    """Trains the model together with auxiliary networks."""
    return self._train_copy(weights, networks, 0)

  def _train_copy(
    self, weights: Weights, networks: Mapping[str, Weights], copy: int
  ) -> tuple[Weights, Mapping[str, Weights]]:
    if self._train is not None:
      weights, metrics, momentum, networks = self._train(
        weights, self.round_num, self._old_momentum, copy, networks
      )
      # All copies start from one momentum: the first one's is kept.
      if not copy:
        self._momentum = momentum
      self._of_copies.append(metrics)
      self.metrics.update(_mean(self._of_copies))
    return weights, networks


def _mean(of_copies: Sequence[_Metrics]) -> _Metrics:
  """Averages the metrics of several trainings. Counts are summed."""
  if len(of_copies) == 1:
    return of_copies[0]
  mean: _Metrics = collections.OrderedDict()
  for name, first in of_copies[0].items():
    total = tf.add_n([metrics[name] for metrics in of_copies])
    is_mean = first.dtype.is_floating and name != 'server_num_examples'
    mean[name] = total / len(of_copies) if is_mean else total
  return mean


def build_optimizer(
  hparams: round_hparams_lib.RoundHparams,
) -> tff.learning.optimizers.Optimizer:
  """Builds the optimizer that applies the aggregator's result."""
  rate = hparams.server_optimizer_learning_rate
  if hparams.server_optimizer == 'adam':
    return tff.learning.optimizers.build_adam(rate)
  if hparams.server_optimizer == 'yogi':
    return tff.learning.optimizers.build_yogi(rate)
  # TFF does not accept a momentum of 0.
  return tff.learning.optimizers.build_sgdm(
    rate, momentum=hparams.server_optimizer_momentum or None
  )


def build_server_step(
  model_type: tff.Type,
  aggregate_type: tff.Type,
  optimizer: tff.learning.optimizers.Optimizer,
  *,
  first_round: int,
  states: states_lib.States,
  networks: Sequence[str] = (),
  uploads: Mapping[str, channels.Upload] = {},
  restore: Restore = tuple,
  make_training: Callable[[], ServerTraining] | None = None,
  keeps_momentum: bool = False,
  non_negative: Collection[int] = (),
) -> tff.learning.templates.FinalizerProcess:
  """Builds the finalizer.

  Its `next` is `<S@SERVER, M@SERVER, A@SERVER> -> <S, M, metrics>@SERVER`,
  where `T@SERVER` is TFF's notation for a value of type T at the server. It
  calls the algorithm's `update` with two tools:

  *   `apply` applies the update (trainable weights before minus after training)
      as a gradient, with `optimizer`. An update is skipped if it or its result
      is not finite (all weights were 0, or the aggregator returned such an
      update). Then weights and optimizer state stay. The mean change of tracked
      non-trainable weights is added, if there are any.
  *   `train` trains on the server's labels, if there are any.

  Args:
    model_type: The type M of a `server_model.ServerModel`.
    aggregate_type: The type A: OrderedDict(update, uploads, num_reports), and
      `rows` with uploads in ROWS.
      `update` is the aggregator's result by channel. That of the model has one
      float tensor per trainable weight, and one per tracked non-trainable float
      weight. With groups, it is the result of `grouped.GroupedMeanFactory`.
    optimizer: The server optimizer.
    first_round: The number of the first round.
    states: Makes the model after a round.
    networks: The names of the auxiliary networks that clients upload.
    uploads: Name -> each upload of the algorithm.
    restore: The part of the model's update that was sent -> the update.
    make_training: Makes the server's training and its variables, if it trains.
    keeps_momentum: Whether training's momentum is part of the state, or none.
    non_negative: Indices of non-trainable weights that no update may make
      negative: variances.

  Returns:
    The process. Its state is OrderedDict(round_num, optimizer, momentum).
  """
  initialize = _build_initialize(
    model_type, optimizer, first_round, keeps_momentum
  )
  state_type = initialize.type_signature.result
  step = _build_step(
    (state_type, model_type, aggregate_type),
    optimizer,
    states,
    networks,
    uploads,
    restore,
    make_training,
    non_negative,
  )

  @tff.federated_computation
  def init_fn() -> tff.Value:
    return tff.federated_eval(initialize, tff.SERVER)

  @tff.federated_computation(
    tff.FederatedType(state_type, tff.SERVER),
    tff.FederatedType(model_type, tff.SERVER),
    tff.FederatedType(aggregate_type, tff.SERVER),
  )
  def next_fn(
    state: tff.Value, model: tff.Value, aggregate: tff.Value
  ) -> tff.templates.MeasuredProcessOutput:
    return tff.templates.MeasuredProcessOutput(
      *tff.federated_map(step, (state, model, aggregate))
    )

  return tff.learning.templates.FinalizerProcess(init_fn, next_fn)


def _build_initialize(
  model_type: tff.Type,
  optimizer: tff.learning.optimizers.Optimizer,
  first_round: int,
  keeps_momentum: bool,
) -> tff.Computation:
  """Builds `( -> OrderedDict(round_num, optimizer, momentum))`."""
  specs = tff.types.type_to_tf_tensor_specs(model_type)

  @tff.tensorflow.computation
  def initialize() -> _State:
    return collections.OrderedDict(
      round_num=tf.constant(first_round, tf.int32),
      optimizer=optimizer.initialize(tuple(specs.trainable)),
      momentum=tuple(tf.zeros(s.shape, s.dtype) for s in specs.trainable)
      if keeps_momentum
      else (),
    )

  return initialize


def _build_step(
  types: tuple[tff.Type, tff.Type, tff.Type],
  optimizer: tff.learning.optimizers.Optimizer,
  states: states_lib.States,
  networks: Sequence[str],
  uploads: Mapping[str, channels.Upload],
  restore: Restore,
  make_training: Callable[[], ServerTraining] | None,
  non_negative: Collection[int],
) -> tff.Computation:
  """Builds `<S, M, A> -> <S, M, metrics>` of `types` (S, M, A)."""

  @tff.tensorflow.computation(*types)
  def step(
    state: Mapping[str, Any],
    model: server_model.ServerModel,
    aggregate: Mapping[str, Any],
  ) -> Any:
    train = None if make_training is None else make_training()

    @tf.function(autograph=False)
    def run(
      state: Mapping[str, Any],
      model: server_model.ServerModel,
      aggregate: Mapping[str, Any],
    ) -> tuple[_State, server_model.ServerModel, _Metrics]:
      aggregated = _aggregated(aggregate, networks, uploads, restore)
      changes = {name: aggregated.values.get(name, ()) for name in networks}
      server = _Server(
        state,
        optimizer,
        train,
        non_negative,
        tf.nest.flatten(changes),
        states.setup,
      )
      model = states.update(
        server_model.ServerModel(*model), aggregated, server
      )
      return server.next_state(), model, server.metrics

    return run(state, model, aggregate)

  return step


def _aggregated(
  aggregate: Mapping[str, Any],
  networks: Sequence[str],
  uploads: Mapping[str, channels.Upload],
  restore: Restore,
) -> base.Aggregate:
  """Makes the aggregate that an algorithm sees."""
  combined, num_reports = aggregate['update'], aggregate['num_reports']
  means = aggregate['uploads']
  if channels.PLACE in combined:
    by_group = _read_groups(combined)
    return base.Aggregate((), names.Named(means), num_reports, lambda: by_group)
  update = restore(tuple(combined[channels.MODEL]))
  changes = {name: tuple(combined[name]) for name in networks}
  sums = {n: combined[n] for n in channels.sent_as(uploads, channels.SUM)}
  rows = {
    name: tf.boolean_mask(
      aggregate['rows']['values'][name], aggregate['rows']['is_valid']
    )
    for name in channels.sent_as(uploads, channels.ROWS)
  }
  sent = names.join('values that clients send', changes, means, sums, rows)
  return base.Aggregate(
    update,
    names.Named(sent),
    num_reports,
    lambda: _one_group(update, num_reports),
  )


def _one_group(
  update: tuple[tf.Tensor, ...], num_reports: tf.Tensor
) -> groups_lib.ByGroup:
  """Makes one group of an update that another aggregator has combined.

  All of the group started from row 0, and its size is `num_reports`.
  """
  rows = tuple(t[None] for t in update)
  some = all_finite(rows)  # Else no client's weight was above 0.
  sizes = tf.where(some, num_reports, 0.0)[None]
  return groups_lib.ByGroup(
    zero_unless(some, rows), sizes, tf.sign(sizes)[:, None]
  )


def _read_groups(combined: Mapping[str, Any]) -> groups_lib.ByGroup:
  """Reads the groups' updates, all 0 if no client's weight was above 0."""
  update, place = tuple(combined[channels.MODEL]), combined[channels.PLACE]
  some = tf.math.is_finite(place['sizes'][0])  # Else all are NaN.
  return groups_lib.ByGroup(
    *zero_unless(some, (update, place['sizes'], place['starts']))
  )


def _changed(
  weight: tf.Tensor, change: tf.Tensor, non_negative: bool
) -> tf.Tensor:
  """Subtracts a change from a weight, at least 0 if it is `non_negative`."""
  return tf.maximum(weight - change, 0.0) if non_negative else weight - change
