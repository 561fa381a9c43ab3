"""How far the predictions of a batch are from equal shares of all classes."""

from __future__ import annotations

from tff_fssl.lazy import tf

# The distribution whose divergence is measured.
PROBABILITIES, LABELS = 'probabilities', 'labels'


def from_uniform(
  probs: tf.Tensor, weights: tf.Tensor, of: str = PROBABILITIES
) -> tf.Tensor:
  """KL(P || uniform), where P is the mean prediction of a batch.

  FedSwitch (Zhao et al. 2023), section 4.2: sum_c P(c) log(C P(c)). It is the
  divergence of the mean, not the mean of the examples' divergences, so that
  confident predictions of all classes alike give 0.

  Args:
    probs: float32 [B, C], rows sum to 1.
    weights: float32 [B], >= 0; 0 for examples that do not count.
    of: `LABELS`: P is the histogram of the most probable classes instead.
      In small batches that is biased upwards: by 0.53 for 10 examples of 10
      equally frequent classes.

  Returns:
    float32 scalar in [0, log C], in nats; log C if no example counts.
  """
  num_classes = probs.shape[-1]
  if of == LABELS:
    probs = tf.one_hot(tf.argmax(probs, axis=-1), num_classes)
  mean = tf.math.divide_no_nan(
    tf.reduce_sum(probs * weights[:, tf.newaxis], axis=0),
    tf.reduce_sum(weights),
  )
  uniform_entropy = tf.math.log(tf.constant(num_classes, probs.dtype))
  return uniform_entropy + tf.reduce_sum(tf.math.xlogy(mean, mean))
