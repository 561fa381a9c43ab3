"""Takers of the metrics of a run: TensorBoard, MLflow, Weights & Biases.

A tracker's library runs in a thread of its own: a server that does not answer
and a library that fails neither delay nor end training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import logging
import math
import os
import queue
import threading
from typing import Any, Protocol

import numpy as np

from tff_fssl import durable
from tff_fssl import files
from tff_fssl.lazy import tf
from tff_fssl.program import trackers

FINISHED, FAILED, KILLED = trackers.ENDS
# Columns of the HParams dashboard.
_RESULTS = {
  'test/accuracy': 'test accuracy, last round',
  'best_validation/test/accuracy': 'test accuracy, best validation',
  'best_validation/round': 'round, best validation',
}
# Messages that wait for a slow tracker; one for each round.
_MAX_WAITING = 100_000
# Defaults of the libraries' own settings: they do not try for long, and tell
# nothing to others. Variables that the user set take precedence.
_SETTINGS = {
  'GIT_PYTHON_REFRESH': 'quiet',
  # Folders get no new features; databases do.
  'MLFLOW_ALLOW_FILE_STORE': 'true',
  'MLFLOW_DISABLE_TELEMETRY': 'true',
  'MLFLOW_HTTP_REQUEST_MAX_RETRIES': '3',
  'MLFLOW_HTTP_REQUEST_TIMEOUT': '20',
  'MLFLOW_LOGGING_LEVEL': 'ERROR',
  'MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT': 'true',
  'WANDB_ERROR_REPORTING': 'false',
  'WANDB_SILENT': 'true',
}


class Logger(Protocol):
  """A place for metrics: a CSV table, TensorBoard, MLflow, Weights & Biases."""

  def log(self, round_num: int, metrics: Mapping[str, Any]) -> None:
    """Adds the metrics of a round: scalars by name."""


class RunLogger(Logger, Protocol):
  """A logger that shows a whole run."""

  def log_picture(self, name: str, path: str) -> None:
    """Adds a PNG file, which must stay until `finish`."""

  def log_file(self, name: str, path: str) -> None:
    """Adds a file or a folder, which must stay until `finish`."""

  def log_summary(self, round_num: int, summary: Mapping[str, float]) -> None:
    """Adds the results after the last round."""

  def finish(self, state: str, seconds: float) -> None:
    """Ends the run.

    Args:
      state: `FINISHED`, `FAILED` or `KILLED`.
      seconds: How long to wait until everything is sent.
    """


def failure(name: str, error: Exception) -> str:
  """Returns the warning that a logger has failed, and is not used again."""
  return f'{name} stops: {type(error).__name__}: {files.first_line(error)}'


class TensorBoardLogger:
  """Writes a run to TensorBoard, under TFF's names.

  TFF's own manager cannot write pictures and hyper-parameters into the same
  file. TensorBoard follows only the newest of several files in a folder.
  """

  def __init__(self, folder: str):
    """Begins a file.

    Args:
      folder: The folder of the run's events, which is made if missing.
    """
    self._writer = tf.summary.create_file_writer(folder)

  def log(self, round_num: int, metrics: Mapping[str, Any]) -> None:
    """Writes numbers as scalars, and arrays as histograms."""
    with self._writer.as_default(round_num):
      for name, value in metrics.items():
        array = np.asarray(value)
        # TensorBoard shows numbers only.
        if array.dtype.kind not in 'biuf':
          continue
        if array.ndim:
          tf.summary.histogram(name, array)
        else:
          tf.summary.scalar(name, array)

  def log_picture(self, name: str, path: str, round_num: int = 0) -> None:
    """Writes a PNG file."""
    from PIL import Image  # pylint: disable=import-outside-toplevel

    with Image.open(path) as picture:
      self.log_pixels(name, np.asarray(picture.convert('RGB')), round_num)

  def log_pixels(
    self, name: str, pixels: np.ndarray, round_num: int, about: str = ''
  ) -> None:
    """Writes a picture, uint8 [H, W, 1 or 3], and a caption."""
    with self._writer.as_default(round_num):
      tf.summary.image(name, pixels[np.newaxis], description=about or None)
    # Pictures are few, and looked at while the run continues.
    self._writer.flush()

  def log_hparams(self, values: Mapping[str, Any]) -> None:
    """Writes hyper-parameters: bool, int, float or str by name."""
    # TensorBoard's plugin takes a second.
    # pylint: disable-next=import-outside-toplevel
    from tensorboard.plugins.hparams import api

    with self._writer.as_default(0):
      api.hparams_config(
        [api.HParam(name) for name in values],
        [api.Metric(tag, display_name=name) for tag, name in _RESULTS.items()],
      )
      api.hparams(dict(values))

  def log_file(self, name: str, path: str) -> None:
    """Does nothing: TensorBoard shows no files."""

  def log_summary(self, round_num: int, summary: Mapping[str, float]) -> None:
    """Writes the results of the best round. `log` wrote those of the last."""
    best = {n: v for n, v in summary.items() if n.startswith('best_')}
    self.log(round_num, best)

  def finish(self, state: str, seconds: float = 0.0) -> None:
    """Writes whether the run has reached its last round, and ends the file."""
    # pylint: disable=import-outside-toplevel
    from tensorboard.plugins.hparams import api_pb2
    from tensorboard.plugins.hparams import summary

    del seconds  # The disk is near.
    status = api_pb2.STATUS_FAILURE
    if state == FINISHED:
      status = api_pb2.STATUS_SUCCESS
    with self._writer.as_default(0):
      tf.summary.experimental.write_raw_pb(
        summary.session_end_pb(status).SerializeToString()
      )
    self._writer.close()


class RoundProfiler:
  """Profiles rounds. A failure is reported, and training continues."""

  def __init__(
    self, rounds: frozenset[int], folder: str, say: Callable[[str], None]
  ):
    """Chooses rounds.

    Args:
      rounds: Numbers of the rounds.
      folder: TensorBoard's folder. Each profile is a run `round_N` in it, so
        that two profiles made in one second do not overwrite each other.
      say: Tells the user.
    """
    self._rounds = rounds
    self._folder = folder
    self._say = say

  @contextlib.contextmanager
  def round(self, round_num: int) -> Iterator[None]:
    """Profiles the body of the `with` block, if the round was chosen."""
    if round_num not in self._rounds:
      yield
      return
    profiler = tf.profiler.experimental
    folder = os.path.join(self._folder, f'round_{round_num}')
    started = self._succeeds(lambda: profiler.start(folder))
    try:
      # TensorBoard's profile plugin recognizes a step by this trace.
      with profiler.Trace('round', step_num=round_num, _r=1):
        yield
    finally:
      if started and self._succeeds(profiler.stop):
        self._say(f'Profile of round {round_num}: {folder}')

  def _succeeds(self, action: Callable[[], None]) -> bool:
    try:
      action()
    except Exception as error:  # pylint: disable=broad-except
      self._say(f'--profile: {type(error).__name__}: {error}')
      return False
    return True


class TrackerError(Exception):
  """A failure of a tracker, with its reason."""


class TrackerLogger:
  """Sends a run to a tracker.

  Only `finish` waits for the tracker. Rounds that the tracker's run has already
  are not sent again. Each method raises `TrackerError`, once, if the tracker
  has failed.
  """

  def __init__(
    self,
    target: str,
    folder: str,
    *,
    name: str,
    params: Mapping[str, str],
    algorithm: str,
  ):
    """Starts the tracker's thread.

    Args:
      target: 'mlflow:URI', a server or a folder, or 'wandb:PROJECT', perhaps
        with 'ENTITY/' before it.
      folder: A folder of this run alone. It remembers the tracker's run, which
        is continued by a later logger with the same folder.
      name: The name of the run at the tracker.
      params: Flags or hyper-parameters, which the tracker shows. Nothing
        secret.
      algorithm: The algorithm, as a tag.
    """
    durable.make_folder(folder)
    for variable, value in _SETTINGS.items():
      os.environ.setdefault(variable, value)
    self._calls: queue.Queue[Sequence[Any]] = queue.Queue(_MAX_WAITING)
    self._error: Exception | None = None
    self._thread = threading.Thread(
      target=self._track, args=(target, os.path.abspath(folder)), daemon=True
    )
    self._thread.start()
    self._send('start', name, dict(params), algorithm)

  def log(self, round_num: int, metrics: Mapping[str, Any]) -> None:
    """Sends the known scalars of a round."""
    self._check()
    scalars = {
      name: float(value)
      for name, value in metrics.items()
      if np.ndim(value) == 0 and not isinstance(value, (str, bytes))
    }
    known = {name: v for name, v in scalars.items() if not math.isnan(v)}
    self._send('log', round_num, known)

  def log_picture(self, name: str, path: str) -> None:
    """Sends a PNG file, which must stay until `finish`."""
    self._send('log_picture', name, os.path.abspath(path))

  def log_file(self, name: str, path: str) -> None:
    """Sends a file or a folder, which must stay until `finish`."""
    self._send('log_file', name, os.path.abspath(path))

  def log_summary(self, round_num: int, summary: Mapping[str, float]) -> None:
    """Sends the results after the last round."""
    self._send('log_summary', round_num, dict(summary))

  def finish(self, state: str, seconds: float) -> None:
    """Ends the tracker's run, once, and waits until it has received all.

    Args:
      state: `FINISHED`, `FAILED` or `KILLED`.
      seconds: How long to wait. What is not sent then is lost.
    """
    self._send('finish', state)
    self._send()
    self._thread.join(seconds)
    self._check()
    if self._thread.is_alive():
      raise TrackerError(f'it has not taken everything within {seconds:g} s')

  def _send(self, *call: Any) -> None:
    """Queues a call. An empty one is the last."""
    # If the queue is full, the tracker hangs. `finish` does not wait for it.
    with contextlib.suppress(queue.Full):
      self._calls.put_nowait(call)

  def _check(self) -> None:
    """Raises `TrackerError`, once, if the tracker has failed."""
    error, self._error = self._error, None
    if error is not None:
      reason = f'{type(error).__name__}: {files.first_line(error)}'
      raise TrackerError(reason) from error

  def _track(self, target: str, folder: str) -> None:
    # It warns before each new attempt. The last failure is reported anyway.
    logging.getLogger('urllib3').setLevel(logging.ERROR)
    try:
      trackers.track(target, folder, iter(self._calls.get, ()))
    except Exception as error:  # pylint: disable=broad-except
      # A tracker's library may raise anything.
      self._error = error
