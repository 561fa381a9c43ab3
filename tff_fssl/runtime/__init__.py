"""Execution contexts: where and how TFF computations run.

Nothing here depends on the computation. `build_context` returns a context for
`tff.framework.set_default_context`, which `set_default_context` also calls.
`build_async_context` returns one for `tff.program.NativeFederatedContext`:

    settings = runtime.Settings(client_devices='gpu:0,gpu:1')
    runtime.set_default_context(settings)

    context = runtime.build_async_context()
    tff.framework.set_default_context(
        tff.program.NativeFederatedContext(context)
    )

TFF keeps a stack of contexts for each thread: install a context in the thread
that invokes computations.

Both take client data as a sequence with one value per client. A value is a
dataset, or a function without arguments that returns one. The in-process
runtime asks for a client's value when its turn comes, and then forgets it (see
`InProcessContext`): a cohort of functions costs no memory. Build TFF's
own learning processes with `loop_implementation=
tff.learning.LoopImplementation.DATASET_ITERATOR`: TFF's default,
`DATASET_REDUCE`, is slower, and may train on the CPU in spite of a GPU.
"""

from collections.abc import Callable
from typing import Union

from absl import logging

from tff_fssl.runtime import settings as settings_lib
from tff_fssl.runtime.errors import ExecutionError
from tff_fssl.runtime.errors import WorkerError
from tff_fssl.runtime.in_process import AsyncInProcessContext
from tff_fssl.runtime.in_process import InProcessContext
from tff_fssl.runtime.in_process import Timing
from tff_fssl.runtime.in_process import install
from tff_fssl.runtime.in_process import installed
from tff_fssl.runtime.recipes import Recipe
from tff_fssl.runtime.settings import RUNTIMES
from tff_fssl.runtime.settings import TFF_WORKER
from tff_fssl.runtime.settings import Settings
from tff_fssl.runtime.worker import AsyncWorkerContext
from tff_fssl.runtime.worker import WorkerContext

__all__ = [
  'RUNTIMES',
  'AsyncInProcessContext',
  'AsyncWorkerContext',
  'ExecutionError',
  'InProcessContext',
  'Recipe',
  'Settings',
  'Timing',
  'WorkerContext',
  'WorkerError',
  'build_async_context',
  'build_context',
  'installed',
  'set_default_context',
]


def build_context(
  settings: Settings = Settings(),
  *,
  warn: Callable[[str], None] = logging.warning,
) -> Union[InProcessContext, WorkerContext]:
  """Builds a `tff.framework.SyncContext`.

  Args:
    settings: The runtime and its settings.
    warn: Called to warn the user of the worker's open port, and of dead
      workers.

  Returns:
    The context.

  Raises:
    tff_fssl.hparams.UsageError: If a device does not exist.

  Examples:
    >>> import numpy as np
    >>> import tensorflow as tf
    >>> import tensorflow_federated as tff
    >>> from tff_fssl import runtime
    >>> numbers = tff.FederatedType(np.float32, tff.CLIENTS)
    >>> mean = tff.federated_computation(
    ...   lambda x: tff.federated_mean(x), numbers
    ... )
    >>> float(runtime.build_context().invoke(mean, [1.0, 2.0, 6.0]))
    3.0
  """
  if settings.runtime == TFF_WORKER:
    return WorkerContext(
      client_threads=settings.client_threads,
      simulate_secure_aggregation=settings.simulate_secure_aggregation,
      call_timeout_secs=settings.call_timeout_secs,
      default_num_clients=settings.default_num_clients,
      warn=warn,
    )
  if settings.runtime == settings_lib.RAY:
    # Imported only here: Ray is optional.
    from tff_fssl.runtime import ray_context  # pylint: disable=import-outside-toplevel

    return ray_context.RayContext(settings, warn=warn)
  return InProcessContext(
    client_devices=settings.client_devices,
    client_threads=settings.client_threads,
    simulate_secure_aggregation=settings.simulate_secure_aggregation,
    default_num_clients=settings.default_num_clients,
    clients_per_group=settings.clients_per_group,
  )


def build_async_context(
  settings: Settings = Settings(),
  *,
  warn: Callable[[str], None] = logging.warning,
) -> Union[AsyncInProcessContext, AsyncWorkerContext]:
  """Builds a `tff.framework.AsyncContext`.

  Args:
    settings: See `build_context`.
    warn: See `build_context`.

  Returns:
    The context, for `tff.program.NativeFederatedContext`.

  Raises:
    tff_fssl.hparams.UsageError: See `build_context`.
  """
  context = build_context(settings, warn=warn)
  if isinstance(context, WorkerContext):
    return AsyncWorkerContext(context)
  return AsyncInProcessContext(context)


def set_default_context(settings: Settings = Settings()) -> None:
  """Runs the TFF computations of this thread in `build_context(settings)`."""
  install(build_context(settings))
