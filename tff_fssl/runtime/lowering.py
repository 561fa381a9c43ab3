"""Lowers TFF computations, in call-dominant form, to operations on slots.

In TFF's call-dominant form a computation is a flat list of calls, each with a
name for its result. Everything but TensorFlow is evaluated here, once and
symbolically: structures, selections, functions, and the intrinsics that only
move a value (broadcast, zip, value). At run time they cost nothing.
"""

from __future__ import annotations

import collections
import dataclasses
from typing import Any, Union

from tff_fssl.lazy import tf, tff
from tff_fssl.runtime import graphs
from tff_fssl.runtime import operations
from tff_fssl.runtime import sequences

# Intrinsics that this runtime could only compute without protection.
_SECURE_URIS = frozenset(
  [
    'federated_secure_sum',
    'federated_secure_sum_bitwidth',
    'federated_secure_modular_sum',
    'federated_secure_select',
  ]
)
# Types of whole models would fill a message.
_MAX_SIGNATURE_LENGTH = 160


@dataclasses.dataclass(frozen=True, eq=False)
class Lowered:
  """A computation as operations on slots.

  Attributes:
    parameter: The slots of the argument.
    readers: Slot of a sequence in the argument -> the slots from which
      operations read it, one slot for each operation.
    items: The operations, in an order in which they can run.
    result: The slots of the result, depth first.
  """

  parameter: operations.Tree
  readers: dict[operations.Slot, list[operations.Slot]]
  items: tuple[Union[operations.Step, operations.Aggregate], ...]
  result: tuple[operations.Slot, ...]


@dataclasses.dataclass(frozen=True)
class _Closure:
  function: tff.framework.Lambda
  environment: dict[str, Any]


@dataclasses.dataclass
class _Place:
  """The list that records operations, and the prefix of their labels."""

  items: list[Any]
  clients: bool
  label: str
  count: int = 0

  def next_label(self) -> str:
    self.count += 1
    return self.label if self.count == 1 else f'{self.label}.{self.count}'


def lower(
  computation: tff.framework.ConcreteComputation,
  *,
  simulate_secure_aggregation: bool = False,
  merges: bool = False,
  exports: bool = False,
) -> Lowered:
  """Lowers a computation.

  Args:
    computation: Any `tff.Computation` made by TFF's decorators.
    simulate_secure_aggregation: Whether secure intrinsics are replaced by
      plain ones, which protect nothing.
    merges: Whether aggregates get their `merge`: clients are accumulated in
      several groups.
    exports: Whether graphs shall run in another process, where they cannot call
      Python.

  Returns:
    The computation as operations on slots.

  Raises:
    NotImplementedError: If it uses an operation that this runtime does not
      support, with its name.
  """
  parameter_type = computation.type_signature.parameter
  if simulate_secure_aggregation:
    computation = tff.backends.test.replace_secure_intrinsics_with_bodies(
      computation
    )
  block = computation.to_building_block()
  block, _ = tff.tensorflow.replace_intrinsics_with_bodies(block)
  # Last, since replacing intrinsics introduces functions.
  block = tff.framework.to_call_dominant(block)
  parameter = None
  if parameter_type is not None:
    parameter = operations.slots_of(parameter_type, clients=False)
  lowering = _Lowering(() if parameter is None else parameter, merges, exports)
  items: list[Any] = []
  place = _Place(items, clients=False, label='computation')
  function = lowering.evaluate(block, {}, place)
  result = operations.flatten(lowering.apply(function, parameter, place))
  lowering.num_reads.update(result)
  return Lowered(
    () if parameter is None else parameter,
    lowering.readers,
    tuple(items),
    result,
  )


class _Lowering:
  """An evaluator of building blocks that records operations.

  Values are trees of slots, or functions: closures, `CompiledComputation`s and
  `Intrinsic`s. A federated value is the tree of its member. Each slot knows
  whether every client has its own value.

  Attributes:
    readers: See `Lowered`.
    num_reads: Slot -> the number of its reads from the start, and as a result.
  """

  def __init__(self, parameter: operations.Tree, merges: bool, exports: bool):
    self._merges, self._exports = merges, exports
    self.readers: dict[operations.Slot, list[operations.Slot]] = {
      slot: [] for slot in operations.flatten(parameter) if slot.is_sequence
    }
    self.num_reads: collections.Counter = collections.Counter()
    self._counts: collections.Counter = collections.Counter()
    # By the serialized computation: equal graphs are loaded once.
    self._graphs: dict[bytes, graphs.Graph] = {}

  def evaluate(self, block: Any, environment: dict[str, Any], place: _Place):
    """Returns the value of a building block."""
    if isinstance(block, tff.framework.Reference):
      return environment[block.name]
    if isinstance(block, tff.framework.Selection):
      return self.evaluate(block.source, environment, place)[block.as_index()]
    if isinstance(block, tff.framework.Struct):
      return tuple(
        self.evaluate(element, environment, place)
        for _, element in tff.structure.iter_elements(block)
      )
    if isinstance(block, tff.framework.Block):
      environment = dict(environment)
      for name, value in block.locals:
        environment[name] = self.evaluate(value, environment, place)
      return self.evaluate(block.result, environment, place)
    if isinstance(block, tff.framework.Lambda):
      return _Closure(block, environment)
    if isinstance(
      block, (tff.framework.CompiledComputation, tff.framework.Intrinsic)
    ):
      return block
    if isinstance(block, tff.framework.Call):
      function = self.evaluate(block.function, environment, place)
      argument = None
      if block.argument is not None:
        argument = self.evaluate(block.argument, environment, place)
      return self.apply(function, argument, place)
    if isinstance(block, tff.framework.Literal):
      return self._literal(block, place)
    raise NotImplementedError(
      f'This runtime does not support {type(block).__name__} blocks: {block}'
    )

  def apply(self, function: Any, argument: Any, place: _Place) -> Any:
    """Returns the value of a call."""
    if isinstance(function, _Closure):
      environment = function.environment
      if function.function.parameter_name is not None:
        environment = dict(environment)
        environment[function.function.parameter_name] = argument
      return self.evaluate(function.function.result, environment, place)
    if isinstance(function, tff.framework.CompiledComputation):
      return self._compiled(function, argument, place)
    if isinstance(function, tff.framework.Intrinsic):
      return self._intrinsic(function, argument, place)
    raise NotImplementedError(f'Not a function: {function}')

  def _literal(self, block: Any, place: _Place) -> operations.Slot:
    slot = operations.Slot(block.type_signature, place.clients)
    value, dtype = block.value, slot.spec.dtype
    place.items.append(
      operations.Step(
        place.next_label(),
        f'literal {block.type_signature}',
        (),
        (slot,),
        place.clients,
        lambda _: [tf.constant(value, dtype)],
      )
    )
    return slot

  def _reader(self, slot: operations.Slot, place: _Place) -> operations.Slot:
    """Returns a slot for one operation, with a sequence of its own."""
    if not slot.is_sequence:
      return slot
    reader = operations.Slot(slot.type, place.clients)
    # A value of the server that clients read, each from the start.
    shared = place.clients and not slot.clients  # All clients read it.
    if slot in self.readers and not shared:
      self.readers[slot].append(reader)
      return reader
    self.num_reads[slot] += 1
    self._counts['sequence'] += 1
    place.items.append(
      sequences.restart_step(
        f'sequence_{self._counts["sequence"]}',
        slot,
        reader,
        lambda: shared or self.num_reads[slot] > 1,
        strips_state=not self._exports,
      )
    )
    return reader

  def _compiled(
    self, block: Any, argument: Any, place: _Place
  ) -> operations.Tree:
    """Records a TensorFlow computation."""
    proto = block.proto
    key = proto.SerializeToString(deterministic=True)
    if key not in self._graphs:
      self._graphs[key] = graphs.load_graph(proto)
    graph = self._graphs[key]
    slots = () if argument is None else operations.flatten(argument)
    inputs = tuple(self._reader(slot, place) for slot in slots)
    result = operations.slots_of(block.type_signature.result, place.clients)
    label = place.next_label()

    def emit(tensors):
      # In a function of `tf.data`, tensors from outside must be captured;
      # importing a graph does not do that.
      current = tf.compat.v1.get_default_graph()
      tensors = [t if t.graph is current else tf.identity(t) for t in tensors]
      return tf.graph_util.import_graph_def(
        graph.graph_def,
        name=label,
        input_map=dict(zip(graph.feeds, tensors, strict=True)),
        return_elements=list(graph.fetches),
      )

    signature = str(block.type_signature)
    if len(signature) > _MAX_SIGNATURE_LENGTH:
      signature = signature[:_MAX_SIGNATURE_LENGTH] + ' ...'
    place.items.append(
      operations.Step(
        label,
        signature,
        inputs,
        operations.flatten(result),
        place.clients,
        emit,
        graph.digest,
        graph.op_types,
      )
    )
    return result

  def _intrinsic(self, block: Any, argument: Any, place: _Place) -> Any:
    """Evaluates or records an intrinsic."""
    uri = block.uri
    if uri in _SECURE_URIS:
      raise NotImplementedError(
        f'{uri}: this runtime has no secure aggregation. For'
        ' simulation only, `simulate_secure_aggregation=True` replaces it by'
        ' a plain one, which protects nothing.'
      )
    self._counts[uri] += 1
    label = f'{uri}_{self._counts[uri]}'
    result: operations.Tree
    if uri in (
      'federated_broadcast',
      'federated_value_at_clients',
      'federated_value_at_server',
      'federated_zip_at_clients',
      'federated_zip_at_server',
    ):
      return argument
    if uri in ('federated_map', 'federated_map_all_equal', 'federated_apply'):
      function, value = argument
      each = uri == 'federated_map'
      return self.apply(function, value, _Place(place.items, each, label))
    if uri in ('federated_eval_at_clients', 'federated_eval_at_server'):
      each = uri == 'federated_eval_at_clients'
      return self.apply(argument, None, _Place(place.items, each, label))
    if uri == 'federated_aggregate':
      return self._aggregate(block, argument, place, label)
    if uri == 'federated_select':
      keys, max_key, value, select_fn = argument
      result = operations.Slot(block.type_signature.result.member, True)
      key = operations.Slot(tff.TensorType(max_key.type.dtype), clients=True)
      body = self._body(select_fn, (value, key), True, label)
      step = sequences.select_step(label, keys, max_key, key, body, result)
    elif uri == 'sequence_map':
      function, sequence = argument
      sequence = self._reader(sequence, place)
      result = operations.Slot(block.type_signature.result, place.clients)
      element = operations.slots_of(sequence.type.element, place.clients)
      body = self._body(function, element, place.clients, label)
      step = sequences.map_step(label, sequence, element, body, result)
    elif uri == 'sequence_reduce':
      sequence, zero, function = argument
      sequence = self._reader(sequence, place)
      result = operations.slots_of(block.type_signature.result, place.clients)
      element = operations.slots_of(sequence.type.element, place.clients)
      state = operations.slots_of(block.type_signature.result, place.clients)
      body = self._body(function, (state, element), place.clients, label)
      step = sequences.reduce_step(
        label, sequence, zero, state, element, body, result
      )
    elif uri == 'sequence_sum':
      result = operations.slots_of(block.type_signature.result, place.clients)
      step = sequences.sum_step(label, self._reader(argument, place), result)
    else:
      raise NotImplementedError(f'This runtime does not support {uri}.')
    place.items.append(step)
    return result

  def _body(
    self, function: Any, argument: Any, clients: bool, label: str
  ) -> sequences.Body:
    """Returns a function that TensorFlow will call, not this runtime."""
    place = _Place([], clients, f'{label}.body')
    result = operations.flatten(self.apply(function, argument, place))
    return sequences.Body(tuple(place.items), result)

  def _aggregate(
    self, block: Any, argument: Any, place: _Place, label: str
  ) -> operations.Tree:
    """Records a `federated_aggregate`.

    Its `merge` is needed only if clients are accumulated in several groups.
    """
    value, zero, accumulate, merge, report = argument
    zero_type = block.type_signature.parameter[1]
    accumulator = operations.slots_of(zero_type, clients=False)
    body = _Place([], False, f'{label}.accumulate')
    updated = self.apply(accumulate, (accumulator, value), body)
    outputs = operations.slots_of(zero_type, clients=False)
    place.items.append(
      operations.Aggregate(
        label,
        operations.flatten(value),
        operations.flatten(zero),
        operations.flatten(accumulator),
        tuple(body.items),
        operations.flatten(updated),
        operations.flatten(outputs),
        self._merge(merge, zero_type, label) if self._merges else None,
      )
    )
    return self.apply(
      report, outputs, _Place(place.items, False, f'{label}.report')
    )

  def _merge(
    self, merge: Any, accumulator_type: tff.Type, label: str
  ) -> operations.Merge:
    left = operations.slots_of(accumulator_type, clients=False)
    right = operations.slots_of(accumulator_type, clients=False)
    place = _Place([], False, f'{label}.merge')
    merged = operations.flatten(self.apply(merge, (left, right), place))
    return operations.Merge(
      operations.flatten(left),
      operations.flatten(right),
      tuple(place.items),
      merged,
    )
