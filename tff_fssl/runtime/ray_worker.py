"""The part of the Ray runtime that runs in worker processes.

Nothing here imports Ray. A worker is told everything by each call, and may be
replaced by another one at any time.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
import dataclasses
import hashlib
import importlib.metadata
import os
import pathlib
import pickle
import platform
import socket
import threading
from typing import Any, NamedTuple

from tff_fssl import hparams
from tff_fssl.lazy import tf, tff
from tff_fssl.runtime import devices as devices_lib
from tff_fssl.runtime import phases
from tff_fssl.runtime import portable
from tff_fssl.runtime import program as program_lib

# Packages with versions that all parts of a computation must share.
_PACKAGES = ('tensorflow', 'tensorflow-federated', 'keras', 'numpy', 'ray')
# The number of programs that a worker keeps.
_MAX_PROGRAMS = 8


@dataclasses.dataclass(frozen=True)
class WorkerSettings:
  """The way in which a worker runs clients.

  Attributes:
    on_gpu: Whether clients run on the GPU that Ray gives the worker.
    num_threads: The number of clients that run at a time.
    intra_op_threads: The number of cores of a TensorFlow operation.
    simulate_secure_aggregation: See `runtime.Settings`.
    is_deterministic: Whether operations on GPUs must repeat their results.
  """

  on_gpu: bool
  num_threads: int
  intra_op_threads: int
  simulate_secure_aggregation: bool
  is_deterministic: bool


@dataclasses.dataclass(frozen=True)
class Description:
  """The description that a worker gives of itself.

  Attributes:
    name: The machine's name and process id.
    environment: See `environment`.
    has_token: Whether the worker's Ray asks for a token.
    gpus: The GPUs that TensorFlow sees.
  """

  name: str
  environment: dict[str, str]
  has_token: bool
  gpus: tuple[str, ...]


class Group(NamedTuple):
  """Consecutive clients of a phase.

  Attributes:
    phase: The index of the phase.
    first: The position of the first client in the cohort.
    clients: The result of `portable.encode_client` for each.
    kept: The result of `portable.encode_kept`.
  """

  phase: int
  first: int
  clients: list[list[Any]]
  kept: list[Any]


class Done(NamedTuple):
  """The result of a group of clients.

  Attributes:
    totals: The phase's accumulators, in the order of `Phase.initial`.
    kept: For each of the phase's kept slots, the clients' values.
    reports: (recipe, item that it reported) pairs.
    seconds: The time that accumulation took.
  """

  totals: list[Any]
  kept: list[list[Any]]
  reports: list[tuple[int, Any]]
  seconds: float


class Refused(NamedTuple):
  """A worker that cannot work, since its machine lacks something.

  Attributes:
    reason: Why.
  """

  reason: str


class Failed(NamedTuple):
  """A client's work failed, as it would anywhere.

  Attributes:
    error: The exception.
  """

  error: Exception


def environment() -> dict[str, str]:
  """Returns the versions that processes of one computation must share."""
  found = {'python': platform.python_version()}
  for package in _PACKAGES:
    try:
      found[package] = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
      found[package] = 'not installed'
  digest = hashlib.sha256()
  folder = pathlib.Path(__file__).resolve().parents[1]
  for path in sorted(folder.rglob('*.py')):
    digest.update(str(path.relative_to(folder)).encode())
    # Another version of a file could compute something else.
    digest.update(path.read_bytes())
  found['source of tff_fssl'] = digest.hexdigest()[:12]
  return found


class Worker:
  """Runs groups of clients, as an actor of Ray."""

  def __init__(self, settings: WorkerSettings):
    """Sets TensorFlow up.

    Args:
      settings: How clients run.
    """
    tf.config.threading.set_intra_op_parallelism_threads(
      settings.intra_op_threads
    )
    self._gpus = tuple(
      gpu.name for gpu in tf.config.list_physical_devices('GPU')
    )
    for gpu in tf.config.list_physical_devices('GPU'):
      tf.config.experimental.set_memory_growth(gpu, True)
    if self._gpus and settings.is_deterministic:
      # TensorFlow demands one for deterministic operations; nothing uses it.
      tf.random.set_seed(0)
      tf.config.experimental.enable_op_determinism()
    self._settings = settings
    self._devices: list[str] = []
    self._programs: collections.OrderedDict[str, program_lib.Program] = (
      collections.OrderedDict()
    )
    # Digest of a recipe -> the function that it loaded.
    self._makers: dict[str, Any] = {}
    self._reports: list[tuple[str, Any]] = []
    self._lock = threading.Lock()

  def describe(self) -> Description:
    """Describes this worker."""
    return Description(
      f'{socket.gethostname()} (process {os.getpid()})',
      environment(),
      os.environ.get('RAY_AUTH_MODE', '').lower() == 'token',
      self._gpus,
    )

  def run_group(
    self,
    key: str,
    computation: bytes,
    recipes: Sequence[bytes],
    server: list[Any],
    group: Group,
  ) -> Done | Refused | Failed:
    """Runs a group of clients through a phase.

    Args:
      key: Digest of the computation.
      computation: The serialized `tff.Computation`.
      recipes: The pickled recipes of `group.clients`.
      server: The result of `portable.encode_server`.
      group: The clients.

    Returns:
      Their result, or the reason why they have none.
    """
    try:
      if not self._devices:
        self._devices = devices_lib.resolve_client_devices(
          'gpu' if self._settings.on_gpu else 'cpu'
        )
      program = self._program(key, computation)
      digests = [hashlib.sha256(recipe).hexdigest() for recipe in recipes]
      makers = self._load(digests, recipes)
    except hparams.UsageError as error:
      return Refused(str(error))
    try:
      return self._run(program, makers, digests, server, group)
    except Exception as error:  # pylint: disable=broad-except
      return Failed(_portable_error(error))

  def _program(self, key: str, computation: bytes) -> program_lib.Program:
    program = self._programs.pop(key, None)
    if program is None:
      program = program_lib.compile_program(
        load_computation(computation),
        simulate_secure_aggregation=self._settings.simulate_secure_aggregation,
        merges=True,
      )
    self._programs[key] = program
    while len(self._programs) > _MAX_PROGRAMS:
      self._programs.popitem(last=False)
    return program

  def _load(
    self, digests: Sequence[str], recipes: Sequence[bytes]
  ) -> list[Any]:
    """Loads recipes, unless an earlier call has loaded them."""
    makers = {}
    for digest, recipe in zip(digests, recipes, strict=True):
      maker = self._makers.get(digest)
      if maker is None:
        maker = pickle.loads(recipe).load(self._reporter(digest))
      makers[digest] = maker
    # Recipes of earlier rounds are dropped, with the data they hold.
    self._makers = makers
    return list(makers.values())

  def _reporter(self, digest: str) -> Callable[[Any], None]:
    def report(item: Any) -> None:
      with self._lock:
        self._reports.append((digest, item))

    return report

  def _run(
    self,
    program: program_lib.Program,
    makers: list[Any],
    digests: list[str],
    sent: list[Any],
    group: Group,
  ) -> Done:
    phase = program.phases[group.phase]
    with tf.device(devices_lib.SERVER_DEVICE):
      server = portable.decode_server(phase, sent)
      kept = {
        slot: [portable.decode(value, slot.type) for value in values]
        for slot, values in zip(
          portable.kept_slots(program), group.kept, strict=True
        )
        if values is not None
      }
    argument = portable.decode_clients(program, group.clients, makers)
    totals, new, seconds = phases.run_clients(
      phase,
      server,
      lambda index, wanted: argument.client(index - group.first, wanted),
      range(group.first, group.first + len(group.clients)),
      kept,
      phases.Workers(self._devices, self._settings.num_threads, lambda: None),
    )
    with self._lock:
      reports, self._reports = self._reports, []
    return Done(
      [portable.encode(totals[slot]) for slot in phase.initial],
      [list(map(portable.encode, new[slot])) for slot in phase.kept],
      [(digests.index(d), item) for d, item in reports if d in digests],
      seconds,
    )


def dump_computation(computation: Any) -> bytes:
  """Serializes a computation for `load_computation`."""
  proto = tff.framework.serialize_computation(computation)
  return bytes(proto.SerializeToString(deterministic=True))


def load_computation(serialized: bytes) -> Any:
  """Loads a computation from its bytes."""
  proto = tff.framework.serialize_computation(_nothing)
  proto.ParseFromString(serialized)
  return tff.framework.deserialize_computation(proto)


@tff.tensorflow.computation
def _nothing():
  return 0


def _portable_error(error: Exception) -> Exception:
  """Returns an exception that can be pickled, for any exception."""
  try:
    # Some exceptions can be pickled, but not loaded.
    pickle.loads(pickle.dumps(error))
  except Exception:  # pylint: disable=broad-except
    return RuntimeError(f'{type(error).__name__}: {error}')
  return error
