"""Worked examples of the FedSwitch specification, section 7."""

import numpy as np
import pytest
import tensorflow as tf

from tff_fssl.semisup import divergence

_ROWS = [[0.9, 0.05, 0.05], [0.1, 0.8, 0.1], [0.7, 0.2, 0.1], [0.05, 0.05, 0.9]]


def _uniform_divergence(rows, weights=None):
  rows = tf.constant(rows, tf.float32)
  weights = tf.ones(len(rows)) if weights is None else tf.constant(weights)
  return float(divergence.uniform_divergence(rows, weights))


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


def test_fillers_do_not_count():
  more = [*_ROWS, [1.0, 0.0, 0.0]]
  weights = [1.0, 1.0, 1.0, 1.0, 0.0]
  assert _uniform_divergence(more, weights) == pytest.approx(
    _uniform_divergence(_ROWS), abs=1e-6
  )
  empty = _uniform_divergence(_ROWS, [0.0] * 4)
  assert empty == pytest.approx(np.log(3), abs=1e-6)
