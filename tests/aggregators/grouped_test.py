"""The means of groups: against NumPy, the plain mean, and false values."""

import collections

import numpy as np
import pytest
import tensorflow_federated as tff

from tff_fssl.aggregators import grouped
from tff_fssl.aggregators import guarded

_TYPE = tff.to_type(
  collections.OrderedDict(
    model=[(np.float32, [2]), (np.float32, [])], place=(np.float32, [2])
  )
)


def _process(num_groups=2, num_starts=3, num_trainable=1):
  factory = grouped.GroupedMeanFactory(num_groups, num_starts, num_trainable)
  return guarded.GuardedFactory(factory, guarded.AllowedWeights(10.0)).create(
    _TYPE, tff.TensorType(np.float32)
  )


@pytest.fixture(scope='module')
def process():
  return _process()


def _client(vector, scalar=0.0, group=0, start=0):
  return collections.OrderedDict(
    model=[np.array(vector, np.float32), np.float32(scalar)],
    place=np.array([group, start], np.float32),
  )


def _run(process, clients, weights=None):
  weights = weights or [1.0] * len(clients)
  output = process.next(
    process.initialize(), clients, [np.float32(w) for w in weights]
  )
  return output.result, output.measurements


def test_weighted_means_sizes_and_starts(process):
  clients = [
    _client([1, 2], 10, 0, 0),
    _client([3, 4], 20, 0, 2),
    _client([5, 6], 30, 1, 1),
    _client([9, 9], 90, 1, 1),
  ]
  result, measured = _run(process, clients, [1.0, 3.0, 2.0, 0.0])
  np.testing.assert_allclose(result['model'][0], [[2.5, 3.5], [5, 6]])
  np.testing.assert_allclose(result['model'][1], [17.5, 30])
  np.testing.assert_array_equal(result['place']['sizes'], [2, 1])
  np.testing.assert_allclose(
    result['place']['starts'], [[0.25, 0, 0.75], [0, 1, 0]]
  )
  inner = measured['inner']
  assert (inner['smallest_group'], inner['largest_group']) == (1, 2)
  # (1 * 5 + 3 * 25) / 4 over 2.5^2 + 3.5^2; a single client has 1.
  expected = (20 / 18.5 + 1) / 2
  assert inner['gradient_diversity'] == pytest.approx(expected, abs=1e-6)


def test_i10_gradient_diversity():
  one = _process(1, 1)
  clients = [_client(v) for v in ([1, 0], [0, 1], [1, 1])]
  measured = _run(one, clients)[1]['inner']
  assert measured['gradient_diversity'] == pytest.approx(1.5, abs=1e-6)
  # What is not trainable has no gradient.
  clients = [_client([1, 2], scalar) for scalar in (-5, 7)]
  measured = _run(one, clients)[1]['inner']
  assert measured['gradient_diversity'] == pytest.approx(1.0, abs=1e-6)


def test_one_group_is_the_mean_to_the_bit():
  rng = np.random.default_rng(3)
  clients = [_client(rng.normal(size=2), rng.normal()) for _ in range(7)]
  weights = [float(w) for w in rng.uniform(0.1, 3, 7)]
  result, _ = _run(_process(1, 1), clients, weights)
  mean = tff.aggregators.MeanFactory().create(_TYPE, tff.TensorType(np.float32))
  expected, _ = _run(mean, clients, weights)
  for mine, theirs in zip(result['model'], expected['model'], strict=True):
    np.testing.assert_array_equal(mine[0], theirs)


def test_an_empty_group_has_zeros(process):
  result, measured = _run(process, [_client([1, 2], 3, 1, 2)])
  np.testing.assert_array_equal(result['model'][0], [[0, 0], [1, 2]])
  np.testing.assert_array_equal(result['place']['sizes'], [0, 1])
  np.testing.assert_array_equal(result['place']['starts'][0], [0, 0, 0])
  assert measured['inner']['gradient_diversity'] == 1


@pytest.mark.parametrize('bad', [np.nan, np.inf, -np.inf, 1e30])
def test_impossible_values_are_left_out_with_their_place(process, bad):
  clients = [_client([1, 2], 3, 0, 0), _client([bad, 0], 0, 1, 1)]
  clients += [_client([5, 5], 5, bad, 0), _client([5, 5], 5, 0, bad)]
  result, measured = _run(process, clients)
  np.testing.assert_array_equal(result['model'][0], [[1, 2], [0, 0]])
  np.testing.assert_array_equal(result['place']['sizes'], [1, 0])
  assert measured['num_rejected_clients'] == 3


def test_a_round_without_weight_is_marked(process):
  result, measured = _run(process, [_client([1, 2])], [0.0])
  assert np.all(np.isnan(result['model'][0]))
  assert np.all(np.isnan(result['place']['sizes']))
  assert measured['num_weighted_clients'] == 0
