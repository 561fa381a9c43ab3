"""Finds runs and reads their status."""

import collections
from collections.abc import Callable, Iterator, Sequence
import dataclasses
import datetime
import os
import re
import time
from typing import Any

from tff_fssl import files
from tff_fssl.hparams import UsageError
from tff_fssl.program import console
from tff_fssl.program import training_types
from tff_fssl.program.reporting import runs as runs_lib
from tff_fssl.program.storage import csv_table
from tff_fssl.program.storage import heartbeat
from tff_fssl.program.storage import output_tree
from tff_fssl.program.storage import summary

UNKNOWN = 'unknown'
# The first are those to look at first.
STATES = (
  heartbeat.RUNNING,
  heartbeat.DEAD,
  heartbeat.FAILED,
  heartbeat.STOPPED,
  UNKNOWN,
  heartbeat.FINISHED,
)
_TEST_ACCURACY = 'test/accuracy'
_NOTES = {
  heartbeat.DEAD: 'the process is gone; the command of the run continues it',
  UNKNOWN: 'not all rounds are done, and no readable heartbeat.json says more',
}
_COLUMNS = ('run', 'state', 'round', 'last', 'best', 'left', 'started')
_LEFT_ALIGNED = ('run', 'state')
_MAX_HEADING_LINES = 3


@dataclasses.dataclass(frozen=True)
class Status:
  """The status of a run.

  Attributes:
    run: Its folder and its flags, without rows.
    state: One of `STATES`.
    phase: Its phase, one of `training_types.PHASES`, or '' if not known.
    round_num: Its last finished round, or None if there is none.
    first_round: Its first round, below 1 with pre-training.
    total_rounds: Its last round.
    last: Test accuracy of the last evaluation, if any.
    best: Test accuracy in the round that validation selects, if any.
    seconds_left: Until the end of the rounds, of pre-training or of an export,
      or None if not known.
    started: When its process began, in seconds since 1970, or None if not
      known.
    host: The machine of its last process, or '' if not known.
    pid: The number of that process, or None if not known.
  """

  run: runs_lib.Run
  state: str
  phase: str
  round_num: int | None
  first_round: int
  total_rounds: int
  last: float | None
  best: float | None
  seconds_left: float | None
  started: float | None
  host: str
  pid: int | None

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

  beat = attempt(heartbeat.read, tree.heartbeat_json, None) or {}
  round_num = attempt(csv_table.last_key, tree.train_csv, None)
  last, best = attempt(_accuracies, tree.eval_csv, (None, None))
  total = _whole(given.get('total_rounds'))
  # Runs of older versions have no heartbeat.
  state = beat.get('state')
  if state is None:
    done = total and round_num is not None and round_num >= total
    state = heartbeat.FINISHED if done else UNKNOWN
  left = _number(beat.get('seconds_left'))
  if state != heartbeat.RUNNING:
    left = None
  elif left is not None:
    # The heartbeat is up to ten seconds old.
    left = max(0.0, left - (time.time() - beat['beat']))
  return Status(
    runs_lib.Run(path, given, ()),
    state,
    str(beat.get('phase', '')) if state == heartbeat.RUNNING else '',
    round_num,
    1 - _whole(given.get('num_pretraining_rounds')),
    total,
    last,
    best,
    left,
    _number(beat.get('started')),
    str(beat.get('host', '')),
    beat.get('pid'),
  )


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
  for state in known:
    if state in _NOTES:
      yield from console.wrapped(f'{state}: {_NOTES[state]}')


def _row(status: Status) -> dict[str, str]:
  """Writes the cells of a run."""
  done, total = status.round_num, status.total_rounds
  if done is not None and done < 1:
    first = min(status.first_round, done)
    progress = f'pre {done + 1 - first}/{1 - first}'
  else:
    progress = f'{done or 0}/{total}'
  left = []
  if status.phase in (training_types.STARTING, training_types.EXPORTING):
    left.append(status.phase)
  if status.seconds_left is not None and (status.seconds_left or not left):
    left.append(console.format_left(status.seconds_left))
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
    'left': ' '.join(left),
    'started': started,
  }


def _percent(value: float | None) -> str:
  return '' if value is None else console.format_percent(value)


def _line(cells: dict[str, str], widths: dict[str, int]) -> str:
  return '  '.join(
    cells[c].ljust(width) if c in _LEFT_ALIGNED else cells[c].rjust(width)
    for c, width in widths.items()
  ).rstrip()
