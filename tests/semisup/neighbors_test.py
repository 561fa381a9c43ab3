import numpy as np
import pytest
import tensorflow as tf

from tff_fssl.semisup import neighbors


def _nearest(points, known, own, num):
  rows, exist = neighbors.nearest(
    tf.constant(points, tf.float32), tf.constant(known), tf.constant(own), num
  )
  return [int(r) for r, e in zip(rows, exist) if e], exist.numpy().tolist()


def test_it_is_exact():
  rng = np.random.default_rng(0)
  points = rng.dirichlet(np.ones(5), 40).astype(np.float32)
  known = rng.random(40) < 0.7
  for own in range(40):
    distances = ((points - points[own]) ** 2).sum(1)
    distances[~known] = np.inf
    distances[own] = np.inf
    expected = np.argsort(distances, kind='stable')[:3].tolist()
    assert _nearest(points, known, own, 3)[0] == expected


@pytest.mark.parametrize(
  'known, expected, exist',
  [
    ([True, True, True], [0, 2], [1.0, 1.0]),  # As far: the first one first.
    ([True, True, False], [0], [1.0, 0.0]),
    ([False, True, False], [], [0.0, 0.0]),
    ([False, False, True], [2], [1.0, 0.0]),
  ],
)
def test_fewer_than_wanted(known, expected, exist):
  assert _nearest([[0.0], [1.0], [2.0]], known, 1, 2) == (expected, exist)


def test_more_wanted_than_there_are_rows():
  assert _nearest([[0.0]], [True], 0, 3) == ([], [0.0, 0.0, 0.0])
