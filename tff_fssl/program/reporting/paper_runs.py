"""Shows rows of the papers' tables, and results of their runs.

The folder of a run is `papers.Row.folder`.
"""

from collections.abc import Callable, Sequence
import dataclasses
import os
import re
from typing import Any

from tff_fssl import hparams
from tff_fssl.hparams import UsageError
from tff_fssl.program import console
from tff_fssl.program.configuration import config as config_lib
from tff_fssl.program.configuration import flags
from tff_fssl.program.configuration import papers
from tff_fssl.program.reporting import compare
from tff_fssl.program.reporting import runs as runs_lib

_SEED = re.compile(r'seed\d+')
_BUDGET = re.compile(r'(paper|rounds=\d+|[\d.]+h)(?:,(bfloat16))?')


@dataclasses.dataclass(frozen=True)
class Result:
  """The outcome of the runs of a row with one budget.

  Attributes:
    budget: `papers.ALL_ROUNDS`, or the name of a smaller one.
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
  compute_dtype: str = papers.FLOAT32

  @property
  def label(self) -> str:
    """Names it: a smaller budget is never 'ours'."""
    if self.budget != papers.ALL_ROUNDS:
      return self.budget
    return 'ours' if self.rounds >= self.total_rounds else 'ours, unfinished'

  @property
  def text(self) -> str:
    """Writes '81.0 ± 2.0 % after 800 of 800 rounds, seeds 0, 1, 2'."""
    seeds = 'seed' if len(self.seeds) == 1 else 'seeds'
    is_usual = self.compute_dtype == papers.FLOAT32
    return (
      f'{self.accuracy} % after {self.rounds:,} of {self.total_rounds:,}'
      f' rounds, {seeds} {", ".join(self.seeds)}'
      f'{"" if is_usual else f", {self.compute_dtype}"}'
    )


def results(
  runs_dir: str, row: papers.Row, warn: Callable[[str], None]
) -> list[Result]:
  """Reads the results of a row's runs, the paper's budget first.

  Args:
    runs_dir: The folder of all runs of rows.
    row: The row.
    warn: Called for each run that is skipped.

  Returns:
    A result for each budget with an evaluated run.
  """
  of_row = os.path.join(runs_dir, row.name)
  found = []
  for match in sorted(
    _folders(of_row, _BUDGET), key=lambda m: (m[1] != papers.ALL_ROUNDS, m[0])
  ):
    runs, compute_dtype = [], match[2] or papers.FLOAT32
    # By length first: seed10 comes after seed9.
    seeds = _folders(os.path.join(of_row, match[0]), _SEED)
    for seed in sorted(seeds, key=lambda m: (len(m[0]), m[0])):
      path = os.path.join(of_row, match[0], seed[0])
      try:
        runs.append(_read(path, row, compute_dtype))
      except UsageError as error:
        warn(f'skipped: {error}')
    if runs:
      found.append(_result(row, match[1], compute_dtype, runs))
  return found


def _folders(path: str, names: re.Pattern[str]) -> list[re.Match[str]]:
  """Matches the names in a folder."""
  try:
    entries = os.listdir(path)
  except OSError:  # Nothing has been run.
    return []
  return [match for name in entries if (match := names.fullmatch(name))]


def _read(path: str, row: papers.Row, compute_dtype: str) -> runs_lib.Run:
  """Reads a run of the row, or raises `UsageError` without a result."""
  run = runs_lib.read_run(path)
  if not len(run.curve(compare.TEST_ACCURACY)[0]):
    raise UsageError(f'{path}: this run has no evaluation yet')
  # The place of the data does not matter, but some sets are unknown without it.
  more: dict[str, Any] = {
    name: run.flags.get(name, '') for name in ('data_dir', 'seed')
  }
  more |= {'seed': int(more['seed'] or 0), 'compute_dtype': compute_dtype}
  config = row.config(more)
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
  row: papers.Row,
  budget: str,
  compute_dtype: str,
  runs: Sequence[runs_lib.Run],
) -> Result:
  last = compare.last_common_round([runs_lib.RunGroup(row.name, tuple(runs))])
  return Result(
    budget,
    compare.mean_and_spread([_accuracy(run, row, last) for run in runs], 1),
    last,
    row.flags['total_rounds'],
    tuple(run.flags.get('seed', '?') for run in runs),
    compute_dtype,
  )


def _accuracy(run: runs_lib.Run, row: papers.Row, last_round: int) -> float:
  """Returns test accuracy in percent in the round that is reported."""
  if row.reported == papers.BEST_VALIDATION:
    return 100 * compare.best_validation(run, last_round)
  return 100 * compare.at(run, compare.TEST_ACCURACY, last_round)


def overview() -> list[str]:
  """Lists all tables."""
  tables: dict[str, list[papers.Row]] = {}
  for row in papers.rows().values():
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


def _without(rows: Sequence[papers.Row]) -> int:
  return sum(bool(row.why) for row in rows)


def list_rows(rows: Sequence[papers.Row]) -> list[str]:
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


def _mark(row: papers.Row) -> str:
  if row.why:
    return '  no'
  return '  data' if row.needs else ''


def _reported(row: papers.Row) -> str:
  """Writes the paper's figure in words."""
  if row.printed == papers.CURVE:
    return 'a curve, no figure'
  if row.printed == papers.UNKNOWN:
    return 'not known to us'
  if row.printed == papers.OURS:
    return 'none, since this table is ours'
  short = row.short_figure
  words = [f'{short} %{row.printed.removeprefix(short)}']
  if row.spread:
    words.append(f'in parentheses: {row.spread}')
  if row.reported == papers.BEST_VALIDATION:
    words.append('of the round with the best validation accuracy')
  return '; '.join(words)


def _about(row: papers.Row) -> dict[str, str]:
  """Describes a row, without its flags."""
  return {
    'of': row.title,
    'paper': _reported(row),
    **({'cannot be run': row.why} if row.why else {}),
    **({'needs': row.needs} if row.needs else {}),
    **({'differs': '; '.join(row.differs)} if row.differs else {}),
  }


def describe(
  row: papers.Row, runs_dir: str, warn: Callable[[str], None]
) -> str:
  """Describes a row: the paper, its flags, its results."""
  arguments = ' '.join(_arguments(row, {}))
  lines = [row.name, console.table({**_about(row), 'flags': arguments})]
  if not row.why:
    lines += _result_lines(row, runs_dir, warn)
  return '\n'.join(lines)


def _arguments(row: papers.Row, more: dict[str, Any]) -> list[str]:
  """Writes the row's flags that have an effect, as far as that is known."""
  try:
    return row.arguments(more)
  except UsageError:  # Its data are not there, or it cannot be run.
    # Without the data, all flags are shown, also idle ones.
    values = {**row.flags, **more}
    return flags.flagfile_text(values).splitlines()


def _result_lines(
  row: papers.Row, runs_dir: str, warn: Callable[[str], None]
) -> list[str]:
  """Shows a line for each budget with which the row has been run."""
  found = results(runs_dir, row, warn)
  return [f'  {result.label:17}{result.text}' for result in found]


def compare_rows(
  pattern: str, runs_dir: str, warn: Callable[[str], None]
) -> list[str]:
  """Compares the paper with finished runs, or raises `UsageError`."""
  lines = []
  for row in papers.matching(pattern or '*'):
    # Most rows have not been run: not worth a look.
    if not os.path.isdir(os.path.join(runs_dir, row.name)):
      continue
    if found := _result_lines(row, runs_dir, warn):
      figure = row.short_figure + (' %' if row.figure else '')
      lines += [row.name, f'  {"paper":17}{figure}', *found]
  if not lines:
    raise UsageError(
      f'nothing has been run of {pattern or "any row"} in --runs_dir='
      f'{runs_dir}; {console.command("papers")} run ROW runs a row'
    )
  return lines


def write_flagfile(row: papers.Row, more: dict[str, Any]) -> str:
  """Makes a flagfile of a row and `more` flags, with comments about it."""
  arguments = _arguments(row, more)
  about = [row.name, *(f'{k}: {v}' for k, v in _about(row).items())]
  return '\n'.join([*flags.comments(about), *arguments])
