"""The divergence of a batch's predictions from equal shares of all classes."""

from __future__ import annotations

from tff_fssl.lazy import tf


def uniform_divergence(probs: tf.Tensor, weights: tf.Tensor) -> tf.Tensor:
  """Computes KL(P || uniform) for the mean prediction P of a batch.

      sum_c P(c) log(C P(c))

  See FedSwitch (Zhao et al. 2023), section 4.2. It is the divergence of the
  mean, not the mean of the examples' divergences. Confident predictions of all
  classes equally often give 0.

  Args:
    probs: float32 [B, C], rows sum to 1.
    weights: float32 [B], >= 0, and 0 for examples that do not count.

  Returns:
    float32 scalar in [0, log C], in nats. It is log C if no example counts.

  Examples:
    >>> import tensorflow as tf
    >>> from tff_fssl.semisup import divergence
    >>> both = tf.constant([[1.0, 0.0], [0.0, 1.0]])  # Predicts both classes.
    >>> one = tf.constant([[1.0, 0.0], [1.0, 0.0]])  # Predicts only one.
    >>> for probs in (both, one):
    ...   print(f'{divergence.uniform_divergence(probs, tf.ones([2])):.3f}')
    0.000
    0.693
  """
  num_classes = probs.shape[-1]
  mean = tf.math.divide_no_nan(
    tf.reduce_sum(probs * weights[:, tf.newaxis], axis=0),
    tf.reduce_sum(weights),
  )
  # `xlogy` makes 0 log 0 zero for classes that are never predicted.
  uniform_entropy = tf.math.log(tf.constant(num_classes, probs.dtype))
  return uniform_entropy + tf.reduce_sum(tf.math.xlogy(mean, mean))
