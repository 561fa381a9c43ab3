"""TFF's own C++ worker, started when first needed and ended with the context.

It is a child process that TFF starts, that listens on all interfaces, and
that TFF leaves alive when Python exits. These contexts end it: by `close`, at
the end of a `with`, when they are garbage, and at the normal exit of Python.
While it lives it holds this program's standard output.
"""

import asyncio
import atexit
from collections.abc import Callable, Sequence
import gc
import threading
from typing import Any, Optional
import weakref

import tensorflow_federated as tff


class _Worker:
  """The one owner of TFF's context, and so of the process behind it."""

  def __init__(self, create: Callable[[], Any]):
    self._create = create
    self._context: Optional[Any] = None
    self._lock = threading.Lock()
    self._closed = False
    # Weakly: being registered must not keep the worker alive.
    atexit.register(_close_if_alive, weakref.ref(self))

  def get(self) -> Any:
    """TFF's context; it starts the process at its first invocation.

    Raises:
      RuntimeError: If the worker was closed.
    """
    with self._lock:
      if self._closed:
        raise RuntimeError('This context was closed.')
      if self._context is None:
        self._context = self._create()
      return self._context

  def close(self) -> None:
    """Ends the process, if it was started."""
    with self._lock:
      self._closed = True
      started, self._context = self._context is not None, None
    if started:
      # The process ends with the last reference to what TFF keeps it in, and
      # these references go in circles.
      gc.collect()


def _close_if_alive(reference: Any) -> None:
  worker = reference()
  if worker is not None:
    worker.close()


class _Closing:
  """What both contexts share: the worker, and its end.

  Attributes:
    _creators: TFF's functions that make a context, without and with simulated
      secure aggregation.
  """

  _creators: tuple[Callable[..., Any], Callable[..., Any]]

  def __init__(
    self,
    *,
    client_threads: int = 0,
    simulate_secure_aggregation: bool = False,
  ):
    """Initialises the context; starts no process.

    Args:
      client_threads: How many calls of one local computation run at a time,
        or 0 for as many as there are clients.
      simulate_secure_aggregation: Whether secure sums are replaced by plain
        ones, which protect nothing: simulation only.
    """
    create = self._creators[simulate_secure_aggregation]
    self._worker = _Worker(
      lambda: create(max_concurrent_computation_calls=client_threads or -1)
    )

  def close(self) -> None:
    """Ends the worker; the context cannot be used after."""
    self._worker.close()

  def __enter__(self):
    return self

  def __exit__(self, *args: Any) -> None:
    self.close()


class WorkerContext(_Closing, tff.framework.SyncContext):
  """Runs TFF computations in TFF's C++ worker.

  Client arguments may be what `InProcessContext` takes; all clients' data is
  made at once, and sent to the worker.
  """

  _creators = (
    tff.backends.native.create_sync_local_cpp_execution_context,
    tff.backends.test.create_sync_test_cpp_execution_context,
  )

  def invoke(self, comp: Any, arg: Any) -> Any:
    """Runs a computation.

    Args:
      comp: The `tff.Computation`.
      arg: Its argument, or None if it has no parameter.

    Returns:
      Its result, as TFF's runtime gives it.

    Raises:
      RuntimeError: If the context was closed.
      Exception: Whatever TFF's runtime raises.
    """
    arg = _make_client_data(arg, comp.type_signature.parameter)
    return self._worker.get().invoke(comp, arg)


class AsyncWorkerContext(_Closing, tff.framework.AsyncContext):
  """`WorkerContext` for `tff.program.NativeFederatedContext`."""

  _creators = (
    tff.backends.native.create_async_local_cpp_execution_context,
    tff.backends.test.create_async_test_cpp_execution_context,
  )

  async def invoke(self, comp: Any, arg: Any) -> Any:
    """Runs a computation; see `WorkerContext.invoke`."""
    if asyncio.iscoroutine(arg):
      arg = await arg
    arg = _make_client_data(arg, comp.type_signature.parameter)
    return await self._worker.get().invoke(comp, arg)


def _make_client_data(arg: Any, type_spec: Optional[tff.Type]) -> Any:
  """Calls what is callable among the clients' values, and makes lists."""
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
