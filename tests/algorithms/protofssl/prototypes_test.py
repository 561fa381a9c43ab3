"""Prototypes: worked examples I9, I11 and I12 of ProtoFSSL's specification."""

import numpy as np
import pytest
import reference
import tensorflow as tf

from tff_fssl.algorithms.protofssl import prototypes
from tff_fssl.semisup import sharpening

_PROTOTYPES = tf.constant(
  [[1.0, 0.0, 0.0, 1.0], [0.0, 2.0, 0.0, 0.0], [0.0, 0.0, 1.0, -1.0]]
)
_QUERIES = tf.constant([[0.8, 0.2, 0.0, 0.6], [0.0, 1.5, 0.5, 0.0]])
_ALL = tf.constant([True, True, True])
_KINDS = ('mse', 'euclid')


@pytest.mark.parametrize(
  'distance, expected',
  [
    ('mse', [[0.576117, 0.211942, 0.211942], [0.199908, 0.543406, 0.256687]]),
    (
      'euclid',
      [[0.706009, 0.146995, 0.146995], [0.156301, 0.642906, 0.200793]],
    ),
  ],
)
def test_i9_predictions(distance, expected):
  probs = prototypes.probs(_QUERIES, _PROTOTYPES, _ALL, distance)
  np.testing.assert_allclose(probs, expected, atol=1e-6)
  logs = prototypes.log_probs(_QUERIES, _PROTOTYPES, _ALL, distance)
  np.testing.assert_allclose(logs, np.log(expected), atol=1e-4)
  if distance == 'mse':
    np.testing.assert_allclose(
      prototypes.distances(_QUERIES, _PROTOTYPES, distance),
      [[0.06, 1.06, 1.06], [1.125, 0.125, 0.875]],
      atol=1e-6,
    )
    loss = -(logs[0, 0] + logs[1, 1]) / 2.0
    assert float(loss) == pytest.approx(0.580672, abs=1e-6)


@pytest.mark.parametrize(
  'probs, expected',
  [
    ([0.5, 0.3, 0.2], [0.657895, 0.236842, 0.105263]),
    ([0.6, 0.3, 0.1], [0.782609, 0.195652, 0.021739]),
    ([0.34, 0.33, 0.33], [0.346731, 0.326635, 0.326635]),
    ([0.0, 0.0, 0.0], [0.0, 0.0, 0.0]),
  ],
)
def test_i11_sharpening(probs, expected):
  for temperature, target in ((0.5, expected), (1.0, probs)):
    sharp = sharpening.sharpen_with_gradient(tf.constant([probs]), temperature)
    np.testing.assert_allclose(sharp, [target], atol=1e-6)


@pytest.mark.parametrize('temperature', [0.5, 1.0, 3.0])
def test_sharpening_has_the_gradient_of_its_formula(temperature):
  probs = np.array([0.5, 0.3, 0.2, 0.0])
  weights = np.array([0.3, -1.0, 2.0, 0.7])

  def value(p):
    powers = np.where(p > 0, np.abs(p) ** (1 / temperature), 0.0)
    return float(np.sum(weights * powers / powers.sum()))

  variable = tf.Variable(probs[None], dtype=tf.float32)
  with tf.GradientTape() as tape:
    sharp = sharpening.sharpen_with_gradient(variable, temperature)
    total = tf.reduce_sum(tf.constant(weights, tf.float32) * sharp)
  gradient = tape.gradient(total, variable)[0].numpy()
  expected = reference.gradient(
    lambda p: value(np.append(p, 0.0)), probs[:3], 1e-6
  )
  np.testing.assert_allclose(gradient[:3], expected, atol=1e-5)
  assert np.isfinite(gradient[3])


_NONE = [0.0, 0.0]
_SETS = tf.constant(
  [
    [[1.0, 2.0], _NONE, [0.0, 1.0]],
    [[3.0, 0.0], [2.0, 2.0], [1.0, 1.0]],
    [[2.0, 1.0], [4.0, 0.0], _NONE],
  ]
)
_EXISTS = tf.constant(
  [[True, False, True], [True, True, True], [True, True, False]]
)


def test_i12_helpers_that_lack_a_class_take_the_mean_of_the_others():
  whole, exists, used = prototypes.complete(_SETS, _EXISTS)
  np.testing.assert_allclose(whole[0, 1], [3.0, 1.0])
  np.testing.assert_allclose(whole[2, 2], [0.5, 1.0])
  np.testing.assert_array_equal(whole[1], _SETS[1])
  assert np.all(exists) and np.all(used == 1.0)
  # A further, empty one changes nothing: it is not used.
  more, _, used = prototypes.complete(
    tf.pad(_SETS, [[0, 1], [0, 0], [0, 0]]),
    tf.pad(_EXISTS, [[0, 1], [0, 0]]),
  )
  np.testing.assert_array_equal(used, [1.0, 1.0, 1.0, 0.0])
  np.testing.assert_allclose(more[3], [[2.0, 1.0], [3.0, 1.0], [0.5, 1.0]])
  z = tf.constant([[0.5, 1.5], [3.0, 0.2]])
  np.testing.assert_allclose(
    prototypes.mean_probs(z, more, exists, used, 'mse'),
    np.mean([prototypes.probs(z, w, exists, 'mse') for w in whole], axis=0),
    atol=1e-6,
  )


def test_i12_a_client_that_lacks_a_class():
  embedding = tf.constant([[0.5, 1.5]])
  own = _SETS[0], _EXISTS[0]
  np.testing.assert_array_equal(
    prototypes.probs(embedding, *own, 'mse'), [[0.5, 0.0, 0.5]]
  )
  logs = prototypes.log_probs(embedding, *own, 'mse')
  loss = prototypes.cross_entropy(tf.constant([[0.2, 0.5, 0.3]]), logs)
  assert float(loss[0]) == pytest.approx(8.405621, abs=1e-5)


@pytest.mark.parametrize('distance', _KINDS)
def test_a_class_that_nobody_has(distance):
  exists = tf.constant([[True, False, False]] * 2)
  whole, some, used = prototypes.complete(_SETS[:2], exists)
  np.testing.assert_array_equal(some, [True, False, False])
  probs = prototypes.mean_probs(_SETS[0], whole, some, used, distance)
  np.testing.assert_array_equal(probs, [[1.0, 0.0, 0.0]] * 3)
  np.testing.assert_allclose(
    prototypes.logits(probs)[0], [0.0, np.log(1e-7), np.log(1e-7)], atol=1e-5
  )


@pytest.mark.parametrize('distance', _KINDS)
@pytest.mark.parametrize(
  'exists', [[True] * 3, [True, False, True], [False] * 3], ids=str
)
def test_gradients_are_those_of_the_formula_and_finite(distance, exists):
  """Also where an embedding is a prototype, and where no class exists."""
  start = np.array([[0.8, 0.2, 0.1, 0.6], [0.1, 1.5, 0.5, -0.3]])
  weights = np.array([[1.0, -2.0, 0.5], [0.3, 0.7, -1.0]])
  held = np.array(exists)

  def value(z):
    squares = (z[:, None] - _PROTOTYPES.numpy()[None].astype(float)) ** 2
    scores = {
      'mse': squares.mean(-1),
      'euclid': np.sqrt(squares.sum(-1)),
    }[distance]
    logs = np.full(scores.shape, np.log(1e-7))
    if held.any():
      logs[:, held] = reference.log_softmax(-scores[:, held])
    return float(np.sum(weights * logs))

  def gradient(z):
    variable = tf.Variable(z, dtype=tf.float32)
    with tf.GradientTape() as tape:
      logs = prototypes.log_probs(
        variable, _PROTOTYPES, tf.constant(exists), distance
      )
      total = tf.reduce_sum(tf.constant(weights, tf.float32) * logs)
    assert float(total) == pytest.approx(value(z), abs=1e-3)
    return tape.gradient(total, variable).numpy()

  np.testing.assert_allclose(
    gradient(start), reference.gradient(value, start), atol=1e-4
  )
  assert np.all(np.isfinite(gradient(_PROTOTYPES.numpy()[:2])))


def test_prototypes_of_others_in_place_of_own():
  own = tf.constant([[9.0, 9.0], [8.0, 8.0], [7.0, 7.0]])
  exists = tf.constant([[True, False, False]] * 2 + [[False] * 3])
  sets = tf.constant([[[1.0, 2.0]] + [_NONE] * 2, [[3.0, 0.0]] + [_NONE] * 2])
  whole, some, used = prototypes.complete(
    tf.pad(sets, [[0, 1], [0, 0], [0, 0]]), exists
  )
  replaced, held = prototypes.replace(
    own, tf.constant([True, True, False]), whole, some, used
  )
  np.testing.assert_allclose(replaced, [[2.0, 1.0], [8.0, 8.0], [7.0, 7.0]])
  np.testing.assert_array_equal(held, [True, True, False])
  # The mean over those that have the class, not over all.
  whole, some, used = prototypes.complete(_SETS, _EXISTS)
  replaced, held = prototypes.replace(
    own, tf.constant([False] * 3), whole, some, used
  )
  np.testing.assert_allclose(replaced, [[2.0, 1.0], [3.0, 1.0], [0.5, 1.0]])
  assert np.all(held)
  none = tf.zeros_like(_EXISTS)
  for value, expected in zip(
    prototypes.replace(own, _ALL, *prototypes.complete(0 * _SETS, none)),
    (own, _ALL),
  ):
    np.testing.assert_array_equal(value, expected)


def test_class_means():
  embeddings = tf.constant([[1.0, 2.0], [3.0, 4.0], [5.0, 9.0], [7.0, 7.0]])
  labels, weights = tf.constant([2, 2, 0, 1]), tf.constant([1.0, 1.0, 1.0, 0.0])
  sums, counts = prototypes.class_sums(embeddings, labels, weights, 4)
  np.testing.assert_array_equal(counts, [1.0, 0.0, 2.0, 0.0])
  means, exists = prototypes.means(sums, counts)
  np.testing.assert_allclose(means, [[5, 9], [0, 0], [2, 3], [0, 0]])
  np.testing.assert_array_equal(exists, [True, False, True, False])
  at_once = prototypes.class_means(embeddings, labels, weights, 4)
  for value, expected in zip(at_once, (means, exists), strict=True):
    np.testing.assert_array_equal(value, expected)


def test_noise():
  exists = tf.constant([True, False])
  start = tf.stack([tf.ones([4000]), tf.zeros([4000])])
  seed = tf.constant([3, 4])
  assert prototypes.add_noise(start, exists, 0.0, seed) is start
  noised = prototypes.add_noise(start, exists, 0.5, seed).numpy()
  np.testing.assert_array_equal(noised[1], 0.0)
  assert noised[0].mean() == pytest.approx(1.0, abs=0.05)
  assert noised[0].std() == pytest.approx(0.5, abs=0.05)
  np.testing.assert_array_equal(
    noised, prototypes.add_noise(start, exists, 0.5, seed)
  )
  other = prototypes.add_noise(start, exists, 0.5, tf.constant([3, 5]))
  assert np.any(other != noised)
