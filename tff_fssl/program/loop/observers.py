"""What shows a run to others while it trains: TensorBoard and trackers.

Training matters more: whatever fails here is said once, and then left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
import contextlib
import os
import types
from typing import Any

import numpy as np
from PIL import Image

from tff_fssl import durable
from tff_fssl import hparams
from tff_fssl.lazy import tff
from tff_fssl.program import training_types
from tff_fssl.program.configuration import continuation
from tff_fssl.program.configuration import run_hparams
from tff_fssl.program.loop import experiment as experiment_lib
from tff_fssl.program.loop import inspection
from tff_fssl.program.reporting import boards
from tff_fssl.program.reporting import managers
from tff_fssl.program.reporting import plots
from tff_fssl.program.reporting import runs as runs_lib
from tff_fssl.program.reporting import tracking
from tff_fssl.program.storage import checkpoint
from tff_fssl.program.storage import output_tree

_TENSORBOARD = 'TensorBoard'
# How long the end of a run waits for a tracker: with models, and without.
_SECONDS, _SECONDS_WITHOUT_MODEL = 300.0, 20.0


def _is_public(path: tuple[str | int, ...]) -> bool:
  """Whether a column depends on single clients only by the sum of updates."""
  return not str(path[0]).startswith(('seconds/', 'peak_memory'))


class Observers(contextlib.AbstractContextManager['Observers']):
  """TensorBoard and the trackers of a run.

  Attributes:
    manager: Takes the metrics of rounds; None if there are no observers.
  """

  def __init__(
    self,
    experiment: experiment_lib.Experiment,
    tree: output_tree.OutputTree,
    say: Callable[[str], None],
  ):
    """Starts them, as the run's flags say.

    Args:
      experiment: The run.
      tree: Its folder, in which it is recorded.
      say: Told about failures.
    """
    self._experiment, self._tree, self._say = experiment, tree, say
    self._predictor: inspection.Predictor | None = None
    self._board: boards.TensorBoardReleaseManager | None = None
    self._trackers: dict[str, tracking.TrackerReleaseManager] = {}
    self._has_ended = False
    # Times and sizes of clients depend on their data.
    self._is_private = experiment.task.config.is_private
    run = experiment.task.config.run
    is_new = not checkpoint.versions(tree.checkpoints)
    if run.tensorboard:
      with self._attempt(_TENSORBOARD):
        self._board = boards.TensorBoardReleaseManager(tree.tensorboard)
        self._begin_board(is_new)
    for kind, where in run_hparams.parse_trackers(run.track).items():
      with self._attempt(run_hparams.TRACKERS[kind]):
        self._begin_tracker(kind, where, is_new)
    to_managers: dict[str, tff.program.ReleaseManager] = dict(self._trackers)
    if self._is_private:
      to_managers = {
        name: tff.program.FilteringReleaseManager(tracker, _is_public)
        for name, tracker in to_managers.items()
      }
    if self._board is not None:
      to_managers[_TENSORBOARD] = self._board
    self.manager: tff.program.ReleaseManager | None = None
    if to_managers:
      self.manager = tff.program.GroupingReleaseManager(
        [
          managers.BestEffortReleaseManager(manager, name, say)
          for name, manager in to_managers.items()
        ]
      )

  def round_done(self, state: Any, report: training_types.RoundReport) -> None:
    """Shows how confident the model is, after an evaluation.

    Args:
      state: The process's state after the round.
      report: The round's figures.
    """
    process, task = self._experiment.process, self._experiment.task
    if self._board is None or not report.evaluation:
      return
    if process.prediction.member is not None:
      return  # Each client has its own model.
    with self._attempt(_TENSORBOARD):
      if self._predictor is None:
        self._predictor = inspection.Predictor(task, process.prediction)
      table = state.distributor['table'] if len(state.distributor) else ()
      found = inspection.confidences(
        task, self._predictor, state.global_model_weights, table
      )
      self._board.write({'test/confidence': found}, report.round_num)

  def end(self, state: str, results: Mapping[str, Any] | None = None) -> None:
    """Ends them; once.

    Args:
      state: `tracking.FINISHED`, `FAILED` or `KILLED`.
      results: What `summary.json` holds, if the run has finished.
    """
    if self._has_ended:
      return
    self._has_ended = True
    figures = managers.flatten(results or {})
    round_num = int(figures.pop('rounds', 0))
    if self._board is not None:
      with self._attempt(_TENSORBOARD):
        best = {n: v for n, v in figures.items() if n.startswith('best_')}
        self._board.write(best, round_num)
        self._board.end(state == tracking.FINISHED)
    for name, tracker in self._trackers.items():
      if tracker.has_failed:
        continue  # It was said when it failed.
      with self._attempt(name):
        seconds = _SECONDS_WITHOUT_MODEL
        if results is not None:
          self._say(f'Sending the results to {name} ...')
          tracker.send_summary(figures, round_num)
          self._send_files(tracker)
          seconds = _SECONDS
        tracker.end(state, seconds)

  def __exit__(
    self,
    exception_type: type[BaseException] | None,
    exception: BaseException | None,
    traceback: types.TracebackType | None,
  ) -> None:
    is_asked = isinstance(exception, KeyboardInterrupt)
    self.end(tracking.KILLED if is_asked else tracking.FAILED)

  @contextlib.contextmanager
  def _attempt(self, name: str) -> Iterator[None]:
    """Says what fails, and leaves the observer out from then on."""
    try:
      yield
    except Exception as error:  # pylint: disable=broad-except
      # Any error: training matters more.
      self._say(managers.failure(name, error))
      if name == _TENSORBOARD:
        self._board = None

  def _begin_board(self, is_new: bool) -> None:
    """Shows the flags, what views look like, and who holds what."""
    assert self._board is not None
    task = self._experiment.task
    ignored = continuation.without_influence()
    values = task.config.flags()
    self._board.write_hparams(
      {name: value for name, value in values.items() if name not in ignored}
    )
    if not is_new:
      return
    before = task.config.first_round - 1
    views = inspection.sample_views(task)
    if views is not None:
      about = 'Training examples: as they are, as weak and as strong views.'
      self._board.write_picture('pictures/views', views, before, about)
    with Image.open(self._tree.partition_png) as picture:
      pixels = np.asarray(picture.convert('RGB'))
    about = 'How many examples of each class each client holds.'
    self._board.write_picture('pictures/partition', pixels, before, about)

  def _begin_tracker(self, kind: str, where: str, is_new: bool) -> None:
    """Starts a tracker, and shows it who holds what."""
    config, tree = self._experiment.task.config, self._tree
    values = config.flags()
    del values['track']
    tracker = tracking.TrackerReleaseManager(
      f'{kind}:{where}',
      tree.tracking,
      name=os.path.basename(os.path.abspath(tree.path)),
      params={name: hparams.to_text(value) for name, value in values.items()},
      algorithm=config.run.algorithm,
    )
    self._trackers[run_hparams.TRACKERS[kind]] = tracker
    if is_new and not self._is_private:
      tracker.send_picture('partition', tree.partition_png)

  def _send_files(self, tracker: tracking.TrackerReleaseManager) -> None:
    """Sends curves, tables, flags and models."""
    tree = self._tree
    run = runs_lib.of_tree(tree)
    group = runs_lib.group_runs([run.public if self._is_private else run])
    curves = os.path.join(tree.report, 'curves.png')
    durable.make_folder(tree.report)
    plots.plot(group, curves)
    tracker.send_picture('curves', curves)
    for path in (
      tree.flags_file,
      tree.summary_json,
      tree.train_csv,
      tree.eval_csv,
      *([] if self._is_private else [tree.timing_csv]),
      tree.model,
      tree.model_best,
    ):
      if os.path.exists(path):
        tracker.send_artifact(os.path.basename(path), path)
