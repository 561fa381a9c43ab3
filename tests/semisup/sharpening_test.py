"""Sharpening: against NumPy, limits and properties; I11 of ProtoFSSL."""

import hypothesis
from hypothesis import strategies
import numpy as np
import pytest
import tensorflow as tf

from tff_fssl import hparams
from tff_fssl.semisup import sharpening

_MIN, _MAX = 1e-30, 1e30


def test_protofssl_i11():
  sharp = sharpening.sharpen(
    tf.constant([[0.5, 0.3, 0.2], [0.6, 0.3, 0.1], [0.34, 0.33, 0.33]]), 0.5
  )
  np.testing.assert_allclose(
    sharp,
    [
      [0.657895, 0.236842, 0.105263],
      [0.782609, 0.195652, 0.021739],
      [0.346731, 0.326635, 0.326635],
    ],
    atol=1e-6,
  )


@hypothesis.given(
  strategies.integers(0, 2**32 - 1),
  strategies.integers(2, 12),
  strategies.floats(0.05, 20),
)
def test_against_numpy(seed, num_classes, temperature):
  rng = np.random.default_rng(seed)
  probs = rng.dirichlet(np.ones(num_classes), 4).astype(np.float32)
  sharp = np.asarray(sharpening.sharpen(probs, temperature))
  exact = probs.astype(np.float64) ** (1 / temperature)
  exact /= exact.sum(-1, keepdims=True)
  np.testing.assert_allclose(sharp, exact, rtol=1e-4, atol=1e-6)
  np.testing.assert_allclose(sharp.sum(-1), 1.0, rtol=1e-6)
  np.testing.assert_array_equal(
    sharp[np.arange(4), probs.argmax(-1)], sharp.max(-1)
  )
  np.testing.assert_allclose(
    sharpening.sharpened_softmax(np.log(probs) + 3, temperature),
    exact,
    rtol=1e-4,
    atol=1e-5,
  )


@hypothesis.given(
  strategies.lists(
    strategies.floats(-100, 100, width=32), min_size=1, max_size=6
  ),
  strategies.floats(_MIN, _MAX),
)
def test_no_temperature_breaks_it(logits, temperature):
  sharp = np.asarray(
    sharpening.sharpened_softmax(tf.constant([logits], tf.float32), temperature)
  )
  assert np.all(sharp >= 0)
  np.testing.assert_allclose(sharp.sum(-1), [1.0], rtol=1e-6)


@pytest.mark.parametrize('temperature', [1e-3, 1e-20, _MIN])
def test_cold_targets_are_pseudo_labels(temperature):
  probs = tf.constant([[0.2, 0.5, 0.3], [0.0, 0.0, 1.0], [0.4, 0.4, 0.2]])
  np.testing.assert_array_equal(
    sharpening.sharpen(probs, temperature),
    [[0, 1, 0], [0, 0, 1], [0.5, 0.5, 0]],
  )


@pytest.mark.parametrize('jit_compile', [False, True])
def test_compiled_at_extreme_temperatures(jit_compile):
  probs = tf.constant([[0.25, 0.75, 0.0]])

  @tf.function(jit_compile=jit_compile)
  def targets(probs):
    return sharpening.sharpen(probs, _MIN), sharpening.sharpen(probs, _MAX)

  coldest, hottest = targets(probs)
  np.testing.assert_array_equal(coldest, [[0, 1, 0]])
  np.testing.assert_allclose(hottest, [[0.5, 0.5, 0]])


@pytest.mark.parametrize(
  'temperature', [0, -1.0, 1e-31, 1e31, float('inf'), float('nan')]
)
def test_temperatures_out_of_range(temperature):
  with pytest.raises(hparams.UsageError, match='must be from'):
    sharpening.sharpen(tf.constant([[0.5, 0.5]]), temperature)


def test_targets_carry_no_gradient():
  logits = tf.constant([[1.0, 2.0], [0.0, 0.5]])
  with tf.GradientTape(persistent=True) as tape:
    tape.watch(logits)
    targets = [
      sharpening.sharpened_softmax(logits, 0.5),
      sharpening.sharpen(tf.nn.softmax(logits), 0.5),
      sharpening.guess([tf.nn.softmax(logits)], 0.5),
    ]
  assert [tape.gradient(t, logits) for t in targets] == [None] * 3


def test_nothing_to_sharpen():
  assert sharpening.guess([tf.zeros([0, 3])] * 2, 0.5).shape == (0, 3)
