"""Handles Ctrl-C and SIGTERM while training runs."""

import asyncio
from collections.abc import Callable, Coroutine, Iterator
import contextlib
import os
import signal
import threading
import time
import types
from typing import Any, TypeVar

from tff_fssl.program import training_types

_T = TypeVar('_T')
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
# `timeout make train` signals the program, its process group and, through make,
# the program again, all at once. Signals within this time count as one.
ONE_SIGNAL_SECS = 2.0


def exit_code(number: int | None) -> int:
  """Returns a shell's exit code: 130 for Ctrl-C, 143 for SIGTERM."""
  return 128 + (number or signal.SIGINT)


@contextlib.contextmanager
def exit_at_once(
  is_started: Callable[[], bool], close: Callable[[str], None]
) -> Iterator[None]:
  """Lets Ctrl-C and SIGTERM end the process without an exception.

  Libraries that are being imported swallow exceptions, and continue half made.

  Args:
    is_started: Whether Ctrl-C raises `KeyboardInterrupt` from now on.
    close: Called before the end, with the event in words.

  Yields:
    Once.
  """

  def handle(number: int, frame: types.FrameType | None) -> None:
    if number == signal.SIGINT and is_started():
      signal.default_int_handler(number, frame)
    for each in _SIGNALS:  # Another one must not interrupt this.
      signal.signal(each, signal.SIG_IGN)
    close('interrupted' if number == signal.SIGINT else 'terminated')
    os._exit(exit_code(number))

  ours = (signal.SIG_DFL, signal.default_int_handler)
  before = {number: signal.getsignal(number) for number in _SIGNALS}
  # Handlers of the user's own stay. Threads cannot set any.
  if threading.current_thread() is not threading.main_thread():
    before = {}
  before = {number: old for number, old in before.items() if old in ours}
  for number in before:
    signal.signal(number, handle)
  try:
    yield
  finally:
    for number, old in before.items():
      signal.signal(number, old)


async def run_until_stopped(
  logic: Coroutine[Any, Any, _T],
  stop: training_types.StopRequest,
  say: Callable[[str], None],
  clock: Callable[[], float] = time.monotonic,
) -> _T:
  """Runs `logic`, which signals can stop.

  The first Ctrl-C or SIGTERM sets `stop`: `logic` then finishes its round,
  saves and returns. The second cancels it. A third ends the process. A signal
  within `ONE_SIGNAL_SECS` of the last one that counted does not count.

  Args:
    logic: The coroutine to run.
    stop: Set by the first signal.
    say: Tells the user.
    clock: Gives seconds.

  Returns:
    The result of `logic`.

  Raises:
    asyncio.CancelledError: On the second signal.
  """
  task = asyncio.ensure_future(logic)
  loop = asyncio.get_running_loop()
  is_cancelled = False
  counted_at = float('-inf')

  def handle(number: int) -> None:
    nonlocal is_cancelled, counted_at
    now = clock()
    # The time is from the last signal that counted, so that a held-down Ctrl-C
    # counts again.
    if now - counted_at < ONE_SIGNAL_SECS:
      return
    counted_at = now
    if stop.signal is None:
      stop.set(number)
      say(
        f'{signal.Signals(number).name}: stopping after this round; to stop at'
        f' once, send it again after {ONE_SIGNAL_SECS:g} seconds or more.'
      )
    elif not is_cancelled:
      is_cancelled = True
      task.cancel()
    else:
      os._exit(exit_code(number))

  before = {number: signal.getsignal(number) for number in _SIGNALS}
  for number in _SIGNALS:
    loop.add_signal_handler(number, handle, number)
  try:
    return await task
  finally:
    for number, handler in before.items():
      loop.remove_signal_handler(number)
      signal.signal(number, handler)
