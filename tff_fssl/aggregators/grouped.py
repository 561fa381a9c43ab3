"""The means of several groups of clients, in one pass over the cohort."""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from typing import Any

from tff_fssl.lazy import tf, tff


class GroupedMeanFactory(tff.aggregators.WeightedAggregationFactory):
  """The weighted mean of the updates of each group.

  A value is a sequence of float tensors. The last one is the client's place,
  float32 [2]: its group, in [0, num_groups), and the row of weights that it
  started from, in [0, num_starts). The server adds each update to the sum of
  its group, so that a client sends one update, however many groups there are.

  The result is OrderedDict(update, sizes, starts): per tensor of the value but
  the last, [num_groups, ...], the means, 0 for a group without weight; float32
  [num_groups], the numbers of clients whose weight is above 0; float32
  [num_groups, num_starts], which share of a group's weight started from which
  row.

  It measures the gradient diversity of a group, mean_i |u_i|^2 / |mean_i u_i|^2
  with the clients' weights, and reports the mean over groups; and the sizes of
  the smallest and of the largest group.
  """

  def __init__(self, num_groups: int, num_starts: int, num_trainable: int):
    """Initializes the factory.

    Args:
      num_groups: The number of groups.
      num_starts: The number of rows that a client may start from.
      num_trainable: How many tensors of a value, from the first, count in the
        gradient diversity.
    """
    self._num_groups = num_groups
    self._num_starts = num_starts
    self._num_trainable = num_trainable

  def create(
    self, value_type: tff.Type, weight_type: tff.Type
  ) -> tff.templates.AggregationProcess:
    """Creates the process: <()@SERVER, V@CLIENTS, W@CLIENTS> -> result."""
    specs = tff.types.type_to_tf_tensor_specs(value_type)[:-1]
    zero = tff.tensorflow.computation(lambda: self._zero(specs))
    sums_type = zero.type_signature.result

    @tff.tensorflow.computation(sums_type, (value_type, weight_type))
    def accumulate(sums: Any, one: Any) -> Any:
      return self._accumulate(sums, one[0], one[1])

    @tff.tensorflow.computation(sums_type, sums_type)
    def merge(first: Any, second: Any) -> Any:
      return tf.nest.map_structure(tf.add, first, second)

    @tff.tensorflow.computation(sums_type)
    def report(sums: Any) -> Any:
      return self._report(sums)

    @tff.federated_computation
    def init_fn() -> tff.Value:
      return tff.federated_value((), tff.SERVER)

    @tff.federated_computation(
      init_fn.type_signature.result,
      tff.FederatedType(value_type, tff.CLIENTS),
      tff.FederatedType(weight_type, tff.CLIENTS),
    )
    def next_fn(
      state: tff.Value, value: tff.Value, weight: tff.Value
    ) -> tff.templates.MeasuredProcessOutput:
      sent = tff.federated_zip((value, weight))
      reported = tff.federated_aggregate(
        sent, zero(), accumulate, merge, report
      )
      return tff.templates.MeasuredProcessOutput(
        state, reported[0], reported[1]
      )

    return tff.templates.AggregationProcess(init_fn, next_fn)

  def _zero(self, specs: Sequence[tf.TensorSpec]) -> Any:
    """The sums over no client."""
    groups = self._num_groups
    return collections.OrderedDict(
      update=tuple(tf.zeros([groups, *s.shape], s.dtype) for s in specs),
      squares=tf.zeros([groups]),
      weights=tf.zeros([groups]),
      sizes=tf.zeros([groups]),
      starts=tf.zeros([groups, self._num_starts]),
    )

  def _accumulate(
    self, sums: Mapping[str, Any], value: Sequence[tf.Tensor], weight: tf.Tensor
  ) -> Any:
    """The sums with one client more."""
    *update, place = value
    group, start = tf.unstack(tf.cast(place, tf.int32))
    squares = tf.add_n(
      [tf.reduce_sum(tf.square(u)) for u in update[: self._num_trainable]]
    )

    def add(of_groups: tf.Tensor, one: tf.Tensor) -> tf.Tensor:
      return tf.tensor_scatter_nd_add(of_groups, [[group]], one[None])

    return collections.OrderedDict(
      update=tuple(
        add(of_groups, one * tf.cast(weight, one.dtype))
        for of_groups, one in zip(sums['update'], update, strict=True)
      ),
      squares=add(sums['squares'], weight * squares),
      weights=add(sums['weights'], weight),
      sizes=add(sums['sizes'], tf.cast(weight > 0.0, tf.float32)),
      starts=add(sums['starts'], weight * tf.one_hot(start, self._num_starts)),
    )

  def _report(self, sums: Mapping[str, Any]) -> Any:
    """(result, measurements)."""
    weights = sums['weights']

    def mean(total: tf.Tensor) -> tf.Tensor:
      shape = [-1] + [1] * (total.shape.rank - 1)
      return tf.math.divide_no_nan(
        total, tf.cast(tf.reshape(weights, shape), total.dtype)
      )

    update = tuple(mean(total) for total in sums['update'])
    norms = tf.add_n(
      [
        tf.reduce_sum(tf.square(u), axis=list(range(1, u.shape.rank)))
        for u in update[: self._num_trainable]
      ]
    )
    diversity = mean(sums['squares']) / norms  # NaN of an empty group.
    some = weights > 0.0
    result = collections.OrderedDict(
      update=update, sizes=sums['sizes'], starts=mean(sums['starts'])
    )
    return result, collections.OrderedDict(
      gradient_diversity=tf.reduce_mean(tf.boolean_mask(diversity, some)),
      smallest_group=tf.cast(tf.reduce_min(sums['sizes']), tf.int32),
      largest_group=tf.cast(tf.reduce_max(sums['sizes']), tf.int32),
    )
