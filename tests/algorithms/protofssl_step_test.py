"""A step of ProtoFSSL against its formulas in float64 NumPy.

The network is linear, 4 pixels to 3 embeddings, so that the whole loss is a few
lines; gradients are compared with central differences.
"""

import functools

import numpy as np
import pytest
import reference
import tensorflow as tf

from tff_fssl.algorithms import protofssl
from tff_fssl.algorithms.protofssl import sets
from tff_fssl.client import batches
from tff_fssl.client import optimizer
from tff_fssl.client import training
from tff_fssl.data import augment
from tff_fssl.hparams import UsageError
from tff_fssl.interface import base
from tff_fssl.interface import round_hparams
from tff_fssl.models import adapter

_AT_CLIENTS = round_hparams.RoundHparams(scenario='labels_at_clients')
_HPARAMS = functools.partial(protofssl.ProtoFssl, round=_AT_CLIENTS)
_RNG = np.random.default_rng(3)
_WEIGHTS = _RNG.normal(size=(4, 3))
# The client lacks class 1. Classes 0 and 2 have a support example and two
# queries; class 3 two support examples and no query.
_LABELS = np.array([0, 0, 0, 2, 2, 2, 3, 3])
_GROUPS = np.array([0, 1, 1, 0, 1, 1, 0, 0])
_X = _RNG.normal(size=(8, 4)) + 0.5 * _LABELS[:, None]
_U = _RNG.normal(size=(5, 4)) + 1.0
# The second of two helpers lacks class 2; nobody uses a third one.
_SETS = _RNG.normal(size=(3, 4, 3))
_EXISTS = np.array([[True] * 4, [True, True, False, True], [False] * 4])
_DISTANCES = {
  'mse': lambda squares: squares.mean(-1),
  'euclid': lambda squares: np.sqrt(squares.sum(-1)),
}


def _distances(z, prototypes, distance):
  return _DISTANCES[distance]((z[:, None] - prototypes[None]) ** 2)


def _targets(weights, hparams):
  """The helpers' mean prediction for `_U`, sharpened."""
  whole = _SETS[:2].copy()
  whole[1, 2] = whole[0, 2]
  z = _U @ weights
  probs = np.mean(
    [
      reference.softmax(-_distances(z, prototypes, hparams.distance))
      for prototypes in whole
    ],
    axis=0,
  )
  powers = probs ** (1 / hparams.temperature)
  return powers / powers.sum(-1, keepdims=True)


def _losses(weights, hparams, targets=None):
  """(loss on queries, loss on unlabelled examples); targets may be given."""
  z = _X @ weights
  support = _GROUPS == 0
  own = np.zeros((4, 3))
  for label in (0, 2, 3):
    own[label] = z[support & (_LABELS == label)].mean(0)
  held = [0, 2, 3]

  def log_probs(z):
    logs = np.full((len(z), 4), np.log(1e-7))
    scores = -_distances(z, own[held], hparams.distance)
    logs[:, held] = reference.log_softmax(scores)
    return logs

  queries = np.flatnonzero(~support)
  of_labels = -log_probs(z[queries])[range(len(queries)), _LABELS[queries]]
  if targets is None:
    targets = _targets(weights, hparams)
  of_unlabeled = -np.sum(targets * log_probs(_U @ weights), -1)
  return of_labels.mean(), of_unlabeled.mean()


def _network():
  layers = tf.keras.layers
  network = adapter.Network(
    lambda: tf.keras.Sequential(
      [
        tf.keras.Input([2, 2, 1]),
        layers.Flatten(),
        layers.Dense(3, use_bias=False),
      ]
    ),
    seed=1,
  )
  network.trainable_variables[0].assign(_WEIGHTS)
  return network


def _images(x):
  return tf.constant(x.reshape(-1, 2, 2, 1), tf.float32)


def _received(exists=_EXISTS):
  return {
    'prototypes': tf.constant(_SETS * exists[..., None], tf.float32),
    'exists': tf.constant(exists),
  }


def _step(hparams, exists=_EXISTS, weights=(1.0,) * 5):
  labeled = base.BatchExamples(
    {'plain': _images(_X)},
    tf.constant(_LABELS, tf.int32),
    tf.ones([8]),
    group=tf.constant(_GROUPS, tf.int32),
  )
  unlabeled = base.BatchExamples(
    {'plain': _images(_U)},
    tf.constant([0, 1, -1, 3, 2], tf.int32),
    tf.constant(weights),
  )
  batch = base.Batch(
    {base.LABELED: labeled, base.UNLABELED: unlabeled},
    sets.complete(_received(exists)),
    None,
    tf.constant([0, 0]),
  )
  networks = base.Networks(_network(), {})
  result = tf.function(lambda: hparams.step(networks, batch))()
  metrics = {n: (float(a), float(b)) for n, (a, b) in result.metrics.items()}
  return result.gradients[0].numpy(), metrics


@pytest.mark.parametrize('variant', ['ours', 'paper', 'code'])
def test_loss_and_gradient(variant):
  stop_gradient = variant != 'code'
  hparams = _HPARAMS(variant=variant, unlabeled_loss_weight=0.7)
  assert hparams.distance == ('euclid' if variant == 'paper' else 'mse')
  gradient, metrics = _step(hparams)
  of_labels, of_unlabeled = _losses(_WEIGHTS, hparams)
  assert metrics['loss_labeled'] == pytest.approx((4 * of_labels, 4), rel=1e-5)
  assert metrics['loss_prototype_label'] == pytest.approx(
    (5 * of_unlabeled, 5), rel=1e-5
  )
  labels = _targets(_WEIGHTS, hparams)

  def total(weights):
    terms = _losses(weights, hparams, labels if stop_gradient else None)
    return terms[0] + 0.7 * terms[1]

  expected = reference.gradient(total, _WEIGHTS)
  np.testing.assert_allclose(
    gradient, expected, atol=2e-5 + 1e-4 * stop_gradient
  )
  # It is not the other choice's gradient.
  other = reference.gradient(
    lambda w: (
      _losses(w, hparams)[0]
      + 0.7 * _losses(w, hparams, None if stop_gradient else labels)[1]
    ),
    _WEIGHTS,
  )
  assert np.max(np.abs(gradient - other)) > 1e-2


def _losses_of_global_support(weights, hparams, exists, targets=None):
  """As `_losses`, of algorithm 2: (losses, number of queries, labels)."""
  whole = {
    label: [_SETS[j, label] for j in range(3) if exists[j, label]]
    for label in range(4)
  }
  z = _X @ weights
  common, is_query, helped = np.zeros((4, 3)), np.ones(8, bool), []
  for label in range(4):
    if whole[label]:
      common[label] = np.mean(whole[label], axis=0)
      helped.append(label)
    elif label in _LABELS:
      of_support = (_GROUPS == 0) & (_LABELS == label)
      common[label] = z[of_support].mean(0)
      is_query &= ~of_support
  held = [k for k in range(4) if k in helped or k in _LABELS]

  def log_probs(z, prototypes, classes):
    logs = np.full((len(z), 4), np.log(1e-7))
    scores = -_distances(z, prototypes[classes], hparams.distance)
    logs[:, classes] = reference.log_softmax(scores)
    return logs

  of_labels = -log_probs(z, common, held)[range(8), _LABELS]
  z = _U @ weights
  if targets is None:
    probs = np.zeros((5, 4))
    used = [j for j in range(3) if exists[j].any()]
    for j in used:
      of_j = np.where(exists[j][:, None], _SETS[j], common)
      probs[:, helped] += np.exp(log_probs(z, of_j, helped))[:, helped]
    probs /= len(used)
    powers = probs ** (1 / hparams.temperature)
    targets = powers / powers.sum(-1, keepdims=True)
  of_unlabeled = -np.sum(targets * log_probs(z, common, held), -1)
  losses = of_labels[is_query].mean(), of_unlabeled.mean()
  return losses, is_query.sum(), targets


_WITHOUT_CLASS_0 = _EXISTS & [False, True, True, True]
_WITHOUT_CLASS_1 = _EXISTS & [True, False, True, True]


@pytest.mark.parametrize('variant', ['ours', 'paper'])
@pytest.mark.parametrize(
  'exists, num_queries',
  [(_EXISTS, 8), (_WITHOUT_CLASS_0, 7), (_WITHOUT_CLASS_1, 8)],
  ids=['all', 'no class 0', 'no class 1'],
)
def test_global_support(variant, exists, num_queries):
  """Section B.1: no gradient through prototypes; each example is a query.

  Of class 0, which no helper has, the client's own support example stands in.
  Of class 1 nobody has any: it is in no softmax.
  """
  hparams = _HPARAMS(
    support='global', variant=variant, unlabeled_loss_weight=0.7
  )
  gradient, metrics = _step(hparams, exists=exists)
  (of_labels, of_unlabeled), counted, labels = _losses_of_global_support(
    _WEIGHTS, hparams, exists
  )
  assert counted == num_queries
  assert metrics['loss_labeled'] == pytest.approx(
    (counted * of_labels, counted), rel=1e-5
  )
  assert metrics['loss_prototype_label'] == pytest.approx(
    (5 * of_unlabeled, 5), rel=1e-5
  )

  def total(weights):
    terms, *_ = _losses_of_global_support(weights, hparams, exists, labels)
    return terms[0] + 0.7 * terms[1]

  expected = reference.gradient(total, _WEIGHTS)
  np.testing.assert_allclose(gradient, expected, atol=1e-4)
  own, _ = _step(
    _HPARAMS(variant=variant, unlabeled_loss_weight=0.7), exists=exists
  )
  assert np.max(np.abs(gradient - own)) > 1e-2


def test_global_support_is_the_clients_own_without_helpers():
  none = np.zeros_like(_EXISTS)
  own, expected = _step(_HPARAMS(), exists=none)
  gradient, metrics = _step(_HPARAMS(support='global'), exists=none)
  np.testing.assert_array_equal(gradient, own)
  assert metrics == expected
  # Helpers' prototypes also count where there is nothing to label.
  weights = (0.0,) * 5
  gradient, metrics = _step(_HPARAMS(support='global'), weights=weights)
  assert np.max(np.abs(gradient - own)) > 1e-2
  assert metrics['loss_labeled'][1] == 8.0


def test_one_set_without_sharpening_teaches_nothing_as_support():
  """What `ProtoFssl` refuses: labels that are the predictions."""
  exists = _EXISTS & [[True], [False], [False]]
  own = {'support': 'global', 'num_helpers': 1}
  with pytest.raises(UsageError, match='temperature=1.0: .*nothing is learnt'):
    _HPARAMS(temperature=1.0, **own)
  near = _HPARAMS(temperature=1.0 + 1e-6, unlabeled_loss_weight=9.0, **own)
  alone = _HPARAMS(temperature=1.0, unlabeled_loss_weight=0.0, **own)
  (gradient, _), (expected, _) = (
    _step(h, exists=exists) for h in (near, alone)
  )
  np.testing.assert_allclose(gradient, expected, atol=1e-4)


def test_pseudo_labels_are_measured():
  _, metrics = _step(_HPARAMS())
  predicted = _targets(_WEIGHTS, _HPARAMS()).argmax(-1)
  right = np.sum(predicted[[0, 1, 3, 4]] == [0, 1, 3, 2])
  assert metrics['pseudo_label_ratio'] == (5.0, 5.0)
  assert metrics['pseudo_label_correct_ratio'] == (right, 4.0)


@pytest.mark.parametrize(
  'without', [{'exists': np.zeros_like(_EXISTS)}, {'weights': (0.0,) * 5}]
)
def test_only_the_supervised_term_without_helpers_or_examples(without):
  hparams = _HPARAMS()
  gradient, metrics = _step(hparams, **without)
  expected = reference.gradient(lambda w: _losses(w, hparams)[0], _WEIGHTS)
  np.testing.assert_allclose(gradient, expected, atol=1e-4)
  assert metrics['loss_prototype_label'] == (0.0, 0.0)
  assert metrics['pseudo_label_ratio'] == (0.0, 0.0)


def test_episodes_are_those_of_the_hyper_parameters():
  algorithm = _HPARAMS(num_support=3, num_query=4)
  streams = algorithm.streams()
  assert streams[base.LABELED].episode == (3, 4)
  assert streams[base.UNLABELED].episode == ()
  assert batches.draws_episodes(streams)


_VIEWS = augment.Views(
  plain=lambda x: tf.cast(x, tf.float32),
  weak=lambda x, seed: tf.cast(x, tf.float32),
  strong=lambda x, seed: tf.cast(x, tf.float32),
)


def _train(hparams=_HPARAMS(), exists=_EXISTS, unlabeled=_U, **config):
  """A client's round, of three episodes unless `config` says otherwise."""
  network = _network()
  settings = {'num_epochs': 3, 'optimizer': optimizer.Sgd(), **config}
  loop = training.LocalTraining(
    network,
    hparams,
    _VIEWS,
    training.LoopConfig(batch_size=4, labeled_batch_size=4, **settings),
  )
  return tf.function(
    lambda: loop.run(
      network.initial_weights()._replace(
        trainable=(tf.constant(_WEIGHTS, tf.float32),)
      ),
      base.Examples(_images(_X), tf.constant(_LABELS, tf.int32)),
      base.Examples(_images(unlabeled), tf.zeros([len(unlabeled)], tf.int32)),
      learning_rate=tf.constant(0.1),
      seed=tf.constant([1, 2]),
      received=_received(exists),
    )
  )()


def test_what_a_client_sends():
  result = _train()
  after = _WEIGHTS - result.update[0].numpy()
  row = result.uploads
  np.testing.assert_array_equal(row['exists'], [True, False, True, True])
  for label in (0, 2, 3):
    expected = (_X[_LABELS == label] @ after).mean(0)
    np.testing.assert_allclose(row['prototypes'][label], expected, atol=1e-4)
  np.testing.assert_array_equal(row['prototypes'][1], 0.0)
  # Noise is on what is sent alone.
  noised = _train(_HPARAMS(prototype_noise=0.3))
  np.testing.assert_array_equal(noised.update[0], result.update[0])
  noise = (noised.uploads['prototypes'] - row['prototypes']).numpy()
  np.testing.assert_array_equal(noise[1], 0.0)
  assert 0.1 < noise[[0, 2, 3]].std() < 0.6
  # As sums and numbers.
  for norm in (0.0, 1.0):
    sums = _train(_HPARAMS(prototypes='global', sum_norm=norm)).uploads
    length = np.sqrt(sum(np.sum(np.square(v)) for v in sums.values()))
    assert length == pytest.approx(1.0) if norm else length > 2.0
    ratio = sums['counts'].numpy() / sums['counts'].numpy().sum()
    np.testing.assert_allclose(ratio, [3 / 8, 0, 3 / 8, 2 / 8], rtol=1e-5)
    np.testing.assert_allclose(
      sums['sums'][2] / sums['counts'][2], row['prototypes'][2], rtol=1e-5
    )


def test_i14_the_proximal_term_pulls_by_mu_times_the_change():
  """Two steps of one gradient each; the second one has the term."""
  mu, rate = 0.5, 0.1
  first, plain, pulled = (
    _train(num_epochs=epochs, proximal_strength=strength).update[0].numpy()
    for epochs, strength in ((1, 0.0), (2, 0.0), (2, mu))
  )
  np.testing.assert_allclose(plain - pulled, rate * mu * first, atol=1e-6)
