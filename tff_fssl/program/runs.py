"""Runs, read from their folders, and `programs/runs.py`, which lists them."""

import collections
from collections.abc import Callable, Iterable, Iterator, Sequence
import dataclasses
import datetime
import functools
import json
import math
import os
import re
from typing import Any, TypeVar

import numpy as np

from tff_fssl import hparams
from tff_fssl import metrics
from tff_fssl.aggregators import hparams as aggregator_hparams
from tff_fssl.algorithms import registry
from tff_fssl.hparams import UsageError
from tff_fssl.hparams import hparam
from tff_fssl.program import config
from tff_fssl.program import console
from tff_fssl.program import csv_table
from tff_fssl.program import flags
from tff_fssl.program import inputs as inputs_lib
from tff_fssl.program import main as main_lib
from tff_fssl.program import output_tree
from tff_fssl.program import summary

RUNNING, STOPPED, FINISHED = 'running', 'stopped', 'finished'
# The first are those to look at first.
STATES = (RUNNING, STOPPED, FINISHED)
# What is left is estimated from so many rounds.
_RECENT = 20
_TEST_ACCURACY = 'test/accuracy'
_COLUMNS = ('run', 'state', 'round', 'last', 'best', 'left', 'started')
_LEFT_ALIGNED = ('run', 'state')
_MAX_HEADING_LINES = 3
_USAGE = 'programs/runs.py [FOLDER ...] [--json]'
_ABOUT = (
  'Lists all runs in folders (runs if none is given), at any depth. Runs that'
  ' differ only in their seeds form a group, titled by the flags in which it'
  ' differs from the others. Groups with an active run come first.\n'
  'state: running (a process holds the folder), finished, or stopped before its'
  ' last round; its command continues it.'
  ' round: the last finished one; pre: of server pre-training. last, best: test'
  ' accuracy of the last evaluation, and of the one that validation selects.'
  ' left: until the last round. started: when its process began.\n'
  'Each unusable file is named in a warning.'
)
_FOLDER = 'runs'
_T = TypeVar('_T')


@dataclasses.dataclass(frozen=True)
class Run:
  """A run's tables.

  Attributes:
    path: Folder of the run.
    flags: Flags of the run, as text.
    rows: Rows of train.csv, eval.csv and timing.csv.
    compute: The compute of a round, or None if not recorded.
    inputs: Digests of its data, or None if not recorded.
  """

  path: str
  flags: dict[str, str]
  rows: tuple[list[dict[str, str]], ...]
  compute: summary.Compute | None = None
  inputs: inputs_lib.Inputs | None = None

  @property
  def seed(self) -> str:
    """Returns its seed, as text."""
    return self.flags.get('seed', '')

  @property
  def best_by(self) -> str:
    """Returns the figure on validation examples that selects a round."""
    return self.flags.get('best_by', summary.ACCURACY)

  @property
  def is_private(self) -> bool:
    """Says whether the run protects its clients."""
    return self.flags.get('aggregator') in aggregator_hparams.PRIVATE

  @property
  def public(self) -> 'Run':
    """Drops all that depends on which examples clients hold."""
    inputs = self.inputs and self.inputs.public
    return dataclasses.replace(
      self, rows=self.rows[:2], compute=None, inputs=inputs
    )

  def curve(self, column: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns (rounds int [N], values float64 [N]) where they are known.

    Accuracies of too few pseudo-labels are left out.
    """
    # The first table that has the column: no column is in two.
    for rows in self.rows:
      try:
        values = csv_table.column(rows, column)
      except UsageError as error:
        raise UsageError(f'{self.path}: {error}') from error
      known = np.isfinite(values)
      if column == metrics.PSEUDO_LABEL_ACCURACY_COLUMN:
        known &= ~self._judges_few(rows)
      if known.any():
        rounds = csv_table.column(rows, csv_table.KEY)[known]
        return rounds.astype(np.int64), values[known]
    return np.zeros([0], np.int64), np.zeros([0])

  @staticmethod
  def _judges_few(rows: list[dict[str, str]]) -> np.ndarray:
    """Tells in which rounds too few are of known class, bool [N]."""
    _, kept = metrics.count_judged(functools.partial(csv_table.column, rows))
    # Older runs do not record how many there are.
    return kept < metrics.FEWEST_JUDGED

  @property
  def num_judged(self) -> float:
    """Returns the most judged pseudo-labels of a round, or NaN if not known."""
    _, kept = metrics.count_judged(
      functools.partial(csv_table.column, self.rows[0])
    )
    return max(kept[np.isfinite(kept)].tolist(), default=math.nan)

  def used(self, x_axis: str) -> tuple[np.ndarray, np.ndarray]:
    """Sums up the use of bytes or hours: (rounds, used so far)."""
    if x_axis == 'hours':
      rounds, each = self.curve('seconds/round')
      return rounds, np.cumsum(each)
    rounds, clients = self.curve(f'{metrics.CLIENTS}/num_clients')
    each = np.zeros(len(rounds))
    for direction in ('up', 'down'):
      of, values = self.curve(f'communication/bytes_{direction}_per_client')
      # Rounds without clients send nothing.
      common = np.isin(rounds, of)
      # Bytes are recorded for each client of a round.
      each[common] += (clients * 1.0)[common] * values[np.isin(of, rounds)]
    return (rounds, np.cumsum(each)) if each.any() else (rounds[:0], each[:0])


@dataclasses.dataclass(frozen=True)
class RunGroup:
  """Runs that differ only in their seeds.

  Attributes:
    label: Text that distinguishes the group from the others.
    runs: Runs of the group.
    algorithm: The training algorithm.
    variant: The flags in the label.
  """

  label: str
  runs: tuple[Run, ...]
  algorithm: str = ''
  variant: str = ''

  def curve(
    self, column: str
  ) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
    """Computes (rounds, mean, sample standard deviation) over runs.

    Rounds are those that all runs have in common. It is None if a run lacks the
    column: a mean over some of the seeds would pass for one over all.
    """
    stacked = _stack(run.curve(column) for run in self.runs)
    if stacked is None:
      return None
    common, values = stacked
    spread = values.std(0, ddof=1) if len(values) > 1 else 0 * common
    return common, values.mean(0), spread

  def positions(self, x_axis: str) -> tuple[np.ndarray, np.ndarray] | None:
    """Averages the use over runs: (rounds, used so far), or None.

    Args:
      x_axis: 'bytes', sent and received by all clients, or 'hours', the time of
        rounds in seconds.
    """
    stacked = _stack(run.used(x_axis) for run in self.runs)
    return stacked and (stacked[0], stacked[1].mean(0))


def _stack(
  curves: Iterable[tuple[np.ndarray, np.ndarray]],
) -> tuple[np.ndarray, np.ndarray] | None:
  """Stacks the values of curves in the rounds that all of them have.

  Args:
    curves: (rounds [N], values [N]) of each, at least one.

  Returns:
    (rounds, values [curves, rounds]), or None if they have no round in common.
  """
  known = list(curves)
  common = functools.reduce(np.intersect1d, [rounds for rounds, _ in known])
  if not len(common):
    return None
  return common, np.array(
    [values[np.isin(rounds, common)] for rounds, values in known]
  )


NO_RUN = 'no run was given; give one folder or more'


class NotARunError(UsageError):
  """A path that is not a run, or a run that has nothing to show yet."""


def read_all(
  paths: Sequence[str], warn: Callable[[str], None], column: str = ''
) -> list[Run]:
  """Reads runs, and warns about paths that are not runs or have no rows yet.

  Args:
    paths: Folders, as a shell's RUNS/* gives them.
    warn: Called for each path that is skipped.
    column: A column in which each run must have values, if given.

  Returns:
    The runs, at least one.

  Raises:
    UsageError: If no run is left, or a run's files cannot be read.
  """

  def read(path: str) -> Run:
    run = read_run(path)
    if column and not len(run.curve(column)[0]):
      raise NotARunError(f'{path}: this run has no evaluation yet')
    return run

  return read_each(paths, read, warn)


def read_each(
  paths: Sequence[str], read: Callable[[str], _T], warn: Callable[[str], None]
) -> list[_T]:
  """Calls `read` for each path, and warns about those that are not runs.

  Args:
    paths: Folders, at least one.
    read: Reads a path, or raises `NotARunError`.
    warn: Called for each path that is skipped.

  Returns:
    The results of `read`, at least one.

  Raises:
    UsageError: If no path is left, or from `read`.
  """
  found, left_out = [], []
  for path in paths:
    try:
      found.append(read(path))
    except NotARunError as error:
      left_out.append(str(error))
  if not found:
    more = f' (and {len(left_out) - 1} more)' if len(left_out) > 1 else ''
    raise UsageError(f'{left_out[0]}{more}')
  for reason in left_out:
    warn(f'skipped: {reason}')
  return found


def read_run(path: str) -> Run:
  """Reads a run's folder.

  Args:
    path: The folder.

  Returns:
    The run.

  Raises:
    NotARunError: If it is not a run, or has no finished round.
    UsageError: If the run's files cannot be read.
  """
  tree = output_tree.OutputTree(path)
  if not os.path.lexists(tree.flags_file):
    raise NotARunError(
      f'{path}: is not a run (there is no {output_tree.FLAGS}); give the'
      ' --output_dir of a training run'
    )
  run = read_tree(tree)
  if not run.rows[0]:
    raise NotARunError(f'{path}: no round of this run is finished yet')
  return run


def read_tree(tree: output_tree.OutputTree) -> Run:
  """Reads a run's folder, finished or not, or raises `UsageError`."""
  paths = (tree.train_csv, tree.eval_csv, tree.timing_csv)
  return Run(
    tree.path,
    flags.read_flagfile(tree.flags_file),
    tuple(csv_table.read(p)[1] for p in paths),
    summary.read_compute(tree.compute_json),
    inputs_lib.read(tree.inputs_json),
  )


def usual_flags(algorithm: str = '') -> dict[str, str]:
  """Returns the defaults of all flags, as text.

  Args:
    algorithm: The algorithm with own defaults that are included. '' and unknown
      ones have none.

  Returns:
    Name -> text.
  """
  usual = {name: field.default for name, field in config.fields().items()}
  if algorithm in registry.REGISTRY:
    # An algorithm may have the defaults of its paper.
    usual |= registry.REGISTRY[algorithm].run_defaults
  return {name: hparams.format_value(value) for name, value in usual.items()}


def shorten(values: Iterable[str]) -> dict[str, str]:
  """Maps long values of a flag to their ends, where these tell them apart."""
  short = {v: v if len(v) <= 40 else f'{v[:16]}...{v[-16:]}' for v in values}
  counts = collections.Counter(short.values())
  return {v: s if counts[s] == 1 else v for v, s in short.items()}


def group_runs(runs: Sequence[Run]) -> list[RunGroup]:
  """Groups runs that differ only in their seeds, in order of appearance.

  A group's label has the algorithm and those flags in which groups differ,
  except flags at their defaults, which may be the algorithm's own. Of long
  values it has the ends.
  """
  # Many groups have one algorithm.
  usual_of = functools.cache(usual_flags)
  defaults = usual_of('')
  # Flags by which results do not differ, or only by chance.
  ignored = {*config.changeable_flags(), 'seed'}
  groups: dict[tuple[tuple[str, str], ...], list[Run]] = {}
  for run in runs:
    # A flag that was added after the run was made counts as its default.
    values = {**defaults, **run.flags}
    kept = {k: v for k, v in values.items() if k not in ignored}
    groups.setdefault(tuple(sorted(kept.items())), []).append(run)
  # A flag that all groups share does not tell them apart.
  counts = collections.Counter(pair for key in groups for pair in key)
  differing = {
    name for (name, _), count in counts.items() if count < len(groups)
  } - {'algorithm'}
  flags_of = [dict(key) for key in groups]
  shown = {
    name: shorten(values.get(name, '') for values in flags_of)
    for name in differing
  }
  result = []
  for values, members in zip(flags_of, groups.values()):
    algorithm = values.get('algorithm', '?')
    parts, usual = [algorithm], usual_of(algorithm)
    parts += [
      f'{name.rpartition(".")[2]}={shown[name][values[name]]}'
      for name in sorted(differing & values.keys())
      if values[name] != usual.get(name)
    ]
    seeds = f' ({len(members)} seeds)' if len(members) > 1 else ''
    result.append(
      RunGroup(
        ' '.join(parts) + seeds,
        tuple(members),
        values.get('algorithm', ''),
        ' '.join(parts[1:]),
      )
    )
  return result


@dataclasses.dataclass(frozen=True)
class Status:
  """The status of a run.

  Attributes:
    run: Its folder and its flags, without rows.
    state: One of `STATES`.
    round_num: Its last finished round, or None if there is none.
    first_round: Its first round, below 1 with pre-training.
    total_rounds: Its last round.
    last: Test accuracy of the last evaluation, if any.
    best: Test accuracy in the round that validation selects, if any.
    seconds_left: Until the last round, or None if it is not running, or not
      known.
    started: When its process began, in seconds since 1970, if it is running.
    holder: That process and its machine, or ''.
  """

  run: Run
  state: str
  round_num: int | None
  first_round: int
  total_rounds: int
  last: float | None
  best: float | None
  seconds_left: float | None
  started: float | None
  holder: str

  def json_values(self, group: str) -> dict[str, Any]:
    """Returns values for JSON.

    Args:
      group: The label of its group.
    """
    values = {
      field.name: getattr(self, field.name)
      for field in dataclasses.fields(self)
      if field.name != 'run'
    }
    seed = self.run.flags.get('seed')
    return {'path': self.run.path, 'group': group, 'seed': seed, **values}


def find_folders(
  folders: Sequence[str], warn: Callable[[str], None]
) -> list[str]:
  """Finds the folders of runs, at any depth, each once.

  The search skips folders that a run itself writes, hidden folders and links.

  Args:
    folders: Folders to search, or runs themselves.
    warn: Called for each folder that cannot be read.

  Returns:
    The folders, grouped by the given folders.

  Raises:
    UsageError: If a given folder does not exist or is none.
  """
  found: list[str] = []
  for top in folders:
    if not os.path.isdir(top):
      what = 'is not a folder' if os.path.lexists(top) else 'does not exist'
      raise UsageError(f'{top}: {what}; give folders that hold runs')
    walk = os.walk(top, onerror=lambda error: warn(str(error)))
    for folder, inner, names in walk:
      is_run = output_tree.FLAGS in names
      if is_run:
        found.append(os.path.normpath(folder))
      own = output_tree.FOLDERS if is_run else ()
      kept = [n for n in inner if not n.startswith('.') and n not in own]
      inner[:] = sorted(kept, key=_natural)
  return list(dict.fromkeys(found))


def _natural(text: str) -> list[tuple[int, str]]:
  """Sorts 'seed_2' before 'seed_10'."""
  # Python refuses to read numbers of thousands of digits.
  parts = re.split(r'(\d{1,99})', text)
  return [(int(p), '') if p.isdecimal() else (0, p) for p in parts]


def read_status(path: str, warn: Callable[[str], None]) -> Status:
  """Reads the status of a run.

  Args:
    path: Its folder.
    warn: Called for each unusable file, whose figures are then unknown.

  Returns:
    Its status.

  Raises:
    UsageError: If its flags cannot be read.
  """
  tree = output_tree.OutputTree(path)
  given = tree.read_flags()

  def attempt(read_fn: Callable[[str], Any], file: str, otherwise: Any) -> Any:
    try:
      return read_fn(file)
    except UsageError as error:
      warn(str(error))
      return otherwise

  round_num = attempt(csv_table.last_key, tree.train_csv, None)
  by = given.get('best_by', summary.ACCURACY)
  accuracies = functools.partial(_accuracies, best_by=by)
  last, best = attempt(accuracies, tree.eval_csv, (None, None))
  total = int(given.get('total_rounds', 0))
  state, holder, started, left = STOPPED, '', None, None
  if output_tree.is_held(path):
    state, (holder, started) = RUNNING, output_tree.holder(path)
    seconds = attempt(_seconds, tree.timing_csv, None)
    if seconds is not None and round_num is not None:
      left = seconds * max(0, total - round_num)
  elif os.path.lexists(tree.summary_json) and (round_num or 0) >= total:
    state = FINISHED
  return Status(
    Run(path, given, ()),
    state,
    round_num,
    1 - int(given.get('num_pretraining_rounds', 0)),
    total,
    last,
    best,
    left,
    started,
    holder,
  )


def _seconds(timing_csv: str) -> float | None:
  """Reads the mean seconds of the last rounds with their evaluations."""
  rows = csv_table.read(timing_csv)[1][-_RECENT:]
  names = ('seconds/round', 'seconds/evaluation')
  times = [csv_table.column(rows, name) for name in names]
  return float(np.nansum(times)) / len(rows) if rows else None


def _accuracies(
  eval_csv: str, best_by: str
) -> tuple[float | None, float | None]:
  """Reads test accuracy: (of the last row, of the row selected)."""
  rows = csv_table.read(eval_csv)[1]

  def accuracy(row: dict[str, str] | None) -> float | None:
    value = csv_table.number(row, _TEST_ACCURACY) if row else math.nan
    return value if math.isfinite(value) else None

  return accuracy(rows[-1] if rows else None), accuracy(
    summary.best_round(rows, best_by)
  )


def group_statuses(
  statuses: Sequence[Status],
) -> list[tuple[RunGroup, list[Status]]]:
  """Groups runs that differ only in their seeds, urgent groups first."""
  by_path = {status.run.path: status for status in statuses}
  result = []
  for group in group_runs([status.run for status in statuses]):
    members = [by_path[run.path] for run in group.runs]
    result.append((group, members))

  def order(item: tuple[RunGroup, list[Status]]) -> Any:
    group, members = item
    first = min(STATES.index(status.state) for status in members)
    return first, _natural(group.label)

  return sorted(result, key=order)


def table_lines(
  groups: Sequence[tuple[RunGroup, Sequence[Status]]],
) -> Iterator[str]:
  """Writes a table of runs and their states, in 80 columns.

  Args:
    groups: As of `group_statuses`.

  Yields:
    Lines.
  """
  rows = [[_row(status) for status in members] for _, members in groups]
  every = [row for members in rows for row in members]
  shown = [c for c in _COLUMNS if any(row[c] for row in every)]
  widths = {c: max(len(c), *(len(row[c]) for row in every)) for c in shown[1:]}
  room = console.WIDTH - sum(widths.values()) - 2 * len(widths)
  lengths = [len(row['run']) for row in every if len(row['run']) <= room]
  widths = {'run': max(lengths, default=3), **widths}
  yield _line({c: c for c in shown}, widths)
  for (group, _), members in zip(groups, rows, strict=True):
    yield ''
    heading = console.wrapped(group.label)
    # A run of another program may have any number of flags.
    more = len(heading) - _MAX_HEADING_LINES
    yield from heading[:_MAX_HEADING_LINES]
    if more > 0:
      yield f'... ({more:,} more lines of flags; --json has all)'
    for row in members:
      if len(row['run']) > widths['run']:
        # It stays in one piece, so that it can be copied.
        yield row['run']
        row = {**row, 'run': ''}
      yield _line(row, widths)
  counts = collections.Counter(row['state'] for row in every)
  known = [state for state in STATES if counts[state]]
  yield ''
  yield ', '.join(f'{counts[state]:,} {state}' for state in known)


def _row(status: Status) -> dict[str, str]:
  """Writes the cells of a run."""
  done, total = status.round_num, status.total_rounds
  if done is not None and done < 1:
    first = min(status.first_round, done)
    progress = f'pre {done + 1 - first}/{1 - first}'
  else:
    progress = f'{done or 0}/{total}'
  started = ''
  if status.started is not None:
    at = datetime.datetime.fromtimestamp(status.started)
    started = f'{at:%m-%d %H:%M}'
  return {
    'run': f'  {status.run.path}',
    'state': status.state,
    'round': progress,
    'last': _percent(status.last),
    'best': _percent(status.best),
    'left': ''
    if status.seconds_left is None
    else console.format_left(status.seconds_left),
    'started': started,
  }


def _percent(value: float | None) -> str:
  return '' if value is None else console.format_percent(value)


def _line(cells: dict[str, str], widths: dict[str, int]) -> str:
  return '  '.join(
    cells[c].ljust(width) if c in _LEFT_ALIGNED else cells[c].rjust(width)
    for c, width in widths.items()
  ).rstrip()


@dataclasses.dataclass(frozen=True)
class RunsHparams:
  """Flags of `programs/runs.py`."""

  json: bool = hparam(
    False,
    'Print one JSON array with all facts about each run.',
  )

  def __post_init__(self):
    hparams.validate(self)


@main_lib.command(_USAGE, _ABOUT, RunsHparams)
def runs_main(settings: RunsHparams, parsed: flags.ParsedFlags) -> None:
  """Lists runs and their status."""
  folders = [os.path.normpath(path) for path in parsed.positional or [_FOLDER]]
  text, warnings = _listing(folders, settings.json)
  console.show(text)
  for warning in warnings:
    main_lib.warn(warning)


def _listing(
  folders: Sequence[str], as_json: bool = False
) -> tuple[str, list[str]]:
  """Lists runs: (text, warnings)."""
  statuses: list[Status] = []
  warnings: list[str] = []
  for path in find_folders(folders, warnings.append):
    try:
      statuses.append(read_status(path, warnings.append))
    except UsageError as error:
      warnings.append(f'skipped: {error}')
  groups = group_statuses(statuses)
  if as_json:
    values = [s.json_values(group.label) for group, of in groups for s in of]
    return json.dumps(values, indent=2), warnings
  if not statuses:
    return f'There are no runs in {", ".join(folders)}.', warnings
  return '\n'.join(table_lines(groups)), warnings
