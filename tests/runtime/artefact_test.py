"""The parts of an exported round, in a process of its own or not."""

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

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
