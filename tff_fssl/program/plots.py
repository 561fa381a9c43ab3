"""Draws curves of runs (`programs/plot.py`), and figures of models."""

import base64
from collections.abc import Callable, Mapping, Sequence
import dataclasses
import io
import os
import textwrap
from typing import Any

import numpy as np

from tff_fssl import durable
from tff_fssl import files
from tff_fssl import hparams
from tff_fssl import metrics
from tff_fssl.hparams import UsageError
from tff_fssl.hparams import hparam
from tff_fssl.program import catalogue
from tff_fssl.program import console
from tff_fssl.program import flags
from tff_fssl.program import main as main_lib
from tff_fssl.program import output_tree
from tff_fssl.program import predictions
from tff_fssl.program import runs as runs_lib

_USAGE = (
  'programs/plot.py RUN [RUN ...] [--x=rounds|bytes|hours] [--diagrams=WORDS]'
  ' [--output=FILE]'
)
_ABOUT = (
  'Draws the recorded accuracy, pseudo-labels, thresholds, weights and losses'
  ' over rounds. RUN is the --output_dir of programs/train.py. Runs that differ'
  ' only in their seeds become one curve: their mean, with a band of one'
  ' standard deviation. A path that is not a run, or a run without a finished'
  ' round, is skipped with a warning.'
)
# Endings of pictures.
FORMATS = ('.png', '.pdf', '.svg')
# What the horizontal axis can be: name -> (label, unit).
X_AXES = {
  'rounds': ('round', 1.0),
  'bytes': ('communicated, GB', 1e9),
  'hours': ('hours of training', 3600.0),
}

_MARKERS = ('o', 's', '^', 'D', 'v', 'P', 'X', '<', '>', '*')
_MAX_MARKERS = 12
# Classes with a tick.
_MAX_CLASSES = 10
# The most names of classes on an axis, and their length.
_MAX_TICKS, _MAX_NAME = 20, 12
_BLUE, _ORANGE = 'tab:blue', 'tab:orange'
# Inches: on a phone, text is then about as large as it says, in points.
_WIDTH = 3.7
# The top of a legend below a diagram, as a part of the diagram's height.
_LEGEND = -0.28
# The most letters in a line of a legend below a column of diagrams.
_LETTERS = 62


@dataclasses.dataclass(frozen=True)
class Style:
  """The style of a group's curve.

  Attributes:
    color: Colour of its lines.
    marker: Marker of its points.
  """

  color: str
  marker: str


def styles(groups: Sequence[runs_lib.RunGroup]) -> list[Style]:
  """Chooses the styles of groups, in their order: strong colours first."""
  import matplotlib  # pylint: disable=import-outside-toplevel

  # Each strong colour of this map is followed by its pale one.
  every = matplotlib.colormaps['tab20'](range(20))
  colors = [*every[::2], *every[1::2]]
  return [
    Style(
      matplotlib.colors.to_hex(colors[i % len(colors)]),
      _MARKERS[i % len(_MARKERS)],
    )
    for i in range(len(groups))
  ]


def plot(
  groups: Sequence[runs_lib.RunGroup],
  path: str,
  x_axis: str = 'rounds',
  words: Sequence[str] = (),
) -> list[str]:
  """Draws the curves of runs: a panel per quantity, a style per group.

  Lines are means over seeds. Bands are the sample standard deviation.

  Args:
    groups: The groups that are drawn.
    path: The file, as for `save`.
    x_axis: One of `X_AXES`: rounds, bytes that all clients have sent and
      received so far, or hours that the rounds so far have taken.
    words: Parts of titles, in any case. Only panels with one of them are drawn.
      (): all panels.

  Returns:
    The titles of the panels that were drawn.

  Raises:
    UsageError: If there is nothing to draw.
  """
  # Slow to import. pylint: disable=import-outside-toplevel
  from matplotlib import lines
  from matplotlib import patches

  panels = known_panels(groups, x_axis)
  if not panels:
    what = '' if x_axis == 'rounds' else f' over {x_axis}'
    raise UsageError(f'the runs have nothing to draw{what} yet')
  titles = [panel.title for panel in panels]
  for word in words:
    if not any(word.lower() in title.lower() for title in titles):
      raise UsageError(
        f'--diagrams: no diagram has {word!r} in its title; there are:'
        f' {"; ".join(titles)}'
      )
  if words:
    panels = [
      panel
      for panel in panels
      if any(word.lower() in panel.title.lower() for word in words)
    ]
  num_columns = min(2, len(panels))
  num_rows = -(-len(panels) // num_columns)
  labels = [
    textwrap.fill(group.label, _LETTERS * num_columns) for group in groups
  ]
  lines_below = sum(label.count('\n') + 1 for label in labels)
  height = 2.9 * num_rows + 0.2 * lines_below
  canvas, grid = new_figure(5.5 * num_columns, height, num_rows, num_columns)
  axes = list(grid.flat)
  group_styles = styles(groups)
  has_band = False
  for axis, panel in zip(axes, panels):
    has_band |= _draw_panel(axis, panel, groups, group_styles, x_axis)
  for axis in axes[len(panels) :]:
    axis.set_visible(False)
  handles: list[object] = [
    lines.Line2D(
      [], [], color=style.color, marker=style.marker, ms=4, label=label
    )
    for style, label in zip(group_styles, labels)
  ]
  if has_band:
    handles.append(
      patches.Patch(
        color='0.5',
        alpha=0.3,
        lw=0,
        label='line and band: mean ± 1 standard deviation over seeds',
      )
    )
  canvas.legend(
    handles=handles, loc='outside lower center', ncols=1, frameon=False
  )
  save(canvas, path)
  return [panel.title for panel in panels]


def known_panels(
  groups: Sequence[runs_lib.RunGroup], x_axis: str = 'rounds'
) -> list[metrics.Panel]:
  """Returns the diagrams, with those of their lines that a group has."""
  panels = []
  for panel in metrics.panels(catalogue.all_metrics()):
    known = tuple(
      line
      for line in panel.lines
      if any(_values(group, line, x_axis) is not None for group in groups)
    )
    if known:
      panels.append(dataclasses.replace(panel, lines=known))
  return panels


def draw_alone(
  panel: metrics.Panel, groups: Sequence[runs_lib.RunGroup], max_points: int
) -> Any:
  """Draws one diagram over rounds, without a title (the page has it).

  Args:
    panel: The diagram.
    groups: The groups that are drawn, as `plot` does.
    max_points: Of longer lines, so many evenly spaced points are drawn.

  Returns:
    The matplotlib figure.
  """
  canvas, axis = _small_figure()
  _draw_panel(axis, panel, groups, styles(groups), 'rounds', max_points)
  axis.set_title('')
  if axis.get_legend() is not None:
    canvas.subplots_adjust(bottom=0.32)
  return canvas


def _small_figure() -> tuple[Any, Any]:
  """Makes one of a page's many figures: (figure, its axes)."""
  canvas, axis = new_figure(_WIDTH, 2.2, adapts=False)
  canvas.subplots_adjust(left=0.16, right=0.97, bottom=0.19, top=0.93)
  axis.tick_params(labelsize=8)
  return canvas, axis


def draw_classes(group: runs_lib.RunGroup, columns: Mapping[str, str]) -> Any:
  """Draws a heat map of shares over rounds, a row for each class.

  Args:
    group: The group, drawn as means over its runs.
    columns: Name of a class -> column with values, at least one.

  Returns:
    The matplotlib figure.
  """
  from matplotlib import ticker  # pylint: disable=import-outside-toplevel

  curves = [group.curve(column) for column in columns.values()]
  known = [(rounds, mean) for rounds, mean, _ in filter(None, curves)]
  rounds = np.unique(np.concatenate([at for at, _ in known]))
  # Rounds in which a class has no value stay blank.
  values = np.full((len(known), len(rounds)), np.nan)
  for row, (at, mean) in zip(values, known):
    row[np.isin(rounds, at)] = mean
  canvas, axis = _small_figure()
  # As pixels: cells would be an element each.
  image = axis.pcolormesh(
    rounds, np.arange(len(values)), values, cmap='viridis', rasterized=True
  )
  step = -(-len(columns) // _MAX_CLASSES)
  ticks = list(map(_short, columns))[::step]
  axis.set_yticks(np.arange(len(columns))[::step], ticks)
  # A part of the width for each character of the longest name.
  canvas.subplots_adjust(left=0.13 + 0.018 * max(map(len, ticks)))
  axis.set_xlabel(X_AXES['rounds'][0], fontsize=9)
  axis.set_ylabel('class', fontsize=9)
  axis.xaxis.set_major_locator(ticker.MaxNLocator(6, integer=True))
  bar = canvas.colorbar(image, ax=axis, format=ticker.FuncFormatter(_percent))
  bar.ax.tick_params(labelsize=8)
  return canvas


def _values(
  group: runs_lib.RunGroup, line: metrics.Line, x_axis: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
  """Returns (x, mean, spread) of a line, or None if it is not known."""
  values = group.curve(line.column)
  if values is None or x_axis == 'rounds':
    return values
  positions = group.positions(x_axis)
  if positions is None:
    return None
  rounds, mean, spread = values
  common = np.isin(rounds, positions[0])
  if not common.any():
    return None
  at = np.isin(positions[0], rounds)
  return (
    positions[1][at] / X_AXES[x_axis][1],
    mean[common],
    spread[common],
  )


def _draw_panel(
  axis,
  panel: metrics.Panel,
  groups: Sequence[runs_lib.RunGroup],
  group_styles: Sequence[Style],
  x_axis: str,
  max_points: int = 10**9,
) -> bool:
  """Draws one diagram, and returns whether it has a band."""
  from matplotlib import lines  # pylint: disable=import-outside-toplevel
  from matplotlib import ticker  # pylint: disable=import-outside-toplevel

  has_band = False
  for style, group in zip(group_styles, groups):
    for line in panel.lines:
      values = _values(group, line, x_axis)
      if values is None:
        continue
      step = -(-len(values[0]) // max_points)
      # The last point is always there.
      x, mean, spread = (v[::-1][::step][::-1] for v in values)
      axis.plot(
        x,
        mean,
        line.dashes,
        color=style.color,
        lw=1.4,
        marker=style.marker,
        ms=3,
        markevery=-(-len(x) // _MAX_MARKERS),
      )
      if spread.any():
        has_band = True
        axis.fill_between(
          x, mean - spread, mean + spread, color=style.color, alpha=0.18, lw=0
        )
  # The arrow says where better values are.
  title = f'{panel.title} {metrics.ARROWS[panel.better]}'.rstrip()
  axis.set_title(title, fontsize=10)
  axis.set_xlabel(X_AXES[x_axis][0], fontsize=9)
  axis.grid(alpha=0.3)
  is_whole = x_axis == 'rounds'
  # There is no round 2.5.
  axis.xaxis.set_major_locator(ticker.MaxNLocator(6, integer=is_whole))
  if panel.is_share:
    low, high = axis.get_ylim()
    # A band may reach beyond what a share can be.
    low, high = max(low, -0.02), min(high, 1.02)
    axis.set_ylim(low, high)
    # Use as many decimals as the steps between the ticks have.
    axis.yaxis.set_major_formatter(ticker.FuncFormatter(_percent))
  else:
    # Offsets such as +1.2e3 above an axis are easily overlooked.
    axis.ticklabel_format(axis='y', useOffset=False)
  if len(panel.lines) > 1:
    labels: dict[str, list[str]] = {}
    for line in panel.lines:
      labels.setdefault(line.dashes, []).append(line.label)
    axis.legend(
      handles=[
        lines.Line2D([], [], color='0.3', ls=dashes, label=', '.join(names))
        for dashes, names in labels.items()
      ],
      # Below the axis, where no data are.
      loc='upper center',
      bbox_to_anchor=(0.5, _LEGEND),
      ncols=len(labels),
      handlelength=1.5,
      columnspacing=1.0,
      fontsize=8,
      frameon=False,
    )
  return has_band


def _percent(value: float, position: int | None = None) -> str:
  """Writes a tick's label exactly: '2.5%'."""
  del position
  # Ticks are sums of floats: 0.30000000000000004 is 30%.
  return f'{float(f"{100 * value:.6g}"):g}%'


def draw_confusion(counts: np.ndarray, class_names: tuple[str, ...]) -> Any:
  """Draws a confusion matrix, int [C, C], with a row for each true class."""
  canvas, axes = new_figure(_WIDTH, 3.3)
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
  """Draws accuracy by confidence, and how often it occurs."""
  canvas, axes = new_figure(_WIDTH, 3.0)
  edges = np.arange(predictions.NUM_BINS) / predictions.NUM_BINS
  width = 1 / predictions.NUM_BINS
  axes.bar(
    edges,
    bins.accuracy,  # A bin without predictions, NaN, has no bar.
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
  """Draws a histogram of accuracies, float [clients] in [0, 1]."""
  canvas, axes = new_figure(_WIDTH, 2.4)
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
  canvas.legend(loc='outside lower center', ncols=2, frameon=False, fontsize=8)
  return canvas


def new_figure(
  width: float, height: float, *grid: int, adapts: bool = True
) -> tuple[Any, Any]:
  """Makes a figure without pyplot, which would choose a window system.

  Args:
    width: Inches.
    height: Inches.
    *grid: Rows and columns of diagrams, by default one diagram.
    adapts: Whether the layout adapts to labels, the slowest part of drawing.

  Returns:
    (the figure, its axes).
  """
  from matplotlib import figure  # pylint: disable=import-outside-toplevel

  canvas = figure.Figure(
    figsize=(width, height), layout='constrained' if adapts else None
  )
  return canvas, canvas.subplots(*grid, squeeze=not grid)


def save(canvas: Any, path: str) -> None:
  """Writes a figure in the format of its ending, or raises `UsageError`.

  Args:
    canvas: A matplotlib figure.
    path: The file. It is PNG unless it ends in another one of `FORMATS`.
  """
  import matplotlib  # pylint: disable=import-outside-toplevel

  ending = os.path.splitext(path)[1].lower()
  content = io.BytesIO()
  # Publishers refuse matplotlib's usual fonts in PDF files, Type 3.
  with matplotlib.rc_context({'pdf.fonttype': 42}):
    canvas.savefig(
      content, dpi=110, format=ending[1:] if ending in FORMATS else 'png'
    )
  durable.write_file(path, [content.getvalue()])


def svg_url(draw: Callable[[], Any], name: str) -> str:
  """Draws a figure as a URL that holds it, for the `src` of an image.

  Args:
    draw: Makes a matplotlib figure.
    name: Seeds the ids in the picture: the same figure is the same text.

  Returns:
    'data:image/svg+xml;base64,...'.
  """
  import matplotlib  # pylint: disable=import-outside-toplevel

  content = io.BytesIO()
  values: dict[Any, Any] = {
    'svg.fonttype': 'none',  # Text stays text, which is small.
    'svg.hashsalt': name,
    'text.parse_math': False,  # A class may be called '$x'.
  }
  with matplotlib.rc_context(values):
    draw().savefig(content, format='svg', metadata={'Date': None})
  encoded = base64.b64encode(content.getvalue()).decode()
  return f'data:image/svg+xml;base64,{encoded}'


@dataclasses.dataclass(frozen=True)
class PlotHparams:
  """Flags of `programs/plot.py`."""

  output: str = hparam(
    '',
    'The PNG, PDF or SVG file. If empty: report/curves.png in the run; for'
    ' several runs, curves.png in the folder that holds them.',
  )
  diagrams: str = hparam(
    '',
    'Draw only the diagrams whose titles have one of these words, in any case,'
    ' separated by commas: test accuracy,loss. Empty: all.',
  )
  x: str = hparam(
    'rounds',
    'The horizontal axis. rounds; bytes: sent and received by all clients so'
    ' far; hours: taken by the rounds so far.',
    choices=('rounds', 'bytes', 'hours'),
  )

  def __post_init__(self):
    hparams.validate(self)


@main_lib.command(_USAGE, _ABOUT, PlotHparams, missing=runs_lib.NO_RUN)
def plot_main(settings: PlotHparams, parsed: flags.ParsedFlags) -> None:
  """Draws the curves of runs."""
  paths = [os.path.normpath(path) for path in parsed.positional]
  runs = runs_lib.read_all(paths, main_lib.warn)
  paths = [run.path for run in runs]
  output = settings.output or output_tree.default_report(paths, 'curves.png')
  main_lib.prepare_output('output', output, *FORMATS)
  diagrams = [word.strip() for word in settings.diagrams.split(',')]
  with durable.storage_errors('--output'):
    titles = plot(
      runs_lib.group_runs(runs),
      output,
      settings.x,
      list(filter(None, diagrams)),
    )
  console.show(f'{output}: {", ".join(titles)}')
