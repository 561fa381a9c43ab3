"""Worker processes on a Ray cluster: started, replaced, given work.

Ray starts workers and reports lost ones. Here another worker repeats lost work.
A worker is never restarted. A new one takes its place, on any machine with
room. Ray's tasks with Ray's retries survive lost machines as well (tried), but
Ray gives a process that runs tasks another GPU each time, and TensorFlow stays
on its first.
"""

import collections
from collections.abc import Callable
import dataclasses
import heapq
import time
from typing import Any

from tff_fssl import hparams
from tff_fssl.runtime import errors
from tff_fssl.runtime import ray_worker

# The number of workers that the same group may lose.
_MAX_ATTEMPTS = 5
# The number of workers that may end before they describe themselves.
_MAX_FAILED_STARTS = 3
# Seconds without any worker before giving up, without another limit.
_PATIENCE = 600.0
# Seconds between two looks for interrupts and time limits.
_TICK = 0.5


@dataclasses.dataclass(frozen=True)
class PoolSettings:
  """The number of workers, and their resources.

  Attributes:
    num_workers: The number of workers. 0: as many as the cluster has room for.
    cpus_per_worker: Ray's resource for each.
    gpus_per_worker: Ray's GPU resource for each. 0: they work on the CPU.
    timeout_secs: The time limit of a group, and of waiting for any worker. 0:
      no limit for a group.
    trusts_network: Whether workers without a token are accepted.
    worker: The settings of each worker.
  """

  num_workers: int
  cpus_per_worker: float
  gpus_per_worker: float
  timeout_secs: float
  trusts_network: bool
  worker: ray_worker.WorkerSettings


@dataclasses.dataclass
class _Busy:
  actor: Any
  group: int
  since: float


class Pool:
  """Workers that run groups of clients."""

  def __init__(
    self, ray: Any, settings: PoolSettings, warn: Callable[[str], None]
  ):
    """Asks for the first workers, without waiting for them.

    Args:
      ray: The module, connected to a cluster.
      settings: The settings of workers.
      warn: Called with messages for the user.
    """
    self._ray = ray
    self._settings = settings
    self._warn = warn
    self._expected = ray_worker.environment()
    # Reference to a worker's description -> (worker, whether it is new).
    self._starting: dict[Any, tuple[Any, bool]] = {}
    self._idle: collections.deque[Any] = collections.deque()
    self._names: dict[Any, str] = {}
    self._num_busy = 0
    self._refused: list[str] = []
    self._failed_starts = 0
    self.fill()

  @property
  def names(self) -> list[str]:
    """Returns the workers that are ready and idle."""
    return [self._names[actor] for actor in self._idle]

  def target(self) -> int:
    """Returns the number of workers to aim at."""
    settings = self._settings
    wanted = settings.num_workers
    if not wanted:
      there = self._ray.cluster_resources()
      wanted = int(there.get('CPU', 0) / settings.cpus_per_worker + 1e-6)
      if settings.gpus_per_worker:
        gpus = int(there.get('GPU', 0) / settings.gpus_per_worker + 1e-6)
        wanted = min(wanted, gpus)
    return max(max(wanted, 1) - len(self._refused), 0)

  def fill(self) -> None:
    """Asks for the workers that are missing."""
    settings = self._settings
    there = len(self._starting) + len(self._idle) + self._num_busy
    for _ in range(self.target() - there):
      actor = (
        self._ray.remote(ray_worker.Worker)
        .options(
          num_cpus=settings.cpus_per_worker,
          num_gpus=settings.gpus_per_worker,
          # The pool starts new workers itself, where there is room.
          max_restarts=0,
          max_task_retries=0,
          scheduling_strategy='SPREAD',
        )
        .remote(settings.worker)
      )
      self._starting[actor.describe.remote()] = (actor, True)

  def close(self) -> None:
    """Ends all workers."""
    starting = [actor for actor, _ in self._starting.values()]
    for actor in [*starting, *self._idle]:
      self._kill(actor)
    self._starting.clear()
    self._idle.clear()

  def run(
    self,
    count: int,
    submit: Callable[[Any, int], Any],
    consume: Callable[[int, Any], None],
    check: Callable[[], None],
  ) -> None:
    """Runs groups 0 .. count - 1, and consumes their results in this order.

    Args:
      count: The number of groups.
      submit: (worker, group) -> Ray's reference to a `ray_worker.Done`,
        `Refused` or `Failed`.
      consume: Called with each group and its `Done`.
      check: Called often. It raises to stop.

    Raises:
      tff_fssl.hparams.UsageError: If no worker can be used, and says why.
      errors.ExecutionError: If a client's work fails.
      errors.WorkerError: If a group lost too many workers, or there are none.
    """
    _Groups(self, count, submit, consume, check)()

  def _kill(self, actor: Any) -> None:
    self._names.pop(actor, None)
    try:
      self._ray.kill(actor)
    except Exception:  # pylint: disable=broad-except
      pass  # It is gone, and so is perhaps the cluster.

  def started(self, reference: Any) -> None:
    """Handles a worker that has described itself, or has ended."""
    actor, is_new = self._starting.pop(reference)
    try:
      found = self._ray.get(reference)
    except self._ray.exceptions.RayError as error:
      self._kill(actor)
      self._failed_starts += is_new
      if self._failed_starts >= _MAX_FAILED_STARTS and not self._names:
        raise hparams.UsageError(
          f'--runtime=ray: {self._failed_starts} workers ended while they'
          f' started; the last one: {_short(error)}'
        ) from error
      return
    self._failed_starts = 0
    self._names[actor] = found.name
    reason = self._objection(found)
    if reason:
      self.refuse(actor, reason)
    else:
      self._idle.append(actor)

  def _objection(self, found: ray_worker.Description) -> str:
    """Returns the reason why a worker cannot be used, or ''."""
    differing = [
      f'{name} {found.environment.get(name)} instead of {version}'
      for name, version in self._expected.items()
      if found.environment.get(name) != version
    ]
    if differing:
      return f'it has {", ".join(differing)}; install the same everywhere'
    if self._settings.worker.on_gpu and not found.gpus:
      return (
        'Ray gave it a GPU, but TensorFlow sees none there; install'
        ' requirements-gpu.txt, or give --client_devices=cpu'
      )
    if not found.has_token and not self._settings.trusts_network:
      return (
        'its Ray has no token authentication, so that anybody who reaches its'
        ' ports can run programs there; start the cluster with'
        ' RAY_AUTH_MODE=token, or give --ray_trusted_network if nobody else can'
        ' reach it'
      )
    return ''

  def ask_again(self) -> None:
    """Asks idle workers for a sign of life, since a machine may be lost."""
    while self._idle:
      actor = self._idle.popleft()
      self._starting[actor.describe.remote()] = (actor, False)

  def refuse(self, actor: Any, reason: str) -> None:
    """Drops a worker, or raises `UsageError` if no other is left."""
    message = f'worker {self._names.get(actor, "?")} is not used: {reason}'
    self._kill(actor)
    self._refused.append(message)
    others = len(self._starting) + len(self._idle) + self._num_busy
    if not self.target() or not others:
      raise hparams.UsageError(f'--runtime=ray: {message}')
    self._warn(f'{message}.')


class _Groups:
  """One call of `Pool.run`."""

  def __init__(self, pool: Pool, count: int, submit, consume, check):
    self._pool = pool
    self._ray = pool._ray  # pylint: disable=protected-access
    self._count = count
    self._submit: Callable[[Any, int], Any] = submit
    self._consume: Callable[[int, Any], None] = consume
    self._check: Callable[[], None] = check
    self._waiting = list(range(count))  # A heap: the first group first.
    self._busy: dict[Any, _Busy] = {}
    self._done: dict[int, Any] = {}
    self._next = 0
    self._attempts: collections.Counter[int] = collections.Counter()
    self._somebody = time.monotonic()

  def __call__(self) -> None:
    pool = self._pool
    try:
      while self._next < self._count:
        self._check()
        pool.fill()
        self._give_work()
        self._wait()
        while self._next in self._done:
          self._consume(self._next, self._done.pop(self._next))
          self._next += 1
        self._end_late()
    finally:
      # After an error: a worker that goes on with its group is of no use.
      for busy in self._busy.values():
        pool._kill(busy.actor)  # pylint: disable=protected-access
      pool._num_busy = 0  # pylint: disable=protected-access

  def _give_work(self) -> None:
    """Gives groups to idle workers, few groups ahead of the consumer."""
    idle, names = self._pool._idle, self._pool._names
    # Results wait for their turn in memory: not too many of them.
    ahead = self._next + 2 * len(names)
    while idle and self._waiting and self._waiting[0] < max(ahead, 1):
      group, actor = heapq.heappop(self._waiting), idle.popleft()
      try:
        reference = self._submit(actor, group)
      except BaseException:
        idle.append(actor)  # It got no work.
        raise
      self._busy[reference] = _Busy(actor, group, time.monotonic())
    self._pool._num_busy = len(self._busy)

  def _wait(self) -> None:
    """Handles finished groups and workers."""
    pool = self._pool
    references = [*self._busy, *pool._starting]
    if not references:
      time.sleep(_TICK)
      return
    ready, _ = self._ray.wait(references, num_returns=1, timeout=_TICK)
    for reference in ready:
      if reference in self._busy:
        self._finished(reference)
      else:
        pool.started(reference)

  def _finished(self, reference: Any) -> None:
    """Handles the result of a worker, or its loss."""
    pool, busy = self._pool, self._busy.pop(reference)
    pool._num_busy = len(self._busy)
    try:
      result = self._ray.get(reference)
    except self._ray.exceptions.RayTaskError:
      pool._kill(busy.actor)
      raise
    except self._ray.exceptions.RayError as error:
      self._lost(busy, _short(error))
      return
    if isinstance(result, ray_worker.Refused):
      heapq.heappush(self._waiting, busy.group)
      pool.refuse(busy.actor, result.reason)
      return
    pool._idle.append(busy.actor)
    if isinstance(result, ray_worker.Failed):
      raise result.error
    self._done[busy.group] = result

  def _lost(self, busy: _Busy, reason: str) -> None:
    """Queues the group of a lost worker again."""
    name = self._pool._names.get(busy.actor, '?')
    self._pool._kill(busy.actor)
    # Its machine may have taken other workers with it.
    self._pool.ask_again()
    heapq.heappush(self._waiting, busy.group)
    self._attempts[busy.group] += 1
    if self._attempts[busy.group] >= _MAX_ATTEMPTS:
      raise errors.WorkerError(
        f'Group {busy.group} of the clients lost its worker {_MAX_ATTEMPTS}'
        f' times; the last time: {reason}.'
      )
    self._pool._warn(
      f'Worker {name} was lost ({reason}); another one repeats its clients.'
    )

  def _end_late(self) -> None:
    """Ends workers that take too long, or raises if none has come."""
    now, limit = time.monotonic(), self._pool._settings.timeout_secs
    for reference, busy in list(self._busy.items()):
      if limit and now - busy.since > limit:
        del self._busy[reference]
        self._lost(busy, f'no answer in {limit:g} s (--call_timeout_secs)')
    # The clock runs only while there is no worker at all.
    if self._busy or self._pool._idle:
      self._somebody = now
    patience = limit or _PATIENCE
    if now - self._somebody > patience:
      settings, there = self._pool._settings, self._ray.cluster_resources()
      raise errors.WorkerError(
        f'The cluster had no worker for {patience:g} s. It has'
        f' {there.get("CPU", 0):g} CPU and {there.get("GPU", 0):g} GPU; a'
        f' worker needs {settings.cpus_per_worker:g} and'
        f' {settings.gpus_per_worker:g}.'
      )


def _short(error: BaseException) -> str:
  """Returns the first lines of one of Ray's messages, in one line."""
  lines = [line.strip() for line in str(error).splitlines() if line.strip()]
  return ' '.join(lines)[:400] or type(error).__name__
