"""Mixup: Beta draws, partners, fillers, and the losses of mixed examples."""

import hypothesis
from hypothesis import strategies
import numpy as np
import pytest
import reference
from scipy import special
from scipy import stats
import tensorflow as tf

from tff_fssl import hparams
from tff_fssl.semisup import mixup

_SEEDS = strategies.tuples(*[strategies.integers(-(2**31), 2**31 - 1)] * 2)
_SHARES = strategies.floats(0, 1, width=32)


@hypothesis.given(strategies.floats(0.05, 10))
@hypothesis.settings(max_examples=25)
def test_quantiles_invert_the_distribution_function(concentration):
  # Smaller values than float32 has are all 0, so that they are left out.
  probability = np.concatenate(
    [np.linspace(0, 0.5, 20_001), np.geomspace(1e-7, 0.5, 1001)]
  ).astype(np.float32)
  quantile = mixup.beta_quantile(tf.constant(probability), concentration)
  normal = np.asarray(quantile, np.float64)
  normal[normal < 1e-37] = np.nan
  error = special.betainc(concentration, concentration, normal) - probability
  assert np.nanmax(np.abs(error)) < 1e-4


@hypothesis.given(strategies.floats(0, 10))
@hypothesis.settings(max_examples=25)
def test_quantiles_are_mirrored(concentration):
  # Multiples of a power of 2, so that 1 - p is exact.
  probability = np.arange(2**12, dtype=np.float32) / 2**13
  lower, upper = (
    mixup.beta_quantile(tf.constant(p), concentration)
    for p in (probability, 1 - probability)
  )
  np.testing.assert_allclose(upper, 1 - np.asarray(lower), atol=1e-7)


@hypothesis.given(strategies.floats(0, 1e6))
@hypothesis.settings(max_examples=25)
def test_quantiles_rise_from_0_to_1(concentration):
  probability = np.linspace(0, 1, 5001).astype(np.float32)
  quantile = np.asarray(mixup.beta_quantile(probability, concentration))
  assert np.all(np.diff(quantile) >= -1e-6)
  assert quantile[0] == 0.0 and quantile[-1] == 1.0
  assert np.all((quantile >= 0) & (quantile <= 1))


@pytest.mark.parametrize('concentration', [0.3, 2.0])
def test_draws_have_the_distribution(concentration):
  num = 40_000
  shares = mixup.draw_shares([num], concentration, tf.constant([3, 1]))
  # Half of a distribution is as good as all of it, and keeps its small values.
  values = np.asarray(shares, np.float64)
  lower = values[(values < 0.5) & (values > 1e-37)]
  cdf = lambda x: special.betainc(concentration, concentration, x)
  least = cdf(1e-37)
  test = stats.kstest(lower, lambda x: (cdf(x) - least) / (0.5 - least))
  assert test.pvalue > 0.01
  assert np.mean(values < 0.5) == pytest.approx(0.5, abs=0.01)
  assert np.var(values) == pytest.approx(
    1 / (4 * (2 * concentration + 1)), rel=0.03
  )


def test_draws_of_concentration_zero_are_0_or_1():
  shares = np.asarray(mixup.draw_shares([2000], 0, tf.constant([0, 0])))
  assert set(shares) == {0.0, 1.0}
  assert np.mean(shares) == pytest.approx(0.5, abs=0.05)
  np.testing.assert_array_equal(mixup.larger_shares(shares), np.ones(2000))


def test_draws_are_a_function_of_the_seed():
  draw = lambda *seed: np.asarray(
    mixup.draw_shares([4], 0.75, tf.constant(seed))
  )
  np.testing.assert_array_equal(draw(1, 2), draw(1, 2))
  assert np.all(draw(1, 2) != draw(1, 3))


@pytest.mark.parametrize('concentration', [-0.1, 2e6, float('nan')])
def test_concentrations_out_of_range(concentration):
  with pytest.raises(hparams.UsageError, match='must be from 0 to 1e[+]06'):
    mixup.draw_shares([], concentration, tf.constant([0, 0]))


@hypothesis.given(_SEEDS, strategies.integers(0, 40))
def test_permutations(seed, size):
  order = mixup.permutation(size, tf.constant(seed))
  assert order.dtype == tf.int32
  np.testing.assert_array_equal(np.sort(order), np.arange(size))


def test_permutations_are_uniform():
  orders = [tuple(np.asarray(mixup.permutation(3, [7, i]))) for i in range(240)]
  _, counts = np.unique(orders, axis=0, return_counts=True)
  assert len(counts) == 6
  assert stats.chisquare(counts).pvalue > 0.01


@pytest.mark.parametrize('shape', [[], [5]])
def test_compiled_by_xla(shape):
  def run(seed, x, targets, weights):
    shares = mixup.larger_shares(mixup.draw_shares(shape, 0.75, seed))
    partners = mixup.permutation(tf.shape(x)[0], seed)
    return shares, *mixup.mix_with_partners(
      x, targets, weights, partners, shares
    )

  arguments = (
    tf.constant([1, 2]),
    tf.random.stateless_normal([5, 2, 2, 1], [0, 0]),
    tf.eye(5),
    tf.constant([1.0, 1, 0, 1, 1]),
  )
  compiled = tf.function(run, jit_compile=True)(*arguments)
  for one, other in zip(run(*arguments), compiled, strict=True):
    np.testing.assert_allclose(one, other, atol=1e-6)


def test_compiling_keeps_the_draws():
  seed = tf.constant([5, 6])
  order = tf.function(lambda s: mixup.permutation(100, s), jit_compile=True)(
    seed
  )
  np.testing.assert_array_equal(order, mixup.permutation(100, seed))
  shares = tf.function(
    lambda s: mixup.draw_shares([100], 0.3, s), jit_compile=True
  )(seed)
  np.testing.assert_allclose(
    shares, mixup.draw_shares([100], 0.3, seed), rtol=1e-4
  )


def test_i7_mixmatch_mixed_label():
  shares = mixup.larger_shares(tf.constant([0.2]))
  np.testing.assert_allclose(shares, [0.8], atol=1e-6)
  mixture = mixup.mix(
    shares,
    tf.constant([[1.0, 0, 0]]),
    tf.constant([[0.808989, 0.140449, 0.050562]]),
  )
  np.testing.assert_allclose(
    mixture, [[0.961798, 0.028090, 0.010112]], atol=1e-6
  )


@hypothesis.given(strategies.integers(0, 2**32 - 1), _SHARES)
def test_mixtures_lie_between(seed, share):
  rng = np.random.default_rng(seed)
  first, second = rng.normal(size=[2, 3, 4]).astype(np.float32)
  mixture = np.asarray(mixup.mix(share, first, second))
  np.testing.assert_array_equal(mixup.mix(1.0, first, second), first)
  np.testing.assert_array_equal(mixup.mix(0.0, first, second), second)
  assert np.all(mixture >= np.minimum(first, second) - 1e-6)
  assert np.all(mixture <= np.maximum(first, second) + 1e-6)
  assert 0.5 <= float(mixup.larger_shares(tf.constant(share))) <= 1


@hypothesis.given(
  strategies.integers(0, 2**32 - 1), strategies.integers(1, 8), _SHARES
)
def test_fillers_never_blend_into_real_examples(seed, size, share):
  rng = np.random.default_rng(seed)
  weights = rng.integers(0, 2, size).astype(np.float32)
  x = rng.normal(size=[size, 3]).astype(np.float32)
  x[weights == 0] = np.nan
  targets = rng.dirichlet(np.ones(4), size).astype(np.float32)
  partners = rng.permutation(size).astype(np.int32)
  shares = rng.choice([share, 0.5, 1.0], size).astype(np.float32)
  mixed_x, mixed_targets = mixup.mix_with_partners(
    x, targets, weights, partners, shares
  )
  for row in range(size):
    partner = partners[row]
    lam = shares[row] if weights[row] and weights[partner] else 1.0
    for result, values in ((mixed_x, x), (mixed_targets, targets)):
      expected = values[row]
      if lam < 1.0:
        expected = lam * values[row] + (1 - lam) * values[partner]
      np.testing.assert_allclose(result[row], expected, rtol=1e-4, atol=1e-6)
  assert np.all(np.isfinite(np.asarray(mixed_x)[weights > 0]))
  np.testing.assert_allclose(np.sum(mixed_targets, -1), 1.0, rtol=1e-5)


@pytest.mark.parametrize('per_example', [False, True])
def test_mixed_cross_entropy_against_numpy(per_example):
  rng = np.random.default_rng(2)
  logits = rng.normal(size=[5, 3])
  one, two = rng.integers(0, 3, [2, 5])
  weights = np.array([1.0, 1, 0, 1, 1])
  lam = rng.random(5) if per_example else np.float64(0.3)

  def loss_fn(z):
    entropies = lam * reference.cross_entropy(one, z) + (
      1 - lam
    ) * reference.cross_entropy(two, z)
    return (weights * entropies).sum() / weights.sum()

  z = tf.constant(logits, tf.float32)
  with tf.GradientTape() as tape:
    tape.watch(z)
    loss = mixup.mixed_cross_entropy(
      z,
      tf.constant(one, tf.int32),
      tf.constant(two, tf.int32),
      tf.constant(lam, tf.float32),
      tf.constant(weights, tf.float32),
    )
  np.testing.assert_allclose(loss, loss_fn(logits), rtol=1e-5)
  np.testing.assert_allclose(
    tape.gradient(loss, z), reference.gradient(loss_fn, logits), atol=1e-6
  )


@pytest.mark.parametrize('size', [0, 2])
def test_mixed_cross_entropy_of_nothing_is_zero(size):
  logits, labels = tf.ones([size, 3]), tf.zeros([size], tf.int32)
  with tf.GradientTape() as tape:
    tape.watch(logits)
    loss = mixup.mixed_cross_entropy(
      logits, labels, labels, 0.5, tf.zeros([size])
    )
  assert float(loss) == 0.0
  np.testing.assert_array_equal(
    tape.gradient(loss, logits), np.zeros([size, 3])
  )
