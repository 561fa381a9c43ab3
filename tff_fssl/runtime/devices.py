"""The devices that clients run on."""

from __future__ import annotations

from collections.abc import Iterable
import os
import pathlib
import re

from tff_fssl import hparams
from tff_fssl.lazy import tf

SERVER_DEVICE = '/device:CPU:0'
_CPU_INFO = '/proc/cpuinfo'


def resolve_client_devices(client_devices: str) -> list[str]:
  """Returns the logical devices that clients are spread over.

  Initialises TensorFlow's devices: memory growth, logical devices and
  determinism must have been set before.

  Args:
    client_devices: `'auto'` (all GPUs if there are any, else the CPU), `'cpu'`,
      `'gpu'` (all GPUs), or names joined by commas (`'gpu:0,gpu:1'`,
      `'cpu:1'`). A name may occur several times.

  Returns:
    n device names, as `tf.device` takes them. Client i of a cohort runs on
    device (i mod n).

  Raises:
    tff_fssl.hparams.UsageError: If a device does not exist, with the devices
      that do.
  """
  existing = {
    _short_name(device.name): device.name
    for device in tf.config.list_logical_devices()
    if device.device_type in ('CPU', 'GPU')
  }
  gpus = [name for name in existing if name.startswith('gpu:')]
  if client_devices == 'auto':
    return [existing[name] for name in gpus or ['cpu:0']]
  devices: list[str] = []
  for name in client_devices.lower().split(','):
    name = name.strip()
    if name == 'gpu' and gpus:
      devices.extend(existing[gpu] for gpu in gpus)
      continue
    name = 'cpu:0' if name == 'cpu' else name
    if name not in existing:
      raise hparams.UsageError(
        f'--client_devices={client_devices}: there is no device {name!r}'
        f' here; allowed are auto, cpu, or one or more of'
        f' {", ".join(sorted(existing))}, joined by commas'
        f'{hparams.closest(name, sorted(existing))}'
      )
    devices.append(existing[name])
  return devices


def resolve_client_threads(client_threads: int, devices: list[str]) -> int:
  """Chooses the number of clients that run at a time.

  Args:
    client_threads: The number, or 0 for a number that suits the devices: one
      per device, but two on a single CPU with several cores, where one client's
      Python and input work overlaps the other's computation.
    devices: The result of `resolve_client_devices`.

  Returns:
    A number of at least 1.

  Raises:
    tff_fssl.hparams.UsageError: If `client_threads` is negative.
  """
  if client_threads < 0:
    raise hparams.UsageError(
      f'--client_threads={client_threads}: must be at least 0; 0 chooses a'
      ' number that suits the devices'
    )
  if client_threads:
    return client_threads
  if len(devices) == 1 and _short_name(devices[0]).startswith('cpu:'):
    return min(2, len(os.sched_getaffinity(0)))
  return len(devices)


def is_bfloat16_emulated(devices: Iterable[str]) -> bool:
  """Tells whether one of the devices is a CPU without bfloat16 instructions.

  Args:
    devices: Names, such as those from `resolve_client_devices`.

  Returns:
    Whether that is so.
  """
  if not any(_short_name(name).startswith('cpu:') for name in devices):
    return False
  # avx512_bf16, amx_bf16.
  return 'bf16' not in pathlib.Path(_CPU_INFO).read_text(encoding='utf-8')


def _short_name(device_name: str) -> str:
  """Shortens `'/device:CPU:0'` to `'cpu:0'`."""
  return re.sub(r'^.*device:', '', device_name).lower()
