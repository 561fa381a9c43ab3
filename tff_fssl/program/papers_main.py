"""`programs/papers.py`: the rows of the papers' tables."""

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import dataclasses
import fnmatch
import functools
import io
import itertools
import math
import os
import re
import shlex
import tempfile
from typing import Any

from tff_fssl import files
from tff_fssl import hparams
from tff_fssl.algorithms import registry
from tff_fssl.hparams import UsageError
from tff_fssl.hparams import closest
from tff_fssl.hparams import hparam
from tff_fssl.program import compare
from tff_fssl.program import config as config_lib
from tff_fssl.program import console
from tff_fssl.program import csv_table
from tff_fssl.program import flags
from tff_fssl.program import main as main_lib
from tff_fssl.program import output_tree
from tff_fssl.program import runs as runs_lib
from tff_fssl.program import train_main

# Which round's test accuracy a paper reports.
LAST, BEST_VALIDATION, BEST_TEST = 'last', 'best_validation', 'best_test'
# The rounds that are reported, in words.
_REPORTED = {
  BEST_VALIDATION: 'of the round with the best validation accuracy',
  BEST_TEST: 'of the best round on the test set, which overstates',
}
# What stands for a figure: it is only drawn, it is not known to us, or the row
# is ours.
CURVE, UNKNOWN, OURS = 'curve', '?', 'ours'
# The name of the paper's budget, the dtype of all papers, and those of runs.
ALL_ROUNDS, FLOAT32 = 'paper', 'float32'
DTYPES = (FLOAT32, 'bfloat16')

# A mean, perhaps its spread in parentheses, perhaps words.
_FIGURE = re.compile(r'(\d+\.?\d*)(?:\((\d+\.?\d*)\))?(?: (.+))?')
_NOTES = ('differs', 'needs', 'why')
# Folders of runs, as `Row.folder` names them.
_SEED = re.compile(r'seed\d+')
_BUDGET_FOLDER = re.compile(r'(paper|rounds=\d+|[\d.]+h)(?:,(bfloat16))?')
_USAGE = 'programs/papers.py COMMAND [ROW|PATTERN] [--FLAG=VALUE ...]'
_ABOUT = (
  "The rows of the papers' tables and figures, as runs of the training program."
  ' A ROW is PAPER/TABLE/..., such as fl2/table1/cifar10-40-iid/fl2; a PATTERN'
  " is a part of such names, or has * as a wildcard: 'fl2/*/fl2'.\n"
  'list: the tables. list PATTERN: rows, and the figures of the paper.\n'
  "show ROW: the paper's figure, our differences, the flags, our results.\n"
  'flags ROW: a flagfile, which programs/train.py takes as --flagfile.\n'
  'hours ROW: its duration on this machine, measured by two rounds.\n'
  'run ROW: trains, or continues a stopped run.'
)
_COMMANDS = ('list', 'show', 'flags', 'hours', 'run')
# 'paper', 'rounds=20' or '2.5h'.
_BUDGET = re.compile(r'paper|rounds=(\d{1,8})|(\d{1,5}(?:\.\d{1,3})?)h')
# Of two rounds, the first one compiles.
_MEASURED = 2


@dataclasses.dataclass(frozen=True)
class Row:
  """A row of a table: one run of the paper, over seeds.

  Attributes:
    name: 'PAPER/TABLE/...'.
    title: The subject of the table.
    flags: The flags that the row sets, by name.
    printed: Its figure as the paper prints it, or `CURVE`, `UNKNOWN`, `OURS`.
    spread: The meaning of the figure in parentheses, or ''.
    reported: `LAST`, `BEST_VALIDATION` or `BEST_TEST`.
    differs: The differences from the paper's run.
    needs: The data that it needs and no program fetches, or ''.
    why: The reason why it cannot be run, or ''.
  """

  name: str
  title: str
  flags: dict[str, Any]
  printed: str
  spread: str
  reported: str
  differs: tuple[str, ...] = ()
  needs: str = ''
  why: str = ''

  @property
  def table(self) -> str:
    """Returns the name of its table, 'PAPER/TABLE'."""
    return '/'.join(self.name.split('/')[:2])

  @property
  def figure(self) -> tuple[float, float | None] | None:
    """Returns (mean, spread or None) in percent, if it is a number."""
    match = _FIGURE.fullmatch(self.printed)
    if match is None:
      return None
    return float(match[1]), None if match[2] is None else float(match[2])

  @property
  def short_figure(self) -> str:
    """Returns the figure without the words that follow it."""
    match = _FIGURE.fullmatch(self.printed)
    return self.printed.removesuffix(f' {match[3]}') if match else self.printed

  def config(self, more: Mapping[str, Any] | None = None) -> config_lib.Config:
    """Builds the configuration of the row's run.

    Args:
      more: Flags that take precedence over the row's.

    Returns:
      The configuration.

    Raises:
      UsageError: If the row cannot be run, or its data set has to be looked at
        and is not there.
    """
    if self.why:
      raise UsageError(f'{self.name}: cannot be run: {self.why}')
    given = {**self.flags, **(more or {})}
    parsed = flags.parse(flags.arguments(given), config_lib.groups())
    return config_lib.build_config(parsed.mark_recorded(self.name))

  def arguments(self, more: Mapping[str, Any] | None = None) -> list[str]:
    """Writes the row's arguments of the training program with an effect.

    Args:
      more: Flags that take precedence over the row's.

    Returns:
      '--NAME=VALUE' for each, in the order of `--help`.

    Raises:
      UsageError: As from `config`.
    """
    has_effect = self.config(more).flags()
    given = {**self.flags, **(more or {})}
    return flags.arguments({n: given[n] for n in has_effect if n in given})

  def folder(
    self, runs_dir: str, budget: str, seed: int, compute_dtype: str = FLOAT32
  ) -> str:
    """Returns the folder of a run of the row.

    Args:
      runs_dir: The folder of all runs of rows.
      budget: `ALL_ROUNDS`, or the name of a smaller budget.
      seed: Its seed.
      compute_dtype: The type in which the network computes.

    Returns:
      RUNS_DIR/PAPER/TABLE/.../BUDGET/seedN, or, if it does not compute in
      float32, RUNS_DIR/PAPER/TABLE/.../BUDGET,bfloat16/seedN.
    """
    if compute_dtype != FLOAT32:
      budget = f'{budget},{compute_dtype}'
    return os.path.join(runs_dir, self.name, budget, f'seed{seed}')


def names() -> list[str]:
  """Lists the papers: the files configs/papers/NAME.toml, in order."""
  files_here = os.listdir(flags.config_path('papers'))
  return sorted(
    n.removesuffix('.toml') for n in files_here if n.endswith('.toml')
  )


@functools.cache
def rows() -> dict[str, Row]:
  """Reads all rows, by name, in the order of the files.

  Returns:
    The rows.

  Raises:
    UsageError: If a file cannot be read.
  """
  return {row.name: row for paper in names() for row in _read_paper(paper)}


def matching(pattern: str) -> list[Row]:
  """Finds the rows with names that match a pattern.

  Args:
    pattern: A pattern as for file names ('fl2/table1/*'), or a part of a name.

  Returns:
    The rows, at least one.

  Raises:
    UsageError: If there is none.
  """
  glob = pattern if set(pattern) & set('*?[') else f'*{pattern}*'
  found = [r for name, r in rows().items() if fnmatch.fnmatchcase(name, glob)]
  if not found:
    tables = {row.table for row in rows().values()}
    raise UsageError(
      f'{pattern!r}: no row of a table has such a name'
      f'{closest(pattern, [*rows(), *tables])}'
    )
  return found


def find(name: str) -> Row:
  """Finds the row of a name, or raises `UsageError` if there is none."""
  row = rows().get(name.strip('/'))
  if row is None:
    parts = [n for n in rows() if name.strip('/') and name.strip('/') in n]
    hint = f'; those are e.g. {", ".join(parts[:2])}' if parts else ''
    raise UsageError(
      f'{name!r}: is not the name of a row{hint or closest(name, rows())}'
    )
  return row


def _read_paper(paper: str) -> Iterator[Row]:
  """Reads the rows of a file."""
  path = flags.config_path(f'papers/{paper}.toml')
  content = files.read_toml(path)
  for table in content['tables']:
    yield from _make_rows(paper, content, table)


def _make_rows(
  paper_name: str, paper: Mapping[str, Any], table_name: str
) -> Iterator[Row]:
  """Makes the rows of a table, given the content of the file."""
  table = paper['tables'][table_name]
  axes = {
    axis: {v: paper['axes'][axis][v] for v in values}
    if isinstance(values, list)
    else values
    for axis, values in table['axes'].items()
  }
  for values in itertools.product(*axes.values()):
    printed = _cell(table['figures'], axes, values)
    if not printed:
      continue
    row = table['row'].format(**dict(zip(axes, values)))
    name = f'{table_name}/{row}'
    layers = [
      paper,
      table,
      *(_layer(axes[axis][value]) for axis, value in zip(axes, values)),
      *(
        _layer(rule)
        for rule in paper.get('rules', ())
        if any(fnmatch.fnmatchcase(name, glob) for glob in rule['rows'])
      ),
    ]
    notes = {
      # Long texts are wrapped in the file.
      kind: [' '.join(layer[kind].split()) for layer in layers if kind in layer]
      for kind in _NOTES
    }
    yield Row(
      f'{paper_name}/{name}',
      table['title'],
      _flags(layers),
      printed,
      table.get('spread', paper['spread']) if '(' in printed else '',
      paper['reported'],
      tuple(notes['differs']),
      *(notes[kind][-1] if notes[kind] else '' for kind in ('needs', 'why')),
    )


def _cell(
  figures: Any, axes: Mapping[str, Mapping[str, Any]], values: Sequence[str]
) -> str:
  """Finds a row's figure: by its axes' values, the last one's by place."""
  # Nested tables by name, and a list for the last axis.
  *outer, last = values
  for value in outer:
    if isinstance(figures, dict):
      figures = figures.get(value, {})
  if isinstance(figures, str):  # The same for all values of the other axes.
    return figures
  place = list(list(axes.values())[-1]).index(last)
  return figures[place] if figures else ''


def _layer(values: Mapping[str, Any]) -> dict[str, Any]:
  """Splits a value of an axis, or a rule, into flags and notes."""
  said = {n: v for n, v in values.items() if n in _NOTES}
  other = {n: v for n, v in values.items() if n not in (*_NOTES, 'rows')}
  return {**said, 'flags': other}


def _flags(layers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
  """Merges the flags of a row, without those of other algorithms."""
  given: dict[str, Any] = {}
  for layer in layers:
    given |= flags.flatten(layer.get('flags', {}))
  algorithm = given.get('algorithm')
  if algorithm not in registry.REGISTRY:
    return {n: v for n, v in given.items() if '.' not in n}
  prefix = registry.REGISTRY[algorithm].prefix
  foreign = config_lib.foreign_flags(algorithm)
  return {
    n: v
    for n, v in given.items()
    if '.' not in n or (n.startswith(prefix) and n not in foreign)
  }


@dataclasses.dataclass(frozen=True)
class Result:
  """The outcome of the runs of a row with one budget.

  Attributes:
    budget: `ALL_ROUNDS`, or the name of a smaller one.
    accuracy: Test accuracy in percent: the mean, and over several seeds the
      sample standard deviation.
    rounds: The last round that all runs have evaluated.
    total_rounds: The rounds of the paper.
    seeds: Their seeds.
    compute_dtype: The type in which the network computes.
  """

  budget: str
  accuracy: str
  rounds: int
  total_rounds: int
  seeds: tuple[str, ...]
  compute_dtype: str = FLOAT32

  @property
  def label(self) -> str:
    """Names it: a smaller budget is never 'ours'."""
    if self.budget != ALL_ROUNDS:
      return self.budget
    return 'ours' if self.rounds >= self.total_rounds else 'ours, unfinished'

  @property
  def text(self) -> str:
    """Writes '81.0 ± 2.0 % after 800 of 800 rounds, seeds 0, 1, 2'."""
    seeds = 'seed' if len(self.seeds) == 1 else 'seeds'
    is_usual = self.compute_dtype == FLOAT32
    return (
      f'{self.accuracy} % after {self.rounds:,} of {self.total_rounds:,}'
      f' rounds, {seeds} {", ".join(self.seeds)}'
      f'{"" if is_usual else f", {self.compute_dtype}"}'
    )


def runs_of(
  runs_dir: str, row: Row, warn: Callable[[str], None]
) -> Iterator[tuple[str, str, list[runs_lib.Run]]]:
  """Reads the evaluated runs of a row.

  Args:
    runs_dir: The folder of all runs of rows.
    row: The row.
    warn: Called for each run that is skipped.

  Yields:
    A budget, a compute dtype, and the runs of both in the order of their seeds.
    The paper's budget comes first.
  """
  of_row = os.path.join(runs_dir, row.name)
  for match in sorted(
    _folders(of_row, _BUDGET_FOLDER), key=lambda m: (m[1] != ALL_ROUNDS, m[0])
  ):
    found, compute_dtype = [], match[2] or FLOAT32
    # By length first: seed10 comes after seed9.
    seeds = _folders(os.path.join(of_row, match[0]), _SEED)
    for seed in sorted(seeds, key=lambda m: (len(m[0]), m[0])):
      path = os.path.join(of_row, match[0], seed[0])
      try:
        found.append(_read(path, row, compute_dtype))
      except UsageError as error:
        warn(f'skipped: {error}')
    if found:
      yield match[1], compute_dtype, found


def results(
  runs_dir: str, row: Row, warn: Callable[[str], None]
) -> list[Result]:
  """Summarizes a row's runs, as `runs_of` yields them: one result a budget."""
  return [_result(row, *found) for found in runs_of(runs_dir, row, warn)]


def _folders(path: str, names: re.Pattern[str]) -> list[re.Match[str]]:
  """Matches the names in a folder."""
  try:
    entries = os.listdir(path)
  except OSError:  # Nothing has been run.
    return []
  return [match for name in entries if (match := names.fullmatch(name))]


def _read(path: str, row: Row, compute_dtype: str) -> runs_lib.Run:
  """Reads a run of the row, or raises `UsageError` without a result."""
  run = runs_lib.read_run(path)
  if not len(run.curve(compare.TEST_ACCURACY)[0]):
    raise UsageError(f'{path}: this run has no evaluation yet')
  # The place of the data does not matter, but some sets are unknown without it.
  more = {name: run.flags.get(name, '') for name in ('data_dir', 'seed')}
  config = row.config({**more, 'compute_dtype': compute_dtype})
  now = {n: hparams.format_value(value) for n, value in config.flags().items()}
  # The row may have been corrected since the run was made.
  differing, _ = config_lib.differences(run.flags, now)
  if differing:
    raise UsageError(
      f'{path}: this run is not of the row as it is now (--{differing[0]}'
      ' differs)'
    )
  return run


def _result(
  row: Row,
  budget: str,
  compute_dtype: str,
  runs: Sequence[runs_lib.Run],
) -> Result:
  last = compare.last_common_round([runs_lib.RunGroup(row.name, tuple(runs))])
  return Result(
    budget,
    compare.mean_and_spread([accuracy(run, row, last) for run in runs], 1),
    last,
    row.flags['total_rounds'],
    tuple(run.flags.get('seed', '?') for run in runs),
    compute_dtype,
  )


def accuracy(run: runs_lib.Run, row: Row, last_round: int) -> float:
  """Returns test accuracy in percent in the round that the paper reports."""
  if row.reported == BEST_VALIDATION:
    return 100 * compare.best_validation(run, last_round)
  if row.reported == BEST_TEST:
    rounds, values = run.curve(compare.TEST_ACCURACY)
    return 100 * float(values[rounds <= last_round].max())
  return 100 * compare.value_at(run, compare.TEST_ACCURACY, last_round)


def overview() -> list[str]:
  """Lists all tables."""
  tables: dict[str, list[Row]] = {}
  for row in rows().values():
    tables.setdefault(row.table, []).append(row)
  width = max(map(len, tables))
  counts = {
    f'{name:{width}}  {len(rows):2}': rows[0].title
    + (f' ({without} cannot be run)' if (without := _without(rows)) else '')
    for name, rows in tables.items()
  }
  program = console.command('papers')
  return [
    'Tables and figures, with the number of their rows:',
    console.table(counts),
    '',
    f"{program} list PATTERN lists rows ('*': all),",
    f'{program} show ROW explains one.',
  ]


def _without(rows: Sequence[Row]) -> int:
  return sum(bool(row.why) for row in rows)


def list_rows(rows: Sequence[Row]) -> list[str]:
  """Shows a line for each row: name, figure, and whether it can be run."""
  width = max(len(row.name) for row in rows)
  lines = [
    f'{row.name:{width}}  {row.short_figure:>11}{_mark(row)}' for row in rows
  ]
  notes = []
  if _without(rows):
    notes.append('no: cannot be run; `show` says why.')
  if any(row.needs for row in rows):
    notes.append('data: needs data that no program fetches; `show` says which.')
  return [*lines, *([''] if notes else []), *notes]


def _mark(row: Row) -> str:
  if row.why:
    return '  no'
  return '  data' if row.needs else ''


def _reported(row: Row) -> str:
  """Writes the paper's figure in words."""
  if row.printed == CURVE:
    return 'a curve, no figure'
  if row.printed == UNKNOWN:
    return 'not known to us'
  if row.printed == OURS:
    return 'none: the row is ours'
  short = row.short_figure
  words = [f'{short} %{row.printed.removeprefix(short)}']
  if row.spread:
    words.append(f'in parentheses: {row.spread}')
  if row.reported in _REPORTED:
    words.append(_REPORTED[row.reported])
  return '; '.join(words)


def _about(row: Row) -> dict[str, str]:
  """Describes a row, without its flags."""
  return {
    'of': row.title,
    'paper': _reported(row),
    **({'cannot be run': row.why} if row.why else {}),
    **({'needs': row.needs} if row.needs else {}),
    **({'differs': '; '.join(row.differs)} if row.differs else {}),
  }


def describe(row: Row, runs_dir: str, warn: Callable[[str], None]) -> str:
  """Describes a row: the paper, its flags, its results."""
  arguments = shlex.join(_arguments(row, {}))
  lines = [row.name, console.table({**_about(row), 'flags': arguments})]
  if not row.why:
    found = results(runs_dir, row, warn)
    lines += [f'  {result.label:17}{result.text}' for result in found]
  return '\n'.join(lines)


def _arguments(row: Row, more: dict[str, Any]) -> list[str]:
  """Writes the row's flags that have an effect, as far as that is known."""
  try:
    return row.arguments(more)
  except UsageError:  # Its data are not there, or it cannot be run.
    # Without the data, all flags are shown, also idle ones.
    values = {**row.flags, **more}
    return flags.flagfile_text(values).splitlines()


def write_flagfile(row: Row, more: dict[str, Any]) -> str:
  """Makes a flagfile of a row and `more` flags, with comments about it."""
  arguments = _arguments(row, more)
  about = [row.name, *(f'{k}: {v}' for k, v in _about(row).items())]
  return '\n'.join([*flags.comments(about), *arguments])


@dataclasses.dataclass(frozen=True)
class PapersHparams:
  """Flags of `programs/papers.py`."""

  budget: str = hparam(
    ALL_ROUNDS,
    'Length of the run. paper: all rounds of the paper; rounds=N: its first N;'
    ' 2h, or another number of hours: as many as fit into them. Schedules and'
    ' all else stay the same.',
  )
  compute_dtype: str = hparam(
    FLOAT32,
    "The dtype of the network's computation, as for training. Runs in bfloat16"
    ' have a folder of their own, and a line of their own in comparisons.',
    choices=DTYPES,
  )
  seed: int = hparam(0, 'Seed of the run.', minimum=0, maximum=2**31 - 1)
  data_dir: str = hparam('', "The data's folder, as for training.")
  cache_dir: str = hparam('', 'Folder of decoded images, as for training.')
  runs_dir: str = hparam(
    os.path.join('runs', 'papers'),
    'The folder of the runs, each in ROW/BUDGET/seedN.',
  )

  def __post_init__(self):
    hparams.validate(self)
    match = _BUDGET.fullmatch(self.budget)
    if not match or not float(match[1] or match[2] or 1):
      raise UsageError(
        f'--budget={self.budget}: must be paper, a number of hours such as 2h,'
        ' or a number of rounds such as rounds=20'
      )

  @property
  def hours(self) -> float | None:
    """Returns the hours of `budget`, if it is in hours."""
    match = _BUDGET.fullmatch(self.budget)
    return float(match[2]) if match and match[2] else None

  def rounds(self, row: Row) -> int:
    """Returns the rounds of `budget`, unless it is in hours."""
    total = row.flags['total_rounds']
    match = _BUDGET.fullmatch(self.budget)
    if not match or not match[1]:
      return total
    if int(match[1]) > total:
      raise UsageError(
        f'--budget={self.budget}: the paper has {total} rounds; give fewer, or'
        ' --budget=paper'
      )
    return int(match[1])

  def more(self) -> dict[str, Any]:
    """Returns the flags that a run takes from these."""
    places = {'data_dir': self.data_dir, 'cache_dir': self.cache_dir}
    more = {**{n: v for n, v in places.items() if v}, 'seed': self.seed}
    if self.compute_dtype != FLOAT32:
      more['compute_dtype'] = self.compute_dtype
    return more

  def folder(self, row: Row) -> str:
    """Returns the folder of the row's run."""
    return row.folder(self.runs_dir, self.budget, self.seed, self.compute_dtype)


@dataclasses.dataclass(frozen=True)
class Duration:
  """The duration of a row, in seconds.

  Attributes:
    pretraining: A round of server pre-training.
    round: A round.
    evaluation: An evaluation.
  """

  pretraining: float
  round: float
  evaluation: float


@main_lib.command(_USAGE, _ABOUT, PapersHparams)
def papers_main(
  settings: PapersHparams, parsed: flags.ParsedFlags
) -> int | None:
  """Lists, explains, times and runs the rows of the papers' tables."""
  command, name = _command(parsed.positional)
  if command == 'list':
    text = '\n'.join(list_rows(matching(name)) if name else overview())
    console.show(text)
    return None
  row = find(name)
  if command == 'run':
    return _run(row, settings)
  if command == 'show':
    text = describe(row, settings.runs_dir, main_lib.warn)
  elif command == 'flags':
    more = {**settings.more(), 'total_rounds': _known_rounds(row, settings)}
    text = write_flagfile(row, more)
  else:
    text = _hours(row, settings)
  console.show(text)
  return None


def _command(given: Sequence[str]) -> tuple[str, str]:
  """Splits the arguments into (command, row or pattern)."""
  allowed = f'{", ".join(_COMMANDS)} (--help explains them)'
  if not given:
    raise UsageError(f'no command was given; give one of {allowed}')
  command, *names = given
  if command not in _COMMANDS:
    raise UsageError(
      f'{command!r} is not a command; there are {allowed}'
      f'{hparams.closest(command, _COMMANDS)}'
    )
  if len(names) > 1:
    raise UsageError(f'{names[1]!r}: give one name only')
  if not names and command != 'list':
    example = next(iter(rows()))
    raise UsageError(f'{command}: give a row, such as {example}')
  return command, names[0] if names else ''


def _known_rounds(row: Row, settings: PapersHparams) -> int:
  """Returns the rounds of a budget, unless it is in hours."""
  if settings.hours is not None:
    raise UsageError(
      f'--budget={settings.budget}: only `run` converts hours to rounds;'
      ' give --budget=rounds=N'
    )
  return settings.rounds(row)


def _run_flags(
  row: Row, settings: PapersHparams, rounds: int
) -> dict[str, Any]:
  """Returns the flags of a row's run that are not the row's."""
  return {
    **settings.more(),
    'total_rounds': rounds,
    'output_dir': settings.folder(row),
  }


def _run(row: Row, settings: PapersHparams) -> int:
  """Trains as the row says, or continues, and returns the exit code."""
  rounds = settings.rounds(row)
  tree = output_tree.OutputTree(settings.folder(row))
  if settings.hours is not None:
    # A run that has begun keeps its number of rounds.
    if os.path.lexists(tree.flags_file):
      rounds = int(tree.read_flags()['total_rounds'])
    else:
      rounds = _rounds_within(row, settings, settings.hours)
  return train_main.train_main(row.arguments(_run_flags(row, settings, rounds)))


def _rounds_within(row: Row, settings: PapersHparams, hours: float) -> int:
  """Counts the rounds that fit into hours, at most the paper's."""
  console.show('Measuring two rounds ...', flush=True)
  config, duration = row.config(settings.more()), _measure(row, settings)
  rounds = math.floor(
    (3600 * hours - duration.pretraining * (1 - config.first_round))
    / (duration.round + duration.evaluation / config.run.rounds_per_evaluation)
  )
  if rounds < 1:
    raise UsageError(
      f'--budget={settings.budget}: not even one round fits, which takes'
      f' {console.format_seconds(duration.round)}; give more hours'
    )
  return min(rounds, config.run.total_rounds)


def _hours(row: Row, settings: PapersHparams) -> str:
  """Measures the time that the row takes on this machine."""
  rounds, config = _known_rounds(row, settings), row.config(settings.more())
  duration = _measure(row, settings)
  pretraining = 1 - config.first_round
  evaluations = math.ceil(rounds / config.run.rounds_per_evaluation)
  parts = {
    'rounds': (rounds, duration.round),
    'pre-training': (pretraining, duration.pretraining),
    'evaluations': (evaluations, duration.evaluation),
  }
  rows = {
    name: f'{console.format_seconds(count * each)}: {count:,} of'
    f' {console.format_seconds(each)}'
    for name, (count, each) in parts.items()
    if count
  }
  total = sum(count * each for count, each in parts.values())
  rows['in all'] = console.format_seconds(total)
  return f'{row.name}, by two rounds on this machine:\n{console.table(rows)}'


def _measure(row: Row, settings: PapersHparams) -> Duration:
  """Runs two rounds in a folder that is then removed."""
  pretraining = 1 - row.config(settings.more()).first_round
  with tempfile.TemporaryDirectory(prefix='tff_fssl_') as folder:
    tree = output_tree.OutputTree(os.path.join(folder, 'run'))
    arguments = row.arguments(
      {
        **settings.more(),
        'total_rounds': _MEASURED,
        'rounds_per_evaluation': _MEASURED,
        'num_pretraining_rounds': min(pretraining, _MEASURED),
        'output_dir': tree.path,
        'progress': 'none',
        'tensorboard': False,
      }
    )
    # The user asked for a duration, not for a run's messages.
    with contextlib.redirect_stdout(io.StringIO()):
      code = train_main.train_main(arguments)
    if code != main_lib.DONE:
      raise UsageError(
        f'{row.name}: two rounds could not be measured (exit code {code})'
      )
    rows = csv_table.read(tree.timing_csv)[1]

  def last(column: str, is_round: bool) -> float:
    values = [
      csv_table.number(timing, column)
      for timing in rows
      if (csv_table.number(timing, csv_table.KEY) > 0) == is_round
    ]
    # The last of its kind: the first one also compiles.
    known = [value for value in values if math.isfinite(value)]
    return known[-1] if known else 0.0

  return Duration(
    last('seconds/round', False),
    last('seconds/round', True),
    last('seconds/evaluation', True),
  )
