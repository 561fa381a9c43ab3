"""The robust mean, and every aggregator, against clients that lie."""

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import numpy as np
import pytest
import tensorflow_federated as tff

from tff_fssl.aggregators import factory
from tff_fssl.aggregators import guarded
from tff_fssl.aggregators import hparams as aggregator_hparams
from tff_fssl.aggregators import robust

_VALUE_TYPE = tff.to_type([(np.float32, [3])])
_SHARE = guarded.AllowedWeights(1.0)


def _create(inner, allowed=_SHARE):
  return guarded.GuardedFactory(inner, allowed).create(
    _VALUE_TYPE, tff.TensorType(np.float32)
  )


@pytest.fixture(scope='module')
def process():
  return _create(robust.RobustMeanFactory())


def _next(process, rows, weights, state=None):
  values = [[np.array(row, np.float32)] for row in rows]
  state = process.initialize() if state is None else state
  return process.next(state, values, [np.float32(w) for w in weights])


def _lower_median(rows):
  return np.sort(rows, axis=0)[(len(rows) - 1) // 2]


def _reference(rows, weights, before):
  """Clips, mixes and takes the geometric median in float64, by points."""
  rows, weights = (np.array(a, np.float64) for a in (rows, weights))
  rows, weights = rows[weights > 0], weights[weights > 0]
  norms = np.linalg.norm(rows, axis=1)
  median = _lower_median(norms)
  limit = min(median, 2 * before)
  weights = np.minimum(weights, _lower_median(weights))
  keeps = norms <= 10 * median
  rows = (rows * np.minimum(1, limit / norms)[:, None])[keeps]
  weights = weights[keeps]
  num, mixed = len(rows), []
  for row in rows:
    distances = np.linalg.norm(rows - row, axis=1)
    nearest = np.argsort(distances)[: num - int(0.4 * num)]
    mixed.append(np.average(rows[nearest], axis=0, weights=weights[nearest]))
  apart = np.linalg.norm(np.array(mixed)[:, None] - np.array(mixed), axis=-1)
  medians = _lower_median(apart.T)
  near = apart[medians.argmin()] <= medians.min()
  point = np.average(mixed, axis=0, weights=weights * near)
  for _ in range(8):
    distances = np.linalg.norm(mixed - point, axis=1)
    distances = np.maximum(distances, 1e-3 * _lower_median(distances) + 1e-30)
    point = np.average(mixed, axis=0, weights=weights / distances)
  return point, max(limit, before / 2)


def test_three_steps(process):
  rng, state, before = np.random.default_rng(3), None, 1.0
  for num in (5, 3, 7, 20, 4):
    rows = rng.normal(0.2, 1.0, [num, 3])
    rows[0] *= 50.0  # Is skipped.
    rows[-1] *= 3.0
    weights = rng.uniform(0.1, 1.0, num)
    if num > 5:
      weights[1] = 0.0
    output = _next(process, rows, weights, state)
    expected, before = _reference(rows, weights, before)
    np.testing.assert_allclose(output.result[0], expected, rtol=1e-4)
    state = output.state
    assert state['median_norm'] == pytest.approx(before)
    assert output.measurements['inner']['num_left_out'] == 1
    assert output.measurements['inner']['limits'] == state


def test_tensors_of_a_client_belong_together():
  types = tff.to_type([(np.float32, [2]), (np.float32, [1, 1])])
  two = guarded.GuardedFactory(robust.RobustMeanFactory(), _SHARE).create(
    types, tff.TensorType(np.float32)
  )
  rows = np.random.default_rng(0).normal(size=[5, 3]).astype(np.float32)
  values = [[row[:2], row[2:, None]] for row in rows]
  result = two.next(two.initialize(), values, [np.float32(1)] * 5).result
  expected, _ = _reference(rows, np.ones(5), 1.0)
  np.testing.assert_allclose(
    np.concatenate([result[0], result[1][0]]), expected, rtol=1e-5
  )


@pytest.mark.parametrize(
  'num_liars, num_others', [(1, 0), (2, 0), (1, 1), (3, 4), (9, 11)]
)
def test_liars_who_alone_weigh_anything(process, num_liars, num_others):
  """Nobody could outvote them: nothing moves, neither model nor limits."""
  honest, lie = [0.0, 3.0, 4.0], [1e11] * 3
  state = _next(process, [honest] * 5, [1.0] * 5).state
  for _ in range(3):
    rows = [lie] * num_liars + [honest] * num_others
    weights = [1.0] * num_liars + [0.0] * num_others
    output = _next(process, rows, weights, state)
    assert np.all(np.isnan(output.result[0]))
    assert output.state == state
    assert output.measurements['inner']['too_few_clients'] == 1
    assert output.measurements['inner']['num_clipped'] == 0


def test_clients_that_weigh_nothing_are_not_asked(process):
  state = _next(process, [[0, 3, 4]] * 3, [1.0] * 3).state
  far = [[0, 0, 900], [0, 0, -900]]
  rows, weights = [[0, 3, 4]] * 3 + far, [0.5] * 3 + [0.0] * 2
  output = _next(process, rows, weights, state)
  np.testing.assert_allclose(
    output.result[0], np.array([0, 3, 4]) * 4.0 / 5.0, rtol=1e-6
  )
  for rows, weights in (([], []), ([[0, 6, 8]] * 3, [0.0] * 3)):
    output = _next(process, rows, weights, state)
    assert output.state == state
    assert np.all(np.isnan(output.result[0]))
    assert output.measurements['inner']['too_few_clients'] == 0


def test_updates_of_0(process):
  state, limit = None, 1.0
  for _ in range(25):
    output = _next(process, [[0, 0, 0]] * 3, [1.0] * 3, state)
    np.testing.assert_array_equal(output.result[0], [0, 0, 0])
    state, limit = output.state, max(limit / 2, 1e-6)
    assert state['median_norm'] == pytest.approx(limit)
  # Nothing stays locked at 0.
  for _ in range(25):
    state = _next(process, [[0, 3, 4]] * 3, [1.0] * 3, state).state
  assert state['median_norm'] == 5.0


def test_a_round_of_liars_does_not_open_the_next(process):
  honest, lie = [0.0, 3.0, 4.0], [1e11, 1e11, 1e11]
  state = None
  for limit in (2.0, 4.0, 5.0):
    state = _next(process, [honest] * 5, [1.0] * 5, state).state
    assert state['median_norm'] == limit
  output = _next(process, [honest] * 2 + [lie] * 3, [1.0] * 5, state)
  assert np.linalg.norm(output.result[0]) <= 10.0 * (1 + 1e-6)
  assert output.state['median_norm'] == 10.0
  output = _next(process, [honest] * 4 + [lie], [1.0] * 5, output.state)
  np.testing.assert_allclose(output.result[0], honest, rtol=1e-6)
  assert output.state['median_norm'] == 5.0


@pytest.mark.parametrize('size', [10.0, 1e3, 1e5, 1e7, 1e12])
@pytest.mark.parametrize('num_honest, num_liars', [(9, 1), (6, 2), (3, 2)])
def test_without_limits(num_honest, num_liars, size):
  unlimited = robust.RobustMeanFactory(clipping=False, zeroing_multiple=0.0)
  rng = np.random.default_rng(0)
  honest = 1.0 + 0.1 * rng.normal(size=[num_honest, 3])
  rows = [*honest, *[[-size] * 3] * num_liars]
  output = _next(_create(unlimited), rows, [1.0] * len(rows))
  np.testing.assert_allclose(output.result[0], np.ones(3), atol=0.15)


def test_options():
  plain = _create(robust.RobustMeanFactory(clipping=False, zeroing_multiple=0))
  rows = [[0, 0, 1], [0, 0, 1], [300, 0, 1]]
  output = _next(plain, rows, [1.0] * 3)
  # Two are [0, 0, 1] after mixing, and so is the median, nearly.
  np.testing.assert_allclose(output.result[0], [0, 0, 1], atol=1.0)
  measured = output.measurements['inner']
  assert (measured['num_clipped'], measured['num_left_out']) == (0, 0)
  usual = _next(_create(robust.RobustMeanFactory()), rows, [1.0] * 3)
  assert usual.measurements['inner']['num_left_out'] == 1


_HOSTILE = st.one_of(
  st.floats(width=32),
  st.sampled_from([1e30, -1e30, 1.9e19, 1e12, -1e12, 1e-45, -0.0, 3.4e38]),
)
_NAMES = ('mean', 'robust', 'secure', 'compression')


@pytest.fixture(scope='module')
def processes():
  return {
    name: _create(
      factory.build_aggregator(aggregator_hparams.AggregatorHparams(name))
    )
    for name in _NAMES
  }


@pytest.mark.parametrize('name', _NAMES)
@given(
  lie=st.lists(_HOSTILE, min_size=3, max_size=3),
  weight=_HOSTILE,
  rounds=st.integers(1, 2),
)
@settings(max_examples=25)
def test_whatever_one_client_sends(processes, name, lie, weight, rounds):
  """The result is finite, or the lie was counted; robust ones stay close."""
  process, state = processes[name], None
  honest = [[0.1, -0.2, 0.3], [0.2, 0.0, 0.3], [0.1, -0.1, 0.2]]
  for _ in range(rounds + 1):
    output = _next(process, [*honest, lie], [0.5, 0.4, 0.6, weight], state)
    state = output.state
    assert np.all(np.isfinite(output.result[0]))
    assert output.measurements['num_weighted_clients'] >= 3
  if name == 'robust':
    assert np.linalg.norm(output.result[0] - np.mean(honest, axis=0)) < 0.4


@pytest.mark.parametrize('liars', [1, 2])
@pytest.mark.parametrize('factor', [-1.0, -10.0, 1e11])
def test_a_minority_does_not_turn_the_mean_around(process, liars, factor):
  """Sign flips of any size at the largest weight, round after round."""
  rng, state = np.random.default_rng(0), None
  for num_round in range(8):
    direction = np.array([0.6, 0.0, 0.8])
    honest = direction + rng.normal(0, 0.1, [5 - liars, 3])
    rows = [*honest, *([factor * direction] * liars)]
    weights = [0.2] * (5 - liars) + [1.0] * liars
    output = _next(process, rows, weights, state)
    state = output.state
    if num_round:  # Nobody knows what weights are usual in the first.
      assert output.result[0] @ direction > 0.1
