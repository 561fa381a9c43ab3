"""TensorBoard: a logger that also writes pictures and flags, and profiles."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
import contextlib
import os
from typing import Any

import numpy as np

from tff_fssl.lazy import tf
from tff_fssl.program.reporting import loggers

# Columns of the HParams dashboard.
_RESULTS = {
  'test/accuracy': 'test accuracy, last round',
  'best_validation/test/accuracy': 'test accuracy, best validation',
  'best_validation/round': 'round, best validation',
}


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
    if state == loggers.FINISHED:
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
