"""Mixup: convex combinations of examples and of their targets.

Zhang et al., "mixup: Beyond Empirical Risk Minimization", ICLR 2018. Shares lam
are drawn from Beta(a, a). All draws are integers, because XLA draws other
floats than TensorFlow's kernels do.
"""

from __future__ import annotations

import functools
from typing import Any

from tff_fssl import hparams
from tff_fssl.lazy import np, tf
from tff_fssl.semisup import losses

_NUM_INTERVALS = 4096
# Smaller concentrations draw 0 or 1 nearly always, so they share one table.
_MIN_CONCENTRATION, _MAX_CONCENTRATION = 1e-6, 1e6


@functools.cache
def _quantile_table(
  concentration: float,
) -> np.ndarray[Any, np.dtype[np.float32]]:
  """Tabulates quantiles of Beta(a, a) in [0, 0.5]: [_NUM_INTERVALS + 1].

  The knots are at (2 v)^(1/4) = 0, 1/n, ..., 1 for the probability v in [0,
  0.5]. They are dense where the tail is thin, and at most 2 / n apart. That
  bounds the distance of the distribution functions for any interpolation.
  """
  from scipy import special  # Slow to import. pylint: disable=C0415

  v = np.linspace(0.0, 1.0, _NUM_INTERVALS + 1) ** 4 / 2
  if concentration < _MIN_CONCENTRATION:
    return np.zeros_like(v, np.float32)
  quantiles = special.betaincinv(concentration, concentration, v)
  return np.maximum.accumulate(np.minimum(quantiles, 0.5)).astype(np.float32)


def beta_quantile(probability: tf.Tensor, concentration: float) -> tf.Tensor:
  """Inverts the distribution function of Beta(a, a), by a table.

  Values between the knots of the table are interpolated. Except for rounding to
  float32, the distribution functions differ by less than 5e-4 everywhere
  (measured: 2.1e-5 at most for a in [0.05, 10]).

  Args:
    probability: float32, any shape, in [0, 1].
    concentration: a in [0, 1e6]. 0 is the limit: 0 or 1, equally likely.

  Returns:
    float32 in [0, 1], of the same shape, not decreasing in the probability.

  Raises:
    UsageError: If the concentration is out of range.

  Examples:
    >>> import tensorflow as tf
    >>> from tff_fssl.semisup import mixup
    >>> v = tf.constant([0.1, 0.25, 0.5, 0.9])
    >>> for a in (1.0, 0.1):  # Uniform, and nearly always 0 or 1.
    ...   print(mixup.beta_quantile(v, a).numpy().round(3))
    [0.1  0.25 0.5  0.9 ]
    [0.    0.001 0.5   1.   ]
  """
  if not 0 <= concentration <= _MAX_CONCENTRATION:
    raise hparams.UsageError(
      f'concentration={concentration}: must be from 0 to {_MAX_CONCENTRATION:g}'
    )
  # The table ends at 0.5: the distribution is symmetric.
  table = tf.constant(_quantile_table(float(concentration)))
  tail = tf.minimum(probability, 1.0 - probability)
  place = tf.sqrt(tf.sqrt(2.0 * tail)) * _NUM_INTERVALS
  index = tf.clip_by_value(tf.cast(place, tf.int32), 0, _NUM_INTERVALS - 1)
  low, high = tf.gather(table, index), tf.gather(table, index + 1)
  value = low + (place - tf.cast(index, tf.float32)) * (high - low)
  return tf.where(probability < 0.5, value, 1.0 - value)


def draw_shares(
  shape: tf.Tensor | list[Any], concentration: float, seed: tf.Tensor
) -> tf.Tensor:
  """Draws lam from Beta(a, a), the same shares when XLA compiles it.

  TensorFlow's own gamma draws do not compile.

  Args:
    shape: The result's shape: [] draws one share, [B] one per example.
    concentration: a in [0, 1e6]. 0 draws 0 or 1, equally likely.
    seed: int32 [2]. It determines the draws.

  Returns:
    float32 in [0, 1].

  Raises:
    UsageError: If the concentration is out of range.

  Examples:
    >>> import tensorflow as tf
    >>> from tff_fssl.semisup import mixup
    >>> shares = mixup.draw_shares([4], 0.75, tf.constant([0, 1]))
    >>> print(shares.numpy().round(3))
    [0.528 0.303 0.544 0.199]
  """
  # 24 bits: a float32 holds no more exactly.
  bits = tf.bitwise.bitwise_and(_integers(shape, seed), 2**31 - 1) // 2**7
  return beta_quantile(tf.cast(bits, tf.float32) * 2.0**-24, concentration)


def larger_shares(shares: tf.Tensor) -> tf.Tensor:
  """Computes max(lam, 1 - lam): MixMatch (Berthelot et al. 2019, eq. 9).

  So a mixed example is closer to its first example than to its partner.

  Args:
    shares: lam, float32, any shape, in [0, 1].

  Returns:
    float32 in [0.5, 1], of the same shape.

  Examples:
    >>> import tensorflow as tf
    >>> from tff_fssl.semisup import mixup
    >>> print(mixup.larger_shares(tf.constant([0.125, 0.5, 0.75])).numpy())
    [0.875 0.5   0.75 ]
  """
  return tf.maximum(shares, 1.0 - shares)


def permutation(size: int | tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
  """Draws a permutation of 0, ..., B - 1, the same when XLA compiles it.

  Args:
    size: B.
    seed: int32 [2]. It determines the permutation.

  Returns:
    int32 [B].

  Examples:
    >>> import tensorflow as tf
    >>> from tff_fssl.semisup import mixup
    >>> print(mixup.permutation(6, tf.constant([0, 1])).numpy())
    [3 0 5 1 2 4]
  """
  # Equal draws would otherwise be ordered as each kernel likes.
  return tf.argsort(_integers([size], seed), stable=True)


def mix(
  shares: float | tf.Tensor, first: tf.Tensor, second: tf.Tensor
) -> tf.Tensor:
  """Computes lam * first + (1 - lam) * second.

  Args:
    shares: lam, float32 scalar, or [B]: one per example.
    first: float [B, ...].
    second: A tensor of the same shape and dtype.

  Returns:
    A tensor of the same shape and dtype. If both are finite, it is exactly
    `first` where lam is 1, and exactly `second` where lam is 0.

  Examples:
    >>> import tensorflow as tf
    >>> from tff_fssl.semisup import mixup
    >>> first, second = tf.constant([[0.0, 8.0], [0.0, 8.0]]), tf.zeros([2, 2])
    >>> print(mixup.mix(tf.constant([0.75, 1.0]), first, second).numpy())
    [[0. 6.]
     [0. 8.]]
  """
  shares = _per_example(shares, first, first.dtype)
  return shares * first + (1.0 - shares) * second


def mix_with_partners(
  x: tf.Tensor,
  targets: tf.Tensor,
  weights: tf.Tensor,
  partners: tf.Tensor,
  shares: float | tf.Tensor,
) -> tuple[tf.Tensor, tf.Tensor]:
  """Mixes each example and its target with another example of the batch.

  A filler (weight 0) is not mixed, nor is an example whose partner is a filler.
  So the weights of the examples also hold for the mixed ones.

  Args:
    x: float32 [B, ...], the examples.
    targets: float32 [B, C], rows sum to 1.
    weights: float32 [B], 0 for fillers.
    partners: int32 [B], indices of the partners: `permutation`.
    shares: lam in [0, 1], float32 scalar or [B]: the share of the example
      itself.

  Returns:
    Mixed examples, float32 [B, ...], and mixed targets, float32 [B, C].

  Examples:
    >>> import tensorflow as tf
    >>> from tff_fssl.semisup import mixup
    >>> x, targets = tf.constant([[0.0], [8.0], [9.0]]), tf.eye(3)
    >>> weights, partners = tf.constant([1.0, 1.0, 0.0]), tf.constant([1, 2, 0])
    >>> mixed = mixup.mix_with_partners(x, targets, weights, partners, 0.75)
    >>> print(mixed[0].numpy().ravel())  # The second's partner is a filler.
    [2. 8. 9.]
    >>> print(mixed[1].numpy()[0])
    [0.75 0.25 0.  ]
  """
  is_real = weights > 0
  is_mixed = tf.logical_and(is_real, tf.gather(is_real, partners))

  def mixed(values: tf.Tensor) -> tf.Tensor:
    mixture = mix(shares, values, tf.gather(values, partners))
    return tf.where(_per_example(is_mixed, values, tf.bool), mixture, values)

  return mixed(x), mixed(targets)


def mixed_cross_entropy(
  logits: tf.Tensor,
  first_labels: tf.Tensor,
  second_labels: tf.Tensor,
  shares: float | tf.Tensor,
  weights: tf.Tensor,
) -> tf.Tensor:
  """Computes SemiFL's loss of mixed examples (Diao et al. 2022).

      lam * mean CE(logits, first) + (1 - lam) * mean CE(logits, second)

  The authors' code draws one lam for a batch, and does not take the larger one
  of lam and 1 - lam.

  Args:
    logits: float32 [B, C], of the mixed examples.
    first_labels: int32 [B], in [0, C).
    second_labels: int32 [B], in [0, C).
    shares: lam in [0, 1], float32 scalar or [B]: the share of the first
      example.
    weights: float32 [B], 0 for fillers.

  Returns:
    float32 scalar, in nats. It is 0 (with gradient 0) if all weights are 0.

  Examples:
    >>> import tensorflow as tf
    >>> from tff_fssl.semisup import mixup
    >>> logits, labels = tf.constant([[2.0, 0.0]]), tf.constant([[0], [1]])
    >>> for share in (1.0, 0.5, 0.0):
    ...   loss = mixup.mixed_cross_entropy(logits, *labels, share, tf.ones([1]))
    ...   print(f'{loss:.3f}')
    0.127
    1.127
    2.127
  """
  first, second = (
    losses.cross_entropy(labels, logits)
    for labels in (first_labels, second_labels)
  )
  return losses.masked_mean(mix(shares, first, second), weights)


def _integers(shape: tf.Tensor | list[Any], seed: tf.Tensor) -> tf.Tensor:
  """Draws from all of int32."""
  return tf.random.stateless_uniform(
    shape, seed, minval=None, maxval=None, dtype=tf.int32, alg='philox'
  )


def _per_example(
  values: float | tf.Tensor, like: tf.Tensor, dtype: tf.DType
) -> tf.Tensor:
  """Reshapes a scalar or [B] to broadcast over `like`, [B, ...]."""
  values = tf.cast(values, dtype)
  if values.shape.rank == 0:
    return values
  return tf.reshape(values, [-1] + [1] * (len(like.shape) - 1))
