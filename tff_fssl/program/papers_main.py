"""`programs/papers.py`: the rows of the papers' tables."""

from collections.abc import Sequence
import contextlib
import dataclasses
import io
import math
import os
import re
import tempfile
from typing import Any

from tff_fssl import hparams
from tff_fssl.hparams import UsageError
from tff_fssl.hparams import hparam
from tff_fssl.program import console
from tff_fssl.program import csv_table
from tff_fssl.program import flags
from tff_fssl.program import main as main_lib
from tff_fssl.program import output_tree
from tff_fssl.program import papers
from tff_fssl.program import train_main

_USAGE = 'programs/papers.py COMMAND [ROW|PATTERN] [--FLAG=VALUE ...]'
_ABOUT = (
  "The rows of the papers' tables and figures, as runs of the training program."
  ' A ROW is PAPER/TABLE/..., such as fl2/table1/cifar10-40-iid/fl2; a PATTERN'
  " is a part of such names, or has * as a wildcard: 'fl2/*/fl2'.\n"
  'list: the tables. list PATTERN: rows, and the figures of the paper.\n'
  "show ROW: the paper's figure, our differences, the flags, our results.\n"
  'flags ROW: a flagfile, which programs/train.py takes as --flagfile.\n'
  'command ROW: the command that trains.\n'
  'hours ROW: its duration on this machine, measured by two rounds.\n'
  'run ROW: trains, or continues a stopped run.\n'
  "compare [PATTERN]: the paper's figures and our results."
)
_COMMANDS = ('list', 'compare', 'show', 'flags', 'command', 'hours', 'run')
# 'paper', 'rounds=20' or '2.5h'.
_BUDGET = re.compile(r'paper|rounds=(\d{1,8})|(\d{1,5}(?:\.\d{1,3})?)h')
# Of two rounds, the first one compiles.
_MEASURED = 2


@dataclasses.dataclass(frozen=True)
class PapersHparams:
  """Flags of `programs/papers.py`."""

  budget: str = hparam(
    papers.ALL_ROUNDS,
    'Length of the run. paper: all rounds of the paper; rounds=N: its first N;'
    ' 2h, or another number of hours: as many as fit into them. Schedules and'
    ' all else stay the same.',
  )
  compute_dtype: str = hparam(
    papers.FLOAT32,
    "The dtype of the network's computation, as for training. Runs in bfloat16"
    ' have a folder of their own, and a line of their own in comparisons.',
    choices=(papers.FLOAT32, 'bfloat16'),
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

  def rounds(self, row: papers.Row) -> int:
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
    if self.compute_dtype != papers.FLOAT32:
      more['compute_dtype'] = self.compute_dtype
    return more

  def folder(self, row: papers.Row) -> str:
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
  """Lists, times, runs and compares the rows of the papers' tables."""
  command, name = _command(parsed.positional)
  if command in ('list', 'compare'):
    if command == 'compare':
      lines = papers.compare_rows(name, settings.runs_dir, main_lib.warn)
    elif name:
      lines = papers.list_rows(papers.matching(name))
    else:
      lines = papers.overview()
    console.show('\n'.join(lines))
    return None
  row = papers.find(name)
  if command == 'run':
    return _run(row, settings)
  if command == 'show':
    text = papers.describe(row, settings.runs_dir, main_lib.warn)
  elif command == 'flags':
    more = {**settings.more(), 'total_rounds': _known_rounds(row, settings)}
    text = papers.write_flagfile(row, more)
  else:
    text = (_train_command if command == 'command' else _hours)(row, settings)
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
  if not names and command not in ('list', 'compare'):
    example = next(iter(papers.rows()))
    raise UsageError(f'{command}: give a row, such as {example}')
  return command, names[0] if names else ''


def _train_command(row: papers.Row, settings: PapersHparams) -> str:
  """Makes the command that trains as the row says."""
  rounds = _known_rounds(row, settings)
  arguments = row.arguments(_run_flags(row, settings, rounds))
  return console.command_line('train', *arguments)


def _known_rounds(row: papers.Row, settings: PapersHparams) -> int:
  """Returns the rounds of a budget, unless it is in hours."""
  if settings.hours is not None:
    raise UsageError(
      f'--budget={settings.budget}: only `run` converts hours to rounds;'
      ' give --budget=rounds=N'
    )
  return settings.rounds(row)


def _run_flags(
  row: papers.Row, settings: PapersHparams, rounds: int
) -> dict[str, Any]:
  """Returns the flags of a row's run that are not the row's."""
  return {
    **settings.more(),
    'total_rounds': rounds,
    'output_dir': settings.folder(row),
  }


def _run(row: papers.Row, settings: PapersHparams) -> int:
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


def _rounds_within(
  row: papers.Row, settings: PapersHparams, hours: float
) -> int:
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


def _hours(row: papers.Row, settings: PapersHparams) -> str:
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


def _measure(row: papers.Row, settings: PapersHparams) -> Duration:
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
