"""The operations on single tensors to which a computation is lowered.

Structures, selections and placements exist only while a computation is
compiled. What remains are operations that read and write slots. A slot holds
one tensor or dataset at the server, or one for each client.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
import dataclasses
from typing import Any, Optional, Union

from tff_fssl.lazy import tf, tff


@dataclasses.dataclass(frozen=True, eq=False)
class Slot:
  """A place that holds one tensor or dataset.

  Attributes:
    type: A `tff.TensorType` or `tff.SequenceType`.
    clients: Whether each client has its own value. Otherwise there is one
      value, at the server.
    name: Its place in the result of a computation, such as 'update/row/0', or
      '' if it has none.
  """

  type: tff.Type
  clients: bool
  name: str = ''

  @property
  def is_sequence(self) -> bool:
    """Tells whether it holds a dataset."""
    return isinstance(self.type, tff.SequenceType)

  @property
  def spec(self) -> tf.TensorSpec:
    """Returns the spec of its tensor, a variant tensor for a dataset."""
    if self.is_sequence:
      return tf.TensorSpec([], tf.variant)
    return element_spec(self.type)


# A structure of slots: structures are tuples, whatever their type.
Tree = Union[Slot, tuple]


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
  """One local computation.

  Attributes:
    label: Name of the step, unique in the program.
    description: Signature of the step, for messages.
    inputs: The slots that it reads.
    outputs: The slots that it writes.
    clients: Whether it runs once for each client. Otherwise it runs once.
    emit: Function that adds the step to the current graph: tensors of `inputs`
      -> tensors of `outputs`.
    digest: Digest of its graph, if it has one.
    op_types: Types of its TensorFlow operations.
  """

  label: str
  description: str
  inputs: tuple[Slot, ...]
  outputs: tuple[Slot, ...]
  clients: bool
  emit: Callable[[Sequence[tf.Tensor]], Sequence[tf.Tensor]]
  digest: str = ''
  op_types: frozenset[str] = frozenset()


@dataclasses.dataclass(frozen=True, eq=False)
class Merge:
  """The merge of two accumulators of an aggregate.

  Attributes:
    left: The slots that `steps` read the accumulator of earlier clients from.
    right: Those of the accumulator of later clients.
    steps: The computation of the accumulator of both.
    merged: The slots of that accumulator.
  """

  left: tuple[Slot, ...]
  right: tuple[Slot, ...]
  steps: tuple[Step, ...]
  merged: tuple[Slot, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Aggregate:
  """One `federated_aggregate`, without its final `report`.

  Attributes:
    label: Name of the aggregate, unique in the program.
    values: The slots of the values that are aggregated.
    zero: The slots of the initial accumulator.
    accumulator: The slots that `steps` read the accumulator from.
    steps: The computation of the next accumulator for one client's values.
    updated: The slots of the next accumulator.
    outputs: The slots of the last accumulator.
    merge: The merge of accumulators of several groups of clients, or None if
      all clients are accumulated one after another.
  """

  label: str
  values: tuple[Slot, ...]
  zero: tuple[Slot, ...]
  accumulator: tuple[Slot, ...]
  steps: tuple[Step, ...]
  updated: tuple[Slot, ...]
  outputs: tuple[Slot, ...]
  merge: Optional[Merge] = None

  @property
  def inputs(self) -> tuple[Slot, ...]:
    """Returns all slots that it reads."""
    captured = free_slots(self.steps, self.updated)
    own = set(self.accumulator)
    if self.merge is not None:
      captured += free_slots(self.merge.steps, self.merge.merged)
      own.update(self.merge.left, self.merge.right)
    return tuple(
      dict.fromkeys(
        (
          *self.values,
          *self.zero,
          *(slot for slot in captured if slot not in own),
        )
      )
    )


def leaf_types(type_spec: Optional[tff.Type]) -> Iterator[tff.Type]:
  """Returns the tensor and sequence types within a type, depth first."""
  if isinstance(type_spec, (tff.TensorType, tff.SequenceType)):
    yield type_spec
  elif isinstance(type_spec, tff.StructType):
    for _, element in tff.structure.iter_elements(type_spec):
      yield from leaf_types(element)
  elif isinstance(type_spec, tff.FederatedType):
    yield from leaf_types(type_spec.member)
  elif type_spec is not None:
    raise NotImplementedError(f'Values of type {type_spec} are not supported.')


def slots_of(type_spec: tff.Type, clients: bool, name: str = '') -> Tree:
  """Makes new slots for a value of a type, which has a name, or ''."""
  if isinstance(type_spec, tff.StructType):
    return tuple(
      slots_of(
        element,
        clients,
        f'{name}/{index if key is None else key}'.removeprefix('/'),
      )
      for index, (key, element) in enumerate(
        tff.structure.iter_elements(type_spec)
      )
    )
  if isinstance(type_spec, tff.FederatedType):
    # An equal value of all clients is held once, at the server.
    each = type_spec.placement is tff.CLIENTS and not type_spec.all_equal
    return slots_of(type_spec.member, each, name)
  (leaf,) = leaf_types(type_spec)
  return Slot(leaf, clients, name)


def flatten(tree: Any) -> tuple[Slot, ...]:
  """Returns the slots of a tree, depth first."""
  if isinstance(tree, tuple):
    return tuple(slot for element in tree for slot in flatten(element))
  if not isinstance(tree, Slot):
    raise NotImplementedError('Functions as values are not supported.')
  return (tree,)


def pack(type_spec: tff.Type, leaves: Iterator[Any]) -> Any:
  """Packs leaves, depth first, into the Python containers of a type."""
  value = pack_structs(type_spec, lambda _: next(leaves))
  return tff.types.type_to_py_container(value, type_spec)


def unpack(type_spec: tff.Type, element: Any) -> list[tf.Tensor]:
  """Lists the tensors of an element of a dataset, depth first: `pack` reversed.

  `tf.nest` sorts the keys of dictionaries. TFF does not.
  """
  count = len(tuple(leaf_types(type_spec)))
  order = tf.nest.flatten(pack(type_spec, iter(range(count))))
  # Positions by TFF's order, filled in that of `tf.nest`.
  tensors = [None] * count
  for index, tensor in zip(order, tf.nest.flatten(element), strict=True):
    tensors[index] = tensor
  return tensors


# Not a recursive function inside of its callers: that would be a reference
# cycle, which keeps all values of an invocation until the next collection.
def pack_structs(type_spec: tff.Type, make: Callable[[tff.Type], Any]) -> Any:
  """Packs the results of `make`, for types of no struct, into `Struct`s."""
  if not isinstance(type_spec, tff.StructType):
    return make(type_spec)
  return tff.structure.Struct(
    [
      (name, pack_structs(element, make))
      for name, element in tff.structure.iter_elements(type_spec)
    ]
  )


def element_spec(type_spec: tff.Type) -> Any:
  """Returns the `tf.TensorSpec`s of a type, in its containers.

  `tff.types.type_to_tf_tensor_specs` does the same, but fails for named
  elements without a container.
  """
  specs = map(tff.types.type_to_tf_tensor_specs, leaf_types(type_spec))
  return pack(type_spec, specs)


def free_slots(
  steps: Iterable[Step], results: Iterable[Slot] = ()
) -> tuple[Slot, ...]:
  """Lists the slots that steps or results read but no step writes."""
  steps = tuple(steps)
  written = {slot for step in steps for slot in step.outputs}
  read = [slot for step in steps for slot in step.inputs]
  return tuple(
    dict.fromkeys(slot for slot in (*read, *results) if slot not in written)
  )


def emit_steps(
  steps: Iterable[Step], values: dict[Slot, tf.Tensor]
) -> dict[Slot, tf.Tensor]:
  """Adds steps to the current graph.

  Args:
    steps: The steps, in order.
    values: The tensors of all known slots, which stay unchanged.

  Returns:
    `values` and the tensors of the steps' outputs.
  """
  # The caller's slots stay as they are, for the next function.
  values = dict(values)
  for step in steps:
    outputs = step.emit([values[slot] for slot in step.inputs])
    values.update(zip(step.outputs, outputs, strict=True))
  return values
