"""The training program's logic: rounds, metrics, evaluation, checkpoints.

A round's metrics are released before its state is saved. When a run is resumed,
rows after the last saved state are removed: a run that is killed at any moment
and started again gives the same tables and weights as one that never stopped.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
import contextlib
import dataclasses
import resource
import time
from typing import Any, NamedTuple

import tensorflow_federated as tff

from tff_fssl.hparams import UsageError
from tff_fssl.program import console
from tff_fssl.program import training_types
from tff_fssl.program.loop import round_checks
from tff_fssl.program.reporting import managers
from tff_fssl.program.storage import summary
from tff_fssl.rounds import sampling

Reporter = training_types.Reporter
RoundReport = training_types.RoundReport
Settings = training_types.Settings
StopRequest = training_types.StopRequest


class ProgramState(NamedTuple):
  """What is saved after a round; its version is the round's number.

  Attributes:
    process: State of the learning process.
    iterator: The cohorts' iterator, at the next round.
    num_bad_rounds: Consecutive bad rounds up to and including this one.
  """

  process: Any
  iterator: sampling.CohortIterator
  num_bad_rounds: Any


@dataclasses.dataclass(frozen=True)
class Outputs:
  """Where results go.

  Attributes:
    states: Saves program states.
    train: Receives a row per round.
    evaluation: Receives a row per evaluation.
    timing: Receives a row per round. These rows differ between equal runs.
    also: Receives all three (TensorBoard), if given.
    non_finite: Receives what `explain_fn` says, if given.
  """

  states: tff.program.ProgramStateManager
  train: managers.CsvReleaseManager
  evaluation: managers.CsvReleaseManager
  timing: managers.CsvReleaseManager
  also: tff.program.ReleaseManager | None = None
  non_finite: managers.LinesReleaseManager | None = None

  def truncate_after(self, round_num: int) -> int:
    """Removes the rows of later rounds; returns how many rounds had one."""
    every_round = (self.train.table, self.timing.table)
    for table in every_round:
      table.check_after(round_num)
    # Every evaluated round is in another table, too.
    last = [t.last_key for t in every_round if t.last_key is not None]
    self.evaluation.table.check_after(round_num, max([round_num, *last]))
    removed = self.train.table.truncate_after(round_num)
    self.evaluation.table.truncate_after(round_num)
    self.timing.table.truncate_after(round_num)
    return removed

  def best_round(self) -> int | None:
    """The round with the best validation accuracy so far, if any."""
    return summary.best_round_num(self.evaluation.table.path)


class TrainingStoppedError(Exception):
  """Training cannot continue; the message says why and what may help."""


@dataclasses.dataclass(frozen=True)
class Result:
  """How training ended.

  Attributes:
    state: The last state.
    round_num: The last finished round.
    stopped_by: The signal that stopped it early, if any.
    num_rounds: Number of rounds that this call ran.
  """

  state: ProgramState
  round_num: int
  stopped_by: int | None
  num_rounds: int


async def train(
  process: tff.learning.templates.LearningProcess,
  data_source: sampling.CohortDataSource,
  settings: Settings,
  outputs: Outputs,
  *,
  evaluate_fn: Callable[[Any], Mapping[str, float]],
  reporter: Reporter,
  stop: StopRequest,
  timing_fn: Callable[[], Mapping[str, float]] = dict,
  initial_model: Any = None,
  around_round: Callable[
    [int], contextlib.AbstractContextManager[None]
  ] = lambda round_num: contextlib.nullcontext(),
  explain_fn: Callable[[Any, int, int], Sequence[str]] | None = None,
  failures_fn: Callable[[int], Sequence[tuple[int, str]]] = lambda _: (),
) -> Result:
  """Trains from the last saved state, or from the start, to the end.

  It must run in a `tff.program` context (`tff.program.NativeFederatedContext`).
  Types are in TFF's notation: `S@SERVER` is a value of type S at the server,
  `{D*}@CLIENTS` a dataset of elements of type D at each client.

  Args:
    process: `initialize` is `( -> S@SERVER)`, `next` is
      `<S@SERVER, {D*}@CLIENTS> -> <S@SERVER, M@SERVER>`, where M is nested
      scalars.
    data_source: The clients, of type `{D*}@CLIENTS`.
    settings: How long to train, and how often to evaluate and save.
    outputs: Where results go.
    evaluate_fn: Process state -> metrics by name; called in another thread.
    reporter: Told about every round.
    stop: Checked after each round.
    timing_fn: Returns where the last round's seconds went, from the runtime.
    initial_model: The model (the state's `global_model_weights`) that a run
      without a saved state starts from, instead of that of `initialize`. It is
      evaluated and saved as the round before the first.
    around_round: Round number -> a context manager around that round.
    explain_fn: (process state before a round, number of the round, number of
      clients that were not finite in it) -> lines that say why; called in
      another thread.
    failures_fn: Round number -> pairs (client, why its data could not be used)
      of the clients that were left out of the round.

  Returns:
    How training ended: after the last round, or stopped by request and saved.

  Raises:
    TrainingStoppedError: After `max_bad_rounds` consecutive bad rounds.
    UsageError: If checkpoints cannot be used, a disk refuses, or the data of a
      client cannot be used while `strict_clients` is set.
    ValueError: If the process and the data source have different types.
  """
  _check_types(process, data_source)
  state, done = await _load(process, data_source, settings, outputs, reporter)
  if state is None:
    state, done = await _initialize(
      process, data_source, settings, outputs, reporter
    )
    if initial_model is not None:
      state = await _warm_start(
        state, done, initial_model, outputs, evaluate_fn, reporter
      )
  before, saved = done, done
  watch = round_checks.UpdateWatch()
  reporter.begin(done, settings)
  try:
    while done < settings.total_rounds:
      _check_bad_rounds(int(state.num_bad_rounds), done, settings)
      if stop.signal is not None:
        if saved < done:
          await outputs.states.save(state, done)
        return Result(state, done, stop.signal, done - before)
      done += 1
      before_round = state.process
      with around_round(done):
        state, report = await _run_round(
          process,
          state,
          done,
          settings,
          outputs,
          evaluate_fn,
          timing_fn,
          failures_fn,
        )
      for line in report.failures:
        reporter.say(line)
      warning = watch.warning(report.metrics)
      if warning is not None:
        reporter.say(f'round {done}: {warning}.')
      num_failed = int(report.metrics.get(round_checks.NON_FINITE, 0))
      if explain_fn is not None and num_failed:
        lines = await asyncio.to_thread(
          explain_fn, before_round, done, num_failed
        )
        if outputs.non_finite is not None:
          await outputs.non_finite.release(lines, done)
        for line in lines:
          reporter.say(f'round {done}: {line}')
      if (
        _is_due(done, settings.rounds_per_checkpoint, settings)
        or int(state.num_bad_rounds) >= settings.max_bad_rounds
        # The model of the best round is exported at the end.
        or (report.evaluation and outputs.best_round() == done)
      ):
        await outputs.states.save(state, done)
        saved = done
      reporter.round_done(report)
    _check_bad_rounds(int(state.num_bad_rounds), done, settings)
  finally:
    reporter.end()
  return Result(state, done, None, done - before)


def state_structure(
  process: tff.learning.templates.LearningProcess,
  data_source: sampling.CohortDataSource,
) -> ProgramState:
  """The structure of a process's saved states, for loading them."""
  state_type = process.initialize.type_signature.result.member
  return ProgramState(
    tff.types.type_to_tf_tensor_specs(state_type),
    data_source.iterator(),
    0,
  )


async def _load(
  process: tff.learning.templates.LearningProcess,
  data_source: sampling.CohortDataSource,
  settings: Settings,
  outputs: Outputs,
  reporter: Reporter,
) -> tuple[ProgramState | None, int]:
  """(saved state, last finished round), or (None, 0)."""
  structure = state_structure(process, data_source)
  state, done = await outputs.states.load_latest(structure)
  if state is None:
    return None, 0
  last_row = outputs.train.table.last_key
  if done >= settings.first_round and (last_row is None or last_row < done):
    reporter.say(
      f'{outputs.train.table.path} lacks rows before round {done}: they were'
      ' removed; training continues without them.'
    )
  _drop_unsaved(outputs, done, f'after round {done}', reporter)
  return state, done


async def _initialize(
  process: tff.learning.templates.LearningProcess,
  data_source: sampling.CohortDataSource,
  settings: Settings,
  outputs: Outputs,
  reporter: Reporter,
) -> tuple[ProgramState, int]:
  """(initial state, the round before the first)."""
  done = settings.first_round - 1
  _drop_unsaved(outputs, done, 'at the start', reporter)
  initial = await tff.program.materialize_value(process.initialize())
  return ProgramState(initial, data_source.iterator(), 0), done


def _drop_unsaved(
  outputs: Outputs, done: int, where: str, reporter: Reporter
) -> None:
  """Removes rows of rounds whose state was not saved, or is missing."""
  removed = outputs.truncate_after(done)
  if removed:
    reporter.say(
      f'Training continues {where}: there is no later checkpoint, so'
      f' {"a round is" if removed == 1 else f"{removed} rounds are"} repeated.'
    )


async def _warm_start(
  state: ProgramState,
  done: int,
  model: Any,
  outputs: Outputs,
  evaluate_fn: Callable[[Any], Mapping[str, float]],
  reporter: Reporter,
) -> ProgramState:
  """Puts a model into `state`, evaluates and saves: it may vanish later."""
  state = state._replace(
    process=state.process._replace(global_model_weights=model)
  )
  evaluation = await asyncio.to_thread(evaluate_fn, state.process)
  await outputs.evaluation.release(evaluation, done)
  if outputs.also is not None:
    await outputs.also.release(evaluation, done)
  await outputs.states.save(state, done)
  figures = '  '.join(console.evaluation_figures(evaluation))
  reporter.say(f'At the start: {figures}')
  return state


async def _run_round(
  process: tff.learning.templates.LearningProcess,
  state: ProgramState,
  round_num: int,
  settings: Settings,
  outputs: Outputs,
  evaluate_fn: Callable[[Any], Mapping[str, float]],
  timing_fn: Callable[[], Mapping[str, float]],
  failures_fn: Callable[[int], Sequence[tuple[int, str]]],
) -> tuple[ProgramState, RoundReport]:
  """Runs a round, evaluates if that is due, and releases the results."""
  start = time.monotonic()
  cohort = state.iterator.select()
  output = await tff.program.materialize_value(
    process.next(state.process, cohort)
  )
  failures = [
    f'round {round_num}: client {client_id} is left out: {reason}'
    for client_id, reason in failures_fn(round_num)
  ]
  if failures and settings.strict_clients:
    raise UsageError(
      f'{failures[0]}; because of --strict_clients, this stops the run'
    )
  timing = {f'seconds/{k}': float(v) for k, v in timing_fn().items()}
  timing['seconds/round'] = time.monotonic() - start
  metrics = managers.flatten(output.metrics)
  is_bad = round_checks.is_bad_round(metrics)
  metrics['bad_round'] = int(is_bad)
  evaluation: Mapping[str, float] = {}
  start = time.monotonic()
  if _is_due(round_num, settings.rounds_per_evaluation, settings):
    evaluation = await asyncio.to_thread(evaluate_fn, output.state)
  timing['seconds/evaluation'] = time.monotonic() - start
  peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  timing['peak_memory_mb'] = peak / 1024.0  # Linux gives KiB.

  await outputs.train.release(metrics, round_num)
  if evaluation:
    await outputs.evaluation.release(evaluation, round_num)
  await outputs.timing.release(timing, round_num)
  if outputs.also is not None:
    await outputs.also.release({**metrics, **evaluation, **timing}, round_num)
  num_bad = int(state.num_bad_rounds) + 1 if is_bad else 0
  state = ProgramState(output.state, state.iterator, num_bad)
  return state, RoundReport(
    round_num, metrics, timing, evaluation, is_bad, failures
  )


def _check_bad_rounds(num_bad: int, done: int, settings: Settings) -> None:
  if num_bad < settings.max_bad_rounds:
    return
  raise TrainingStoppedError(
    f'no update could be used in {num_bad} rounds in a row, up to round {done}:'
    ' every update was rejected or not finite'
    f' (--max_bad_rounds={settings.max_bad_rounds}). A lower learning rate,'
    ' --max_gradient_norm or --aggregator=robust may help'
  )


def _is_due(round_num: int, every: int, settings: Settings) -> bool:
  return round_num % every == 0 or round_num == settings.total_rounds


def _check_types(
  process: tff.learning.templates.LearningProcess,
  data_source: sampling.CohortDataSource,
) -> None:
  expected = process.next.type_signature.parameter[1]
  if not expected.is_equivalent_to(data_source.federated_type):
    raise ValueError(
      f'The process takes client data of type {expected}; the data source has'
      f' {data_source.federated_type}.'
    )
