"""Figures of predictions, against scikit-learn's."""

import numpy as np
import pytest
from sklearn import metrics

from tff_fssl.program import predictions


@pytest.fixture(scope='module')
def drawn():
  generator = np.random.default_rng(0)
  labels = generator.integers(0, 4, 500)
  logits = generator.normal(size=[500, 4]) + 1.5 * np.eye(4)[labels]
  probs = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
  return predictions.Predictions(labels, probs)


def test_confusion_and_figures_of_classes(drawn):
  counts = predictions.confusion(drawn)
  expected = metrics.confusion_matrix(drawn.labels, drawn.classes)
  np.testing.assert_array_equal(counts, expected)
  precision, recall, f1, _ = metrics.precision_recall_fscore_support(
    drawn.labels, drawn.classes
  )
  figures = predictions.class_figures(drawn)
  np.testing.assert_allclose(figures.precision, precision)
  np.testing.assert_allclose(figures.recall, recall)
  np.testing.assert_allclose(figures.f1, f1)
  assert drawn.accuracy == np.mean(drawn.labels == drawn.classes)


def test_classes_that_are_not_there():
  labels = np.array([0, 0, 0, 1])
  probs = np.eye(3)[[0, 0, 0, 0]]
  figures = predictions.class_figures(predictions.Predictions(labels, probs))
  np.testing.assert_array_equal(figures.recall, [1, 0, np.nan])
  np.testing.assert_array_equal(figures.precision, [0.75, np.nan, np.nan])
  np.testing.assert_array_equal(figures.f1[1:], [0, np.nan])


def test_the_calibration_error():
  probs = np.array([[0.95, 0.05]] * 4 + [[0.65, 0.35]] * 2)
  labels = np.array([0, 0, 0, 1, 1, 1])
  bins = predictions.bins(predictions.Predictions(labels, probs))
  np.testing.assert_allclose(bins.accuracy[[9, 6]], [0.75, 0])
  np.testing.assert_allclose(bins.share[[9, 6]], [4 / 6, 2 / 6])
  expected = 4 / 6 * 0.2 + 2 / 6 * 0.65
  np.testing.assert_allclose(bins.calibration_error, expected)
  # Bins include their upper ends.
  certain = predictions.Predictions(labels[:1], np.array([[1.0, 0.0]]))
  assert predictions.bins(certain).share[9] == 1


def test_the_worst_decile():
  accuracies = np.linspace(1, 0, 11)
  np.testing.assert_allclose(predictions.worst_decile(accuracies), 0.05)


def test_collapse_is_by_how_even_classes_are(drawn):
  assert not predictions.collapse(drawn, 'labels', 'abcd')
  one_class = np.full([500, 4], 0.1)
  one_class[:, 2] = 0.7
  one_class[:20, 0] = 0.9
  found = predictions.collapse(
    predictions.Predictions(drawn.labels, one_class), 'pseudo-labels', 'abcd'
  )
  assert found.startswith('pseudo-labels have collapsed to few classes')
  assert "96% are 'c'" in found
  uneven = predictions.Predictions(np.full([500], 2), one_class)
  assert not predictions.collapse(uneven, 'labels', 'abcd')


def _sure(labels, classes, num_classes=10):
  return predictions.Predictions(labels, np.eye(num_classes)[classes])


def test_labels_of_another_meaning():
  labels = np.arange(360) % 10
  classes = (labels + 1) % 10
  classes[:3] = labels[:3]
  names = tuple('abcdefghij')
  text = predictions.misfit(_sure(labels, classes), 'predictions', names)
  assert text.startswith('predictions are right in 0.8%, far less than by')
  assert "renamed ('b' as 'a', 'c' as 'b'," in text
  assert text.endswith('it would be 99.2%')


@pytest.mark.parametrize(
  'classes',
  [
    np.arange(360) % 10,
    np.zeros(360, int),  # Collapsed.
    np.random.default_rng(0).integers(0, 10, 360),
  ],
)
def test_bad_predictions_may_still_mean_the_same(classes):
  labels = np.arange(360) % 10
  assert not predictions.misfit(_sure(labels, classes), 'x', range(10))


def test_few_wrong_predictions_tell_nothing():
  labels = np.arange(20) % 10
  assert not predictions.misfit(_sure(labels, (labels + 1) % 10), 'x', [*'a'])
