"""Execution contexts: where and how TFF computations run.

Nothing here depends on what is computed. `build_context` returns a context for
`tff.framework.set_default_context`; `build_async_context` returns one for
`tff.program.NativeFederatedContext`:

    context = runtime.build_context('in_process', client_devices='gpu:0,gpu:1')
    tff.framework.set_default_context(context)

    context = runtime.build_async_context('in_process')
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
import math
from typing import Union

from absl import logging

from tff_fssl import hparams
from tff_fssl.runtime.errors import ExecutionError
from tff_fssl.runtime.in_process import AsyncInProcessContext
from tff_fssl.runtime.in_process import InProcessContext
from tff_fssl.runtime.in_process import Timing
from tff_fssl.runtime.worker import AsyncWorkerContext
from tff_fssl.runtime.worker import WorkerContext
from tff_fssl.runtime.worker import WorkerError

__all__ = [
  'RUNTIMES',
  'AsyncInProcessContext',
  'AsyncWorkerContext',
  'ExecutionError',
  'InProcessContext',
  'Timing',
  'WorkerContext',
  'WorkerError',
  'build_async_context',
  'build_context',
]

RUNTIMES = ('in_process', 'tff_worker')


def build_context(
  runtime: str = 'in_process',
  *,
  client_devices: str = 'auto',
  client_threads: int = 0,
  simulate_secure_aggregation: bool = False,
  call_timeout_secs: float = 0.0,
  default_num_clients: int = 0,
  warn: Callable[[str], None] = logging.warning,
) -> Union[InProcessContext, WorkerContext]:
  """Builds a `tff.framework.SyncContext`.

  Args:
    runtime: `'in_process'`, TensorFlow in this process, or `'tff_worker'`,
      TFF's C++ worker (CPU only). The worker is started at the first
      invocation, replaced if it dies, and ended by `close()`, at the end of a
      `with` block, or when Python ends in any way.
    client_devices: `'auto'` (all GPUs if there are any, else the CPU),
      `'cpu'`, `'gpu'`, or device names joined by commas, such as
      `'gpu:0,gpu:1'`. Client i runs on device (i mod n). Logical devices must
      have been configured before.
    client_threads: How many clients run at a time; 0 chooses a number that
      suits the devices. Results do not depend on it.
    simulate_secure_aggregation: Whether `federated_secure_sum` and similar
      operators are replaced by plain sums, which protect nothing. If not, they
      raise `NotImplementedError`.
    call_timeout_secs: How long the worker may take for a call, in seconds,
      before it is ended and another worker repeats the invocation; 0: no limit.
      `'tff_worker'` only.
    default_num_clients: The number of clients of computations whose argument
      does not determine it.
    warn: Called to warn the user of the worker's open port, and of dead
      workers.

  Returns:
    The context.

  Raises:
    tff_fssl.hparams.UsageError: If an argument is not one of those allowed;
      names them.
  """
  if default_num_clients < 0:
    raise hparams.UsageError(
      f'default_num_clients={default_num_clients}: must be at least 0'
    )
  if _is_worker(runtime, client_devices, client_threads, call_timeout_secs):
    return WorkerContext(
      client_threads=client_threads,
      simulate_secure_aggregation=simulate_secure_aggregation,
      call_timeout_secs=call_timeout_secs,
      default_num_clients=default_num_clients,
      warn=warn,
    )
  return InProcessContext(
    client_devices=client_devices,
    client_threads=client_threads,
    simulate_secure_aggregation=simulate_secure_aggregation,
    default_num_clients=default_num_clients,
  )


def build_async_context(
  runtime: str = 'in_process',
  *,
  client_devices: str = 'auto',
  client_threads: int = 0,
  simulate_secure_aggregation: bool = False,
  call_timeout_secs: float = 0.0,
  default_num_clients: int = 0,
  warn: Callable[[str], None] = logging.warning,
) -> Union[AsyncInProcessContext, AsyncWorkerContext]:
  """Builds a `tff.framework.AsyncContext`.

  Args:
    runtime: See `build_context`.
    client_devices: See `build_context`.
    client_threads: See `build_context`.
    simulate_secure_aggregation: See `build_context`.
    call_timeout_secs: See `build_context`.
    default_num_clients: See `build_context`.
    warn: See `build_context`.

  Returns:
    The context, for `tff.program.NativeFederatedContext`.

  Raises:
    tff_fssl.hparams.UsageError: If an argument is not one of those allowed;
      names them.
  """
  context = build_context(
    runtime,
    client_devices=client_devices,
    client_threads=client_threads,
    simulate_secure_aggregation=simulate_secure_aggregation,
    call_timeout_secs=call_timeout_secs,
    default_num_clients=default_num_clients,
    warn=warn,
  )
  if isinstance(context, WorkerContext):
    return AsyncWorkerContext(context)
  return AsyncInProcessContext(context)


def _is_worker(
  runtime: str,
  client_devices: str,
  client_threads: int,
  call_timeout_secs: float,
) -> bool:
  """Checks the choice of a runtime."""
  if runtime not in RUNTIMES:
    raise hparams.UsageError(
      f'--runtime={runtime}: allowed are {", ".join(RUNTIMES)}'
      f'{hparams.closest(runtime, RUNTIMES)}'
    )
  if not 0 <= call_timeout_secs < math.inf:
    raise hparams.UsageError(
      f'--call_timeout_secs={call_timeout_secs:g}: must be at least 0 (without'
      ' limit), and finite'
    )
  if runtime != 'tff_worker':
    if call_timeout_secs:
      raise hparams.UsageError(
        f'--call_timeout_secs={call_timeout_secs:g}: there are no calls without'
        ' --runtime=tff_worker; leave it out'
      )
    return False
  if client_devices not in ('auto', 'cpu'):
    raise hparams.UsageError(
      f'--client_devices={client_devices}: the tff_worker runtime runs on the'
      ' CPU only; allowed are auto and cpu, or use --runtime=in_process'
    )
  if client_threads < 0:
    raise hparams.UsageError(
      f'--client_threads={client_threads}: must be at least 0'
    )
  return True
