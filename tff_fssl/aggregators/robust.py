"""A mean that a minority of lying clients cannot move far."""

from __future__ import annotations

import collections

from tff_fssl.aggregators import collecting
from tff_fssl.aggregators import hparams
from tff_fssl.lazy import tf, tff

# The clipping norm at most doubles from one round to the next. It starts at 1
# as in TFF's robust aggregator.
_FIRST_NORM = 1.0
_MOST_GROWTH = 2.0
_LEAST_NORM = 1e-6
# The share of updates, the farthest, that are not mixed into an update.
_FAR = 0.4
# Steps to the geometric median. RFA makes three or four.
_NUM_STEPS = 8
_LEAST_DISTANCE = 1e-3


class RobustMeanFactory(tff.aggregators.WeightedAggregationFactory):
  """A mean on which a minority of lying clients has little effect.

  The server collects the updates of clients with a weight above 0. Then it

  1.  limits weights to their median, clips updates to their median L2 norm, and
      skips updates with a norm above `zeroing_multiple` times that norm,
  2.  replaces each update by the mean of the 60% of updates that are nearest to
      it (nearest neighbour mixing, Allouah et al., AISTATS 2023), so that an
      update that differs from all others is only in its own mean, and clients
      that differ for an honest reason come closer together,
  3.  takes the geometric median of these means (Pillutla et al., IEEE TSP
      2022), the point with the least sum of distances from them.

  Even if few clients of a population lie, a random cohort sometimes has a
  majority of liars. Therefore the clipping norm at most doubles from one round
  to the next (the first round's is at most 2), so that earlier rounds limit the
  effect of liars in a round. If less than half of the cohort, or fewer than
  three clients, have a weight above 0, honest clients could not outvote liars.
  Then the result is NaN in every entry, which the server skips, and the state
  stays.

  The server holds all updates of a cohort, and sees the updates of single
  clients.

  The values must pass `guarded.is_acceptable`, which keeps norms finite.
  """

  def __init__(self, *, clipping: bool = True, zeroing_multiple: float = 10.0):
    """Initializes the factory.

    Args:
      clipping: Whether updates are clipped.
      zeroing_multiple: See the class. 0: no update is skipped.
    """
    self._clipping = clipping
    self._zeroing_multiple = zeroing_multiple

  def create(
    self, value_type: tff.Type, weight_type: tff.Type
  ) -> tff.templates.AggregationProcess:
    """Creates the process: <S@SERVER, V@CLIENTS, W@CLIENTS> -> V@SERVER."""
    specs = tff.types.type_to_tf_tensor_specs(value_type)
    collect, rows_type = collecting.build_collect(
      tff.to_type(collections.OrderedDict(value=value_type, weight=weight_type))
    )

    @tff.tensorflow.computation
    def initial_state():
      return collections.OrderedDict(median_norm=tf.constant(_FIRST_NORM))

    @tff.tensorflow.computation(initial_state.type_signature.result, rows_type)
    def combine(state, rows):
      values = [_matrix(t) for t in tf.nest.flatten(rows['value'])]
      # Inner products of whole updates, summed over their tensors.
      products = tf.add_n([tf.matmul(v, v, transpose_b=True) for v in values])
      weights = tf.cast(rows['weight'], tf.float32)
      shares, norm, counts = self._shares(
        state['median_norm'], products, weights
      )
      means = [
        tf.cast(
          tf.reshape(tf.linalg.matvec(v, shares, transpose_a=True), spec.shape),
          spec.dtype,
        )
        for v, spec in zip(values, tf.nest.flatten(specs), strict=True)
      ]
      state = collections.OrderedDict(median_norm=norm)
      measurements = collections.OrderedDict(counts, limits=state)
      return state, tf.nest.pack_sequence_as(specs, means), measurements

    @tff.federated_computation
    def init_fn():
      return tff.federated_eval(initial_state, tff.SERVER)

    @tff.federated_computation(
      init_fn.type_signature.result,
      tff.FederatedType(value_type, tff.CLIENTS),
      tff.FederatedType(weight_type, tff.CLIENTS),
    )
    def next_fn(state, value, weight):
      sent = collections.OrderedDict(value=value, weight=weight)
      rows = collect(tff.federated_zip(sent))
      combined = tff.federated_map(combine, (state, rows))
      return tff.templates.MeasuredProcessOutput(*combined)

    return tff.templates.AggregationProcess(init_fn, next_fn)

  def _shares(
    self, before: tf.Tensor, products: tf.Tensor, weights: tf.Tensor
  ) -> tuple[tf.Tensor, tf.Tensor, collections.OrderedDict[str, tf.Tensor]]:
    """Calculates each client's share in the result.

    Args:
      before: The clipping norm of the round before.
      products: float32 [n, n], the inner products of the clients' updates.
      weights: float32 [n].

    Returns:
      The shares, float32 [n], NaN if honest clients could not outvote liars.
      Then the clipping norm, and counts.
    """
    weighs = weights > 0.0
    num = _count(weighs)
    enough = tf.logical_and(
      num >= hparams.MIN_ROBUST_CLIENTS, 2 * num >= tf.size(weights)
    )

    def some() -> tuple[tf.Tensor, tf.Tensor, tf.Tensor, tf.Tensor]:
      norms = tf.sqrt(tf.linalg.diag_part(products))
      median = lower_median(tf.boolean_mask(norms, weighs))
      # A cohort with a majority of liars may have any median.
      limit = tf.minimum(median, _MOST_GROWTH * before)
      kept = weighs
      if self._zeroing_multiple:
        most = self._zeroing_multiple * tf.maximum(median, _LEAST_NORM)
        kept = tf.logical_and(kept, norms <= most)
      scales = tf.ones_like(norms)
      if self._clipping:
        scales = tf.where(norms > limit, limit / norms, 1.0)
      clipped = tf.logical_and(kept, scales < 1.0)
      index = tf.where(kept)
      scales = tf.gather_nd(scales, index)
      median_weight = lower_median(tf.boolean_mask(weights, weighs))
      shares = scales * _median_shares(
        scales[:, tf.newaxis]
        * scales
        * tf.gather(tf.gather_nd(products, index), index[:, 0], axis=1),
        tf.minimum(tf.gather_nd(weights, index), median_weight),
      )
      shares = tf.scatter_nd(index, shares, tf.shape(weights, tf.int64))
      # A fall is limited, too: otherwise liars that send tiny updates in one
      # round would clip all updates of the next rounds.
      norm = tf.maximum(limit, before / _MOST_GROWTH)
      norm = tf.maximum(norm, _LEAST_NORM)
      return shares, norm, _count(clipped), num - _count(kept)

    def none() -> tuple[tf.Tensor, tf.Tensor, tf.Tensor, tf.Tensor]:
      shares = tf.fill(tf.shape(weights), float('nan'))
      return shares, before, tf.constant(0), tf.constant(0)

    shares, norm, num_clipped, num_skipped = tf.cond(enough, some, none)
    too_few = tf.logical_and(num > 0, tf.logical_not(enough))
    return (
      shares,
      norm,
      collections.OrderedDict(
        num_clipped=num_clipped,
        num_left_out=num_skipped,
        too_few_clients=tf.cast(too_few, tf.int32),
      ),
    )


def _count(mask: tf.Tensor) -> tf.Tensor:
  """Counts true entries: int32 scalar."""
  return tf.reduce_sum(tf.cast(mask, tf.int32))


def _matrix(tensor: tf.Tensor) -> tf.Tensor:
  """Reshapes [n, ...] to float32 [n, size]."""
  size = tensor.shape[1:].num_elements()
  flat = tf.reshape(tensor, [tf.shape(tensor)[0], size])
  return tf.cast(flat, tf.float32)


def lower_median(rows: tf.Tensor) -> tf.Tensor:
  """Takes the median of each column.

  Args:
    rows: float [N, ...], N > 0.

  Returns:
    float [...], the lower of two medians if N is even.

  Examples:
    >>> import tensorflow as tf
    >>> from tff_fssl.aggregators import robust
    >>> rows = tf.constant([[1.0, 8.0], [2.0, 7.0], [3.0, 6.0], [99.0, 5.0]])
    >>> print(robust.lower_median(rows).numpy())
    [2. 6.]
  """
  return tf.sort(rows, axis=0)[(tf.shape(rows)[0] - 1) // 2]


def _median_shares(products: tf.Tensor, weights: tf.Tensor) -> tf.Tensor:
  """Calculates each update's share in the median of the mixed updates.

  Mixes and median are sums of updates, so that the matrix of inner products of
  n updates is sufficient.

  Args:
    products: float32 [n, n], the inner products of n > 0 updates.
    weights: float32 [n], above 0.

  Returns:
    float32 [n], of sum 1.
  """
  mixes = _mixes(products, weights)
  mixed_products = tf.matmul(
    mixes, tf.matmul(products, mixes, transpose_b=True)
  )
  return tf.linalg.matvec(
    mixes, _geometric_median(mixed_products, weights), transpose_a=True
  )


def _mixes(products: tf.Tensor, weights: tf.Tensor) -> tf.Tensor:
  """Calculates the share of each update (column) in each mean of neighbours.

  Allouah et al., algorithm 2: of n updates, a mean is over the update and its n
  - 1 - floor(0.4 n) nearest neighbours.
  """
  num = tf.size(weights)
  num_nearest = num - tf.cast(_FAR * tf.cast(num, tf.float32), tf.int32)
  distances = _squared_distances(products, tf.eye(num))
  # An update is its own nearest neighbour, despite rounding.
  distances = tf.linalg.set_diag(distances, tf.fill([num], -1.0))
  _, nearest = tf.math.top_k(-distances, num_nearest)
  shares = tf.reduce_sum(tf.one_hot(nearest, num), axis=1) * weights
  return shares / tf.reduce_sum(shares, axis=1, keepdims=True)


def _geometric_median(products: tf.Tensor, weights: tf.Tensor) -> tf.Tensor:
  """Calculates the shares of points in their geometric median: float32 [n].

  Weiszfeld's algorithm repeats a mean, in which points weigh less the farther
  they are from the mean before. It starts at the mean of the half of the points
  that is nearest to the point with the least median distance from others: a
  minority moves neither that mean nor the scale of distances, however far it
  is.
  """
  distances = tf.sqrt(_squared_distances(products, tf.eye(tf.size(weights))))
  medians = lower_median(tf.transpose(distances))
  middle = tf.argmin(medians, output_type=tf.int32)
  near = distances[middle] <= medians[middle]
  shares = tf.where(near, weights, 0.0)
  shares /= tf.reduce_sum(shares)
  for _ in range(_NUM_STEPS):
    squares = _squared_distances(products, shares[tf.newaxis])[0]
    distances = tf.sqrt(squares)
    # A point that is the median would weigh infinitely.
    least = _LEAST_DISTANCE * lower_median(distances) + 1e-30
    shares = weights / tf.maximum(distances, least)
    shares /= tf.reduce_sum(shares)
  return shares


def _squared_distances(products: tf.Tensor, shares: tf.Tensor) -> tf.Tensor:
  """Calculates squared distances between weighted sums and all points.

  Args:
    products: float32 [n, n], the inner products of the points.
    shares: float32 [m, n], the shares of the points in m sums.

  Returns:
    float32 [m, n], at least 0.
  """
  crossed = tf.matmul(shares, products)
  norms = tf.reduce_sum(crossed * shares, axis=1, keepdims=True)
  squares = tf.linalg.diag_part(products) + norms - 2.0 * crossed
  return tf.maximum(squares, 0.0)
