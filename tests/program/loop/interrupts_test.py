import asyncio
import os
import signal

import pytest

from tff_fssl.program import training_types
from tff_fssl.program.loop import interrupts


def _run(send, number, seconds=9.0):
  """Runs logic that ends when asked to; `send` signals, `seconds` apart."""
  now = 0.0
  stop, said = training_types.StopRequest(), []

  async def logic():
    nonlocal now
    for _ in range(send):
      now += seconds
      os.kill(os.getpid(), number)
      await asyncio.sleep(0.05)
    return 'done'

  before = signal.getsignal(number)
  try:
    result = asyncio.run(
      interrupts.run_until_stopped(logic(), stop, said.append, lambda: now)
    )
  finally:
    assert signal.getsignal(number) == before
  return result, stop, said


@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_asks(number):
  result, stop, said = _run(1, number)
  assert result == 'done' and stop.signal == number
  assert len(said) == 1 and 'after this round' in said[0]


@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGTERM])
def test_the_second_signal_cancels(number):
  with pytest.raises(asyncio.CancelledError):
    _run(2, number)


@pytest.mark.parametrize('seconds', [0.0, 0.001, 0.3])
def test_signals_at_once_are_one(seconds):
  """As `timeout` gives them: to the program, its group, and through make."""
  result, stop, said = _run(5, signal.SIGTERM, seconds)
  assert result == 'done' and stop.signal == signal.SIGTERM
  assert len(said) == 1


def test_without_signals():
  result, stop, said = _run(0, signal.SIGINT)
  assert (result, stop.signal, said) == ('done', None, [])


def test_exit_codes():
  assert interrupts.exit_code(signal.SIGINT) == 130
  assert interrupts.exit_code(signal.SIGTERM) == 143
  assert interrupts.exit_code(None) == 130
