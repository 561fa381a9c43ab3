"""What training and its observers exchange. TensorFlow-free."""

from collections.abc import Mapping, Sequence
import dataclasses
from typing import Any, Protocol


@dataclasses.dataclass(frozen=True)
class Settings:
  """How long to train, and how often to evaluate and save.

  Attributes:
    first_round: The number of the first round; rounds before 1 are the
      server's pre-training.
    total_rounds: The number of the last round.
    rounds_per_evaluation: Rounds whose number is a multiple of this, and the
      last round, are evaluated.
    rounds_per_checkpoint: Rounds whose number is a multiple of this, and the
      last round, are saved.
    max_bad_rounds: Training stops after this many consecutive bad rounds.
    strict_clients: Whether a client whose data cannot be used stops training.
  """

  first_round: int = 1
  total_rounds: int = 1
  rounds_per_evaluation: int = 1
  rounds_per_checkpoint: int = 1
  max_bad_rounds: int = 3
  strict_clients: bool = False


@dataclasses.dataclass(frozen=True)
class RoundReport:
  """What users are told about a finished round.

  Attributes:
    round_num: The number of the round.
    metrics: Name -> value, as in train.csv.
    timing: Name -> value, as in timing.csv.
    evaluation: Name -> value, as in eval.csv; empty without an evaluation.
    is_bad: Whether no update could be used.
    failures: A line for each client whose data could not be used.
  """

  round_num: int
  metrics: Mapping[str, Any]
  timing: Mapping[str, float]
  evaluation: Mapping[str, float]
  is_bad: bool
  failures: Sequence[str] = ()


class Reporter(Protocol):
  """Tells users about the progress of training."""

  def begin(self, done: int, settings: Settings) -> None:
    """Training begins, or continues, after round `done`."""

  def round_done(self, report: RoundReport) -> None:
    """A round has been finished and its metrics released."""

  def say(self, message: str) -> None:
    """Something else worth knowing."""

  def end(self) -> None:
    """Training has ended, successfully or not."""


class StopRequest:
  """Asks a running training to save and stop after its round."""

  def __init__(self):
    self.signal: int | None = None

  def set(self, signal: int) -> None:
    """Requests the stop; `signal` is the reason."""
    self.signal = signal
