"""Finds runs and reads their status."""

import collections
from collections.abc import Callable, Iterator, Sequence
import dataclasses
import datetime
import os
import re
from typing import Any

import numpy as np

from tff_fssl import files
from tff_fssl.hparams import UsageError
from tff_fssl.program import console
from tff_fssl.program import csv_table
from tff_fssl.program import output_tree
from tff_fssl.program import runs as runs_lib
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

  run: runs_lib.Run
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


def find(folders: Sequence[str], warn: Callable[[str], None]) -> list[str]:
  """Finds the folders of runs, at any depth, each once.

  Links are followed. The search skips folders that a run itself writes and
  hidden folders.

  Args:
    folders: Folders to search, or runs themselves.
    warn: Called for each folder that cannot be read.

  Returns:
    The folders, grouped by the given folders.

  Raises:
    UsageError: If a given folder does not exist or is none.
  """
  for folder in folders:
    if not os.path.isdir(folder):
      what = 'is not a folder' if os.path.lexists(folder) else 'does not exist'
      raise UsageError(f'{folder}: {what}; give folders that hold runs')
  # Links can lead in circles: a folder is known by its device and inode.
  found, seen, todo = [], set(), list(folders)[::-1]
  while todo:
    folder = todo.pop()
    try:
      about = os.stat(folder)
      entries = [] if (about.st_dev, about.st_ino) in seen else _scan(folder)
    except OSError as error:
      warn(f'{folder}: {files.reason_of(error)}')
      continue
    seen.add((about.st_dev, about.st_ino))
    is_run = any(name == output_tree.FLAGS for name, _ in entries)
    if is_run:
      found.append(folder)
    inner = [
      os.path.normpath(os.path.join(folder, name))
      for name, is_folder in entries
      if is_folder
      and not name.startswith('.')
      and not (is_run and name in output_tree.FOLDERS)
    ]
    todo += sorted(inner, key=_natural, reverse=True)
  return found


def _scan(folder: str) -> list[tuple[str, bool]]:
  with os.scandir(folder) as entries:
    return [(entry.name, _is_folder(entry)) for entry in entries]


def _is_folder(entry: os.DirEntry[str]) -> bool:
  try:
    return entry.is_dir()
  except OSError:  # A link that leads back to itself.
    return False


def _natural(text: str) -> list[tuple[int, str]]:
  """Sorts 'seed_2' before 'seed_10'."""
  # Python refuses to read numbers of thousands of digits.
  parts = re.split(r'(\d{1,99})', text)
  return [(int(p), '') if p.isdecimal() else (0, p) for p in parts]


def read(path: str, warn: Callable[[str], None]) -> Status:
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
  last, best = attempt(_accuracies, tree.eval_csv, (None, None))
  total = _whole(given.get('total_rounds'))
  state, holder, started, left = STOPPED, '', None, None
  if output_tree.is_held(path):
    state, (holder, started) = RUNNING, output_tree.holder(path)
    seconds = attempt(_seconds, tree.timing_csv, None)
    if seconds is not None and round_num is not None:
      left = seconds * max(0, total - round_num)
  elif os.path.lexists(tree.summary_json) and (round_num or 0) >= total:
    state = FINISHED
  return Status(
    runs_lib.Run(path, given, ()),
    state,
    round_num,
    1 - _whole(given.get('num_pretraining_rounds')),
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


def _accuracies(eval_csv: str) -> tuple[float | None, float | None]:
  """Reads test accuracy: (of the last row, of the row selected)."""
  rows = csv_table.read(eval_csv)[1]
  chosen = summary.best_round(rows)
  last = csv_table.number(rows[-1], _TEST_ACCURACY) if rows else None
  best = csv_table.number(chosen, _TEST_ACCURACY) if chosen else None
  return _number(last), _number(best)


def _number(value: Any) -> float | None:
  # The file may be damaged: NaN and huge numbers are not shown.
  is_number = isinstance(value, int | float) and abs(value) < 1e12
  return float(value) if is_number else None


def _whole(text: str | None) -> int:
  try:
    return int(text or 0)
  except ValueError:
    return 0


def group_statuses(
  statuses: Sequence[Status],
) -> list[tuple[runs_lib.RunGroup, list[Status]]]:
  """Groups runs that differ only in their seeds, urgent groups first."""
  by_path = {status.run.path: status for status in statuses}
  result = []
  for group in runs_lib.group_runs([status.run for status in statuses]):
    members = [by_path[run.path] for run in group.runs]
    result.append((group, members))

  def order(item: tuple[runs_lib.RunGroup, list[Status]]) -> Any:
    group, members = item
    first = min(STATES.index(status.state) for status in members)
    return first, _natural(group.label)

  return sorted(result, key=order)


def table_lines(
  groups: Sequence[tuple[runs_lib.RunGroup, Sequence[Status]]],
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
