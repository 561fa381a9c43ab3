"""A guard around any weighted aggregator, for rounds that weigh nothing."""

import collections

import tensorflow as tf
import tensorflow_federated as tff


class GuardedFactory(tff.aggregators.WeightedAggregationFactory):
  """Makes "no client weighed anything" visible instead of undefined.

  If all weights of a round are 0 (every client confident, empty or rejected, or
  no client at all), TFF's means give 0/0, its noised sums give noise, and some
  would move their state. Guarded, the result is NaN in every entry, which
  finalizers skip, and the inner state stays. The measurement
  `num_weighted_clients` says how many weighed more than 0.
  """

  def __init__(self, inner: tff.aggregators.WeightedAggregationFactory):
    """Initializes the factory.

    Args:
      inner: The aggregator to guard; its values must be floats.
    """
    self._inner = inner

  def create(
    self, value_type: tff.Type, weight_type: tff.Type
  ) -> tff.templates.AggregationProcess:
    """Creates the process: <S@SERVER, V@CLIENTS, W@CLIENTS> -> V@SERVER."""
    inner = self._inner.create(value_type, weight_type)
    state_type = inner.initialize.type_signature.result.member
    result_type = inner.next.type_signature.result.result.member

    @tff.tensorflow.computation(weight_type)
    def weighs(weight):
      return tf.cast(weight > 0, tf.int32)

    @tff.tensorflow.computation(state_type, state_type, result_type, tf.int32)
    def guard(old_state, new_state, result, num_weighted):
      some = num_weighted > 0
      return (
        tf.nest.map_structure(
          lambda new, old: tf.where(some, new, old), new_state, old_state
        ),
        tf.nest.map_structure(
          lambda t: tf.where(some, t, tf.cast(float('nan'), t.dtype)),
          result,
        ),
      )

    @tff.federated_computation(
      inner.initialize.type_signature.result,
      tff.FederatedType(value_type, tff.CLIENTS),
      tff.FederatedType(weight_type, tff.CLIENTS),
    )
    def next_fn(state, value, weight):
      num_weighted = tff.federated_sum(tff.federated_map(weighs, weight))
      output = inner.next(state, value, weight)
      new_state, result = tff.federated_map(
        guard, (state, output.state, output.result, num_weighted)
      )
      measurements = tff.federated_zip(
        collections.OrderedDict(
          inner=output.measurements, num_weighted_clients=num_weighted
        )
      )
      return tff.templates.MeasuredProcessOutput(
        new_state, result, measurements
      )

    return tff.templates.AggregationProcess(inner.initialize, next_fn)
