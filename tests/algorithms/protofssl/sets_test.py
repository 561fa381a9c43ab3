"""What the server keeps of prototypes, and what it predicts by them."""

import collections

import numpy as np
import pytest
import tensorflow as tf
import tiny_rounds

from tff_fssl.algorithms import protofssl
from tff_fssl.algorithms.protofssl import sets
from tff_fssl.interface import base
from tff_fssl.interface import round_hparams
from tff_fssl.models import adapter
from tff_fssl.models import server_model

_SETUP = base.Setup(num_classes=3, num_outputs=2)
_SEED = (4, 2)


def _empty(num_sets):
  return sets.empty(num_sets, _SETUP)


def _row(value, exists=(True, True, True)):
  exists = np.array(exists)
  values = np.array([[value, 1.0], [2.0, value], [value, value]], np.float32)
  return {'exists': exists, 'prototypes': values * exists[:, None]}


def _take(take, old, *rows, **kwargs):
  """The sets that `take` makes of clients' rows."""
  exists, prototypes = (
    np.array([row[name] for row in rows]).reshape(-1, *np.shape(empty))
    for name, empty in _row(0.0).items()
  )
  new = take(
    sets.Sets(*map(tf.constant, old)),
    tf.constant(exists, bool),
    tf.constant(prototypes, tf.float32),
    **kwargs,
  )
  return sets.Sets(*(value.numpy() for value in new))


def _draw(old, *rows, seed=_SEED):
  return _take(sets.draw, old, *rows, seed=tf.constant(seed))


def _same(first, second):
  for a, b in zip(first, second, strict=True):
    np.testing.assert_array_equal(a, b)


def test_the_prototypes_of_the_last_cohort():
  empty = _empty(3)
  assert not np.any(empty.exists)
  kept = _draw(empty, _row(1.0), _row(3.0, (True, False, True)))
  assert {value[0, 0] for value in kept.prototypes} == {1.0, 3.0, 0.0}
  assert sorted(kept.exists.sum(1)) == [0, 2, 3]
  # The next cohort's take their place, all of them.
  kept = _draw(kept, _row(5.0))
  assert sorted(kept.prototypes[:, 0, 0]) == [0.0, 0.0, 5.0]
  # Where nobody sends any, they stay: no rows, or clients without labels.
  _same(kept, _draw(kept))
  nobody = _row(0.0, (False, False, False))
  _same(kept, _draw(kept, nobody, nobody))
  # Such clients take no place.
  kept = _draw(_empty(1), nobody, _row(6.0), nobody)
  np.testing.assert_array_equal(kept.prototypes[0], _row(6.0)['prototypes'])


def test_medians():
  lie = {
    'exists': np.array([True] * 3),
    'prototypes': np.full([3, 2], 6.0, np.float32),
  }
  # Of the first class 1, 3, 5 and the lie; of the second 2, 2 and the lie.
  rows = [_row(1.0), _row(3.0, (True, False, False)), _row(5.0), lie]
  expected = [[(3.0 + 5.0) / 2, 1.0], [2.0, 5.0], [5.0, 5.0]]
  for order in ([0, 1, 2, 3], [3, 2, 1, 0]):
    after = _take(sets.take_medians, _empty(2), *(rows[i] for i in order))
    np.testing.assert_array_equal(after.exists, [[1, 1, 1], [0, 0, 0]])
    np.testing.assert_array_equal(after.prototypes[0], expected)
    np.testing.assert_array_equal(after.prototypes[1], 0.0)
  # Fewer than three clients do not decide: a class keeps what it had.
  for few in ([], [lie, lie], [_row(9.0, (False, False, True)), lie]):
    _same(_take(sets.take_medians, after, *few), after)


@pytest.mark.parametrize('size', [1e6, -1e6])
def test_half_of_a_class_cannot_stretch_its_prototype(size):
  lie = {
    'exists': np.array([True] * 3),
    'prototypes': np.full([3, 2], size, np.float32),
  }
  # Of the last class, as many lie as do not.
  honest = [_row(1.0), _row(2.0), _row(3.0, (True, True, False))]
  kept = _take(sets.take_medians, _empty(1), *honest, lie, lie)
  _same(kept, _take(sets.take_medians, _empty(1), *honest))
  np.testing.assert_array_equal(kept.exists, [[1, 1, 0]])
  np.testing.assert_array_equal(kept.prototypes[0, 0], [2.0, 1.0])
  # With a majority of the cohort, the sets stay finite.
  after = _take(sets.take_medians, kept, honest[0], lie, lie)
  assert np.isfinite(after.prototypes).all()


def test_which_are_kept_is_drawn_whatever_their_order():
  rows = [_row(float(value)) for value in range(1, 7)]
  chosen = collections.Counter()
  for round_num in range(1, 31):
    kept = _draw(_empty(2), *rows, seed=(round_num, 1))
    _same(kept, _draw(_empty(2), *rows[::-1], seed=(round_num, 1)))
    drawn = set(kept.prototypes[:, 0, 0])
    assert len(drawn) == 2
    chosen.update(drawn)
  assert set(chosen) == {1.0, 2.0, 3.0, 4.0, 5.0, 6.0}


@pytest.mark.parametrize(
  'change, possible',
  [
    ({}, True),
    ({'exists': np.array([True, False, True])}, False),
    ({'prototypes': np.full([3, 2], 1e11, np.float32)}, True),
    ({'prototypes': np.full([3, 2], np.nan, np.float32)}, False),
    ({'prototypes': np.full([3, 2], -0.0, np.float32)}, True),
  ],
  ids=str,
)
def test_prototypes_that_no_client_can_have(change, possible):
  values = {k: tf.constant(v) for k, v in {**_row(1.0), **change}.items()}
  algorithm = protofssl.ProtoFssl()
  assert tiny_rounds.is_possible(algorithm, values, _SETUP) == possible


_SUMS = np.array([[2.0, 4.0], [0.0, 0.0], [3.0, -1.0]], np.float32)
_COUNTS = np.array([2.0, 0.0, 1.0], np.float32)


@pytest.mark.parametrize(
  'norm, change, possible',
  [
    (0.0, {}, True),
    (0.0, {'counts': np.array([2.0, 0.0, 1.5])}, False),
    (0.0, {'counts': np.array([2.0, 0.0, 99.0])}, False),
    (0.0, {'counts': np.array([-2.0, 0.0, 1.0])}, False),
    (0.0, {'counts': np.array([2.0, 0.0, 0.0])}, False),
    (0.0, {'counts': np.array([np.nan, 0.0, 1.0])}, False),
    (1.0, {}, False),
    (9.0, {}, True),
    (9.0, {'counts': np.array([-2.0, 0.0, 1.0])}, False),
    (9.0, {'sums': np.full([3, 2], np.nan)}, False),
  ],
  ids=str,
)
def test_sums_that_no_client_can_have(norm, change, possible):
  algorithm = protofssl.ProtoFssl(
    prototypes='global',
    sum_norm=norm,
    round=round_hparams.RoundHparams(
      scenario='labels_at_clients', max_client_examples=50
    ),
  )
  values = {
    name: tf.constant(value, tf.float32)
    for name, value in {'sums': _SUMS, 'counts': _COUNTS, **change}.items()
  }
  assert tiny_rounds.is_possible(algorithm, values, _SETUP) == possible


def test_global_prototypes_are_those_of_all_examples_together():
  clients = [
    (_SUMS, _COUNTS),
    (
      np.array([[4.0, 0.0], [0.0, 0.0], [1.0, 1.0]], np.float32),
      np.array([1.0, 0.0, 3.0], np.float32),
    ),
  ]

  expected = [[[2.0, 4 / 3], [0.0, 0.0], [1.0, 0.0]]]
  # Whatever mean or sum the aggregator takes, of clipped or unclipped vectors.
  for factor in (0.5, 1.0, 1e-4):
    kept = sets.take_means(
      _empty(1),
      tf.constant(factor * sum(s for s, _ in clients)),
      tf.constant(factor * sum(c for _, c in clients)),
    )
    np.testing.assert_array_equal(kept.exists, [[True, False, True]])
    np.testing.assert_allclose(kept.prototypes, expected, rtol=1e-5)
  # No client weighed anything; noise.
  nan = np.nan * _COUNTS
  for sums, counts in (
    (_SUMS, nan),
    (nan[:, None] * _SUMS, _COUNTS),
    (0 * _SUMS, -_COUNTS),
  ):
    _same(kept, sets.take_means(kept, tf.constant(sums), tf.constant(counts)))


@pytest.mark.parametrize('norm', [0.0, 1.0, 100.0])
def test_what_a_client_adds_to_the_sum(norm):
  row = sets.make_sum_row(tf.constant(_SUMS), tf.constant(_COUNTS), norm)
  length = np.sqrt(np.sum(_SUMS**2) + np.sum(_COUNTS**2))
  factor = 1.0 / length if norm == 1.0 else 1.0
  np.testing.assert_allclose(row['sums'], factor * _SUMS, rtol=1e-6)
  np.testing.assert_allclose(row['counts'], factor * _COUNTS, rtol=1e-6)
  # Nothing to send, nothing to scale.
  zero = sets.make_sum_row(tf.zeros([3, 2]), tf.zeros([3]), norm)
  assert not np.any(zero['sums']) and not np.any(zero['counts'])


@pytest.mark.parametrize('distance', ['mse', 'euclid'])
@pytest.mark.parametrize('num_rows', [0, 2])
def test_the_exported_head_predicts_alike(distance, num_rows, tmp_path):
  layers = tf.keras.layers
  model_fn = lambda: tf.keras.Sequential(
    [tf.keras.Input([2, 2, 1]), layers.Flatten(), layers.Dense(2)]
  )
  rows = [_row(0.5, (True, False, False)), _row(0.3, (True, True, False))]
  kept = _draw(_empty(3), *rows[:num_rows])
  network = adapter.Network(model_fn, seed=1)
  prediction = sets.build_prediction(3, distance)
  model = server_model.ServerModel(
    *network.initial_weights(), control=kept._asdict()
  )
  images = tf.random.stateless_normal([5, 2, 2, 1], [1, 2])
  expected = prediction.logits(network, model, images)
  whole = prediction.head.build(network.model, 3)
  for name, values in prediction.head.values(model).items():
    whole.get_layer(name).set_weights([np.asarray(v) for v in values])
  assert all(np.all(np.isfinite(w)) for w in whole.get_weights())
  np.testing.assert_allclose(whole(images), expected, atol=1e-5)
  # Anyone can load it, without this package.
  path = str(tmp_path / 'model.keras')
  whole.save(path)
  loaded = tf.keras.models.load_model(path)
  np.testing.assert_allclose(loaded(images), expected, atol=1e-5)
  if num_rows:  # The class that nobody has.
    probs = tf.nn.softmax(expected).numpy()
    assert np.all(probs[:, 2] < 1e-6) and np.all(probs[:, :2] > 2e-6)
  else:
    np.testing.assert_allclose(tf.nn.softmax(expected), 1 / 3, atol=1e-6)
