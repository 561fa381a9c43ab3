"""A mean that a minority of lying clients cannot move far."""

import collections

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from tff_fssl.models import adapter

# Clipping norm of the first round, as in TFF's robust aggregator.
_FIRST_NORM = 1.0
# By which factor the clipping norm changes at most from one round to the next.
_MOST_CHANGE = 10.0
_LEAST_NORM = 1e-6


class RobustMeanFactory(tff.aggregators.WeightedAggregationFactory):
  """The weighted mean of updates bounded by the medians of the previous round.

  A client's weight is limited to the median weight of the previous round. Its
  update is clipped to the median L2 norm, and left out if its norm is above
  `zeroing_multiple` times that. Medians are over clients whose weight is above
  0. In the first round updates are clipped to norm 1; there are no other
  bounds.

  As long as liars are a minority of each cohort, the medians lie within the
  range of honest values, so that a liar counts about as much as an honest
  client, whatever it sends. Where few clients of a population lie, a cohort
  drawn at random still has a majority of liars now and then. Therefore the
  clipping norm rises and falls at most tenfold a round (and not below 1e-6):
  otherwise one such round would let a liar of the next send what it likes.

  TFF's robust aggregator follows the 0.8 quantile of norms instead: if one of
  five clients lies, the clipping norm drifts up to that client's norm; and it
  trusts weights. The server collects one norm and one weight per client, which
  takes no second message from a client.

  The values must pass `guarded.is_acceptable`, which keeps norms finite.
  """

  def __init__(self, *, clipping: bool = True, zeroing_multiple: float = 10.0):
    """Initializes the factory.

    Args:
      clipping: Whether updates are clipped.
      zeroing_multiple: See the class; 0: no update is left out.
    """
    self._clipping = clipping
    self._zeroing_multiple = zeroing_multiple

  def create(
    self, value_type: tff.Type, weight_type: tff.Type
  ) -> tff.templates.AggregationProcess:
    """Creates the process: <S@SERVER, V@CLIENTS, W@CLIENTS> -> V@SERVER."""
    inner = tff.aggregators.MeanFactory().create(value_type, weight_type)

    @tff.tensorflow.computation
    def initial_state():
      return collections.OrderedDict(
        median_norm=tf.constant(_FIRST_NORM),
        median_weight=tf.constant(float('inf')),
      )

    state_type = initial_state.type_signature.result

    @tff.federated_computation
    def init_fn():
      return tff.federated_eval(initial_state, tff.SERVER)

    @tff.tensorflow.computation(state_type, value_type, weight_type)
    def bound(state, value, weight):
      return self._bound(state, value, weight)

    @tff.tensorflow.computation(
      state_type, tff.TensorType(np.float32, [None, 2])
    )
    def medians(state, seen):
      def next_state():
        median_norm, median_weight = tf.unstack(lower_median(seen))
        limit = state['median_norm']
        median_norm = tf.clip_by_value(
          median_norm, limit / _MOST_CHANGE, limit * _MOST_CHANGE
        )
        return collections.OrderedDict(
          median_norm=tf.maximum(median_norm, _LEAST_NORM),
          median_weight=median_weight,
        )

      return tf.cond(tf.shape(seen)[0] > 0, next_state, lambda: state)

    @tff.federated_computation(
      init_fn.type_signature.result,
      tff.FederatedType(value_type, tff.CLIENTS),
      tff.FederatedType(weight_type, tff.CLIENTS),
    )
    def next_fn(state, value, weight):
      value, weight, seen, counts = tff.federated_map(
        bound, (tff.federated_broadcast(state), value, weight)
      )
      mean = inner.next(inner.initialize(), value, weight)
      measurements = tff.federated_zip(
        collections.OrderedDict(
          num_clipped=tff.federated_sum(counts['num_clipped']),
          num_left_out=tff.federated_sum(counts['num_left_out']),
          limits=state,
        )
      )
      return tff.templates.MeasuredProcessOutput(
        tff.federated_map(medians, (state, collect_rows(seen))),
        mean.result,
        measurements,
      )

    return tff.templates.AggregationProcess(init_fn, next_fn)

  def _bound(self, state, value, weight):
    """Bounds a client's update and weight.

    Args:
      state: The limits: `median_norm`, `median_weight`.
      value: The update.
      weight: Its weight.

    Returns:
      (update, weight, norm and weight as float32 [1, 2], or [0, 2] for a client
      that weighs nothing; how many updates were clipped or left out: 0 or 1).
    """
    weighs = weight > 0
    norm = tf.linalg.global_norm(tf.nest.flatten(value))
    seen = tf.stack([norm, tf.cast(weight, tf.float32)])[tf.newaxis]
    seen = seen[: tf.cast(weighs, tf.int32)]  # One row, or none.
    limit, most = state['median_norm'], state['median_weight']
    weight = tf.minimum(weight, tf.cast(most, weight.dtype))
    counts = collections.OrderedDict(
      num_clipped=tf.constant(0), num_left_out=tf.constant(0)
    )
    if self._zeroing_multiple:
      known = tf.math.is_finite(most)
      out = tf.logical_and(known, norm > self._zeroing_multiple * limit)
      weight = tf.where(out, tf.zeros_like(weight), weight)
      counts['num_left_out'] = tf.cast(tf.logical_and(out, weighs), tf.int32)
    if self._clipping:
      scale = tf.where(norm > limit, limit / norm, 1.0)
      value = tf.nest.map_structure(
        lambda t: t * tf.cast(scale, t.dtype), value
      )
      counts['num_clipped'] = tf.cast(
        tf.logical_and(norm > limit, weighs), tf.int32
      )
    return value, weight, seen, counts


def lower_median(rows: tf.Tensor) -> tf.Tensor:
  """The median of each column of float [N, D], N > 0; if N is even, the lower.

  Returns:
    float [D].
  """
  return tf.sort(rows, axis=0)[(tf.shape(rows)[0] - 1) // 2]


def collect_rows(rows: tff.Value) -> tff.Value:
  """Collects rows at the server, any number from each client.

  Args:
    rows: float32[?, D]@CLIENTS.

  Returns:
    float32[?, D]@SERVER, in the order in which clients are aggregated.
  """
  num_columns = rows.type_signature.member.shape[1]
  rows_type = tff.TensorType(np.float32, [None, num_columns])

  @tff.tensorflow.computation
  def no_rows():
    return adapter.no_values(tf.TensorSpec([num_columns]))

  @tff.tensorflow.computation(rows_type, rows_type)
  def concatenate(first, second):
    return tf.concat([first, second], axis=0)

  @tff.tensorflow.computation(rows_type)
  def report(collected):
    return collected

  return tff.federated_aggregate(
    rows, no_rows(), concatenate, concatenate, report
  )
