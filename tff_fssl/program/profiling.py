"""TensorBoard profiles of chosen rounds. Only profiling needs TensorFlow."""

from collections.abc import Callable, Iterator
import contextlib
import os
import re

from tff_fssl.hparams import UsageError

# A profile takes megabytes and seconds.
_MAX_ROUNDS = 1_000
_PART = re.compile(r'(\d{1,9})(?:-(\d{1,9}))?')


def parse_rounds(text: str, total_rounds: int) -> frozenset[int]:
  """The rounds that `--profile` names.

  Args:
    text: '3', '3-5', '2,4', '2,4-6', or '' for none.
    total_rounds: The number of the last round.

  Returns:
    Their numbers, each in [1, total_rounds].

  Raises:
    UsageError: If the text has another form, or there are no such rounds.
  """
  rounds: set[int] = set()
  for part in text.split(',') if text else ():
    match = _PART.fullmatch(part)
    if match is None:
      raise UsageError(
        f'--profile={text}: {part!r} is not a round; rounds are written 3, 3-5'
        ' or 2,4'
      )
    first, last = int(match[1]), int(match[2] or match[1])
    if not 1 <= first <= last <= total_rounds:
      raise UsageError(
        f'--profile={text}: {part} is not within rounds 1 to'
        f' --total_rounds={total_rounds}, in ascending order'
      )
    if last - first + len(rounds) >= _MAX_ROUNDS:
      raise UsageError(
        f'--profile={text}: profiles of more than {_MAX_ROUNDS:,} rounds would'
        ' fill the disk; give fewer'
      )
    rounds.update(range(first, last + 1))
  return frozenset(rounds)


class RoundProfiler:
  """Profiles rounds; if that fails, says so, and training continues."""

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
    import tensorflow as tf  # pylint: disable=import-outside-toplevel

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
