"""A release manager for TensorBoard that also writes pictures and flags."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from tff_fssl.lazy import tf, tff
from tff_fssl.program.reporting import managers

# Columns of the HParams dashboard.
_RESULTS = {
  'test/accuracy': 'test accuracy, last round',
  'best_validation/test/accuracy': 'test accuracy, best validation',
  'best_validation/round': 'round, best validation',
}


class TensorBoardReleaseManager(tff.program.ReleaseManager):
  """Releases values to TensorBoard, under TFF's names.

  Unlike TFF's manager of that name, it can write pictures and hyper-parameters
  into the same file: of several files in a folder, TensorBoard follows only the
  newest one.
  """

  def __init__(self, folder: str):
    """Begins a file.

    Args:
      folder: The folder of the run's events; made if missing.
    """
    self._writer = tf.summary.create_file_writer(folder)

  async def release(self, value: Any, key: int) -> None:
    """Writes scalars, and histograms of arrays.

    Args:
      value: Nested mapping of numbers or arrays, or of references to these.
      key: The round.
    """
    value = await tff.program.materialize_value(value)
    self.write(managers.flatten(value), key)

  def write(self, values: Mapping[str, Any], round_num: int) -> None:
    """Writes numbers as scalars and arrays as histograms, by name."""
    with self._writer.as_default(round_num):
      for name, value in values.items():
        array = np.asarray(value)
        if array.dtype.kind not in 'biuf':
          continue
        if array.ndim:
          tf.summary.histogram(name, array)
        else:
          tf.summary.scalar(name, array)

  def write_picture(
    self, name: str, pixels: np.ndarray, round_num: int, about: str
  ) -> None:
    """Writes a picture, uint8 [H, W, 1 or 3], and what it shows."""
    with self._writer.as_default(round_num):
      tf.summary.image(name, pixels[np.newaxis], description=about)
    self._writer.flush()

  def write_hparams(self, values: Mapping[str, Any]) -> None:
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

  def end(self, is_finished: bool) -> None:
    """Says whether the run has reached its last round, and ends the file."""
    # pylint: disable=import-outside-toplevel
    from tensorboard.plugins.hparams import api_pb2
    from tensorboard.plugins.hparams import summary

    status = api_pb2.STATUS_SUCCESS if is_finished else api_pb2.STATUS_FAILURE
    with self._writer.as_default(0):
      tf.summary.experimental.write_raw_pb(
        summary.session_end_pb(status).SerializeToString()
      )
    self._writer.close()
