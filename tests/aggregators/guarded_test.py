"""Hand-made client values, as no honest client's code would send them."""

import numpy as np
import pytest
import tensorflow_federated as tff

from tff_fssl.aggregators import guarded

_VALUE_TYPE = tff.to_type([(np.float32, [2]), np.float32])
_SHARE = guarded.AllowedWeights(1.0)
_UNIFORM = guarded.AllowedWeights(1.0, all_or_nothing=True)
_EXAMPLES = guarded.AllowedWeights(1000.0)


def _aggregate(values, weights, allowed):
  process = guarded.GuardedFactory(
    tff.aggregators.MeanFactory(), allowed
  ).create(_VALUE_TYPE, tff.TensorType(np.float32))
  return process.next(process.initialize(), values, weights)


def _value(first, second=0.0):
  return [np.array([first, -first], np.float32), np.float32(second)]


@pytest.mark.parametrize(
  'allowed, weight',
  [
    (_SHARE, 100.0),  # A learning status of -99.
    (_SHARE, 1.0001),
    (_SHARE, -0.5),
    (_SHARE, np.nan),
    (_SHARE, np.inf),
    (_UNIFORM, 2.0),
    (_UNIFORM, 0.5),
    (_UNIFORM, -1.0),
    (_UNIFORM, np.nan),
    (_EXAMPLES, 1e9),
    (_EXAMPLES, -3.0),
    (guarded.AllowedWeights(), -1.0),
    (guarded.AllowedWeights(), np.inf),
  ],
)
def test_weights_outside_their_range_are_rejected_and_counted(allowed, weight):
  weights = [1.0, 1.0, weight]
  output = _aggregate([_value(1.0), _value(3.0), _value(9.0)], weights, allowed)
  np.testing.assert_allclose(output.result[0], [2.0, -2.0])
  assert output.measurements['num_rejected_clients'] == 1
  assert output.measurements['num_weighted_clients'] == 2


@pytest.mark.parametrize('bad', [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize('where', ['first', 'last'])
def test_values_that_are_not_finite_are_rejected_and_counted(bad, where):
  lie = _value(bad) if where == 'first' else _value(9.0, bad)
  output = _aggregate([_value(1.0), lie, _value(3.0)], [1.0] * 3, _UNIFORM)
  np.testing.assert_allclose(output.result[0], [2.0, -2.0])
  assert output.result[1] == 0.0
  assert output.measurements['num_rejected_clients'] == 1


@pytest.mark.parametrize(
  'allowed, weights',
  [(_SHARE, [0.25, 0.0, 1.0]), (_UNIFORM, [1, 0, 1]), (_EXAMPLES, [7, 0, 9])],
)
def test_what_is_allowed_is_the_inner_aggregator(allowed, weights):
  values = [_value(1.0), _value(5.0), _value(3.0)]
  output = _aggregate(values, list(map(float, weights)), allowed)
  expected = np.average([1.0, 5.0, 3.0], weights=weights)
  np.testing.assert_allclose(output.result[0], [expected, -expected], rtol=1e-6)
  assert output.measurements['num_rejected_clients'] == 0
  assert output.measurements['num_weighted_clients'] == 2


def test_a_round_of_liars_is_a_round_that_weighs_nothing():
  output = _aggregate([_value(np.nan), _value(1.0)], [1.0, 99.0], _SHARE)
  assert np.all(np.isnan(output.result[0]))
  assert output.measurements['num_rejected_clients'] == 2
  assert output.measurements['num_weighted_clients'] == 0
