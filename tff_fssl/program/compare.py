"""Tables that compare runs over seeds, with tests: `programs/compare.py`."""

from collections.abc import Callable, Mapping, Sequence
import csv
import dataclasses
import io
import math
import os
import textwrap
from typing import NamedTuple
import warnings

import numpy as np

from tff_fssl import durable
from tff_fssl import hparams
from tff_fssl import metrics
from tff_fssl.data import inspection
from tff_fssl.hparams import UsageError
from tff_fssl.hparams import hparam
from tff_fssl.program import catalogue
from tff_fssl.program import config as config_lib
from tff_fssl.program import console
from tff_fssl.program import flags
from tff_fssl.program import inputs as inputs_lib
from tff_fssl.program import main as main_lib
from tff_fssl.program import runs as runs_lib
from tff_fssl.program import summary

_USAGE = (
  'programs/compare.py RUN RUN [RUN ...] [--columns=WORD,...] [--markdown]'
)
_ABOUT = (
  'Compares runs at equal budgets, as tables. Runs that differ only in'
  ' their seeds form a group, shown by mean and sample standard deviation:'
  ' accuracy, pseudo-labels, seconds, bytes and compute (the most, for a client'
  " of mean size). The test accuracy of the first run's group is compared with"
  " each other group by Welch's t-test and by the paired t-test of"
  ' runs with equal data, partition and initial weights (seed), whose'
  ' p-values are also corrected for the number of groups (Holm). RUN is the'
  ' --output_dir of programs/train.py. A path that is not a run, or a run'
  ' without an evaluation, is skipped with a warning.'
)
# The figure that tables and tests compare.
TEST_ACCURACY = 'test/accuracy'
# Pseudo-labels and seconds are means over this many last rounds.
_WINDOW = 10
# In points of accuracy: less is rounding.
_NO_SPREAD = 1e-9
# Rounds compile if it takes longer, in seconds: looking up what is compiled
# takes some microseconds.
_COMPILING = 0.1
_GIGA = 1e9
# Unit of a metric -> (factor, how the title ends, digits). Others are shown as
# they are.
_SCALES = {
  metrics.SHARE: (100.0, ', %', 1),
  metrics.BYTES: (1e-6, ', MB', 1),
  metrics.SECONDS: (1.0, ', s', 2),
  metrics.PERCENT: (1.0, '', 1),
}


# Those of the label of a row, at most, and of the space between two columns.
_LABEL_WIDTH, _SPACE = 34, 2
# What the titles of the columns of results begin with that a terminal shows.
_USUAL = (
  'test, last round',
  'test, best-validation round',
  *(f'test {title}, last round' for title in metrics.FIGURES.values()),
  'deviation over clients',
  'worst decile of clients',
  'pseudo-label',
  'up a round',
  'time of a round',
  'GFLOP a client',
)
# Flags that may change in a run, but on which results depend within rounding.
_ROUNDING = {
  'runtime',
  'client_devices',
  'clients_per_group',
  'intra_op_threads',
}


class Table(NamedTuple):
  """A table of texts.

  Attributes:
    header: The titles of its columns.
    rows: The cells of each row, as many as there are titles.
  """

  header: list[str]
  rows: list[list[str]]

  def select(self, kept: Sequence[int]) -> 'Table':
    """Returns the table of some of the columns."""
    header, *rows = (
      [row[i] for i in kept] for row in (self.header, *self.rows)
    )
    return Table(header, rows)

  def drop_empty(self) -> 'Table':
    """Drops columns of figures that no row has."""
    columns = range(len(self.header))
    return self.select([i for i in columns if any(row[i] for row in self.rows)])


def _compute_column(
  value: Callable[[summary.Compute], float | None],
) -> Callable[[runs_lib.Run], float]:
  """Makes a column of figures of `compute.json`."""

  def cell(run: runs_lib.Run) -> float:
    found = None if run.compute is None else value(run.compute)
    return math.nan if found is None else found

  return cell


# The forward-equivalents of a client in a round. NaN: the run does not say.
forward_equivalents = _compute_column(lambda c: c.client)
# What a round computes: (title, value of a run, digits).
_COMPUTE: list[tuple[str, Callable[[runs_lib.Run], float], int]] = [
  (
    'GFLOP a client and round, at most',
    _compute_column(lambda c: c.flops(c.client) / _GIGA),
    1,
  ),
  ('forward-equivalents, at most', forward_equivalents, 0),
  (
    'GFLOP of the server, a round',
    _compute_column(lambda c: c.flops(c.server) / _GIGA),
    1,
  ),
]


def check_seeds(groups: Sequence[runs_lib.RunGroup]) -> None:
  """Refuses runs that would count twice (`UsageError`)."""
  for group in groups:
    seen: dict[str, runs_lib.Run] = {}
    for run in group.runs:
      first = seen.setdefault(run.seed, run)
      if first is not run:
        other = _hindrances(first, run)
        but = f', but other {" and ".join(other)}' if other else ''
        raise UsageError(
          f'{first.path} and {run.path} have equal flags and --seed={run.seed}'
          f'{but}: they would count as two samples; omit one of them, or train'
          ' one with another seed'
        )


def last_common_round(groups: Sequence[runs_lib.RunGroup]) -> int:
  """Finds the last round that all runs have evaluated on test data.

  Args:
    groups: The groups of runs.

  Returns:
    The number of that round.

  Raises:
    UsageError: If there is none.
  """
  evaluated = []
  for group in groups:
    for run in group.runs:
      rounds, _ = run.curve(TEST_ACCURACY)
      if not len(rounds):
        raise UsageError(f'{run.path}: this run has no evaluation yet')
      evaluated.append(set(rounds.tolist()))
  common = set.intersection(*evaluated)
  if not common:
    raise UsageError(
      'the runs have no evaluated round in common; give runs of equal'
      ' --rounds_per_evaluation'
    )
  return max(common)


def tables(groups: Sequence[runs_lib.RunGroup], last_round: int) -> list[Table]:
  """Makes tables of results, and of tests of the first group.

  Args:
    groups: At least one group of runs that differ only in their seeds.
    last_round: Later rounds are ignored, so that budgets are equal.

  Returns:
    The results. For several groups, then the tests.
  """

  def percent(figure: str) -> Callable[[runs_lib.Run], float]:
    return lambda run: (
      100 * value_at(run, f'{TEST_ACCURACY}{figure}', last_round)
    )

  columns = [
    ('test, last round, %', percent(''), 1),
    (
      'test, best-validation round, %',
      lambda run: 100 * best_validation(run, last_round),
      1,
    ),
    *_figures(last_round),
    # Where each client has its own model.
    ('deviation over clients, %', percent('_deviation'), 1),
    ('worst decile of clients, %', percent('_worst_decile'), 1),
    *_declared(last_round),
  ]
  if all(run.compute is not None for group in groups for run in group.runs):
    columns += _COMPUTE
  cells = [
    [
      mean_and_spread([fn(run) for run in group.runs], digits)
      for _, fn, digits in columns
    ]
    for group in groups
  ]
  results = Table(
    ['', 'runs', *(title for title, _, _ in columns)],
    [
      [group.label, str(len(group.runs)), *row]
      for group, row in zip(groups, cells)
    ],
  ).drop_empty()
  tests = [_tests(groups, last_round)] if len(groups) > 1 else []
  return [results, *tests]


def markdown(shown: Sequence[Table]) -> str:
  """Writes tables as Markdown, with an empty line between two."""
  return '\n\n'.join(
    '\n'.join(
      f'| {" | ".join(cells)} |'
      for cells in (table.header, ['---'] * len(table.header), *table.rows)
    )
    for table in shown
  )


def select_columns(results: Table, words: Sequence[str] = ()) -> Table:
  """Selects columns of the table of results.

  Args:
    results: The first of `tables`.
    words: Parts of titles, in any case. Columns with one of them are taken. If
      there are none, the usual ones, as many as 80 columns hold.

  Returns:
    The table, with the labels and the numbers of runs.

  Raises:
    UsageError: If a word is in no title.
  """
  titles = results.header

  def containing(word: str) -> list[int]:
    found = [
      i for i, t in enumerate(titles) if i >= 2 and word.lower() in t.lower()
    ]
    if not found:
      raise UsageError(
        f'--columns: no column has {word!r} in its title; there are:'
        f' {"; ".join(titles[2:])}'
      )
    return found

  if words:
    # In the order of the words, each once.
    chosen = list(dict.fromkeys(sum(map(containing, words), [])))
  else:
    chosen = usual_columns(results)
    while len(chosen) > 1 and not _fits(results.select([0, 1, *chosen])):
      chosen.pop()
  return results.select([0, 1, *chosen])


def usual_columns(results: Table) -> list[int]:
  """Returns the indices of the columns that most readers want, ascending."""
  titles = results.header
  return [i for i, title in enumerate(titles) if title.startswith(_USUAL)]


def _fits(table: Table) -> bool:
  return max(map(len, _plain_lines(table))) <= console.WIDTH


def plain_text(shown: Sequence[Table]) -> str:
  """Writes tables with aligned columns, if possible at most 80 wide."""
  return '\n\n'.join('\n'.join(_plain_lines(table)) for table in shown)


def _plain_lines(table: Table) -> list[str]:
  """Writes a table: the titles, a rule, and the rows."""
  columns = list(zip(table.header, *table.rows))
  widths = [_column_width(column) for column in columns[1:]]
  left = console.WIDTH - sum(widths) - _SPACE * len(widths)
  label_width = max(min(left, _LABEL_WIDTH), 12)
  label_width = min(label_width, max(map(len, columns[0])))
  lines = []
  for number, row in enumerate((table.header, *table.rows)):
    cells = [
      textwrap.wrap(cell, width, break_on_hyphens=False) or ['']
      for cell, width in zip(row, (label_width, *widths))
    ]
    height = max(map(len, cells))
    for index, cell in enumerate(cells):
      # Titles stand on the rule, and numbers in the first line of their row.
      blank = [''] * (height - len(cell))
      cells[index] = [*blank, *cell] if not number else [*cell, *blank]
    for label, *numbers in zip(*cells):
      parts = [f'{label:{label_width}}']
      parts += [f'{cell:>{width}}' for cell, width in zip(numbers, widths)]
      lines.append((' ' * _SPACE).join(parts).rstrip())
    if not number:
      lines.append('-' * max(map(len, lines)))
  return lines


def _column_width(column: Sequence[str]) -> int:
  """Computes a width for all cells and a title on few lines."""
  title, *cells = column
  return max(min(len(title), 10), *map(len, (*title.split(), *cells)))


def comma_separated(results: Table) -> list[list[str]]:
  """Makes the rows of a CSV file, with deviations in columns of their own."""
  rows = [[*results.header[:2]]]
  rows[0] += [
    name
    for title in results.header[2:]
    for name in (title, f'{title}, standard deviation')
  ]
  for label, runs, *cells in results.rows:
    row = [label, runs]
    for cell in cells:
      mean, _, deviation = cell.partition(' ± ')
      row += [mean, deviation]
    rows.append(row)
  return rows


def remarks(groups: Sequence[runs_lib.RunGroup]) -> list[str]:
  """Says what else, besides the algorithm, runs differ in: a sentence each."""
  found, members = [], [run for group in groups for run in group.runs]
  differing = []
  for name, values in {
    **find_differences(groups),
    **_made_by(members),
  }.items():
    shown = runs_lib.shorten(value or 'not given' for value in values)
    differing.append(f'{name} ({", ".join(shown.values())})')
  if differing:
    found.append(
      f'the groups also differ in {"; ".join(differing)}: differences in'
      ' accuracy may come from that'
    )
  other_data = [
    f'{run.path} has other {" and ".join(names)} than {members[0].path}'
    for run in members[1:]
    if (names := _other_data(members[0], run))
  ]
  if other_data:
    found.append(
      f'runs are of different data: {inspection.shown(other_data)}; differences'
      ' in accuracy may come from that'
    )
  for group in groups:
    judged = [run.num_judged for run in group.runs]
    if few := [number for number in judged if number < metrics.FEWEST_JUDGED]:
      found.append(
        f'the pseudo-label accuracy of {group.label} is not shown: only'
        f' {max(few):.0f} kept pseudo-labels of a round, at most, are of known'
        ' class'
      )
  unpaired: dict[str, list[str]] = {}
  for group in groups[1:]:
    for ours, theirs in _match_seeds(groups[0], group):
      # Other data are a remark of their own.
      told = _other_data(ours, theirs)
      other = [n for n in _hindrances(ours, theirs) if n not in told]
      if other:
        who = f'{group.label} (other {" and ".join(other)})'
        unpaired.setdefault(who, []).append(ours.seed)
  if unpaired:
    pairs = [f'{who}, seeds {", ".join(s)}' for who, s in unpaired.items()]
    found.append(
      f'runs of one seed of {groups[0].label} and others are not paired, since'
      f' they differ in more than the method: {"; ".join(pairs)}'
    )
  return found


def _other_data(one: runs_lib.Run, other: runs_lib.Run) -> list[str]:
  """Names what differs in two runs' data, if they recorded them."""
  if not one.inputs or not other.inputs:
    return []
  names = one.inputs.differences(other.inputs)
  # With protected clients, the partition is not known. The seed draws it.
  if not one.inputs.partition and one.seed != other.seed:
    names = [n for n in names if not n.startswith(inputs_lib.VALIDATION)]
  return names


def _hindrances(one: runs_lib.Run, other: runs_lib.Run) -> list[str]:
  """Names what keeps two runs of the same seed from being a pair."""
  found = _other_data(one, other)
  if one.inputs and other.inputs:
    if one.inputs.partition != other.inputs.partition:
      found.append('partition')
  starts = {run.flags.get('init_from', '') for run in (one, other)}
  return [*found, *['initial weights'] * (len(starts) > 1)]


def _match_seeds(
  ours: runs_lib.RunGroup, theirs: runs_lib.RunGroup
) -> list[tuple[runs_lib.Run, runs_lib.Run]]:
  """Returns the runs of two groups that have the same seed."""
  return [
    (run, other)
    for run in ours.runs
    for other in theirs.runs
    if run.seed == other.seed
  ]


def _made_by(members: Sequence[runs_lib.Run]) -> dict[str, list[str]]:
  """Finds the software, and numbers of cores, in which runs differ."""
  known = [run.inputs.made_by for run in members if run.inputs]
  names = dict.fromkeys(name for made_by in known for name in made_by)
  found = {
    name: list(dict.fromkeys(m[name] for m in known if name in m))
    for name in names
  }
  return {name: values for name, values in found.items() if len(values) > 1}


def find_differences(
  groups: Sequence[runs_lib.RunGroup],
) -> dict[str, list[str]]:
  """Finds the flags in which groups differ, besides algorithm and seed.

  Args:
    groups: Groups of runs that differ only in their seeds.

  Returns:
    --flag -> its values, in the order of the groups. Flags that one of the
    algorithms does not have are not compared.
  """
  values = [
    {
      **runs_lib.usual_flags(group.algorithm),
      **group.runs[0].flags,
    }
    for group in groups
  ]
  ignored = {*config_lib.changeable_flags(), 'seed', 'algorithm'}
  result = {}
  for name in sorted(set.intersection(*map(set, values)) - ignored | _ROUNDING):
    found = list(dict.fromkeys(of_group[name] for of_group in values))
    # The flags of an algorithm do not count with another one.
    owners = [g for g in groups if name.startswith(f'{g.algorithm}.')]
    if len(found) > 1 and ('.' not in name or len(owners) == len(groups)):
      result[f'--{name}'] = found
  return result


def _figures(
  last_round: int,
) -> list[tuple[str, Callable[[runs_lib.Run], float], int]]:
  """Makes the columns of `--metrics`."""

  def last(figure: str) -> Callable[[runs_lib.Run], float]:
    return lambda run: 100 * value_at(run, f'test/{figure}', last_round)

  def best(figure: str) -> Callable[[runs_lib.Run], float]:
    return lambda run: 100 * best_validation(run, last_round, figure)

  return [
    (f'test {title}, {when} round, %', fn(figure), 1)
    for figure, title in metrics.FIGURES.items()
    for when, fn in (('last', last), ('best-validation', best))
  ]


def _declared(
  last_round: int,
) -> list[tuple[str, Callable[[runs_lib.Run], float], int]]:
  """Makes the columns that the declarations of metrics ask for."""

  def mean(column: str, scale: float) -> Callable[[runs_lib.Run], float]:
    return lambda run: scale * late_mean(run, column, last_round)

  result = []
  for metric in catalogue.all_metrics():
    if metric.compared:
      scale, unit, digits = _SCALES.get(metric.unit, (1.0, '', 3))
      result += [
        (metric.compared.format(choice) + unit, mean(column, scale), digits)
        for column, choice in metric.columns().items()
      ]
  return result


def value_at(run: runs_lib.Run, column: str, round_num: int) -> float:
  """Returns a run's value after a round, or NaN if there is none."""
  rounds, values = run.curve(column)
  (at,) = np.nonzero(rounds == round_num)
  return float(values[at[0]]) if len(at) else math.nan


def best_round(run: runs_lib.Run, last_round: int) -> int | None:
  """Returns the first round that is best on validation examples, if any."""
  rounds, values = run.curve(summary.selecting(run.best_by))
  before = rounds <= last_round
  if not before.any():
    return None
  return int(rounds[before][np.argmax(values[before])])


def best_validation(
  run: runs_lib.Run, last_round: int, figure: str = summary.ACCURACY
) -> float:
  """Returns a figure on test examples in the best round on validation ones."""
  best = best_round(run, last_round)
  return math.nan if best is None else value_at(run, f'test/{figure}', best)


def late_mean(run: runs_lib.Run, column: str, last_round: int) -> float:
  """Computes the mean over the last rounds, up to `last_round`.

  Seconds leave out rounds that compiled computations, if others are left.
  """
  rounds, values = run.curve(column)
  late = (rounds > last_round - _WINDOW) & (rounds <= last_round)
  if column.startswith('seconds/'):
    compiled, seconds = run.curve('seconds/compile')
    usual = late & ~np.isin(rounds, compiled[seconds > _COMPILING])
    late = usual if usual.any() else late
  return float(values[late].mean()) if late.any() else math.nan


def mean_and_spread(values: Sequence[float], digits: int) -> str:
  """Writes the mean and, of several values, the sample deviation."""
  # A mean over some of the seeds would pass for one over all.
  if not np.isfinite(values).all():
    return ''
  mean = f'{np.mean(values):.{digits}f}'
  if len(values) == 1:
    return mean
  return f'{mean} ± {np.std(values, ddof=1):.{digits}f}'


def _tests(groups: Sequence[runs_lib.RunGroup], last_round: int) -> Table:
  """Computes p-values of differences from the first group."""

  def accuracy(run):
    return 100 * value_at(run, TEST_ACCURACY, last_round)

  rows = []
  paired_p_values = []
  ours = [accuracy(run) for run in groups[0].runs]
  for group in groups[1:]:
    theirs = [accuracy(run) for run in group.runs]
    welch = _welch_p_value(ours, theirs)
    pairs = np.array(
      [
        [*map(accuracy, both)]
        for both in _match_seeds(groups[0], group)
        if not _hindrances(*both)
      ]
    ).reshape(-1, 2)
    paired = paired_p_value(pairs)
    paired_p_values.append(paired)
    text = p_value(paired)
    if text and not len(pairs) == len(ours) == len(theirs):
      difference = np.mean(pairs[:, 0] - pairs[:, 1])
      text += f' ({difference:+.1f} over {len(pairs)} pairs)'
    difference = np.mean(ours) - np.mean(theirs)
    rows.append([group.label, f'{difference:+.1f}', p_value(welch), text])
  # For one difference, nothing is corrected.
  if len(rows) > 1:
    for row, corrected in zip(rows, holm(paired_p_values)):
      row.append(p_value(corrected))
  return Table(
    [
      f'{groups[0].label} against, by test accuracy in the last round',
      'points',
      "Welch's p",
      'p, paired',
      *(['that by Holm'] if len(rows) > 1 else []),
    ],
    rows,
  )


def _welch_p_value(ours: Sequence[float], theirs: Sequence[float]) -> float:
  """Computes Welch's p-value, since algorithms differ in spread over seeds.

  It is NaN for one value, or without a spread: the cell stays blank.
  """
  # Slow to import. pylint: disable-next=import-outside-toplevel
  from scipy import stats

  if max(np.ptp(ours), np.ptp(theirs)) < _NO_SPREAD:
    return math.nan
  with warnings.catch_warnings():
    warnings.simplefilter('ignore')  # Of one value.
    return float(stats.ttest_ind(ours, theirs, equal_var=False).pvalue)


def pair(ours: Mapping[str, float], theirs: Mapping[str, float]) -> np.ndarray:
  """Pairs values by their keys, float64 [common keys, 2]."""
  common = sorted(ours.keys() & theirs.keys())
  return np.array([(ours[key], theirs[key]) for key in common]).reshape(-1, 2)


def paired_p_value(pairs: np.ndarray) -> float:
  """Tests the difference of two groups of runs by a paired t-test.

  Args:
    pairs: float64 [N, 2], the values of runs with equal data, partition and
      initial weights.

  Returns:
    The p-value, NaN for fewer than two pairs or equal differences.
  """
  # Slow to import. pylint: disable-next=import-outside-toplevel
  from scipy import stats

  # Equal differences, as of small test sets, do not tell their spread.
  if len(pairs) < 2 or np.ptp(pairs[:, 0] - pairs[:, 1]) < _NO_SPREAD:
    return math.nan
  return float(stats.ttest_rel(*pairs.T).pvalue)


def holm(p_values: Sequence[float]) -> list[float]:
  """Corrects p-values for the number of tests (Holm, 1979).

  If values below 0.05 count as differences, the chance that a family without
  any difference shows one is at most 5%.

  Args:
    p_values: Those of a family of tests. NaN is not a test.

  Returns:
    The corrected values, in the same order: at least the given ones, at most 1,
    NaN where that was given.

  Examples:
    >>> from tff_fssl.program import compare
    >>> compare.holm([0.03, 0.01, 0.04])
    [0.06, 0.03, 0.06]
  """
  given = np.array(p_values, np.float64)
  order = np.argsort(given)  # NaN comes last.
  remaining = np.count_nonzero(~np.isnan(given)) - np.arange(len(given))
  corrected = np.empty_like(given)
  corrected[order] = np.minimum(
    np.maximum.accumulate(given[order] * remaining), 1
  )
  return corrected.tolist()


def p_value(value: float) -> str:
  """Writes a p-value, or nothing if there is none."""
  if not math.isfinite(value):
    return ''
  return f'{value:.3f}' if value >= 0.001 else '< 0.001'


@dataclasses.dataclass(frozen=True)
class CompareHparams:
  """Flags of `programs/compare.py`."""

  last_round: int = hparam(
    0,
    'Rounds after this one are ignored. 0: the last round that all runs have'
    ' evaluated.',
    minimum=0,
  )
  columns: str = hparam(
    '',
    'The columns to show: words of their titles, separated by commas, such as'
    ' test,GFLOP. If empty, the most usual ones, as many as a line holds.',
  )
  markdown: bool = hparam(
    False,
    'Prints Markdown, with all columns unless --columns is given.',
  )
  csv: str = hparam(
    '',
    'Also write all columns to this file, with a column for each standard'
    ' deviation.',
  )

  def __post_init__(self):
    hparams.validate(self)


@main_lib.command(_USAGE, _ABOUT, CompareHparams, missing=runs_lib.NO_RUN)
def compare_main(settings: CompareHparams, parsed: flags.ParsedFlags) -> None:
  """Compares runs over seeds, as tables."""
  paths = [os.path.normpath(path) for path in parsed.positional]
  run_groups = runs_lib.group_runs(
    runs_lib.read_all(paths, main_lib.warn, TEST_ACCURACY)
  )
  check_seeds(run_groups)
  main_lib.prepare_output('csv', settings.csv, '.csv')
  common = last_common_round(run_groups)
  last_round = settings.last_round or common
  if last_round > common:
    raise UsageError(
      f'--last_round={last_round}: the last round that all runs have evaluated'
      f' is {common}'
    )
  console.show(
    f'Rounds up to {last_round}; mean ± standard deviation over runs.\n'
  )
  results, *tests = tables(run_groups, last_round)
  words = [word.strip() for word in settings.columns.split(',') if word.strip()]
  shown = results
  if words or not settings.markdown:
    shown = select_columns(results, words)
  write = markdown if settings.markdown else plain_text
  console.show(write([shown, *tests]))
  if settings.csv:
    table = io.StringIO(newline='')
    csv.writer(table).writerows(comma_separated(results))
    with durable.storage_errors('--csv'):
      durable.write_file(settings.csv, [table.getvalue().encode()])
  for text in remarks(run_groups):
    line = f'{text[:1].upper()}{text[1:]}.'
    console.show('\n' + '\n'.join(console.wrapped(line)))
  left_out = [title for title in results.header if title not in shown.header]
  if left_out and not words:
    console.show(
      '\n' + '\n'.join(console.wrapped(f'More columns: {"; ".join(left_out)}.'))
    )
