"""Static batch norm (sBN): statistics gathered after training, not during it.

HeteroFL (Diao et al. 2021) and SemiFL, (FL)^2: clients normalize with batch
moments and track none; after the round, one forward pass gathers the moments of
the new weights. What travels are sums, so that any summing aggregator will do.

`pooled` is the mean and variance over all values of all examples. `batch_mean`
is what the authors' code computes: the mean of batches' means and of their
unbiased variances, each batch counting equally whatever its size.
"""

from typing import NamedTuple

import tensorflow as tf

from tff_fssl.data import augment
from tff_fssl.models import adapter

POOLED = 'pooled'
BATCH_MEAN = 'batch_mean'


class Sums(NamedTuple):
  """Sums over batches, from which statistics are made.

  Attributes:
    first: Per batch norm layer float32 [channels]: sum of weight * (mean -
      shift).
    second: Per layer float32 [channels]: sum of weight * (variance + (mean -
      shift)^2) if pooled, of variances if batch_mean.
    count: float32 scalar: sum of weights; a batch's weight is its number of
      images if pooled (all images being of one size), else 1.
  """

  first: tuple[tf.Tensor, ...]
  second: tuple[tf.Tensor, ...]
  count: tf.Tensor


def _moving_moments(
  network: adapter.Network, weights: adapter.Weights
) -> list[tuple[tf.Tensor, tf.Tensor]]:
  """Per batch norm layer, (mean, variance) within `weights`."""
  index = {v.ref(): i for i, v in enumerate(network.non_trainable_variables)}
  return [
    (
      weights.non_trainable[index[layer.moving_mean.ref()]],
      weights.non_trainable[index[layer.moving_variance.ref()]],
    )
    for layer in network.batch_norm_layers
  ]


def zero_sums(network: adapter.Network) -> Sums:
  """Sums over no batch."""
  zeros = tuple(
    tf.zeros(layer.moving_mean.shape) for layer in network.batch_norm_layers
  )
  return Sums(zeros, zeros, tf.constant(0.0))


def gather(
  network: adapter.Network,
  weights: adapter.Weights,
  images: tf.Tensor,
  views: augment.Views,
  *,
  kind: str,
  batch_size: int,
) -> Sums:
  """Sums of the moments of one forward pass over images, as they are stored.

  Args:
    network: The network; its weights are assigned.
    weights: The weights whose activations are measured. Their present means
      serve as the shift that keeps float32 sums well conditioned.
    images: [N, ...] as stored; N may be 0.
    views: Their preprocessing; `plain` is used.
    kind: `pooled` or `batch_mean`.
    batch_size: Images in a batch.

  Returns:
    The sums, those of no batch if N is 0 or anything is not finite.
  """
  network.assign(weights)
  shifts = [
    tf.where(weights.statistics_count > 0.0, mean, tf.zeros_like(mean))
    for mean, _ in _moving_moments(network, weights)
  ]
  num_images = tf.shape(images)[0]
  sums = zero_sums(network)
  for start in tf.range(0, num_images, batch_size):
    recorded = network.moments(views.plain(images[start : start + batch_size]))
    size = tf.cast(tf.minimum(batch_size, num_images - start), tf.float32)
    weight = size if kind == POOLED else tf.constant(1.0)
    first, second = list(sums.first), list(sums.second)
    calls = [m.layer for m in recorded]
    for moments in recorded:
      share = weight / calls.count(moments.layer)
      offset = moments.mean - shifts[moments.layer]
      if kind == POOLED:
        square = moments.variance + tf.square(offset)
      else:
        square = (
          moments.variance
          * moments.count
          / tf.maximum(moments.count - 1.0, 1.0)
        )
      first[moments.layer] += share * offset
      second[moments.layer] += share * square
    sums = Sums(tuple(first), tuple(second), sums.count + weight)
  finite = adapter.all_finite(sums)
  return tf.nest.map_structure(
    lambda t: tf.where(finite, t, tf.zeros_like(t)), sums
  )


def put(
  network: adapter.Network, weights: adapter.Weights, sums: Sums, *, kind: str
) -> adapter.Weights:
  """`weights` with the statistics that `sums` make; unchanged if count is 0."""
  moving = {}
  count = tf.maximum(sums.count, 1.0)
  some = sums.count > 0.0
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
    if kind == POOLED:
      variance = tf.maximum(variance - tf.square(offset), 0.0)
    moving[layer.moving_mean.ref()] = tf.where(some, shift + offset, old_mean)
    moving[layer.moving_variance.ref()] = tf.where(some, variance, old_variance)
  return adapter.Weights(
    weights.trainable,
    tuple(
      moving.get(variable.ref(), value)
      for variable, value in zip(
        network.non_trainable_variables, weights.non_trainable
      )
    ),
    tf.where(some, sums.count, weights.statistics_count),
  )
