"""Kills a training program at every disk call of a round; resumes it each time.

    python benchmarks/kill_resume.py [--quick] [--folder=DIR] [--FLAG=VALUE ...]

Counts the calls that change the disk in a round (rows of the tables, save of a
checkpoint). Then one run is stopped at each of these calls and at random
moments: by SIGKILL, a write torn in half, a full disk, or the loss of data that
was not flushed. Each time it is started again by the same command. After each
stop, its rows and its last checkpoint are compared, bit for bit, with those of
a run that was never stopped; at the end, its files are compared as well. Exits
with 1 if anything differs, or if more rounds were repeated than lie between two
checkpoints.

The program that is killed is `programs/train.py`, on `digits`, with additional
flags as given. Each start is a process of its own, forked from this one, which
has imported TensorFlow but runs nothing with it (that would not survive the
fork).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
import contextlib
import dataclasses
import importlib
import json
import os
import pathlib
import random
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from typing import Any
from unittest import mock

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / 'tools'))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import faulty_disk
import tqdm

from tff_fssl.program import checkpoint
from tff_fssl.program import console
from tff_fssl.program import csv_table
from tff_fssl.program import main as main_lib
from tff_fssl.program import output_tree
from tff_fssl.program import train_main

_FLAGS = (
  '--dataset=digits',
  '--algorithm=supervised',
  '--scenario=labels_at_clients',
  '--model=cnn',
  '--norm=none',
  '--num_labels=10',
  '--num_clients=20',
  '--clients_per_round=2',
  '--client_epochs=1',
  '--client_threads=1',
  '--rounds_per_evaluation=1',
  '--rounds_per_checkpoint=1',
  '--keep_checkpoints=1',
  '--tensorboard=false',
  '--progress=lines',
)
# Modules that the program, or other packages, import late.
_IMPORTED = (
  'matplotlib.pyplot',
  'sklearn.datasets',
  'tensorflow_federated',
  'tff_fssl.program.experiment',
  'tff_fssl.program.export',
  'tff_fssl.program.training',
  'tff_fssl.runtime',
)
_SEED, _NUM_MOMENTS = 0, 20
_MOMENT = 'moment'
_TITLES = {
  faulty_disk.KILL: 'SIGKILL at a call',
  faulty_disk.TEAR: 'torn write, SIGKILL',
  faulty_disk.FULL: 'no space left',
  faulty_disk.POWER: 'power failure, unflushed lost',
  faulty_disk.POWER_NAMES: 'power failure, names kept',
  _MOMENT: 'SIGKILL at a moment',
}
_ROW = '{:31} {:>6} {:>8} {:>9} {:>10} {:>11}'
# A start traces its computations, which takes seconds on an idle machine.
_TIMEOUT_SECS = 600


@dataclasses.dataclass(frozen=True)
class Series:
  """Stops of one kind.

  Attributes:
    how: One of the ways in `faulty_disk`, or a moment.
    points: Where the run stops, counted from the save of a checkpoint: indices
      of calls, from 0, or seconds.
    rounds_per_checkpoint: Number of rounds between checkpoints.
  """

  how: str
  points: Sequence[float]
  rounds_per_checkpoint: int = 1


@dataclasses.dataclass
class Outcome:
  """The outcome of a series of stops.

  Attributes:
    resumed: Number of stops after which the run continued.
    repeated: Largest number of rounds that were begun twice after one stop.
    rows: Number of rows that differ from the run that was never stopped.
    arrays: Number of arrays of the state that differ.
    problems: Descriptions of other problems.
  """

  resumed: int = 0
  repeated: int = 0
  rows: int = 0
  arrays: int = 0
  problems: list[str] = dataclasses.field(default_factory=list)


class Start:
  """A start of the program, in a process of its own.

  Attributes:
    events: The events that it reported: each round, and what it resumed from.
    exit_code: The exit code; negative if a signal ended the process.
  """

  def __init__(
    self,
    folder: str,
    flags: Sequence[str],
    how: str = faulty_disk.KILL,
    point: float | None = None,
    after: str = 'saved',
  ):
    """Runs the program until it ends or is stopped.

    Args:
      folder: The run's output folder.
      flags: All other flags of the run.
      how: How it is stopped; see `Series`.
      point: Where it is stopped; see `Series`. None: it is not stopped.
      after: The event from which a moment counts.
    """
    self._log = f'{folder}.log'
    reading, writing = os.pipe()
    self._pid = os.fork()
    if self._pid == 0:
      os.close(reading)
      _run_child(folder, flags, how, point, writing, self._log)
    os.close(writing)
    self.events: list[dict[str, Any]] = []
    self.exit_code: int | None = None
    with os.fdopen(reading, 'rb', buffering=0) as messages:
      self._follow(messages, point if how == _MOMENT else None, after)
    _, status = os.waitpid(self._pid, 0)
    self.exit_code = os.waitstatus_to_exitcode(status)

  def _follow(self, messages: Any, moment: float | None, after: str) -> None:
    """Reads what it reports until its end; kills it at the given moment."""
    text, end, is_over = b'', time.monotonic() + _TIMEOUT_SECS, False
    while not is_over:
      wait = max(0.0, end - time.monotonic())
      if select.select([messages], [], [], wait)[0]:
        data = messages.read(1 << 16)
        is_over = not data
        *lines, text = (text + data).split(b'\n')
        self.events += map(json.loads, lines)
        if moment is not None and self.told(after):
          end, moment = time.monotonic() + moment, None
      else:
        os.kill(self._pid, signal.SIGKILL)
        end = time.monotonic() + _TIMEOUT_SECS
        if not self.told(after):
          self.events.append({'event': 'timeout'})

  def told(self, event: str) -> list[dict[str, Any]]:
    """The events with this name."""
    return [e for e in self.events if e['event'] == event]

  @property
  def log(self) -> str:
    """What it printed."""
    return pathlib.Path(self._log).read_text('utf-8')

  @property
  def last_begun(self) -> int:
    """The last round that it began."""
    done = self.told('begin') + self.told('round')
    return max((e['done'] for e in done), default=0) + 1


def _run_child(
  folder: str,
  flags: Sequence[str],
  how: str,
  point: float | None,
  messages: int,
  log: str,
) -> None:
  """Runs the program with a faulty disk; ends the process."""
  code = 1
  try:
    with open(log, 'wb', buffering=0) as file:
      os.dup2(file.fileno(), 1)
      os.dup2(file.fileno(), 2)
    disk = faulty_disk.FaultyDisk(
      how=how,
      root=folder,
      die=lambda: os.kill(os.getpid(), signal.SIGKILL),
      flushes=True,
    )
    stop_at = None if how == _MOMENT or point is None else int(point)
    with os.fdopen(messages, 'w') as teller:

      def tell(event: str, **values: Any) -> None:
        teller.write(json.dumps({'event': event, **values}) + '\n')
        teller.flush()

      with _watched(disk, stop_at, folder, tell), disk.installed():
        code = main_lib.run(
          train_main.train_main, [*flags, f'--output_dir={folder}']
        )
  except BaseException:
    traceback.print_exc()
  finally:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


@contextlib.contextmanager
def _watched(
  disk: faulty_disk.FaultyDisk,
  stop_at: int | None,
  folder: str,
  tell: Callable[..., None],
) -> Iterator[None]:
  """Reports rounds; makes the disk count calls from the first checkpoint on."""
  begin, round_done = console.Console.begin, console.Console.round_done
  tree = output_tree.OutputTree(folder)
  saved: list[int] = []
  start = 0.0

  def watched_begin(self: Any, done: int, settings: Any) -> None:
    begin(self, done, settings)
    left = [
      name
      for _, _, names in os.walk(folder)
      for name in names
      if name.startswith('.writing_')
    ]
    tell('begin', done=done, left=left)

  def watched_round_done(self: Any, report: Any) -> None:
    nonlocal start
    round_done(self, report)
    tell('round', done=report.round_num)
    if checkpoint.versions(tree.checkpoints)[-1:] == [report.round_num]:
      saved.append(report.round_num)
      if len(saved) == 2:
        calls = [(c.name, os.path.relpath(c.path, folder)) for c in disk.calls]
        tell('calls', calls=calls, seconds=time.monotonic() - start)
      if len(saved) == 1:
        disk.start(stop_at)
        tell('saved')
        start = time.monotonic()

  with (
    mock.patch.object(console.Console, 'begin', watched_begin),
    mock.patch.object(console.Console, 'round_done', watched_round_done),
  ):
    yield


def compare(
  ours: output_tree.OutputTree, reference: output_tree.OutputTree
) -> tuple[int, int]:
  """(rows, arrays of the last checkpoint) that differ from the reference's."""
  last = max(checkpoint.versions(ours.checkpoints), default=0)
  num_rows = 0
  for path, expected in (
    (ours.train_csv, reference.train_csv),
    (ours.eval_csv, reference.eval_csv),
  ):
    rows, expected_rows = csv_table.read(path)[1], csv_table.read(expected)[1]
    num_rows += sum(a != b for a, b in zip(rows, expected_rows))
    num_rows += max(0, last - len(rows), len(rows) - len(expected_rows))
  try:
    state, expected_state = (
      checkpoint.read(checkpoint.path_of(tree.checkpoints, last))
      for tree in (ours, reference)
    )
  except checkpoint.CheckpointError:
    return num_rows, 1
  names = state.keys() | expected_state.keys()
  return num_rows, sum(
    _bits(state.get(name)) != _bits(expected_state.get(name)) for name in names
  )


def _bits(value: Any) -> Any:
  array = hasattr(value, 'tobytes')
  return (value.dtype, value.shape, value.tobytes()) if array else value


def account(outcome: Outcome, stopped: Start, resumed: Start) -> None:
  """Records how a run continued after a stop."""
  begin = resumed.told('begin')
  if not begin or not resumed.told('saved'):
    outcome.problems.append(f'not resumed:\n{resumed.log}')
    return
  outcome.resumed += 1
  repeated = stopped.last_begun - begin[0]['done']
  outcome.repeated = max(outcome.repeated, repeated)
  if begin[0]['left']:
    outcome.problems.append(f'left over: {begin[0]["left"]}')


def check_stop(start: Start, how: str) -> list[str]:
  """Describes what is wrong with the end of a start."""
  expected = main_lib.USAGE if how == faulty_disk.FULL else -signal.SIGKILL
  if start.exit_code != expected or start.told('timeout'):
    return [f'{_TITLES[how]}: exit code {start.exit_code}:\n{start.log}']
  errors = [x for x in start.log.splitlines() if x.startswith('error: ')]
  if how == faulty_disk.FULL and (
    len(errors) != 1
    or 'the disk is full' not in errors[0]
    or 'Traceback' in start.log
  ):
    return [f'{_TITLES[how]}: not one clear message:\n{start.log}']
  return []


def plan(
  calls: Sequence[tuple[str, str]], seconds: float, quick: bool
) -> list[Series]:
  """Plans the stops.

  Args:
    calls: (name, path) of the calls in a round that ends with a checkpoint.
    seconds: How long such a round takes.
    quick: Whether to plan only a few stops.

  Returns:
    The stops.
  """
  writes = [i for i, (name, _) in enumerate(calls) if name == 'write']
  if quick:
    return [
      Series(faulty_disk.TEAR, [writes[len(writes) // 2]]),
      Series(faulty_disk.FULL, writes[:1]),
    ]
  every = range(len(calls))
  # Content is flushed, and names change.
  edges = [i for i in every if i not in writes]
  # A round without a checkpoint makes only the calls of the tables.
  num_rows = sum(path.endswith('.csv') for _, path in calls)
  rng = random.Random(_SEED)

  def moments(num: int, of: float) -> list[float]:
    return [rng.uniform(0, of) for _ in range(num)]

  return [
    Series(faulty_disk.KILL, every),
    Series(_MOMENT, moments(_NUM_MOMENTS, seconds)),
    Series(faulty_disk.TEAR, writes[::6]),
    Series(faulty_disk.FULL, every[::6]),
    Series(faulty_disk.POWER, edges),
    Series(faulty_disk.POWER_NAMES, edges),
    Series(faulty_disk.KILL, range(num_rows + len(calls))[::8], 2),
    Series(_MOMENT, moments(_NUM_MOMENTS // 4, 2 * seconds), 2),
  ]


def describe(calls: Sequence[tuple[str, str]]) -> str:
  """Describes how many calls of each name a round makes, and for what."""
  counts: dict[str, dict[str, int]] = {}
  for name, path in calls:
    what = os.path.basename(path) if path.endswith('.csv') else 'checkpoint'
    of = counts.setdefault(what, {})
    of[name] = of.get(name, 0) + 1
  return console.table(
    {
      what: ', '.join(f'{num} {name}' for name, num in of.items())
      for what, of in counts.items()
    }
  )


def stop_and_resume(
  folder: str,
  flags: Sequence[str],
  series: Sequence[Series],
  reference: output_tree.OutputTree,
) -> Iterator[tuple[Series, Outcome]]:
  """Stops one run at all points, one after another, then lets it end.

  Args:
    folder: The run's output folder.
    flags: Flags of the run.
    series: The stops.
    reference: The run that was never stopped.

  Yields:
    Each series and its outcome.
  """
  tree = output_tree.OutputTree(folder)

  def starts() -> Iterator[Start]:
    for of in series:
      every = f'--rounds_per_checkpoint={of.rounds_per_checkpoint}'
      for point in of.points:
        yield Start(folder, [*flags, every], of.how, point)
    yield Start(folder, flags)

  num_starts = sum(len(of.points) for of in series) + 1
  one_by_one = iter(
    tqdm.tqdm(starts(), total=num_starts, disable=None, leave=False)
  )
  stopped = next(one_by_one)
  for of in series:
    outcome = Outcome()
    for _ in of.points:
      outcome.problems += check_stop(stopped, of.how)
      resumed = next(one_by_one)
      account(outcome, stopped, resumed)
      rows, arrays = compare(tree, reference)
      outcome.rows += rows
      outcome.arrays += arrays
      stopped = resumed
    yield of, outcome


def same_files(
  ours: output_tree.OutputTree, reference: output_tree.OutputTree
) -> bool:
  """Whether two runs ended with the same tables and weights, byte for byte."""

  def content(tree: output_tree.OutputTree) -> list[bytes]:
    last = checkpoint.versions(tree.checkpoints)[-1]
    paths = [tree.train_csv, tree.eval_csv]
    paths.append(checkpoint.path_of(tree.checkpoints, last))
    return [pathlib.Path(path).read_bytes() for path in paths]

  return content(ours) == content(reference)


def main() -> int:
  """Stops, resumes, compares, prints; returns the exit code."""
  parser = argparse.ArgumentParser(description=__doc__.split('\n\n')[0])
  parser.add_argument('--quick', action='store_true', help='a few stops only')
  parser.add_argument(
    '--folder', help='folder for the runs; by default a temporary one'
  )
  args, further = parser.parse_known_args()
  folder = tempfile.mkdtemp(prefix='kill_resume_', dir=args.folder)
  main_lib.quiet()
  for module in _IMPORTED:
    importlib.import_module(module)
  start_time = time.monotonic()
  flags = [*_FLAGS, *further]
  runs = {n: os.path.join(folder, n) for n in ('counted', 'whole', 'stopped')}

  counted = Start(
    runs['counted'], [*flags, '--total_rounds=9'], _MOMENT, 0.0, after='calls'
  )
  if not counted.told('calls'):
    print(f'error: the program failed:\n{counted.log}', file=sys.stderr)
    return main_lib.FAILED
  cycle = counted.told('calls')[0]
  series = plan(cycle['calls'], cycle['seconds'], args.quick)
  print('Calls that change the disk, in a round that ends with a checkpoint:')
  print(describe(cycle['calls']))

  # After each stop there are one or two more checkpoints.
  num_rounds = 6 + sum(
    (3 * len(s.points) * s.rounds_per_checkpoint) // 2 for s in series
  )
  flags.append(f'--total_rounds={num_rounds}')
  whole = Start(runs['whole'], [*flags, f'--keep_checkpoints={num_rounds}'])
  if whole.exit_code != main_lib.DONE:
    print(f'error: the program failed:\n{whole.log}', file=sys.stderr)
    return main_lib.FAILED
  reference = output_tree.OutputTree(runs['whole'])
  print('\n' + _ROW.format('', '', '', 'rounds', 'different', 'different'))
  titles = ('stopped by', 'points', 'resumed', 'repeated', 'rows', 'arrays')
  print(_ROW.format(*titles), flush=True)
  is_good, different, num_stops = True, 0, 0
  rounds_per_checkpoint = 1
  for of, outcome in stop_and_resume(runs['stopped'], flags, series, reference):
    if of.rounds_per_checkpoint != rounds_per_checkpoint:
      rounds_per_checkpoint = of.rounds_per_checkpoint
      print(f'with a checkpoint every {rounds_per_checkpoint} rounds:')
    num = len(of.points)
    counts = dataclasses.astuple(outcome)[:-1]
    print(_ROW.format(_TITLES[of.how], num, *counts), flush=True)
    for problem in outcome.problems:
      print(problem, file=sys.stderr)
    is_good &= outcome.resumed == num and not outcome.problems
    is_good &= outcome.repeated <= rounds_per_checkpoint
    different += outcome.rows + outcome.arrays
    num_stops += num
  is_same = same_files(output_tree.OutputTree(runs['stopped']), reference)
  seconds = console.format_seconds(time.monotonic() - start_time)
  print(
    f'\n{num_stops} stops of one run of {num_rounds} rounds, in {seconds}:'
    f' {different} differences;\nits tables and weights at the end are'
    f' {"" if is_same else "NOT "}those of the run never stopped.'
  )
  is_good &= is_same and not different
  shutil.rmtree(folder)
  return main_lib.DONE if is_good else main_lib.FAILED


if __name__ == '__main__':
  exit_code = main()
  sys.stdout.flush()
  # Skip Python's clean-up: TFF, which has run nothing, would complain there.
  os._exit(exit_code)
