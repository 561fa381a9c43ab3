"""The server's step: apply the update, then train on the server's labels."""

import collections
from collections.abc import Callable, Collection

import tensorflow as tf
import tensorflow_federated as tff

from tff_fssl.models import adapter

# (weights, round_num, momentum) -> (weights, metrics, momentum), called inside
# a computation. It gets the momentum that it returned in the previous round;
# zeros in the first.
Momentum = tuple[tf.Tensor, ...]
ServerTraining = Callable[
  [adapter.Weights, tf.Tensor, Momentum],
  tuple[adapter.Weights, collections.OrderedDict[str, tf.Tensor], Momentum],
]


def build_server_step(
  weights_type: tff.Type,
  update_type: tff.Type,
  optimizer: tff.learning.optimizers.Optimizer,
  *,
  first_round: int,
  make_training: Callable[[], ServerTraining] | None = None,
  keeps_momentum: bool = False,
  non_negative: Collection[int] = (),
) -> tff.learning.templates.FinalizerProcess:
  """Builds the finalizer.

  Its `next`, `<S@SERVER, W@SERVER, U@SERVER> -> <S, W, metrics>@SERVER`, where
  `T@SERVER` is TFF's notation for a value of type T at the server:

  1.  Applies the update (trainable weights before minus after training) as a
      gradient, with `optimizer`. An update that is not finite (all weights were
      0, or the aggregator returned such an update), or whose result is not
      finite, is skipped: weights and optimizer state stay.
  2.  Adds the mean change of tracked non-trainable weights, if there are any.
  3.  Trains on the server's labels, if there are any.

  Args:
    weights_type: The type W of an `adapter.Weights`.
    update_type: The type U: one float tensor per trainable weight, then, if
      they are tracked, one per non-trainable float weight.
    optimizer: The server optimizer.
    first_round: The number of the first round.
    make_training: Returns the server's training, if it trains; called where
      variables may be made.
    keeps_momentum: Whether the momentum of that training is part of the state;
      if not, training gets none.
    non_negative: Indices of non-trainable weights that no update may make
      negative: variances.

  Returns:
    The process. Its state is OrderedDict(round_num, optimizer, momentum).
  """
  specs = tff.types.type_to_tf_tensor_specs(weights_type)

  @tff.tensorflow.computation
  def initialize_state():
    return collections.OrderedDict(
      round_num=tf.constant(first_round, tf.int32),
      optimizer=optimizer.initialize(tuple(specs.trainable)),
      momentum=tuple(tf.zeros(s.shape, s.dtype) for s in specs.trainable)
      if keeps_momentum
      else (),
    )

  state_type = initialize_state.type_signature.result

  @tff.tensorflow.computation(state_type, weights_type, update_type)
  def step(state, weights, update):
    train = None if make_training is None else make_training()

    @tf.function
    def run(state, weights, update):
      update = tuple(update)
      num_trainable = len(weights.trainable)
      old = (
        state['optimizer'],
        tuple(weights.trainable),
        tuple(weights.non_trainable),
      )
      new = optimizer.next(old[0], old[1], update[:num_trainable])
      non_trainable = old[2]
      if len(update) > num_trainable:
        changes = iter(update[num_trainable:])
        non_trainable = tuple(
          _changed(w, next(changes), index in non_negative)
          if w.dtype.is_floating
          else w
          for index, w in enumerate(old[2])
        )
      new = (*new, non_trainable)
      applied = adapter.all_finite((update, new))
      optimizer_state, trainable, non_trainable = tf.nest.map_structure(
        lambda n, o: tf.where(applied, n, o), new, old
      )
      norm = tf.linalg.global_norm(update[:num_trainable])
      metrics = collections.OrderedDict(
        update_skipped=tf.cast(tf.logical_not(applied), tf.int32),
        update_norm=tf.where(applied, norm, 0.0),
        weights_norm=tf.linalg.global_norm(weights.trainable),
      )
      weights = adapter.Weights(
        tuple(trainable), tuple(non_trainable), weights.statistics_count
      )
      momentum = tuple(state['momentum'])
      if train is not None:
        weights, training_metrics, momentum = train(
          weights, state['round_num'], momentum
        )
        metrics.update(training_metrics)
      state = collections.OrderedDict(
        round_num=state['round_num'] + 1,
        optimizer=optimizer_state,
        momentum=momentum,
      )
      return state, weights, metrics

    return run(state, weights, update)

  @tff.federated_computation
  def init_fn():
    return tff.federated_eval(initialize_state, tff.SERVER)

  @tff.federated_computation(
    tff.FederatedType(state_type, tff.SERVER),
    tff.FederatedType(weights_type, tff.SERVER),
    tff.FederatedType(update_type, tff.SERVER),
  )
  def next_fn(state, weights, update):
    return tff.templates.MeasuredProcessOutput(
      *tff.federated_map(step, (state, weights, update))
    )

  return tff.learning.templates.FinalizerProcess(init_fn, next_fn)


def _changed(
  weight: tf.Tensor, change: tf.Tensor, non_negative: bool
) -> tf.Tensor:
  """A weight minus its change, at least 0 if it is `non_negative`."""
  return tf.maximum(weight - change, 0.0) if non_negative else weight - change
