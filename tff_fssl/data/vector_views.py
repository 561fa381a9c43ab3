"""Views of vectors, such as the embeddings of a frozen encoder.

Every function maps a batch float32 [B, V, D] to float32 [B, D], in the graph.
The first of V views is plain. The owner of the data may add weak and strong
views (of another wording, another photo, another crop). Then one of these is
drawn. Otherwise views are made from the plain one:

*   weak: Gaussian noise is added to each number.
*   strong: Noise is added in the same way, usually more, with its own draws.
    Then some numbers, drawn one by one, are replaced by their means (the
    masking noise of Vincent et al. 2008, for vectors whose zero has no
    meaning).

Noise is in units of each number's deviation over the training data, so that one
strength suits numbers of any scale.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from tff_fssl.data import augment
from tff_fssl.data.sources import vectors as vectors_lib
from tff_fssl.hparams import UsageError
from tff_fssl.lazy import tf

# Uniform numbers are multiples of 2^-23. Half a step more, and none is 0, whose
# quantile is -inf.
_HALF_STEP = 2.0**-24


def build_views(
  mean: Sequence[float],
  std: Sequence[float],
  *,
  num_weak: int = 0,
  num_strong: int = 0,
  normalize: bool = True,
  weak_noise: float = 0.1,
  strong_noise: float = 0.5,
  strong_dropout: float = 0.2,
) -> augment.Views:
  """Builds the views of a data set's vectors.

  Args:
    mean: The mean of each number of the plain vectors, [D].
    std: The standard deviation of each number, > 0.
    num_weak: The number of given weak views, after the plain one.
    num_strong: The number of given strong views, after the weak ones.
    normalize: Whether networks receive (x - mean) / std, else x.
    weak_noise: Deviation of the noise of made weak views, >= 0.
    strong_noise: Deviation of the noise of made strong views, >= 0.
    strong_dropout: Share of the numbers of made strong views that become the
      mean, in [0, 1].

  Returns:
    The views.

  Raises:
    UsageError: If mean and deviation do not fit.

  Examples:
    >>> import tensorflow as tf
    >>> from tff_fssl.data import vector_views
    >>> views = vector_views.build_views(mean=[5.0] * 4, std=[2.0] * 4)
    >>> x, seed = tf.constant([[[5.0, 7.0, 9.0, 11.0]]]), tf.constant([0, 1])
    >>> print(views.plain(x).numpy())
    [[0. 1. 2. 3.]]
    >>> print(views.weak(x, seed).numpy().round(2))
    [[0.02 1.   2.04 3.09]]
    >>> print(views.strong(x, seed).numpy().round(2))
    [[-0.18  1.06  0.    2.46]]
  """
  _check(mean, std)
  center = np.array(mean, np.float32)
  spread = np.array(std, np.float32)
  size = len(center)

  def normalized(vectors: tf.Tensor) -> tf.Tensor:
    return (vectors - center) / spread

  def finish(values: tf.Tensor) -> tf.Tensor:
    return values if normalize else values * spread + center

  def plain(vectors: tf.Tensor) -> tf.Tensor:
    chosen = tf.reshape(vectors[:, 0], [-1, size])
    return normalized(chosen) if normalize else chosen

  def accepts(vectors: tf.Tensor) -> tf.Tensor:
    # Comparisons with NaN are false.
    return tf.reduce_all(
      tf.abs(normalized(vectors)) <= vectors_lib.MAX_DEVIATIONS
    )

  def weak(vectors: tf.Tensor, draws: tf.Tensor) -> tf.Tensor:
    values = normalized(vectors[:, 0])
    return finish(values + weak_noise * _gaussian(draws))

  def strong(vectors: tf.Tensor, draws: tf.Tensor) -> tf.Tensor:
    values = normalized(vectors[:, 0])
    values += strong_noise * _gaussian(draws[:, :size])
    return finish(tf.where(draws[:, size:] < strong_dropout, 0.0, values))

  weak_view = augment.RandomView(size, weak, augment.WEAK_SALT)
  strong_view = augment.RandomView(2 * size, strong, augment.STRONG_SALT)
  if num_weak:
    weak_view = _given(plain, 1, num_weak, augment.WEAK_SALT)
  if num_strong:
    strong_view = _given(plain, 1 + num_weak, num_strong, augment.STRONG_SALT)
  return augment.Views(plain, weak_view, strong_view, accepts)


def _check(mean: Sequence[float], std: Sequence[float]) -> None:
  """Raises `UsageError` if mean and deviation do not fit."""
  if not len(mean) or len(mean) != len(std) or min(std) <= 0:
    raise UsageError(
      f'{len(mean)} means and {len(std)} deviations: every number of a vector'
      ' needs one of each, and deviations must be greater than 0'
    )


def _given(
  plain: Callable[[tf.Tensor], tf.Tensor], first: int, num: int, salt: int
) -> augment.RandomView:
  """Builds a view that draws one of `num` given views, from the `first`."""

  def render(vectors: tf.Tensor, draws: tf.Tensor) -> tf.Tensor:
    which = first + tf.cast(draws[:, 0] * num, tf.int32)
    return plain(tf.gather(vectors, which[:, tf.newaxis], axis=1, batch_dims=1))

  return augment.RandomView(1, render, salt)


def _gaussian(draws: tf.Tensor) -> tf.Tensor:
  """Maps uniform numbers to numbers of a standard normal distribution."""
  return tf.math.ndtri(draws + _HALF_STEP)
