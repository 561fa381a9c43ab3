"""Quality of pseudo-labels: worked example E1 of (FL)^2, unknown labels."""

import numpy as np
import pytest

from tff_fssl.semisup import diagnostics

# The pseudo-labels of E1, the true labels, and the ones kept (0, 2 and 4).
_PREDICTED = np.array([0, 0, 1, 0, 2], np.int32)
_TRUE = np.array([0, 0, 0, 0, 2], np.int32)
_KEPT = np.array([True, False, True, False, True])


def _means(metrics):
  return {k: float(a) / float(b) for k, (a, b) in metrics.items()}


def test_e1_ratios():
  means = _means(diagnostics.pseudo_label_metrics(_PREDICTED, _TRUE, _KEPT))
  assert means == pytest.approx(
    {
      'pseudo_label_ratio': 0.6,
      'pseudo_label_accuracy': 2 / 3,
      'pseudo_label_correct_ratio': 0.4,
      'pseudo_label_wrong_ratio': 0.2,
      'pseudo_label_correct_to_wrong': 2.0,
    }
  )
  assert tuple(means) == diagnostics.names('pseudo_label')


def test_fillers_change_nothing():
  padded = diagnostics.pseudo_label_metrics(
    np.append(_PREDICTED, [1, 1]),
    np.append(_TRUE, [1, -1]),
    np.append(_KEPT, [True, True]),
    weights=np.float32([1, 1, 1, 1, 1, 0, 0]),
  )
  plain = diagnostics.pseudo_label_metrics(_PREDICTED, _TRUE, _KEPT)
  assert _means(padded) == _means(plain)


def test_unknown_hidden_labels_count_for_the_ratio_alone():
  ratios = diagnostics.pseudo_label_metrics(
    np.array([0, 1], np.int32),
    np.array([-1, 1], np.int32),
    np.array([True, True]),
  )
  assert [float(v) for v in ratios['pseudo_label_ratio']] == [2.0, 2.0]
  assert [float(v) for v in ratios['pseudo_label_accuracy']] == [1.0, 1.0]


def test_kept_and_confident_have_columns_of_their_own():
  confident = np.array([True, False, False, False, False])
  metrics = diagnostics.kept_and_confident(_PREDICTED, _TRUE, _KEPT, confident)
  assert tuple(metrics) == diagnostics.names(
    diagnostics.PSEUDO_LABEL, diagnostics.HIGH_CONFIDENCE
  )
  means = _means(metrics | {'high_confidence_correct_to_wrong': (0.0, 1.0)})
  assert means['pseudo_label_ratio'] == pytest.approx(0.6)
  assert means['high_confidence_ratio'] == pytest.approx(0.2)
  assert means['high_confidence_accuracy'] == 1.0
