"""The in-process context: streaming, determinism, phases, errors."""

import asyncio
import collections
import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tff_fssl import runtime

_INTS = tff.FederatedType(np.int32, tff.CLIENTS)
_SEQUENCES = tff.FederatedType(tff.SequenceType(np.int32), tff.CLIENTS)


def _context(threads):
  return runtime.build_context(runtime.Settings(client_threads=threads))


def _weights(state):
  return [*state.global_model_weights.trainable]


@tff.tensorflow.computation(tff.SequenceType(np.int32))
def _total(ds):
  return ds.reduce(0, lambda a, b: a + b)


@tff.federated_computation(_SEQUENCES)
def _sum_of_totals(x):
  return tff.federated_sum(tff.federated_map(_total, x))


@tff.tensorflow.computation(np.int32)
def _refuse_three(x):
  with tf.control_dependencies([tf.debugging.assert_less(x, 3)]):
    return tf.identity(x)


@tff.tensorflow.computation(np.float32)
def _sum_of_large(x):
  # Beyond 80% of 256 MB, TensorFlow would use a temporary variable.
  large = tf.fill([15_000_000], x)
  tensors = [large, tf.sqrt(large), tf.exp(-large), tf.tanh(large)]
  return tf.reduce_max(tf.add_n(tensors))


def test_large_sums_in_several_threads():
  @tff.federated_computation(tff.FederatedType(np.float32, tff.CLIENTS))
  def total(x):
    return tff.federated_sum(tff.federated_map(_sum_of_large, x))

  cohort = [np.float32(i) for i in range(6)]
  expected = sum(i + i**0.5 + np.exp(-i) + np.tanh(i) for i in range(6))
  with tff.framework.get_context_stack().install(_context(3)):
    assert total(cohort) == pytest.approx(expected, rel=1e-5)


def test_agrees_with_tffs_worker(fed_avg, make_dataset, worker, train):
  cohort = [make_dataset(i) for i in range(5)]
  ours, our_metrics = train(_context(2), fed_avg, cohort, 3)
  theirs, their_metrics = train(worker, fed_avg, cohort, 3)
  for a, b in zip(_weights(ours), _weights(theirs), strict=True):
    np.testing.assert_allclose(a, b, atol=1e-5)
  for a, b in zip(our_metrics, their_metrics, strict=True):
    tf.nest.map_structure(
      lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), a, b
    )


def test_integers_wrap_around_as_in_tffs_worker(worker):
  @tff.federated_computation(_INTS, tff.FederatedType(np.int64, tff.CLIENTS))
  def total(x, y):
    return tff.federated_sum(x), tff.federated_sum(y)

  largest = 2**31 - 1
  for context in (_context(2), worker):
    with tff.framework.get_context_stack().install(context):
      sums = total([largest, 1], [largest, 1])
    assert tuple(map(int, sums)) == (-(2**31), 2**31)


def test_threads_do_not_change_a_bit(fed_avg, make_dataset, train):
  cohort = [lambda i=i: make_dataset(i) for i in range(7)]
  results = [
    train(_context(threads), fed_avg, cohort, 2) for threads in (1, 2, 4)
  ]
  for state, metrics in results[1:]:
    for a, b in zip(_weights(results[0][0]), _weights(state), strict=True):
      np.testing.assert_array_equal(a, b)
    assert metrics == results[0][1]


def test_clients_at_a_time_have_variables_of_their_own(call):
  @tff.tensorflow.computation(np.int32)
  def count(n):
    variable = tf.Variable(0)

    @tf.function
    def run():
      for _ in tf.range(n):
        variable.assign_add(1)
      return variable.read_value()

    return run()

  @tff.federated_computation(_INTS)
  def comp(x):
    return tff.federated_map(count, x)

  numbers = [1000 + i for i in range(64)]
  assert call(_context(4), comp, numbers) == numbers


def test_clients_are_made_in_turn_and_dropped(call):
  threads, alive, most = 2, weakref.WeakSet(), []

  def make(client):
    dataset = tf.data.Dataset.from_tensors(np.int32(client))
    alive.add(dataset)
    most.append(len(alive))
    return dataset

  cohort = [lambda i=i: make(i) for i in range(12)]
  assert call(_context(threads), _sum_of_totals, cohort) == sum(range(12))
  assert len(most) == 12
  assert max(most) <= threads


def test_a_sequence_is_indexed_when_a_client_has_its_turn(call):
  class Cohort(collections.abc.Sequence):
    indices = []

    def __len__(self):
      return 3

    def __getitem__(self, index):
      self.indices.append(index)
      return tf.data.Dataset.from_tensors(np.int32(index))

  assert call(_context(1), _sum_of_totals, Cohort()) == 3
  assert Cohort.indices == [0, 1, 2]


def test_memory_does_not_grow_with_the_number_of_clients(call):
  size = 4 * 1024 * 1024  # 16 MiB an update

  @tff.tensorflow.computation(tff.SequenceType(np.float32))
  def train(ds):
    return tf.fill([size], ds.reduce(0.0, lambda a, b: a + b))

  @tff.federated_computation(
    tff.FederatedType(tff.SequenceType(np.float32), tff.CLIENTS)
  )
  def comp(x):
    update = tff.federated_map(train, x)
    weight = tff.federated_value(2.0, tff.CLIENTS)
    return tff.federated_mean(update, weight), tff.federated_max(update)

  resident = []

  def make():
    with open('/proc/self/statm') as f:
      resident.append(int(f.read().split()[1]) * 4096)
    return tf.data.Dataset.from_tensors(1.0)

  mean, _ = call(_context(2), comp, [make] * 40)
  assert mean[0] == 1.0
  # Were they kept, the 32 last clients' updates would take 512 MiB.
  assert max(resident) - max(resident[:8]) < 6 * 4 * size


def test_values_are_dropped_when_an_invocation_ends(fed_avg, make_dataset):
  """Not at the next garbage collection, which may be many rounds later."""
  process, context = fed_avg, _context(2)
  state = context.invoke(process.initialize, None)
  cohort = [make_dataset(client) for client in range(3)]
  argument = tff.structure.from_container((state, cohort))
  context.invoke(process.next, argument)
  gc.collect()
  gc.disable()
  try:
    context.invoke(process.next, argument)
    alive = {
      f'{type(o).__module__}.{type(o).__name__}' for o in gc.get_objects()
    }
  finally:
    gc.enable()
  names = {n for n in alive if n.startswith('tff_fssl.runtime')}
  assert 'tff_fssl.runtime.in_process.InProcessContext' in names
  assert not {n for n in names if n.endswith(('._Run', '.Argument'))}


def test_aggregations_share_one_pass_over_the_clients(call):
  made = []

  def make(client):
    made.append(client)
    return tf.data.Dataset.from_tensors(np.int32(client))

  @tff.federated_computation(_SEQUENCES)
  def comp(x):
    totals = tff.federated_map(_total, x)
    return (
      tff.federated_sum(totals),
      tff.federated_min(totals),
      tff.federated_max(totals),
    )

  cohort = [lambda i=i: make(i) for i in range(1, 5)]
  assert call(_context(1), comp, cohort) == (10, 1, 4)
  assert made == [1, 2, 3, 4]


@pytest.fixture(scope='module')
def two_phases():
  """Sums the clients' totals, then counts who has the sum or more, thrice.

  The second phase depends on the first one's aggregate, and takes from the
  first phase a value of each client.
  """
  at_least = tff.tensorflow.computation(
    lambda a, total: tf.cast(3 * a >= total, tf.int32), (np.int32, np.int32)
  )

  @tff.federated_computation(_SEQUENCES)
  def comp(x):
    totals = tff.federated_map(_total, x)
    total = tff.federated_sum(totals)
    again = tff.federated_map(
      at_least, tff.federated_zip((totals, tff.federated_broadcast(total)))
    )
    return total, tff.federated_sum(again), again

  return comp


@pytest.mark.parametrize('threads', [1, 3])
def test_a_second_phase_of_the_clients(two_phases, call, threads):
  cohort = [tf.data.Dataset.from_tensors(np.int32(i)) for i in (1, 2, 3, 6)]
  result = call(_context(threads), two_phases, cohort)
  assert result == (12, 1, [0, 0, 0, 1])


def test_no_clients(two_phases, call):
  assert call(_context(2), two_phases, []) == (0, 0, [])
  assert call(_context(2), _sum_of_totals, []) == 0


def test_a_learning_process_without_clients(fed_avg, train):
  _, metrics = train(_context(1), fed_avg, [], 1)
  assert metrics[0]['client_work']['train']['num_examples'] == 0


@pytest.mark.parametrize('threads', [1, 2])
def test_an_error_names_the_operation_and_the_client(call, threads):
  @tff.federated_computation(_INTS)
  def comp(x):
    mapped = tff.federated_map(_refuse_three, tff.federated_map(_double, x))
    return tff.federated_sum(mapped)

  context = _context(threads)
  with pytest.raises(runtime.ExecutionError) as error:
    call(context, comp, [0, 1, 5, 6])
  assert error.value.client_index == 2
  assert error.value.operation.startswith('federated_map_2 ((int32 -> int32))')
  assert 'client 2' in str(error.value)
  assert isinstance(error.value.__cause__, tf.errors.InvalidArgumentError)
  assert call(context, comp, [0, 1]) == 2


@tff.tensorflow.computation(np.int32)
def _double(x):
  return 2 * x


def test_an_error_in_a_library_function_names_the_operation(call):
  @tf.function
  def checked(x):
    with tf.control_dependencies([tf.debugging.assert_less(x, 3)]):
      return tf.identity(x)

  @tff.tensorflow.computation(np.int32)
  def check(x):
    return tf.map_fn(checked, tf.fill([2], x))[0]

  @tff.federated_computation(_INTS)
  def comp(x):
    return tff.federated_map(check, tff.federated_map(_double, x))

  with pytest.raises(runtime.ExecutionError) as error:
    call(_context(1), comp, [4])
  assert error.value.operation.startswith('federated_map_2 ')
  assert ' or ' not in error.value.operation


def test_errors_at_the_server_and_in_accumulation(call):
  @tff.federated_computation(tff.FederatedType(np.int32, tff.SERVER))
  def place_at_server(x):
    return tff.federated_map(_refuse_three, x)

  with pytest.raises(runtime.ExecutionError, match='federated_apply_1') as e:
    call(_context(1), place_at_server, 7)
  assert e.value.client_index is None

  add = tff.tensorflow.computation(
    lambda a, b: _refuse_three_graph(a + b), (np.int32, np.int32)
  )

  @tff.federated_computation(_INTS)
  def accumulation(x):
    return tff.federated_aggregate(x, 0, add, add, _double)

  with pytest.raises(runtime.ExecutionError, match='accumulate') as e:
    call(_context(2), accumulation, [1, 1, 1, 1])
  assert e.value.client_index == 2


def _refuse_three_graph(x):
  with tf.control_dependencies([tf.debugging.assert_less(x, 3)]):
    return tf.identity(x)


def test_a_result_may_only_wait_for_its_argument(call):
  @tff.tensorflow.computation(np.int32)
  def seven_after(x):
    with tf.control_dependencies([x]):
      return tf.constant(7)

  @tff.tensorflow.computation(tff.SequenceType(np.int32))
  def eight_after(ds):
    with tf.control_dependencies([tf.data.experimental.to_variant(ds)]):
      return tf.constant(8)

  @tff.federated_computation(_INTS)
  def sevens(x):
    refused = tff.federated_map(_refuse_three, x)
    return tff.federated_sum(tff.federated_map(seven_after, refused))

  context, ds = _context(2), tf.data.Dataset.range(2, output_type=tf.int32)
  assert call(context, seven_after, 1) == 7
  assert call(context, eight_after, ds) == 8
  assert call(context, sevens, [1, 2]) == 14
  # Nothing reads the value, but it is computed.
  with pytest.raises(runtime.ExecutionError, match='assertion failed') as e:
    call(context, sevens, [1, 7])
  assert e.value.client_index == 1


def test_an_error_in_making_data_names_the_client(call):
  def fail():
    raise OSError('disk gone')

  cohort = [tf.data.Dataset.from_tensors(np.int32(1)), fail]
  with pytest.raises(runtime.ExecutionError, match='disk gone') as error:
    call(_context(2), _sum_of_totals, cohort)
  assert error.value.client_index == 1


def test_wrong_arguments_are_refused(in_process, call):
  floats = tf.data.Dataset.from_tensors(np.float32(1))
  with pytest.raises(TypeError, match='client 0.*int32.*float32'):
    call(in_process, _sum_of_totals, [floats])
  with pytest.raises(TypeError, match='expected a list'):
    call(in_process, _sum_of_totals, floats)
  with pytest.raises(TypeError, match='expected int32'):
    call(in_process, _double, 1.5)
  with pytest.raises(TypeError, match=r'expected int32, found int64'):
    call(in_process, _double, np.int64(1))

  @tff.federated_computation(_INTS, _INTS)
  def two(x, y):
    return tff.federated_sum(x), tff.federated_sum(y)

  with pytest.raises(ValueError, match='numbers of clients differ'):
    call(in_process, two, [1], [1, 2])


@pytest.mark.parametrize('threads', [1, 2])
def test_an_interrupt_acts_between_clients(call, threads):
  made = []

  def make(client):
    made.append(client)
    if client == 2:
      signal.raise_signal(signal.SIGINT)
      # In a worker thread, the signal reaches the main thread from here on.
      time.sleep(0.2)
    return tf.data.Dataset.from_tensors(np.int32(client))

  with pytest.raises(KeyboardInterrupt):
    call(
      _context(threads),
      _sum_of_totals,
      [lambda i=i: make(i) for i in range(50)],
    )
  assert max(made) <= 2 + threads


def test_a_cancelled_invocation_stops_between_clients():
  context = runtime.build_async_context(runtime.Settings(client_threads=2))
  made, begun = [], threading.Event()

  def make(client):
    made.append(client)
    begun.set()
    time.sleep(0.02)
    return tf.data.Dataset.from_tensors(np.int32(client))

  async def main():
    cohort = [lambda i=i: make(i) for i in range(1000)]
    task = asyncio.create_task(context.invoke(_sum_of_totals, cohort))
    while not begun.is_set():
      await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
      await task
    count = len(made)
    await asyncio.sleep(0.1)
    assert len(made) == count < 1000
    return await context.invoke(_sum_of_totals, cohort[:3])

  assert asyncio.run(main()) == 3


_SECURE = {
  'federated_secure_sum': lambda x: tff.federated_secure_sum(x, 100),
  'federated_secure_sum_bitwidth': (
    lambda x: tff.federated_secure_sum_bitwidth(x, 8)
  ),
  'federated_secure_modular_sum': (
    lambda x: tff.backends.mapreduce.federated_secure_modular_sum(x, 100)
  ),
}


@pytest.mark.parametrize('uri', list(_SECURE))
def test_secure_sums_only_on_request(uri, in_process, call):
  comp = tff.federated_computation(_SECURE[uri], _INTS)
  with pytest.raises(NotImplementedError, match=f'^{uri}:'):
    call(in_process, comp, [1, 2])
  context = runtime.build_context(
    runtime.Settings(simulate_secure_aggregation=True)
  )
  assert call(context, comp, [1, 2]) == 3


def test_results_are_not_copied_and_cannot_be_changed(call):
  @tff.tensorflow.computation(tff.TensorType(np.float32, [4]), np.float32)
  def make(x, y):
    # A part of the graph, the argument, and what is computed.
    return tf.constant([1.0, 2.0, 3.0]), x, x * y

  x = np.ones(4, np.float32)
  context = _context(1)
  results = call(context, make, x, np.float32(2.0))
  for result in results:
    with pytest.raises(ValueError, match='read-only'):
      result[0] = 9.0
  x[0] = 5.0  # The caller's own array may change.
  np.testing.assert_array_equal(results[1], np.ones(4))
  again = call(context, make, results[2], np.float32(2.0))
  assert [r.tolist() for r in again] == [[1.0, 2.0, 3.0], [2.0] * 4, [4.0] * 4]


def test_programs_are_compiled_once_and_forgotten(call):
  context = _context(1)
  comp = tff.federated_computation(lambda x: tff.federated_sum(x), _INTS)
  call(context, comp, [1])
  first = context.timing.compile
  call(context, comp, [1])
  assert context.timing.compile < first / 10
  assert len(context._programs) == 1  # pylint: disable=protected-access
  del comp
  gc.collect()
  assert not context._programs  # pylint: disable=protected-access


@pytest.mark.parametrize('name', ['in_process', 'tff_worker'])
def test_errors_of_a_program_are_reported_once(name, caplog):
  context = runtime.build_async_context(runtime.Settings(name))

  @tff.federated_computation(_SEQUENCES)
  def comp(x):
    total = tff.federated_sum(tff.federated_map(_total, x))
    return collections.OrderedDict(a=total, b=total, c=(total, total))

  def fail():
    raise OSError('disk gone')

  async def main():
    floats = tf.data.Dataset.from_tensors(np.float32(1))
    for bad in (fail, floats):
      with pytest.raises((OSError, TypeError, runtime.ExecutionError)):
        await tff.program.materialize_value(comp([bad]))
      gc.collect()
    # Others' errors are still reported.
    task = asyncio.create_task(other())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    del task
    gc.collect()

  async def other():
    raise ValueError('of another')

  native = tff.program.NativeFederatedContext(context)
  with tff.framework.get_context_stack().install(native):
    asyncio.run(main())
  gc.collect()
  getattr(context, 'close', lambda: None)()
  lost = [r for r in caplog.records if 'never retrieved' in r.getMessage()]
  assert len(lost) == 1 and 'of another' in str(lost[0].exc_info)


def test_python_ends_quietly():
  code = (
    'import sys, tff_fssl, tensorflow_federated as tff\n'
    'from tff_fssl import runtime\n'
    'try: runtime.build_context(runtime.Settings(client_devices="gpu:7"))\n'
    'except ValueError: sys.exit(2)'
  )
  done = subprocess.run(
    [sys.executable, '-c', code],
    capture_output=True,
    text=True,
    check=False,
    env={**os.environ, 'TF_CPP_MIN_LOG_LEVEL': '3'},
  )
  assert done.returncode == 2
  assert 'ServiceManager' not in done.stderr and 'ignored' not in done.stderr


def test_the_default_context_is_set_with_its_settings():
  stack = tff.framework.get_context_stack()
  previous = stack.current
  try:
    runtime.set_default_context(runtime.Settings(client_threads=3))
    assert isinstance(stack.current, runtime.InProcessContext)
    assert stack.current.client_threads == 3
  finally:
    tff.framework.set_default_context(previous)
