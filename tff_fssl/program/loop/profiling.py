"""TensorBoard profiles of chosen rounds. Only profiling needs TensorFlow."""

from collections.abc import Callable, Iterator
import contextlib
import os


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
