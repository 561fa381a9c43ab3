import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tff_fssl.runtime import graphs


def _load(computation):
  return graphs.load_graph(tff.framework.serialize_computation(computation))


def _run(graph, *arguments):
  def call():
    return tf.graph_util.import_graph_def(
      graph.graph_def,
      name='x',
      input_map=dict(zip(graph.feeds, map(tf.constant, arguments))),
      return_elements=list(graph.fetches),
    )

  (result,) = tf.compat.v1.wrap_function(call, [])()
  return result.numpy()


@tff.tensorflow.computation(np.int32)
def _count(x):
  return tf.Variable(0).assign_add(x)


def test_each_execution_has_variables_of_its_own():
  graph = _load(_count)
  assert {'VarHandleOp'} <= graph.op_types
  assert [_run(graph, n) for n in (3, 4)] == [3, 4]


def test_tables_are_private():
  @tff.tensorflow.computation(np.str_)
  def look_up(word):
    table = tf.lookup.StaticHashTable(
      tf.lookup.KeyValueTensorInitializer(['a', 'b'], [1, 2]), -1
    )
    return table.lookup(word)

  graph = _load(look_up)
  assert 'AnonymousHashTable' in graph.op_types
  assert [_run(graph, word) for word in ('b', 'c')] == [2, -1]


def test_names_of_library_functions_end_with_the_digest():
  @tff.tensorflow.computation(np.int32)
  def double(x):
    return tf.function(lambda y: 2 * y)(x)

  graph = _load(double)
  names = [f.signature.name for f in graph.graph_def.library.function]
  assert names and all(name.endswith(graph.digest) for name in names)
  assert _load(double).digest == graph.digest != _load(_count).digest
  assert _run(graph, 4) == 8


def test_other_kinds_are_refused():
  @tff.federated_computation(np.int32)
  def identity(x):
    return x

  with pytest.raises(NotImplementedError, match='runs TensorFlow'):
    _load(identity)


def test_what_clients_would_share_is_refused():
  @tff.tensorflow.computation(np.float32)
  def count(x):
    queue = tf.queue.FIFOQueue(9, [tf.float32])
    with tf.control_dependencies([queue.enqueue([x])]):
      return queue.size()

  with pytest.raises(NotImplementedError, match='FIFOQueueV2'):
    _load(count)
