"""Tests of the Ray runtime; each uses worker processes."""

import asyncio
import collections
import dataclasses
import importlib.metadata
import os
import pickle
import signal
import sys
import threading
import time
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tff_fssl import hparams
from tff_fssl import runtime
from tff_fssl.runtime import ray_context
from tff_fssl.runtime import ray_worker

pytest.importorskip('ray')

# What the context told the user.
_TOLD: list[str] = []


@pytest.fixture(scope='module', name='context')
def build_context():
  """A context with two workers, on a cluster of its own."""
  settings = runtime.Settings('ray', ray_workers=2)
  with runtime.build_context(settings, warn=_TOLD.append) as context:
    yield context


@tff.tensorflow.computation(
  tff.SequenceType(np.float32), tff.TensorType(np.float32, [3])
)
def _train(data, model):
  total = data.reduce(0.0, lambda x, y: x + y)
  return tf.sin(model * 1.1 + total), tf.cast(total, tf.float64)


@tff.tensorflow.computation(np.float64, tff.TensorType(np.float32, [3]))
def _second(total, model):
  return tf.cast(total, tf.float32) * model


@tff.federated_computation(
  tff.FederatedType(tff.TensorType(np.float32, [3]), tff.SERVER),
  tff.FederatedType(tff.SequenceType(np.float32), tff.CLIENTS),
)
def _two_phases(model, data):
  """Two client phases; the second uses what clients kept of the first."""
  at_clients = tff.federated_broadcast(model)
  trained = tff.federated_map(_train, (data, at_clients))
  mean = tff.federated_mean(trained[0])
  again = tff.federated_map(
    _second, (trained[1], tff.federated_broadcast(mean))
  )
  return mean, tff.federated_sum(again), trained[1]


def _data(num_clients):
  draw = np.random.default_rng(0).normal
  return [
    tf.data.Dataset.from_tensor_slices(draw(size=n + 1).astype(np.float32))
    for n in range(num_clients)
  ]


_MODEL = np.array([0.1, 0.2, 0.3], np.float32)


def _invoke(context, data):
  mean, total, kept = context.invoke(_two_phases, (_MODEL, data))
  return mean, total, np.array(kept)


def _local_context(data, clients_per_group=1):
  settings = runtime.Settings(clients_per_group=clients_per_group)
  return _invoke(runtime.build_context(settings), data)


@pytest.mark.parametrize('num_clients', [0, 1, 7])
def test_equals_in_process(context, num_clients):
  if not num_clients:
    result = context.invoke(_two_phases, (_MODEL, []))
    np.testing.assert_array_equal(result[1], np.zeros(3))
    return
  data = _data(num_clients)
  for ours, theirs in zip(_invoke(context, data), _local_context(data)):
    np.testing.assert_array_equal(ours, theirs)


def test_groups_are_merged_in_order(context, monkeypatch):
  monkeypatch.setattr(context, '_group_size', 3)
  data = _data(8)
  for ours, theirs in zip(_invoke(context, data), _local_context(data, 3)):
    np.testing.assert_array_equal(ours, theirs)


def test_groups_in_process_agree_with_one():
  data = _data(7)
  whole = _local_context(data, 0)
  for size in (1, 2, 3, 7, 20):
    for ours, theirs in zip(_local_context(data, size), whole):
      np.testing.assert_allclose(ours, theirs, rtol=1e-5)


@tff.tensorflow.computation(
  collections.OrderedDict(
    name=np.str_, image=tff.TensorType(np.uint8, [None, 2]), flag=np.bool_
  )
)
def _echo(value):
  return value


@tff.federated_computation(
  tff.FederatedType(_echo.type_signature.parameter, tff.CLIENTS)
)
def _echo_all(values):
  return tff.federated_map(_echo, values)


def test_values_of_all_kinds_travel(context):
  values = [
    collections.OrderedDict(
      name=f'cl\0ient{index}'.encode(),
      image=np.full([index, 2], index, np.uint8),
      flag=bool(index % 2),
    )
    for index in range(3)
  ]
  result = context.invoke(_echo_all, values)
  for sent, received in zip(values, result):
    assert received['name'] == sent['name']
    assert received['flag'] == sent['flag']
    np.testing.assert_array_equal(received['image'], sent['image'])


class _Recipe:
  """Makes datasets in workers; breaks there if told to."""

  def __init__(self, refuses=False):
    self.refuses = refuses
    self.items = []

  def load(self, report):
    if self.refuses:
      raise hparams.UsageError('/data: not found')
    # Two threads of two workers: no list of this process is seen.
    return lambda index: _make(index, report)

  def received(self, item):
    self.items.append(item)


def _make(index, report):
  report((index, os.getpid()))
  return tf.data.Dataset.from_tensors(np.float32(index))


class _Cohort(list):
  """Values that are made by a recipe, and cannot be made here."""

  recipe = None

  def arguments_of(self, index):
    return (index,)


def _cohort(recipe, count):
  def fail():
    raise AssertionError('made in the wrong process')

  cohort = _Cohort([fail] * count)
  cohort.recipe = recipe
  return cohort


def test_clients_are_made_in_workers(context):
  recipe = _Recipe()
  ours = _invoke(context, _cohort(recipe, 5))
  data = [tf.data.Dataset.from_tensors(np.float32(index)) for index in range(5)]
  for mine, theirs in zip(ours, _local_context(data)):
    np.testing.assert_array_equal(mine, theirs)
  assert {index for index, _ in recipe.items} == set(range(5))
  assert os.getpid() not in {pid for _, pid in recipe.items}


@tff.tensorflow.computation(np.float32)
def _checked(x):
  with tf.control_dependencies([tf.debugging.assert_positive(x, 'too low')]):
    return tf.identity(x)


@tff.federated_computation(tff.FederatedType(np.float32, tff.CLIENTS))
def _check_all(x):
  return tff.federated_sum(tff.federated_map(_checked, x))


def test_error_of_a_client_is_that_of_in_process(context):
  found = []
  for each in (context, runtime.build_context()):
    with pytest.raises(runtime.ExecutionError, match='too low') as caught:
      each.invoke(_check_all, [1.0, 2.0, -3.0])
    found.append((caught.value.client_index, caught.value.operation))
  assert found[0] == found[1]
  assert found[0][0] == 2
  assert context.invoke(_check_all, [1.0, 2.0]) == 3.0


def _pids(context):
  names = context.pool.names
  return [int(name.split('process ')[1].rstrip(')')) for name in names]


def _end(pid):
  os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(
  'when', [pytest.param('idle', marks=pytest.mark.slow), 'at work']
)
def test_killed_worker_is_replaced(context, when):
  expected = _invoke(context, _data(6))
  while len(_pids(context)) < 2:  # Both have started.
    _invoke(context, _data(6))
  victim = _pids(context)[0]
  _TOLD.clear()
  if when == 'idle':
    _end(victim)
    time.sleep(1.0)
    result = _invoke(context, _data(6))
  else:

    class Killing(list):
      """Kills a worker while the cohort is on its way."""

      def __getitem__(self, index):
        if index == 3 and not _TOLD:
          threading.Thread(target=_end, args=[victim]).start()
          time.sleep(0.5)
        return super().__getitem__(index)

    result = _invoke(context, Killing(_data(6)))
  for ours, theirs in zip(result, expected):
    np.testing.assert_array_equal(ours, theirs)
  assert any('was lost' in line for line in _TOLD)


@pytest.mark.slow
def test_late_worker_is_replaced(context, monkeypatch):
  settings = dataclasses.replace(context.pool._settings, timeout_secs=4.0)
  monkeypatch.setattr(context.pool, '_settings', settings)
  expected = _invoke(context, _data(4))
  while len(_pids(context)) < 2:
    _invoke(context, _data(4))
  os.kill(_pids(context)[0], signal.SIGSTOP)
  _TOLD.clear()
  result = _invoke(context, _data(4))
  for ours, theirs in zip(result, expected):
    np.testing.assert_array_equal(ours, theirs)
  assert any('no answer in 4 s' in line for line in _TOLD)


def test_worker_without_data_is_refused_with_its_name(context):
  with pytest.raises(
    hparams.UsageError, match=r'worker .*process.*/data: not found'
  ):
    _invoke(context, _cohort(_Recipe(refuses=True), 3))
  context.pool._refused.clear()


def test_worker_with_other_packages_is_refused(context, monkeypatch):
  other = {**context.pool._expected, 'numpy': '0.1'}
  monkeypatch.setattr(context.pool, '_expected', other)
  context.pool.ask_again()
  with pytest.raises(hparams.UsageError, match='instead of 0.1'):
    _invoke(context, _data(2))
  context.pool._refused.clear()


@pytest.mark.slow
def test_interrupt_leaves_a_usable_context(context):
  cancelled = threading.Event()
  cancelled.set()
  with pytest.raises(asyncio.CancelledError):
    context._invoke(_two_phases, (_MODEL, _data(3)), cancelled)
  _invoke(context, _data(3))


def test_environment_names_what_must_agree():
  found = ray_worker.environment()
  assert found['tensorflow'] == tf.__version__
  assert found == ray_worker.environment()


def test_execution_error_travels():
  cause = tf.errors.InvalidArgumentError(None, None, 'bad')
  error = runtime.ExecutionError('federated_map_1', cause, client_index=3)
  copy = pickle.loads(pickle.dumps(error))
  assert str(copy) == str(error)
  assert (copy.operation, copy.client_index) == ('federated_map_1', 3)


def test_own_cluster_has_room_for_the_wanted_workers(monkeypatch):
  ray = mock.MagicMock()
  ray.is_initialized.return_value = False
  monkeypatch.setitem(sys.modules, 'ray', ray)
  wanted = 3 + len(os.sched_getaffinity(0))
  ray_context._connect(runtime.Settings('ray', ray_workers=wanted))
  assert ray.init.call_args.kwargs['num_cpus'] == wanted
  ray_context._connect(runtime.Settings('ray', ray_workers=1))
  assert ray.init.call_args.kwargs['num_cpus'] == wanted - 3


@pytest.mark.parametrize('version', ['1.10.27', '2.9.0', None])
def test_pydantic_that_keeps_ray_from_starting_is_named(monkeypatch, version):
  ray = mock.MagicMock()
  ray.is_initialized.return_value = False
  ray.init.side_effect = RuntimeError('timed out during startup\nmore')
  monkeypatch.setitem(sys.modules, 'ray', ray)
  usual = importlib.metadata.version

  def version_of(name):
    if name != 'pydantic':
      return usual(name)
    if version is None:
      raise importlib.metadata.PackageNotFoundError(name)
    return version

  monkeypatch.setattr(importlib.metadata, 'version', version_of)
  with pytest.raises(hparams.UsageError) as error:
    ray_context._connect(runtime.Settings('ray'))
  start = '--runtime=ray: Ray does not start here: timed out during startup'
  assert str(error.value).startswith(start)
  named = 'pydantic 1.10.27 is installed' in str(error.value)
  assert named == (version == '1.10.27')


@pytest.mark.parametrize(
  ['settings', 'message'],
  [
    ({'client_devices': 'gpu:0'}, 'allowed are auto, cpu, gpu'),
    ({'clients_per_gpu': 0}, 'at least 1'),
    ({'ray_workers': -1}, 'at least 0'),
  ],
)
def test_mistakes(settings, message):
  with pytest.raises(hparams.UsageError, match=message):
    runtime.Settings('ray', **settings)


def test_a_lost_head_is_told_once_each_time(monkeypatch):
  looks, told = iter('there gone gone there gone'.split()), []

  def check(address):
    assert address == 'host:1'
    if next(looks) == 'gone':
      raise OSError('refused')

  monkeypatch.setattr(ray_context, '_check_port', check)
  is_closed = mock.Mock()
  is_closed.wait.side_effect = [False] * 5 + [True]
  ray_context.watch_head('host:1', told.append, is_closed)
  assert len(told) == 2
  assert told[0].startswith('the head of the cluster, host:1, does not answer')
