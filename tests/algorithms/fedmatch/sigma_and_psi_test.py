"""Sigma and psi: I3 to I5 of the FedMatch specification."""

import numpy as np
import pytest
import tensorflow as tf
import tiny_steps

from tff_fssl.algorithms.fedmatch import FedMatch
from tff_fssl.algorithms.fedmatch import helper_predictions
from tff_fssl.interface import base
from tff_fssl.models import adapter
from tff_fssl.models.weights import Weights

_SIGMA = np.array([[0.1, -0.2], [0.3, 0.05]], np.float32)


def _network(kernel):
  network = adapter.Network(
    lambda: tf.keras.Sequential(
      [tf.keras.Input([2]), tf.keras.layers.Dense(2, use_bias=False)]
    )
  )
  network.assign(
    Weights((tf.constant(kernel, tf.float32),), (), tf.constant(0.0))
  )
  return network


def _gradient_fn(sigma, psi, l1, l2):
  """The variable of psi, and what returns its gradient by the penalties."""
  algorithm = FedMatch(
    l1_weight=l1,
    l2_weight=l2,
    pseudo_label_weight=0.0,
    consistency_weight=0.0,
    confidence_threshold=0.0,
  )
  networks = base.Networks(
    _network(sigma), {'psi': _network(psi)}, tiny_steps.Descents()
  )
  examples = base.BatchExamples(
    {name: tf.constant([[1.0, -2.0]]) for name in algorithm.unlabeled_views},
    tf.constant([-1]),
    tf.ones([1]),
    {helper_predictions.PROBS: tf.zeros([1, 1, 2])},
  )
  batch = base.Batch(
    {base.UNLABELED: examples},
    {helper_predictions.WEIGHTS: tf.zeros([1])},
    base.StepTime(tf.constant(1), tf.constant(0), tf.constant(1)),
    tf.constant([1, 2]),
  )

  @tf.function
  def gradient():
    result = algorithm.unlabeled_step(networks, batch)
    assert result.gradients is None  # Sigma does not move.
    (gradient,) = networks.descend['psi']
    return gradient

  return networks['psi'].trainable_variables[0], gradient


def _penalty(psi, l1=1e-4, l2=10.0):
  return l1 * np.sum(np.abs(psi)) + l2 * np.sum((_SIGMA - psi) ** 2)


def test_i3_penalties_are_sums():
  psi = 0.2 * _SIGMA
  np.testing.assert_allclose(_penalty(psi, l2=0.0), 1.3e-5, rtol=1e-5)
  np.testing.assert_allclose(_penalty(psi), 0.912013, rtol=1e-6)
  _, gradient_fn = _gradient_fn(_SIGMA, psi, 1e-4, 10.0)
  gradient = gradient_fn().numpy()
  np.testing.assert_allclose(
    gradient, [[-1.5999, 3.1999], [-4.7999, -0.7999]], atol=1e-6
  )
  np.testing.assert_allclose(
    psi - 1e-3 * gradient,
    [[0.0215999, -0.0431999], [0.0647999, 0.0107999]],
    atol=1e-8,
  )


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
  sigma = np.full([2, 2], 0.1, np.float32)
  psi, gradient_fn = _gradient_fn(sigma, 0.2 * sigma, l1, 10.0)

  @tf.function
  def make_steps(num):
    for _ in tf.range(num):
      psi.assign_sub(1e-3 * gradient_fn())

  made = 0
  for step, ratio in expected.items():
    make_steps(tf.constant(step - made))
    made = step
    np.testing.assert_allclose(psi / sigma, np.full([2, 2], ratio), atol=2e-6)


def test_i5_small_elements_do_not_predict():
  algorithm = FedMatch(psi_threshold=5e-6)
  sigma = Weights((tf.fill([5], 0.1),), (), tf.constant(2.0))
  psi = sigma._replace(
    trainable=(tf.constant([4e-6, 6e-6, -7e-6, -1e-6, 1e-5]),)
  )
  state = algorithm.initial_state(sigma, base.Setup())._replace(weights=sigma)
  weights = algorithm.predicting_weights(state.remember(psi=psi))
  (summed,) = weights.trainable
  np.testing.assert_allclose(
    summed, [0.1, 0.100006, 0.099993, 0.1, 0.10001], atol=1e-8
  )
  assert weights.statistics_count == 2.0
