"""Confidence thresholds for pseudo-labels."""

from __future__ import annotations

from typing import NamedTuple

from tff_fssl.lazy import tf


class AdaptiveThresholds(NamedTuple):
  """Thresholds that adapt to a client's learning status.

  Attributes:
    learning_status: tau_k, float32 scalar in [1/C, 1].
    of_class: tau_k(c), float32 [C], each in [0, tau_k].
  """

  learning_status: tf.Tensor
  of_class: tf.Tensor


def adaptive_thresholds(probs: tf.Tensor) -> AdaptiveThresholds:
  """Computes client-specific adaptive thresholds, CAT: (FL)^2, eq. 7-9.

      tau = mean_b max_c q_b(c)            (eq. 7)
      p(c) = mean_b q_b(c)                 (eq. 8)
      tau(c) = tau p(c) / max_c' p(c')     (eq. 9)

  They are computed each round from all of a client's examples, without a moving
  average. Classes that the client seldom predicts get lower thresholds.

  Args:
    probs: q, float32 [N, C], rows sum to 1. For N = 0 all thresholds are 1.

  Returns:
    The thresholds.

  Examples:
    >>> import tensorflow as tf
    >>> from tff_fssl.semisup import thresholds
    >>> probs = tf.constant([[0.9, 0.1], [0.8, 0.2], [0.3, 0.7]])
    >>> adaptive = thresholds.adaptive_thresholds(probs)
    >>> print(f'{adaptive.learning_status:.3f}')
    0.800
    >>> print(adaptive.of_class.numpy().round(3))  # Class 1 is half as likely.
    [0.8 0.4]
  """
  # A client without examples has an empty batch, not NaN.
  some = tf.shape(probs)[0] > 0
  count = tf.cast(tf.maximum(tf.shape(probs)[0], 1), probs.dtype)
  status = tf.reduce_sum(tf.reduce_max(probs, axis=-1)) / count
  marginal = tf.reduce_sum(probs, axis=0) / count
  of_class = status * tf.math.divide_no_nan(marginal, tf.reduce_max(marginal))
  return AdaptiveThresholds(
    tf.where(some, status, tf.ones_like(status)),
    tf.where(some, of_class, tf.ones_like(of_class)),
  )


def fixed_mask(probs: tf.Tensor, threshold: float | tf.Tensor) -> tf.Tensor:
  """Tells where the largest probability reaches `threshold`.

  Eq. 11 of the (FL)^2 paper has >. The authors' code has >=, as does FixMatch's
  code, and so does this function.

  Args:
    probs: float32 [N, C], rows sum to 1.
    threshold: In [0, 1]: one for all, or float32 [N], one for each.

  Returns:
    bool [N].

  Examples:
    >>> import tensorflow as tf
    >>> from tff_fssl.semisup import thresholds
    >>> probs = tf.constant([[0.97, 0.03], [0.75, 0.25], [0.5, 0.5]])
    >>> print(thresholds.fixed_mask(probs, 0.75).numpy())
    [ True  True False]
  """
  return tf.reduce_max(probs, axis=-1) >= threshold


def strict_mask(probs: tf.Tensor, threshold: float) -> tf.Tensor:
  """Tells where the largest probability exceeds `threshold`.

  This is UDA's mask (Xie et al. 2020, section 3.2, and the authors' code). It
  takes the probabilities before sharpening.

  Args:
    probs: float32 [N, C], rows sum to 1.
    threshold: In [0, 1].

  Returns:
    bool [N].

  Examples:
    >>> import tensorflow as tf
    >>> from tff_fssl.semisup import thresholds
    >>> probs = tf.constant([[0.97, 0.03], [0.75, 0.25], [0.5, 0.5]])
    >>> print(thresholds.strict_mask(probs, 0.75).numpy())
    [ True False False]
  """
  return tf.reduce_max(probs, axis=-1) > threshold


def class_mask(probs: tf.Tensor, thresholds: tf.Tensor) -> tf.Tensor:
  """Tells where the largest probability reaches its class's threshold.

  It is the mask of (FL)^2's L_a, eq. 10, with the >= of the authors' code.

  Args:
    probs: float32 [N, C], rows sum to 1.
    thresholds: float32 [C].

  Returns:
    bool [N].

  Examples:
    >>> import tensorflow as tf
    >>> from tff_fssl.semisup import thresholds
    >>> probs = tf.constant([[0.75, 0.25], [0.25, 0.75]])
    >>> print(thresholds.class_mask(probs, tf.constant([0.8, 0.5])).numpy())
    [False  True]
  """
  # Only the predicted class's threshold counts, even if another is reached.
  limit = tf.gather(thresholds, tf.argmax(probs, axis=-1))
  return tf.reduce_max(probs, axis=-1) >= limit


def select(
  probs: tf.Tensor, of_class: tf.Tensor, confidence_threshold: float
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
  """Makes pseudo-labels and selects the ones to train on.

  Args:
    probs: float32 [N, C], rows sum to 1.
    of_class: float32 [C], each class's threshold.
    confidence_threshold: The fixed threshold, in [0, 1].

  Returns:
    Pseudo-labels int32 [N]. Then kept, bool [N]: whether they reach their
    class's threshold. Then confident, bool [N]: whether they also reach the
    fixed one.

  Examples:
    >>> import tensorflow as tf
    >>> from tff_fssl.semisup import thresholds
    >>> probs = tf.constant([[0.97, 0.03], [0.4, 0.6], [0.6, 0.4]])
    >>> selected = thresholds.select(probs, tf.constant([0.8, 0.5]), 0.95)
    >>> for name, of_example in zip(('label', 'kept', 'confident'), selected):
    ...   print(f'{name}: {of_example.numpy()}')
    label: [0 1 0]
    kept: [ True  True False]
    confident: [ True False False]
  """
  kept = class_mask(probs, of_class)
  confident = tf.logical_and(kept, fixed_mask(probs, confidence_threshold))
  return pseudo_labels(probs), kept, confident


def pseudo_labels(probs: tf.Tensor) -> tf.Tensor:
  """Takes the most probable class.

  Args:
    probs: float32 [N, C].

  Returns:
    int32 [N], the first of equally probable classes.

  Examples:
    >>> import tensorflow as tf
    >>> from tff_fssl.semisup import thresholds
    >>> probs = tf.constant([[0.4, 0.6], [0.5, 0.5]])
    >>> print(thresholds.pseudo_labels(probs).numpy())
    [1 0]
  """
  return tf.argmax(probs, axis=-1, output_type=tf.int32)
