import collections

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tff_fssl.runtime import operations

_SEQUENCE = tff.SequenceType(np.int32)
_STRUCT = tff.StructWithPythonType(
  [('a', np.float32), ('b', (np.int32, _SEQUENCE))], collections.OrderedDict
)


def _slot(dtype=np.int32, clients=False):
  return operations.Slot(tff.TensorType(dtype), clients)


def _step(label, inputs, outputs, emit=lambda tensors: tensors):
  return operations.Step(label, '', inputs, outputs, False, emit)


def test_leaves_are_in_depth_first_order():
  leaves = list(operations.leaf_types(tff.FederatedType(_STRUCT, tff.CLIENTS)))
  assert leaves == [tff.TensorType(np.float32), tff.TensorType(np.int32),
                    _SEQUENCE]  # fmt: skip
  assert not list(operations.leaf_types(None))
  with pytest.raises(NotImplementedError, match='not supported'):
    list(operations.leaf_types(tff.FunctionType(None, np.int32)))


def test_only_values_that_differ_are_slots_of_clients():
  type_spec = tff.StructType(
    [
      tff.FederatedType(np.int32, tff.CLIENTS),
      tff.FederatedType(np.int32, tff.CLIENTS, all_equal=True),
      tff.FederatedType(np.int32, tff.SERVER),
    ]
  )
  slots = operations.slots_of(type_spec, clients=False)
  assert [slot.clients for slot in slots] == [True, False, False]
  with pytest.raises(NotImplementedError, match='Functions as values'):
    operations.flatten((slots[0], 'a function'))


def test_values_are_packed_into_containers():
  assert operations.pack(_STRUCT, iter('xyz')) == collections.OrderedDict(
    a='x', b=('y', 'z')
  )
  pair = tff.StructType([('a', np.float32), ('b', np.int32)])
  spec = operations.element_spec(pair)
  assert spec['a'] == tf.TensorSpec([], tf.float32)
  # Datasets travel as variant tensors.
  assert operations.Slot(_SEQUENCE, False).spec == tf.TensorSpec([], tf.variant)


def test_free_slots_are_read_but_not_written():
  a, b, c, d = (_slot() for _ in range(4))
  steps = [_step('1', (a,), (b,)), _step('2', (b, c), (d,))]
  assert operations.free_slots(steps) == (a, c)
  assert operations.free_slots(steps, [d, c, a]) == (a, c)


def test_an_aggregate_reads_what_its_functions_capture():
  value, zero, accumulator, updated, output, captured = (
    _slot() for _ in range(6)
  )
  left, right, merged, other = (_slot() for _ in range(4))
  aggregate = operations.Aggregate(
    'sum',
    (value,),
    (zero,),
    (accumulator,),
    (_step('add', (accumulator, value, captured), (updated,)),),
    (updated,),
    (output,),
    operations.Merge(
      (left,), (right,), (_step('merge', (left, right, other), (merged,)),),
      (merged,),
    ),
  )  # fmt: skip
  assert aggregate.inputs == (value, zero, captured, other)


def test_steps_are_added_to_the_graph_in_order():
  a, b, c = (_slot() for _ in range(3))
  steps = [
    _step('double', (a,), (b,), lambda tensors: [2 * tensors[0]]),
    _step('add', (a, b), (c,), lambda tensors: [tensors[0] + tensors[1]]),
  ]
  known = {a: tf.constant(5)}
  values = operations.emit_steps(steps, known)
  assert values[c].numpy() == 15 and known.keys() == {a}
