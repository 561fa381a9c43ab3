"""The interface of everything that takes the metrics of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from tff_fssl import files

FINISHED, FAILED, KILLED = 'FINISHED', 'FAILED', 'KILLED'


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
