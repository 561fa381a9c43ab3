"""A guard around any weighted aggregator: against lies and empty rounds."""

import collections
import functools
from typing import Any, NamedTuple

import tensorflow as tf
import tensorflow_federated as tff

from tff_fssl.models import adapter

# Entries of updates beyond this are absurd. Within it, float32 holds squares
# and norms of updates, and weighted sums over millions of them: a larger entry
# would overflow an aggregator's arithmetic, and so undo what it promises.
MAX_ENTRY = 1e12
# Positive weights below this are absurd: their products with updates underflow.
MIN_WEIGHT = 1e-10


class AllowedWeights(NamedTuple):
  """What a client's update may weigh.

  Attributes:
    maximum: Weights are 0, or in [`MIN_WEIGHT`, maximum].
    all_or_nothing: Whether they are 0 or `maximum`, and nothing between.
  """

  maximum: float = float('inf')
  all_or_nothing: bool = False


def is_bounded(values: Any) -> tf.Tensor:
  """Whether every entry of float tensors is within `MAX_ENTRY`: bool scalar.

  NaN and infinity never are.
  """
  return tf.reduce_all(
    [
      tf.reduce_all(tf.abs(t) <= tf.cast(MAX_ENTRY, t.dtype))
      for t in tf.nest.flatten(values)
    ]
  )


def is_acceptable(
  value: Any, weight: tf.Tensor, allowed: AllowedWeights
) -> tf.Tensor:
  """Whether an update may be aggregated, whatever the client's code was.

  Args:
    value: A structure of float tensors.
    weight: A scalar.
    allowed: What it may be.

  Returns:
    bool scalar: every entry of the value is within `MAX_ENTRY`, and the weight
    is allowed (NaN and infinity never are).
  """
  weight = tf.cast(weight, tf.float32)
  if allowed.all_or_nothing:
    allows = tf.equal(weight, allowed.maximum)
  else:
    allows = tf.logical_and(weight >= MIN_WEIGHT, weight <= allowed.maximum)
    allows = tf.logical_and(allows, tf.math.is_finite(weight))
  return tf.logical_and(
    tf.logical_or(allows, tf.equal(weight, 0.0)), is_bounded(value)
  )


class GuardedFactory(tff.aggregators.WeightedAggregationFactory):
  """Rejects impossible updates, and marks rounds that weigh nothing.

  A value that is not finite or absurdly large, or a weight that is not allowed,
  is rejected: both count as 0, and the measurement `num_rejected_clients`
  counts it. (Unchecked, one client with a learning status of -99 gets 91% of a
  mean of ten.) Within the range a client may still lie: it can take the largest
  weight, and send any update up to `MAX_ENTRY`. The robust aggregator limits
  both.

  If all weights of a round are 0 (every client confident, empty or rejected, or
  no client at all), TFF's means give 0/0, its noised sums give noise, and some
  would move their state. Guarded, the result is NaN in every entry, which
  finalizers skip, and the inner state stays. The measurement
  `num_weighted_clients` says how many weighed more than 0.

  Where the check runs: it is a map over values that are placed at clients, the
  last step before the sum, since TFF's types have no other place for what
  belongs to one client. In simulation, and wherever a server evaluates that map
  on what clients sent, it is the server's, and no client has a say in it. A
  compiler to a single client phase (MapReduceForm) makes it part of the
  client's program: then a client that runs another program escapes it, unless
  the server repeats `is_acceptable` on what it deserialises. With secure
  aggregation no server ever sees one client's value: there, the bounds of the
  secure sum are what limits a client, and the two counts are secure sums, too.
  """

  def __init__(
    self,
    inner: tff.aggregators.WeightedAggregationFactory,
    allowed_weights: AllowedWeights = AllowedWeights(),
  ):
    """Initializes the factory.

    Args:
      inner: The aggregator to guard; its values must be floats.
      allowed_weights: What a client may weigh.
    """
    self._inner = inner
    self._allowed_weights = allowed_weights

  def create(
    self, value_type: tff.Type, weight_type: tff.Type
  ) -> tff.templates.AggregationProcess:
    """Creates the process: <S@SERVER, V@CLIENTS, W@CLIENTS> -> V@SERVER."""
    inner = self._inner.create(value_type, weight_type)
    state_type = inner.initialize.type_signature.result.member
    result_type = inner.next.type_signature.result.result.member
    sum_counts = tff.federated_sum
    if sums_securely(inner):
      sum_counts = functools.partial(tff.federated_secure_sum, max_input=1)

    @tff.tensorflow.computation(value_type, weight_type)
    def screen(value, weight):
      accepted = is_acceptable(value, weight, self._allowed_weights)
      value, weight = adapter.zero_unless(accepted, (value, weight))
      counts = collections.OrderedDict(
        num_weighted_clients=tf.cast(weight > 0, tf.int32),
        num_rejected_clients=tf.cast(tf.logical_not(accepted), tf.int32),
      )
      return value, weight, counts

    @tff.tensorflow.computation(state_type, state_type, result_type, tf.int32)
    def guard(old_state, new_state, result, num_weighted):
      return keep_if(num_weighted > 0, old_state, new_state, result)

    @tff.federated_computation(
      inner.initialize.type_signature.result,
      tff.FederatedType(value_type, tff.CLIENTS),
      tff.FederatedType(weight_type, tff.CLIENTS),
    )
    def next_fn(state, value, weight):
      value, weight, counts = tff.federated_map(screen, (value, weight))
      counts = sum_counts(counts)
      output = inner.next(state, value, weight)
      new_state, result = tff.federated_map(
        guard,
        (state, output.state, output.result, counts.num_weighted_clients),
      )
      measurements = tff.federated_zip(
        collections.OrderedDict(
          inner=output.measurements,
          num_weighted_clients=counts.num_weighted_clients,
          num_rejected_clients=counts.num_rejected_clients,
        )
      )
      return tff.templates.MeasuredProcessOutput(
        new_state, result, measurements
      )

    return tff.templates.AggregationProcess(inner.initialize, next_fn)


def sums_securely(process: tff.templates.AggregationProcess) -> bool:
  """Whether an aggregation has secure sums, as its computation says."""
  block = process.next.to_building_block()
  return 'federated_secure' in block.compact_representation()


def keep_if(
  some: tf.Tensor, old_state: Any, new_state: Any, result: Any
) -> tuple[Any, Any]:
  """(state, result) of an aggregation, or (old state, NaN) unless `some`."""
  return (
    tf.nest.map_structure(
      lambda new, old: tf.where(some, new, old), new_state, old_state
    ),
    tf.nest.map_structure(
      lambda t: tf.where(some, t, tf.cast(float('nan'), t.dtype)), result
    ),
  )
