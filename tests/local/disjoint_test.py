"""Sigma + psi: I3 and I4 of the FedMatch specification."""

import numpy as np
import pytest
import tensorflow as tf

from tff_fssl.local import disjoint
from tff_fssl.models.weights import Weights

_SIGMA = np.array([[0.1, -0.2], [0.3, 0.05]], np.float32)


def _penalty(psi, l1=1e-4, l2=10.0):
  return l1 * np.sum(np.abs(psi)) + l2 * np.sum((_SIGMA - psi) ** 2)


def test_i3_penalties_are_sums():
  psi = 0.2 * _SIGMA
  np.testing.assert_allclose(_penalty(psi, l2=0.0), 1.3e-5, rtol=1e-5)
  np.testing.assert_allclose(_penalty(psi), 0.912013, rtol=1e-6)
  (gradient,) = disjoint.penalty_gradients(
    [tf.constant(psi)], [tf.constant(_SIGMA)], 1e-4, 10.0
  )
  np.testing.assert_allclose(
    gradient, [[-1.5999, 3.1999], [-4.7999, -0.7999]], atol=1e-6
  )
  np.testing.assert_allclose(
    psi - 1e-3 * gradient.numpy(),
    [[0.0215999, -0.0431999], [0.0647999, 0.0107999]],
    atol=1e-8,
  )


@pytest.mark.parametrize('l1, l2', [(0.3, 0.0), (0.0, 2.0), (0.3, 2.0)])
def test_penalties_by_finite_differences(l1, l2):
  psi = np.array([[0.4, -0.1], [-0.3, 0.2]])
  (gradient,) = disjoint.penalty_gradients(
    [tf.constant(psi, tf.float32)], [tf.constant(_SIGMA)], l1, l2
  )
  for index in np.ndindex(psi.shape):
    step = np.zeros_like(psi)
    step[index] = 1e-5
    slope = _penalty(psi + step, l1, l2) - _penalty(psi - step, l1, l2)
    np.testing.assert_allclose(gradient[index], slope / 2e-5, atol=1e-5)


@pytest.mark.parametrize(
  'l1, expected',
  [
    (
      1e-4,
      {
        1: 0.215999,
        5: 0.276859,
        10: 0.346333,
        50: 0.708632,
        250: 0.994826,
        1000: 0.999950,
      },
    ),
    (
      0.0,
      {1: 0.216, 5: 0.276863, 10: 0.346342, 50: 0.708664, 250: 0.994876},
    ),
  ],
)
def test_i4_psi_becomes_a_copy_of_sigma_whatever_the_data(l1, expected):
  """20 (psi - sigma): each step of rate 1e-3 goes 2% of the way."""
  sigma, psi = tf.constant([0.1]), tf.constant([0.02])
  for step in range(1, 1001):
    (gradient,) = disjoint.penalty_gradients([psi], [sigma], l1, 10.0)
    psi = psi - 1e-3 * gradient
    if step in expected:
      np.testing.assert_allclose(psi / sigma, [expected[step]], atol=2e-6)


@pytest.mark.parametrize('factor', [0.0, 0.2, 1.0])
def test_the_parts_add_up_to_the_bit(factor):
  rng = np.random.default_rng(0)
  weights = Weights(
    (tf.constant(rng.normal(size=5000).astype(np.float32)),),
    (),
    tf.constant(3.0),
  )
  sigma, psi = disjoint.split(weights, factor)
  both = disjoint.summed(sigma, psi.trainable, 0.0)
  np.testing.assert_array_equal(both.trainable[0], weights.trainable[0])
  np.testing.assert_allclose(
    psi.trainable[0], factor * sigma.trainable[0], atol=1e-6
  )
  assert both.statistics_count == 3.0


def test_i5_small_elements_do_not_predict():
  sigma = Weights((tf.fill([5], 0.1),), (), tf.constant(0.0))
  psi = [tf.constant([4e-6, 6e-6, -7e-6, -1e-6, 1e-5])]
  (summed,) = disjoint.summed(sigma, psi, 5e-6).trainable
  np.testing.assert_allclose(
    summed, [0.1, 0.100006, 0.099993, 0.1, 0.10001], atol=1e-8
  )
