"""A guard of any weighted aggregator against false values and empty rounds."""

from __future__ import annotations

import collections
import functools
from typing import Any, NamedTuple

from tff_fssl.lazy import tf, tff
from tff_fssl.models.weights import zero_unless

# Larger entries of updates are absurd. Up to this size, float32 can hold the
# squares and norms of updates, and weighted sums over millions of them. A
# larger entry could overflow in an aggregator and so break its guarantees.
MAX_ENTRY = 1e12
# Positive weights below this are absurd: their products with updates underflow.
MIN_WEIGHT = 1e-10


class AllowedWeights(NamedTuple):
  """The weights that a client's update may have.

  Attributes:
    maximum: Weights are 0, or in [`MIN_WEIGHT`, maximum].
    all_or_nothing: Whether only 0 and `maximum` are allowed.
  """

  maximum: float = float('inf')
  all_or_nothing: bool = False


def is_bounded(values: Any) -> tf.Tensor:
  """Tells whether all entries of float tensors are within `MAX_ENTRY`.

  NaN and infinity never are. The result is a bool scalar.

  Examples:
    >>> import tensorflow as tf
    >>> from tff_fssl.aggregators import guarded
    >>> for entry in (-1e12, 2e12, float('nan')):
    ...   print(bool(guarded.is_bounded([tf.zeros([3]), tf.constant(entry)])))
    True
    False
    False
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
  """Tells whether an update may be aggregated, whatever code the client ran.

  Args:
    value: A structure of float tensors.
    weight: A scalar.
    allowed: The allowed weights.

  Returns:
    bool scalar: whether every entry of the value is within `MAX_ENTRY`, and the
    weight is allowed. NaN and infinity never are.

  Examples:
    >>> import tensorflow as tf
    >>> from tff_fssl.aggregators import guarded
    >>> update, allowed = [tf.ones([3])], guarded.AllowedWeights(maximum=1.0)
    >>> for weight in (0.0, 0.3, 1.5, -0.3):
    ...   accepted = guarded.is_acceptable(update, tf.constant(weight), allowed)
    ...   print(weight, bool(accepted))
    0.0 True
    0.3 True
    1.5 False
    -0.3 False
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
  """An aggregator that rejects impossible updates and marks empty rounds.

  A client is rejected if its value is not finite or absurdly large, or its
  weight is not allowed. Its value and weight then count as 0, and the
  measurement `num_rejected_clients` counts it. (Unchecked, one client with a
  learning status of -99 gets 91% of a mean of ten.) A client may still lie
  within these limits: it can claim the largest weight, and send any update up
  to `MAX_ENTRY`. The robust aggregator limits both.

  If all weights of a round are 0 (every client is confident, empty or rejected,
  or no client takes part), TFF's means give 0/0, its noised sums give noise,
  and some aggregators would change their state. The guard replaces the result
  by NaN in every entry, which the server skips, and keeps the inner state. The
  measurement `num_weighted_clients` is the number of clients with a weight
  above 0.

  The check is the last step before the sum, a map over values at clients
  (`V@CLIENTS` in TFF's types: one value of type V at each client), since TFF
  has no other place for one client's value. In a simulation, and wherever a
  server evaluates this map on received values, clients cannot evade it. In
  MapReduceForm, TFF's form of a round with one client phase, the check is part
  of the client's program. A client that runs another program evades it, unless
  the server repeats `is_acceptable` on the values it receives. With secure
  aggregation no server ever sees the value of one client. Then only the bounds
  of the secure sum limit a client, and the two counts are secure sums, too.

  Examples:
    >>> import numpy as np
    >>> import tensorflow_federated as tff
    >>> from tff_fssl.aggregators import guarded
    >>> number = tff.TensorType(np.float32)
    >>> factory = guarded.GuardedFactory(tff.aggregators.MeanFactory())
    >>> process = factory.create(number, number)
    >>> updates, weights = [1.0, 5.0, float('nan')], [3.0, 1.0, 1.0]
    >>> output = process.next(process.initialize(), updates, weights)
    >>> print(output.result, output.measurements['num_rejected_clients'])
    2.0 1
  """

  def __init__(
    self,
    inner: tff.aggregators.WeightedAggregationFactory,
    allowed_weights: AllowedWeights = AllowedWeights(),
  ):
    """Initializes the factory.

    Args:
      inner: The aggregator to guard. Its values must be floats.
      allowed_weights: The weights that clients may have.
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
      # Plain sums would show the server which clients were rejected.
      sum_counts = functools.partial(tff.federated_secure_sum, max_input=1)

    @tff.tensorflow.computation(value_type, weight_type)
    def screen(value, weight):
      accepted = is_acceptable(value, weight, self._allowed_weights)
      value, weight = zero_unless(accepted, (value, weight))
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
  """Tells whether the computation of an aggregation contains secure sums.

  Examples:
    >>> import numpy as np
    >>> import tensorflow_federated as tff
    >>> from tff_fssl.aggregators import guarded
    >>> plain = tff.aggregators.SumFactory()
    >>> secure = tff.aggregators.SecureSumFactory(1, 0)
    >>> for factory in (plain, secure):
    ...   process = factory.create(tff.TensorType(np.int32))
    ...   print(guarded.sums_securely(process))
    False
    True
  """
  block = process.next.to_building_block()
  return 'federated_secure' in block.compact_representation()


def keep_if(
  some: tf.Tensor, old_state: Any, new_state: Any, result: Any
) -> tuple[Any, Any]:
  """Keeps (new state, result) if `some`, else (old state, NaN everywhere).

  Examples:
    >>> import tensorflow as tf
    >>> from tff_fssl.aggregators import guarded
    >>> old, new, result = tf.constant(1), tf.constant(2), tf.constant([0.5])
    >>> for some in (True, False):
    ...   state, kept = guarded.keep_if(tf.constant(some), old, new, result)
    ...   print(state.numpy(), kept.numpy())
    2 [0.5]
    1 [nan]
  """
  return (
    tf.nest.map_structure(
      lambda new, old: tf.where(some, new, old), new_state, old_state
    ),
    tf.nest.map_structure(
      lambda t: tf.where(some, t, tf.cast(float('nan'), t.dtype)), result
    ),
  )
