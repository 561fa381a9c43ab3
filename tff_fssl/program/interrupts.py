"""Ctrl-C and SIGTERM, while training runs. TensorFlow-free."""

import asyncio
from collections.abc import Callable, Coroutine
import os
import signal
import time
from typing import Any, TypeVar

from tff_fssl.program import training_types

_T = TypeVar('_T')
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
# `timeout make train` signals the program, its group and, through make, the
# program again, all at once: signals within this time are one.
ONE_SIGNAL_SECS = 2.0


def exit_code(number: int | None) -> int:
  """A shell's exit code for a signal: 130 for Ctrl-C, 143 for SIGTERM."""
  return 128 + (number or signal.SIGINT)


async def run_until_stopped(
  logic: Coroutine[Any, Any, _T],
  stop: training_types.StopRequest,
  say: Callable[[str], None],
  clock: Callable[[], float] = time.monotonic,
) -> _T:
  """Runs `logic`, which signals can stop.

  The first Ctrl-C or SIGTERM sets `stop`, at which `logic` saves and returns
  after its round. The second cancels it. A third ends the process. Those that
  come within `ONE_SIGNAL_SECS` of the one that counted last are the same one.

  Args:
    logic: What is run.
    stop: Set by the first signal.
    say: Tells the user.
    clock: Gives seconds.

  Returns:
    What `logic` returns.

  Raises:
    asyncio.CancelledError: At the second signal.
  """
  task = asyncio.ensure_future(logic)
  loop = asyncio.get_running_loop()
  is_cancelled = False
  counted_at = float('-inf')

  def handle(number: int) -> None:
    nonlocal is_cancelled, counted_at
    now = clock()
    if now - counted_at < ONE_SIGNAL_SECS:
      return
    counted_at = now
    if stop.signal is None:
      stop.set(number)
      say(
        f'{signal.Signals(number).name}: stopping after this round; send it'
        f' again, {ONE_SIGNAL_SECS:g} seconds later or more, to stop at once.'
      )
    elif not is_cancelled:
      is_cancelled = True
      task.cancel()
    else:
      os._exit(exit_code(number))

  for number in _SIGNALS:
    loop.add_signal_handler(number, handle, number)
  try:
    return await task
  finally:
    for number in _SIGNALS:
      loop.remove_signal_handler(number)
