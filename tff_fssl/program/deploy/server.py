"""The server of a federation: rounds, tables, evaluations, checkpoints.

It continues where an earlier process has stopped. Its folder is that of a run.
Nothing here imports TensorFlow Federated, or knows how messages travel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
import dataclasses
import math
import os
import resource
import time
from typing import Any

from tff_fssl import durable
from tff_fssl import files
from tff_fssl.hparams import UsageError
from tff_fssl.models import evaluate
from tff_fssl.program import checkpoint
from tff_fssl.program import console
from tff_fssl.program import csv_table
from tff_fssl.program import output_tree
from tff_fssl.program import summary
from tff_fssl.program import training_types
from tff_fssl.program.deploy import deployment as deployment_lib
from tff_fssl.program.deploy import rounds as rounds_lib
from tff_fssl.rounds import participation as participation_lib

# The folder of the run in the server's folder, if no other is given.
DEFAULT_RUN = 'run'
# As in an evaluation in the simulation, for equal sums.
_BATCH_SIZE = 256
# Seconds, at least, between two lines that say that nobody replies.
_SAY_SECS = 60.0
# Seconds, at least, between two attempts to reach anybody.
_PAUSE_SECS = 1.0


class StoppedError(Exception):
  """An end of the rounds before the last: the message says why."""


def serve(
  folder: str,
  load: Callable[[str], Any],
  send: rounds_lib.Send,
  *,
  output_dir: str = '',
  wait_secs: float = 3600.0,
  view: console.Console | None = None,
) -> int:
  """Runs all rounds that are left.

  Args:
    folder: The server's folder, as `flower.write_app` writes it.
    load: Folder of an export -> its `artefact.Program`.
    send: Sends messages to clients.
    output_dir: The folder of the run. '': `DEFAULT_RUN` in `folder`.
    wait_secs: Seconds without a reply of any client, after which it stops.
    view: Tells about the progress. None: lines on standard output.

  Returns:
    The last finished round.

  Raises:
    StoppedError: After `max_bad_rounds` consecutive bad rounds, or `wait_secs`.
    UsageError: If a folder cannot be used, with the remedy.
  """
  deployed = deployment_lib.read(folder)
  program = load(folder)
  availability = participation_lib.read_availability(
    deployed.participation, deployed.num_clients
  )
  view = view or console.Console('lines')
  tree = output_tree.OutputTree(output_dir or os.path.join(folder, DEFAULT_RUN))
  config: Any = deployed  # It has what the folder needs of a configuration.
  with tree:
    tree.open(config)
    tree.record(config)
    _copy(folder, tree.path)
    run = _Run(
      rounds_lib.Rounds(program, deployed, availability, send),
      _Evaluation(folder, deployed.splits, load),
      tree,
      view,
      wait_secs,
    )
    done = run.all()
    summary.write(tree)
  return done


def _copy(folder: str, run: str) -> None:
  """Copies the files that others read in a run's folder, once."""
  for name in deployment_lib.COPIED:
    source, target = os.path.join(folder, name), os.path.join(run, name)
    # A server that continues keeps what its first start has copied.
    if os.path.lexists(source) and not os.path.lexists(target):
      durable.write_file(target, [files.read_bytes(source)])


class _Evaluation:
  """The evaluation of a state on the server's data."""

  def __init__(
    self, folder: str, splits: tuple[str, ...], load: Callable[[str], Any]
  ):
    place = os.path.join(folder, deployment_lib.EVALUATION)
    self._program = load(place)
    self._examples = {}
    for split in splits:
      path = os.path.join(place, f'{split}.npz')
      arrays = files.read_npz(path)
      x, y = arrays.get('x'), arrays.get('y')
      if x is None or y is None or not 0 < len(x) == len(y):
        raise files.FileError(path, 'it is damaged; deploy again')
      self._examples[split] = x, y

  def __call__(self, state: deployment_lib.State) -> dict[str, float]:
    """Measures a state: 'test/accuracy', ..., as in eval.csv."""
    found: dict[str, float] = {}
    for split, (x, y) in self._examples.items():
      means = evaluate.mean_over_pieces(
        lambda x, y: self._program.run({**state, 'x': x, 'y': y}, []),
        x,
        y,
        evaluate.piece_size(x, _BATCH_SIZE),
      )
      found |= {f'{split}/{name}': value for name, value in means.items()}
    return found


@dataclasses.dataclass
class _Run:
  """The rounds that are left of a run.

  Attributes:
    rounds: Runs a round.
    evaluate: Measures a state.
    tree: The run's folder, which is open.
    view: Tells about the progress.
    wait_secs: Seconds without a reply after which the run stops.
  """

  rounds: rounds_lib.Rounds
  evaluate: _Evaluation
  tree: output_tree.OutputTree
  view: console.Console
  wait_secs: float

  def __post_init__(self) -> None:
    self._deployed = self.rounds.deployment
    self._train = csv_table.CsvTable(self.tree.train_csv)
    self._eval = csv_table.CsvTable(self.tree.eval_csv)
    self._timing = csv_table.CsvTable(self.tree.timing_csv)
    self._settings = training_types.Settings(
      first_round=self._deployed.first_round,
      total_rounds=self._deployed.total_rounds,
      rounds_per_evaluation=self._deployed.rounds_per_evaluation,
      max_bad_rounds=self._deployed.max_bad_rounds,
    )

  def all(self) -> int:
    """Runs all rounds that are left, and returns the last one."""
    saved, done = self._start()
    self._check(saved, done)
    self.view.begin(done, self._settings)
    try:
      while done < self._deployed.total_rounds:
        done += 1
        saved = self._one(saved, done)
        self._check(saved, done)
    finally:
      self.view.end()
    return done

  def _start(self) -> tuple[deployment_lib.Saved, int]:
    """Returns (the state to start from, the last finished round)."""
    folder, program = self.tree.checkpoints, self.rounds.program
    done = self._deployed.done
    saved = deployment_lib.Saved(program.initial(), 0)
    if checkpoint.versions(folder):
      try:
        done, leaves = checkpoint.read_latest(folder, self._deployed.owner)
        saved = deployment_lib.read_state(leaves, program.parameter)
      except checkpoint.CheckpointError as error:
        raise UsageError(
          f'{folder}: no checkpoint can be used: {error}. Move them away, or'
          ' choose another output-dir'
        ) from error
    for version in checkpoint.versions(folder):
      if version > done:  # Damaged, or the read would have found it.
        path = checkpoint.path_of(folder, version)
        durable.rename(path, path + checkpoint.DAMAGED)
        self.view.say(f'{path} is damaged; going back to round {done}.')
    # A kill leaves at most the rows of the round after the last saved one.
    for table in (self._train, self._eval, self._timing):
      table.truncate_after(done)
    return saved, done

  def _one(
    self, before: deployment_lib.Saved, round_num: int
  ) -> deployment_lib.Saved:
    """Runs, evaluates, releases and saves a round."""
    start = time.monotonic()
    with self.view.phase(training_types.ROUND, round_num):
      outcome = self._outcome(before.state, round_num)
    for line in outcome.lines:
      self.view.say(f'round {round_num}: {line}')
    metrics = outcome.metrics
    is_bad = training_types.is_bad_round(metrics)
    metrics['bad_round'] = int(is_bad)
    timing = {'seconds/round': time.monotonic() - start}
    start = time.monotonic()
    evaluation: Mapping[str, float] = {}
    every, last = self._settings.rounds_per_evaluation, self._settings
    if round_num % every == 0 or round_num == last.total_rounds:
      with self.view.phase(training_types.EVALUATING, round_num):
        evaluation = self.evaluate(outcome.state)
    timing['seconds/evaluation'] = time.monotonic() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    timing['peak_memory_mb'] = peak / 1024.0  # Linux gives KiB.
    # Before the state is saved: a saved round has its rows.
    self._train.log(round_num, metrics)
    if evaluation:
      self._eval.log(round_num, evaluation)
    self._timing.log(round_num, timing)
    saved = deployment_lib.Saved(
      outcome.state, before.num_bad_rounds + 1 if is_bad else 0
    )
    with self.view.phase(training_types.SAVING, round_num):
      self._save(saved, round_num)
    self.view.round_done(
      training_types.RoundReport(
        round_num, metrics, timing, evaluation, is_bad, outcome.lines
      )
    )
    return saved

  def _outcome(
    self, state: deployment_lib.State, round_num: int
  ) -> rounds_lib.Outcome:
    """Runs a round as soon as anybody replies, or raises `StoppedError`."""
    start, told, attempt = time.monotonic(), -math.inf, 0
    while True:
      try:
        return self.rounds.run(state, round_num, attempt)
      except rounds_lib.NobodyError as error:
        waited = time.monotonic() - start
        if waited >= self.wait_secs:
          raise StoppedError(
            f'round {round_num}: {error} for {waited:.0f} s'
            f' (wait={self.wait_secs:g}); start the clients, anew if the'
            ' SuperLink was restarted without --database, and run the app'
            ' again: it continues with this round'
          ) from None
        if waited - told >= _SAY_SECS:
          for line in error.lines:
            self.view.say(f'round {round_num}: {line}')
          self.view.say(
            f'round {round_num}: {error} for {waited:.0f} s; the round does not'
            f' count, and is tried again (up to wait={self.wait_secs:g})'
          )
          told = waited
      time.sleep(_PAUSE_SECS)
      attempt += 1

  def _save(self, saved: deployment_lib.Saved, round_num: int) -> None:
    """Saves a state, and removes the oldest ones."""
    folder, owner = self.tree.checkpoints, self._deployed.owner
    checkpoint.write(
      checkpoint.path_of(folder, round_num),
      self._deployed.leaves(saved, round_num),
      owner,
    )
    best = summary.best_round_num(self.tree.eval_csv)
    versions = checkpoint.versions(folder)
    for old in versions[: -self._deployed.keep_checkpoints]:
      # The best one stays for evaluations, however old it is.
      if old != best:
        durable.remove(checkpoint.path_of(folder, old))

  def _check(self, saved: deployment_lib.Saved, done: int) -> None:
    """Raises `StoppedError` after too many bad rounds."""
    most = self._deployed.max_bad_rounds
    if saved.num_bad_rounds >= most:
      raise StoppedError(
        f'no update could be used in {saved.num_bad_rounds} rounds in a row, up'
        f' to round {done} (--max_bad_rounds={most})'
      )
