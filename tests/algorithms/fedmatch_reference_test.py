"""FedMatch's client against a NumPy float64 reference; what each flag does.

The model has two parameters, logits (k x + b, 0), so that gradients are written
down by hand. One batch holds all examples, so that their order is irrelevant.
"""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf

from tff_fssl.algorithms import fedmatch
from tff_fssl.client import optimizer
from tff_fssl.client import training
from tff_fssl.data import augment
from tff_fssl.interface import base
from tff_fssl.interface import round_hparams
from tff_fssl.models import adapter
from tff_fssl.models.weights import Weights

_CLIENTS, _SERVER = 'labels_at_clients', 'labels_at_server'
_X = np.array([-2.0, -0.7, 0.1, 0.4, 1.5, 3.0])
_LABELED_X = np.array([-1.0, 0.5, 2.0])
_LABELS = np.array([1, 0, 1])
_SHIFT = 0.6  # Of a strong view.
_SIGMA, _PSI = np.array([0.8, -0.3]), np.array([0.3, 0.1])
_HELPERS = np.array([[-0.9, 0.8], [0.4, -0.9]])
_STEPS, _RATE = 3, 0.02
# Large enough to be seen beside the penalties.
_HPARAMS = fedmatch.FedMatch(
  confidence_threshold=0.6,
  labeled_loss_weight=3.0,
  pseudo_label_weight=0.9,
  consistency_weight=0.7,
  l1_weight=0.05,
  l2_weight=0.4,
  delta_threshold=-1.0,
)
_VIEWS = augment.Views(
  plain=lambda x: x,
  weak=lambda x, seed: x + np.nan,  # FedMatch has none.
  strong=lambda x, seed: x + _SHIFT,
)


def _model():
  inputs = tf.keras.Input([1])
  first = tf.keras.layers.Dense(1)(inputs)
  ops = tf.keras.ops
  logits = ops.concatenate([first, ops.zeros_like(first)], -1)
  return tf.keras.Model(inputs, logits)


def _probs(theta, x):
  first = 1 / (1 + np.exp(-(theta[0] * x + theta[1])))
  return np.stack([first, 1 - first], -1)


def _pull_back(by_first_logit, x):
  """A gradient by the first logit, [N], as one by (k, b)."""
  return np.array([np.sum(by_first_logit * x), np.sum(by_first_logit)])


def _reference(hparams, scenario, rate, num_helpers):
  """(sigma, psi) after `_STEPS`, the mean loss that drives the rate."""
  sigma, psi = _SIGMA.copy(), _PSI.copy()
  if not hparams.decomposition:
    psi = np.zeros(2)
  of_helpers = [
    _probs((_SIGMA if hparams.decomposition else 0) + h, _X)
    for h in _HELPERS[:num_helpers]
  ]
  losses = []
  for _ in range(_STEPS):
    if scenario == _CLIENTS:
      probs = _probs(sigma + psi, _LABELED_X)
      losses.append(-np.log(probs[np.arange(3), _LABELS]).mean())
      error = (probs - np.eye(2)[_LABELS])[:, 0] / 3
      step = hparams.labeled_loss_weight * _pull_back(error, _LABELED_X)
      sigma = sigma - rate * step
    theta = sigma + psi
    plain, strong = _probs(theta, _X), _probs(theta, _X + _SHIFT)
    mask = (plain.max(1) >= hparams.confidence_threshold).astype(float)
    mask /= max(mask.sum(), 1)
    votes = np.eye(2)[plain.argmax(1)]
    if hparams.agreement:
      for p in of_helpers:
        votes = votes + np.eye(2)[p.argmax(1)]
    if hparams.variant != 'code':
      votes = votes + 0.5 * np.eye(2)[plain.argmax(1)]
    labels = votes.argmax(1)
    error = (strong - np.eye(2)[labels])[:, 0] * mask
    gradient = hparams.pseudo_label_weight * _pull_back(error, _X + _SHIFT)
    if of_helpers:
      error = (plain - np.mean(of_helpers, 0))[:, 0] * mask
      gradient += hparams.consistency_weight * _pull_back(error, _X)
    if scenario == _SERVER:
      own = plain.argmax(1)
      losses.append(-np.log(strong[np.arange(len(_X)), own]).mean())
    if not hparams.decomposition:
      sigma = sigma - rate * gradient
      continue
    gradient += hparams.l1_weight * np.sign(psi)
    gradient += 2 * hparams.l2_weight * (psi - sigma)
    psi = psi - rate * gradient
  return sigma, psi, np.mean(losses)


def _weights(theta):
  k, b = np.asarray(theta, np.float32)
  return Weights((tf.constant([[k]]), tf.constant([b])), (), tf.constant(0.0))


def _received(hparams, num_helpers, rate=1.0, own=None, **changed):
  own = np.zeros(2) if own is None else own
  received = {
    'is_known': 0.0,
    'own_sigma': own,
    'own_psi': own,
    'helpers': _HELPERS * (np.arange(2) < num_helpers)[:, None],
    'helper_weights': np.arange(2) < num_helpers,
    'lowest': 1e9,
    'remaining': float(hparams.patience),
    'rate': rate,
    **changed,
  }
  return {k: tf.constant(v, tf.float32) for k, v in received.items()}


def _client(hparams, scenario, received, labels=_LABELS, x=_X):
  """(sigma, psi or (), result) of a client's round."""
  algorithm = dataclasses.replace(
    hparams, round=round_hparams.RoundHparams(scenario=scenario)
  )
  local = training.LocalTraining(
    adapter.Network(_model, trace=False),
    algorithm,
    _VIEWS,
    training.LoopConfig(_STEPS, 100, 100, optimizer.Sgd()),
    {
      name: adapter.Network(_model, trace=False)
      for name in algorithm.networks()
    },
  )
  column = lambda v: tf.constant(v[:, None], tf.float32)
  num = len(labels) if scenario == _CLIENTS else 0

  @tf.function
  def run(received):
    return local.run(
      _weights(_SIGMA),
      base.Examples(
        column(_LABELED_X[:num]), tf.constant(labels[:num], tf.int32)
      ),
      base.Examples(column(x), tf.fill([len(x)], -1)),
      learning_rate=tf.constant(_RATE),
      seed=tf.constant([3, 4]),
      received={'psi': _weights(_PSI), **received},
    )

  result = run(received)
  flat = lambda tensors: np.concatenate([np.ravel(t) for t in tensors])
  sigma = _SIGMA - flat(result.update)
  of_psi = result.auxiliary.get('psi')
  psi = _PSI - flat(of_psi) if of_psi else ()
  return sigma, psi, result


@pytest.mark.parametrize(
  'scenario, num_helpers, changed',
  [
    (_CLIENTS, 2, {}),
    (_SERVER, 2, {}),
    (_SERVER, 0, {}),
    (_CLIENTS, 1, {'variant': 'code'}),
    (_CLIENTS, 2, {'agreement': False, 'l1_weight': 0.0}),
    (_CLIENTS, 2, {'decomposition': False}),
    (_SERVER, 2, {'decomposition': False}),
  ],
)
def test_a_round_of_a_client(scenario, num_helpers, changed):
  hparams = dataclasses.replace(_HPARAMS, **changed)
  received = _received(hparams, num_helpers, rate=0.5)
  sigma, psi, result = _client(hparams, scenario, received)
  expected = _reference(hparams, scenario, 0.5 * _RATE, num_helpers)
  np.testing.assert_allclose(sigma, expected[0], atol=2e-6)
  if hparams.decomposition:
    np.testing.assert_allclose(psi, expected[1], atol=2e-6)
  row = result.uploads
  np.testing.assert_allclose(row['lowest'], expected[2], rtol=1e-5)
  assert float(row['rate']) == 0.5
  kept = psi if hparams.decomposition else sigma
  name = 'psi' if hparams.decomposition else 'sigma'
  np.testing.assert_allclose(row[name], kept, atol=1e-6)
  ratios = {k: float(t / n) for k, (t, n) in result.metrics.items()}
  sets = 2 if hparams.decomposition else 1
  assert ratios['percent_down'] == 100.0 * (sets + num_helpers)
  moved = 1 if scenario == _SERVER else sets
  assert ratios['percent_up'] == 100.0 * moved
  assert ratios['helped_clients'] == float(num_helpers > 0)


def test_penalties_remain_without_confident_examples():
  hparams = dataclasses.replace(_HPARAMS, confidence_threshold=1.0)
  received = _received(hparams, 2)
  sigma, psi, result = _client(hparams, _SERVER, received)
  expected = _PSI.copy()
  for _ in range(_STEPS):
    expected -= _RATE * (0.05 * np.sign(expected) + 0.8 * (expected - _SIGMA))
  np.testing.assert_allclose(psi, expected, atol=1e-6)
  np.testing.assert_allclose(sigma, _SIGMA, atol=1e-6)
  assert float(result.metrics['loss_pseudo_label'][1]) == 0.0


def test_the_loss_of_a_client_decides_its_own_rate():
  """A4: in the authors' code a client got the rate of the one before."""
  hparams = dataclasses.replace(_HPARAMS, patience=2)
  received = _received(hparams, 0, lowest=1e-6, remaining=1.0, rate=0.9)
  *_, result = _client(hparams, _CLIENTS, received)
  row = result.uploads
  np.testing.assert_allclose(row['rate'], 0.3, rtol=1e-6)
  assert float(row['remaining']) == 2.0
  assert float(row['lowest']) == np.float32(1e-6)
  # Without labels there is no loss, so nothing changes.
  *_, result = _client(hparams, _CLIENTS, received, labels=_LABELS[:0])
  assert float(result.uploads['rate']) == np.float32(0.9)
  assert float(result.uploads['remaining']) == 1.0


def test_deltas_are_relative_to_what_the_client_has():
  """The client starts from its own values where the server's are close."""
  hparams = dataclasses.replace(
    _HPARAMS,
    delta_threshold=0.05,
    psi_threshold=0.0,
    labeled_loss_weight=0.0,
    pseudo_label_weight=0.0,
    consistency_weight=0.0,
    l1_weight=0.0,
    l2_weight=0.0,
  )
  received = _received(
    hparams,
    0,
    is_known=1.0,
    own_sigma=_SIGMA + [0.01, 0.2],
    own_psi=_PSI + [-0.3, -0.04],
  )
  *_, result = _client(hparams, _CLIENTS, received)
  row = result.uploads
  np.testing.assert_allclose(row['sigma'], _SIGMA + [0.01, 0.0], atol=1e-6)
  np.testing.assert_allclose(row['psi'], _PSI + [0.0, -0.04], atol=1e-6)
  # It has not moved from there.
  for change in tf.nest.flatten((result.update, result.auxiliary)):
    assert not np.any(change)
  ratios = {k: float(t / n) for k, (t, n) in result.metrics.items()}
  assert ratios['percent_down'] == 100.0
  assert ratios['percent_up'] == 0.0


def test_deltas_with_threshold_0_change_nothing():
  deltas = dataclasses.replace(_HPARAMS, delta_threshold=0.0, psi_threshold=0.0)
  known = {'is_known': 1.0, 'own': np.array([0.5, 0.25])}
  whole = _client(_HPARAMS, _CLIENTS, _received(_HPARAMS, 2))[2]
  sparse = _client(deltas, _CLIENTS, _received(deltas, 2, **known))[2]
  for a, b in zip(
    tf.nest.flatten((whole.update, whole.auxiliary)),
    tf.nest.flatten((sparse.update, sparse.auxiliary)),
    strict=True,
  ):
    np.testing.assert_array_equal(a, b)


def test_no_data_and_nan():
  for x in (_X[:0], _X * np.nan):
    *_, result = _client(
      _HPARAMS, _SERVER, _received(_HPARAMS, 2), labels=_LABELS[:0], x=x
    )
    assert bool(result.is_finite) == (len(x) == 0)
    assert not any(
      np.any(u) for u in tf.nest.flatten((result.update, result.auxiliary))
    )
