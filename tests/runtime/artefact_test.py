"""The parts of an exported round, in a process of its own or not."""

import hashlib
import json

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tff_fssl.client import optimizer as optimizers
from tff_fssl.models import adapter
from tff_fssl.models import networks
from tff_fssl.runtime import artefact
from tff_fssl.runtime import export

_SEQUENCE = tff.FederatedType(
  tff.SequenceType(tff.TensorType(np.float32, [None])), tff.CLIENTS
)


@tff.tensorflow.computation(_SEQUENCE.member, np.float32)
def _scale(data, factor):
  return factor * data.reduce(0.0, lambda a, b: a + tf.reduce_sum(b))


@tff.federated_computation(tff.FederatedType(np.float32, tff.SERVER), _SEQUENCE)
def _total(factor, data):
  pairs = tff.federated_zip((data, tff.federated_broadcast(factor)))
  return tff.federated_sum(tff.federated_map(_scale, pairs))


@pytest.fixture(name='program')
def _program(tmp_path):
  return export.export(_total, str(tmp_path / 'total'))


def test_parts_of_a_round(program):
  server = program.start({'factor': 2.0})
  program.stage(0, server)
  sent, totals = program.sent(0, server), program.begin(0, server)
  for data in ([1.0, 2.0], [3.0]):
    reply, kept = program.work(0, sent, [np.float32(data)])
    assert not kept
    totals = program.add(0, server, totals, reply)
  program.end(0, server, totals)
  program.stage(1, server)
  assert program.finish(server) == {'': 12.0}
  assert program.run({'factor': 1.0}, []) == {'': 0.0}


@pytest.mark.parametrize(
  'reply, text',
  [
    ([], 'expected 1 values, found 0'),
    ([np.float64(1)], 'value 0: expected float32'),
    ([np.zeros([2], np.float32)], 'found float32 [2]'),
    ([b'x'], 'value 0: expected float32'),
  ],
)
def test_replies_of_other_forms_are_refused(program, reply, text):
  server = program.start({'factor': 2.0})
  program.stage(0, server)
  totals = program.begin(0, server)
  with pytest.raises(artefact.MessageError) as error:
    program.add(0, server, totals, reply)
  assert text in str(error.value)
  with pytest.raises(artefact.MessageError) as error:
    program.work(0, reply, [np.float32([1])])
  assert text in str(error.value)


@tff.tensorflow.computation(_SEQUENCE.member, np.bool_)
def _both(data, sent):
  return tf.logical_and(data.reduce(True, lambda a, b: a), sent)


@tff.tensorflow.computation(np.bool_)
def _as_number(value):
  return tf.cast(value, tf.int32)


@tff.federated_computation(tff.FederatedType(np.bool_, tff.SERVER), _SEQUENCE)
def _count(sent, data):
  pairs = tff.federated_zip((data, tff.federated_broadcast(sent)))
  kept = tff.federated_map(_both, pairs)
  return tff.federated_sum(tff.federated_map(_as_number, kept))


@pytest.mark.parametrize('byte', [2, 255])
def test_booleans_are_0_or_1(tmp_path, byte):
  program = export.export(_count, str(tmp_path / 'count'))
  wrong = np.frombuffer(bytes([byte]), np.bool_).reshape([])
  server = program.start({'sent': True})
  program.stage(0, server)
  totals = program.begin(0, server)
  with pytest.raises(artefact.MessageError, match='neither 0 nor 1'):
    program.add(0, server, totals, [wrong])
  with pytest.raises(artefact.MessageError, match='neither 0 nor 1'):
    program.work(0, [wrong], [np.float32([1])])
  right = program.add(0, server, totals, [np.bool_(True)])
  program.end(0, server, right)
  program.stage(1, server)
  assert program.finish(server) == {'': 1}


def test_a_changed_folder_is_refused(tmp_path, program):
  folder = tmp_path / 'total'
  (graph,) = (folder / 'client').iterdir()
  graph.write_bytes(graph.read_bytes()[:-1])
  with pytest.raises(artefact.ArtefactError, match='copy it again'):
    artefact.Program(str(folder)).run({'factor': 1.0}, [[np.float32([1])]])
  graph.unlink()
  with pytest.raises(artefact.ArtefactError, match='cannot be read'):
    artefact.Program(str(folder)).run({'factor': 1.0}, [[np.float32([1])]])
  initial = folder / artefact.INITIAL
  initial.parent.mkdir(exist_ok=True)
  for content in (b'', b'PK no'):
    initial.write_bytes(content)
    with pytest.raises(artefact.ArtefactError, match='cannot be read'):
      artefact.Program(str(folder)).initial()
  np.savez(initial, other=1.0)
  with pytest.raises(artefact.ArtefactError, match='factor'):
    artefact.Program(str(folder)).initial()
  path = folder / artefact.PROGRAM
  for content in ('', '[]', '{"format": "x"}'):
    path.write_text(content)
    with pytest.raises(artefact.ArtefactError):
      artefact.Program(str(folder))


def _graph_of(function):
  """Returns a graph that is one call of a function."""
  with tf.Graph().as_default() as graph:
    tf.function(lambda: [function(), 1][1], autograph=False)()
  return graph.as_graph_def()


def _variant(dataset):
  return tf.data.experimental.to_variant(dataset)


def _bytes_of(dataset):
  return tf.raw_ops.DatasetToGraphV2(input_dataset=_variant(dataset)).numpy()


_REFUSED = {
  'ReadFile': lambda: tf.io.read_file('x'),
  'WriteFile': lambda: tf.io.write_file('x', 'y'),
  'MatchingFiles': lambda: tf.io.matching_files('*'),
  'RestoreV2': lambda: tf.raw_ops.RestoreV2(
    prefix='x', tensor_names=['y'], shape_and_slices=[''], dtypes=[tf.int32]
  ),
  'PrintV2': lambda: tf.raw_ops.PrintV2(
    input='x', output_stream='file:///tmp/x'
  ),
  'EagerPyFunc': lambda: tf.py_function(lambda: 1, [], tf.int32),
  'PyFuncStateless': lambda: tf.numpy_function(
    lambda: 1, [], tf.int64, stateful=False
  ),
  'DebugIdentity': lambda: tf.raw_ops.DebugIdentity(
    input=1, debug_urls=['file:///tmp/x']
  ),
  'ImmutableConst': lambda: tf.raw_ops.ImmutableConst(
    dtype=tf.int32, shape=[], memory_region_name='x'
  ),
  'TextLineDataset': lambda: tf.raw_ops.TextLineDataset(
    filenames=['x'], compression_type='', buffer_size=1
  ),
  'CacheDataset': lambda: tf.raw_ops.CacheDataset(
    input_dataset=_variant(tf.data.Dataset.from_tensors(1)),
    filename='x',
    output_types=[tf.int32],
    output_shapes=[[]],
  ),
  'DatasetFromGraph': lambda: tf.raw_ops.DatasetFromGraph(graph_def=b'x'),
}


@pytest.mark.parametrize('name', _REFUSED)
def test_graphs_that_do_more_than_compute_are_refused(name):
  with pytest.raises(artefact.ArtefactError, match=f'operation {name} '):
    artefact.check_graph(_graph_of(_REFUSED[name]))


@pytest.mark.parametrize(
  'optimizer',
  [
    optimizers.Sgd(momentum=0.0, nesterov=False),
    optimizers.Sgd(momentum=0.9, nesterov=True, weight_decay=0.1),
    optimizers.RmsProp(),
    optimizers.Adam(),
  ],
)
def test_the_steps_of_clients_only_compute(optimizer):
  with tf.Graph().as_default() as graph:
    network = adapter.Network(
      lambda: networks.build_network('linear', (2, 2, 1), 3)
    )
    slots = optimizer.initialize(network)

    @tf.function(autograph=False)
    def step():
      gradients = [tf.ones_like(v) for v in network.trainable_variables]
      optimizer.apply(network, slots, gradients, tf.constant(0.1))
      return 1

    step()
  definition = graph.as_graph_def()
  del definition.node[:]  # Creates the variables.
  artefact.check_graph(definition)


def test_attributes_of_newer_versions_may_be_left_out():
  graph = _graph_of(_REFUSED['DebugIdentity'])
  (node,) = (
    n for f in graph.library.function for n in f.node_def if 'Debug' in n.op
  )
  for name in ('debug_urls', 'device_name', 'tensor_name'):
    node.attr.pop(name, None)
  artefact.check_graph(graph)


def test_a_function_cannot_hide_behind_an_operation():
  graph = _graph_of(lambda: tf.constant(1))
  graph.library.function.add().signature.name = 'Neg'
  graph.node.add(name='x', op='Neg')
  with pytest.raises(artefact.ArtefactError, match='operation Neg'):
    artefact.check_graph(graph)


def _replace(folder, graph):
  """Puts a graph in place of the clients', with its checksum."""
  (place,) = (folder / 'client').iterdir()
  content = graph.SerializeToString()
  place.write_bytes(content)
  path = folder / artefact.PROGRAM
  described = json.loads(path.read_text())
  digest = hashlib.sha256(content).hexdigest()
  described['phases'][0]['work']['sha256'] = digest
  path.write_text(json.dumps(described))


def test_a_servers_graph_writes_no_file_of_a_client(tmp_path, program):
  folder, stolen = tmp_path / 'total', tmp_path / 'stolen'
  (place,) = (folder / 'client').iterdir()
  graph = tf.compat.v1.GraphDef.FromString(place.read_bytes())
  with tf.Graph().as_default() as other:
    tf.io.write_file(str(stolen), 'x')
  graph.node.extend(other.as_graph_def().node)
  write = next(n.name for n in graph.node if n.op == 'WriteFile')
  last = program.description['phases'][0]['work']['fetches'][0]
  node = next(n for n in graph.node if n.name == last.partition(':')[0])
  node.input.append(f'^{write}')
  _replace(folder, graph)
  hostile = artefact.Program(str(folder))
  with pytest.raises(artefact.ArtefactError, match='operation WriteFile'):
    hostile.work(0, [np.float32(2)], [np.float32([1])])
  assert not stolen.exists()


@tff.tensorflow.computation(np.float32)
def _one(factor):
  return tf.data.Dataset.from_tensors(factor)


@tff.tensorflow.computation(_SEQUENCE.member, _one.type_signature.result)
def _scale_by(data, factors):
  factor = factors.reduce(0.0, lambda a, b: a + b)
  return factor * data.reduce(0.0, lambda a, b: a + tf.reduce_sum(b))


@tff.federated_computation(tff.FederatedType(np.float32, tff.SERVER), _SEQUENCE)
def _with_optional(factor, data):
  sent = tff.federated_broadcast(tff.federated_map(_one, factor))
  return tff.federated_sum(tff.federated_map(_scale_by, (data, sent)))


def test_a_data_set_that_the_server_sends_reads_no_file(tmp_path):
  program = export.export(_with_optional, str(tmp_path / 'optional'))
  data = [np.float32([1, 2])]
  assert program.run({'factor': 2.0}, [data]) == {'': 6.0}
  secret = tmp_path / 'secret'
  secret.write_text('12345')
  length = lambda: tf.strings.length(tf.io.read_file(str(secret)))
  hostile = tf.data.Dataset.from_tensors(0.0).map(
    lambda x: x + tf.cast(length(), tf.float32)
  )
  with pytest.raises(artefact.ArtefactError, match='operation MapDataset'):
    program.work(0, [_bytes_of(hostile)], data)
  with pytest.raises(artefact.ArtefactError, match='is no graph'):
    program.work(0, [b'\xff'], data)


@pytest.mark.parametrize('name', ['../outside.pb', 'client/../../outside.pb'])
def test_graphs_outside_of_the_folder_are_refused(tmp_path, program, name):
  folder = tmp_path / 'total'
  (place,) = (folder / 'client').iterdir()
  place.rename(tmp_path / 'outside.pb')
  program.description['phases'][0]['work']['graph'] = name
  with pytest.raises(artefact.ArtefactError, match='is outside of'):
    program.work(0, [np.float32(2)], [np.float32([1])])
  place.symlink_to(tmp_path / 'outside.pb')
  with pytest.raises(artefact.ArtefactError, match='is outside of'):
    program.read(f'client/{place.name}')


def test_a_link_to_the_folder_is_fine(tmp_path, program):
  (tmp_path / 'link').symlink_to(tmp_path / 'total')
  other = artefact.Program(str(tmp_path / 'link'))
  assert other.run({'factor': 1.0}, [[np.float32([3])]]) == {'': 3.0}
