"""Clients that send what an honest program could not."""

import collections
import math

import handmade
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff
import tiny_plan
import tiny_rounds
import tiny_task

from tff_fssl.aggregators import guarded
from tff_fssl.algorithms import registry
from tff_fssl.client import training
from tff_fssl.interface import base
from tff_fssl.models import adapter
from tff_fssl.models import statistics
from tff_fssl.rounds import screen as screen_lib
from tff_fssl.rounds import statistics_phase

_SERVER = 'labels_at_server'
_LIAR = 77


def _report(**changed):
  report = collections.OrderedDict(
    is_finite=True,
    reports=True,
    num_examples=10.0,
    ratios=collections.OrderedDict(loss=np.array([20.0, 10.0], np.float32)),
    ranges=collections.OrderedDict(threshold=0.5),
    uploads=collections.OrderedDict(divergence=1.5),
  )
  for name, value in changed.items():
    groups = ('ratios', 'ranges', 'uploads')
    group = next((g for g in groups if name in report[g]), None)
    (report[group] if group else report)[name] = value
  return report


def _result(update=1.0, weight=0.5, summed=1.0):
  update, summed = (np.full([2], v, np.float32) for v in (update, summed))
  return tff.learning.templates.ClientResult(
    collections.OrderedDict(model=[update], summed=summed), weight
  )


_TYPES = tff.to_type(
  (
    tff.learning.templates.ClientResult(
      collections.OrderedDict(
        model=[(np.float32, [2])], summed=(np.float32, [2])
      ),
      np.float32,
    ),
    collections.OrderedDict(
      is_finite=np.bool_,
      reports=np.bool_,
      num_examples=np.float32,
      ratios=collections.OrderedDict(loss=(np.float32, [2])),
      ranges=collections.OrderedDict(threshold=np.float32),
      uploads=collections.OrderedDict(divergence=np.float32),
    ),
  )
)


@pytest.fixture(scope='module')
def screen():
  """The check, and what the guard makes of its result, over a cohort."""
  bounds = screen_lib.Bounds(
    guarded.AllowedWeights(1.0), num_examples=100.0, num_counted=100.0
  )
  algorithm = handmade.algorithm(
    uploads=lambda setup: {
      'divergence': base.Upload(1.0, 2.0),
      'summed': base.Upload(0.0, 5.0, base.SUM, tf.TensorSpec([2])),
    },
    is_possible=lambda uploads: tf.reduce_sum(uploads['summed']) < 8.0,
  )
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(screen_lib, 'build_bounds', lambda _: bounds)
    of_client = screen_lib.build_screen(tiny_plan.bare(algorithm), *_TYPES)
  aggregator = guarded.GuardedFactory(
    tff.aggregators.MeanFactory(), bounds.weights
  ).create(_TYPES[0].update, _TYPES[0].update_weight)

  @tff.federated_computation(tff.FederatedType(_TYPES, tff.CLIENTS))
  def run(sent):
    result, (sums, minima, maxima) = tff.federated_map(of_client, sent)
    output = aggregator.next(
      aggregator.initialize(), result.update, result.update_weight
    )
    return (
      output.result,
      output.measurements,
      tff.federated_sum(sums),
      tff.federated_min(minima),
      tff.federated_max(maxima),
    )

  return run


@pytest.mark.parametrize(
  'lie',
  [
    (_result(weight=100.0), _report()),
    (_result(weight=-1.0), _report()),
    (_result(weight=np.nan), _report()),
    (_result(update=np.nan), _report()),
    (_result(update=np.inf), _report()),
    (_result(9.0), _report(num_examples=-5.0)),
    (_result(9.0), _report(num_examples=1e12)),
    (_result(9.0), _report(num_examples=np.nan)),
    (_result(9.0), _report(loss=np.array([1.0, -10.0], np.float32))),
    (_result(9.0), _report(loss=np.array([1.0, 1e12], np.float32))),
    (_result(9.0), _report(loss=np.array([np.nan, 1.0], np.float32))),
    (_result(9.0), _report(loss=np.array([1e30, 1.0], np.float32))),
    (_result(9.0), _report(threshold=-99.0)),
    (_result(9.0), _report(threshold=1.5)),
    (_result(9.0), _report(threshold=np.nan)),
    (_result(9.0), _report(divergence=0.5)),
    (_result(9.0), _report(divergence=1e30)),
    (_result(9.0), _report(divergence=np.nan)),
    (_result(9.0, summed=-1.0), _report()),
    (_result(9.0, summed=np.nan), _report()),
    (_result(9.0, summed=4.5), _report()),
    # It counts by its weight, whatever the report says.
    (_result(9.0, summed=-1.0), _report(reports=False)),
  ],
)
def test_lies_are_rejected_with_all_that_came_with_them(screen, lie):
  honest = [(_result(), _report()), (_result(3.0), _report(threshold=0.25))]
  mean, measurements, sums, minima, maxima = screen([honest[0], lie, honest[1]])
  np.testing.assert_allclose(mean['model'][0], [2.0, 2.0])
  assert measurements['num_rejected_clients'] == 1
  assert measurements['num_weighted_clients'] == 2
  assert sums['num_clients'] == 3
  assert sums['num_rejected_clients'] == 1
  assert sums['num_non_finite_clients'] == 0
  assert sums['num_examples'] == 20.0
  assert sums['weight'] == 1.0
  np.testing.assert_allclose(sums['ratios']['loss'], [40.0, 20.0])
  assert (minima['threshold'], maxima['threshold']) == (0.25, 0.5)
  assert maxima['aggregation_weight'] == 0.5


def test_an_honest_client_whose_update_is_not_finite_is_no_liar(screen):
  failed = _report(is_finite=False, reports=False, num_examples=0.0)
  _, measurements, sums, *_ = screen(
    [(_result(), _report()), (_result(0.0, 0.0), failed)]
  )
  assert sums['num_rejected_clients'] == 0
  assert sums['num_non_finite_clients'] == 1
  assert measurements['num_rejected_clients'] == 0


def test_a_client_without_a_wrong_pseudo_label_is_no_liar(screen):
  # A ratio of correct to wrong ones.
  honest = _report(loss=np.array([5.0, 0.0], np.float32))
  _, measurements, sums, *_ = screen([(_result(), honest)])
  assert sums['num_rejected_clients'] == 0
  assert measurements['num_rejected_clients'] == 0


def _sums(first, second, count):
  as_tensor = lambda v: tf.constant(v, tf.float32)
  return statistics.Sums(
    (as_tensor([first, 0.0]),), (as_tensor([second, count]),), as_tensor(count)
  )


_HOSTILE = st.one_of(
  st.floats(width=32),
  st.sampled_from([1e30, -1e30, 1.9e19, 1e12, 1e-45, -0.0, 3.4e38, 77.5]),
)


@given(
  numbers=st.lists(_HOSTILE, min_size=6, max_size=6),
  flags=st.tuples(st.booleans(), st.booleans()),
)
@settings(max_examples=40)
def test_whatever_a_client_sends(screen, numbers, flags):
  """Sums stay finite, and what was rejected counts for nothing."""
  update, weight, num, total, count, threshold = map(np.float32, numbers)
  lie = (
    _result(update, weight),
    _report(
      is_finite=flags[0],
      reports=flags[1],
      num_examples=num,
      loss=np.array([total, count], np.float32),
      threshold=threshold,
    ),
  )
  honest = (_result(), _report())
  mean, measurements, sums, minima, maxima = screen([honest, lie])
  assert np.all(np.isfinite(mean['model'][0]))
  for value in tf.nest.flatten(sums):
    assert np.all(np.isfinite(value))
  assert -1e-3 <= minima['threshold'] <= maxima['threshold'] <= 1.001
  assert 0 <= maxima['aggregation_weight'] <= 1
  assert sums['num_rejected_clients'] == measurements['num_rejected_clients']
  if sums['num_rejected_clients']:
    assert sums['num_examples'] == 10.0
    np.testing.assert_array_equal(mean['model'][0], [1.0, 1.0])


@given(numbers=st.lists(_HOSTILE, min_size=3, max_size=3))
@settings(max_examples=60)
@pytest.mark.parametrize('kind', ['pooled', 'median', 'batch_mean'])
def test_whatever_statistics_a_client_sends(batch_norm, kind, numbers):
  """Possible or not, the model's statistics stay finite and not negative."""
  network, weights = batch_norm
  lie = statistics.Sums(
    (tf.constant([numbers[0]]),),
    (tf.constant([numbers[1]]),),
    tf.constant(numbers[2]),
  )
  if not statistics_phase.is_possible(lie, kind=kind, max_examples=100):
    return
  honest = statistics.Sums(
    (tf.constant([3.0]),), (tf.constant([9.0]),), tf.constant(10.0)
  )
  if kind == 'median':
    rows = [statistics.encode_row(s) for s in (honest, honest, lie)]
    sums = statistics.combine_rows(network, tf.concat(rows, 0))
  else:
    sums = tf.nest.map_structure(tf.add, honest, lie)
  new = statistics.put(network, weights, sums, kind=kind)
  assert np.all(np.isfinite(new.non_trainable[0]))
  assert np.all(new.non_trainable[1] >= 0.0)
  assert np.all(np.isfinite(new.non_trainable[1]))
  if kind == 'median':
    np.testing.assert_allclose(new.non_trainable[0], [0.3], rtol=1e-5)
    np.testing.assert_allclose(new.non_trainable[1], [0.81], rtol=1e-4)


@pytest.fixture(scope='module')
def batch_norm():
  """Batch norm of a single number, and its weights."""
  network = adapter.Network(
    lambda: tf.keras.Sequential(
      [tf.keras.Input([1]), tf.keras.layers.BatchNormalization()]
    ),
    seed=0,
  )
  return network, network.initial_weights()


@pytest.mark.parametrize(
  'kind, sums, expected',
  [
    ('pooled', (30.0, 95.0, 10.0), True),
    ('pooled', (30.0, 90.0, 10.0), True),  # A variance of 0.
    ('pooled', (0.0, 0.0, 0.0), True),
    ('pooled', (30.0, 80.0, 10.0), False),  # A negative one.
    ('pooled', (30.0, 95.0, -10.0), False),
    ('pooled', (30.0, 95.0, 1e9), False),
    ('pooled', (30.0, 1e6, 0.5), False),
    ('pooled', (np.nan, 95.0, 10.0), False),
    ('pooled', (30.0, np.inf, 10.0), False),
    ('pooled', (5.0, 5.0, 0.0), False),
    ('pooled', (0.0, 5.0, 0.0), False),
    ('pooled', (1e30, 3e38, 10.0), False),
    ('median', (30.0, 95.0, 10.0), True),
    ('median', (30.0, 80.0, 10.0), False),
    ('batch_mean', (30.0, 5.0, 2.0), True),
    ('batch_mean', (30.0, -5.0, 2.0), False),
  ],
)
def test_statistics_that_no_client_can_have(kind, sums, expected):
  possible = statistics_phase.is_possible(
    _sums(*sums), kind=kind, max_examples=1000
  )
  assert bool(possible) == expected


def _lying(lie, liar):
  """`LocalTraining.run`, which lies if it is of the liar's seed."""
  honest = training.LocalTraining.run

  def run(self, *args, seed, **kwargs):
    result = honest(self, *args, seed=seed, **kwargs)
    lies = tf.equal(seed[0], liar)
    return lie(result, lambda bad, good: tf.where(lies, bad, good))

  return run


def _weigh_100(result, choose):
  if result.weight is None:  # The server's own training.
    return result
  return result._replace(weight=choose(100.0, result.weight))


def _send_nan(result, choose):
  return result._replace(update=tuple(choose(np.nan, u) for u in result.update))


def _boast(result, choose):
  return result._replace(num_examples=choose(1e12, result.num_examples))


@pytest.mark.parametrize(
  'name, lies',
  [('fl2', (_weigh_100, _send_nan)), ('fixmatch', (_send_nan, _boast))],
)
def test_liars_change_neither_model_nor_metrics(monkeypatch, name, lies):
  for i, lie in enumerate(lies):
    run = _lying(lie, _LIAR + i)
    monkeypatch.setattr(training.LocalTraining, 'run', run)
  # Group norm's stand-in: in the statistics phase the client is honest.
  process = tiny_task.build.__wrapped__(name, _SERVER, norm='none')
  state = process.next(process.initialize(), []).state
  cohort = tiny_task.cohort(_SERVER)
  liars = [tiny_task.client(5) for _ in lies]
  for i, liar in enumerate(liars):
    liar['seed'] = np.array([_LIAR + i, 1], np.int32)
  run = lambda elements: process.next(
    state, [tiny_task.dataset(e) for e in elements]
  )
  expected, honest = run(cohort)
  actual, metrics = run([*cohort[:2], *liars, cohort[2]])
  for a, b in zip(
    tiny_task.flat(actual), tiny_task.flat(expected), strict=True
  ):
    np.testing.assert_allclose(a, b, atol=1e-6)
  train, honest = (m['client_work']['train'] for m in (metrics, honest))
  assert train['num_rejected_clients'] == 2
  assert train['num_clients'] == 5
  assert metrics['aggregator']['num_rejected_clients'] == 2
  for metric in honest:
    if metric not in ('num_clients', 'num_rejected_clients'):
      np.testing.assert_allclose(train[metric], honest[metric], rtol=1e-5)
  # A round of liars alone leaves the state.
  alone, _ = run(liars)
  for a, b in zip(tiny_task.flat(alone), tiny_task.flat(state), strict=True):
    np.testing.assert_array_equal(a, b)


_NAN = float('nan')
_LOG_3 = math.log(3)
_IN_SUMS = {'prototypes': 'global'}
# Algorithm, its hyper-parameters, and lies in what its clients send beside the
# update.
_OF_UPLOADS = [
  ('cbafed', {}, [{'counts': 9.0}, {'weight': 9.0}]),
  ('feddb', {}, [{'app_u': 9.0}, {'change': 1e30}]),
  ('feddb', {'weights': 'last_mean'}, [{'app_u': 9.0}, {'weight': 9.0}]),
  (
    'fedmatch',
    {},
    [
      {'psi': _NAN},
      {'sigma': 1e30},
      {'embedding': 0.9},
      {'embedding': _NAN},
      {'rate': 2.0},
      {'remaining': -1.0},
      {'lowest': _NAN},
    ],
  ),
  (
    'fedswitch',
    {},
    [
      {name: lie}
      for name in ('student_divergence', 'teacher_divergence', 'is_measured')
      for lie in (_NAN, math.inf, -math.inf, 1e30, -1.0, _LOG_3 + 0.1)
    ],
  ),
  (
    'protofssl',
    {},
    [
      {'prototypes': _NAN},
      {'prototypes': math.inf},
      {'prototypes': 1e30},
      {'prototypes': 1.0, 'exists': False},
    ],
  ),
  (
    'protofssl',
    _IN_SUMS,
    [
      {'sums': _NAN},
      {'sums': 1e30},
      {'counts': -0.1},
      {'counts': _NAN},
      {'sums': 0.1, 'counts': 0.0},
      {'counts': 50.0},
    ],
  ),
  ('proxyfl', {}, [{'counts': 9.0}, {'proxies_kernel': 1e13}]),
]


def _lying_in_uploads(lies):
  """`LocalTraining.run`; the client of seed 77 + i tells lie i."""
  honest = training.LocalTraining.run

  def run(self, *args, seed, **kwargs):
    result = honest(self, *args, seed=seed, **kwargs)
    if not result.uploads:  # The server's own training.
      return result
    values = {**result.uploads, 'weight': result.weight}
    for i, lie in enumerate(lies):
      for name, value in lie.items():
        good = tf.convert_to_tensor(values[name])
        bad = tf.fill(tf.shape(good), tf.cast(value, good.dtype))
        values[name] = tf.where(tf.equal(seed[0], _LIAR + i), bad, good)
    weight = values.pop('weight')
    return result._replace(uploads=values, weight=weight)

  return run


@pytest.mark.parametrize('name, own, lies', _OF_UPLOADS)
def test_lies_in_uploads_change_nothing(monkeypatch, name, own, lies):
  monkeypatch.setattr(training.LocalTraining, 'run', _lying_in_uploads(lies))
  scenario = registry.REGISTRY[name].scenarios[-1]
  process = tiny_task.build.__wrapped__(
    name, scenario, norm='none', hparams=tuple(own.items())
  )
  honest = tiny_task.cohort(scenario)
  cohort = [tiny_task.dataset(element, process) for element in honest]
  liars = []
  for i in range(len(lies)):
    liar = tiny_task.client(5, labeled=len(honest[0]['labeled']['y']))
    liar['seed'] = np.array([_LIAR + i, 1], np.int32)
    if process.num_clients:  # Of its own, or it would be rejected for that.
      liar['client_id'] = np.int32(len(honest) + i)
    liars.append(tf.data.Dataset.from_tensors(liar))
  state = process.initialize()
  if int(state.client_work) < 1:
    state = process.next(state, []).state
  expected = process.next(state, cohort).state
  actual, metrics = process.next(state, [*cohort, *liars])
  train = metrics['client_work']['train']
  assert train['num_rejected_clients'] == len(lies)
  tiny_rounds.assert_same(
    tiny_task.flat(actual), tiny_task.flat(expected), atol=1e-6
  )
  # A round of liars alone leaves the state.
  alone = process.next(expected, liars).state
  tiny_rounds.assert_same(tiny_task.flat(alone), tiny_task.flat(expected))


def _send_statistics(sums, choose):
  """Allowed by their count, absurd in their moments."""
  return statistics.Sums(
    tuple(choose(1e8 * sums.count, f) for f in sums.first),
    tuple(choose(1e17 * sums.count, s) for s in sums.second),
    sums.count,
  )


@pytest.mark.parametrize('kind', ['pooled', 'median'])
def test_a_liar_among_five_does_not_own_the_statistics(monkeypatch, kind):
  honest = statistics_phase.client_sums

  def lying(network, weights, data, **settings):
    sums = honest(network, weights, data, **settings)
    lies = tf.equal(data['seed'][0], _LIAR)
    return _send_statistics(sums, lambda bad, good: tf.where(lies, bad, good))

  monkeypatch.setattr(statistics_phase, 'client_sums', lying)
  process = tiny_task.build.__wrapped__(
    'fixmatch', _SERVER, batch_norm_statistics=kind
  )
  state = process.initialize()
  cohort = tiny_task.cohort(_SERVER, 4)
  liar = tiny_task.client(5)
  liar['seed'] = np.array([_LIAR, 1], np.int32)
  means = [
    process.next(
      state, [tiny_task.dataset(e) for e in elements]
    ).state.global_model_weights.non_trainable[0]
    for elements in (cohort, [*cohort, liar])
  ]
  # A sum's owner is whoever lies most; a median's never.
  moved = np.max(np.abs(means[1] - means[0]))
  assert moved > 1e6 if kind == 'pooled' else moved < 0.2
