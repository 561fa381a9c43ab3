"""The training program's logic: rounds, metrics, evaluation, checkpoints.

A round's metrics are released before its state is saved. When a run is resumed,
rows after the last saved state are removed: a run that is killed at any moment
and started again gives the same tables and weights as one that never stopped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
import contextlib
import dataclasses
import os
import resource
import struct
import time
from typing import Any, NamedTuple

from absl import logging
import tree

from tff_fssl import durable
from tff_fssl.hparams import UsageError
from tff_fssl.lazy import tf, tff
from tff_fssl.program import checkpoint
from tff_fssl.program import console
from tff_fssl.program import csv_table
from tff_fssl.program import loggers
from tff_fssl.program import summary
from tff_fssl.program import training_types
from tff_fssl.rounds import sampling

Hooks = training_types.Hooks
Reporter = training_types.Reporter
RoundReport = training_types.RoundReport
Settings = training_types.Settings
StopRequest = training_types.StopRequest


class DurableProgramStateManager(tff.program.ProgramStateManager):
  """Saves program states as files, one per version, and keeps the last few.

  A version is the number of a round (negative or 0 in pre-training). A save is
  complete or has not happened, whenever the program or the machine dies.
  """

  def __init__(
    self,
    root_dir: str,
    *,
    keep_total: int = 3,
    warn: Callable[[str], None] = logging.warning,
    owner: checkpoint.Owner = checkpoint.NOBODY,
    keep_also_fn: Callable[[], int | None] = lambda: None,
  ):
    """Opens a folder of checkpoints, and removes leftovers of killed saves.

    Args:
      root_dir: The folder, which is made if missing.
      keep_total: The number of latest versions that are kept, at least 1.
      warn: Called when a checkpoint cannot be used.
      owner: The owner of the states. Files of another owner are neither loaded
        nor removed.
      keep_also_fn: Called after each save, to return one more version to keep,
        or None.
    """
    if keep_total < 1:
      raise ValueError(f'keep_total={keep_total}: must be at least 1')
    durable.make_folder(root_dir)
    durable.remove_leftovers(root_dir, checkpoint.is_name)
    self._root_dir = root_dir
    self._owner = owner
    self._keep_also_fn = keep_also_fn
    self._keep_total = keep_total
    self._warn = warn

  async def get_versions(self) -> list[int] | None:
    """Lists the saved versions in ascending order, or returns None."""
    return checkpoint.versions(self._root_dir) or None

  async def load(self, version: int, structure: Any) -> Any:
    """Loads a version.

    Args:
      version: The version of a saved state.
      structure: The structure of that state. Leaves with a shape and a dtype
        must match. A data source iterator tells which class reads its bytes.

    Returns:
      The state, with NumPy arrays.

    Raises:
      ProgramStateNotFoundError: If there is no such version.
      CheckpointError: If it is damaged, belongs to another owner, or has
        another structure.
    """
    path = checkpoint.path_of(self._root_dir, version)
    if not os.path.lexists(path):
      raise tff.program.ProgramStateNotFoundError(version)
    leaves = await asyncio.to_thread(checkpoint.read_own, path, self._owner)
    return fill_structure(leaves, structure)

  async def load_latest(self, structure: Any) -> tuple[Any, int]:
    """Loads the latest complete version.

    Later versions that are damaged are reported, and moved out of the way.

    Args:
      structure: The structure of the state. See `load`.

    Returns:
      (state, version), or (None, 0) if there is no version.

    Raises:
      UsageError: If all checkpoints are damaged, or one belongs to another
        owner and so must not be moved.
    """
    damaged = {}
    for version in reversed(checkpoint.versions(self._root_dir)):
      try:
        state = await self.load(version, structure)
      except checkpoint.DamagedError as error:
        damaged[version] = str(error)
        continue
      except checkpoint.CheckpointError as error:
        raise UsageError(
          f'{checkpoint.path_of(self._root_dir, version)} cannot be used:'
          f' {error}. Move it away, or choose another --output_dir'
        ) from error
      # Moved only now, when an earlier version is known to be whole.
      for other, reason in damaged.items():
        path = checkpoint.path_of(self._root_dir, other)
        durable.rename(path, path + checkpoint.DAMAGED)
        self._warn(
          f'{path} cannot be used: {reason}. It was renamed to'
          f' {os.path.basename(path)}{checkpoint.DAMAGED}; going back to round'
          f' {version}.'
        )
      return state, version
    if damaged:
      version, reason = max(damaged.items())
      path = checkpoint.path_of(self._root_dir, version)
      raise UsageError(
        f'none of the {len(damaged)} checkpoints in {self._root_dir} can be'
        f' used; {os.path.basename(path)}: {reason}. To start from the'
        ' beginning, remove them or choose another --output_dir'
      )
    return None, 0

  async def save(self, program_state: Any, version: int) -> None:
    """Saves a version, then removes the oldest ones.

    Args:
      program_state: The state: arrays, scalars, data source iterators, or
        references to these, in any containers that `tree` knows.
      version: The version, larger than all saved ones.

    Raises:
      ProgramStateExistsError: If there is such a version.
      UsageError: If the disk refuses.
    """
    path = checkpoint.path_of(self._root_dir, version)
    if os.path.lexists(path):
      raise tff.program.ProgramStateExistsError(
        version=version, path=self._root_dir
      )
    # Values may still be computed when a save is asked for.
    state = await tff.program.materialize_value(program_state)
    leaves = {
      path: leaf.to_bytes() if _is_serializable(leaf) else leaf
      for path, leaf in _named_leaves(state)
    }
    await asyncio.to_thread(checkpoint.write, path, leaves, self._owner)
    await asyncio.to_thread(self._remove_old)

  def _remove_old(self) -> None:
    """Removes the owner's versions that are not kept."""
    kept = self._keep_also_fn()
    for old in checkpoint.versions(self._root_dir)[: -self._keep_total]:
      path = checkpoint.path_of(self._root_dir, old)
      if old == kept:
        continue
      with contextlib.suppress(checkpoint.CheckpointError):
        checkpoint.check_owner(path, self._owner)
        # One call removes one file: a kill cannot leave half of it.
        durable.remove(path)


class LoggerReleaseManager(tff.program.ReleaseManager):
  """Lets programs of TFF release metrics to a logger.

  A logger that fails does not stop the program.
  """

  def __init__(
    self, logger: loggers.Logger, name: str, warn: Callable[[str], None]
  ):
    """Wraps a logger.

    Args:
      logger: The logger.
      name: Its name in the warning.
      warn: Called at the first failure. Nothing is logged after it.
    """
    self._logger: loggers.Logger | None = logger
    self._name, self._warn = name, warn

  async def release(self, value: Any, key: int) -> None:
    """Logs nested scalars, or references to scalars, of round `key`."""
    value = await tff.program.materialize_value(value)
    if self._logger is None:
      return
    try:
      self._logger.log(int(key), flatten(value))
    except Exception as error:  # pylint: disable=broad-except
      self._logger = None
      self._warn(loggers.failure(self._name, error))


def flatten(value: Any, prefix: str = '') -> dict[str, Any]:
  """Flattens nested mappings and named tuples, with names joined by '/'."""
  if hasattr(value, '_asdict'):
    value = value._asdict()
  if isinstance(value, (list, tuple)):
    value = {str(index): item for index, item in enumerate(value)}
  if not isinstance(value, Mapping):
    return {prefix: value}
  result: dict[str, Any] = {}
  for name, item in value.items():
    result |= flatten(item, f'{prefix}/{name}' if prefix else str(name))
  return result


def leaf_paths(structure: Any) -> list[str]:
  """Lists the paths of a state's leaves in its checkpoints."""
  return [path for path, _ in _named_leaves(structure)]


def _named_leaves(structure: Any) -> list[tuple[str, Any]]:
  return [
    ('/'.join(map(str, path)), leaf)
    for path, leaf in tree.flatten_with_path(structure)
  ]


def _is_serializable(leaf: Any) -> bool:
  # TFF does not export the base class.
  return isinstance(leaf, tff.program.FederatedDataSourceIterator)


def fill_structure(leaves: Mapping[str, Any], structure: Any) -> Any:
  """Puts a checkpoint's leaves in their places.

  Args:
    leaves: The leaves, as `checkpoint.read` returns them.
    structure: See `DurableProgramStateManager.load`.

  Returns:
    The state, with NumPy arrays.

  Raises:
    CheckpointError: If they do not match `structure`.
  """
  expected = _named_leaves(structure)
  names = [path for path, _ in expected]
  # Before any value is read, since another program may have other types.
  if sorted(names) != sorted(leaves):
    odd = sorted(set(names) ^ set(leaves))
    raise checkpoint.ForeignError(
      f'it belongs to another program: {odd[0]!r} is in only one of the two'
    )
  values = []
  for path, like in expected:
    value = leaves[path]
    if _is_serializable(like):
      try:
        # Bytes are read by this class only: a file cannot choose one.
        values.append(type(like).from_bytes(value))
      except (ValueError, struct.error) as error:
        raise checkpoint.ForeignError(f'{path!r}: {error}') from error
      continue
    shape, dtype = getattr(like, 'shape', None), getattr(like, 'dtype', None)
    dtype = getattr(dtype, 'as_numpy_dtype', dtype)
    # Lengths may be unknown.
    if not tf.TensorShape(shape).is_compatible_with(value.shape) or (
      dtype is not None and dtype != value.dtype
    ):
      raise checkpoint.ForeignError(
        f'it belongs to another program: {path!r} is {value.dtype}'
        f' {list(value.shape)}, not {like}'
      )
    values.append(value)
  return tree.unflatten_as(structure, values)


class ProgramState(NamedTuple):
  """The state after a round, as it is saved. Its version is the round.

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
  """The outputs of training.

  Attributes:
    states: Saves program states.
    train: Receives a row per round.
    evaluation: Receives a row per evaluation.
    timing: Receives a row per round. These rows differ between equal runs.
    also: Receives all three (TensorBoard, trackers), if given.
    non_finite: Receives the lines of `Hooks.explain_non_finite`, if given.
    rows: Keeps the rows of `FsslProcess.outside`.
    best_by: The figure on validation examples that selects the best round.
  """

  states: tff.program.ProgramStateManager
  train: csv_table.CsvTable
  evaluation: csv_table.CsvTable
  timing: csv_table.CsvTable
  also: loggers.Logger | None = None
  non_finite: csv_table.RoundLines | None = None
  rows: checkpoint.RowFiles | None = None
  best_by: str = summary.ACCURACY

  def truncate_after(self, round_num: int) -> int:
    """Removes rows of later rounds, and returns the number of rounds."""
    removed = self.train.truncate_after(round_num)
    self.evaluation.truncate_after(round_num)
    self.timing.truncate_after(round_num)
    if self.rows is not None:
      self.rows.drop_after(round_num)
    return removed

  def drop_unsaved(
    self, done: int, where: str, say: Callable[[str], None]
  ) -> None:
    """Removes rows of rounds without a saved state, and tells the user.

    Args:
      done: The round of the last saved state.
      where: That round in words: 'after round 3'.
      say: Called with the message.
    """
    if removed := self.truncate_after(done):
      rounds = 'a round is' if removed == 1 else f'{removed} rounds are'
      say(
        f'Training continues {where}: there is no later checkpoint, so'
        f' {rounds} repeated.'
      )

  def best_round(self) -> int | None:
    """Returns the round that is best on validation examples, if any."""
    return summary.best_round_num(self.evaluation.path, self.best_by)


class TrainingStoppedError(Exception):
  """An end of training: the message says why, and suggests a remedy."""


@dataclasses.dataclass(frozen=True)
class Result:
  """The end of training.

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
  initial_model: Any = None,
  hooks: Hooks = Hooks(),
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
    settings: The number of rounds, and the intervals of evaluations and saves.
    outputs: The outputs.
    evaluate_fn: Process state -> metrics by name. Called in another thread.
    reporter: Told about every round.
    stop: Checked after each round.
    initial_model: The model (the state's `global_model_weights`) that a run
      without a saved state starts from, instead of that of `initialize`. It is
      evaluated and saved as the round before the first.
    hooks: Called at the beginning, around and after each round, and at the end.

  Returns:
    The end of training: after the last round, or stopped by request and saved.

  Raises:
    TrainingStoppedError: After `max_bad_rounds` consecutive bad rounds.
    UsageError: If checkpoints cannot be used, a disk refuses, or the data of a
      client cannot be used while `strict_clients` is set.
    ValueError: If the process and the data source have different types.
    Exception: Whatever a hook raises.
  """
  _check_types(process, data_source)
  run = _Run(
    process, data_source, settings, outputs, evaluate_fn, reporter, hooks
  )
  state, done = await run.start(initial_model)
  before, saved = done, done
  # The reporter and the hooks end in any case, even by an error.
  with run.announced(done):
    while done < settings.total_rounds:
      _check_bad_rounds(int(state.num_bad_rounds), done, settings)
      if stop.signal is not None:
        if saved < done:
          await run.save(state, done)
        return Result(state, done, stop.signal, done - before)
      done += 1
      state = await run.prepared(state)
      # Clients that were not finite are repeated from this state.
      before_round = state.process
      with hooks.round_context(done):
        state, report = await run.run_round(state, done)
      await run.report_troubles(before_round, report)
      if run.saves(state, report):
        await run.save(state, done)
        saved = done
      reporter.round_done(report)
      hooks.round_done(state.process, report)
    _check_bad_rounds(int(state.num_bad_rounds), done, settings)
  return Result(state, done, None, done - before)


def state_structure(
  process: tff.learning.templates.LearningProcess,
  data_source: sampling.CohortDataSource,
) -> ProgramState:
  """Returns the structure of a process's saved states, to load them."""
  state_type = process.initialize.type_signature.result.member
  return ProgramState(
    tff.types.type_to_tf_tensor_specs(state_type),
    data_source.iterator(),
    0,
  )


@dataclasses.dataclass
class _Run:
  """The steps of `train`, with its arguments."""

  process: tff.learning.templates.LearningProcess
  data_source: sampling.CohortDataSource
  settings: Settings
  outputs: Outputs
  evaluate_fn: Callable[[Any], Mapping[str, float]]
  reporter: Reporter
  hooks: Hooks

  def __post_init__(self):
    self._watch = training_types.UpdateWatch()
    self._explained = False  # Whether a rejection was explained.
    self._rows: checkpoint.OutsideRows | None = None
    outside = getattr(self.process, 'outside', None)
    if outside is not None:
      if self.outputs.rows is None:
        raise ValueError(
          'The process keeps rows outside of its state: give `Outputs.rows`.'
        )
      self._rows = checkpoint.OutsideRows(outside, self.outputs.rows)

  async def start(self, initial_model: Any) -> tuple[ProgramState, int]:
    """Returns (state to start from, last finished round)."""
    structure = state_structure(self.process, self.data_source)
    state, done = await self.outputs.states.load_latest(structure)
    if state is None:
      return await self._initialize(initial_model)
    where = console.describe_place(done, self.settings)
    self.outputs.drop_unsaved(done, where, self.reporter.say)
    await self._drop_unneeded()
    return state, done

  async def _initialize(self, initial_model: Any) -> tuple[ProgramState, int]:
    """Returns (initial state, the round before the first)."""
    done = self.settings.first_round - 1
    self.outputs.drop_unsaved(done, 'at the start', self.reporter.say)
    initial = await tff.program.materialize_value(self.process.initialize())
    state = ProgramState(initial, self.data_source.iterator(), 0)
    if initial_model is not None:
      state = await self._warm_start(state, done, initial_model)
    return state, done

  async def _warm_start(
    self, state: ProgramState, done: int, model: Any
  ) -> ProgramState:
    """Puts a model into `state`, evaluates and saves: it may vanish later."""
    state = state._replace(
      process=state.process._replace(global_model_weights=model)
    )
    with self.reporter.phase(training_types.EVALUATING, done):
      evaluation = await asyncio.to_thread(self.evaluate_fn, state.process)
    await asyncio.to_thread(self.outputs.evaluation.log, done, evaluation)
    if self.outputs.also is not None:
      self.outputs.also.log(done, evaluation)
    await self.outputs.states.save(state, done)
    figures = '  '.join(console.evaluation_figures(evaluation))
    self.reporter.say(f'At the start: {figures}')
    return state

  @contextlib.contextmanager
  def announced(self, done: int) -> Iterator[None]:
    """Says that training begins, and in any case that it has ended."""
    with contextlib.ExitStack() as exits:
      exits.callback(self.reporter.end)
      self.reporter.begin(done, self.settings)
      exits.callback(self.hooks.end)
      self.hooks.begin(done, self.settings)
      yield

  async def prepared(self, state: ProgramState) -> ProgramState:
    """Loads the rows of clients that a round needs into its state."""
    if self._rows is None:
      return state
    at = state.iterator
    cohort = self.data_source.client_ids(at.seed, at.round_num)
    process = await asyncio.to_thread(self._rows.load, state.process, cohort)
    return state._replace(process=process)

  async def save(self, state: ProgramState, round_num: int) -> None:
    """Saves the state after a round."""
    with self.reporter.phase(training_types.SAVING, round_num):
      await self.outputs.states.save(state, round_num)
      await self._drop_unneeded()

  async def _drop_unneeded(self) -> None:
    """Removes clients' rows that no saved state needs."""
    if self._rows is None:
      return
    versions = await self.outputs.states.get_versions()
    await asyncio.to_thread(self._rows.retain_versions, versions or ())

  async def run_round(
    self, state: ProgramState, round_num: int
  ) -> tuple[ProgramState, RoundReport]:
    """Runs a round, evaluates if that is due, and releases the results."""
    start = time.monotonic()
    counts = self.data_source.counts(state.iterator.seed, round_num)
    cohort = state.iterator.select()
    with self.reporter.phase(training_types.ROUND, round_num):
      output = await tff.program.materialize_value(
        self.process.next(state.process, cohort)
      )
    process = output.state
    if self._rows is not None:
      process = await asyncio.to_thread(self._rows.store, process)
    failures = self._left_out(round_num)
    in_round = self.hooks.seconds()
    timing = {f'seconds/{k}': float(v) for k, v in in_round.items()}
    timing['seconds/round'] = time.monotonic() - start
    counts = {**counts, **self.hooks.counts(round_num)}
    metrics = {**flatten(output.metrics), **counts}
    is_bad = training_types.is_bad_round(metrics)
    metrics['bad_round'] = int(is_bad)
    evaluation: Mapping[str, float] = {}
    start = time.monotonic()
    if _is_due(round_num, self.settings.rounds_per_evaluation, self.settings):
      with self.reporter.phase(training_types.EVALUATING, round_num):
        evaluation = await asyncio.to_thread(self.evaluate_fn, process)
        process = self._follow(process, evaluation, round_num)
    timing['seconds/evaluation'] = time.monotonic() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    timing['peak_memory_mb'] = peak / 1024.0  # Linux gives KiB.
    report = RoundReport(
      round_num, metrics, timing, evaluation, is_bad, failures
    )
    # Before the state is saved: a saved round has its rows.
    await self._release(report)
    num_bad = int(state.num_bad_rounds) + 1 if is_bad else 0
    return ProgramState(process, state.iterator, num_bad), report

  def _follow(
    self, state: Any, evaluation: Mapping[str, float], round_num: int
  ) -> Any:
    """Lowers learning rates if the validation loss has stopped falling."""
    plateau = getattr(self.process, 'plateau', None)
    # An evaluation at the end alone would not be one of a longer run.
    if plateau is None or round_num % self.settings.rounds_per_evaluation:
      return state
    model, factor = plateau.follow(
      state.global_model_weights, evaluation['validation/loss']
    )
    if factor is not None:
      name = console.round_name(round_num, self.settings)
      self.reporter.say(
        f'{name}: validation loss has stopped falling; learning rates are now'
        f' {factor:.2g} of the first.'
      )
    return state._replace(global_model_weights=model)

  def _left_out(self, round_num: int) -> list[str]:
    """Returns a line for each client with unusable data."""
    lines = [
      f'round {round_num}: client {client} is skipped: {reason}'
      for client, reason in self.hooks.left_out_clients(round_num)
    ]
    if lines and self.settings.strict_clients:
      raise UsageError(
        f'{lines[0]}; because of --strict_clients, this stops the run'
      )
    return lines

  async def _release(self, report: RoundReport) -> None:
    """Releases the figures of a round."""
    outputs, round_num = self.outputs, report.round_num
    # So a kill never leaves an evaluation that is ahead of both other tables.
    tables = [(outputs.train, report.metrics)]
    if report.evaluation:
      tables.append((outputs.evaluation, report.evaluation))
    tables.append((outputs.timing, report.timing))
    for table, metrics in tables:
      await asyncio.to_thread(table.log, round_num, metrics)
    if outputs.also is not None:
      together = {**report.metrics, **report.evaluation, **report.timing}
      outputs.also.log(round_num, together)

  async def report_troubles(self, before: Any, report: RoundReport) -> None:
    """Reports failures of a round that began with the state `before`."""
    round_num = report.round_num
    for line in report.failures:
      self.reporter.say(line)
    warning = self._watch.warning(report.metrics)
    if warning is not None:
      name = console.round_name(round_num, self.settings)
      self.reporter.say(f'{name}: {warning}.')
    if report.metrics.get(training_types.REJECTED, 0) and not self._explained:
      # Each round would say the same, and repeat its clients to find it.
      self._explained = True
      for line in await asyncio.to_thread(
        self.hooks.explain_rejected, before, round_num
      ):
        self.reporter.say(f'round {round_num}: {line}')
    num_clients = int(report.metrics.get(training_types.NON_FINITE, 0))
    if not num_clients:
      return
    lines = await asyncio.to_thread(
      self.hooks.explain_non_finite, before, round_num, num_clients
    )
    if lines and self.outputs.non_finite is not None:
      await asyncio.to_thread(self.outputs.non_finite.log, round_num, lines)
    for line in lines:
      self.reporter.say(f'round {round_num}: {line}')

  def saves(self, state: ProgramState, report: RoundReport) -> bool:
    """Returns whether the state is saved after a round."""
    settings, done = self.settings, report.round_num
    return bool(
      _is_due(done, settings.rounds_per_checkpoint, settings)
      or int(state.num_bad_rounds) >= settings.max_bad_rounds
      # The model of the best round is exported at the end.
      or (report.evaluation and self.outputs.best_round() == done)
    )


def _check_bad_rounds(num_bad: int, done: int, settings: Settings) -> None:
  if num_bad < settings.max_bad_rounds:
    return
  if done < 1:
    raise TrainingStoppedError(
      f'pre-training was not finite in {num_bad} rounds in a row, up to round'
      f' {done} (--max_bad_rounds={settings.max_bad_rounds}). A lower'
      ' --server_learning_rate or --max_gradient_norm may help'
    )
  raise TrainingStoppedError(
    f'no update could be used in {num_bad} rounds in a row, up to round {done}:'
    ' every update was rejected or not finite'
    f' (--max_bad_rounds={settings.max_bad_rounds}). A lower learning rate,'
    ' --max_gradient_norm or --aggregator=robust may help, and'
    ' --debug_non_finite shows the first value that is not finite'
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
