"""Runs the clients of TFF computations on a Ray cluster.

The server's stages run in this process, as `in_process` runs them. Clients run
in worker processes, which hold the compiled program and take clients in groups
of a fixed size. A group is accumulated from zero, and groups are merged in the
order of the clients by TFF's own `merge`. Results do not depend on the number
of workers, on their machines, or on lost workers.
"""

import asyncio
from collections.abc import Callable
import hashlib
import importlib
import importlib.metadata
import os
import socket
import threading
from typing import Any
import weakref

from tff_fssl import hparams
from tff_fssl.runtime import in_process
from tff_fssl.runtime import operations
from tff_fssl.runtime import phases
from tff_fssl.runtime import portable
from tff_fssl.runtime import program as program_lib
from tff_fssl.runtime import ray_pool
from tff_fssl.runtime import ray_worker
from tff_fssl.runtime import recipes
from tff_fssl.runtime import values as values_lib
from tff_fssl.runtime.settings import Settings

# Seconds between two looks at the head of a cluster.
_WATCH_SECS = 5.0
# Seconds for the head of a cluster to answer.
_REACH_SECS = 10.0


class RayContext(in_process.InProcessContext):
  """Runs TFF computations, their clients on a Ray cluster.

  It takes the arguments of `InProcessContext`. Clients' values are sent to the
  workers, unless they are `recipes.MadeByRecipe`: those are made there.

  Attributes:
    about: The place of clients, for people.
    pool: The workers.
  """

  def __init__(
    self,
    settings: Settings,
    *,
    warn: Callable[[str], None],
  ):
    """Connects to the cluster, and asks it for workers.

    Args:
      settings: The cluster, and its use.
      warn: Called with messages for the user, such as lost workers.

    Raises:
      tff_fssl.hparams.UsageError: If Ray is not installed, or the cluster
        cannot be reached.
    """
    super().__init__(
      client_devices='cpu',
      client_threads=1,
      simulate_secure_aggregation=settings.simulate_secure_aggregation,
      default_num_clients=settings.default_num_clients,
      clients_per_group=settings.clients_per_group or 1,
    )
    self._ray, self._was_connected = _connect(settings)
    self._is_closed = threading.Event()
    if settings.ray_address:  # Else the head is on this machine.
      threading.Thread(
        target=watch_head,
        args=(
          self._ray.get_runtime_context().gcs_address,
          warn,
          self._is_closed,
        ),
        daemon=True,
      ).start()
    gpus_per_worker = _gpus_per_worker(
      settings, self._ray.cluster_resources().get('GPU', 0)
    )
    self.pool = ray_pool.Pool(
      self._ray,
      ray_pool.PoolSettings(
        settings.ray_workers,
        1.0,
        gpus_per_worker,
        settings.call_timeout_secs,
        settings.ray_trusted_network,
        ray_worker.WorkerSettings(
          gpus_per_worker > 0,
          max(settings.client_threads, 1),
          settings.intra_op_threads or len(os.sched_getaffinity(0)),
          settings.simulate_secure_aggregation,
          settings.is_deterministic,
        ),
      ),
      warn,
    )
    cluster = settings.ray_address or 'a cluster of this machine alone'
    kind = 'GPU' if gpus_per_worker else 'CPU'
    self.about = f'{cluster}, {self.pool.target()} {kind} workers'
    # Program -> (digest, Ray's reference to the serialized computation).
    self._sent: weakref.WeakKeyDictionary[program_lib.Program, Any] = (
      weakref.WeakKeyDictionary()
    )

  def close(self) -> None:
    """Ends the workers, and the connection if it was made here."""
    self._is_closed.set()
    self.pool.close()
    # A connection of the caller's is the caller's to close.
    if not self._was_connected:
      self._ray.shutdown()

  def __enter__(self) -> 'RayContext':
    return self

  def __exit__(self, *_: Any) -> None:
    self.close()

  def _phase_runner(
    self, comp: Any, program: program_lib.Program, cancelled: threading.Event
  ) -> in_process.RunPhase:
    if program not in self._sent:
      serialized = ray_worker.dump_computation(comp)
      # By the digest, a worker finds the program that it compiled before.
      digest = hashlib.sha256(serialized).hexdigest()
      self._sent[program] = (digest, self._ray.put(serialized))

    def check() -> None:
      if cancelled.is_set():
        raise asyncio.CancelledError()

    def run_phase(index, server, argument, kept):
      run = _PhaseRun(self, program, index, server, argument, kept)
      return run(check)

    return run_phase


class _PhaseRun:
  """One phase of one invocation."""

  def __init__(
    self,
    context: RayContext,
    program: program_lib.Program,
    index: int,
    server: phases.Values,
    argument: values_lib.Argument,
    kept: dict[operations.Slot, list[Any]],
  ):
    self._context = context
    self._ray = context._ray  # pylint: disable=protected-access
    self._program = program
    self._index = index
    self._phase = program.phases[index]
    self._argument = argument
    self._kept = {k: v for k, v in kept.items() if k in self._phase.reads}
    self._server = server
    self._recipes: list[recipes.Recipe] = []
    self._pickled: dict[int, Any] = {}

  def __call__(self, check: Callable[[], None]) -> Any:
    """Returns (accumulators, clients' kept values, seconds of merging)."""
    phase, count = self._phase, self._argument.num_clients
    merger = phases.Merger(phase, self._server)
    new: dict[operations.Slot, list[Any]] = {slot: [] for slot in phase.kept}
    if not count:
      return merger.totals, new, 0.0
    size = self._context._group_size  # pylint: disable=protected-access
    groups = [
      range(start, min(start + size, count)) for start in range(0, count, size)
    ]
    # Once for each machine, not for each worker.
    sent = self._ray.put(portable.encode_server(phase, self._server))
    digest, computation = self._context._sent[self._program]

    def submit(actor: Any, group: int) -> Any:
      encoded = self._encode(groups[group])
      return actor.run_group.remote(
        digest, computation, self._pickled_recipes(), sent, encoded
      )

    def consume(group: int, done: ray_worker.Done) -> None:
      del group
      merger.add(
        {
          slot: portable.decode(value, slot.type)
          for slot, value in zip(phase.initial, done.totals, strict=True)
        }
      )
      for slot, values in zip(phase.kept, done.kept, strict=True):
        new[slot].extend(portable.decode(value, slot.type) for value in values)
      for recipe, item in done.reports:
        self._recipes[recipe].received(item)

    self._context.pool.run(len(groups), submit, consume, check)
    return merger.totals, new, merger.seconds

  def _encode(self, indices: range) -> ray_worker.Group:
    clients = [
      portable.encode_client(
        self._argument, index, self._phase.reads, self._recipes
      )
      for index in indices
    ]
    kept = portable.encode_kept(
      portable.kept_slots(self._program), self._kept, indices
    )
    return ray_worker.Group(self._index, indices.start, clients, kept)

  def _pickled_recipes(self) -> list[bytes]:
    for index, recipe in enumerate(self._recipes):
      if index not in self._pickled:
        # Pickle alone cannot send classes of the user's main file.
        self._pickled[index] = self._ray.cloudpickle.dumps(recipe)
    return [self._pickled[index] for index in range(len(self._recipes))]


def _connect(settings: Settings) -> tuple[Any, bool]:
  """Connects to Ray: (Ray, whether it was connected before)."""
  address = settings.ray_address
  # Ray's usage statistics stay off.
  os.environ.setdefault('RAY_USAGE_STATS_ENABLED', '0')
  try:
    ray = importlib.import_module('ray')
  except ImportError as error:
    raise hparams.UsageError(
      f'--runtime=ray: Ray cannot be imported ({error}); install it with `make'
      ' setup-ray`, or `pip install --no-deps -r requirements-ray.txt`'
    ) from error
  if ray.is_initialized():
    return ray, True
  options: dict[str, Any] = {'log_to_driver': False, 'logging_level': 'ERROR'}
  if not address:  # 'local': never a cluster that somebody left behind.
    options['include_dashboard'] = False
    # Room for as many workers as are wanted.
    num_cores = len(os.sched_getaffinity(0))
    options['num_cpus'] = max(num_cores, settings.ray_workers)
  try:
    # Ray itself tries an address for minutes before it gives up.
    _check_port(address)
    ray.init(address=address or 'local', **options)
  except Exception as error:  # Ray documents no type.
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    raise hparams.UsageError(
      f'--ray_address={address}: cannot connect: {reason}; give the address'
      ' of a running cluster (`ray start --head`), and its token in'
      ' RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH, or omit the flag for a'
      ' cluster on this machine alone'
      if address
      else f'--runtime=ray: Ray does not start here: {reason}{_hint()}'
    ) from error
  return ray, False


def _hint() -> str:
  """Describes a known reason why Ray does not start on this machine, or ''."""
  try:
    version = importlib.metadata.version('pydantic')
  except importlib.metadata.PackageNotFoundError:
    return ''
  if not version.startswith('1.'):
    return ''
  return (
    f'; pydantic {version} is installed, with which it does not: uninstall it,'
    ' or install pydantic 2'
  )


def _check_port(address: str) -> None:
  """Raises `OSError` if nobody listens there: Ray would try for minutes."""
  host, colon, port = address.rpartition(':')
  if colon and port.isdigit():
    socket.create_connection((host.strip('[]'), int(port)), _REACH_SECS).close()


def watch_head(
  address: str,
  warn: Callable[[str], None],
  is_closed: threading.Event,
  pause_secs: float = _WATCH_SECS,
) -> None:
  """Says that the head of a cluster is lost. Ray ends this process silently.

  Args:
    address: The head's 'host:port'.
    warn: Called with a line for the user.
    is_closed: Ends the watch.
    pause_secs: Seconds between two looks.
  """
  is_lost = False
  while not is_closed.wait(pause_secs):
    try:
      _check_port(address)
    except OSError as error:
      if not is_lost:
        warn(
          f'the head of the cluster, {address}, does not answer ({error}):'
          ' unless it comes back, Ray ends this program in about a minute.'
          ' Start a cluster and give the same command again: it goes on from'
          ' the last checkpoint.'
        )
      is_lost = True
    else:
      is_lost = False


def _gpus_per_worker(settings: Settings, num_gpus: float) -> float:
  """Returns Ray's GPU resource for each worker. 0: workers use the CPU."""
  devices = settings.client_devices
  if devices == 'gpu' and not num_gpus:
    raise hparams.UsageError(
      '--client_devices=gpu: the cluster has no GPU; give auto or cpu'
    )
  if devices == 'cpu' or not num_gpus:
    return 0.0
  return 1.0 / settings.clients_per_gpu
