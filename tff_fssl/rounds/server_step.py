"""The server's step: it applies the update, then trains on its labels."""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from typing import Any

from tff_fssl import seeds
from tff_fssl.interface import base
from tff_fssl.interface import channels
from tff_fssl.interface import groups as groups_lib
from tff_fssl.interface import names
from tff_fssl.interface import round_hparams as round_hparams_lib
from tff_fssl.lazy import tf, tff
from tff_fssl.models import server_model
from tff_fssl.models.weights import Weights, all_finite, zero_unless
from tff_fssl.rounds import plan as plan_lib
from tff_fssl.rounds import server_training

_Metrics = server_training.Metrics
# OrderedDict(round_num, optimizer, momentum).
_State = collections.OrderedDict[str, Any]


class _Server(base.Server):
  """The server in one step, and the states that it changes."""

  def __init__(
    self,
    plan: plan_lib.Plan,
    state: Mapping[str, Any],
    train: server_training.Train | None,
    changes: Sequence[tf.Tensor],
    control: Mapping[str, tf.Tensor],
  ):
    """Starts the step.

    Args:
      plan: The plan.
      state: The state before the step.
      train: The training on labels, if the server has some.
      changes: The combined changes of auxiliary networks.
      control: `ServerModel.control`.
    """
    self._control = control
    self._optimizer, self._train = build_optimizer(plan.hparams), train
    self._non_negative, self._changes = plan.networks.variances, changes
    self.round_num = state['round_num']
    self.seed = seeds.fold_in(
      seeds.server_seed(plan.setup.seed, self.round_num), seeds.UPDATE
    )
    self.setup = plan.setup
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
    norm = tf.linalg.global_norm([*update[:num_trainable], *self._changes])
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
        weights,
        self.round_num,
        self._old_momentum,
        copy,
        networks,
        self._control,
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


def build_initialize(
  plan: plan_lib.Plan, model_type: tff.Type
) -> tff.Computation:
  """Builds `( -> S)`, the server's state before the first round.

  S is OrderedDict(round_num, optimizer, momentum). The latter is that of the
  server's training, or () if it is not kept.
  """
  optimizer = build_optimizer(plan.hparams)
  specs = tff.types.type_to_tf_tensor_specs(model_type)

  @tff.tensorflow.computation
  def initialize() -> _State:
    return collections.OrderedDict(
      round_num=tf.constant(plan.hparams.first_round, tf.int32),
      optimizer=optimizer.initialize(tuple(specs.trainable)),
      momentum=tuple(tf.zeros(s.shape, s.dtype) for s in specs.trainable)
      if plan.server_keeps_momentum
      else (),
    )

  return initialize


def build_step(
  plan: plan_lib.Plan,
  state_type: tff.Type,
  model_type: tff.Type,
  sent_type: tff.Type,
) -> tff.Computation:
  """Builds `<S, M, A> -> <S, M, metrics>`, the server's part of a round.

  It calls the algorithm's `update` with two tools:

  *   `apply` applies the update (trainable weights before minus after training)
      as a gradient, with the server optimizer. An update is skipped if it or
      its result is not finite (all weights were 0, or the aggregator returned
      such an update). Then weights and optimizer state stay. The mean change of
      tracked non-trainable weights is added, if there are any.
  *   `train` trains on the server's labels, if there are any.

  Args:
    plan: The plan.
    state_type: The type S of `build_initialize`'s result.
    model_type: The type M of a `server_model.ServerModel`.
    sent_type: The type A of what clients have sent: OrderedDict(update,
      uploads, num_reports), and `rows` if there are some. `update` is the
      aggregator's result by channel. That of the model has one float tensor per
      trainable weight, and one per tracked non-trainable float weight. With
      groups, it is the result of `grouped.GroupedMeanFactory`.

  Returns:
    The computation.
  """

  @tff.tensorflow.computation(state_type, model_type, sent_type)
  def step(
    state: Mapping[str, Any],
    model: server_model.ServerModel,
    sent: Mapping[str, Any],
  ) -> Any:
    train = None
    if plan.data.server_data_fn is not None:
      train = server_training.make_training(plan)

    @tf.function(autograph=False)
    def run(
      state: Mapping[str, Any],
      model: server_model.ServerModel,
      sent: Mapping[str, Any],
    ) -> tuple[_State, server_model.ServerModel, _Metrics]:
      aggregate = _aggregate(plan, sent)
      changes = {n: aggregate.values.get(n, ()) for n in plan.sent_networks}
      model = server_model.ServerModel(*model)
      server = _Server(
        plan, state, train, tf.nest.flatten(changes), model.control
      )
      model = plan.states.update(model, aggregate, server)
      return server.next_state(), model, server.metrics

    return run(state, model, sent)

  return step


def _aggregate(plan: plan_lib.Plan, sent: Mapping[str, Any]) -> base.Aggregate:
  """Makes the aggregate that an algorithm sees."""
  combined, num_reports = sent['update'], sent['num_reports']
  means = sent['uploads']
  if channels.PLACE in combined:
    by_group = _read_groups(combined)
    return base.Aggregate((), names.Named(means), num_reports, lambda: by_group)
  update = plan.restore(tuple(combined[channels.MODEL]))
  changes = {name: tuple(combined[name]) for name in plan.sent_networks}
  sums = {n: combined[n] for n in channels.sent_as(plan.uploads, channels.SUM)}
  rows = {
    name: tf.boolean_mask(
      sent['rows']['values'][name], sent['rows']['is_valid']
    )
    for name in channels.sent_as(plan.uploads, channels.ROWS)
  }
  values = names.join('values that clients send', changes, means, sums, rows)
  return base.Aggregate(
    update,
    names.Named(values),
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
