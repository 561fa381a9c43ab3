"""Divides a computation into server stages and client phases.

Stage k runs once, at the server. Then phase k runs for every client. The
clients' values are accumulated in the order of the clients, and dropped. Stage
k + 1 depends on what phase k accumulated.
"""

from __future__ import annotations

from collections.abc import Iterable
import dataclasses
from typing import Any, Optional

from tff_fssl.lazy import tff
from tff_fssl.runtime import functions
from tff_fssl.runtime import lowering
from tff_fssl.runtime import operations


@dataclasses.dataclass(frozen=True, eq=False)
class PhaseMerge:
  """The merge of the accumulators of two groups of a phase's clients.

  Attributes:
    function: Function that merges all accumulators of the phase.
    left: Accumulator slot -> the slot from which `function` reads its value for
      the earlier clients.
    right: Accumulator slot -> that for the later clients.
    merged: Accumulator slot -> the slot of its value for both.
  """

  function: functions.Function
  left: dict[operations.Slot, operations.Slot]
  right: dict[operations.Slot, operations.Slot]
  merged: dict[operations.Slot, operations.Slot]


@dataclasses.dataclass(frozen=True, eq=False)
class Phase:
  """The work of each client between two stages of the server.

  Attributes:
    work: Function that computes one client's values, on the client's device.
    admit: Function that computes more of one client's values, from those of
      `work`. The server runs it. It is empty unless the program is exported.
    accumulate: Function that adds one client's values to all accumulators of
      the phase.
    initial: Accumulator slot -> the server's slot of its initial value.
    updated: Accumulator slot -> the slot of its next value.
    final: The server's slot -> the accumulator slot of its value.
    kept: The clients' slots that later phases or the result need.
    merge: The merge of two groups' accumulators. None if some aggregate has
      none, since the program was compiled for one group.
  """

  work: functions.Function
  admit: functions.Function
  accumulate: functions.Function
  initial: dict[operations.Slot, operations.Slot]
  updated: dict[operations.Slot, operations.Slot]
  final: dict[operations.Slot, operations.Slot]
  kept: tuple[operations.Slot, ...]
  merge: Optional[PhaseMerge] = None

  @property
  def reads(self) -> frozenset[operations.Slot]:
    """Returns all slots that it reads."""
    return frozenset(
      (
        *self.work.inputs,
        *self.admit.inputs,
        *self.accumulate.inputs,
        *self.updated.values(),
        *self.kept,
      )
    )


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
  """A computation that is ready to run.

  Attributes:
    parameter_type: The type of the argument, or None.
    result_type: The type of the result.
    parameter: The slots of the argument.
    readers: See `lowering.Lowered`.
    result: The slots of the result, depth first.
    stages: What the server does before each phase and after the last one.
    phases: The work of clients between the stages.
    reduce_loops: The client operations that loop by `Dataset.reduce`.
  """

  parameter_type: tff.Type
  result_type: tff.Type
  parameter: operations.Tree
  readers: dict[operations.Slot, list[operations.Slot]]
  result: tuple[operations.Slot, ...]
  stages: tuple[functions.Function, ...]
  phases: tuple[Phase, ...]
  reduce_loops: tuple[str, ...]


def compile_program(
  computation: tff.framework.ConcreteComputation,
  *,
  simulate_secure_aggregation: bool = False,
  merges: bool = False,
  exports: bool = False,
) -> Program:
  """Compiles a computation.

  Args:
    computation: Any `tff.Computation` made by TFF's decorators.
    simulate_secure_aggregation: Whether secure sums become plain ones.
    merges: Whether clients are accumulated in several groups.
    exports: Whether its functions shall run in other processes. Then a client's
      work ends with the last operation that reads its data. What follows, such
      as the check of what a client sends, is left to the server.

  Returns:
    The program.

  Raises:
    NotImplementedError: If it uses an operation that this runtime does not
      support, with its name.
  """
  lowered = lowering.lower(
    computation,
    simulate_secure_aggregation=simulate_secure_aggregation,
    merges=merges,
    exports=exports,
  )
  items = _live_items(lowered)
  levels = _schedule(items, lowered.result)
  last = max(
    (levels[item] + 1 for item in items if _runs_at_clients(item)), default=0
  )
  read_by: dict[operations.Slot, set[Any]] = {}
  for item in items:
    for slot in item.inputs:
      read_by.setdefault(slot, set()).add(
        (_runs_at_clients(item), levels[item])
      )
  for slot in lowered.result:
    read_by.setdefault(slot, set()).add('result')

  data: set[operations.Slot] = set()
  if exports:
    data.update(lowered.readers, *lowered.readers.values())
  stages, phases = [], []
  for level in range(last + 1):
    at_level = [item for item in items if levels[item] == level]
    at_server = [item for item in at_level if not _runs_at_clients(item)]
    wanted = _read_elsewhere(at_server, read_by, (False, level))
    stages.append(functions.Function(at_server, wanted))
    if level < last:
      at_clients = [item for item in at_level if _runs_at_clients(item)]
      steps = [i for i in at_clients if isinstance(i, operations.Step)]
      kept = _read_elsewhere(steps, read_by, (True, level))
      local = _need_clients(steps, data, kept) if exports else set(steps)
      phases.append(_build_phase(at_clients, kept, local))
  return Program(
    computation.type_signature.parameter,
    computation.type_signature.result,
    lowered.parameter,
    lowered.readers,
    lowered.result,
    tuple(stages),
    tuple(phases),
    tuple(
      item.label
      for item in items
      if isinstance(item, operations.Step)
      and item.clients
      and 'ReduceDataset' in item.op_types
    ),
  )


def _read_elsewhere(
  steps: Iterable[operations.Step],
  read_by: dict[operations.Slot, set[Any]],
  group: tuple[bool, int],
) -> tuple[operations.Slot, ...]:
  """Returns the slots that a group's steps write and that others read."""
  return tuple(
    slot
    for step in steps
    for slot in step.outputs
    if read_by.get(slot, set()) - {group}
  )


def _need_clients(
  steps: list[operations.Step],
  data: set[operations.Slot],
  kept: tuple[operations.Slot, ...],
) -> set[operations.Step]:
  """Returns the steps that clients must run: up to the last that reads data.

  Args:
    steps: The clients' steps of a phase, in order.
    data: The slots of the clients' data.
    kept: The slots that clients keep for later phases.
  """
  found, needed = set(), set(kept)
  for step in reversed(steps):
    if not data.isdisjoint(step.inputs) or not needed.isdisjoint(step.outputs):
      found.add(step)
      needed.update(step.inputs)
  return found


def _build_phase(
  items: list[Any], kept: tuple[Any, ...], local: set[operations.Step]
) -> Phase:
  """Makes a phase of the client steps and the aggregates of one level.

  Args:
    items: The steps and aggregates.
    kept: The slots that clients keep.
    local: The steps that clients run.

  Returns:
    The phase.
  """
  steps = [item for item in items if isinstance(item, operations.Step)]
  aggregates = [i for i in items if isinstance(i, operations.Aggregate)]
  updates = [step for aggregate in aggregates for step in aggregate.steps]
  initial: dict[operations.Slot, operations.Slot] = {}
  updated: dict[operations.Slot, operations.Slot] = {}
  final: dict[operations.Slot, operations.Slot] = {}
  for aggregate in aggregates:
    initial.update(zip(aggregate.accumulator, aggregate.zero, strict=True))
    updated.update(zip(aggregate.accumulator, aggregate.updated, strict=True))
    final.update(zip(aggregate.outputs, aggregate.accumulator, strict=True))
  accumulate = functions.Function(updates, list(updated.values()))
  wanted = [*accumulate.inputs, *updated.values()]
  admit = functions.Function([s for s in steps if s not in local], wanted)
  work = functions.Function(
    [s for s in steps if s in local], [*kept, *admit.inputs, *wanted]
  )
  merge = None
  if all(aggregate.merge is not None for aggregate in aggregates):
    merge = _build_merge(aggregates)
  return Phase(work, admit, accumulate, initial, updated, final, kept, merge)


def _build_merge(aggregates: list[operations.Aggregate]) -> PhaseMerge:
  """Makes one function of the merges of aggregates."""
  steps: list[operations.Step] = []
  left: dict[operations.Slot, operations.Slot] = {}
  right: dict[operations.Slot, operations.Slot] = {}
  merged: dict[operations.Slot, operations.Slot] = {}
  for aggregate in aggregates:
    merge, slots = aggregate.merge, aggregate.accumulator
    assert merge is not None
    steps.extend(merge.steps)
    left.update(zip(slots, merge.left, strict=True))
    right.update(zip(slots, merge.right, strict=True))
    merged.update(zip(slots, merge.merged, strict=True))
  function = functions.Function(steps, list(merged.values()))
  return PhaseMerge(function, left, right, merged)


def _runs_at_clients(item: Any) -> bool:
  return isinstance(item, operations.Aggregate) or item.clients


def _live_items(lowered: lowering.Lowered) -> list[Any]:
  """Returns the operations that the result depends on."""
  needed, items = set(lowered.result), []
  # From the result back to what it needs.
  for item in reversed(lowered.items):
    if needed.intersection(item.outputs):
      needed.update(item.inputs)
      items.append(item)
  return items[::-1]


def _schedule(
  items: list[Any], result: tuple[operations.Slot, ...]
) -> dict[Any, int]:
  """Returns the stage or the phase in which each operation runs.

  Aggregates and the server's operations run as early as possible. Clients'
  operations run as late as possible, so that values are kept from one phase to
  another (which costs memory for every client) only if two phases need the same
  value.

  Args:
    items: The operations, in an order in which they can run.
    result: The slots of the result.

  Returns:
    Operation -> its stage (at the server) or its phase (at clients). A slot of
    the server that stage k writes can be read in phase k and later. Values that
    phase k accumulates can be read in stage k + 1 and later.
  """
  ready: dict[operations.Slot, int] = {}
  levels: dict[Any, int] = {}
  for item in items:
    level = max((ready.get(slot, 0) for slot in item.inputs), default=0)
    levels[item] = level
    # A sum is complete only when all clients are through.
    after = level + isinstance(item, operations.Aggregate)
    ready.update((slot, after) for slot in item.outputs)
  wanted: dict[operations.Slot, int] = {}
  for slot in result:
    if slot.clients:
      wanted[slot] = ready.get(slot, 0)
  # From the end: a step waits until something needs it.
  for item in reversed(items):
    if isinstance(item, operations.Step) and item.clients:
      levels[item] = min(
        wanted[slot] for slot in item.outputs if slot in wanted
      )
    if _runs_at_clients(item):
      for slot in item.inputs:
        wanted[slot] = min(wanted.get(slot, levels[item]), levels[item])
  return levels
