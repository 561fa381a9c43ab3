"""Runs TFF computations in this process's TensorFlow.

`InProcessContext` compiles a computation once (`program`), then runs the
server's stages on the CPU and streams the clients over the client devices: each
client's data is made when its turn comes, and its values are dropped as soon as
they have been accumulated. Besides the caller's cohort, memory holds a number
of models that depends only on the number of threads.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
import concurrent.futures
import contextlib
import dataclasses
import threading
import time
from typing import Any
import warnings
import weakref

from tff_fssl.lazy import tf, tff
from tff_fssl.runtime import devices as devices_lib
from tff_fssl.runtime import errors
from tff_fssl.runtime import functions
from tff_fssl.runtime import operations
from tff_fssl.runtime import phases
from tff_fssl.runtime import program as program_lib
from tff_fssl.runtime import values as values_lib


@dataclasses.dataclass
class Timing:
  """The seconds of the parts of one invocation.

  Attributes:
    compile: Compiling, 0 except in a computation's first invocation.
    server: The server's stages.
    clients: The client phases, in wall time, without `aggregation`.
    aggregation: Accumulating the clients' values.
  """

  compile: float = 0.0
  server: float = 0.0
  clients: float = 0.0
  aggregation: float = 0.0


# (index of a phase, the server's values, argument, clients' values that were
# kept) -> accumulators, clients' values to keep, seconds of accumulation.
RunPhase = Callable[
  [int, phases.Values, values_lib.Argument, Mapping[operations.Slot, Any]],
  tuple[phases.Values, dict[operations.Slot, list[Any]], float],
]


def install(context: tff.framework.SyncContext) -> None:
  """Makes a context the one in which this thread's computations run."""
  tff.framework.set_default_context(context)


def installed(
  context: tff.framework.SyncContext | tff.framework.AsyncContext,
) -> contextlib.AbstractContextManager[None]:
  """Makes a context that of this thread, as long as a `with` block runs.

  An asynchronous context becomes that of a program (`tff.program`).
  """
  if isinstance(context, tff.framework.AsyncContext):
    context = tff.program.NativeFederatedContext(context)
  stack: Any = tff.framework.get_context_stack()
  managed: contextlib.AbstractContextManager[None] = stack.install(context)
  return managed


class InProcessContext(tff.framework.SyncContext):
  """Runs TFF computations in this process.

  An argument placed at clients is a `collections.abc.Sequence` with one value
  per client. It is indexed when a client's turn comes. An element that is
  callable is then called without arguments, and returns the value. A
  computation with several client phases does so once for each phase that uses
  the data, and relies on equal values. Indexing and calling happen in a worker
  thread: they may use NumPy and TensorFlow, but must not invoke a TFF
  computation, and must allow several threads at a time.

  Sums of integers overflow silently, as in TFF's own worker. What clients send
  must be bounded before it is summed, or be int64 or float.

  Attributes:
    client_devices: The devices that clients are spread over.
    client_threads: The number of clients that run at a time. Results do not
      depend on it: values are accumulated in the order of the clients.
    timing: The `Timing` of the last invocation.
  """

  def __init__(
    self,
    *,
    client_devices: str = 'auto',
    client_threads: int = 0,
    simulate_secure_aggregation: bool = False,
    default_num_clients: int = 0,
    clients_per_group: int = 0,
  ):
    """Initialises the context, and TensorFlow's devices.

    Args:
      client_devices: See `devices.resolve_client_devices`.
      client_threads: The number of clients that run at a time. 0: a number that
        suits the devices.
      simulate_secure_aggregation: Whether `federated_secure_sum` and similar
        operators are replaced by plain sums, which protect nothing: for
        simulation only.
      default_num_clients: The number of clients, if a computation's argument
        does not determine it.
      clients_per_group: The number of clients that are accumulated before their
        accumulators are merged with those of earlier clients. 0: all. Results
        depend on it within rounding.

    Raises:
      tff_fssl.hparams.UsageError: If a device does not exist.
    """
    self.client_devices = devices_lib.resolve_client_devices(client_devices)
    self.client_threads = devices_lib.resolve_client_threads(
      client_threads, self.client_devices
    )
    self.timing = Timing()
    self._simulate_secure_aggregation = simulate_secure_aggregation
    self._default_num_clients = default_num_clients
    self._group_size = clients_per_group
    # Keyed by identity: a computation's hash would serialise it at each call.
    self._programs: dict[int, tuple[Any, program_lib.Program]] = {}
    # Several threads may invoke a computation for the first time.
    self._lock = threading.RLock()

  def invoke(self, comp: Any, arg: Any) -> Any:
    """Runs a computation.

    Args:
      comp: The `tff.Computation`.
      arg: Its argument, or None if it has no parameter.

    Returns:
      Its result, in the containers of its type: NumPy arrays (read-only) and
      scalars, `tf.data.Dataset`s for sequences, lists for values placed at
      clients.

    Raises:
      tff_fssl.runtime.ExecutionError: If an operation, or making a client's
        data, fails, with the operation and the client.
      NotImplementedError: If the computation uses an operation that this
        runtime does not support, with its name.
      TypeError: If the argument is not of the computation's type.
      ValueError: If client arguments differ in their number of clients.
    """
    return self._invoke(comp, arg, threading.Event())

  def close(self) -> None:
    """Does nothing: this context starts nothing."""

  def _invoke(self, comp: Any, arg: Any, cancelled: threading.Event) -> Any:
    timing = Timing()
    start = time.monotonic()
    program = self._compile(comp)
    timing.compile = time.monotonic() - start
    with tf.device(devices_lib.SERVER_DEVICE):
      argument = values_lib.Argument(
        arg,
        program.parameter_type,
        program.parameter,
        program.readers,
        self._default_num_clients,
      )
      run_phase = self._phase_runner(comp, program, cancelled)
      result = Run(program, argument, timing, run_phase)()
      self.timing = timing
      return result

  def _phase_runner(
    self, comp: Any, program: program_lib.Program, cancelled: threading.Event
  ) -> RunPhase:
    """Returns the function that runs an invocation's clients in a phase."""
    del comp

    def check() -> None:
      if cancelled.is_set():
        raise asyncio.CancelledError()

    workers = phases.Workers(self.client_devices, self.client_threads, check)

    def run_phase(index, server, argument, kept):
      return phases.run_clients(
        program.phases[index],
        server,
        argument.client,
        range(argument.num_clients),
        kept,
        workers,
        group_size=self._group_size,
      )

    return run_phase

  def _compile(self, comp: Any) -> program_lib.Program:
    key = id(comp)
    with self._lock:
      reference, program = self._programs.get(key, (lambda: None, None))
      # An address is used again after a computation was collected.
      if program is not None and reference() is comp:
        return program
      program = program_lib.compile_program(
        comp,
        simulate_secure_aggregation=self._simulate_secure_aggregation,
        merges=self._group_size > 0,
      )
      if program.reduce_loops and any(
        'GPU' in device for device in self.client_devices
      ):
        warnings.warn(
          f'{", ".join(program.reduce_loops)} loops by `Dataset.reduce`,'
          ' which TensorFlow may run on the CPU. Build the process with'
          ' loop_implementation='
          'tff.learning.LoopImplementation.DATASET_ITERATOR.',
          stacklevel=4,
        )
      programs = self._programs
      # A strong reference would keep every computation for ever.
      reference = weakref.ref(comp, lambda _: programs.pop(key, None))
      programs[key] = (reference, program)
      return program


class Run:
  """One invocation: the server's stages, and the phases between them."""

  def __init__(
    self,
    program: program_lib.Program,
    argument: values_lib.Argument,
    timing: Timing,
    run_phase: RunPhase,
  ):
    """Prepares an invocation.

    Args:
      program: The computation.
      argument: Its argument.
      timing: Receives the seconds.
      run_phase: Runs the clients of a phase.
    """
    self._program = program
    self._argument = argument
    self._timing = timing
    self._run_phase = run_phase
    self._server = dict(argument.server)
    self._kept: dict[operations.Slot, list[Any]] = {}

  def __call__(self) -> Any:
    """Runs it, and returns the result."""
    for index, stage in enumerate(self._program.stages):
      start = time.monotonic()
      functions.BoundFunction(stage, self._server)(
        self._server, device=devices_lib.SERVER_DEVICE
      )
      self._timing.server += time.monotonic() - start
      if index < len(self._program.phases):
        self._run(index)
    return values_lib.build_result(
      self._program.result_type,
      (self._result(slot) for slot in self._program.result),
      self._argument.num_clients,
    )

  def _run(self, index: int) -> None:
    start, phase = time.monotonic(), self._program.phases[index]
    totals, kept, seconds = self._run_phase(
      index, self._server, self._argument, self._kept
    )
    self._kept.update(kept)
    for slot, total in phase.final.items():
      self._server[slot] = totals[total]
    self._timing.aggregation += seconds
    self._timing.clients += time.monotonic() - start - seconds

  def _result(self, slot: operations.Slot) -> Any:
    """Returns the value of a slot of the result, a list for a clients' slot."""
    if not slot.clients:
      return self._server[slot]
    if slot not in self._kept:
      # A part of the argument that is returned unchanged.
      self._kept[slot] = []
      for index in range(self._argument.num_clients):
        values, _ = self._argument.client(index, frozenset([slot]))
        self._kept[slot].append(values[slot])
    return self._kept[slot]


class ThreadContext(tff.framework.AsyncContext):
  """A context for `tff.program.NativeFederatedContext`.

  Computations run one after another in a separate thread, so that the event
  loop stays free.
  """

  def __init__(self, context: Any):
    """Wraps a context.

    Args:
      context: The context that runs the computations. Its `_invoke` also takes
        an event, which is set when the invocation is cancelled.
    """
    self._context = context
    self._thread = concurrent.futures.ThreadPoolExecutor(
      1, thread_name_prefix='tff_context'
    )

  async def invoke(self, comp: Any, arg: Any) -> Any:
    """Runs a computation. See the `invoke` of the wrapped context."""
    if asyncio.iscoroutine(arg):
      arg = await arg
    cancelled = threading.Event()
    future = asyncio.get_running_loop().run_in_executor(
      self._thread, self._context._invoke, comp, arg, cancelled
    )
    try:
      # A thread cannot be cancelled: it is told, and awaited below.
      return await asyncio.shield(future)
    except asyncio.CancelledError:
      cancelled.set()
      self._interrupt()
      # The caller may free what the running client still reads.
      await asyncio.gather(future, return_exceptions=True)
      raise
    except Exception as error:
      errors.raised_in_loop(error)
      raise

  def _interrupt(self) -> None:
    """Ends a running invocation that does not look at the event."""

  def close(self) -> None:
    """Closes the context."""
    self._context.close()


class AsyncInProcessContext(ThreadContext):
  """`InProcessContext` for `tff.program.NativeFederatedContext`.

  Cancelling an invocation stops it before the next client.
  """

  _context: InProcessContext

  @property
  def context(self) -> InProcessContext:
    """Returns the context that runs the computations."""
    return self._context

  @property
  def timing(self) -> Timing:
    """Returns the `Timing` of the last invocation."""
    return self._context.timing
