"""What the server keeps of prototypes, and what it predicts by them."""

import collections

import numpy as np
import pytest
import tensorflow as tf

from tff_fssl.algorithms.protofssl import sets
from tff_fssl.interface import exchange as exchange_lib
from tff_fssl.models import adapter
from tff_fssl.models import server_model
from tff_fssl.rounds import messages

_POPULATION = exchange_lib.Population(0, (), num_classes=3, num_outputs=2)
_ROUND = tf.constant(4)


def _list(num_sets, interval=1):
  return sets.build_list(_POPULATION, num_sets=num_sets, interval=interval)


def _row(value, exists=(True, True, True)):
  exists = np.array(exists)
  values = np.array([[value, 1.0], [2.0, value], [value, value]], np.float32)
  return {'exists': exists, 'prototypes': values * exists[:, None]}


def _rows(*rows):
  names = rows[0] if rows else _row(0.0)
  shapes = {n: np.shape(v) for n, v in _row(0.0).items()}
  return exchange_lib.Rows(
    tf.zeros([len(rows)], tf.int32),
    {
      name: tf.constant(
        np.array([row[name] for row in rows]).reshape(-1, *shapes[name]),
        names[name].dtype,
      )
      for name in shapes
    },
  )


def _accept(exchange, table, *rows, round_num=_ROUND):
  table = tf.nest.map_structure(tf.constant, table)
  table = exchange.accept(table, _rows(*rows), None, round_num)
  return tf.nest.map_structure(lambda value: value.numpy(), table)


def _same(first, second):
  assert list(first) == list(second)
  for name, value in first.items():
    np.testing.assert_array_equal(value, second[name])


def test_a_list_of_the_last_cohort():
  exchange = _list(3)
  empty = exchange.initialize()
  assert not np.any(empty['exists'])
  table = _accept(exchange, empty, _row(1.0), _row(3.0, (True, False, True)))
  kept = {value[0, 0] for value in table['prototypes']}
  assert kept == {1.0, 3.0, 0.0}
  assert sorted(table['exists'].sum(1)) == [0, 2, 3]
  # The next cohort's take their place, all of them.
  table = _accept(exchange, table, _row(5.0))
  assert sorted(table['prototypes'][:, 0, 0]) == [0.0, 0.0, 5.0]
  # Where nobody sends any, they stay: no rows, or clients without labels.
  _same(table, _accept(exchange, table))
  nobody = _row(0.0, (False, False, False))
  _same(table, _accept(exchange, table, nobody, nobody))
  # Such clients take no place.
  table = _accept(_list(1), _list(1).initialize(), nobody, _row(6.0), nobody)
  np.testing.assert_array_equal(table['prototypes'][0], _row(6.0)['prototypes'])


@pytest.mark.parametrize('interval', [1, 2])
def test_with_a_robust_aggregator_medians_are_kept(interval):
  exchange = sets.build_list(
    _POPULATION._replace(robust=True), num_sets=2, interval=interval
  )
  table = exchange.initialize()
  lie = {
    'exists': np.array([True] * 3),
    'prototypes': np.full([3, 2], 6.0, np.float32),
  }
  # Of the first class 1, 3, 5 and the lie; of the second 2, 2 and the lie.
  rows = [_row(1.0), _row(3.0, (True, False, False)), _row(5.0), lie]
  expected = [[(3.0 + 5.0) / 2, 1.0], [2.0, 5.0], [5.0, 5.0]]
  for order in ([0, 1, 2, 3], [3, 2, 1, 0]):
    after = _accept(exchange, table, *(rows[i] for i in order))
    np.testing.assert_array_equal(after['exists'], [[1, 1, 1], [0, 0, 0]])
    np.testing.assert_array_equal(after['prototypes'][0], expected)
    np.testing.assert_array_equal(after['prototypes'][1], 0.0)
  # Fewer than three clients do not decide: a class keeps what it had.
  for few in ([], [lie, lie], [_row(9.0, (False, False, True)), lie]):
    later = _accept(exchange, after, *few)
    np.testing.assert_array_equal(later['exists'], after['exists'])
    np.testing.assert_array_equal(later['prototypes'], after['prototypes'])
  sent = exchange.message(after, None, _ROUND)
  np.testing.assert_array_equal(sent['prototypes'][0], expected)


@pytest.mark.parametrize('size', [1e6, -1e6])
def test_half_of_a_class_cannot_stretch_its_prototype(size):
  exchange = sets.build_list(_POPULATION._replace(robust=True), num_sets=1)
  lie = {
    'exists': np.array([True] * 3),
    'prototypes': np.full([3, 2], size, np.float32),
  }
  # Of the last class, as many lie as do not.
  honest = [_row(1.0), _row(2.0), _row(3.0, (True, True, False))]
  table = _accept(exchange, exchange.initialize(), *honest, lie, lie)
  expected = _accept(exchange, exchange.initialize(), *honest)
  _same(table, expected)
  np.testing.assert_array_equal(table['exists'], [[1, 1, 0]])
  np.testing.assert_array_equal(table['prototypes'][0, 0], [2.0, 1.0])
  # With a majority of the cohort, the sets stay finite.
  after = _accept(exchange, table, honest[0], lie, lie)
  assert np.isfinite(after['prototypes']).all()


def test_which_are_kept_is_drawn_whatever_their_order():
  exchange = _list(2)
  rows = [_row(float(value)) for value in range(1, 7)]
  chosen = collections.Counter()
  for round_num in range(1, 31):
    round_num = tf.constant(round_num)
    table = _accept(exchange, exchange.initialize(), *rows, round_num=round_num)
    other = _accept(
      exchange, exchange.initialize(), *rows[::-1], round_num=round_num
    )
    _same(table, other)
    drawn = set(table['prototypes'][:, 0, 0])
    assert len(drawn) == 2
    chosen.update(drawn)
  assert set(chosen) == {1.0, 2.0, 3.0, 4.0, 5.0, 6.0}


def _rounds(interval, cohorts, first=1):
  """(The value that stands for the sent sets, the table) after each round."""
  exchange = _list(2, interval)
  table, history = exchange.initialize(), []
  for round_num, rows in enumerate(cohorts, start=first):
    sent = exchange.message(table, None, tf.constant(round_num))
    received = exchange.receive(sent, tf.constant(0))
    assert list(received) == ['exists', 'prototypes']
    values = np.asarray(received['prototypes'])[:, 0, 0]
    values = values[np.any(received['exists'], axis=1)]
    table = _accept(exchange, table, *rows, round_num=tf.constant(round_num))
    history.append((list(values), table))
  return history


def test_sets_that_are_sent_for_some_rounds():
  """Interval 3: those of rounds 3 and 6 are sent, from the round after."""
  cohorts = [[_row(float(round_num))] for round_num in range(1, 9)]
  history = _rounds(3, cohorts)
  assert [sent for sent, _ in history] == [
    [], [], [], [3.0], [3.0], [3.0], [6.0], [6.0],
  ]  # fmt: skip
  for round_num, (_, table) in enumerate(history, start=1):
    # What predicts is always of the round itself.
    latest = sets.complete(table)['prototypes'][:, 0, 0]
    assert latest[0] == round_num
  # In each round, as without the flag: one round later.
  (without,) = {len(table) for _, table in _rounds(1, cohorts)}
  assert without == 2
  assert [sent for sent, _ in _rounds(1, cohorts)] == [
    [], *([float(round_num)] for round_num in range(1, 8)),
  ]  # fmt: skip


def test_rounds_that_send_nothing_between_those_that_are_due():
  nobody = _row(0.0, (False, False, False))
  cohorts = [[_row(float(round_num))] for round_num in range(1, 8)]
  cohorts[2], cohorts[5], cohorts[4] = [nobody], [], [nobody, nobody]
  history = _rounds(3, cohorts)
  # Where nobody sends any in a round that counts, the last ones are sent.
  sent = [sent for sent, _ in history]
  assert sent == [[], [], [], [2.0], [2.0], [2.0], [4.0]]
  latest = [table['prototypes'][0, 0, 0] for _, table in history]
  assert latest == [1.0, 2.0, 2.0, 4.0, 4.0, 4.0, 7.0]


def test_an_interval_of_one_is_none():
  rows = [_row(float(value)) for value in range(1, 5)]
  default = sets.build_list(_POPULATION, num_sets=2)
  table = default.initialize()
  assert list(table) == ['exists', 'prototypes']
  assert default.message(table, None, _ROUND) is table
  _same(_accept(default, table, *rows), _accept(_list(2), table, *rows))
  held = _list(2, 5)
  table = _accept(held, held.initialize(), *rows)
  assert list(table) == ['exists', 'prototypes', 'sent']
  _same(
    {name: table[name] for name in ('exists', 'prototypes')},
    _accept(default, default.initialize(), *rows),
  )


@pytest.mark.parametrize(
  'change, possible',
  [
    ({}, True),
    ({'exists': np.array([True, False, True])}, False),
    ({'prototypes': np.full([3, 2], 1e11, np.float32)}, True),
    ({'prototypes': np.full([3, 2], 1e13, np.float32)}, False),
    ({'prototypes': np.full([3, 2], np.nan, np.float32)}, False),
    ({'prototypes': np.full([3, 2], -np.inf, np.float32)}, False),
    ({'prototypes': np.full([3, 2], -0.0, np.float32)}, True),
  ],
  ids=str,
)
def test_rows_that_no_client_can_have(change, possible):
  values = {k: tf.constant(v) for k, v in {**_row(1.0), **change}.items()}
  row = {'client_id': tf.constant(0), 'values': values}
  assert bool(messages.is_possible_row(_list(2), row)) == possible


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
  exchange = sets.build_global(_POPULATION, norm=norm, max_examples=50)
  values = {'sums': _SUMS, 'counts': _COUNTS, **change}
  row = {
    'client_id': tf.constant(0),
    'values': {k: tf.constant(v, tf.float32) for k, v in values.items()},
  }
  assert bool(messages.is_possible_row(exchange, row)) == possible


def test_global_prototypes_are_those_of_all_examples_together():
  exchange = sets.build_global(_POPULATION, norm=0.0, max_examples=50)
  clients = [
    (_SUMS, _COUNTS),
    (
      np.array([[4.0, 0.0], [0.0, 0.0], [1.0, 1.0]], np.float32),
      np.array([1.0, 0.0, 3.0], np.float32),
    ),
  ]

  def accept(table, *rows):
    values = {
      name: tf.constant(np.array([row[name] for row in rows]), tf.float32)
      for name in ('sums', 'counts')
    }
    if not rows:
      values = {'sums': tf.zeros([0, 3, 2]), 'counts': tf.zeros([0, 3])}
    rows = exchange_lib.Rows(tf.zeros([len(rows)], tf.int32), values)
    return exchange.accept(table, rows, None, _ROUND)

  expected = [[[2.0, 4 / 3], [0.0, 0.0], [1.0, 0.0]]]
  # Whatever mean or sum the aggregator takes, of clipped or unclipped vectors.
  for factor in (0.5, 1.0, 1e-4):
    row = {
      'sums': factor * sum(s for s, _ in clients),
      'counts': factor * sum(c for _, c in clients),
    }
    table = accept(exchange.initialize(), row)
    np.testing.assert_array_equal(table['exists'], [[True, False, True]])
    np.testing.assert_allclose(table['prototypes'], expected, rtol=1e-5)
  for kept in (
    accept(table),
    accept(table, {'sums': 0 * _SUMS, 'counts': -_COUNTS}),
  ):
    _same(table, kept)


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
  exchange = _list(3)
  rows = [_row(0.5, (True, False, False)), _row(0.3, (True, True, False))]
  table = exchange.initialize()
  if num_rows:
    table = exchange.accept(table, _rows(*rows), None, _ROUND)
  network = adapter.Network(model_fn, seed=1)
  prediction = sets.build_prediction(3, distance)
  model = server_model.ServerModel(*network.initial_weights())
  model = prediction.completed(model, table)
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


def test_which_are_kept_depends_on_the_runs_seed():
  rows = [_row(float(value)) for value in range(1, 9)]
  kept = set()
  for seed in range(8):
    exchange = sets.build_list(_POPULATION._replace(seed=seed), num_sets=1)
    table = _accept(exchange, exchange.initialize(), *rows)
    kept.add(float(table['prototypes'][0, 0, 0]))
  assert len(kept) > 1
