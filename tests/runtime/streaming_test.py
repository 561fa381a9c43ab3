"""The order and the number of what is in flight."""

import threading

import pytest

from tff_fssl.runtime import streaming


@pytest.mark.parametrize('threads', [1, 2, 5])
def test_results_come_in_order_and_work_waits_for_them(threads):
  lock, begun, consumed = threading.Lock(), [], []

  def work(index):
    with lock:
      begun.append(index)
      assert index < len(consumed) + threads
    return 10 * index

  def consume(index, value):
    assert value == 10 * index
    with lock:
      consumed.append(index)

  streaming.stream(20, threads, work, consume, lambda: None)
  assert consumed == list(range(20))
  assert sorted(begun) == consumed


@pytest.mark.parametrize('threads', [1, 3])
def test_the_first_error_by_position_is_raised(threads):
  begun = []

  def work(index):
    begun.append(index)
    if index >= 4:
      raise ValueError(f'at {index}')

  with pytest.raises(ValueError, match='at 4'):
    streaming.stream(
      100, threads, work, lambda index, value: None, lambda: None
    )
  assert max(begun) < 4 + threads


def test_work_runs_at_the_same_time():
  barrier = threading.Barrier(3, timeout=10)
  streaming.stream(
    6, 3, lambda _: barrier.wait(), lambda index, value: None, lambda: None
  )
