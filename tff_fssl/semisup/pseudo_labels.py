"""The loss on hard pseudo-labels, which several papers share."""

from __future__ import annotations

from tff_fssl.lazy import tf
from tff_fssl.semisup import diagnostics
from tff_fssl.semisup import losses
from tff_fssl.semisup import thresholds
from tff_fssl.semisup.means import Mean


def loss(
  probs: tf.Tensor,
  logits: tf.Tensor,
  hidden_labels: tf.Tensor,
  weights: tf.Tensor,
  threshold: float | tf.Tensor,
) -> tuple[tf.Tensor, dict[str, Mean]]:
  """Computes FixMatch's loss on pseudo-labels (Sohn et al. 2020, eq. 4).

      (1/B) sum_b 1[max p_b >= threshold] CE(argmax p_b, logits_b)

  Args:
    probs: float32 [B, C], the predictions that give the pseudo-labels. No
      gradient flows through them.
    logits: float32 [B, C], the predictions to train.
    hidden_labels: int32 [B], for metrics only, -1 where unknown.
    weights: float32 [B], 0 for fillers, whose loss is 0. The loss is a mean
      over the whole batch, fillers included; metrics leave them out.
    threshold: The least probability of a pseudo-label, in [0, 1]: one for all,
      or float32 [B], one for each.

  Returns:
    The loss, float32 scalar, and metrics of the pseudo-labels.

  Examples:
    >>> import tensorflow as tf
    >>> from tff_fssl.semisup import pseudo_labels
    >>> probs = tf.constant([[0.97, 0.03], [0.7, 0.3]])  # Of weak views.
    >>> logits = tf.constant([[0.0, 0.0], [5.0, 0.0]])  # Of strong views.
    >>> loss, metrics = pseudo_labels.loss(
    ...   probs, logits, tf.constant([0, -1]), tf.ones([2]), threshold=0.95
    ... )
    >>> print(f'{loss:.3f}')  # log 2 / 2: the second example is not kept.
    0.347
  """
  labels = thresholds.pseudo_labels(probs)
  mask = thresholds.fixed_mask(probs, threshold)
  kept = tf.cast(mask, tf.float32) * weights
  entropies = losses.cross_entropy(labels, logits)
  metrics = diagnostics.pseudo_label_metrics(
    labels, hidden_labels, kept, weights=weights
  )
  metrics['loss_pseudo_label'] = Mean(
    tf.reduce_sum(kept * entropies), tf.reduce_sum(kept)
  )
  return tf.reduce_mean(kept * entropies), metrics
