"""Sparse weights, and sparse differences between sets of weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from tff_fssl.lazy import tf

Tensors: TypeAlias = 'Sequence[tf.Tensor]'


def sparsify(weights: Tensors, threshold: float) -> tuple[tf.Tensor, ...]:
  """Sets what is at most `threshold` in size to 0; NaN stays NaN."""
  if not threshold:
    return tuple(tf.convert_to_tensor(w) for w in weights)
  return tuple(
    tf.where(tf.abs(w) <= threshold, tf.zeros_like(w), w) for w in weights
  )


def overwrite(
  base: Tensors, new: Tensors, threshold: float
) -> tuple[tf.Tensor, ...]:
  """What a receiver that has `base` has after the larger changes were sent.

  Args:
    base: What it has.
    new: What it shall have; a NaN is always sent.
    threshold: Changes of at most this size are not sent, >= 0.

  Returns:
    `new` where it differs from `base` by more than `threshold`, else `base`.
  """
  return tuple(
    tf.where(tf.abs(n - b) <= threshold, b, n)
    for b, n in zip(base, new, strict=True)
  )


def share_sent(first: Tensors, second: Tensors, threshold: float) -> tf.Tensor:
  """The elements that differ by more than `threshold`, among all.

  Args:
    first: Tensors.
    second: Tensors of the same shapes.
    threshold: At least 0.

  Returns:
    float32 scalar in [0, 1].
  """
  sent = [
    tf.math.count_nonzero(tf.abs(a - b) > threshold, dtype=tf.int32)
    for a, b in zip(first, second, strict=True)
  ]
  size = sum(t.shape.num_elements() for t in first)
  return tf.cast(tf.add_n(sent), tf.float32) / size
