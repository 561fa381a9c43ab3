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


def test_limits_are_medians_of_the_round_before(process):
  rows = [[0.3, 0.4, 0], [0, 3, 4], [-300, 0, 0]]
  first = _next(process, rows, [0.25, 0.5, 1.0])
  # All clipped to 1, or below it; weights as they are.
  np.testing.assert_allclose(
    first.result[0], [(0.075 - 1) / 1.75, 0.4 / 1.75, 0.4 / 1.75], rtol=1e-6
  )
  assert dict(first.state) == {'median_norm': 5.0, 'median_weight': 0.5}
  second = _next(process, rows, [0.25, 0.5, 1.0], first.state)
  # The last is left out; the others weigh as they say.
  np.testing.assert_allclose(
    second.result[0], [0.1, (0.1 + 1.5) / 0.75, 2.0 / 0.75], rtol=1e-6
  )
  measured = second.measurements['inner']
  assert (measured['num_clipped'], measured['num_left_out']) == (1, 1)
  # One that is not left out weighs the median.
  third = _next(process, [rows[0], rows[1]], [0.25, 1.0], first.state)
  np.testing.assert_allclose(third.result[0], second.result[0], rtol=1e-6)


def test_clients_that_weigh_nothing_move_no_limit(process):
  state = _next(process, [[0, 3, 4]], [1.0]).state
  output = _next(process, [[0, 0, 0], [0, 0, 0], [0, 6, 8]], [0, 0, 0.5], state)
  assert dict(output.state) == {'median_norm': 10.0, 'median_weight': 0.5}
  for rows, weights in (([], []), ([[0, 6, 8]], [0.0])):
    output = _next(process, rows, weights, state)
    assert output.state == state
    assert np.all(np.isnan(output.result[0]))


def test_updates_of_0(process):
  state = None
  for limit in (0.1, 0.01, 1e-3, 1e-4, 1e-5, 1e-6, 1e-6):
    output = _next(process, [[0, 0, 0]] * 3, [1.0] * 3, state)
    np.testing.assert_array_equal(output.result[0], [0, 0, 0])
    state = output.state
    assert state['median_norm'] == pytest.approx(limit)
  # Nothing stays locked at 0.
  for _ in range(7):
    state = _next(process, [[0, 3, 4]] * 3, [1.0] * 3, state).state
  assert state['median_norm'] == 5.0


def test_a_round_of_liars_does_not_open_the_next(process):
  honest, lie = [0.0, 3.0, 4.0], [1e11, 1e11, 1e11]
  state = _next(process, [honest] * 5, [1.0] * 5).state
  assert state['median_norm'] == 5.0
  state = _next(
    process, [honest, honest, lie, lie, lie], [1.0] * 5, state
  ).state
  assert state['median_norm'] == 50.0
  output = _next(process, [honest] * 4 + [lie], [1.0] * 5, state)
  np.testing.assert_allclose(output.result[0], honest, rtol=1e-6)
  assert output.state['median_norm'] == 5.0


def test_options():
  plain = _create(robust.RobustMeanFactory(clipping=False, zeroing_multiple=0))
  state = _next(plain, [[0, 0, 1]] * 3, [1.0] * 3).state
  rows = [[0, 0, 1], [0, 0, 1], [300, 0, 1]]
  np.testing.assert_allclose(
    _next(plain, rows, [1.0] * 3, state).result[0], [100, 0, 1]
  )


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
