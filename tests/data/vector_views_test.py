"""Views of vectors: what is added and left out, and whose draws they are."""

import numpy as np
import pytest
import tensorflow as tf

from tff_fssl.data import vector_views
from tff_fssl.hparams import UsageError

_MEAN, _STD = (1.0, -2.0, 100.0), (1.0, 0.5, 20.0)
_SEED = tf.constant([3, 4])


def _vectors(num, views=1):
  rng = np.random.default_rng(0)
  x = rng.normal(_MEAN, _STD, (num, views, 3))
  return tf.constant(x, tf.float32)


def _normal(x):
  return (x.numpy() - np.array(_MEAN)) / np.array(_STD)


def test_plain_is_the_first_view():
  x = _vectors(5, 3)
  views = vector_views.build_views(_MEAN, _STD, num_weak=1, num_strong=1)
  np.testing.assert_allclose(views.plain(x), _normal(x)[:, 0], atol=1e-5)
  views = vector_views.build_views(_MEAN, _STD, normalize=False)
  np.testing.assert_array_equal(views.plain(x), x[:, 0])
  assert views.plain(x[:0]).shape == (0, 3)


@pytest.mark.parametrize('normalize', [True, False])
def test_made_views_have_the_noise_and_the_gaps_that_they_say(normalize):
  x = _vectors(20_000)
  views = vector_views.build_views(
    _MEAN,
    _STD,
    normalize=normalize,
    weak_noise=0.1,
    strong_noise=0.5,
    strong_dropout=0.25,
  )
  plain = _normal(x)[:, 0]
  weak, strong = (
    (view.numpy() - (0 if normalize else _MEAN)) / (1 if normalize else _STD)
    for view in (views.weak(x, _SEED), views.strong(x, _SEED))
  )
  noise = weak - plain
  np.testing.assert_allclose(noise.mean(axis=0), 0, atol=0.005)
  np.testing.assert_allclose(noise.std(axis=0), 0.1, atol=0.005)
  gone = np.abs(strong) < 1e-5
  np.testing.assert_allclose(gone.mean(axis=0), 0.25, atol=0.02)
  np.testing.assert_allclose((strong - plain)[~gone].std(), 0.5, atol=0.01)
  # Weak and strong views have draws of their own.
  other = (strong - plain)[~gone]
  assert abs(np.corrcoef(noise[~gone], other)[0, 1]) < 0.05


def test_draws_follow_the_seed_and_the_example_alone():
  x = tf.repeat(_vectors(1), 4, axis=0)
  views = vector_views.build_views(_MEAN, _STD)
  for view in (views.weak, views.strong):
    first = view(x, _SEED).numpy()
    np.testing.assert_array_equal(first, view(x, _SEED))
    assert np.abs(first - view(x, _SEED + 1)).max() > 0
    assert len(np.unique(first, axis=0)) == 4
    draws = view.draw(4, _SEED)
    alone = view.render(x[2:3], draws[2:3])
    np.testing.assert_allclose(alone, first[2:3], rtol=1e-6)
  # The least draw there is gives no infinite number.
  assert np.isfinite(views.weak.render(x, tf.zeros([4, 3]))).all()


def test_given_views_are_drawn_evenly():
  x = tf.repeat(_vectors(1, 6), 3_000, axis=0)
  views = vector_views.build_views(_MEAN, _STD, num_weak=2, num_strong=3)
  rows = _normal(x)[0]
  for view, allowed in ((views.weak, rows[1:3]), (views.strong, rows[3:])):
    distance = np.abs(view(x, _SEED).numpy()[:, None] - allowed).max(axis=2)
    counts = (distance < 1e-5).sum(axis=0)
    assert counts.sum() == 3_000
    np.testing.assert_allclose(counts / 3_000, 1 / len(allowed), atol=0.04)


@pytest.mark.parametrize('value', [np.nan, np.inf, -np.inf, 3e38, 1e7])
def test_what_cannot_be_is_not_accepted(value):
  views = vector_views.build_views(_MEAN, _STD, num_weak=1)
  x = _vectors(3, 2).numpy()
  assert views.accepts(tf.constant(x))
  assert views.accepts(tf.constant(x[:0]))
  x[1, 1, 2] = value
  assert not views.accepts(tf.constant(x))


@pytest.mark.parametrize('mean,std', [((), ()), ((0,), (0,)), ((0,), (1, 1))])
def test_wrong_moments(mean, std):
  with pytest.raises(UsageError, match='one of each'):
    vector_views.build_views(mean, std)
