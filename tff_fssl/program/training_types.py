"""Types that training and its observers exchange."""

from collections.abc import Mapping, Sequence
import contextlib
import dataclasses
from typing import Any, Protocol

# What a run is doing.
STARTING = 'starting'
PRETRAINING = 'pre-training'
ROUND = 'round'
EVALUATING = 'evaluating'
SAVING = 'saving'
EXPORTING = 'exporting'
PHASES = (STARTING, PRETRAINING, ROUND, EVALUATING, SAVING, EXPORTING)


@dataclasses.dataclass(frozen=True)
class Settings:
  """The number of rounds, and the intervals of evaluations and saves.

  Attributes:
    first_round: The number of the first round. Rounds before 1 are the server's
      pre-training.
    total_rounds: The number of the last round.
    rounds_per_evaluation: Multiples of this and the last round are evaluated.
    rounds_per_checkpoint: Multiples of this and the last round are saved.
    max_bad_rounds: Training stops after this many consecutive bad rounds.
    strict_clients: Whether a client with unusable data stops training.
    evaluated_on: The examples of evaluations, in words, for users.
  """

  first_round: int = 1
  total_rounds: int = 1
  rounds_per_evaluation: int = 1
  rounds_per_checkpoint: int = 1
  max_bad_rounds: int = 3
  strict_clients: bool = False
  evaluated_on: str = 'all test examples'


@dataclasses.dataclass(frozen=True)
class RoundReport:
  """The figures of a finished round.

  Attributes:
    round_num: The number of the round.
    metrics: Name -> value, as in train.csv.
    timing: Name -> value, as in timing.csv.
    evaluation: Name -> value, as in eval.csv. Empty without an evaluation.
    is_bad: Whether no update could be used.
    failures: A line for each client with unusable data.
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
    """Reports that training begins, or continues, after round `done`."""

  def phase(
    self, name: str, round_num: int
  ) -> contextlib.AbstractContextManager[Any]:
    """Returns a context manager around one of `PHASES`."""

  def round_done(self, report: RoundReport) -> None:
    """Reports that a round is finished and its metrics released."""

  def say(self, message: str) -> None:
    """Reports something else."""

  def end(self) -> None:
    """Reports that training has ended, successfully or not."""


class Hooks:
  """Hooks into training. By default, they do nothing.

  To take part, override methods of a subclass and give an instance of it to
  `training.train(..., hooks=)`. In a run the methods are called in this order:

      begin
      for each round:
        round_context, entered
          left_out_clients, seconds
        round_context, left
        explain_non_finite, if clients were not finite
        round_done
      end

  `round_context` ends after the round was computed and, if due, evaluated, and
  its metrics were released. `round_done` follows after its state was saved, if
  due.

  An exception in a hook ends training: `round_context` is left, `end` is
  called, and `train` raises the exception. The last saved state stays valid,
  and the same command continues from it. Rounds after it are repeated: their
  rows are replaced, and their hooks are called again. Hooks see the values that
  training works with, and must not change them.
  """

  def begin(self, done: int, settings: Settings) -> None:
    """Reports that training begins, or continues, after round `done`."""

  def round_context(
    self, round_num: int
  ) -> contextlib.AbstractContextManager[Any]:
    """Returns a context manager around a round, with its evaluation."""
    del round_num
    return contextlib.nullcontext()

  def left_out_clients(self, round_num: int) -> Sequence[tuple[int, str]]:
    """Returns (client, reason) of each client with unusable data."""
    del round_num
    return ()

  def seconds(self) -> Mapping[str, float]:
    """Returns the seconds of a round's parts: columns `seconds/...`."""
    return {}

  def explain_non_finite(
    self, state: Any, round_num: int, num_clients: int
  ) -> Sequence[str]:
    """Says why clients were not finite. Called in another thread.

    Args:
      state: The process's state before the round.
      round_num: The number of the round.
      num_clients: How many clients were not finite in it.

    Returns:
      Lines of text.
    """
    del state, round_num, num_clients
    return ()

  def round_done(self, state: Any, report: RoundReport) -> None:
    """Runs after a round is finished.

    Args:
      state: The process's state after the round.
      report: The round's figures.
    """

  def end(self) -> None:
    """Runs after training has ended, successfully or not, if it began."""


class StopRequest:
  """Asks a running training to save and stop after its round."""

  def __init__(self):
    self.signal: int | None = None

  def set(self, signal: int) -> None:
    """Requests the stop. `signal` is the reason."""
    self.signal = signal
