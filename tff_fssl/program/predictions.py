"""Figures of a model's predictions: errors, calibration, clients."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tff_fssl.data import inspection

# Confidences are compared with accuracies in so many bins.
NUM_BINS = 10


class Predictions(NamedTuple):
  """Predictions for examples.

  Attributes:
    labels: int [N], the true classes, in [0, C).
    probs: float [N, C], each row a distribution.
  """

  labels: np.ndarray
  probs: np.ndarray

  @property
  def classes(self) -> np.ndarray:
    """Returns the most probable class of each example, int [N]."""
    return self.probs.argmax(1)

  @property
  def accuracy(self) -> float:
    """Returns the share of examples that are classified correctly."""
    return float(np.mean(self.classes == self.labels))


class ShownExample(NamedTuple):
  """A pseudo-labelled example.

  Attributes:
    label: Its true class.
    predicted: Its pseudo-label.
    confidence: The probability of that.
    weak: A weak view, uint8 [H, W, 1 or 3].
    strong: A strong one.
  """

  label: str
  predicted: str
  confidence: float
  weak: np.ndarray
  strong: np.ndarray


class ModelFigures(NamedTuple):
  """The figures of a model.

  Attributes:
    name: The model's name.
    class_names: A name for each class.
    test: Its predictions for the test examples, or None if there is no one
      model.
    pseudo: Its predictions for weak views of clients' unlabelled examples of a
      class known to the simulation, or None if they must stay hidden.
    clients: float [clients], accuracies at clients, or empty if not known.
    about_clients: The basis of these accuracies, or the reason why they are
      missing.
    right: Pseudo-labelled examples that are right, the most confident first.
    wrong: Those that are wrong.
    doubts: Signs of trouble, a sentence each.
  """

  name: str
  class_names: Sequence[str]
  test: Predictions | None = None
  pseudo: Predictions | None = None
  clients: np.ndarray = np.zeros([0])
  about_clients: str = ''
  right: Sequence[ShownExample] = ()
  wrong: Sequence[ShownExample] = ()
  doubts: Sequence[str] = ()


class ClassFigures(NamedTuple):
  """Figures of classes, each float [C], or NaN where they are not defined."""

  precision: np.ndarray
  recall: np.ndarray
  f1: np.ndarray


class Bins(NamedTuple):
  """Predictions by their confidence, each float [`NUM_BINS`].

  Attributes:
    share: The share of predictions in a bin.
    confidence: Their mean confidence. NaN in an empty bin.
    accuracy: The share of correct predictions. NaN in an empty bin.
  """

  share: np.ndarray
  confidence: np.ndarray
  accuracy: np.ndarray

  @property
  def calibration_error(self) -> float:
    """Computes the expected calibration error, in [0, 1]."""
    gaps = np.abs(self.confidence - self.accuracy)
    return float(np.nansum(self.share * gaps))


def confusion(predictions: Predictions) -> np.ndarray:
  """Counts examples of each true class (row) by predicted class, int [C, C]."""
  # Slow to import. pylint: disable-next=import-outside-toplevel
  from sklearn import metrics

  classes = np.arange(predictions.probs.shape[1])
  return metrics.confusion_matrix(
    predictions.labels, predictions.classes, labels=classes
  )


def class_figures(predictions: Predictions) -> ClassFigures:
  """Computes precision, recall and F1 of each class.

  The F1 of a class that occurs but is never predicted is 0. That of a class
  that is neither is NaN.
  """
  # Slow to import. pylint: disable-next=import-outside-toplevel
  from sklearn import metrics

  *figures, _ = metrics.precision_recall_fscore_support(
    predictions.labels,
    predictions.classes,
    labels=np.arange(predictions.probs.shape[1]),
    zero_division=np.nan,
  )
  return ClassFigures(*figures)


def bins(predictions: Predictions) -> Bins:
  """Counts predictions in bins (0, 0.1], ... of their confidence."""
  confidence = predictions.probs.max(1)
  is_right = predictions.classes == predictions.labels
  place = np.ceil(confidence * NUM_BINS).astype(int) - 1
  # Rounding may push a confidence of 1 past the last bin.
  place = place.clip(0, NUM_BINS - 1)
  sums = [
    np.bincount(place, weights, NUM_BINS)
    for weights in (np.ones(len(place)), confidence, is_right)
  ]
  with np.errstate(invalid='ignore'):
    return Bins(sums[0] / len(place), sums[1] / sums[0], sums[2] / sums[0])


def worst_decile(accuracies: np.ndarray) -> float:
  """Computes the mean of the least tenth, rounded up to whole clients."""
  return float(np.sort(accuracies)[: (len(accuracies) + 9) // 10].mean())


def num_effective_classes(classes: np.ndarray, num_classes: int) -> float:
  """Computes exp(entropy) of classes: C if all are as frequent, 1 if one is.

  Args:
    classes: int [N], N >= 1.
    num_classes: C.

  Returns:
    That number.
  """
  # Slow to import. pylint: disable-next=import-outside-toplevel
  from scipy import stats

  counts = np.bincount(classes, minlength=num_classes)
  return float(np.exp(stats.entropy(counts)))


def misfit(
  predictions: Predictions, what: str, class_names: Sequence[str]
) -> str:
  """Says if labels cannot be what the model learned, or '' if they can.

  That is if it is right far less often than any constant class would be.
  """
  # Slow to import. pylint: disable-next=import-outside-toplevel
  from scipy import optimize

  num_classes = predictions.probs.shape[1]
  counts = confusion(predictions)
  if not is_below_chance(
    predictions.accuracy, len(predictions.labels), counts.sum(1)
  ):
    return ''
  # The renaming of predicted classes that makes most of them right.
  true, predicted = optimize.linear_sum_assignment(counts, maximize=True)
  renamed = counts[true, predicted].sum() / counts.sum()
  text = (
    f'{what} are right in {100 * predictions.accuracy:.1f}%, far less than by'
    f' chance ({100 / num_classes:.1f}%): labels of training and these examples'
    ' do not mean the same'
  )
  if renamed > 0.5:
    moved = [
      f'{class_names[b]!r} as {class_names[a]!r}'
      for a, b in zip(true, predicted)
      if a != b
    ]
    text += (
      f'; with classes renamed ({inspection.shown(moved)}) it would be'
      f' {100 * renamed:.1f}%'
    )
  return text


def is_below_chance(share: float, number: int, counts: np.ndarray) -> bool:
  """Tells whether guesses are significantly worse than any constant one.

  Args:
    share: The share of correct guesses, in [0, 1].
    number: The number of guesses.
    counts: int [C], the examples of each class.

  Returns:
    Whether it is less than half of what the rarest class, or an even draw,
    would give, and a binomial test tells that from luck (p < 0.001).
  """
  # Slow to import. pylint: disable-next=import-outside-toplevel
  from scipy import stats

  if not number or not counts.any():
    return False
  least = min(1 / len(counts), counts[counts > 0].min() / counts.sum())
  correct = round(share * number)
  return bool(
    share < least / 2
    and stats.binomtest(correct, number, least, alternative='less').pvalue
    < 0.001
  )


def collapse(
  predictions: Predictions, what: str, class_names: Sequence[str]
) -> str:
  """Says if the predicted classes look wrong, or '' if they do not."""
  num_classes = predictions.probs.shape[1]
  there = num_effective_classes(predictions.labels, num_classes)
  found = num_effective_classes(predictions.classes, num_classes)
  if found > there / 2:
    return ''
  counts = np.bincount(predictions.classes, minlength=num_classes)
  share = int(np.max(counts)) / int(counts.sum())
  return (
    f'{what} have collapsed to few classes: they are as uneven as {found:.1f}'
    f' classes of equal size, the true classes as {there:.1f};'
    f' {100 * share:.0f}% are {class_names[int(np.argmax(counts))]!r}'
  )
