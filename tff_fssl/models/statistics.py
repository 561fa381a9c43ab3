"""Static batch norm (sBN): statistics gathered after training, not during it.

As in HeteroFL (Diao et al. 2021), SemiFL and (FL)^2, clients normalize with
batch moments and track none. After the round, one forward pass gathers the
moments of the new weights. Clients send sums, so that any summing aggregator
can be used.

`pooled` is the mean and variance over all values of all examples. `batch_mean`
is what the authors' code computes: the mean of the batches' means and of their
unbiased variances. Each batch counts equally, regardless of its size. `median`
is the median over clients (and the server) of their pooled moments. A minority
of lying clients cannot move it outside the range of the honest ones.
"""

from __future__ import annotations

from typing import NamedTuple

from tff_fssl import loops
from tff_fssl.data import augment
from tff_fssl.lazy import tf
from tff_fssl.models import adapter
from tff_fssl.models import names
from tff_fssl.models.weights import Weights, all_finite

POOLED = names.POOLED
BATCH_MEAN = names.BATCH_MEAN
MEDIAN = names.MEDIAN
# Larger means are absurd; the squares of smaller ones fit into float32.
MAX_MEAN = 1e9


class Sums(NamedTuple):
  """Sums over batches, from which statistics are computed.

  Attributes:
    first: Per batch norm layer, float32 [channels]: the sum of weight * (mean -
      shift).
    second: Per layer, float32 [channels]: the sum of variances for
      `batch_mean`, else the sum of weight * (variance + (mean - shift)^2).
    count: float32 scalar: the sum of weights. A batch's weight is 1 for
      `batch_mean`, else its number of images (which all have the same size).
  """

  first: tuple[tf.Tensor, ...]
  second: tuple[tf.Tensor, ...]
  count: tf.Tensor


def _moving_moments(
  network: adapter.Network, weights: Weights
) -> list[tuple[tf.Tensor, tf.Tensor]]:
  """Finds the moving (mean, variance) in `weights`, per batch norm layer."""
  index = {v.ref(): i for i, v in enumerate(network.non_trainable_variables)}
  return [
    (
      weights.non_trainable[index[layer.moving_mean.value.ref()]],
      weights.non_trainable[index[layer.moving_variance.value.ref()]],
    )
    for layer in network.batch_norm_layers
  ]


def zero_sums(network: adapter.Network) -> Sums:
  """Makes the sums over no batches."""
  zeros = tuple(
    tf.zeros(layer.moving_mean.shape) for layer in network.batch_norm_layers
  )
  return Sums(zeros, zeros, tf.constant(0.0))


def gather(
  network: adapter.Network,
  weights: Weights,
  images: tf.Tensor,
  views: augment.Views,
  *,
  kind: str,
  batch_size: int,
) -> Sums:
  """Sums the moments of one forward pass over images.

  Args:
    network: The network. `weights` are assigned to it.
    weights: The weights whose activations are measured. Their current means
      serve as the shift that keeps float32 sums well conditioned.
    images: [N, ...] as stored. N may be 0.
    views: The preprocessing. Only `plain` is used.
    kind: `pooled`, `batch_mean` or `median`.
    batch_size: Images in a batch.

  Returns:
    The sums, zeros if N is 0 or any value is not finite.
  """
  network.assign(weights)
  # Moments around the old mean: a sum of squares around 0 would cancel.
  shifts = [
    tf.where(weights.statistics_count > 0.0, mean, tf.zeros_like(mean))
    for mean, _ in _moving_moments(network, weights)
  ]

  def add(_: tf.Tensor, rows: slice, sums: Sums) -> Sums:
    recorded = network.moments(views.plain(images[rows]))
    size = tf.cast(rows.stop - rows.start, tf.float32)
    weight = tf.constant(1.0) if kind == BATCH_MEAN else size
    first, second = list(sums.first), list(sums.second)
    calls: dict[int, list[tf.Tensor]] = {}
    for moments in recorded:
      calls.setdefault(moments.layer, []).append(moments.count)
    for moments in recorded:
      # A layer that the model calls several times counts once: by the number of
      # values in each call, or as mean over its calls.
      counts, share = calls[moments.layer], weight
      if kind == BATCH_MEAN:
        share /= len(counts)
      elif len(counts) > 1:
        share = weight * moments.count / tf.add_n(counts)
      offset = moments.mean - shifts[moments.layer]
      if kind == BATCH_MEAN:
        square = (
          moments.variance
          * moments.count
          / tf.maximum(moments.count - 1.0, 1.0)
        )
      else:
        square = moments.variance + tf.square(offset)
      first[moments.layer] += share * offset
      second[moments.layer] += share * square
    return Sums(tuple(first), tuple(second), sums.count + weight)

  sums = loops.fold_batches(
    add,
    zero_sums(network),
    size=tf.shape(images)[0],
    batch_size=batch_size,
  )
  finite = all_finite(sums)
  usable: Sums = tf.nest.map_structure(
    lambda t: tf.where(finite, t, tf.zeros_like(t)), sums
  )
  return usable


def encode_row(sums: Sums) -> tf.Tensor:
  """Encodes a client's mean moments as a row, or as no row if its count is 0.

  A row contains first / count for all layers, second / count for all layers,
  then the count: float32 [1, D] or [0, D].
  """
  moments = tf.concat([*sums.first, *sums.second], axis=0)
  row = tf.concat(
    [tf.math.divide_no_nan(moments, sums.count), sums.count[tf.newaxis]], axis=0
  )
  return row[tf.newaxis][: tf.cast(sums.count > 0.0, tf.int32)]


def combine_rows(network: adapter.Network, rows: tf.Tensor) -> Sums:
  """Combines rows to sums with the medians of moments and the total count.

  The mean is the median of the means. The variance is the median of the mean
  squared deviations from it, which include the distance of a client's own mean.

  Args:
    network: The network. Its moments are in `rows`.
    rows: float32 [N, D], rows of `encode_row`. N may be 0.

  Returns:
    The sums, zeros if N is 0.
  """
  sizes = [layer.moving_mean.shape[0] for layer in network.batch_norm_layers]

  def medians() -> Sums:
    half = sum(sizes)
    means, squares, counts = tf.split(rows, [half, half, 1], axis=1)
    mean = _median(means)
    variances = tf.maximum(squares - tf.square(means), 0.0)
    variance = _median(variances + tf.square(means - mean))
    count = tf.reduce_sum(counts)
    return Sums(
      tuple(tf.split(mean * count, sizes)),
      tuple(tf.split((variance + tf.square(mean)) * count, sizes)),
      count,
    )

  sums: Sums = tf.cond(
    tf.shape(rows)[0] > 0, medians, lambda: zero_sums(network)
  )
  return sums


def _median(values: tf.Tensor) -> tf.Tensor:
  """Computes the median of each column of float32 [N, D], N > 0."""
  ordered, num = tf.sort(values, axis=0), tf.shape(values)[0]
  return (ordered[(num - 1) // 2] + ordered[num // 2]) / 2.0


def put(
  network: adapter.Network, weights: Weights, sums: Sums, *, kind: str
) -> Weights:
  """Replaces the statistics in `weights` by the statistics from `sums`.

  They are unchanged if the count is 0 or any value is not finite.
  """
  moving = {}
  count = tf.maximum(sums.count, 1.0)
  some = tf.logical_and(sums.count > 0.0, all_finite(sums))
  moments = zip(
    network.batch_norm_layers,
    _moving_moments(network, weights),
    sums.first,
    sums.second,
  )
  for layer, (old_mean, old_variance), first, second in moments:
    shift = tf.where(
      weights.statistics_count > 0.0, old_mean, tf.zeros_like(old_mean)
    )
    offset, variance = first / count, second / count
    if kind != BATCH_MEAN:
      # Rounding may make the difference negative.
      variance = tf.maximum(variance - tf.square(offset), 0.0)
    moving[layer.moving_mean.value.ref()] = tf.where(
      some, shift + offset, old_mean
    )
    moving[layer.moving_variance.value.ref()] = tf.where(
      some, variance, old_variance
    )
  return Weights(
    weights.trainable,
    tuple(
      moving.get(variable.ref(), value)
      for variable, value in zip(
        network.non_trainable_variables, weights.non_trainable
      )
    ),
    tf.where(some, sums.count, weights.statistics_count),
  )


def renewed(
  network: adapter.Network,
  weights: Weights,
  images: tf.Tensor,
  views: augment.Views,
  *,
  kind: str,
  batch_size: int,
) -> Weights:
  """Replaces the statistics in `weights` by those of these images alone."""
  sums = gather(
    network, weights, images, views, kind=kind, batch_size=batch_size
  )
  return put(network, weights, sums, kind=kind)
