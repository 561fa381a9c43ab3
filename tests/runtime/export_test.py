"""Exported computations run without TFF, with the same bits."""

import json
import os
import subprocess
import sys

import contexts
import gpu_kernels
import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff
import tiny_task

from tff_fssl.hparams import UsageError
from tff_fssl.runtime import export
from tff_fssl.runtime import values

_context = contexts.of_each_module(
  client_threads=1, simulate_secure_aggregation=True
)

_SEQUENCE = tff.FederatedType(
  tff.SequenceType(tff.TensorType(np.float32, [None])), tff.CLIENTS
)
# Runs rounds in a process that has neither TFF nor this package.
_ELSEWHERE = """
import sys
for name in ('tensorflow_federated', 'tff_fssl'):
  sys.modules[name] = None
import tensorflow as tf
tf.config.threading.set_intra_op_parallelism_threads({threads})
import artefact
import numpy as np
program = artefact.Program('.')
rounds = np.load('rounds.npz', allow_pickle=True)['rounds']
arguments, found = program.initial(), []
for clients in rounds:
  result = program.run(arguments, clients)
  arguments = {{name: result[name] for name in program.parameter}}
  found.append(np.array([result[n] for n in program.result] + [None], object))
np.savez('found.npz', found=np.array(found))
"""


def _leaves(value, type_spec):
  found = values.read_leaves(value, type_spec, 'value')
  return [leaf.numpy() for leaf in found]


def _object(items):
  """An array of objects, however alike they are."""
  array = np.empty([len(items)], object)
  array[:] = items
  return array


def _compare_rounds(process, scenario, folder):
  """Runs two rounds here and elsewhere, and returns leaves that differ."""
  state, rounds, expected = process.initialize(), [], []
  program = export.export(process.next, str(folder), initial=state)
  data_type = process.next.type_signature.parameter[1]
  for round_num in (1, 2):
    cohort = [
      tiny_task.dataset(element, process)
      for element in tiny_task.cohort(scenario, round_num=round_num)
    ]
    data = [
      _leaves(next(iter(dataset)), data_type.member.element)
      for dataset in cohort
    ]
    rounds.append(_object(data))
    result = process.next(state, cohort)
    state = result.state
    types = process.next.type_signature.result
    expected.append(
      _leaves(result.state, types[0].member)
      + _leaves(result.metrics, types[1].member)
    )
  np.savez(folder / 'rounds.npz', rounds=np.array(rounds, object))
  threads = tf.config.threading.get_intra_op_parallelism_threads()
  subprocess.run(
    [sys.executable, '-c', _ELSEWHERE.format(threads=threads)],
    cwd=folder,
    check=True,
    env={**os.environ, 'PYTHONPATH': '.'},
  )
  found = np.load(folder / 'found.npz', allow_pickle=True)['found']
  return [
    (round_num, name)
    for round_num, (ours, theirs) in enumerate(zip(expected, found), 1)
    for name, a, b in zip(program.result, ours, theirs[:-1], strict=True)
    if np.asarray(a).tobytes() != np.asarray(b).tobytes()
  ]


def test_rounds_are_equal_without_tff(tmp_path):
  scenario = tiny_task.round_hparams.LABELS_AT_SERVER
  process = tiny_task.build('fixmatch', scenario)
  assert not _compare_rounds(process, scenario, tmp_path)
  server = sorted(os.listdir(tmp_path / 'server'))
  assert 'stage0.pb' in server and 'accumulate0.pb' in server
  # The server's labelled examples stay with it.
  (_, y), image = tiny_task.examples(9, 7), tiny_task.examples(9, 7)[0][0]
  held = [
    any(image.tobytes() in p.read_bytes() for p in (tmp_path / room).iterdir())
    for room in ('server', 'client')
  ]
  assert len(y) and held == [True, False]


@pytest.mark.slow
def test_a_big_model_trains_more_than_once(tmp_path):
  scenario = tiny_task.round_hparams.LABELS_AT_CLIENTS
  process = tiny_task.build('fixmatch', scenario, model=tiny_task.big_model_fn)
  assert not _compare_rounds(process, scenario, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize('name, scenario', tiny_task.scenarios())
def test_every_algorithm(name, scenario, tmp_path):
  process = tiny_task.build(name, scenario)
  assert not _compare_rounds(process, scenario, tmp_path)


@pytest.mark.skipif(
  not gpu_kernels.are_known(), reason='needs a TensorFlow for GPUs'
)
@pytest.mark.parametrize(
  'name, scenario',
  [
    case
    if case == ('fl2', tiny_task.round_hparams.LABELS_AT_CLIENTS)
    else pytest.param(*case, marks=pytest.mark.slow)
    for case in tiny_task.scenarios()
  ],
)
def test_no_step_leaves_the_gpu(name, scenario, tmp_path):
  export.export(tiny_task.build(name, scenario).next, str(tmp_path))
  for path in (tmp_path / 'client').glob('*.pb'):
    graph = tf.compat.v1.GraphDef.FromString(path.read_bytes())
    assert not gpu_kernels.missing(graph), path.name


@tff.tensorflow.computation(_SEQUENCE.member, np.float32)
def _scale(data, factor):
  return factor * data.reduce(0.0, lambda a, b: a + tf.reduce_sum(b))


@tff.federated_computation(tff.FederatedType(np.float32, tff.SERVER), _SEQUENCE)
def _total(factor, data):
  pairs = tff.federated_zip((data, tff.federated_broadcast(factor)))
  return tff.federated_sum(tff.federated_map(_scale, pairs))


def test_folders_in_use_and_other_forms_are_refused(tmp_path):
  export.export(_total, str(tmp_path / 'total'))
  with pytest.raises(UsageError, match='is not empty'):
    export.export(_total, str(tmp_path / 'total'))

  @tff.federated_computation(_SEQUENCE, _SEQUENCE)
  def two(first, second):
    return first, second

  with pytest.raises(NotImplementedError, match='must be one sequence'):
    export.export(two, str(tmp_path / 'two'))

  count = tff.tensorflow.computation(
    lambda data: data.reduce(0, lambda a, _: a + 1), _SEQUENCE.member
  )
  at_clients = tff.federated_computation(
    lambda data: tff.federated_map(count, data), _SEQUENCE
  )
  with pytest.raises(NotImplementedError, match='which stay there'):
    export.export(at_clients, str(tmp_path / 'at_clients'))


def test_operations_that_clients_would_refuse_are_not_written(tmp_path):
  @tff.tensorflow.computation(_SEQUENCE.member)
  def measure(data):
    total = data.reduce(0.0, lambda a, b: a + tf.reduce_sum(b))
    return total + tf.random.uniform([])

  total = tff.federated_computation(
    lambda data: tff.federated_sum(tff.federated_map(measure, data)), _SEQUENCE
  )
  with pytest.raises(NotImplementedError, match='operation RandomUniform'):
    export.export(total, str(tmp_path / 'random'))


def test_the_description_names_everything(tmp_path):
  program = export.export(_total, str(tmp_path / 'total'))
  text = (tmp_path / 'total' / 'program.json').read_text()
  assert json.loads(text) == program.description
  assert program.parameter == ['factor'] and program.result == ['']
  assert program.description['data'] == [
    {'name': '', 'dtype': 'float32', 'shape': [None]}
  ]
  (phase,) = program.description['phases']
  (replied,) = phase['replied']
  assert program.description['slots'][replied] == {
    'name': '',
    'is_at_clients': True,
    'dtype': 'float32',
    'shape': [],
  }
