"""The loss on hard pseudo-labels, against its formula in NumPy."""

import numpy as np
import tensorflow as tf

from tff_fssl.semisup import pseudo_labels

_PROBS = np.float32([[0.7, 0.2, 0.1], [0.1, 0.1, 0.8], [0.4, 0.3, 0.3]])
_LOGITS = np.float32([[1, 0, 0], [2, 1, 0], [0, 0, 9]])
_HIDDEN = np.int32([0, 1, -1])


def _loss(probs, logits, hidden, weights):
  with tf.GradientTape() as tape:
    sources = [tf.constant(probs), tf.constant(logits)]
    tape.watch(sources)
    loss, metrics = pseudo_labels.loss(
      *sources, hidden, tf.constant(weights), threshold=0.7
    )
  return float(loss), metrics, tape.gradient(loss, sources)


def test_the_divisor_is_the_whole_batch():
  loss, metrics, _ = _loss(_PROBS, _LOGITS, _HIDDEN, [1.0, 1.0, 1.0])
  logs = _LOGITS - np.log(np.exp(_LOGITS).sum(-1, keepdims=True))
  # The first two reach the threshold, one of them exactly.
  np.testing.assert_allclose(loss, -(logs[0, 0] + logs[1, 2]) / 3, rtol=1e-5)
  total, count = metrics['loss_pseudo_label']
  np.testing.assert_allclose(total, 3 * loss, rtol=1e-5)
  assert float(count) == 2.0
  assert [float(v) for v in metrics['pseudo_label_accuracy']] == [1.0, 2.0]


def test_fillers_and_predictions_that_label_have_no_gradient():
  _, metrics, (of_probs, of_logits) = _loss(
    _PROBS, _LOGITS, _HIDDEN, [1.0, 0.0, 1.0]
  )
  assert of_probs is None
  assert np.any(of_logits[0]) and not np.any(of_logits[1:])
  assert float(metrics['pseudo_label_ratio'].count) == 2.0
