"""A worker's part of the Ray runtime, without Ray."""

import pickle

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tff_fssl.hparams import UsageError
from tff_fssl.runtime import portable
from tff_fssl.runtime import program
from tff_fssl.runtime import ray_worker
from tff_fssl.runtime import values


@tff.tensorflow.computation(np.int32)
def _check(x):
  with tf.control_dependencies([tf.debugging.assert_less(x, 100)]):
    return tf.identity(x)


@tff.federated_computation(tff.FederatedType(np.int32, tff.CLIENTS))
def _sum(x):
  return tff.federated_sum(tff.federated_map(_check, x))


class _Refuses:
  """A recipe that finds no data on this machine."""

  def load(self, report):
    del report
    raise UsageError('no data here')


@pytest.fixture(name='worker', scope='module')
def _worker():
  threads = []
  with pytest.MonkeyPatch.context() as patch:
    # TensorFlow has started here, and would refuse it.
    patch.setattr(
      tf.config.threading, 'set_intra_op_parallelism_threads', threads.append
    )
    worker = ray_worker.Worker(
      ray_worker.WorkerSettings(False, 1, 3, False, True)
    )
  assert threads == [3]
  return worker


def _run(worker, numbers, first=0, recipes=()):
  compiled = program.compile_program(_sum, merges=True)
  argument = values.Argument(
    numbers, compiled.parameter_type, compiled.parameter, compiled.readers
  )
  (phase,) = compiled.phases
  server = dict(
    zip(
      compiled.stages[0].outputs, compiled.stages[0]([], device='/device:CPU:0')
    )
  )
  clients = [
    portable.encode_client(argument, i, phase.reads, [])
    for i in range(len(numbers))
  ]
  return worker.run_group(
    'digest of the sum',
    ray_worker.dump_computation(_sum),
    list(recipes),
    portable.encode_server(phase, server),
    ray_worker.Group(0, first, clients, []),
  )


def test_a_group_is_accumulated(worker):
  done = _run(worker, [3, 4, 5], first=7)
  assert isinstance(done, ray_worker.Done)
  assert [int(total) for total in done.totals] == [12]
  assert done.kept == [] and done.reports == [] and done.seconds >= 0


def test_a_failure_names_the_client_and_can_be_sent(worker):
  failed = _run(worker, [3, 400], first=7)
  assert isinstance(failed, ray_worker.Failed)
  assert 'client 8' in str(pickle.loads(pickle.dumps(failed)).error)
  # The worker still works.
  assert isinstance(_run(worker, [1]), ray_worker.Done)


def test_a_worker_without_data_refuses(worker):
  refused = _run(worker, [1], recipes=[pickle.dumps(_Refuses())])
  assert refused == ray_worker.Refused('no data here')


def test_a_worker_describes_itself(worker, monkeypatch):
  monkeypatch.setenv('RAY_AUTH_MODE', 'Token')
  found = worker.describe()
  assert found.has_token and found.environment == ray_worker.environment()
  assert {'python', 'tensorflow', 'source of tff_fssl'} <= set(
    found.environment
  )


def test_a_computation_survives():
  loaded = ray_worker.load_computation(ray_worker.dump_computation(_sum))
  assert str(loaded.type_signature) == str(_sum.type_signature)


def test_an_error_that_cannot_be_pickled_is_replaced():
  class LocalError(Exception):
    """Known in this function only."""

  error = ray_worker._portable_error(LocalError('why'))
  assert type(error) is RuntimeError and str(error) == 'LocalError: why'
