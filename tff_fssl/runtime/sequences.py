"""The intrinsics over sequences, as `tf.data` in the graph."""

from collections.abc import Sequence
import dataclasses
from typing import Any

import tensorflow as tf
import tensorflow_federated as tff

from tff_fssl.runtime import operations


@dataclasses.dataclass(frozen=True, eq=False)
class Body:
  """A function that `tf.data` calls.

  Attributes:
    steps: What it does.
    result: The slots of its result.
  """

  steps: tuple[operations.Step, ...]
  result: tuple[operations.Slot, ...]

  def captures(self, bound: Sequence[operations.Slot]) -> tuple[Any, ...]:
    """The slots that it reads beyond its parameters."""
    return tuple(
      slot
      for slot in operations.free_slots(self.steps, self.result)
      if slot not in bound
    )

  def __call__(
    self, values: dict[operations.Slot, tf.Tensor]
  ) -> list[tf.Tensor]:
    """The tensors of its result, given those of all it reads."""
    values = operations.emit_steps(self.steps, values)
    return [values[slot] for slot in self.result]


def open_sequence(
  variant: tf.Tensor, sequence_type: tff.SequenceType
) -> tf.data.Dataset:
  """The dataset that a variant tensor stands for."""
  return tf.data.experimental.from_variant(
    variant, operations.element_spec(sequence_type.element)
  )


def _leaves(element: Any, type_spec: tff.Type) -> list[tf.Tensor]:
  """The tensors of an element of a dataset, in TFF's order.

  `tf.nest` sorts the keys of dictionaries, TFF does not.
  """
  count = len(tuple(operations.leaf_types(type_spec)))
  order = tf.nest.flatten(operations.pack(type_spec, iter(range(count))))
  tensors = [None] * count
  for index, tensor in zip(order, tf.nest.flatten(element), strict=True):
    tensors[index] = tensor
  return tensors


def _step(label, signature, inputs, outputs, clients, emit):
  return operations.Step(label, signature, inputs, outputs, clients, emit)


def map_step(
  label: str,
  sequence: operations.Slot,
  element: operations.Tree,
  body: Body,
  result: operations.Slot,
) -> operations.Step:
  """`sequence_map`: `body` over each `element` of `sequence`."""
  bound = operations.flatten(element)
  inputs = (sequence, *body.captures(bound))

  def emit(tensors):
    captured = dict(zip(inputs, tensors, strict=True))

    @tf.autograph.experimental.do_not_convert
    def fn(*args):
      leaves = _leaves(args, sequence.type.element)
      outputs = body({**captured, **dict(zip(bound, leaves, strict=True))})
      return operations.pack(result.type.element, iter(outputs))

    dataset = open_sequence(captured[sequence], sequence.type).map(fn)
    return [tf.data.experimental.to_variant(dataset)]

  return _step(
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
  """`sequence_reduce`: `body` over `state`, at first `zero`, and `element`."""
  state, bound = operations.flatten(state), operations.flatten(element)
  zero, outputs = operations.flatten(zero), operations.flatten(result)
  captures = body.captures((*state, *bound))
  inputs = tuple(dict.fromkeys((sequence, *zero, *captures)))

  def emit(tensors):
    captured = dict(zip(inputs, tensors, strict=True))

    @tf.autograph.experimental.do_not_convert
    def fn(old, args):
      leaves = _leaves(args, sequence.type.element)
      values = {**captured, **dict(zip(state, old, strict=True))}
      values.update(zip(bound, leaves, strict=True))
      return tuple(body(values))

    dataset = open_sequence(captured[sequence], sequence.type)
    return dataset.reduce(tuple(captured[slot] for slot in zero), fn)

  return _step(
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
  """`sequence_sum`."""
  outputs = operations.flatten(result)

  def emit(tensors):
    zero = tuple(tf.zeros(slot.spec.shape, slot.spec.dtype) for slot in outputs)

    @tf.autograph.experimental.do_not_convert
    def fn(old, args):
      leaves = _leaves(args, sequence.type.element)
      return tuple(tf.add(a, b) for a, b in zip(old, leaves, strict=True))

    return open_sequence(tensors[0], sequence.type).reduce(zero, fn)

  return _step(
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
  """`federated_select`: the slices of a client's keys, as its dataset.

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

  return _step(
    label, f'federated_select of {result.type}', inputs, (result,), True, emit
  )
