"""The loggers that a run's flags ask for: TensorBoard and trackers.

Training matters more: a logger that fails is reported once, then dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
import contextlib
import os
from typing import Any

from tff_fssl import durable
from tff_fssl import hparams
from tff_fssl.program import checkpoint
from tff_fssl.program import config as config_lib
from tff_fssl.program import experiment as experiment_lib
from tff_fssl.program import inspection
from tff_fssl.program import loggers
from tff_fssl.program import output_tree
from tff_fssl.program import plots
from tff_fssl.program import run_hparams
from tff_fssl.program import runs as runs_lib
from tff_fssl.program import training
from tff_fssl.program import training_types

_TENSORBOARD = 'TensorBoard'
# Seconds that the end of a run waits for a tracker, with and without models.
_SECONDS, _SECONDS_WITHOUT_MODEL = 300.0, 20.0


class RunLoggers(contextlib.AbstractContextManager['RunLoggers']):
  """TensorBoard and the trackers of a run."""

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
    self._loggers: dict[str, loggers.RunLogger] = {}
    config = experiment.task.config
    # Times and sizes of clients depend on their data.
    self._is_private = config.is_private
    is_new = not checkpoint.versions(tree.checkpoints)
    if config.run.tensorboard:
      with self._dropping(_TENSORBOARD):
        self._begin_tensorboard(is_new)
    for kind, where in run_hparams.parse_trackers(config.run.track).items():
      with self._dropping(run_hparams.TRACKERS[kind]):
        self._begin_tracker(kind, where, is_new)

  def log(self, round_num: int, metrics: Mapping[str, Any]) -> None:
    """Logs the metrics of a round to all."""
    public = metrics
    if self._is_private:
      hidden = ('seconds/', 'peak_memory')
      public = {n: v for n, v in metrics.items() if not n.startswith(hidden)}
    for name, logger in [*self._loggers.items()]:
      with self._dropping(name):
        logger.log(round_num, metrics if name == _TENSORBOARD else public)

  def round_done(self, state: Any, report: training_types.RoundReport) -> None:
    """Shows how confident the model is, after an evaluation.

    Args:
      state: The process's state after the round.
      report: The round's figures.
    """
    process, task = self._experiment.process, self._experiment.task
    board = self._loggers.get(_TENSORBOARD)
    if board is None or not report.evaluation:
      return
    if process.prediction.member is not None:
      return  # Each client has its own model.
    with self._dropping(_TENSORBOARD):
      if self._predictor is None:
        self._predictor = inspection.Predictor(task, process.prediction)
      found = inspection.confidences(
        task, self._predictor, state.global_model_weights
      )
      board.log(report.round_num, {'test/confidence': found})

  def finish(
    self, state: str, results: Mapping[str, Any] | None = None
  ) -> None:
    """Ends them, once.

    Args:
      state: `loggers.FINISHED`, `FAILED` or `KILLED`.
      results: The content of `summary.json`, if the run has finished.
    """
    figures = training.flatten(results or {})
    round_num = int(figures.pop('rounds', 0))
    for name, logger in [*self._loggers.items()]:
      with self._dropping(name):
        if results is not None:
          logger.log_summary(round_num, figures)
          if name != _TENSORBOARD:
            self._say(f'Sending the results to {name} ...')
            self._log_files(logger)
        seconds = _SECONDS_WITHOUT_MODEL if results is None else _SECONDS
        logger.finish(state, seconds)
    self._loggers.clear()

  def __exit__(self, kind: Any, exception: Any, traceback: Any) -> None:
    is_asked = isinstance(exception, KeyboardInterrupt)
    self.finish(loggers.KILLED if is_asked else loggers.FAILED)

  @contextlib.contextmanager
  def _dropping(self, name: str) -> Iterator[None]:
    """Reports a failure, and drops the logger."""
    try:
      yield
    except Exception as error:  # pylint: disable=broad-except
      # Any error: training matters more.
      self._say(loggers.failure(name, error))
      self._loggers.pop(name, None)

  def _begin_tensorboard(self, is_new: bool) -> None:
    """Shows the flags, sample views, and the partition."""
    task = self._experiment.task
    board = loggers.TensorBoardLogger(self._tree.tensorboard)
    self._loggers[_TENSORBOARD] = board
    ignored = config_lib.neutral_flags()
    values = task.config.flags()
    board.log_hparams({n: v for n, v in values.items() if n not in ignored})
    if not is_new:
      return
    before = task.config.first_round - 1
    views = inspection.sample_views(task)
    if views is not None:
      about = 'Training examples: as they are, as weak and as strong views.'
      board.log_pixels('pictures/views', views, before, about)
    board.log_picture('pictures/partition', self._tree.partition_png, before)

  def _begin_tracker(self, kind: str, where: str, is_new: bool) -> None:
    """Starts a tracker, and shows it the partition."""
    config, tree = self._experiment.task.config, self._tree
    values = config.flags()
    # The destination of figures is no part of the run.
    del values['track']
    tracker = loggers.TrackerLogger(
      f'{kind}:{where}',
      tree.tracking,
      name=tree.name,
      params={
        name: hparams.format_value(value) for name, value in values.items()
      },
      algorithm=config.run.algorithm,
    )
    self._loggers[run_hparams.TRACKERS[kind]] = tracker
    if is_new and not self._is_private:
      tracker.log_picture('partition', tree.partition_png)

  def _log_files(self, logger: loggers.RunLogger) -> None:
    """Sends curves, tables, flags and models."""
    tree = self._tree
    run = runs_lib.read_tree(tree)
    group = runs_lib.group_runs([run.public if self._is_private else run])
    curves = os.path.join(tree.report, 'curves.png')
    durable.make_folder(tree.report)
    plots.plot(group, curves)
    logger.log_picture('curves', curves)
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
        logger.log_file(os.path.basename(path), path)
