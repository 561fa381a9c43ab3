"""Means of several groups of clients, in one pass over the cohort."""

from __future__ import annotations

import collections
from collections.abc import Mapping
from typing import Any

from tff_fssl.interface import channels
from tff_fssl.lazy import tf, tff


class GroupedMeanFactory(tff.aggregators.WeightedAggregationFactory):
  """The weighted mean of the updates of each group.

  A value is OrderedDict(model, place). `model` is a sequence of float tensors.
  `place` is the client's place, float32 [2]: its group, in [0, num_groups), and
  the row of weights from which it started, in [0, num_starts). The server adds
  each update to the sum of its group, so that a client sends one update for any
  number of groups.

  The result is OrderedDict(model, place), too. `model` has the means,
  [num_groups, ...], of each tensor. They are 0 for a group without weight.
  `place` is OrderedDict(sizes, starts). `sizes`, float32 [num_groups], are the
  numbers of clients with a weight above 0. `starts`, float32 [num_groups,
  num_starts], are the shares of a group's weight that started from each row.

  The measurements are the gradient diversity of a group, mean_i |u_i|^2 /
  |mean_i u_i|^2 with the clients' weights, as the mean over groups, and the
  sizes of the smallest and the largest group.
  """

  def __init__(self, num_groups: int, num_starts: int, num_trainable: int):
    """Initializes the factory.

    Args:
      num_groups: The number of groups.
      num_starts: The number of rows from which a client may start.
      num_trainable: The number of tensors of `model`, from the first, that
        count in the gradient diversity.
    """
    self._num_groups = num_groups
    self._num_starts = num_starts
    self._num_trainable = num_trainable

  def create(
    self, value_type: tff.Type, weight_type: tff.Type
  ) -> tff.templates.AggregationProcess:
    """Creates the process: <()@SERVER, V@CLIENTS, W@CLIENTS> -> result."""
    zero = tff.tensorflow.computation(lambda: self._zero(value_type))
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

  def _zero(self, value_type: tff.Type) -> Any:
    """Makes the sums over no clients."""
    specs = tff.types.type_to_tf_tensor_specs(value_type[channels.MODEL])
    groups = self._num_groups
    return collections.OrderedDict(
      update=tuple(tf.zeros([groups, *s.shape], s.dtype) for s in specs),
      squares=tf.zeros([groups]),
      weights=tf.zeros([groups]),
      sizes=tf.zeros([groups]),
      starts=tf.zeros([groups, self._num_starts]),
    )

  def _accumulate(
    self, sums: Mapping[str, Any], value: Mapping[str, Any], weight: tf.Tensor
  ) -> Any:
    """Adds one client to the sums."""
    update = value[channels.MODEL]
    group, start = tf.unstack(tf.cast(value[channels.PLACE], tf.int32))
    squares = tf.add_n(
      [tf.reduce_sum(tf.square(u)) for u in update[: self._num_trainable]]
    )

    def add(totals: tf.Tensor, one: tf.Tensor) -> tf.Tensor:
      return tf.tensor_scatter_nd_add(totals, [[group]], one[None])

    return collections.OrderedDict(
      update=tuple(
        add(totals, one * tf.cast(weight, one.dtype))
        for totals, one in zip(sums['update'], update, strict=True)
      ),
      squares=add(sums['squares'], weight * squares),
      weights=add(sums['weights'], weight),
      sizes=add(sums['sizes'], tf.cast(weight > 0.0, tf.float32)),
      starts=add(sums['starts'], weight * tf.one_hot(start, self._num_starts)),
    )

  def _report(self, sums: Mapping[str, Any]) -> Any:
    """Computes (result, measurements)."""
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
    diversity = mean(sums['squares']) / norms
    # Others, without clients or without a change, have a diversity of 0/0.
    some = (weights > 0.0) & (norms > 0.0)
    place = collections.OrderedDict(
      sizes=sums['sizes'], starts=mean(sums['starts'])
    )
    result = channels.sort_by_name(
      {channels.MODEL: update, channels.PLACE: place}
    )
    return result, collections.OrderedDict(
      gradient_diversity=tf.reduce_mean(tf.boolean_mask(diversity, some)),
      smallest_group=tf.cast(tf.reduce_min(sums['sizes']), tf.int32),
      largest_group=tf.cast(tf.reduce_max(sums['sizes']), tf.int32),
    )
