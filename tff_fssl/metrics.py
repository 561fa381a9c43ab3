"""Declarations of metrics: the meaning of a column, and where it is shown.

docs/metrics.md, the console, the plots and the tables of `compare.py` are made
from them.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
import dataclasses
import itertools
import math
import re
from typing import Any

# Unit -> its meaning.
SHARE, NATS, BYTES, SECONDS, PERCENT = 'share', 'nats', 'bytes', 's', '%'
UNITS = {
  SHARE: 'from 0 to 1',
  'yes or no': '1 or 0',
  NATS: 'of a loss: logarithms are natural',
  'count': 'a whole number',
  'ratio': '1 is as much as the other',
  'norm': 'L2 norm',
  PERCENT: '100 is the whole',
  BYTES: 'of 8 bits',
  SECONDS: 'seconds of wall time',
  'MiB': '2**20 bytes',
}
HIGHER, LOWER = 'higher', 'lower'
ARROWS = {HIGHER: '↑', LOWER: '↓', '': ''}

CLIENTS = 'client_work/train'
PSEUDO_LABEL_ACCURACY_COLUMN = f'{CLIENTS}/pseudo_label_accuracy'
NUM_KNOWN = 'pseudo_labels/num_known'
# Figures of an evaluation besides accuracy and loss -> their titles.
BALANCED_ACCURACY, MACRO_F1, AUROC = 'balanced_accuracy', 'macro_f1', 'auroc'
FIGURES = {
  BALANCED_ACCURACY: 'balanced accuracy',
  MACRO_F1: 'macro F1',
  AUROC: 'AUROC',
}
# An accuracy of fewer test examples is shown with its interval.
_MANY_EXAMPLES = 1_000
# An accuracy of fewer pseudo-labels is shown as a count.
FEWEST_JUDGED = 30

# Diagrams in the order of drawing. Diagrams of an algorithm's own follow.
PSEUDO_LABELS = 'Pseudo-label rate'
PSEUDO_LABEL_ACCURACY = 'Pseudo-label accuracy'
CORRECT_AND_WRONG = 'Correct and wrong pseudo-labels'
LOSS_AT_CLIENTS = 'Loss at clients'
LABELED_ACCURACY = 'Accuracy on labelled examples in training'
LOSS_ON_HELD_OUT = 'Loss on test and validation examples'
_PANELS = (
  'Test accuracy',
  'Validation accuracy',
  'Balanced accuracy',
  'Macro F1',
  'AUROC',
  LOSS_ON_HELD_OUT,
  PSEUDO_LABELS,
  PSEUDO_LABEL_ACCURACY,
  CORRECT_AND_WRONG,
  'Learning status',
  'Aggregation weights',
  LOSS_AT_CLIENTS,
  'Loss at the server',
  LABELED_ACCURACY,
)
# Figures in the console's line of a round, in this order.
_FIGURES = ('loss', 'label loss', 'server', 'PL rate', 'PL acc')

SOLID, DASHED, DOTTED = '-', '--', ':'


@dataclasses.dataclass(frozen=True)
class Curve:
  """The place and style of a metric in plots.

  Attributes:
    panel: Heading of the diagram.
    label: Name of the line, if the diagram has several. The lines of a metric
      with `{mean,min,max}` have these names.
    dashes: Line style. Metrics may share one if no algorithm has both.
  """

  panel: str
  label: str = ''
  dashes: str = SOLID


@dataclasses.dataclass(frozen=True)
class Metric:
  """A column of a run's table, or several of one kind.

  Attributes:
    column: Its name. `{a,b}` stands for one column with `a` and one with `b`,
      `...` for a part that is unknown before a run, such as the number of a
      class. `x` of an algorithm's step or preparation becomes
      `client_work/train/x`.
    meaning: The meaning, and the examples or clients over which it is taken, in
      Markdown.
    unit: One of `UNITS`, or ''.
    better: HIGHER, LOWER, or '' where neither is better.
    curve: Its place in plots. None: plots do not show it.
    figure: Its name in the console's line of a round. '': not shown. Of several
      columns with one name, the first that has a value is shown.
    compared: Its title in the table of `compare.py`, which shows the mean over
      the last rounds, or '' if it is not shown. `{}` in it stands for the
      choice of `{a,b}`.
  """

  column: str
  meaning: str
  unit: str = ''
  better: str = ''
  curve: Curve | None = None
  figure: str = ''
  compared: str = ''

  def __post_init__(self) -> None:
    if self.unit and self.unit not in UNITS:
      raise ValueError(
        f'metric {self.column!r}: unit {self.unit!r}; one of {list(UNITS)}, or'
        " ''"
      )
    if self.better not in ('', HIGHER, LOWER):
      raise ValueError(
        f'metric {self.column!r}: better={self.better!r}; {HIGHER!r}, {LOWER!r}'
        " or ''"
      )
    if not self.meaning:
      raise ValueError(f'metric {self.column!r}: has no meaning; give one')

  def columns(self) -> Mapping[str, str]:
    """Maps each column to its choice of `{a,b}`, or to ''."""
    pieces = re.split(r'\{(.*?)\}', self.column)
    choices = [
      piece.split(',') if i % 2 else [piece] for i, piece in enumerate(pieces)
    ]
    return {
      # Every other piece is a choice, and the last one names the column.
      ''.join(parts): parts[-2] if len(parts) > 1 else ''
      for parts in itertools.product(*choices)
    }


def numbered(pattern: str, columns: Iterable[str]) -> dict[int, str]:
  """Maps the number at `...` to its column, sorted by number."""
  before, dots, after = map(re.escape, pattern.partition('...'))
  found = {}
  for column in columns:
    match = re.fullmatch(rf'{before}(\d+){after}', column)
    if dots and match is not None:
      found[int(match[1])] = column
  return dict(sorted(found.items()))


def client_metric(
  name: str, meaning: str, unit: str = '', better: str = '', **shown: Any
) -> Metric:
  """Declares a metric that clients report as `name`. See `Metric`."""
  return Metric(f'{CLIENTS}/{name}', meaning, unit, better, **shown)


def client_range(name: str, meaning: str, **shown: Any) -> Metric:
  """Declares one of the `ranges` that an algorithm's preparation reports."""
  return client_metric(f'{name}_{{mean,min,max}}', meaning, SHARE, **shown)


@dataclasses.dataclass(frozen=True)
class Line:
  """A line of a diagram.

  Attributes:
    column: The column to draw.
    label: Its name.
    dashes: Its style.
  """

  column: str
  label: str
  dashes: str


@dataclasses.dataclass(frozen=True)
class Panel:
  """A diagram.

  Attributes:
    title: Its heading.
    lines: Its lines.
    is_share: Whether values are from 0 to 1.
    better: See `Metric`. '' if its lines differ.
  """

  title: str
  lines: tuple[Line, ...]
  is_share: bool
  better: str


def accuracy_interval(
  accuracy: float, num_examples: int
) -> tuple[float, float]:
  """Computes Wilson's 95% interval of an accuracy.

  Args:
    accuracy: The share of correct predictions.
    num_examples: The number of predictions, at least 1.

  Returns:
    (low, high).

  Examples:
    >>> from tff_fssl import metrics
    >>> low, high = metrics.accuracy_interval(0.9, num_examples=50)
    >>> print(f'{low:.3f} {high:.3f}')
    0.786 0.957
  """
  # Slow to import. pylint: disable-next=import-outside-toplevel
  from scipy import stats

  num_right = round(accuracy * num_examples)
  test = stats.binomtest(num_right, num_examples)
  interval = test.proportion_ci(0.95, 'wilson')
  return float(interval.low), float(interval.high)


def interval_of_few(
  accuracy: float, num_examples: int
) -> tuple[float, float] | None:
  """Computes the interval of an accuracy of less than 1,000 examples.

  Args:
    accuracy: The share of correct predictions, or NaN.
    num_examples: The number of predictions, or 0 if it is not known.

  Returns:
    (low, high), or None if there are more examples.
  """
  if not 0 < num_examples < _MANY_EXAMPLES or math.isnan(accuracy):
    return None
  return accuracy_interval(accuracy, num_examples)


def count_judged(
  get: Callable[[str], Any],
) -> tuple[Any, Any]:
  """Counts the pseudo-labels, each once, that an accuracy is of.

  Args:
    get: Column -> its value in a round, or its values in several, NaN where it
      has none.

  Returns:
    (correct, kept): of the examples of known class of the round's clients.
    NaN in rounds whose number of them is not recorded.
  """
  known, correct, wrong = (
    get(column)
    for column in (
      NUM_KNOWN,
      f'{CLIENTS}/pseudo_label_correct_ratio',
      f'{CLIENTS}/pseudo_label_wrong_ratio',
    )
  )
  return known * correct, known * (correct + wrong)


_DASHES = {'mean': SOLID, 'min': DASHED, 'max': DOTTED}


def panels(metrics: Sequence[Metric]) -> list[Panel]:
  """Groups metrics by diagram, in the order of drawing."""
  drawn: dict[str, list[Metric]] = {title: [] for title in _PANELS}
  for metric in metrics:
    if metric.curve is not None:
      drawn.setdefault(metric.curve.panel, []).append(metric)
  return [
    Panel(
      title,
      tuple(
        Line(
          column,
          choice or metric.curve.label,
          _DASHES.get(choice, metric.curve.dashes),
        )
        for metric in members
        if metric.curve is not None
        for column, choice in metric.columns().items()
      ),
      all(metric.unit == SHARE for metric in members),
      members[0].better if len({m.better for m in members}) == 1 else '',
    )
    for title, members in drawn.items()
    if members
  ]


def figures(metrics: Sequence[Metric]) -> dict[str, dict[str, Metric]]:
  """Maps names of the console's figures, in order, to columns -> metrics."""
  shown: dict[str, dict[str, Metric]] = {name: {} for name in _FIGURES}
  for column, metric in index_columns(metrics).items():
    if metric.figure:
      shown.setdefault(metric.figure, {})[column] = metric
  return {name: members for name, members in shown.items() if members}


def index_columns(metrics: Sequence[Metric]) -> dict[str, Metric]:
  """Maps each column to its metric."""
  return {column: metric for metric in metrics for column in metric.columns()}
