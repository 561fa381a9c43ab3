"""The progress of a run, and an estimate of the remaining time."""

from collections.abc import Callable
import math
import time
from typing import Any

from tff_fssl.program import training_types

# Estimates use so many last rounds and evaluations: a machine's load changes.
_NUM_KEPT = 20


class Progress:
  """The phase of a run, and an estimate of the seconds left.

  Another thread may read it. The estimate uses the last rounds and evaluations.
  The first of each kind, which also compiles, counts only for evaluations, and
  only until there is another.

  Attributes:
    phase: One of `training_types.PHASES`.
    done: The last finished round. None before training begins.
    settings: The settings of training. None before it begins.
    accuracy: Test accuracy of the last evaluation, if there was one.
    num_evaluations: The number of evaluations.
  """

  def __init__(self, clock: Callable[[], float] = time.monotonic):
    """Begins with the phase 'starting'.

    Args:
      clock: Gives seconds.
    """
    self.phase = training_types.STARTING
    self.done: int | None = None
    self.settings: training_types.Settings | None = None
    self.accuracy: float | None = None
    self.num_evaluations = 0
    self._clock = clock
    self._last = 0.0
    self._is_first = True
    # Another thread can read these while this one replaces them.
    self._rounds: tuple[float, ...] = ()
    self._evaluations: tuple[float, ...] = ()
    # (when the phase began, how long the last one of its kind took).
    self._phase: tuple[float, float | None] = (clock(), None)
    self._took: dict[str, float] = {}

  def begin(self, done: int, settings: training_types.Settings) -> None:
    """Notes that training begins after round `done`."""
    self.done, self.settings, self._last = done, settings, self._clock()

  def enter(self, phase: str, round_num: int) -> None:
    """Notes that a phase begins, in or after a round."""
    if phase == training_types.ROUND and round_num < 1:
      phase = training_types.PRETRAINING
    self._phase = self._clock(), self._took.get(phase)
    self.phase = phase

  def leave(self) -> None:
    """Notes that the phase has ended."""
    self._took[self.phase] = self._clock() - self._phase[0]

  def round_done(self, report: training_types.RoundReport) -> None:
    """Counts a finished round."""
    now = self._clock()
    evaluation = 0.0
    if report.evaluation:
      evaluation = report.timing.get('seconds/evaluation', 0.0)
      # The first one compiled, and is replaced by the second.
      kept = self._evaluations if self.num_evaluations > 1 else ()
      self._evaluations = (*kept[1 - _NUM_KEPT :], evaluation)
      self.num_evaluations += 1
      self.accuracy = report.evaluation.get('test/accuracy', self.accuracy)
    if not self._is_first:
      # Saving counts as a part of the round.
      rest = max(0.0, now - self._last - evaluation)
      self._rounds = (*self._rounds[1 - _NUM_KEPT :], rest)
    self._is_first = False
    if report.round_num == 0:  # Other computations follow pre-training.
      self._rounds, self._is_first = (), True
    self.done, self._last = report.round_num, now

  def phase_left(self) -> float | None:
    """Estimates the rest of the phase by the last of its kind.

    Returns:
      The seconds, or None if there has been none of its kind.
    """
    began, took = self._phase
    if took is None:
      return None
    return max(0.0, took - (self._clock() - began))

  def seconds_left(self) -> float | None:
    """Estimates the rest of the rounds, of pre-training, or of an export.

    Returns:
      The seconds, or None if they are not known yet.
    """
    if self.phase == training_types.EXPORTING:
      return self.phase_left()
    settings, done, rounds = self.settings, self.done, self._rounds
    if settings is None or done is None or not rounds:
      return None
    last = 0 if done < 1 and settings.first_round < 1 else settings.total_rounds
    every = settings.rounds_per_evaluation
    # Multiples of `every` after `done`, up to `last`.
    due = last // every - done // every
    if last == settings.total_rounds and last % every and done < last:
      due += 1
    evaluations = self._evaluations
    left = (last - done) * sum(rounds) / len(rounds)
    if evaluations:
      left += due * sum(evaluations) / len(evaluations)
    return max(0.0, left - (self._clock() - self._last))

  def json_values(self) -> dict[str, Any]:
    """Returns values for JSON."""
    left = self.seconds_left()
    settings, accuracy = self.settings, self.accuracy
    if accuracy is not None and not math.isfinite(accuracy):
      accuracy = None  # JSON has no NaN.
    return {
      'phase': self.phase,
      'round': self.done,
      'total_rounds': settings and settings.total_rounds,
      'accuracy': accuracy,
      'seconds_left': None if left is None else round(left, 1),
    }
