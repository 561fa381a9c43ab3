"""The workers of a cluster, with a stand-in for Ray."""

import types

import pytest

from tff_fssl.hparams import UsageError
from tff_fssl.runtime import errors
from tff_fssl.runtime import ray_pool
from tff_fssl.runtime import ray_worker


class _RayError(Exception):
  """The end of a worker."""


class _TaskError(_RayError):
  """A bug in a task."""


class _Reference:
  """A reference to a result, which the pool keeps as a key."""

  def __init__(self, get):
    self.get = get


class _Actor:
  """A worker that gives what `_Ray.work` says."""

  def __init__(self, ray, name):
    self.name = name
    self.describe = types.SimpleNamespace(remote=lambda: ray.ask(self))


class _Ray:
  """The functions of Ray that the pool calls, all at once."""

  exceptions = types.SimpleNamespace(
    RayError=_RayError, RayTaskError=_TaskError
  )

  def __init__(self, work, cpus=2, has_token=True, environment=None):
    self.work, self.cpus = work, cpus
    self.described = ray_worker.environment()
    self.described.update(environment or {})
    self.has_token = has_token
    self.killed, self.started = [], 0

  def cluster_resources(self):
    return {'CPU': self.cpus}

  def remote(self, cls):
    assert cls is ray_worker.Worker

    def start(settings):
      del settings
      self.started += 1
      return _Actor(self, f'worker {self.started}')

    options = types.SimpleNamespace(remote=start)
    return types.SimpleNamespace(options=lambda **kwargs: options)

  def ask(self, actor):
    return _Reference(
      lambda: ray_worker.Description(
        actor.name, self.described, self.has_token, ()
      )
    )

  def submit(self, actor, group):
    return _Reference(lambda: self.work(actor, group))

  def wait(self, references, num_returns, timeout):
    del timeout
    return references[-num_returns:], references[:-num_returns]

  def get(self, reference):
    return reference.get()

  def kill(self, actor):
    self.killed.append(actor.name)


def _done(group):
  return ray_worker.Done([group], [], [], 0.0)


def _run(ray, count, warn=lambda message: None, num_workers=2):
  settings = ray_pool.PoolSettings(
    num_workers, 1.0, 0.0, 0.0, False,
    ray_worker.WorkerSettings(False, 1, 1, False, True),
  )  # fmt: skip
  pool = ray_pool.Pool(ray, settings, warn)
  consumed = []
  pool.run(
    count,
    ray.submit,
    lambda group, done: consumed.append((group, done.totals)),
    lambda: None,
  )
  pool.close()
  return consumed


def test_results_are_consumed_in_order():
  ray = _Ray(lambda actor, group: _done(group))
  assert _run(ray, 7) == [(i, [i]) for i in range(7)]
  assert ray.started == 2 and len(set(ray.killed)) == 2
  assert _run(_Ray(None), 0) == []


def test_as_many_workers_as_the_cluster_has_room_for():
  ray = _Ray(lambda actor, group: _done(group), cpus=3)
  _run(ray, 4, num_workers=0)
  assert ray.started == 3


def test_a_lost_worker_is_replaced_and_its_group_repeated():
  warnings, lost = [], []

  def work(actor, group):
    if group == 1 and not lost:
      lost.append(actor.name)
      raise _RayError('the machine\n is gone')
    return _done(group)

  ray = _Ray(work)
  assert _run(ray, 4, warnings.append) == [(i, [i]) for i in range(4)]
  assert lost[0] in ray.killed and ray.started == 3
  assert warnings == [
    f'Worker {lost[0]} was lost (the machine is gone); another one repeats its'
    ' clients.'
  ]


def test_a_group_that_loses_every_worker_is_given_up():
  def work(actor, group):
    raise _RayError('out of memory')

  with pytest.raises(errors.WorkerError, match='lost its worker 5 times'):
    _run(_Ray(work), 1)


def test_an_error_of_a_client_is_raised():
  error = errors.ExecutionError('op', ValueError('x'), client_index=3)
  with pytest.raises(errors.ExecutionError, match='client 3'):
    _run(_Ray(lambda actor, group: ray_worker.Failed(error)), 3)


def test_a_refusing_worker_is_not_used_again():
  warnings = []

  def work(actor, group):
    if actor.name == 'worker 1':
      return ray_worker.Refused('no data here')
    return _done(group)

  assert len(_run(_Ray(work), 5, warnings.append)) == 5
  assert warnings == ['worker worker 1 is not used: no data here.']
  with pytest.raises(UsageError, match='no data here'):
    _run(_Ray(lambda actor, group: ray_worker.Refused('no data here')), 5)


@pytest.mark.parametrize(
  'kwargs, words',
  [
    ({'has_token': False}, '--ray_trusted_network'),
    ({'environment': {'numpy': '0.1'}}, 'numpy 0.1'),
  ],
)
def test_workers_that_differ_are_refused(kwargs, words):
  with pytest.raises(UsageError) as error:
    _run(_Ray(lambda actor, group: _done(group), **kwargs), 2)
  assert words in str(error.value)
