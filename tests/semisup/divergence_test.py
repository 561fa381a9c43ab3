"""Worked examples of the FedSwitch specification, section 7."""

import numpy as np
import pytest
import tensorflow as tf

from tff_fssl.semisup import divergence

_ROWS = [[0.9, 0.05, 0.05], [0.1, 0.8, 0.1], [0.7, 0.2, 0.1], [0.05, 0.05, 0.9]]


def _uniform_divergence(rows, weights=None, of=divergence.PROBABILITIES):
  rows = tf.constant(rows, tf.float32)
  weights = tf.ones(len(rows)) if weights is None else tf.constant(weights)
  return float(divergence.uniform_divergence(rows, weights, of))


@pytest.mark.parametrize(
  'row, expected',
  [
    ([0.1] * 10, 0.0),
    ([1.0] + [0.0] * 9, 2.302585),
    ([0.5, 0.5] + [0.0] * 8, 1.609438),
    # One of FedMatch's types of clients.
    ([0.5, 0.15, 0.03, 0.03, 0.03, 0.02, 0.03, 0.03, 0.03, 0.15], 0.677455),
    ([0.91] + [0.01] * 9, 1.802297),
  ],
)
def test_i1_of_one_distribution(row, expected):
  assert _uniform_divergence([row]) == pytest.approx(expected, abs=2e-6)


def test_i1_of_a_batch_it_is_that_of_the_mean():
  assert _uniform_divergence(_ROWS) == pytest.approx(0.023542, abs=1e-6)
  mean_of_rows = np.mean([_uniform_divergence([row]) for row in _ROWS])
  assert mean_of_rows == pytest.approx(0.541201, abs=1e-6)
  histogram = _uniform_divergence(_ROWS, of=divergence.LABELS)
  assert histogram == pytest.approx(0.058892, abs=1e-6)


@pytest.mark.parametrize('of', [divergence.PROBABILITIES, divergence.LABELS])
def test_fillers_do_not_count(of):
  more = [*_ROWS, [1.0, 0.0, 0.0]]
  weights = [1.0, 1.0, 1.0, 1.0, 0.0]
  assert _uniform_divergence(more, weights, of) == pytest.approx(
    _uniform_divergence(_ROWS, of=of), abs=1e-6
  )
  empty = _uniform_divergence(_ROWS, [0.0] * 4, of)
  assert empty == pytest.approx(np.log(3), abs=1e-6)


@pytest.mark.parametrize(
  'size, bias', [(10, 0.533173), (100, 0.045920), (510, 0.008856)]
)
def test_i9_histograms_are_biased_and_mean_predictions_are_not(size, bias):
  rng = np.random.default_rng(0)
  found = []
  for _ in range(300):
    labels = rng.integers(0, 10, size)
    # Little confidence, which mean predictions keep and histograms lose.
    rows = np.full([size, 10], 0.09) + 0.1 * np.eye(10)[labels]
    found.append(
      [
        _uniform_divergence(rows, of=of)
        for of in (divergence.LABELS, divergence.PROBABILITIES)
      ]
    )
  of_labels, of_probabilities = np.mean(found, axis=0)
  assert of_labels == pytest.approx(bias, rel=0.1)
  assert of_probabilities < 0.02 * bias
