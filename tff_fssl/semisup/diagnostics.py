"""Quality of pseudo-labels, if hidden labels are known (in a simulation)."""

from __future__ import annotations

from tff_fssl.lazy import tf
from tff_fssl.semisup.means import Mean

PSEUDO_LABEL, HIGH_CONFIDENCE = 'pseudo_label', 'high_confidence'
NAMES = (
  'ratio',
  'accuracy',
  'correct_ratio',
  'wrong_ratio',
  'correct_to_wrong',
)


def pseudo_label_metrics(
  pseudo_labels: tf.Tensor,
  hidden_labels: tf.Tensor,
  mask: tf.Tensor,
  prefix: str = PSEUDO_LABEL,
  *,
  weights: tf.Tensor | None = None,
) -> dict[str, Mean]:
  """Computes (FL)^2's figures of pseudo-label quality, each as (sum, count).

  Args:
    pseudo_labels: int32 [N].
    hidden_labels: int32 [N], -1 where unknown.
    mask: bool or float [N], which pseudo-labels are used.
    prefix: Prefix of the names.
    weights: float32 [N], 0 for examples that do not count. None: all count.

  Returns:
    `<prefix>_ratio`: used / all, `_accuracy`: correct / used,
    `_correct_ratio`: correct / all, `_wrong_ratio`: wrong / all,
    `_correct_to_wrong`: correct / wrong. All except the first count only
    examples with a known hidden label.

  Examples:
    >>> import tensorflow as tf
    >>> from tff_fssl.semisup import diagnostics
    >>> guessed, hidden = tf.constant([0, 1, 1, 0]), tf.constant([0, 1, 0, -1])
    >>> mask = tf.constant([1.0, 1.0, 1.0, 0.0])
    >>> metrics = diagnostics.pseudo_label_metrics(guessed, hidden, mask)
    >>> for name, (total, count) in metrics.items():
    ...   print(f'{name}: {total:.0f}/{count:.0f}')
    pseudo_label_ratio: 3/4
    pseudo_label_accuracy: 2/3
    pseudo_label_correct_ratio: 2/3
    pseudo_label_wrong_ratio: 1/3
    pseudo_label_correct_to_wrong: 2/1
  """
  used = tf.cast(mask, tf.float32)
  known = tf.cast(hidden_labels >= 0, tf.float32)
  size = tf.cast(tf.size(used), tf.float32)
  if weights is not None:
    used, known, size = used * weights, known * weights, tf.reduce_sum(weights)
  right = tf.cast(tf.equal(pseudo_labels, hidden_labels), tf.float32)
  correct = tf.reduce_sum(used * known * right)
  wrong = tf.reduce_sum(used * known) - correct
  num_known = tf.reduce_sum(known)
  values = (
    (tf.reduce_sum(used), size),
    (correct, correct + wrong),
    (correct, num_known),
    (wrong, num_known),
    (correct, wrong),
  )
  return {f'{prefix}_{n}': Mean(*v) for n, v in zip(NAMES, values, strict=True)}


def kept_and_confident(
  pseudo_labels: tf.Tensor,
  hidden_labels: tf.Tensor,
  kept: tf.Tensor,
  confident: tf.Tensor,
  weights: tf.Tensor | None = None,
) -> dict[str, Mean]:
  """Merges `pseudo_label_metrics` of kept and of confident pseudo-labels.

  Args:
    pseudo_labels: int32 [N].
    hidden_labels: int32 [N], -1 where unknown.
    kept: bool or float [N], the pseudo-labels to train on.
    confident: bool or float [N], those that reach a fixed threshold.
    weights: float32 [N], 0 for examples that do not count. None: all count.

  Returns:
    The metrics `pseudo_label_...` of the kept ones and `high_confidence_...` of
    the confident ones.

  Examples:
    >>> import tensorflow as tf
    >>> from tff_fssl.semisup import diagnostics
    >>> guessed, hidden = tf.constant([0, 1, 1, 0]), tf.constant([0, 1, 0, 1])
    >>> masks = tf.constant([[1.0, 1.0, 1.0, 0.0], [1.0, 0.0, 0.0, 0.0]])
    >>> metrics = diagnostics.kept_and_confident(guessed, hidden, *masks)
    >>> for name in ('pseudo_label_accuracy', 'high_confidence_accuracy'):
    ...   print(name, '{:.0f}/{:.0f}'.format(*metrics[name]))
    pseudo_label_accuracy 2/3
    high_confidence_accuracy 1/1
  """
  return {
    **pseudo_label_metrics(pseudo_labels, hidden_labels, kept, weights=weights),
    **pseudo_label_metrics(
      pseudo_labels,
      hidden_labels,
      confident,
      HIGH_CONFIDENCE,
      weights=weights,
    ),
  }


def names(*prefixes: str) -> tuple[str, ...]:
  """Lists the metrics of `pseudo_label_metrics`, for each prefix.

  Examples:
    >>> from tff_fssl.semisup import diagnostics
    >>> diagnostics.names('confident')[:2]
    ('confident_ratio', 'confident_accuracy')
  """
  return tuple(f'{p}_{n}' for p in prefixes for n in NAMES)
