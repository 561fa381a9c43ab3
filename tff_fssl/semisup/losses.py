"""Losses per example and their means. Arguments are named logits or probs."""

from __future__ import annotations

from tff_fssl.lazy import tf


def cross_entropy(labels: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
  """Computes cross-entropy per example: -log softmax(logits)[label].

  Args:
    labels: int32 [B], in [0, C).
    logits: float32 [B, C].

  Returns:
    float32 [B], in nats.

  Examples:
    >>> import tensorflow as tf
    >>> from tff_fssl.semisup import losses
    >>> logits = tf.constant([[0.0, 0.0], [0.0, 4.0]])
    >>> of_example = losses.cross_entropy(tf.constant([0, 1]), logits)
    >>> print(of_example.numpy().round(3))
    [0.693 0.018]
  """
  return tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)


def masked_mean(values: tf.Tensor, mask: tf.Tensor) -> tf.Tensor:
  """Computes sum(mask * values) / sum(mask); 0, gradient 0, for an empty mask.

  FixMatch and UDA divide the loss of some examples by the size of the whole
  batch. That is `masked_mean(kept * values, weights)`.

  Args:
    values: float32 [B], finite.
    mask: float32 [B], 0 or 1 (or weights >= 0, 0 for fillers).

  Returns:
    float32 scalar.

  Examples:
    >>> import tensorflow as tf
    >>> from tff_fssl.semisup import losses
    >>> values = tf.constant([1.0, 5.0, 9.0])
    >>> kept, weights = tf.constant([[0.0, 1.0, 0.0], [1.0, 1.0, 0.0]])
    >>> float(losses.masked_mean(values, kept))
    5.0
    >>> float(losses.masked_mean(kept * values, weights))  # As in FixMatch.
    2.5
    >>> float(losses.masked_mean(values, tf.zeros([3])))
    0.0
  """
  # Unlike a plain quotient, its gradient is 0 too where the mask is empty.
  return tf.math.divide_no_nan(
    tf.reduce_sum(values * mask), tf.reduce_sum(mask)
  )


def soft_cross_entropy(target_probs: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
  """Computes cross-entropy with soft targets, per example.

      -sum_c p(c) log softmax(logits)(c)

  Its mean over examples is MixMatch's L_x (Berthelot et al. 2019, eq. 3).

  Args:
    target_probs: float32 [B, C], rows sum to 1. No gradient flows through them.
    logits: float32 [B, C].

  Returns:
    float32 [B], in nats.

  Examples:
    >>> import tensorflow as tf
    >>> from tff_fssl.semisup import losses
    >>> targets = tf.constant([[1.0, 0.0], [0.5, 0.5]])
    >>> logits = tf.constant([[3.0, 0.0], [3.0, 0.0]])
    >>> print(losses.soft_cross_entropy(targets, logits).numpy().round(3))
    [0.049 1.549]
  """
  return -tf.reduce_sum(
    tf.stop_gradient(target_probs) * tf.nn.log_softmax(logits), axis=-1
  )


def squared_error(target_probs: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
  """Computes the mean over classes of (softmax(logits) - target)^2.

  Per example it is the Brier score divided by C. Its mean over examples is
  MixMatch's L_u (Berthelot et al. 2019, eq. 4).

  Args:
    target_probs: float32 [B, C], rows sum to 1. No gradient flows through them.
    logits: float32 [B, C].

  Returns:
    float32 [B], in [0, 2 / C].

  Examples:
    >>> import tensorflow as tf
    >>> from tff_fssl.semisup import losses
    >>> targets = tf.constant([[1.0, 0.0], [1.0, 0.0], [1.0, 0.0]])
    >>> logits = tf.constant([[9.0, 0.0], [0.0, 0.0], [0.0, 9.0]])
    >>> print(losses.squared_error(targets, logits).numpy().round(3))
    [0.   0.25 1.  ]
  """
  return tf.reduce_mean(
    tf.math.squared_difference(
      tf.nn.softmax(logits), tf.stop_gradient(target_probs)
    ),
    axis=-1,
  )


def kl_divergence(target_probs: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
  """Computes KL(target || softmax(logits)) per example.

  With a sharpened target it is UDA's consistency loss (Xie et al. 2020).

  Args:
    target_probs: float32 [B, C], rows sum to 1. No gradient flows through them,
      and 0 log 0 is 0.
    logits: float32 [B, C].

  Returns:
    float32 [B], in nats.

  Examples:
    >>> import tensorflow as tf
    >>> from tff_fssl.semisup import losses
    >>> targets = tf.constant([[0.5, 0.5], [1.0, 0.0]])
    >>> logits = tf.zeros([2, 2])  # Both classes are equally probable.
    >>> print(losses.kl_divergence(targets, logits).numpy().round(3))
    [0.    0.693]
  """
  target_probs = tf.stop_gradient(target_probs)
  # The target's entropy changes no gradient, but makes the loss 0 at best.
  return tf.reduce_sum(
    tf.math.xlogy(target_probs, target_probs)
    - target_probs * tf.nn.log_softmax(logits),
    axis=-1,
  )


def masked_consistency(
  probs: tf.Tensor,
  perturbed_logits: tf.Tensor,
  mask: tf.Tensor,
) -> tf.Tensor:
  """Computes (FL)^2's consistency loss L_cs (eq. 13), without gradient to Q.

      (1/B) sum_b m_b KL(Q_b || Q*_b)

  As in the authors' code, the divisor is the size of the whole batch, not the
  sum of the mask. The paper's equation specifies neither mask nor mean.

  Args:
    probs: float32 [B, C], Q at the weights W. No gradient flows through it.
    perturbed_logits: float32 [B, C], logits at W + eps.
    mask: float32 [B], 1 where the fixed threshold is reached.

  Returns:
    float32 scalar, 0 for an empty batch.

  Examples:
    >>> import tensorflow as tf
    >>> from tff_fssl.semisup import losses
    >>> probs = tf.constant([[1.0, 0.0], [0.6, 0.4]])
    >>> perturbed_logits, mask = tf.zeros([2, 2]), tf.constant([1.0, 0.0])
    >>> loss = losses.masked_consistency(probs, perturbed_logits, mask)
    >>> print(f'{loss:.3f}')  # log 2 / 2: one of two examples is masked out.
    0.347
  """
  divergence = kl_divergence(probs, perturbed_logits)
  return tf.math.divide_no_nan(
    tf.reduce_sum(mask * divergence),
    tf.cast(tf.size(mask), divergence.dtype),
  )


def negative_cosine(prediction: tf.Tensor, target: tf.Tensor) -> tf.Tensor:
  """Computes minus the cosine per example: D of FedCon, BYOL and SimSiam.

  Args:
    prediction: float32 [B, D].
    target: float32 [B, D]. No gradient flows through it.

  Returns:
    float32 [B], in [-1, 1]. It is 0, with gradient 0, where the target is 0.

  Examples:
    >>> import tensorflow as tf
    >>> from tff_fssl.semisup import losses
    >>> prediction = tf.constant([[1.0, 0.0], [1.0, 0.0], [1.0, 0.0]])
    >>> target = tf.constant([[9.0, 0.0], [1.0, 1.0], [-1.0, 0.0]])
    >>> print(losses.negative_cosine(prediction, target).numpy().round(3))
    [-1.    -0.707  1.   ]
  """
  target = tf.stop_gradient(target)
  return -tf.reduce_sum(
    tf.math.l2_normalize(prediction, axis=-1)
    * tf.math.l2_normalize(target, axis=-1),
    axis=-1,
  )


def feature_deviation(features: tf.Tensor) -> tf.Tensor:
  """Computes the spread of features in a batch, near 0 if they have collapsed.

  Features are scaled to length 1. The result is the mean over features of their
  standard deviation over examples, times sqrt(D) (Chen and He, "Exploring
  Simple Siamese Representation Learning", 2021, figure 2).

  Args:
    features: float32 [B, D].

  Returns:
    float32 scalar, in [0, 1].

  Examples:
    >>> import tensorflow as tf
    >>> from tff_fssl.semisup import losses
    >>> collapsed = tf.constant([[1.0, 2.0], [2.0, 4.0]])  # One direction.
    >>> spread = tf.constant([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0], [0.0, -1.0]])
    >>> for features in (collapsed, spread):
    ...   print(f'{losses.feature_deviation(features):.3f}')
    0.000
    1.000
  """
  directions = tf.math.l2_normalize(features, axis=-1)
  deviation = tf.math.reduce_std(directions, axis=0)
  width = tf.cast(tf.shape(features)[-1], tf.float32)
  return tf.reduce_mean(deviation) * tf.sqrt(width)
