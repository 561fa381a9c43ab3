"""What travels, against A3 of the FedMatch specification in NumPy."""

import numpy as np
import pytest
import tensorflow as tf

from tff_fssl.algorithms.fedmatch import sparse_updates
from tff_fssl.models.weights import Weights

_SIZE, _DELTA, _ZERO = 4000, 5e-5, 5e-6


def _draw(seed):
  """Numbers around both thresholds."""
  rng = np.random.default_rng(seed)
  sizes = 10 ** rng.uniform(-7, -3, _SIZE)
  return (sizes * rng.choice([-1, 1], _SIZE)).astype(np.float32)


def _sp(w):
  return np.where(np.abs(w) > np.float32(_ZERO), w, np.float32(0))


def _nnz_cut(difference):
  return np.count_nonzero(np.abs(difference) > np.float32(_DELTA))


def _build(applied=True, threshold=_DELTA):
  return sparse_updates.SparseUpdates(threshold, {'psi': _ZERO}, applied)


def _received(own, helpers=(), weights=(), known=1.0):
  return {
    'is_known': tf.constant(known),
    'own_psi': tf.constant(own),
    'own_sigma': tf.constant(own),
    'helpers': tf.constant(np.stack(helpers)) if len(helpers) else None,
    'helper_weights': tf.constant(weights, tf.float32),
  }


def _weights(values):
  values = tf.reshape(tf.constant(values), [2, -1])
  return Weights((values,), (), tf.constant(0.0))


def _count(share):
  return round(float(share) * _SIZE)


@pytest.mark.parametrize('name, sp', [('psi', _sp), ('sigma', lambda w: w)])
@pytest.mark.parametrize('applied', [True, False])
def test_to_a_client(name, sp, applied):
  server, own = _draw(1), sp(_draw(2))
  travels, received = _build(applied), _received(own)
  start = travels.start(name)
  has = server
  if applied:
    has = start(_weights(server), received).trainable[0].numpy().reshape(-1)
    is_sent = np.abs(sp(server) - own) > np.float32(_DELTA)
    np.testing.assert_array_equal(has, np.where(is_sent, sp(server), own))
    assert 0.1 < np.mean(has == own) < 0.9
  else:
    assert start is None
  share = travels.share_down(name, _weights(has).trainable, received)
  assert _count(share) == _nnz_cut(sp(server) - own)


def test_a_new_client_gets_all():
  travels, received = _build(), _received(_draw(2), known=0.0)
  server = _draw(1)
  has = travels.start('psi')(_weights(server), received)
  np.testing.assert_array_equal(has.trainable[0].numpy().ravel(), _sp(server))
  assert float(travels.share_down('psi', has.trainable, received)) == 1.0


@pytest.mark.parametrize('applied', [True, False])
def test_from_a_client(applied):
  before, after = _draw(3), _draw(4)
  sent, share = _build(applied).cut(
    'psi', [tf.constant(before)], [tf.constant(after)]
  )
  is_sent = np.abs(_sp(after) - before) > np.float32(_DELTA)
  values = _sp(after) if applied else after
  np.testing.assert_array_equal(sent[0], np.where(is_sent, values, before))
  assert _count(share) == _nnz_cut(_sp(after) - before)


@pytest.mark.parametrize('applied', [True, False])
def test_helpers(applied):
  own, helpers = _draw(5), [_draw(6), _draw(7)]
  received = _received(own, helpers, [1.0, 0.0])
  like = _weights(own).trainable
  sets, share = _build(applied).helpers('psi', like, received)
  base = np.where(_sp(helpers[0]) != 0, _sp(own), np.float32(0))
  assert _count(share) == _nnz_cut(_sp(helpers[0]) - base)
  is_sent = np.abs(_sp(helpers[0]) - base) > np.float32(_DELTA)
  expected = np.where(is_sent, _sp(helpers[0]), base) if applied else helpers[0]
  np.testing.assert_array_equal(sets[0][0].numpy().ravel(), expected)


def test_whole_sets():
  travels = _build(threshold=None)
  received = _received(_draw(1), [_draw(2)] * 2, [1.0, 1.0])
  after = [tf.constant(_draw(4))]
  assert travels.start('psi') is None
  assert float(travels.share_down('psi', after, received)) == 1.0
  assert float(travels.helpers('psi', after, received)[1]) == 2.0
  sent, share = travels.cut('psi', [tf.constant(_draw(3))], after)
  np.testing.assert_array_equal(sent[0], after[0])
  assert float(share) == 1.0


def test_a_failed_training_is_not_hidden():
  after = np.array([np.nan, 1.0, 1e-9], np.float32)
  for applied in (True, False):
    sent, _ = _build(applied).cut('psi', [tf.zeros([3])], [tf.constant(after)])
    np.testing.assert_array_equal(sent[0], [np.nan, 1.0, 0.0])


def test_nan_stays_and_without_threshold_all_stays():
  (kept,) = sparse_updates.sparsify([tf.constant([np.nan, 0.0, -0.5])], 1.0)
  np.testing.assert_array_equal(kept, [np.nan, 0.0, 0.0])
  (kept,) = sparse_updates.sparsify([tf.constant([1e-30, -2.0])], 0.0)
  np.testing.assert_array_equal(kept, tf.constant([1e-30, -2.0]))


def test_only_large_changes_arrive():
  base = [tf.constant([1.0, 1.0, 1.0, 1.0]), tf.constant([[0.0]])]
  new = [tf.constant([1.5, 1.25, 0.0, np.nan]), tf.constant([[0.125]])]
  after = sparse_updates.overwrite(base, new, 0.25)
  np.testing.assert_array_equal(after[0], [1.5, 1.0, 0.0, np.nan])
  np.testing.assert_array_equal(after[1], [[0.0]])
  # A NaN is sent, but nobody counts it: the client is left out.
  assert float(sparse_updates.share_sent(base, new, 0.25)) == np.float32(2 / 5)
  assert float(sparse_updates.share_sent(base, base, 0.0)) == 0.0


@pytest.mark.parametrize('factor', [0.0, 0.2, 1.0])
def test_sigma_and_psi_add_up_to_the_bit(factor):
  rng = np.random.default_rng(0)
  weights = Weights(
    (tf.constant(rng.normal(size=5000).astype(np.float32)),),
    (),
    tf.constant(3.0),
  )
  sigma, psi = sparse_updates.split(weights, factor)
  both = sigma.trainable[0] + psi.trainable[0]
  np.testing.assert_array_equal(both, weights.trainable[0])
  np.testing.assert_allclose(
    psi.trainable[0], factor * sigma.trainable[0], atol=1e-6
  )
  assert sigma.statistics_count == psi.statistics_count == 3.0
