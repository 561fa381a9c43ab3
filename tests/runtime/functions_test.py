import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tff_fssl.runtime import errors
from tff_fssl.runtime import functions
from tff_fssl.runtime import operations

_CPU = '/device:CPU:0'


def _slot():
  return operations.Slot(tff.TensorType(np.int32), False)


def _step(label, inputs, outputs, fn):
  def emit(tensors):
    with tf.name_scope(label):
      return fn(*tensors)

  return operations.Step(label, f'signature of {label}', inputs, outputs, False,
                         emit)  # fmt: skip


def test_one_call_runs_all_steps():
  a, b, c, d, unknown = (_slot() for _ in range(5))
  steps = [
    _step('double', (a,), (b,), lambda x: [2 * x]),
    _step('sum', (a, b), (c, d), lambda x, y: [x + y, x - y]),
  ]
  function = functions.Function(steps, [c, unknown, c, b])
  assert function.inputs == (a,) and function.outputs == (c, b)
  outputs = function([tf.constant(5)], device=_CPU)
  assert [output.numpy() for output in outputs] == [15, 10]


def test_a_function_without_steps_does_nothing():
  function = functions.Function([], [_slot()])
  assert (function.inputs, function.outputs) == ((), ())
  assert function([], device=_CPU) == ()


def test_an_error_names_step_client_and_device():
  a, b, c = (_slot() for _ in range(3))

  def check(x):
    with tf.control_dependencies([tf.debugging.assert_less(x, 3)]):
      return [tf.identity(x)]

  function = functions.Function(
    [
      _step('fine', (a,), (b,), lambda x: [x]),
      _step('check', (b,), (c,), check),
    ],
    [c],
  )
  assert function([tf.constant(2)], device=_CPU)[0].numpy() == 2
  with pytest.raises(errors.ExecutionError) as error:
    function([tf.constant(4)], device=_CPU, client_index=6)
  assert error.value.operation == 'check (signature of check)'
  assert 'failed at client 6 on /device:CPU:0' in str(error.value)


def test_steps_that_no_result_needs_do_not_run():
  a, b, c = (_slot() for _ in range(3))
  calls = []

  def count(x):
    return [tf.py_function(lambda v: calls.append(1) or v, [x], tf.int32)]

  function = functions.Function(
    [
      _step('count', (a,), (b,), count),
      _step('add', (a,), (c,), lambda x: [x]),
    ],
    [c],
  )
  function([tf.constant(1)], device=_CPU)
  assert not calls


def test_a_bound_function_keeps_constants():
  a, b, c = (_slot() for _ in range(3))
  step = _step('subtract', (a, b), (c,), lambda x, y: [x - y])
  function = functions.Function([step], [c])
  bound = functions.BoundFunction(function, {b: tf.constant(2), _slot(): 0})
  for number in (5, 9):
    values = {a: tf.constant(number)}
    bound(values, device=_CPU)
    assert values[c].numpy() == number - 2


def test_an_operation_that_wants_the_device_of_an_argument_runs_anywhere():
  a, b = _slot(), _slot()

  def double(x):
    with tf.compat.v1.colocate_with(x):
      return [2 * x]

  function = functions.Function([_step('double', (a,), (b,), double)], [b])
  assert function([tf.constant(3)], device=_CPU)[0].numpy() == 6


def test_a_result_may_be_an_argument_and_a_needed_side_effect_runs():
  a, b, c = (_slot() for _ in range(3))
  calls = []

  def count(x):
    counted = tf.py_function(lambda v: calls.append(1) or v, [x], tf.int32)
    with tf.control_dependencies([counted]):
      return [tf.identity(x), x]

  function = functions.Function([_step('count', (a,), (b, c), count)], [b, c])
  outputs = function([tf.constant(4)], device=_CPU)
  assert [output.numpy() for output in outputs] == [4, 4]
  assert calls == [1]
