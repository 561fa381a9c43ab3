"""Frequencies of classes, over rounds."""

from __future__ import annotations

from tff_fssl.lazy import tf


def follow(
  frequencies: tf.Tensor, counts: tf.Tensor, decay: float
) -> tf.Tensor:
  """Moves frequencies of classes towards those of a round.

  Args:
    frequencies: float32 [C], of sum 1.
    counts: float32 [C], in any unit. Negative ones, which are noise, count
      as 0.
    decay: The share of the old frequencies in the new ones.

  Returns:
    float32 [C], of sum 1. The old frequencies if all counts are 0 or one is not
    finite.

  Examples:
    >>> import tensorflow as tf
    >>> from tff_fssl.semisup import frequencies
    >>> old, counts = tf.constant([0.5, 0.5]), tf.constant([30.0, 10.0])
    >>> print(frequencies.follow(old, counts, decay=0.9).numpy().round(3))
    [0.525 0.475]
  """
  counts = tf.maximum(counts, 0.0)
  total = tf.reduce_sum(counts)
  moved = decay * frequencies + (1.0 - decay) * tf.math.divide_no_nan(
    counts, total
  )
  usable = tf.logical_and(tf.math.is_finite(total), total > 0.0)
  return tf.where(usable, moved, frequencies)


def divide(probs: tf.Tensor, frequencies: tf.Tensor) -> tf.Tensor:
  """Divides probabilities by frequencies of classes, and scales to sum 1.

  Args:
    probs: float32 [..., C].
    frequencies: float32 [C]. A class with 0 gets 0.

  Returns:
    As `probs`. All 0 where no class is left.

  Examples:
    >>> import tensorflow as tf
    >>> from tff_fssl.semisup import frequencies
    >>> probs, prior = tf.constant([[0.6, 0.4]]), tf.constant([0.75, 0.25])
    >>> print(frequencies.divide(probs, prior).numpy().round(3))
    [[0.333 0.667]]
  """
  ratios = tf.math.divide_no_nan(probs, frequencies)
  return tf.math.divide_no_nan(ratios, tf.reduce_sum(ratios, -1, keepdims=True))
