"""The terms of objectives: worked examples, gradients, what weights change."""

import numpy as np
import pytest
from scipy import special
import tensorflow as tf

from tff_fssl.local import algorithm as algorithm_lib
from tff_fssl.local import objective
from tff_fssl.local import terms
from tff_fssl.models import adapter
from tff_fssl.models.weights import Weights

_U, _L = objective.UNLABELED, objective.LABELED
_CLOCK = algorithm_lib.Clock(*tf.constant([3, 2, 4]))


class _Identity:
  """A network whose inputs are its logits."""

  def logits(self, images, *, training, weights=None):
    assert training
    return images


def _part(labels=None, weights=None, **views):
  views = {name: tf.constant(v, tf.float32) for name, v in views.items()}
  (size,) = {len(v) for v in views.values()}
  labels = [-1] * size if labels is None else labels
  weights = [1.0] * size if weights is None else weights
  return algorithm_lib.Part(
    views, tf.constant(labels, tf.int32), tf.constant(weights, tf.float32)
  )


def _batch(clock=_CLOCK, **parts):
  return algorithm_lib.Batch(parts, {}, clock, tf.constant([1, 2]))


def _means(ratios):
  return {name: float(t / n) for name, (t, n) in ratios.items() if float(n)}


def test_labels_are_counted_where_they_are_right():
  part = _part(
    weak=[[4, 0, 0], [0, 2, 0], [0, 0, 1], [9, 0, 0]],
    labels=[0, 2, 2, 0],
    weights=[1, 1, 1, 0],  # The last one is a filler.
  )
  _, ratios = objective.supervised().loss(_Identity(), _batch(**{_L: part}))
  right, total = ratios['labeled_accuracy']
  assert (float(right), float(total)) == (2, 3)


def test_fixmatch_i7():
  term = terms.fixmatch(confidence_threshold=0.95, loss_weight=1.0)
  part = _part(
    weak=[[4, 0, 0], [5, 0, 0], [0, 2, 0], [0, 0, 6]],
    strong=[[1, 0, 0], [2, 1, 0], [0, 1, 0], [0, 0, 1]],
    labels=[0, 1, 1, 2],
  )
  loss, ratios = term.loss(_Identity(), _batch(**{_U: part}))
  np.testing.assert_allclose(loss, 0.377624, atol=1e-6)
  means = _means(ratios)
  np.testing.assert_allclose(means['loss_pseudo_label'], 0.503498, atol=1e-6)
  assert means['pseudo_label_ratio'] == 0.75
  np.testing.assert_allclose(means['pseudo_label_accuracy'], 2 / 3, rtol=1e-6)


def test_uda_i7():
  term = terms.uda(confidence_threshold=0.8, temperature=0.4, loss_weight=2.0)
  part = _part(
    weak=[[2, 1, 0.1], [3, 0.5, 0.1]], strong=[[1, 0.5, 0.2], [1, 1, 0]]
  )
  loss, ratios = term.loss(_Identity(), _batch(**{_U: part}))
  np.testing.assert_allclose(loss, 2 * 0.421449, atol=2e-6)
  means = _means(ratios)
  np.testing.assert_allclose(
    means['loss_soft_pseudo_label'], 0.842897, atol=1e-6
  )
  assert means['pseudo_label_ratio'] == 0.5


@pytest.mark.parametrize(
  'round_num, step, eta',
  [(1, 0, 0.106064), (11, 0, 0.121166), (21, 0, 0.173876), (31, 0, 0.357854)]
  + [(10, 4, 0.121166), (41, 0, 1.0), (99, 1, 1.0), (0, 1, 1.0), (-9, 0, 1.0)],
)
def test_tsa_i6_rises_with_rounds_and_steps(round_num, step, eta):
  """Forty rounds; before round 1 all labels count."""
  term = terms.annealed_supervised(schedule='exp', num_rounds=40)
  clock = algorithm_lib.Clock(*tf.constant([round_num, step, 4]))

  def kept(probability):
    rest = np.log((1 - probability) / 9)
    logits = [[np.log(probability), *[rest] * 9]]
    part = _part(labels=[0], weak=logits)
    loss, ratios = term.loss(_Identity(), _batch(clock, **{_L: part}))
    means = _means(ratios)
    np.testing.assert_allclose(
      means['loss_labeled'], -np.log(probability), rtol=1e-5, atol=1e-6
    )
    assert bool(float(loss) > 0) == bool(means['tsa_ratio'])
    return bool(means['tsa_ratio'])

  assert kept(eta - 1e-5)
  assert eta == 1.0 or not kept(eta + 1e-5)


def test_mixmatch_i7_without_mixing():
  """The guess of I7, and its squared error."""
  term = terms.mixmatch(
    labeled=False,
    num_views=2,
    temperature=0.5,
    concentration=0.0,
    loss_weight=75.0,
    ramp_rounds=0,
  )
  views = np.log([[[0.5, 0.3, 0.2]], [[0.7, 0.2, 0.1]]])
  part = _part(weak_0=views[0], weak_1=views[1])
  loss, _ = term.loss(_Identity(), _batch(**{_U: part}))
  guess = np.array([0.808989, 0.140449, 0.050562])
  expected = np.mean((np.exp(views[:, 0]) - guess) ** 2)
  np.testing.assert_allclose(loss, 75 * expected, rtol=1e-5)


@pytest.mark.parametrize(
  'round_num, share', [(1, 0.0), (2, 0.25), (3, 0.5), (5, 1.0), (9, 1.0)]
)
def test_mixmatch_i7_ramp(round_num, share):
  settings = {'labeled': False, 'num_views': 1, 'temperature': 1.0}
  settings |= {'concentration': 0.0, 'loss_weight': 75.0, 'ramp_rounds': 4}
  part = _part(weak_0=[[1.0, 0.0]])
  clock = algorithm_lib.Clock(*tf.constant([round_num, 0, 4]))

  class Other(_Identity):
    """Another prediction in the second pass."""

    def __init__(self):
      self._passes = 0

    def logits(self, images, *, training, weights=None):
      self._passes += 1
      return images * self._passes

  loss, ratios = terms.mixmatch(**settings).loss(
    Other(), _batch(clock, **{_U: part})
  )
  guess = _means(ratios)['loss_guess']
  assert guess > 0.01
  np.testing.assert_allclose(loss, 75 * share * guess, rtol=1e-5)


def _model():
  """Two parameters: logits k x for two classes."""
  return tf.keras.Sequential(
    [tf.keras.Input([1]), tf.keras.layers.Dense(2, use_bias=False)]
  )


_K = np.array([0.9, -0.4])
_X = {
  'weak': np.array([1.0, 2.0, -3.0, 0.5]),
  'strong': np.array([1.2, 1.5, -2.0, 0.1]),
  'weak_0': np.array([1.0, 2.0, -3.0, 0.5]),
  'weak_1': np.array([0.8, 2.2, -2.5, 0.7]),
}
_WEIGHTS = np.array([1.0, 1.0, 0.0, 1.0])
_LABELS = np.array([0, 1, 1, 0])


def _probs(k, x):
  return special.softmax(np.outer(x, k), axis=-1)


def _log_probs(k, x):
  return special.log_softmax(np.outer(x, k), axis=-1)


def _fixmatch(k):
  q = _probs(_K, _X['weak'])
  kept = (q.max(-1) >= 0.75) * _WEIGHTS
  entropy = -_log_probs(k, _X['strong'])[np.arange(4), q.argmax(-1)]
  return 1.5 * np.mean(kept * entropy)


def _uda(k):
  z = np.outer(_X['weak'], _K)
  kept = (special.softmax(z, -1).max(-1) > 0.75) * _WEIGHTS
  target = special.softmax(z / 0.4, axis=-1)
  log_target = special.log_softmax(z / 0.4, axis=-1)
  kl = np.sum(target * (log_target - _log_probs(k, _X['strong'])), -1)
  return 1.5 * np.sum(kept * kl) / _WEIGHTS.sum()


def _mixmatch(k):
  mean = (_probs(_K, _X['weak_0']) + _probs(_K, _X['weak_1'])) / 2
  guess = mean**2 / np.sum(mean**2, -1, keepdims=True)
  errors = [
    np.mean((_probs(k, _X[name]) - guess) ** 2, -1)
    for name in ('weak_0', 'weak_1')
  ]
  labeled = -_log_probs(k, _X['weak'])[np.arange(4), _LABELS]
  of_labels = np.sum(_WEIGHTS * labeled) / _WEIGHTS.sum()
  of_guess = sum(np.sum(_WEIGHTS * e) for e in errors) / (2 * _WEIGHTS.sum())
  return of_labels + 1.5 * 0.5 * of_guess


def _annealed(k):
  labeled = -_log_probs(k, _X['weak'])[np.arange(4), _LABELS]
  correct = _probs(_K, _X['weak'])[np.arange(4), _LABELS]
  # Round 3, step 2 of 4, of 5 rounds: linear, half of the way from 1/2 to 1.
  kept = _WEIGHTS * (correct <= 0.75)
  return np.sum(kept * labeled) / max(kept.sum(), 1.0)


@pytest.mark.parametrize(
  'term, reference',
  [
    (terms.fixmatch(confidence_threshold=0.75, loss_weight=1.5), _fixmatch),
    (
      terms.uda(confidence_threshold=0.75, temperature=0.4, loss_weight=1.5),
      _uda,
    ),
    (
      terms.mixmatch(
        labeled=True,
        num_views=2,
        temperature=0.5,
        concentration=0.0,
        loss_weight=1.5,
        ramp_rounds=5,
      ),
      _mixmatch,
    ),
    (terms.annealed_supervised(schedule='linear', num_rounds=5), _annealed),
  ],
  ids=['fixmatch', 'uda', 'mixmatch', 'tsa'],
)
def test_step_against_finite_differences(term, reference):
  """In float64, with targets and masks held constant at the weights."""
  network = adapter.Network(_model)
  kernel = tf.constant(_K[None], tf.float32)
  network.assign(Weights((kernel,), (), tf.constant(1.0)))
  parts = {
    name: _part(
      labels=_LABELS,
      weights=_WEIGHTS,
      **{view: _X[view][:, None] for view in stream.views},
    )
    for name, stream in term.streams.items()
  }
  (step,) = objective.minimize(term).steps
  result = step(algorithm_lib.Networks(network), _batch(**parts))
  assert set(result.ratios) == set(term.ratios)
  expected = [
    (reference(_K + d) - reference(_K - d)) / 2e-6 for d in 1e-6 * np.eye(2)
  ]
  assert np.abs(expected).min() > 1e-3
  np.testing.assert_allclose(result.gradients[0][0], expected, rtol=1e-4)


def _weighted(name, weight):
  if name == 'fixmatch':
    return terms.fixmatch(confidence_threshold=0.5, loss_weight=weight)
  if name == 'uda':
    return terms.uda(
      confidence_threshold=0.5, temperature=0.4, loss_weight=weight
    )
  return terms.mixmatch(
    labeled=name == 'mixmatch with labels',
    num_views=2,
    temperature=0.5,
    concentration=0.75,
    loss_weight=weight,
    ramp_rounds=0,
  )


@pytest.mark.parametrize(
  'name', ['fixmatch', 'uda', 'mixmatch', 'mixmatch with labels']
)
def test_the_weight_scales_the_terms_gradient_and_no_other(name):
  network = adapter.Network(_model)
  kernel = tf.constant(_K[None], tf.float32)
  network.assign(Weights((kernel,), (), tf.constant(1.0)))

  def gradient(weight, *others):
    chosen = _weighted(name, weight), *others
    algorithm = objective.minimize(*chosen)
    parts = {
      stream: _part(
        labels=_LABELS, **{v: _X[v][:, None] for v in algorithm_stream.views}
      )
      for stream, algorithm_stream in algorithm.streams.items()
    }
    result = algorithm.steps[0](
      algorithm_lib.Networks(network), _batch(**parts)
    )
    return np.array(result.gradients[0])

  none, once, thrice = (gradient(w) for w in (0.0, 1.0, 3.0))
  np.testing.assert_allclose(thrice - none, 3 * (once - none), rtol=1e-4)
  assert np.abs(once - none).max() > 1e-3
  if name != 'mixmatch with labels':
    np.testing.assert_array_equal(none, np.zeros_like(none))
    plus = gradient(1.0, objective.supervised())
    alone = gradient(0.0, objective.supervised())
    np.testing.assert_allclose(plus - alone, once, rtol=1e-4)


def test_uda_at_its_limit_is_pseudo_labelling():
  """Threshold 0, temperature to 0: FixMatch's term with threshold 0."""
  part = _part(weak=_X['weak'][:, None] * _K, strong=_X['strong'][:, None] * _K)
  ours, _ = terms.uda(
    confidence_threshold=0.0, temperature=1e-4, loss_weight=1.0
  ).loss(_Identity(), _batch(**{_U: part}))
  theirs, _ = terms.fixmatch(confidence_threshold=0.0, loss_weight=1.0).loss(
    _Identity(), _batch(**{_U: part})
  )
  np.testing.assert_allclose(ours, theirs, rtol=1e-6)


def test_mixmatch_with_one_view_and_no_mixing_is_mean_squared_self_training():
  """alpha to 0, A = 1, T = 1: the target is the prediction: no gradient."""
  network = adapter.Network(_model, seed=1)
  term = terms.mixmatch(
    labeled=False,
    num_views=1,
    temperature=1.0,
    concentration=0.0,
    loss_weight=9.0,
    ramp_rounds=0,
  )
  part = _part(weak_0=_X['weak'][:, None])
  result = objective.minimize(term).steps[0](
    algorithm_lib.Networks(network), _batch(**{_U: part})
  )
  np.testing.assert_allclose(result.gradients[0], np.zeros([1, 2]), atol=1e-7)


@pytest.mark.parametrize('name', ['fixmatch', 'uda', 'mixmatch with labels'])
def test_fillers_change_nothing(name):
  """Beside blank fillers, the loss is that of the others, or 0."""
  term = _weighted(name, 1.0)

  def loss(weights):
    parts = {
      stream: _part(
        labels=_LABELS,
        weights=weights,
        **{
          v: np.where(np.array(weights) > 0, _X[v], 1e3)[:, None] * _K
          for v in of.views
        },
      )
      for stream, of in term.streams.items()
    }
    value, ratios = term.loss(_Identity(), _batch(**parts))
    return float(value), {
      k: (float(a), float(b)) for k, (a, b) in ratios.items()
    }

  value, ratios = loss([0.0] * 4)
  assert value == 0.0
  assert all(pair == (0.0, 0.0) for pair in ratios.values())
  assert np.isfinite(loss([1.0, 0.0, 1.0, 0.0])[0])
  assert loss([1.0, 0.0, 0.0, 0.0])[0] < 50.0


def test_compiles_with_xla():
  network = adapter.Network(_model, seed=1)
  for name in ('fixmatch', 'uda', 'mixmatch', 'mixmatch with labels'):
    algorithm = objective.minimize(_weighted(name, 1.0))
    parts = {
      stream: _part(labels=_LABELS, **{v: _X[v][:, None] for v in of.views})
      for stream, of in algorithm.streams.items()
    }

    def step(batch, algorithm=algorithm):
      return algorithm.steps[0](algorithm_lib.Networks(network), batch)

    compiled = tf.function(step, jit_compile=True)(_batch(**parts))
    plain = tf.function(step)(_batch(**parts))
    np.testing.assert_allclose(
      compiled.gradients[0], plain.gradients[0], atol=1e-5
    )


@pytest.mark.parametrize(
  'name', ['fixmatch', 'uda', 'mixmatch', 'mixmatch with labels']
)
def test_no_metric_counts_more_than_the_examples(name):
  """Else honest clients would be rejected, however many views are made."""
  term = _weighted(name, 1.0)
  parts = {
    stream: _part(labels=_LABELS, **{v: _X[v][:, None] * _K for v in of.views})
    for stream, of in term.streams.items()
  }
  _, ratios = term.loss(_Identity(), _batch(**parts))
  counts = {name: float(count) for name, (_, count) in ratios.items()}
  assert max(counts.values()) <= 4.0, counts
