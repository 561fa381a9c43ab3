"""Sequences (`tf.data`) that each reader reads from the start, and intrinsics.

A dataset that shuffles or caches keeps state from one pass over it to the next.
TFF's own contexts send datasets as graphs, so each computation that reads one
starts from its initial state. The same holds here: each reader of a sequence
gets a copy of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import dataclasses
from typing import Any

from tff_fssl.lazy import tf
from tff_fssl.runtime import operations

# Datasets without state, random numbers or functions: passes are independent.
_STATELESS = frozenset(
  [
    '_BatchDataset',
    '_ConcatenateDataset',
    '_OptionsDataset',
    '_PrefetchDataset',
    '_RangeDataset',
    '_RepeatDataset',
    '_SkipDataset',
    '_TakeDataset',
    '_TensorDataset',
    '_TensorSliceDataset',
  ]
)
_IGNORE_EXTERNAL_STATE = 1  # `tf.data`'s ExternalStatePolicy: do not warn.
# Resources that datasets keep outside their graph, by a part of the name of
# their type. If a dataset is given the name of no resource, it makes its own.
_STATES = ('SeedGenerator', 'MemoryCache')
_NO_RESOURCE = 'dummy_resource'


@dataclasses.dataclass(frozen=True, eq=False)
class Body:
  """A function that `tf.data` calls.

  Attributes:
    steps: Steps of the function.
    result: The slots of its result.
  """

  steps: tuple[operations.Step, ...]
  result: tuple[operations.Slot, ...]

  def captures(self, bound: Sequence[operations.Slot]) -> tuple[Any, ...]:
    """Returns the slots that it reads beyond its parameters."""
    return tuple(
      slot
      for slot in operations.free_slots(self.steps, self.result)
      if slot not in bound
    )

  def __call__(
    self, values: dict[operations.Slot, tf.Tensor]
  ) -> list[tf.Tensor]:
    """Returns the result's tensors, given those of all slots that it reads."""
    values = operations.emit_steps(self.steps, values)
    return [values[slot] for slot in self.result]


def open_sequence(variant: tf.Tensor, element_type: Any) -> tf.data.Dataset:
  """Opens a variant tensor as a dataset, given the `tff.Type` of an element."""
  return tf.data.experimental.from_variant(
    variant, operations.element_spec(element_type)
  )


def start_fn(dataset: tf.data.Dataset, name: str) -> Callable[[], tf.Tensor]:
  """Makes a function that gives variants of a dataset in its initial state.

  Args:
    dataset: The dataset, in any state.
    name: Name of the dataset, for messages.

  Returns:
    A function without arguments.

  Raises:
    TypeError: If the dataset has no graph from which it could be started.
  """
  variant = tf.data.experimental.to_variant(dataset)
  if _is_stateless(dataset):
    # Through a graph, the large data of one element would be copied twice.
    return lambda: variant
  try:
    graph = tf.constant(graph_of(variant))
  except TypeError as error:
    raise TypeError(
      f'{name}: this dataset cannot be read from the start by each computation,'
      f' since it has no graph: {error}'
    ) from error
  return lambda: tf.raw_ops.DatasetFromGraph(graph_def=graph)


def graph_of(variant: tf.Tensor) -> bytes:
  """Returns the graph of a dataset in its initial state, for another process.

  Args:
    variant: The dataset.

  Returns:
    The bytes that `tf.raw_ops.DatasetFromGraph` takes.

  Raises:
    TypeError: If it has no graph.
  """
  try:
    return _strip_state(_dump_graph(variant).numpy())
  except Exception as error:
    raise TypeError(
      f'This dataset cannot be sent to another process: {error}'
    ) from error


def encode_slot(slot: operations.Slot, value: tf.Tensor) -> tf.Tensor:
  """Makes a tensor that can leave the process, within a graph."""
  return _dump_graph(value) if slot.is_sequence else value


def decode_slot(slot: operations.Slot, value: tf.Tensor) -> tf.Tensor:
  """Reverses `encode_slot`, within a graph."""
  if not slot.is_sequence:
    return value
  with tf.device('/device:CPU:0'):
    return tf.raw_ops.DatasetFromGraph(graph_def=value)


def _is_stateless(dataset: tf.data.Dataset) -> bool:
  """Says whether a dataset is known to be the same in each pass over it."""
  return type(dataset).__name__ in _STATELESS and all(
    map(_is_stateless, dataset._inputs())  # pylint: disable=protected-access
  )


def _dump_graph(variant: tf.Tensor) -> tf.Tensor:
  return tf.raw_ops.DatasetToGraphV2(
    input_dataset=variant, external_state_policy=_IGNORE_EXTERNAL_STATE
  )


def _strip_state(graph: bytes) -> bytes:
  """Returns a dataset's graph without references to the dataset's state.

  TFF's own contexts need not remove them: in another process, the state that
  the graph names does not exist.
  """
  graph_def = tf.compat.v1.GraphDef.FromString(graph)
  for node in graph_def.node:
    for handle in node.attr['value'].tensor.resource_handle_val:
      if any(state in handle.maybe_type_name for state in _STATES):
        handle.name = _NO_RESOURCE
  return graph_def.SerializeToString()


def restart_step(
  label: str,
  sequence: operations.Slot,
  result: operations.Slot,
  is_needed: Callable[[], bool],
  *,
  strips_state: bool = True,
) -> operations.Step:
  """Returns the step that gives one reader its own copy of a sequence.

  Args:
    label: The name of the step.
    sequence: The slot of the sequence.
    result: The slot that the reader reads.
    is_needed: Says, at the first use, whether others read the sequence, too.
    strips_state: Whether the copy forgets the sequence's state, which takes a
      call of Python. Without it, a sequence that has state cannot be copied.
  """

  def emit(tensors):
    (variant,) = tensors
    if is_needed():
      with tf.device('/device:CPU:0'):
        graph = _dump_graph(variant)
        if strips_state:
          graph = tf.numpy_function(_strip_state, [graph], tf.string)
        variant = tf.raw_ops.DatasetFromGraph(graph_def=graph)
    return [variant]

  return operations.Step(
    label,
    f'a start of {sequence.type}',
    (sequence,),
    (result,),
    result.clients,
    emit,
  )


def map_step(
  label: str,
  sequence: operations.Slot,
  element: operations.Tree,
  body: Body,
  result: operations.Slot,
) -> operations.Step:
  """Makes `sequence_map`: `body` over each `element` of `sequence`."""
  bound = operations.flatten(element)
  inputs = (sequence, *body.captures(bound))

  def emit(tensors):
    captured = dict(zip(inputs, tensors, strict=True))

    @tf.autograph.experimental.do_not_convert
    def fn(*args):
      leaves = operations.unpack(sequence.type.element, args)
      outputs = body({**captured, **dict(zip(bound, leaves, strict=True))})
      return operations.pack(result.type.element, iter(outputs))

    dataset = open_sequence(captured[sequence], sequence.type.element).map(fn)
    return [tf.data.experimental.to_variant(dataset)]

  return operations.Step(
    label,
    f'sequence_map to {result.type}',
    inputs,
    (result,),
    result.clients,
    emit,
  )


def reduce_step(
  label: str,
  sequence: operations.Slot,
  zero: operations.Tree,
  state: operations.Tree,
  element: operations.Tree,
  body: Body,
  result: operations.Tree,
) -> operations.Step:
  """Makes `sequence_reduce`: `body` over `state` and each `element`."""
  state, bound = operations.flatten(state), operations.flatten(element)
  zero, outputs = operations.flatten(zero), operations.flatten(result)
  captures = body.captures((*state, *bound))
  inputs = tuple(dict.fromkeys((sequence, *zero, *captures)))

  def emit(tensors):
    captured = dict(zip(inputs, tensors, strict=True))

    @tf.autograph.experimental.do_not_convert
    def fn(old, args):
      leaves = operations.unpack(sequence.type.element, args)
      values = {**captured, **dict(zip(state, old, strict=True))}
      values.update(zip(bound, leaves, strict=True))
      return tuple(body(values))

    dataset = open_sequence(captured[sequence], sequence.type.element)
    return dataset.reduce(tuple(captured[slot] for slot in zero), fn)

  return operations.Step(
    label,
    f'sequence_reduce of {sequence.type}',
    inputs,
    outputs,
    sequence.clients,
    emit,
  )


def sum_step(
  label: str, sequence: operations.Slot, result: operations.Tree
) -> operations.Step:
  """Makes `sequence_sum`: the sum of elements."""
  outputs = operations.flatten(result)

  def emit(tensors):
    zero = tuple(tf.zeros(slot.spec.shape, slot.spec.dtype) for slot in outputs)

    @tf.autograph.experimental.do_not_convert
    def fn(old, args):
      leaves = operations.unpack(sequence.type.element, args)
      return tuple(tf.add(a, b) for a, b in zip(old, leaves, strict=True))

    return open_sequence(tensors[0], sequence.type.element).reduce(zero, fn)

  return operations.Step(
    label,
    f'sequence_sum of {sequence.type}',
    (sequence,),
    outputs,
    sequence.clients,
    emit,
  )


def select_step(
  label: str,
  keys: operations.Slot,
  max_key: operations.Slot,
  key: operations.Slot,
  body: Body,
  result: operations.Slot,
) -> operations.Step:
  """Makes `federated_select`: a dataset with the slices for a client's keys.

  The slices are computed from the server's value when the client reads them.
  """
  inputs = tuple(dict.fromkeys((keys, max_key, *body.captures((key,)))))

  def emit(tensors):
    captured = dict(zip(inputs, tensors, strict=True))

    @tf.autograph.experimental.do_not_convert
    def fn(value):
      tf.debugging.assert_non_negative(value, f'{label}: a key is negative')
      tf.debugging.assert_less(
        value, captured[max_key], f'{label}: a key is not below max_key'
      )
      outputs = body({**captured, key: value})
      return operations.pack(result.type.element, iter(outputs))

    dataset = tf.data.Dataset.from_tensor_slices(captured[keys]).map(fn)
    return [tf.data.experimental.to_variant(dataset)]

  return operations.Step(
    label, f'federated_select of {result.type}', inputs, (result,), True, emit
  )
