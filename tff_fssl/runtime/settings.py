"""Which runtime, and how it runs."""

import dataclasses
import math

from tff_fssl import hparams

IN_PROCESS = 'in_process'
TFF_WORKER = 'tff_worker'
RUNTIMES = (IN_PROCESS, TFF_WORKER)


@dataclasses.dataclass(frozen=True)
class Settings:
  """The settings of `build_context`.

  Values that are not allowed raise `UsageError`, which names those that are.

  Attributes:
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
  """

  runtime: str = IN_PROCESS
  client_devices: str = 'auto'
  client_threads: int = 0
  simulate_secure_aggregation: bool = False
  call_timeout_secs: float = 0.0
  default_num_clients: int = 0

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
    if not 0 <= self.call_timeout_secs < math.inf:
      raise hparams.UsageError(
        f'--call_timeout_secs={self.call_timeout_secs:g}: must be at least 0'
        ' (without limit), and finite'
      )
    if self.runtime == TFF_WORKER:
      self._check_worker()
    elif self.call_timeout_secs:
      raise hparams.UsageError(
        f'--call_timeout_secs={self.call_timeout_secs:g}: there are no calls'
        ' without --runtime=tff_worker; leave it out'
      )

  def _check_worker(self) -> None:
    if self.client_devices not in ('auto', 'cpu'):
      raise hparams.UsageError(
        f'--client_devices={self.client_devices}: the tff_worker runtime runs'
        ' on the CPU only; allowed are auto and cpu, or use'
        ' --runtime=in_process'
      )
    if self.client_threads < 0:
      raise hparams.UsageError(
        f'--client_threads={self.client_threads}: must be at least 0'
      )
