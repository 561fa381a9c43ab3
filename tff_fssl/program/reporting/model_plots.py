"""Diagrams of what a model predicts. TensorFlow-free."""

from typing import Any

import numpy as np

from tff_fssl import files
from tff_fssl.program.reporting import predictions

_MAX_TICKS = 20
_BLUE, _ORANGE = 'tab:blue', 'tab:orange'
_MAX_NAME = 12
# Inches: on a phone, text is then about as large as it says, in points.
_WIDTH = 3.7


def _figure(width: float, height: float) -> tuple[Any, Any]:
  """(a figure, its axes), without pyplot's windows."""
  from matplotlib import figure  # pylint: disable=import-outside-toplevel

  canvas = figure.Figure(figsize=(width, height), layout='constrained')
  return canvas, canvas.subplots()


def draw_confusion(counts: np.ndarray, class_names: tuple[str, ...]) -> Any:
  """A heat map of a confusion matrix, int [C, C]; rows are true classes."""
  canvas, axes = _figure(_WIDTH, 3.3)
  num_classes = len(counts)
  shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
  image = axes.imshow(
    shares, vmin=0, vmax=1, cmap='viridis', interpolation='nearest'
  )
  step = -(-num_classes // _MAX_TICKS)
  shown = np.arange(0, num_classes, step)
  names = [_short(class_names[i]) for i in shown]
  turned = 90 if max(map(len, names)) > 3 else 0
  axes.set_xticks(shown, names, fontsize=8, rotation=turned)
  axes.set_yticks(shown, names, fontsize=8)
  axes.set(xlabel='predicted class', ylabel='true class')
  if num_classes <= _MAX_TICKS:
    for (row, column), count in np.ndenumerate(counts):
      if count:
        axes.text(
          column,
          row,
          count,
          ha='center',
          va='center',
          size=7,
          color='black' if shares[row, column] > 0.5 else 'white',
        )
  canvas.colorbar(image, ax=axes, label='share of the true class')
  return canvas


def _short(name: str) -> str:
  name = files.printable(name)
  return name if len(name) <= _MAX_NAME else f'{name[: _MAX_NAME - 1]}…'


def draw_reliability(bins: predictions.Bins) -> Any:
  """A reliability diagram: accuracy by confidence, and how many there are."""
  canvas, axes = _figure(_WIDTH, 3.0)
  edges = np.arange(predictions.NUM_BINS) / predictions.NUM_BINS
  width = 1 / predictions.NUM_BINS
  axes.bar(
    edges,
    np.nan_to_num(bins.accuracy),
    width,
    align='edge',
    color=_BLUE,
    alpha=0.75,
    lw=0,
    label='accuracy in a bin',
  )
  axes.step(
    [*edges, 1.0],
    [*bins.share, bins.share[-1]],
    where='post',
    color=_ORANGE,
    label='share of predictions',
  )
  axes.plot([0, 1], [0, 1], ':', color='0.5', label='calibrated')
  axes.set(xlim=(0, 1), ylim=(0, 1), xlabel='confidence')
  canvas.legend(loc='outside lower center', ncols=2, frameon=False, fontsize=8)
  return canvas


def draw_clients(accuracies: np.ndarray) -> Any:
  """A histogram of accuracies of clients, float [clients] in [0, 1]."""
  canvas, axes = _figure(_WIDTH, 2.4)
  low, high = accuracies.min(), accuracies.max()
  spread = (
    (0, 1) if high - low > 0.2 else (max(0, low - 0.1), min(1, high + 0.1))
  )
  axes.hist(accuracies, 20, range=spread, color=_BLUE, alpha=0.75)
  worst = predictions.worst_decile(accuracies)
  axes.axvline(
    accuracies.mean(),
    color=_BLUE,
    ls='--',
    label=f'mean {accuracies.mean():.3f}',
  )
  axes.axvline(worst, color=_ORANGE, label=f'worst tenth {worst:.3f}')
  axes.set(xlabel='accuracy', ylabel='clients')
  axes.yaxis.get_major_locator().set_params(integer=True)
  axes.legend(frameon=False, fontsize=8)
  return canvas
