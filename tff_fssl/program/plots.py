"""Curves of runs from their tables. TensorFlow-free."""

from collections.abc import Sequence
import dataclasses

from tff_fssl.hparams import UsageError
from tff_fssl.program import runs

_TRAIN = 'client_work/train'


@dataclasses.dataclass(frozen=True)
class Curve:
  """A line of a panel.

  Attributes:
    label: Its name, if the panel has several.
    column: Of train.csv or eval.csv.
  """

  label: str
  column: str


@dataclasses.dataclass(frozen=True)
class Panel:
  """A diagram.

  Attributes:
    title: Its heading.
    curves: Its lines, told apart by their dashes.
    is_fraction: Whether values are from 0 to 1.
  """

  title: str
  curves: tuple[Curve, ...]
  is_fraction: bool = True


PANELS = (
  Panel('Test accuracy', (Curve('', 'test/accuracy'),)),
  Panel('Validation accuracy', (Curve('', 'validation/accuracy'),)),
  Panel(
    'Pseudo-labels kept',
    (
      Curve('kept', f'{_TRAIN}/pseudo_label_ratio'),
      Curve('confident', f'{_TRAIN}/high_confidence_ratio'),
    ),
  ),
  Panel(
    'Accuracy of pseudo-labels',
    (
      Curve('kept', f'{_TRAIN}/pseudo_label_accuracy'),
      Curve('confident', f'{_TRAIN}/high_confidence_accuracy'),
    ),
  ),
  Panel(
    "Thresholds over a round's clients",
    (
      Curve('mean', f'{_TRAIN}/threshold_mean'),
      Curve('min', f'{_TRAIN}/threshold_min'),
      Curve('max', f'{_TRAIN}/threshold_max'),
    ),
  ),
  Panel(
    'Aggregation weights',
    (
      Curve('max', f'{_TRAIN}/aggregation_weight_max'),
      Curve('min', f'{_TRAIN}/aggregation_weight_min'),
    ),
    is_fraction=False,
  ),
  Panel(
    'Loss at clients',
    (
      Curve('unlabelled', f'{_TRAIN}/loss_unlabeled'),
      Curve('labelled', f'{_TRAIN}/loss_labeled'),
      Curve('consistency', f'{_TRAIN}/loss_consistency'),
    ),
    is_fraction=False,
  ),
  Panel(
    'Loss at the server',
    (Curve('', 'finalizer/server_loss_labeled'),),
    is_fraction=False,
  ),
)
_DASHES = ('-', '--', ':')


def plot(groups: Sequence[runs.RunGroup], path: str) -> list[str]:
  """Draws what the runs know, a panel a quantity, a colour a group.

  Lines are means over seeds, bands the sample standard deviation.

  Args:
    groups: What is drawn.
    path: The PNG file.

  Returns:
    The titles of the panels that were drawn.

  Raises:
    UsageError: If there is nothing to draw.
  """
  # Not pyplot: it would choose a window system for the whole process.
  # pylint: disable=import-outside-toplevel
  from matplotlib import figure
  from matplotlib import lines
  from matplotlib.backends import backend_agg

  panels = []
  for panel in PANELS:
    known = tuple(
      curve
      for curve in panel.curves
      if any(group.curve(curve.column) is not None for group in groups)
    )
    if known:
      panels.append(dataclasses.replace(panel, curves=known))
  if not panels:
    raise UsageError('the runs have nothing to draw yet')
  num_columns = min(2, len(panels))
  num_rows = -(-len(panels) // num_columns)
  canvas = figure.Figure(
    figsize=(5.5 * num_columns, 2.9 * num_rows + 0.5), layout='constrained'
  )
  backend_agg.FigureCanvasAgg(canvas)
  axes = canvas.subplots(num_rows, num_columns, squeeze=False).flat
  for axis, panel in zip(axes, panels):
    _draw_panel(axis, panel, groups)
  for axis in list(axes)[len(panels) :]:
    axis.set_visible(False)
  handles = [
    lines.Line2D([], [], color=f'C{index}', label=group.label)
    for index, group in enumerate(groups)
  ]
  canvas.legend(
    handles=handles, loc='outside lower center', ncols=1, frameon=False
  )
  canvas.savefig(path, dpi=110, format='png')
  return [panel.title for panel in panels]


def _draw_panel(axis, panel: Panel, groups: Sequence[runs.RunGroup]) -> None:
  """Draws one diagram."""
  from matplotlib import lines  # pylint: disable=import-outside-toplevel
  from matplotlib import ticker  # pylint: disable=import-outside-toplevel

  for index, group in enumerate(groups):
    for curve, dashes in zip(panel.curves, _DASHES):
      values = group.curve(curve.column)
      if values is None:
        continue
      rounds, mean, spread = values
      color = f'C{index}'
      marker = '.' if len(rounds) < 40 else None
      axis.plot(rounds, mean, dashes, color=color, lw=1.4, marker=marker, ms=4)
      if spread.any():
        axis.fill_between(
          rounds, mean - spread, mean + spread, color=color, alpha=0.18, lw=0
        )
  axis.set_title(panel.title, fontsize=10)
  axis.set_xlabel('round', fontsize=9)
  axis.grid(alpha=0.3)
  axis.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
  if panel.is_fraction:
    axis.yaxis.set_major_formatter(ticker.PercentFormatter(1.0, decimals=0))
    low, high = axis.get_ylim()
    axis.set_ylim(max(low, -0.02), min(high, 1.02))
  if len(panel.curves) > 1:
    axis.legend(
      handles=[
        lines.Line2D([], [], color='0.3', ls=dashes, label=curve.label)
        for curve, dashes in zip(panel.curves, _DASHES)
      ],
      fontsize=8,
      frameon=False,
    )
