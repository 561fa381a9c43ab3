"""TFF's worker: ends with the program, is replaced when it dies or is slow."""

import asyncio
import gc
import json
import os
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff
import worker_ends

from tff_fssl import hparams
from tff_fssl import runtime

_VALUES = [0.1, 0.2, 0.3]


@pytest.fixture(scope='module')
def ends(repository, tmp_path_factory):
  """By the way in which a program ended, what became of it."""
  done = subprocess.run(
    [
      sys.executable,
      worker_ends.__file__,
      str(tmp_path_factory.mktemp('ends')),
    ],
    env={**os.environ, 'PYTHONPATH': str(repository)},
    # A pipe: it ends when the last process that holds it has ended.
    stdout=subprocess.PIPE,
    check=True,
    timeout=300,
  )
  return json.loads(done.stdout)


@pytest.mark.parametrize(
  'end, status',
  [
    ('exit', 0),
    ('raise', 1),
    ('SIGINT', -signal.SIGINT),
    ('SIGTERM', -signal.SIGTERM),
    ('SIGKILL', -signal.SIGKILL),
  ],
)
def test_no_process_outlives_its_program(ends, end, status):
  assert ends[end]['status'] == status
  # The worker and its watcher are a group.
  group = ends[end]['worker']
  assert worker_ends.until(lambda: not worker_ends.processes('group', group))
  assert not [s for s in ends[end]['streams'] if s.startswith('pipe:')]


def _workers():
  return worker_ends.processes('parent', os.getpid())


def _worker_of(context):
  """The context's worker, once there is one."""
  worker_ends.until(lambda: context._worker)
  return context._worker._process.pid


class _Waiting:
  """A computation that waits, and what is told of it.

  Attributes:
    computation: Sums clients' values once `go` was called.
    messages: What the user was told.
  """

  def __init__(self, folder):
    self._folder = folder
    self.computation = worker_ends.waits_for_files(folder)
    self.messages = []

  def warn(self, message):
    self.messages.append(message)

  def go(self):
    (self._folder / 'go').touch()

  def is_running(self):
    return (self._folder / 'here').exists()

  def when_running(self, act):
    """Does `act` when the computation has begun, in a thread."""

    def watch():
      if worker_ends.until(self.is_running):
        act()

    thread = threading.Thread(target=watch)
    thread.start()
    return thread


@pytest.fixture
def waiting(tmp_path):
  return _Waiting(tmp_path)


def test_the_user_is_told_once_of_the_port(call, waiting):
  waiting.go()
  before = set(_workers())
  context = runtime.build_context(
    runtime.Settings('tff_worker'), warn=waiting.warn
  )
  with context:
    assert set(_workers()) == before
    for _ in range(2):
      call(context, waiting.computation, [lambda: 1.0, 2.0])
    os.kill(_worker_of(context), signal.SIGKILL)
    worker_ends.until(lambda: not context._worker.is_alive)
    call(context, waiting.computation, _VALUES)
  assert set(_workers()) == before
  first, second = waiting.messages
  assert 'all network interfaces, without authentication' in first
  assert 'died between computations (SIGKILL' in second
  with pytest.raises(RuntimeError, match='closed'):
    call(context, waiting.computation, _VALUES)


def test_the_port_is_open_on_all_interfaces(call, waiting):
  """What the message says; were it else, the message would have to go."""
  waiting.go()
  with runtime.build_context(
    runtime.Settings('tff_worker'), warn=waiting.warn
  ) as context:
    call(context, waiting.computation, _VALUES)
    address = f'{0:032X}:{context._worker.port:04X}'
    with open('/proc/net/tcp6') as file:
      listening = [line.split()[1] for line in file if line.split()[3] == '0A']
    assert address in listening
    assert f'port {context._worker.port} ' in waiting.messages[0]


def test_a_dead_worker_is_replaced_in_the_midst_of_a_call(call, waiting):
  with runtime.build_context(
    runtime.Settings('tff_worker'), warn=waiting.warn
  ) as context:

    def kill():
      os.kill(_worker_of(context), signal.SIGKILL)
      waiting.go()

    thread = waiting.when_running(kill)
    total = call(context, waiting.computation, _VALUES)
    thread.join()
    assert call(context, waiting.computation, _VALUES) == total
  np.testing.assert_allclose(total, 0.6, rtol=1e-6)
  assert len(waiting.messages) == 2
  assert 'died (SIGKILL' in waiting.messages[1]
  assert '1 of at most 3' in waiting.messages[1]


def test_a_slow_worker_is_replaced(call, waiting):
  def warn(message):
    waiting.warn(message)
    if 'took longer' in message:
      waiting.go()

  context = runtime.build_context(
    runtime.Settings('tff_worker', call_timeout_secs=3.0), warn=warn
  )
  with context:
    thread = waiting.when_running(
      # Stopped, it cannot even answer that it was cancelled.
      lambda: os.kill(_worker_of(context), signal.SIGSTOP)
    )
    total = call(context, waiting.computation, _VALUES)
    thread.join()
  np.testing.assert_allclose(total, 0.6, rtol=1e-6)
  assert 'took longer than --call_timeout_secs=3' in waiting.messages[1]


def test_patience_ends(waiting):
  before = set(_workers())

  async def main():
    context = runtime.build_async_context(
      runtime.Settings('tff_worker', call_timeout_secs=0.4), warn=waiting.warn
    )
    with context:
      with pytest.raises(runtime.WorkerError, match='call_timeout_secs=0.4'):
        await context.invoke(waiting.computation, _VALUES)
      # None is left that computes what nobody waits for.
      assert set(_workers()) == before

  asyncio.run(main())
  assert len(waiting.messages) == 1 + 3


def test_an_error_of_the_computation_is_not_repeated(call, waiting):
  @tff.tensorflow.computation(np.float32)
  def fail(x):
    with tf.control_dependencies([tf.debugging.assert_less(x, 0.0)]):
      return tf.identity(x)

  with runtime.build_context(
    runtime.Settings('tff_worker'), warn=waiting.warn
  ) as context:
    with pytest.raises(Exception, match='assertion failed'):
      call(context, fail, 1.0)
    worker = _worker_of(context)
    assert call(context, fail, -1.0) == -1.0
    assert _worker_of(context) == worker
  assert len(waiting.messages) == 1


def test_cancelling_ends_the_worker_and_not_the_context(waiting, caplog):
  before = set(_workers())

  async def main():
    with runtime.build_async_context(
      runtime.Settings('tff_worker'), warn=waiting.warn
    ) as context:
      task = asyncio.ensure_future(context.invoke(waiting.computation, _VALUES))
      # The event loop is free meanwhile.
      while not waiting.is_running():
        await asyncio.sleep(0.02)
      task.cancel()
      with pytest.raises(asyncio.CancelledError):
        await task
      assert set(_workers()) == before
      waiting.go()
      return await context.invoke(waiting.computation, _VALUES)

  np.testing.assert_allclose(asyncio.run(main()), 0.6, rtol=1e-6)
  assert len(waiting.messages) == 1
  gc.collect()
  # No 'exception was never retrieved'.
  assert not [record for record in caplog.records if record.name == 'asyncio']


@pytest.mark.parametrize(
  'settings, words',
  [
    ({'call_timeout_secs': 5.0}, 'no calls with --runtime=in_process'),
    ({'runtime': 'tff_worker', 'call_timeout_secs': -1.0}, 'at least 0'),
    ({'runtime': 'tff_worker', 'call_timeout_secs': np.inf}, 'finite'),
  ],
)
def test_timeouts_that_cannot_be(settings, words):
  with pytest.raises(hparams.UsageError, match=words):
    runtime.build_context(runtime.Settings(**settings))
