"""The runtime and its settings."""

import dataclasses
import math

from tff_fssl import hparams

IN_PROCESS = 'in_process'
TFF_WORKER = 'tff_worker'
RAY = 'ray'
RUNTIMES = (IN_PROCESS, TFF_WORKER, RAY)
_RAY_DEVICES = ('auto', 'cpu', 'gpu')
# The least values of fields.
_LEAST = {
  'clients_per_group': 0,
  'intra_op_threads': 0,
  'ray_workers': 0,
  'clients_per_gpu': 1,
}


@dataclasses.dataclass(frozen=True)
class Settings:
  """The settings of `build_context`.

  Values that are not allowed raise `UsageError`, which names those that are.

  Attributes:
    runtime: `'in_process'`, TensorFlow in this process, or `'tff_worker'`,
      TFF's C++ worker (CPU only). The worker is started at the first
      invocation, replaced if it dies, and ended by `close()`, at the end of a
      `with` block, or when Python ends in any way. `'ray'`: workers on a Ray
      cluster run the clients, this process runs the rest (docs/scaling.md).
    client_devices: `'auto'` (all GPUs if there are any, else the CPU),
      `'cpu'`, `'gpu'`, or device names joined by commas, such as
      `'gpu:0,gpu:1'`. Client i runs on device (i mod n). Logical devices must
      have been configured before.
    client_threads: The number of clients that run at a time. 0: one that suits
      the devices. Results do not depend on it, unless a computation draws from
      TensorFlow's stateful random operations.
    simulate_secure_aggregation: Whether `federated_secure_sum` and similar
      operators are replaced by plain sums, which protect nothing. If not, they
      raise `NotImplementedError`.
    call_timeout_secs: The time limit of a call, in seconds. After it, the
      worker is ended and another one repeats the call. 0: no limit. Not
      `'in_process'`.
    default_num_clients: The number of clients, if a computation's argument does
      not determine it.
    clients_per_group: The number of clients that are accumulated before their
      accumulators are merged with those of earlier clients. 0: all. 1 with
      `'ray'`, where a group goes to one worker. Not `'tff_worker'`.
    intra_op_threads: The number of cores of a TensorFlow operation. 0: all of
      this machine. Sums over several cores are rounded differently. Workers on
      other machines use the same number.
    ray_address: Address of a running Ray cluster, or `'auto'`. Empty: a cluster
      on this machine, for this process.
    ray_workers: The number of workers. 0: one for each core of the cluster or,
      if clients run on GPUs, for each place on a GPU.
    clients_per_gpu: The number of workers that share a GPU (`'ray'`).
    ray_trusted_network: Whether a cluster without token authentication is
      allowed.
    is_deterministic: Whether workers' operations on GPUs repeat their results.
  """

  runtime: str = IN_PROCESS
  client_devices: str = 'auto'
  client_threads: int = 0
  simulate_secure_aggregation: bool = False
  call_timeout_secs: float = 0.0
  default_num_clients: int = 0
  clients_per_group: int = 0
  intra_op_threads: int = 0
  ray_address: str = ''
  ray_workers: int = 0
  clients_per_gpu: int = 1
  ray_trusted_network: bool = False
  is_deterministic: bool = True

  def __post_init__(self):
    if self.default_num_clients < 0:
      raise hparams.UsageError(
        f'default_num_clients={self.default_num_clients}: must be at least 0'
      )
    if self.runtime not in RUNTIMES:
      raise hparams.UsageError(
        f'--runtime={self.runtime}: allowed are {", ".join(RUNTIMES)}'
        f'{hparams.closest(self.runtime, RUNTIMES)}'
      )
    # Written so that NaN is refused, too.
    if not 0 <= self.call_timeout_secs < math.inf:
      raise hparams.UsageError(
        f'--call_timeout_secs={self.call_timeout_secs:g}: must be at least 0'
        ' (without limit), and finite'
      )
    for name, least in _LEAST.items():
      if getattr(self, name) < least:
        raise hparams.UsageError(
          f'--{name}={getattr(self, name)}: must be at least {least}'
        )
    if self.runtime == TFF_WORKER:
      self._check_worker()
    elif self.runtime == IN_PROCESS and self.call_timeout_secs:
      raise hparams.UsageError(
        f'--call_timeout_secs={self.call_timeout_secs:g}: there are no calls'
        ' with --runtime=in_process; omit it'
      )
    if self.runtime == RAY and self.client_devices not in _RAY_DEVICES:
      raise hparams.UsageError(
        f'--client_devices={self.client_devices}: with --runtime=ray, allowed'
        f' are {", ".join(_RAY_DEVICES)}: Ray says which GPU a worker has'
      )

  def _check_worker(self) -> None:
    if self.client_devices not in ('auto', 'cpu'):
      raise hparams.UsageError(
        f'--client_devices={self.client_devices}: the tff_worker runtime runs'
        ' on the CPU only; allowed are auto and cpu, or use'
        ' --runtime=in_process'
      )
    if self.clients_per_group or self.intra_op_threads:
      raise hparams.UsageError(
        '--clients_per_group, --intra_op_threads: not known to'
        ' --runtime=tff_worker; omit them, or use another runtime'
      )
    if self.client_threads < 0:
      raise hparams.UsageError(
        f'--client_threads={self.client_threads}: must be at least 0'
      )
