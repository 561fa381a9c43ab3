"""Datasets start afresh at each use, in process as in TFF's worker."""

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tff_fssl import runtime

_SEQUENCE = tff.SequenceType(np.int32)
_CLIENTS = tff.FederatedType(_SEQUENCE, tff.CLIENTS)


def _digest(dataset, start=0):
  """A number that depends on the order of the elements."""
  return dataset.reduce(
    tf.convert_to_tensor(start), lambda a, b: (a * 31 + b) % 1_000_003
  )


@tff.tensorflow.computation(_SEQUENCE)
def _order(ds):
  return _digest(ds)


@tff.tensorflow.computation(_SEQUENCE)
def _order_of_two_passes(ds):
  first = _digest(ds)
  with tf.control_dependencies([first]):
    return first, _digest(ds)


@tff.federated_computation(_CLIENTS)
def _three_readers(x):
  return (
    tff.federated_map(_order, x),
    tff.federated_map(_order_of_two_passes, x),
    tff.federated_map(_order, x),
  )


@tff.federated_computation(_CLIENTS)
def _two_phases(x):
  total = tff.federated_sum(tff.federated_map(_order, x))
  again = tff.tensorflow.computation(
    lambda ds, start: _digest(ds, start % 1000), (_SEQUENCE, np.int32)
  )
  return total, tff.federated_map(again, (x, tff.federated_broadcast(total)))


@tff.federated_computation(_CLIENTS)
def _readers_of_a_made_sequence(x):
  shuffle = tff.tensorflow.computation(
    lambda ds: ds.shuffle(10, seed=3), _SEQUENCE
  )
  made = tff.federated_map(shuffle, x)
  again = tff.tensorflow.computation(
    lambda ds, start: _digest(ds, start % 1000), (_SEQUENCE, np.int32)
  )
  total = tff.federated_sum(tff.federated_map(_order, made))
  return (
    total,
    tff.federated_map(_order_of_two_passes, made),
    tff.federated_map(again, (made, tff.federated_broadcast(total))),
  )


@tff.federated_computation(
  tff.FederatedType(_SEQUENCE, tff.SERVER),
  tff.FederatedType(np.int32, tff.CLIENTS),
)
def _server_result(x, y):
  return (
    tff.federated_map(_order_of_two_passes, x),
    tff.federated_map(_order, x),
    tff.federated_sum(y),
  )


def _range():
  return tf.data.Dataset.from_tensor_slices(np.arange(10, dtype=np.int32))


_DATASETS = {
  'slices': lambda: _range().batch(2).unbatch().take(7),
  'shuffled': lambda: _range().shuffle(10, seed=1),
  'shuffled once': lambda: _range().shuffle(
    10, seed=1, reshuffle_each_iteration=False
  ),
  'shuffled and repeated': lambda: _range().shuffle(10, seed=1).repeat(3),
  'shuffled and cached': lambda: _range().shuffle(10, seed=1).cache(),
  'shuffled within': lambda: _range().interleave(
    lambda x: tf.data.Dataset.from_tensors(x).repeat(3).shuffle(3, seed=2)
  ),
  'mapped at random': lambda: _range().map(
    lambda x: x + tf.random.uniform([], 0, 1000, tf.int32, seed=5)
  ),
  'random': lambda: (
    tf.data.Dataset.random(seed=4, rerandomize_each_iteration=True)
    .take(5)
    .map(lambda x: tf.cast(x % 1000, tf.int32))
  ),
  'sampled': lambda: tf.data.Dataset.sample_from_datasets(
    [_range(), _range().map(lambda x: x + 100)], seed=3
  ),
}
_COMPUTATIONS = {
  'readers': _three_readers,
  'phases': _two_phases,
  'made': _readers_of_a_made_sequence,
}


@pytest.fixture(scope='module')
def contexts():
  return [
    runtime.build_context(runtime.Settings(client_threads=n)) for n in (1, 3)
  ]


def _ints(result):
  return tf.nest.map_structure(int, result)


@pytest.mark.parametrize('name', list(_DATASETS))
def test_as_tff_has_it_whatever_was_read_before(name, call, worker, contexts):
  dataset = _DATASETS[name]()
  for comp in _COMPUTATIONS.values():
    expected = _ints(call(worker, comp, [dataset] * 2))
    for context in contexts:
      assert _ints(call(context, comp, [dataset] * 2)) == expected
  expected = _ints(call(worker, _server_result, dataset, [1]))
  assert _ints(call(contexts[0], _server_result, dataset, [1])) == expected


def test_functions_that_give_the_same_dataset(call, in_process):
  dataset = _DATASETS['shuffled']()
  result = call(in_process, _two_phases, [lambda: dataset] * 3)
  assert result == call(in_process, _two_phases, [dataset] * 3)


def test_datasets_of_python_functions_and_resources(call, in_process):
  table = tf.lookup.StaticHashTable(
    tf.lookup.KeyValueTensorInitializer(
      tf.range(10, dtype=tf.int32), tf.range(10, dtype=tf.int32) * 7
    ),
    -1,
  )
  generated = tf.data.Dataset.from_generator(
    lambda: iter(range(10)), output_signature=tf.TensorSpec([], tf.int32)
  )
  looked_up = _range().map(table.lookup)
  expected = call(in_process, _three_readers, [_range()] * 2)
  assert call(in_process, _three_readers, [generated] * 2) == expected
  assert call(in_process, _three_readers, [looked_up] * 2) != expected


def test_plain_data_are_not_copied(monkeypatch, call, in_process):
  def refuse(*_):
    raise AssertionError('copied')

  # pylint: disable=import-outside-toplevel
  from tff_fssl.runtime import sequences

  monkeypatch.setattr(sequences, '_dump_graph', refuse)
  plain = tf.data.Dataset.from_tensor_slices(np.arange(10, dtype=np.int32))
  call(in_process, _two_phases, [plain.batch(2).unbatch().take(3)][:0])
  call(in_process, _two_phases, [plain, plain.take(3).repeat(2)])
  with pytest.raises(
    TypeError, match='client 1.*cannot be read from the start'
  ):
    call(in_process, _two_phases, [plain, plain.shuffle(3)])
