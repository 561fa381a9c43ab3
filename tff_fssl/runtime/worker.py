"""TFF's own C++ worker, supervised.

The worker is a process that runs computations which it receives by gRPC. If
TFF's own context starts it, it stays alive when the program is killed, and
keeps the program's standard output open. Here `_Worker` starts it, and
`tff.framework.RemoteExecutor` talks to it:

-   It ends together with this process, even if that is killed by SIGKILL, and
    holds none of its streams.
-   If it dies, or does not answer in time, another worker is started and the
    invocation is repeated. Everything that an invocation needs is in this
    process, so the repetition gives the same result, provided that the data
    sets of its argument yield the same elements each time.

It listens on all network interfaces, without authentication, and has no flag
for the address. The user is warned of this.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
import contextlib
import functools
import importlib.resources
import os
import signal
import socket
import subprocess
import tempfile
import threading
import time
from typing import Any, Optional
import weakref

from absl import logging
import grpc

from tff_fssl import processes
from tff_fssl.lazy import tff
from tff_fssl.runtime import errors
from tff_fssl.runtime import in_process

# The most repetitions of one invocation.
_MAX_REPETITIONS = 3
# Seconds to open the port, which takes 0.1 s on an idle machine.
_START_SECS = 60.0
_CHANNEL_OPTIONS = (
  ('grpc.max_receive_message_length', -1),
  ('grpc.max_send_message_length', -1),
  # The worker is on this machine.
  ('grpc.enable_http_proxy', 0),
)
# The most bytes of a dead worker's output that are shown.
_MAX_LAST_WORDS = 500


class _LostError(Exception):
  """The worker died or was too slow, as the message says."""


class _CallError(grpc.RpcError):
  """A call got no answer.

  TFF repeats some calls forever, which it recognizes by an error's code. This
  error has no code where TFF looks for it. (It is an `RpcError`, after which
  TFF can close its executor.)

  Attributes:
    is_late: Whether the time limit was exceeded.
  """

  def __init__(self, details: str, is_late: bool):
    super().__init__(details)
    self.is_late = is_late


class _Channel:
  """The part of a `grpc.Channel` that TFF uses, with our deadline and errors.

  TFF's stub also subscribes to the connection's state. For this, gRPC polls in
  a thread, which complains when the channel is closed. Nobody reads that state,
  so the subscription is ignored.
  """

  def __init__(
    self,
    channel: grpc.Channel,
    call_timeout_secs: float,
    kill: Callable[[], None],
  ):
    self._channel = channel
    self._timeout = call_timeout_secs or None
    self._kill = kill

  def subscribe(self, callback: Any, try_to_connect: bool = False) -> None:
    """Does nothing."""

  def unary_unary(self, *args: Any, **kwargs: Any) -> Callable[[Any], Any]:
    """Makes a function for calls with our deadline."""
    function = self._channel.unary_unary(*args, **kwargs)

    def call(request: Any) -> Any:
      try:
        return function(request, timeout=self._timeout)
      except grpc.RpcError as error:
        # Errors that a computation raises have other codes.
        if error.code() in (
          grpc.StatusCode.CANCELLED,
          grpc.StatusCode.DEADLINE_EXCEEDED,
          grpc.StatusCode.FAILED_PRECONDITION,
          grpc.StatusCode.UNAVAILABLE,
        ):
          is_late = error.code() == grpc.StatusCode.DEADLINE_EXCEEDED
          if is_late:
            # TFF next makes a call to clean up, which need not wait as well.
            self._kill()
          raise _CallError(error.details(), is_late) from error
        raise

    return call


class _Worker:
  """One worker process, and TFF's context that talks to it.

  Attributes:
    port: The port on which it listens.
    end: Kills the process if it lives. This is also called when this object is
      garbage-collected, and at Python's exit.
  """

  def __init__(
    self,
    *,
    client_threads: int,
    simulate_secure_aggregation: bool,
    call_timeout_secs: float,
    default_num_clients: int,
  ):
    """Starts the process and waits until it answers.

    Args:
      client_threads: See `WorkerContext`.
      simulate_secure_aggregation: See `WorkerContext`.
      call_timeout_secs: See `WorkerContext`.
      default_num_clients: See `WorkerContext`.

    Raises:
      _LostError: If it does not answer.
    """
    self._call_timeout_secs = call_timeout_secs
    # Bound as long as the worker lives, so that no other program gets the port.
    # gRPC shares the port, which the system allows only to the same user.
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    # On all interfaces, as the worker will bind it.
    reserved.bind(('', 0))
    self.port = reserved.getsockname()[1]
    # pylint: disable=consider-using-with
    self._log = tempfile.TemporaryFile()
    self._process = processes.start(
      [
        str(
          importlib.resources.files('tensorflow_federated')
          / 'data'
          / 'worker_binary'
        ),
        f'--port={self.port}',
        f'--max_concurrent_computation_calls={client_threads or -1}',
      ],
      signal.SIGKILL,
      stdout=subprocess.DEVNULL,
      stderr=self._log,
    )
    # The worker has no encryption, and is on this machine.
    channel = grpc.insecure_channel(f'127.0.0.1:{self.port}', _CHANNEL_OPTIONS)
    self.end = weakref.finalize(self, _end, self._process, channel, reserved)
    try:
      self._wait_until_ready()
    except BaseException:
      self.end()
      raise
    self._context = _build_context(
      _Channel(channel, call_timeout_secs, self._process.kill),
      simulate_secure_aggregation,
      default_num_clients,
    )

  def _wait_until_ready(self) -> None:
    deadline = time.monotonic() + _START_SECS
    while self.is_alive and time.monotonic() < deadline:
      with contextlib.suppress(OSError):
        socket.create_connection(('127.0.0.1', self.port)).close()
        return
      time.sleep(0.02)
    raise _LostError(f'did not start{self.last_words()}')

  @property
  def is_alive(self) -> bool:
    """Says whether the process is running."""
    return self._process.poll() is None

  def last_words(self) -> str:
    """Returns ' (how it ended)' and its last output, or '' while it lives."""
    status = self._process.poll()
    if status is None:
      return ''
    size = self._log.seek(0, os.SEEK_END)
    self._log.seek(max(0, size - _MAX_LAST_WORDS))
    words = self._log.read().decode(errors='replace').strip()
    how = f' ({processes.describe_end(status)})'
    return how + (f' after it wrote: {words}' if words else '')

  def invoke(self, comp: Any, arg: Any) -> Any:
    """Runs a computation, or raises `_LostError` and what TFF raises."""
    try:
      return self._context.invoke(comp, arg)
    except Exception as error:
      if isinstance(error, _CallError) and error.is_late:
        reason = (
          f'took longer than --call_timeout_secs={self._call_timeout_secs:g}'
        )
      elif isinstance(error, _CallError) or not self.end.alive:
        # The connection breaks a moment before the process ends.
        with contextlib.suppress(subprocess.TimeoutExpired):
          self._process.wait(timeout=1)
        reason = f'died{self.last_words()}'
      else:
        raise
      raise _LostError(reason) from error


def _end(
  process: subprocess.Popen, channel: grpc.Channel, reserved: socket.socket
) -> None:
  """Ends a worker and frees its resources."""
  process.kill()
  processes.end_watch(process)
  process.wait()
  channel.close()
  reserved.close()


def _build_context(
  channel: _Channel,
  simulate_secure_aggregation: bool,
  default_num_clients: int,
) -> tff.framework.SyncContext:
  """Builds TFF's context for a running worker.

  `tff.backends.native.create_sync_local_cpp_execution_context` builds the same
  context for a worker that TFF starts.
  """
  compile_fn = tff.backends.native.desugar_and_transform_to_native
  stub = tff.framework.RemoteExecutorGrpcStub(channel)

  def compile_simulated(comp: Any) -> Any:
    return compile_fn(
      tff.backends.test.replace_secure_intrinsics_with_bodies(comp)
    )

  def create_executor(cardinalities: Any) -> tff.framework.RemoteExecutor:
    # Computations without arguments at clients do not tell the number.
    cardinalities.setdefault(tff.CLIENTS, default_num_clients)
    executor = tff.framework.RemoteExecutor(stub)
    executor.set_cardinalities(cardinalities)
    return executor

  return tff.framework.SyncExecutionContext(
    executor_fn=tff.framework.ResourceManagingExecutorFactory(create_executor),
    compiler_fn=compile_simulated
    if simulate_secure_aggregation
    else compile_fn,
    transform_args=tff.tensorflow.transform_args,
    transform_result=tff.tensorflow.transform_result,
  )


class WorkerContext(tff.framework.SyncContext):
  """Runs TFF computations in TFF's C++ worker.

  Client arguments may have the forms that `InProcessContext` takes. All
  clients' data is made at once and sent to the worker.

  The first invocation starts the worker, and so does the first one after it has
  died. The worker ends at `close`, at the end of a `with` block, when the
  context is garbage-collected, when Python ends in any way, and when an
  invocation is interrupted.
  """

  def __init__(
    self,
    *,
    client_threads: int = 0,
    simulate_secure_aggregation: bool = False,
    call_timeout_secs: float = 0.0,
    default_num_clients: int = 0,
    warn: Callable[[str], None] = logging.warning,
  ):
    """Initialises the context, without starting a process.

    Args:
      client_threads: The number of calls of one local computation at a time. 0:
        one for each client.
      simulate_secure_aggregation: Whether secure sums are replaced by plain
        sums, which protect nothing: for simulation only.
      call_timeout_secs: The time limit of a call to the worker, in seconds. 0:
        no limit. An invocation consists of a few quick calls, which send the
        argument, and one call that computes the result.
      default_num_clients: The number of clients, if a computation's argument
        does not determine it.
      warn: Called to warn the user of the open port, once, and of workers that
        died.
    """
    self._start_worker = functools.partial(
      _Worker,
      client_threads=client_threads,
      simulate_secure_aggregation=simulate_secure_aggregation,
      call_timeout_secs=call_timeout_secs,
      default_num_clients=default_num_clients,
    )
    self._warn = warn
    self._has_warned = False
    self._worker: Optional[_Worker] = None
    self._closed = False
    self._lock = threading.Lock()

  def invoke(self, comp: Any, arg: Any) -> Any:
    """Runs a computation.

    Args:
      comp: The `tff.Computation`.
      arg: Its argument, or None if it has no parameter.

    Returns:
      Its result, as TFF's runtime gives it.

    Raises:
      RuntimeError: If the context was closed.
      errors.WorkerError: If the worker died or was too slow, and each
        repetition of the invocation failed in the same way.
      Exception: Whatever TFF's runtime raises.
    """
    return self._invoke(comp, arg, threading.Event())

  def _invoke(self, comp: Any, arg: Any, cancelled: threading.Event) -> Any:
    # Once, so that repetitions send the same data.
    arg = _make_client_data(arg, comp.type_signature.parameter)
    num_repetitions = 0
    while True:
      worker = None
      try:
        worker = self._get_worker()
        if cancelled.is_set():
          raise asyncio.CancelledError()
        return worker.invoke(comp, arg)
      except _LostError as error:
        self._end_worker(worker)
        if cancelled.is_set():
          raise asyncio.CancelledError() from error
        if num_repetitions == _MAX_REPETITIONS:
          raise errors.WorkerError(
            f"TFF's worker {error}; the {num_repetitions} attempts before"
            ' failed as well.'
          ) from error
        num_repetitions += 1
        self._warn(
          f"TFF's worker {error}. Another worker repeats the computation"
          f' (repetition {num_repetitions} of at most {_MAX_REPETITIONS}).'
        )
      except Exception:
        raise
      except BaseException:
        # Interrupted: the result that is still being computed is not needed.
        self._end_worker(worker)
        raise

  def _get_worker(self) -> _Worker:
    """Returns the worker, or starts one, or raises `_LostError`."""
    with self._lock:
      if self._closed:
        raise RuntimeError('This context was closed.')
      if self._worker is not None and not self._worker.is_alive:
        self._warn(
          f"TFF's worker died between computations"
          f'{self._worker.last_words()}. Another worker is started.'
        )
        self._worker.end()
        self._worker = None
      if self._worker is None:
        self._worker = self._start_worker()
        if not self._has_warned:
          self._has_warned = True
          self._warn(
            f"TFF's worker listens on port {self._worker.port} of all network"
            ' interfaces, without authentication: anyone who can reach the port'
            ' can run computations as this user. --runtime=in_process opens no'
            ' port.'
          )
      return self._worker

  def _end_worker(self, worker: Optional[_Worker]) -> None:
    """Ends a worker, so that the next invocation starts another one."""
    with self._lock:
      if worker is not None:
        worker.end()
        if worker is self._worker:
          self._worker = None

  def close(self) -> None:
    """Ends the worker and closes the context."""
    with self._lock:
      self._closed = True
      if self._worker is not None:
        self._worker.end()

  def __enter__(self):
    return self

  def __exit__(self, *args: Any) -> None:
    self.close()


class AsyncWorkerContext(in_process.ThreadContext):
  """`WorkerContext` for `tff.program.NativeFederatedContext`.

  Cancelling an invocation ends the worker. The next invocation starts another
  one.
  """

  _context: WorkerContext

  def _interrupt(self) -> None:
    # Only its end stops the computation that the thread waits for.
    self._context._end_worker(self._context._worker)

  def __enter__(self):
    return self

  def __exit__(self, *args: Any) -> None:
    self.close()


def _make_client_data(arg: Any, type_spec: Optional[tff.Type]) -> Any:
  """Replaces callables among clients' values by results, and makes lists."""
  if isinstance(type_spec, tff.FederatedType):
    if type_spec.placement is not tff.CLIENTS or type_spec.all_equal:
      return arg
    if not isinstance(arg, Sequence):
      return arg
    return [value() if callable(value) else value for value in arg]
  if isinstance(type_spec, tff.StructType) and tff.types.contains(
    type_spec, lambda t: isinstance(t, tff.FederatedType)
  ):
    if not isinstance(arg, tff.structure.Struct):
      arg = tff.structure.from_container(arg)
    types = tff.structure.to_elements(type_spec)
    return tff.structure.Struct(
      [(name, _make_client_data(v, t)) for v, (name, t) in zip(arg, types)]
    )
  return arg
