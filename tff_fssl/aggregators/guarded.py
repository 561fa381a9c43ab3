"""A guard around any weighted aggregator: against lies and empty rounds."""

import collections
from typing import Any, NamedTuple

import tensorflow as tf
import tensorflow_federated as tff

from tff_fssl.models import adapter


class AllowedWeights(NamedTuple):
  """What a client's update may weigh.

  Attributes:
    maximum: Weights are in [0, maximum].
    all_or_nothing: Whether they are 0 or `maximum`, and nothing between.
  """

  maximum: float = float('inf')
  all_or_nothing: bool = False


def is_acceptable(
  value: Any, weight: tf.Tensor, allowed: AllowedWeights
) -> tf.Tensor:
  """Whether an update may be aggregated, whatever the client's code was.

  Args:
    value: A structure of float tensors.
    weight: A scalar.
    allowed: What it may be.

  Returns:
    bool scalar: every entry of the value is finite, and the weight is allowed
    (NaN and infinity never are).
  """
  weight = tf.cast(weight, tf.float32)
  in_range = tf.logical_and(weight >= 0.0, weight <= allowed.maximum)
  if allowed.all_or_nothing:
    in_range = tf.logical_or(
      tf.equal(weight, 0.0), tf.equal(weight, allowed.maximum)
    )
  return tf.logical_and(in_range, adapter.all_finite((value, weight)))


class GuardedFactory(tff.aggregators.WeightedAggregationFactory):
  """Rejects impossible updates, and marks rounds that weigh nothing.

  A value that is not finite, or a weight that is not allowed, is rejected: both
  count as 0, and the measurement `num_rejected_clients` counts it. (Unchecked,
  one client with a learning status of -99 gets 91% of a mean of ten.) Within
  the range a client may still lie: it can take the largest weight, and send any
  finite update. Against the latter there are clipping and zeroing aggregators.

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
  secure sum are what limits a client.
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
      counts = tff.federated_sum(counts)
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
