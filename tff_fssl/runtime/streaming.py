"""Runs clients in parallel, a few at a time, with ordered results."""

import collections
from collections.abc import Callable
import concurrent.futures
from typing import TypeVar

_T = TypeVar('_T')


def stream(
  count: int,
  num_threads: int,
  work: Callable[[int], _T],
  consume: Callable[[int, _T], None],
  check: Callable[[], None],
) -> None:
  """Calls `consume(i, work(i))` for i = 0, 1, ..., count - 1, in this order.

  `work(i + num_threads)` starts after `consume(i, ...)` has returned, so that
  at most `num_threads` results exist, for any count.

  Args:
    count: The number of calls.
    num_threads: The number of calls of `work` at a time. 1 uses no thread.
    work: Called in worker threads.
    consume: Called in this thread.
    check: Called in this thread before each call of `work`. It raises to stop.

  Raises:
    BaseException: The error of `work` (in the call with the lowest i),
      `consume` or `check`, or an interrupt. Calls that have not begun are then
      dropped, and running calls are awaited.
  """
  if num_threads == 1 or count <= 1:
    for index in range(count):
      check()
      consume(index, work(index))
    return
  pending: collections.deque = collections.deque()

  def consume_first():
    index, future = pending.popleft()
    consume(index, future.result())

  with concurrent.futures.ThreadPoolExecutor(
    min(num_threads, count), thread_name_prefix='client'
  ) as pool:
    try:
      for index in range(count):
        # The oldest result first: it may hold back `num_threads` others.
        if len(pending) == num_threads:
          consume_first()
        check()
        pending.append((index, pool.submit(work, index)))
      while pending:
        consume_first()
    except BaseException:
      for _, future in pending:
        # Leaving the `with` block awaits those that have begun.
        future.cancel()
      raise
