"""ProxyFL: worked examples PX1 to PX3 of its specification, limits, rounds."""

import numpy as np
import pytest
import tensorflow as tf
import tiny_rounds
import tiny_steps
import tiny_task

from tff_fssl import seeds
from tff_fssl.algorithms import proxyfl
from tff_fssl.algorithms import sage
from tff_fssl.algorithms.proxyfl import memory as memory_lib
from tff_fssl.algorithms.proxyfl import proxies
from tff_fssl.hparams import UsageError
from tff_fssl.interface import base
from tff_fssl.interface.round_hparams import RoundHparams
from tff_fssl.models import adapter
from tff_fssl.models.weights import Weights
from tff_fssl.semisup import frequencies

_CLIENTS = tiny_rounds.CLIENTS
_AT_CLIENTS = RoundHparams(scenario=_CLIENTS)
_FEATURES = [[1, 0.2], [0.3, 1], [0.9, 0.4], [0.2, 0.8], [-0.5, 1]]
_PROXIES = [[1, 0], [0, 1], [-1, 0.5]]
_PROBS = [[0.97, 0.02, 0.01], [0.45, 0.40, 0.15], [0.96, 0.03, 0.01]]
_PROBS += [[0.10, 0.55, 0.35], [0.02, 0.01, 0.97]]
_SURE = [True, False, True, False, True]
_PRIOR = [0.4, 0.3, 0.3]


def _floats(*values):
  return tuple(tf.constant(value, tf.float32) for value in values)


def _choose(prior=_PRIOR):
  probs, prior = _floats(_PROBS, prior)
  return proxies.choose(probs, tf.constant(_SURE), prior, probs)


def _contrast(sets, shares, weights=(1,) * 5, features=_FEATURES):
  features, of_classes, weights = _floats(features, _PROXIES, weights)
  return proxies.contrast(features, of_classes, sets, shares, weights)


class TestPx1:
  """The contrastive loss of five rows, of which the first is labelled."""

  def test_classes_that_rows_may_have(self):
    sets, shares = _choose()
    expected = [{0}, {0, 1}, {0}, {1, 2}, {2}]
    assert [set(np.flatnonzero(row)) for row in sets] == expected
    z, v = (tf.math.l2_normalize(x, -1) for x in _floats(_FEATURES, _PROXIES))
    np.testing.assert_allclose(
      tf.reduce_sum(z * (shares @ v), -1),
      [0.980581, 0.512437, 0.913812, 0.609504, 0.800000],
      atol=1e-6,
    )

  def test_losses_of_rows(self):
    np.testing.assert_allclose(
      _contrast(*_choose()),
      [0.454581, 0.806837, 0.555135, 1.043891, 0.657891],
      atol=1e-6,
    )

  def test_unlabelled_rows_alone_have_a_loss(self):
    sets, shares = _choose()
    loss = tf.reduce_mean(_contrast(sets, shares[1:]))
    np.testing.assert_allclose(loss, 0.765939, atol=1e-6)

  def test_fillers_are_no_negatives(self):
    sets, shares = _choose()
    weights = np.array([1.0, 1, 0, 1, 1])
    actual = _contrast(sets, shares, weights)
    used = weights > 0
    expected = _contrast(
      tf.boolean_mask(sets, used),
      tf.boolean_mask(shares, used),
      [1] * 4,
      np.array(_FEATURES)[used],
    )
    np.testing.assert_allclose(actual[used], expected, rtol=1e-6)

  def test_a_row_without_candidates_is_not_its_own_negative(self):
    sets, shares = _choose(prior=_PROBS[1])
    assert not np.any(sets[1])
    (loss,) = _contrast(sets[1:2], shares[1:2], [1], _FEATURES[1:2])
    assert float(loss) == 0.0


_OF_CLIENTS = np.array(
  [
    [[1, 0], [0, 1], [-1, 0]],
    [[0.8, 0.4], [0.2, 0.9], [-0.6, -0.6]],
    [[1.2, -0.2], [0.5, 0.5], [-1, 0.3]],
  ],
  np.float32,
)
_MEAN = np.average(_OF_CLIENTS, axis=0, weights=[1, 1, 2]).astype(np.float32)


def _tune(of_clients=_OF_CLIENTS, **given):
  values = {
    'num_epochs': 100,
    'batch_size': 9,
    'learning_rate': 0.01,
    'has_margin': True,
    'seed': tf.constant([3, 1]),
    **given,
  }
  return proxies.tune(tf.constant(_MEAN), tf.constant(of_clients), **values)


class TestPx2:
  """The tuning of the averaged proxies by those of three clients."""

  def test_margin_and_gradient(self):
    np.testing.assert_allclose(
      _MEAN, [[1.05, 0], [0.3, 0.725], [-0.9, 0]], atol=1e-6
    )
    margin = proxies.margin(tf.constant(_MEAN))
    np.testing.assert_allclose(margin, 1.402007, atol=1e-6)
    loss, gradient = proxies.tuning_gradient(
      tf.constant(_MEAN),
      tf.constant(_OF_CLIENTS.reshape(9, 2)),
      tf.constant([0, 1, 2] * 3),
      margin,
    )
    np.testing.assert_allclose(loss, 1.306948, atol=1e-6)
    np.testing.assert_allclose(
      gradient,
      [[-0.108638, 0.072135], [0.064052, -0.248545], [0.205904, 0.071007]],
      atol=1e-6,
    )

  def test_a_hundred_steps(self):
    tuned = _tune()
    np.testing.assert_allclose(
      tuned,
      [[1.147358, -0.056146], [0.212385, 0.926099], [-1.025994, -0.021024]],
      atol=1e-5,
    )

  def test_the_order_of_clients_does_not_matter(self):
    batches = {'batch_size': 4}
    tuned = _tune(**batches)
    np.testing.assert_allclose(tuned, _tune(_OF_CLIENTS[::-1], **batches))
    assert np.abs(tuned - _tune()).max() > 1e-4
    other = _tune(**batches, seed=tf.constant([4, 1]))
    assert np.abs(tuned - other).max() > 1e-6

  def test_without_clients_they_stay(self):
    np.testing.assert_array_equal(_tune(_OF_CLIENTS[:0]), _MEAN)

  def test_a_row_on_its_proxy_has_a_finite_gradient(self):
    tuned = _tune(_MEAN[None], num_epochs=1)
    assert np.all(np.isfinite(tuned)) and np.any(tuned != _MEAN)


def test_px3_frequencies_follow_the_sum_of_counts():
  counts = np.sum([[30, 0, 0], [0, 5, 5], [4, 4, 2]], axis=0)
  prior, scaled = _floats([1 / 3] * 3, counts / 200)
  np.testing.assert_allclose(
    frequencies.follow(prior, scaled, 0.0), [0.68, 0.18, 0.14], atol=1e-6
  )
  np.testing.assert_allclose(
    frequencies.follow(prior, scaled, 0.99),
    [0.336800, 0.331800, 0.331400],
    atol=1e-6,
  )
  np.testing.assert_array_equal(
    frequencies.follow(prior, tf.constant([-1.0, 0, 0]), 0.99), prior
  )


def _network(*layers):
  network = adapter.Network(
    lambda: tf.keras.Sequential([tf.keras.Input([2]), *layers])
  )
  for i, variable in enumerate(network.trainable_variables):
    draws = tf.random.stateless_normal(variable.shape, [i, len(layers)])
    variable.assign(draws)
  return network


def _networks():
  """Two models of a hidden layer of 4, and the two projections."""
  dense = tf.keras.layers.Dense
  hidden = lambda: (dense(4, activation='tanh'), dense(3))
  model, received = _network(*hidden()), _network(*hidden())
  received.assign(
    Weights(
      tuple(1.5 * v for v in received.trainable_variables),
      (),
      tf.constant(1.0),
    )
  )
  further = {
    name: _network_of_features(use_bias)
    for name, use_bias in (('features', True), ('proxies', False))
  }
  return base.Networks(
    model, {'received': received, **further}, tiny_steps.Descents()
  )


def _network_of_features(use_bias):
  network = adapter.Network(
    lambda: tf.keras.Sequential(
      [tf.keras.Input([4]), tf.keras.layers.Dense(4, use_bias=use_bias)]
    )
  )
  for i, variable in enumerate(network.trainable_variables):
    draws = tf.random.stateless_normal(variable.shape, [i, int(use_bias)])
    variable.assign(draws)
  return network


def _batch(labeled=(1.0, 1.0), unlabeled=(1.0,) * 4):
  weak = np.array([[2.0, 0], [0, 2], [1, 1], [-1, 2]])
  batch = tiny_steps.batch(
    unlabeled=tiny_steps.examples(
      weak=weak, strong=0.8 * weak + 0.1, weights=unlabeled
    ),
    labeled=tiny_steps.examples(
      labels=[0, 1], weak=[[1, 0], [0, 1]], weights=labeled
    ),
  )
  return batch._replace(values={'prior': tf.fill([3], 1 / 3)})


def _make(threshold=0.6, **values):
  return proxyfl.ProxyFl(
    confidence_threshold=threshold, round=_AT_CLIENTS, **values
  )


class TestStep:
  """A step of the model and of both projections."""

  def test_losses_and_their_weights(self):
    batch = _batch()
    parts = [
      _make(unlabeled_loss_weight=u, proxy_loss_weight=p)
      for u, p in ((0.0, 0.0), (1.0, 0.0), (0.0, 1.0), (2.0, 3.0))
    ]
    every = [_networks() for _ in parts]
    results = [p.step(n, batch) for p, n in zip(parts, every, strict=True)]
    none, pseudo, proxy, both = (
      np.concatenate([np.ravel(g) for g in r.gradients]) for r in results
    )
    np.testing.assert_allclose(
      both, none + 2 * (pseudo - none) + 3 * (proxy - none), atol=1e-5
    )
    assert np.abs(pseudo - none).max() > 1e-3
    assert np.abs(proxy - none).max() > 1e-3
    for of_none, of_proxy, of_both in zip(
      *(tf.nest.flatten(dict(n.descend)) for n in (every[0], *every[2:])),
      strict=True,
    ):
      assert not np.any(of_none)
      np.testing.assert_allclose(3 * of_proxy, of_both, atol=1e-5)
      assert np.abs(of_proxy).max() > 1e-3
    means = tiny_steps.means(results[0].metrics)
    assert 0 < means['pseudo_label_ratio'] < 1
    assert 0 < means['candidate_classes'] < 3
    assert means['loss_proxy'] > 0

  @pytest.mark.parametrize(
    'own', [{'candidate_weights': 'local'}, {'labeled_sets': 'released'}]
  )
  def test_variants_differ(self, own):
    batch = _batch()
    # The received model gives them other classes.
    labeled = batch.labeled._replace(labels=tf.constant([2, 2]))
    batch = batch._replace(streams={**batch.streams, 'labeled': labeled})
    ours, theirs = (
      float(_make(0.9, **o)._loss(_networks(), batch)[0]) for o in ({}, own)
    )
    assert np.isfinite(theirs) and abs(ours - theirs) > 1e-4

  def test_without_the_proxies_it_is_sage_with_the_global_label(self):
    networks, batch = _networks(), _batch()
    ours = _make(proxy_loss_weight=0.0).step(networks, batch)
    theirs = sage.Sage(
      confidence_threshold=0.6, fixed_share=0.0, round=_AT_CLIENTS
    ).step(
      base.Networks(networks.model, {'global': networks['received']}), batch
    )
    for a, b in zip(ours.gradients, theirs.gradients, strict=True):
      np.testing.assert_allclose(a, b, atol=1e-6)

  def test_fillers_have_no_gradient(self):
    networks = _networks()
    result = _make().step(networks, _batch((0.0, 0.0), (0.0,) * 4))
    moves = dict(networks.descend)
    for gradient in tf.nest.flatten((result.gradients, moves)):
      assert not np.any(gradient)
    assert all(float(x) == 0 for pair in result.metrics.values() for x in pair)

  def test_xla_computes_the_same_step(self):
    networks, batch = _networks(), _batch()
    both = [
      tf.function(
        lambda b: _make().step(networks, b).gradients, jit_compile=compiled
      )(batch)
      for compiled in (True, False)
    ]
    for a, b in zip(*both, strict=True):
      np.testing.assert_allclose(a, b, atol=1e-5)


_GPT = {
  'tuning': 'gpt',
  'tuning_batch_size': 2,
  'tuning_epochs': 7,
  'tuning_learning_rate': 0.1,
}


def _rounds(num_rounds=2, norm='none', own=(), **settings):
  process = tiny_rounds.build('proxyfl', _CLIENTS, norm, own, **settings)
  return tiny_rounds.run(process, _CLIENTS, num_rounds)


def _memory(output):
  return output.state.global_model_weights.control


class TestRounds:
  """Reductions, counts, tuning."""

  def test_counts_and_projections(self):
    """Where no example is kept, the counts are those of labels."""
    own = {'confidence_threshold': 1.0, 'prior_decay': 0.9}
    first, second = _rounds(own=own)
    labels = np.concatenate(
      [c['labeled']['y'] for c in tiny_task.cohort(_CLIENTS)]
    )
    shares = np.bincount(labels, minlength=3) / len(labels)
    expected = 0.9 / 3 + 0.1 * shares
    np.testing.assert_allclose(_memory(first)['prior'], expected, atol=1e-6)
    expected = 0.9 * expected + 0.1 * shares
    np.testing.assert_allclose(_memory(second)['prior'], expected, atol=1e-6)
    for name in sum(memory_lib.WEIGHTS.values(), ()):
      assert np.any(_memory(first)[name] != _memory(second)[name])

  @pytest.mark.parametrize('tuning', ['one_step', 'gpt'])
  def test_tuning_by_a_single_client(self, tuning):
    """Its classifier is the mean; nothing else changes."""
    own = {'tuning': tuning, 'tuning_learning_rate': 0.1}
    if tuning == 'gpt':
      own = _GPT
    before, models = None, []
    for of in ({}, own):
      process = tiny_rounds.build('proxyfl', _CLIENTS, own=of)
      before = process.initialize()
      element = tiny_task.client(0, labeled=4)
      output = process.next(before, [tiny_task.dataset(element, process)])
      models.append(list(tiny_rounds.model(output).trainable))
    plain, tuned = (model.pop(-2) for model in models)
    tiny_rounds.assert_same(*models, atol=1e-6)
    received = tf.transpose(before.global_model_weights.trainable[-2])
    rows = tf.transpose(plain)
    if tuning == 'gpt':
      expected = proxies.tune(
        rows,
        rows[None],
        num_epochs=7,
        batch_size=2,
        learning_rate=0.1,
        has_margin=True,
        seed=seeds.fold_in(seeds.server_seed(5, tf.constant(1)), seeds.UPDATE),
      )
    else:
      _, gradient = proxies.tuning_gradient(
        received, rows, tf.range(3), proxies.margin(received)
      )
      expected = rows - 0.1 * gradient
    np.testing.assert_allclose(tuned, tf.transpose(expected), atol=1e-5)
    assert np.abs(tuned - plain).max() > 1e-3

  def test_tuned_rounds_repeat_in_any_order_of_clients(self):
    process = tiny_rounds.build('proxyfl', _CLIENTS, own=_GPT)
    cohort = [tiny_task.dataset(e, process) for e in tiny_task.cohort(_CLIENTS)]
    first, second = (
      process.next(process.initialize(), elements).state
      for elements in (cohort, cohort[::-1])
    )
    for a, b in zip(*map(tiny_task.flat, (first, second)), strict=True):
      np.testing.assert_allclose(a, b, atol=1e-5)
    # Without clients, nothing is tuned.
    after, _ = process.next(first, [])
    for a, b in zip(*map(tiny_task.flat, (first, after)), strict=True):
      np.testing.assert_array_equal(a, b)


_SETUP = base.Setup(num_classes=3, num_outputs=3, feature_size=lambda: 2)


class TestTrust:
  """What a client may send, and what protects it."""

  @pytest.mark.parametrize(
    'counts, is_possible',
    [
      ([0.2, 0.3, 0.5], True),
      ([0, 0, 0], True),
      ([0.5, 0.6, 0], False),
      ([-0.1, 0.2, 0], False),
      ([np.nan, 0, 0], False),
      ([np.inf, 0, 0], False),
    ],
  )
  def test_counts(self, counts, is_possible):
    uploads = {'counts': tf.constant(counts, tf.float32)}
    assert (
      tiny_rounds.is_possible(proxyfl.ProxyFl(), uploads, _SETUP) == is_possible
    )

  def test_projections_start_from_the_runs_seed(self):
    kernels = [
      memory_lib.initial(_SETUP._replace(seed=seed)).features_kernel.numpy()
      for seed in (0, 0, 1)
    ]
    first, again, other = kernels
    np.testing.assert_array_equal(first, again)
    assert np.all(first != other)

  def test_robust_refuses_what_it_cannot_bound(self):
    robust = _SETUP._replace(robust=True)
    assert proxyfl.ProxyFl().uploads(robust)
    with pytest.raises(UsageError, match='--proxyfl.tuning=none'):
      proxyfl.ProxyFl(tuning='gpt').uploads(robust)
