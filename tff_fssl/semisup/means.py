"""Metrics that are means, as pairs that can be summed."""

from __future__ import annotations

from typing import NamedTuple

from tff_fssl.lazy import tf


class Mean(NamedTuple):
  """A metric that is a mean, whose fields are summed over batches and clients.

  Attributes:
    total: float32 scalar.
    count: float32 scalar, at most the number of examples in the batch. Clients
      with larger counts than their data allow are rejected. A count of 0 is
      allowed with any total: a ratio of correct to wrong labels has it where
      none is wrong.

  Examples:
    >>> from tff_fssl.semisup.means import Mean
    >>> first, second = Mean.weighted(0.9, size=10), Mean.weighted(0.4, size=40)
    >>> total, count = map(sum, zip(first, second))
    >>> print(f'{total / count:.2f}')  # Not 0.65: the second batch is larger.
    0.50
  """

  total: tf.Tensor
  count: tf.Tensor

  @classmethod
  def ratio(cls, total: tf.Tensor, count: tf.Tensor) -> Mean:
    """Makes a metric from a sum and a count of any numeric types."""
    return cls(tf.cast(total, tf.float32), tf.cast(count, tf.float32))

  @classmethod
  def weighted(cls, mean: tf.Tensor, size: tf.Tensor) -> Mean:
    """Makes a metric from a mean that was taken over `size` examples."""
    size = tf.cast(size, tf.float32)
    return cls(tf.cast(mean, tf.float32) * size, size)
