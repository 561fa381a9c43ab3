"""Makes the trials of a sweep, each run a process.

A run is the training program with the flags of a trial and one seed, in a
folder of its own. The runs of a trial follow each other. Several trials are
made at a time. When the sweep ends for any reason, its runs save and end, too.
They are resumed when the sweep is started again.
"""

import asyncio
from collections.abc import Callable, Sequence
import dataclasses
import math
import os
import signal
import subprocess
import time

from tff_fssl import durable
from tff_fssl import processes
from tff_fssl.hparams import UsageError
from tff_fssl.program import console
from tff_fssl.program import training_types
from tff_fssl.program.configuration import sweeps
from tff_fssl.program.reporting import sweep_results
from tff_fssl.program.storage import csv_table
from tff_fssl.program.storage import output_tree
from tff_fssl.program.storage import summary
from tff_fssl.program.storage import trials as trials_lib

# Between two looks at a run's process and its table.
_POLL_SECS = 0.2
# The error of a run is near the end of its log.
_MAX_ERROR_BYTES = 10_000


@dataclasses.dataclass(frozen=True)
class Settings:
  """The settings of the runs.

  Attributes:
    command: The training program, without its arguments.
    diverged: Its exit code if no update was usable. A restart would not help.
    jobs: The number of trials at a time.
    retries: The number of restarts of a run that fails.
    intra_op_threads: The cores of a run. 0: the run's default.
  """

  command: Sequence[str]
  diverged: int
  jobs: int = 1
  retries: int = 1
  intra_op_threads: int = 0


class _EndedError(Exception):
  """Ends a trial before it is complete, with a state and a note."""


class Sweeper:
  """Makes the remaining trials of a sweep."""

  def __init__(
    self,
    sweep: sweeps.Sweep,
    folder: output_tree.SweepFolder,
    trials: trials_lib.Trials,
    settings: Settings,
    stop: training_types.StopRequest,
    say: Callable[[str], None],
  ):
    """Starts nothing yet.

    Args:
      sweep: The sweep.
      folder: The sweep's folder, open.
      trials: The trials.
      settings: The settings of the runs.
      stop: Asks for the end: runs that are being made then save and stop.
      say: Tells the user.
    """
    self._sweep, self._folder, self._trials = sweep, folder, trials
    self._settings, self._stop, self._say = settings, stop, say
    self._seconds: list[float] = []

  async def run(self) -> None:
    """Makes trials until there are no more, or `stop` is set."""
    tasks: set[asyncio.Task[None]] = set()
    try:
      while True:
        while len(tasks) < self._settings.jobs and self._stop.signal is None:
          trial = self._trials.take()
          if trial is None:
            break
          tasks.add(asyncio.create_task(self._make(trial)))
        records = self._trials.records()
        sweep_results.write_csv(self._folder, records, self._sweep)
        if not tasks:
          return
        done, tasks = await asyncio.wait(
          tasks, return_when=asyncio.FIRST_COMPLETED
        )
        for task in done:
          task.result()
    finally:
      for task in tasks:
        task.cancel()
      await asyncio.gather(*tasks, return_exceptions=True)

  async def _make(self, trial: trials_lib.Running) -> None:
    """Makes a trial, and reports its result."""
    self._say(f'trial {trial.number}: {sweeps.values_text(trial.values)}')
    start = time.monotonic()
    scores: dict[int, float] = {}
    state, note = trials_lib.COMPLETE, ''
    try:
      for seed in self._sweep.seeds:
        scores[seed] = await self._score(trial, seed)
    except _EndedError as error:
      state, note = error.args
    except UsageError as error:
      state, note = trials_lib.FAILED, str(error)
    if state == trials_lib.OPEN:
      return
    if state == trials_lib.PRUNED:
      first = self._sweep.seeds[0]
      best = self._best(trial.number, first)
      scores = {} if best is None else {first: best}
    trial.end(state, scores, note)
    self._seconds.append(time.monotonic() - start)
    self._say(self._news(trial.number))

  def _news(self, number: int) -> str:
    """Returns a trial's result, and how far the sweep is."""
    records = self._trials.records()
    (record,) = (r for r in records if r.number == number)
    news = f'trial {number}: {record.state}'
    if record.scores:
      news += f', validation {sweep_results.score_text(record)} %'
    if record.note:
      news += f' ({record.note})'
    more = []
    best = sweep_results.winner(records)
    if best and best.number != number:
      score = sweep_results.score_text(best)
      more.append(f'best: trial {best.number}, {score} %')
    done = sum(r.state != trials_lib.OPEN for r in records)
    left = self._sweep.num_trials - done
    if left > 0:
      each = sum(self._seconds) / len(self._seconds)
      seconds = each * math.ceil(left / self._settings.jobs)
      more.append(f'{left} left, about {console.format_seconds(seconds)}')
    return '\n  '.join([news, *filter(None, ['; '.join(more)])])

  def _best(self, number: int, seed: int) -> float | None:
    """Returns the best validation accuracy of a run so far, if any."""
    tree = output_tree.OutputTree(self._folder.run(number, seed))
    best = summary.best_round(csv_table.read(tree.eval_csv)[1])
    if best is None:
      return None
    return csv_table.number(best, summary.VALIDATION_ACCURACY)

  async def _score(self, trial: trials_lib.Running, seed: int) -> float:
    """Runs a seed, again if it fails, and returns the best accuracy."""
    path = self._folder.run(trial.number, seed)
    more = {**trial.values, 'seed': seed, 'output_dir': path}
    if self._settings.intra_op_threads:
      more['intra_op_threads'] = self._settings.intra_op_threads
    command = [*self._settings.command, *self._sweep.arguments(more)]
    log = self._folder.log(trial.number, seed)
    durable.make_folder(os.path.dirname(log))
    # Other trials have reported their first seed: only that compares.
    judged = trial if seed == self._sweep.seeds[0] else None
    for attempt in range(self._settings.retries + 1):
      await self._wait_until_free(path)
      self._raise_if_stopped()
      # Each attempt appends: an older error must not be quoted.
      begin = os.path.getsize(log) if os.path.exists(log) else 0
      with durable.storage_errors(), open(log, 'ab') as output:
        status = await self._call(command, output, judged, path)
      if not status:
        break
      self._raise_if_stopped()
      reason = _last_words(log, begin) or 'it printed nothing'
      reason = (
        f'seed {seed}: {processes.describe_end(status)}: {reason}; see {log}'
      )
      # The same seed would diverge again.
      if status == self._settings.diverged:
        raise _EndedError(trials_lib.DIVERGED, reason)
      if attempt == self._settings.retries:
        raise _EndedError(trials_lib.FAILED, reason)
      self._say(f'trial {trial.number}: starting again; {reason}')
    best = self._best(trial.number, seed)
    if best is None:
      reason = f'seed {seed}: it has no validation accuracy; see {log}'
      raise _EndedError(trials_lib.FAILED, reason)
    return best

  def _raise_if_stopped(self) -> None:
    if self._stop.signal is not None:
      raise _EndedError(trials_lib.OPEN, '')

  async def _wait_until_free(self, path: str) -> None:
    """Waits for a run of a sweep that was killed, which still saves."""
    is_told = False
    while output_tree.is_held(path):
      if not is_told:
        self._say(f'waiting for the program that still writes to {path}')
        is_told = True
      if self._stop.signal is not None:
        return
      await asyncio.sleep(_POLL_SECS)

  async def _call(
    self,
    command: Sequence[str],
    output: object,
    judged: trials_lib.Running | None,
    path: str,
  ) -> int:
    """Runs a command to its end.

    Args:
      command: The command.
      output: The file for its output.
      judged: The trial that may be pruned by this run, if any.
      path: The run's folder.

    Returns:
      The exit code, as `Popen.returncode`.
    """
    process = processes.start(
      command, signal.SIGTERM, stdout=output, stderr=subprocess.STDOUT
    )
    bad_round: int | None = None
    is_asked = False
    try:
      while process.poll() is None:
        await asyncio.sleep(_POLL_SECS)
        if judged and bad_round is None:
          bad_round = _bad_round(judged, path)
        if not is_asked and (bad_round or self._stop.signal is not None):
          process.terminate()
          is_asked = True
    finally:
      if process.poll() is None:
        process.kill()  # What it has saved stays.
      processes.end_watch(process)
      process.wait()
    if bad_round:
      raise _EndedError(trials_lib.PRUNED, f'in round {bad_round}')
    return process.returncode


def _bad_round(trial: trials_lib.Running, path: str) -> int | None:
  """Returns the last evaluated round if a trial is worse than others."""
  try:
    rows = csv_table.read(output_tree.OutputTree(path).eval_csv)[1]
    scores = {
      int(row[csv_table.KEY]): csv_table.number(
        row, summary.VALIDATION_ACCURACY
      )
      for row in rows
    }
  except UsageError:  # The run itself will say so.
    return None
  known = {r: v for r, v in scores.items() if r > 0 and math.isfinite(v)}
  return max(known) if trial.is_bad(known) else None


def _last_words(log: str, begin: int) -> str:
  """Returns the last error after an offset in a log, or the last line."""
  with open(log, 'rb') as file:
    file.seek(max(begin, os.path.getsize(log) - _MAX_ERROR_BYTES))
    lines = file.read().decode(errors='replace').split('\n')
  lines = [line.strip() for line in lines if line.strip()]
  errors = [line for line in lines if line.startswith('error: ')]
  return [*lines, *errors][-1].removeprefix('error: ') if lines else ''
