"""What training and those who watch it tell each other. TensorFlow-free."""

from collections.abc import Mapping, Sequence
import dataclasses
from typing import Any, Protocol


@dataclasses.dataclass(frozen=True)
class Settings:
  """How long and how often.

  Attributes:
    first_round: The number of the first round; rounds before 1 are the
      server's pre-training.
    total_rounds: The number of the last round.
    rounds_per_evaluation: Rounds whose number it divides are evaluated, and
      the last one.
    rounds_per_checkpoint: Likewise saved.
    max_bad_rounds: After so many bad rounds in a row training stops.
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
  """A finished round, for people.

  Attributes:
    round_num: Its number.
    metrics: Name -> value, as in train.csv.
    timing: As in timing.csv.
    evaluation: As in eval.csv; empty if there was none.
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
  """Tells people how it goes."""

  def begin(self, done: int, settings: Settings) -> None:
    """Training begins, or goes on, after round `done`."""

  def round_done(self, report: RoundReport) -> None:
    """A round has been finished and its metrics released."""

  def say(self, message: str) -> None:
    """Something else worth knowing."""

  def end(self) -> None:
    """Training has ended, in whatever way."""


class StopRequest:
  """Asks a running training to save and stop after its round."""

  def __init__(self):
    self.signal: int | None = None

  def set(self, signal: int) -> None:
    """Requests it; `signal` is why."""
    self.signal = signal
