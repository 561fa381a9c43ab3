"""Runs a phase's clients: their work, accumulation in order, and merging.

Clients are accumulated in groups of a fixed size, each from zero, and groups
are merged in order. Results therefore depend on the size of a group, but not
on who runs a group, or when.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import time
from typing import Any, Optional

from tff_fssl.lazy import tf
from tff_fssl.runtime import devices as devices_lib
from tff_fssl.runtime import functions
from tff_fssl.runtime import operations
from tff_fssl.runtime import program as program_lib
from tff_fssl.runtime import streaming

# Slot -> a tensor.
Values = dict[operations.Slot, Any]

# (client's index, slots that are wanted) -> the values of the client's slots,
# and what must live as long as they do.
MakeClient = Callable[[int, frozenset[operations.Slot]], tuple[Values, Any]]


@dataclasses.dataclass(frozen=True)
class Workers:
  """The devices and threads that run clients in this process.

  Attributes:
    devices: Client i runs on device (i mod n).
    num_threads: The number of clients that run at a time.
    check: Called before each client. It raises to stop.
  """

  devices: Sequence[str]
  num_threads: int
  check: Callable[[], None]


class Merger:
  """Merges the accumulators of groups of clients, in their order.

  Attributes:
    totals: Accumulator slot -> its value for all groups so far.
    seconds: The time that merging took.
  """

  def __init__(
    self, phase: program_lib.Phase, server: Mapping[operations.Slot, Any]
  ):
    """Starts without any group.

    Args:
      phase: The phase.
      server: The values of the server's slots.
    """
    self.seconds = 0.0
    self.totals: Values = {
      slot: server[zero] for slot, zero in phase.initial.items()
    }
    self._is_empty = True
    self._phase = phase
    self._server = server
    self._bound: Optional[functions.BoundFunction] = None

  def add(self, totals: Values) -> None:
    """Adds the accumulators of the next group."""
    if self._is_empty or not totals:
      self.totals, self._is_empty = totals, False
      return
    start = time.monotonic()
    merge = self._phase.merge
    assert merge is not None, 'compiled for one group'
    if self._bound is None:
      self._bound = functions.BoundFunction(merge.function, self._server)
    values = {merge.left[slot]: value for slot, value in self.totals.items()}
    values.update((merge.right[s], value) for s, value in totals.items())
    self._bound(values, device=devices_lib.SERVER_DEVICE)
    self.totals = {
      slot: values[merged] if merged in values else self._server[merged]
      for slot, merged in merge.merged.items()
    }
    self.seconds += time.monotonic() - start


def run_clients(
  phase: program_lib.Phase,
  server: Mapping[operations.Slot, Any],
  make_client: MakeClient,
  indices: range,
  kept: Mapping[operations.Slot, Sequence[Any]],
  workers: Workers,
  *,
  group_size: int = 0,
) -> tuple[Values, dict[operations.Slot, list[Any]], float]:
  """Streams clients through a phase.

  Args:
    phase: The phase.
    server: The values of the server's slots.
    make_client: Makes a client's values, in worker threads.
    indices: The clients, by their positions in the cohort.
    kept: Slot -> the values that earlier phases kept, by position in `indices`.
    workers: The devices and threads.
    group_size: The number of clients that are accumulated before their
      accumulators are merged with those of earlier clients. 0: all.

  Returns:
    (the accumulators' values, slot -> values that later phases or the result
    need, by position in `indices`, the seconds of accumulation).
  """
  work = functions.BoundFunction(phase.work, server)
  accumulate = functions.BoundFunction(phase.accumulate, server)
  wanted = phase.reads
  # Without any client, the lists exist and are empty.
  new: dict[operations.Slot, list[Any]] = {slot: [] for slot in phase.kept}
  merger = Merger(phase, server)
  # A group starts from zero, and must not change it.
  zeros, totals = merger.totals, dict(merger.totals)
  seconds = 0.0

  def run_client(position: int) -> tuple[Values, Any]:
    index = indices[position]
    # Input pipelines run on the host, also for clients on GPUs.
    with tf.device(devices_lib.SERVER_DEVICE):
      values, owners = make_client(index, wanted)
    for slot in wanted.intersection(kept):
      values[slot] = kept[slot][position]
    # By the position in the cohort, so that every run places it alike.
    device = workers.devices[index % len(workers.devices)]
    work(values, device=device, client_index=index)
    return values, owners

  def add_client(position: int, done: tuple[Values, Any]) -> None:
    nonlocal totals, seconds
    start = time.monotonic()
    values, _ = done
    for slot in phase.kept:
      new[slot].append(values[slot])
    # A group ends before the client after it, not after its last.
    if group_size and position and position % group_size == 0:
      merger.add(totals)
      totals = dict(zeros)
    if totals:
      values.update(totals)
      accumulate(
        values,
        device=devices_lib.SERVER_DEVICE,
        client_index=indices[position],
      )
      for slot, updated in phase.updated.items():
        totals[slot] = values[updated] if updated in values else server[updated]
    seconds += time.monotonic() - start

  streaming.stream(
    len(indices), workers.num_threads, run_client, add_client, workers.check
  )
  if group_size:
    merger.add(totals)
    totals = merger.totals
  return totals, new, seconds
