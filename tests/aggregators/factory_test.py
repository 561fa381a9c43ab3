"""Each aggregator alone, by hand-made updates."""

import numpy as np
import pytest
import tensorflow_federated as tff

from tff_fssl import hparams
from tff_fssl.aggregators import factory
from tff_fssl.aggregators import guarded
from tff_fssl.aggregators import hparams as aggregator_hparams
from tff_fssl.aggregators import privacy

_SIZE = 4
_VALUE_TYPE = tff.to_type([(np.float32, [_SIZE])])
_MEANS = ('mean', 'secure', 'compression')
_WEIGHTED = (*_MEANS, 'robust')


def _build(name, **fields):
  return factory.build_aggregator(
    aggregator_hparams.AggregatorHparams(aggregator=name, **fields),
    clients_per_round=3,
    population=1000,
  )


@pytest.fixture(scope='module')
def processes():
  return {
    name: guarded.GuardedFactory(
      _build(name), guarded.AllowedWeights(1.0)
    ).create(_VALUE_TYPE, tff.TensorType(np.float32))
    for name in _WEIGHTED
  }


# Of a norm below 1, where adaptive clipping starts.
_UPDATES = np.array(
  [[0.1, -0.2, 0.3, 0.0], [0.2, 0.2, -0.1, 0.4], [0.0, 0.1, 0.1, -0.3]],
  np.float32,
)


def _next(process, weights, state=None):
  state = process.initialize() if state is None else state
  return process.next(state, [[row] for row in _UPDATES], list(weights))


@pytest.mark.parametrize('name', _MEANS)
@pytest.mark.parametrize(
  'weights, tolerance',
  [([0.5, 0.25, 1.0], 1e-6), ([1e-3, 4e-3, 2e-3], 1e-4), ([0, 1, 0], 1e-6)],
)
def test_it_is_the_weighted_mean(processes, name, weights, tolerance):
  output = _next(processes[name], np.float32(weights))
  np.testing.assert_allclose(
    output.result[0],
    np.average(_UPDATES, axis=0, weights=weights),
    atol=tolerance,
  )


@pytest.mark.parametrize('name', _MEANS)
def test_very_small_weights(processes, name):
  weights = np.float32([1e-9, 1e-9, 3e-9])
  result = _next(processes[name], weights).result[0]
  # Secure sums raise them all to the least one they can tell from 0.
  expected = None if name == 'secure' else weights
  np.testing.assert_allclose(
    result, np.average(_UPDATES, axis=0, weights=expected), atol=1e-4
  )


@pytest.mark.parametrize('name', _WEIGHTED)
def test_weights_of_0_leave_state_and_say_so(processes, name):
  process = processes[name]
  state = _next(process, np.float32([1, 1, 1])).state
  output = _next(process, np.float32([0, 0, 0]), state)
  assert np.all(np.isnan(output.result[0]))
  assert str(output.state) == str(state)
  assert output.measurements['num_weighted_clients'] == 0


def test_robust_needs_a_majority():
  settings = aggregator_hparams.AggregatorHparams('robust')
  with pytest.raises(hparams.UsageError, match='at least 3 clients'):
    factory.build_aggregator(settings, clients_per_round=2)
  assert factory.build_aggregator(settings, clients_per_round=3)
  assert factory.build_aggregator(settings)  # It is not known.


def test_compression_repeats():
  """Tensors above the threshold are quantized, without randomness."""
  value_type = tff.to_type([(np.float32, [20001])])
  process = _build('compression').create(value_type, tff.TensorType(np.float32))
  update = np.random.default_rng(0).normal(0, 0.001, 20001).astype(np.float32)
  run = lambda: process.next(process.initialize(), [[update]], [1.0]).result[0]
  first = run()
  np.testing.assert_array_equal(first, run())
  assert not np.array_equal(first, update)
  np.testing.assert_allclose(first, update, atol=np.ptp(update) / 255)


def test_secure_sums_are_secure():
  process = _build('secure').create(_VALUE_TYPE, tff.TensorType(np.float32))
  sums = process.next.to_building_block().compact_representation()
  assert 'federated_secure_sum_bitwidth' in sums
  assert 'federated_sum' not in sums
  assert 'federated_aggregate' not in sums


def _private(**fields):
  return _build('dp', **fields).create(_VALUE_TYPE, tff.TensorType(np.float32))


@pytest.mark.parametrize('norm', [0.0, 0.5])
def test_private_mean_is_noisy_and_ignores_weights(norm):
  process = _private(dp_clipping_norm=norm)
  first = _next(process, np.float32([1, 1, 1]))
  again = _next(process, np.float32([1, 1, 1]))
  zeros = _next(process, np.float32([0, 0, 0]))
  # Three draws of noise.
  assert np.all(np.isfinite(zeros.result[0]))
  assert not np.allclose(first.result[0], again.result[0])
  assert not np.allclose(first.result[0], zeros.result[0])
  assert first.measurements['epsilon'] == zeros.measurements['epsilon'] > 0
  # Nothing that counts clients.
  assert list(first.measurements) == ['inner', 'epsilon', 'delta']


def test_secure_mean_lowers_weights_to_what_its_sum_can_hold():
  most = factory.MAX_EXAMPLES_WEIGHT
  process = factory.build_aggregator(
    aggregator_hparams.AggregatorHparams(aggregator='secure'), max_weight=most
  ).create(_VALUE_TYPE, tff.TensorType(np.float32))
  # Times its weight, an entry stays below the first bound on sums of updates.
  updates = _UPDATES * np.float32(1e-5)
  output = process.next(
    process.initialize(),
    [[row] for row in updates],
    [np.float32(w * most) for w in (3, 0.5, 0)],
  )
  np.testing.assert_allclose(
    output.result[0],
    np.average(updates, axis=0, weights=[1, 0.5, 0]),
    atol=1e-9,
  )


def test_private_mean_clips_and_has_the_noise_it_says():
  """Against the mean of clipped updates, over many entries."""
  size, norm, multiplier = 50_000, 0.5, 2.0
  process = _build(
    'dp', dp_clipping_norm=norm, dp_noise_multiplier=multiplier
  ).create(tff.to_type([(np.float32, [size])]), tff.TensorType(np.float32))
  update = np.zeros([size], np.float32)
  update[0] = 300.0
  result = process.next(process.initialize(), [[update]] * 3, [1.0] * 3).result
  noise = norm * multiplier / 3
  assert np.std(result[0][1:]) == pytest.approx(noise, rel=0.02)
  assert result[0][0] == pytest.approx(norm, abs=6 * noise)


def test_private_mean_rejects_what_is_not_finite():
  process = _private(dp_clipping_norm=0.5, dp_noise_multiplier=1e-6)
  bad = np.full([_SIZE], np.nan, np.float32)
  good = np.array([0.3, 0, 0, 0], np.float32)
  output = process.next(
    process.initialize(), [[good], [bad], [good]], [1.0] * 3
  )
  np.testing.assert_allclose(output.result[0], [0.2, 0, 0, 0], atol=1e-5)


def test_epsilon_counts_rounds_with_clients_only():
  process = _private()
  output = process.next(process.initialize(), [], [])
  assert output.measurements['epsilon'] == 0.0
  assert np.all(np.isnan(output.result[0]))
  epsilons = []
  for _ in range(3):
    output = _next(process, np.float32([1, 1, 1]), output.state)
    epsilons.append(output.measurements['epsilon'])
  assert 0 < epsilons[0] < epsilons[1] < epsilons[2] < np.inf
  # More clients than declared are not covered, ever after.
  updates = [[row] for row in np.repeat(_UPDATES, 2, axis=0)]
  output = process.next(output.state, updates, [1.0] * 6)
  assert np.isinf(output.measurements['epsilon'])
  output = _next(process, np.float32([1, 1, 1]), output.state)
  assert np.isinf(output.measurements['epsilon'])


@pytest.mark.parametrize('num_rounds', [1, 10, 800, 100_000])
@pytest.mark.parametrize(
  'multiplier, clients, population', [(1.0, 10, 100), (4.0, 100, 100_000)]
)
def test_epsilon_is_dp_accountings(num_rounds, multiplier, clients, population):
  import dp_accounting

  orders, rdp = privacy.renyi_divergences(multiplier, clients, population)
  accountant = dp_accounting.rdp.RdpAccountant(
    orders, dp_accounting.NeighboringRelation.REPLACE_ONE
  )
  accountant.compose(
    dp_accounting.SampledWithoutReplacementDpEvent(
      population, clients, dp_accounting.GaussianDpEvent(multiplier / 2)
    ),
    num_rounds,
  )
  epsilon = privacy.spent_epsilon(float(num_rounds), orders, rdp, 1e-6)
  assert float(epsilon) == pytest.approx(accountant.get_epsilon(1e-6), rel=1e-5)


def test_epsilon_of_everybody_every_round():
  """No sampling: the Gaussian mechanism, of divergence order / (2 z^2)."""
  orders, rdp = privacy.renyi_divergences(4.0, 7, 7)
  np.testing.assert_allclose(rdp, orders / (2 * 2.0**2), rtol=1e-9)


@pytest.mark.parametrize(
  'fields, sizes, words',
  [
    ({}, (11, 10), ['clients_per_round=11', 'from 1 to 10']),
    ({'dp_delta': 0.2}, (5, 10), ['--dp_delta=0.2', '1/10']),
    ({}, (None, None), ['clients_per_round', 'population']),
  ],
)
def test_private_mean_refuses(fields, sizes, words):
  settings = aggregator_hparams.AggregatorHparams(aggregator='dp', **fields)
  with pytest.raises(hparams.UsageError) as error:
    factory.build_aggregator(
      settings, clients_per_round=sizes[0], population=sizes[1]
    )
  for word in words:
    assert word in str(error.value)
