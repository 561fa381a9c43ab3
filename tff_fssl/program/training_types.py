"""What training and its observers exchange, and whether a round was good."""

import collections
from collections.abc import Mapping, Sequence
import contextlib
import dataclasses
from typing import Any, Protocol

from tff_fssl import metrics as metrics_lib

# What a run is doing.
ROUND = 'round'
EVALUATING = 'evaluating'
SAVING = 'saving'
EXPORTING = 'exporting'
NON_FINITE = f'{metrics_lib.CLIENTS}/num_non_finite_clients'
REJECTED = f'{metrics_lib.CLIENTS}/num_rejected_clients'
_SERVER_NON_FINITE = 'finalizer/server_non_finite'
# An update is suspicious if it is this many times larger than others, or than
# the model's weights.
_FAR = 10.0


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
    """Returns a context manager around a phase."""

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
          left_out_clients, seconds, counts
        round_context, left
        explain_non_finite, if clients were not finite
        explain_rejected, in the first round with rejected clients
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

  def left_out_clients(self, round_num: int) -> Sequence[tuple[str, str]]:
    """Returns (its name, the reason) of each client with unusable data."""
    del round_num
    return ()

  def seconds(self) -> Mapping[str, float]:
    """Returns the seconds of a round's parts: columns `seconds/...`."""
    return {}

  def counts(self, round_num: int) -> Mapping[str, int]:
    """Returns further columns of a round's row in train.csv."""
    del round_num
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

  def explain_rejected(self, state: Any, round_num: int) -> Sequence[str]:
    """Says why clients were rejected. Called in another thread.

    Args:
      state: The process's state before the round.
      round_num: The number of the round.

    Returns:
      Lines of text.
    """
    del state, round_num
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


def is_bad_round(metrics: Mapping[str, Any]) -> bool:
  """Returns whether a round had updates, but no usable one.

  Args:
    metrics: The round's metrics, as in train.csv.

  Returns:
    True if clients took part, and every update was rejected or not finite, or
    the aggregate was not finite. Without clients, True if the server's own
    training was not finite. A round is not bad if every client has weight 0,
    since it is empty or sure of all its pseudo-labels, or if too few have a
    weight for a robust aggregator.
  """
  num_clients = int(metrics.get(f'{metrics_lib.CLIENTS}/num_clients', 0))
  if not num_clients:
    return bool(metrics.get(_SERVER_NON_FINITE, 0))
  # The aggregation counts clients that `client_work` has rejected again: a
  # maximum, not a sum.
  rejected = int(metrics.get('aggregator/num_rejected_clients', 0))
  num_failed = max(
    int(metrics.get(NON_FINITE, 0)) + int(metrics.get(REJECTED, 0)),
    rejected,
  )
  if num_failed >= num_clients:
    return True
  if metrics.get('aggregator/inner/too_few_clients', 0):
    return False
  # Private aggregators do not report how many clients had a weight above 0.
  weighed = int(metrics.get('aggregator/num_weighted_clients', 1))
  return weighed > 0 and bool(metrics.get('finalizer/update_skipped', 0))


class UpdateWatch:
  """Notices an update that is far larger than those of previous rounds."""

  def __init__(self):
    self._recent: collections.deque[float] = collections.deque(maxlen=10)

  def warning(self, metrics: Mapping[str, Any]) -> str | None:
    """Describes a suspicious update.

    Args:
      metrics: Metrics of the next round, as in train.csv.

    Returns:
      A sentence if the update's norm is more than 10 times the largest norm of
      the last 3 to 10 rounds, or more than 10 times the norm of the model's
      weights. None for other updates.
    """
    norm = float(metrics.get('finalizer/update_norm', 0.0))
    if not norm:
      return None
    recent, weights = self._recent, metrics.get('finalizer/weights_norm')
    compared = None
    if len(recent) >= 3 and norm > _FAR * max(recent):
      compared = norm / max(recent), 'the largest of the previous rounds'
    elif weights is not None and norm > _FAR * float(weights):
      compared = (
        norm / max(float(weights), 1e-30),
        "that of the model's weights",
      )
    # Suspicious ones as well: a new level is reported once, not for ever.
    recent.append(norm)
    if compared is None:
      return None
    return (
      f"the update's norm is {norm:.3g}, {compared[0]:.3g} times"
      f' {compared[1]}; it may have destroyed the model, and a client may have'
      ' lied. --aggregator=robust bounds what a client can do'
    )
