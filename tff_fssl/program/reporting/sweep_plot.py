"""Draws the trials of a sweep as lines through parallel axes. TensorFlow-free.

There is an axis for each flag that varies, and one for validation accuracy.
"""

from collections.abc import Callable, Sequence
import dataclasses
import math
from typing import Any

import numpy as np

from tff_fssl import hparams
from tff_fssl.program import console
from tff_fssl.program.configuration import sweeps
from tff_fssl.program.reporting import figures
from tff_fssl.program.reporting import sweep_results
from tff_fssl.program.storage import trials

_NUM_TICKS = 5
# The least range of accuracies, so that equal ones are not at both ends.
_LEAST_RANGE = 0.01
# How far lines through the same listed value are apart, in all.
_SPREAD = 0.05


@dataclasses.dataclass(frozen=True)
class _Axis:
  """An axis: its title, (height in [0, 1], label) of its ticks, and heights.

  Attributes:
    title: Its title.
    ticks: Its ticks.
    height: The height of a value.
    is_list: Whether only its ticks are possible.
  """

  title: str
  ticks: Sequence[tuple[float, str]]
  height: Callable[[Any], float]
  is_list: bool = False


def _of_space(space: sweeps.Space) -> _Axis:
  """The axis of a flag."""
  if not space.choices:
    return _of_range(
      space.name, space.low, space.high, space.log, '{:.3g}'.format
    )
  values = list(space.choices)
  if all(isinstance(v, (int, float)) for v in values):
    values.sort()
  last = max(len(values) - 1, 1)
  ticks = [(i / last, hparams.to_text(v)) for i, v in enumerate(values)]
  return _Axis(space.name, ticks, lambda v: values.index(v) / last, True)


def _of_range(
  title: str, low: float, high: float, log: bool, label: Callable[[float], str]
) -> _Axis:
  """An axis of numbers."""

  def scale(value: float) -> float:
    return math.log(value) if log else value

  start, length = scale(low), scale(high) - scale(low)
  numbers = start + np.linspace(0, 1, _NUM_TICKS) * length
  ticks = (np.exp(numbers) if log else numbers).tolist()
  if isinstance(low, int):
    ticks = sorted({round(tick) for tick in ticks})
  return _Axis(
    title,
    [((scale(tick) - start) / length, label(tick)) for tick in ticks],
    lambda value: (scale(value) - start) / length,
  )


def draw(
  path: str, records: Sequence[trials.Record], sweep: sweeps.Sweep
) -> None:
  """Draws each trial that has an accuracy.

  Args:
    path: The PNG file.
    records: The trials, at least one of them complete.
    sweep: The sweep.

  Raises:
    UsageError: If the file cannot be written.
  """
  import matplotlib  # pylint: disable=import-outside-toplevel

  known = [r for r in sweep_results.ranked(records) if r.scores]
  means = [r.mean for r in known]
  complete = [r.mean for r in known if r.state == trials.COMPLETE]
  low, high = min(means), max(means)
  high = max(high, low + _LEAST_RANGE)
  axes = [
    *map(_of_space, sweep.spaces),
    _of_range('validation accuracy', low, high, False, console.format_percent),
  ]
  canvas, plot = figures.new_figure(max(5.5, 1.6 * len(axes) + 1), 4.2)
  plot.set_axis_off()
  for place, axis in enumerate(axes):
    _draw_axis(plot, place, axis, is_last=axis is axes[-1])
  worst, best = min(complete), max(complete)
  for rank, record in enumerate(known):
    values = [
      *(record.values[space.name] for space in sweep.spaces),
      record.mean,
    ]
    shift = _SPREAD * (rank / max(len(known) - 1, 1) - 0.5)
    heights = [a.height(v) + shift * a.is_list for a, v in zip(axes, values)]
    is_complete, is_best = record.state == trials.COMPLETE, rank == 0
    share = (record.mean - worst) / ((best - worst) or 1)
    plot.plot(
      heights,
      # From dark to light, without the pale end.
      color=matplotlib.colormaps['viridis'](0.85 - 0.85 * share)
      if is_complete
      else '0.6',
      ls='-' if is_complete else ':',
      lw=3 if is_best else 1.2,
      zorder=3 if is_best else 2,
    )
  pruned = len(known) - len(complete)
  plot.set_title(
    f'{len(complete)} trial{"s" * (len(complete) > 1)}; thick: the best, trial'
    f' {known[0].number}'
    + (f'; dotted: {pruned} not complete' if pruned else ''),
    fontsize=9,
    pad=34,
  )
  figures.save_png(canvas, path)


def _draw_axis(plot: Any, place: int, axis: _Axis, is_last: bool) -> None:
  """Draws a vertical axis, its ticks, and above it its title."""
  plot.plot([place, place], [0, 1], color='0.2', lw=0.9, zorder=1)
  end = place + (0.02 if is_last else -0.02)
  for height, label in axis.ticks:
    plot.plot([place, end], [height] * 2, color='0.2', lw=0.9, zorder=1)
    plot.annotate(
      label,
      (place, height),
      (6 if is_last else -6, 0),
      textcoords='offset points',
      ha='left' if is_last else 'right',
      va='center',
      fontsize=8,
      bbox={'facecolor': 'white', 'alpha': 0.75, 'lw': 0, 'pad': 0.5},
      zorder=4,
    )
  plot.annotate(
    '\n'.join(sweep_results.broken(axis.title, 14)),
    (place, 1),
    (0, 9),
    textcoords='offset points',
    ha='center',
    va='bottom',
    fontsize=9,
  )
