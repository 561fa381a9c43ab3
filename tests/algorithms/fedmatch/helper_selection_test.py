"""Who helps whom, and when."""

import numpy as np
import pytest
import tensorflow as tf

from tff_fssl.algorithms.fedmatch import helper_selection
from tff_fssl.algorithms.fedmatch import upload_cache
from tff_fssl.interface import base
from tff_fssl.interface import exchange as exchange_lib
from tff_fssl.models.weights import Weights
from tff_fssl.rounds import messages

_WEIGHTS = Weights(
  (tf.TensorSpec([1, 2]), tf.TensorSpec([1])), (), tf.TensorSpec([])
)
_SCALARS = {'rate': (1.0, 0.0, 1.0)}


def _build(**changed):
  settings = {
    'sets': ('psi',),
    'scalars': _SCALARS,
    'helper_set': 'psi',
    'num_helpers': 2,
    'interval': 3,
    'in_every_round': False,
    'num_slots': 6,
    'where': upload_cache.STATE,
    'flags': ('--slots', '--where'),
    **changed,
  }
  return helper_selection.build_exchange(
    helper_selection.Settings(**settings),
    base.Setup(6, _WEIGHTS, num_classes=2),
  )


def _rows(shares):
  """Client id -> probability of class 0; psi is its id."""
  ids = np.array(sorted(shares), np.int32)
  first = np.array([shares[i] for i in ids], np.float32)
  return exchange_lib.Rows(
    tf.constant(ids),
    {
      'embedding': tf.constant(np.stack([first, 1 - first], 1)),
      'psi': tf.constant(np.repeat(ids[:, None], 3, 1).astype(np.float32)),
      'rate': tf.fill([len(ids)], 0.5),
    },
  )


class _Server:
  """An exchange over rounds."""

  def __init__(self, **settings):
    self._exchange = _build(**settings)
    self._table, self._round = _numpy(self._exchange.initialize()), 1
    self._rows = {}

  def receive(self, client_id):
    table, outside = self._table, self._exchange.outside
    if outside is not None:
      self.read = []
      table = outside.bring(table, [client_id], self._round, self._read)
      assert len(set(self.read)) == len(self.read)
    sent = self._exchange.message(table, None, tf.constant(self._round))
    received = self._exchange.receive(sent, tf.constant(client_id))
    return {name: value.numpy() for name, value in received.items()}

  def helpers(self, client_id):
    received = self.receive(client_id)
    return [
      int(row[0])
      for row, exists in zip(received['helpers'], received['helper_weights'])
      if exists
    ]

  def end_round(self, **shares):
    rows = _rows({int(name[1:]): share for name, share in shares.items()})
    table = self._exchange.accept(
      self._table, rows, None, tf.constant(self._round)
    )
    self._table = _numpy(table)
    if self._exchange.outside is not None:
      self._table = self._exchange.outside.take(self._table, self._write)
    self._round += 1

  def _read(self, client_id, round_num):
    self.read.append(client_id)
    return self._rows[client_id, round_num]

  def _write(self, client_id, round_num, row):
    assert round_num == self._round
    self._rows[client_id, round_num] = row


def _numpy(table):
  return tf.nest.map_structure(lambda tensor: tensor.numpy(), table)


@pytest.fixture(params=[upload_cache.STATE, upload_cache.FILES])
def where(request):
  return request.param


def test_the_closest_others_in_every_third_round(where):
  server = _Server(where=where)
  server.end_round(c0=0.1, c1=0.2, c2=0.9)
  assert server.helpers(0) == []  # Round 2.
  server.end_round(c3=0.85, c4=0.6)
  # Round 3: stale uploads count as well; who is new has none.
  assert server.helpers(0) == [1, 4]
  assert server.helpers(2) == [3, 4]
  assert server.helpers(5) == []
  server.end_round(c0=0.88)
  assert server.helpers(0) == []  # Round 4.
  server.end_round(c5=0.5)
  server.end_round()
  assert server.helpers(0) == [2, 3]  # Round 6.


def test_in_all_rounds_until_others_are_chosen(where):
  server = _Server(where=where, in_every_round=True)
  server.end_round(c0=0.1, c1=0.2, c2=0.9)
  assert server.helpers(0) == []
  server.end_round(c3=0.85, c4=0.6)
  assert server.helpers(0) == [1, 4]
  server.end_round(c0=0.88, c5=0.12)
  assert server.helpers(0) == [1, 4]  # Still those chosen for round 3.
  assert server.helpers(5) == []
  server.end_round()
  server.end_round()
  assert server.helpers(0) == [2, 3]
  assert server.helpers(5) == [1, 4]


def test_fewer_than_wanted(where):
  server = _Server(where=where, interval=1)
  server.end_round(c0=0.1)
  assert server.helpers(0) == []
  server.end_round(c1=0.5)
  assert server.helpers(0) == [1]
  assert server.helpers(1) == [0]


def test_a_forgotten_client_neither_helps_nor_is_helped(where):
  server = _Server(where=where, num_slots=2, in_every_round=True, interval=2)
  server.end_round(c0=0.1, c1=0.2)
  assert server.helpers(0) == [1]
  # Client 2 takes the slot of client 0, whose embedding had been chosen from.
  server.end_round(c2=0.3)
  assert server.helpers(0) == server.helpers(1) == server.helpers(2) == []
  assert server.receive(0)['is_known'] == 0.0
  server.end_round()
  assert server.helpers(1) == [2]


def test_only_what_a_round_needs_is_read():
  server = _Server(where=upload_cache.FILES)
  server.end_round(c0=0.1, c1=0.2, c2=0.9)
  server.receive(0)
  assert server.read == [0]  # Round 2: nobody helps.
  server.end_round(c3=0.85, c4=0.6)
  server.receive(0)
  assert server.read == [0, 1, 4]
  server.receive(5)
  assert server.read == []


def test_what_a_client_gets_of_its_own(where):
  server = _Server(where=where)
  new = server.receive(4)
  assert (new['is_known'], new['rate']) == (0.0, 1.0)
  np.testing.assert_array_equal(new['own_psi'], np.zeros(3))
  server.end_round(c4=0.5)
  old = server.receive(4)
  assert (old['is_known'], old['rate']) == (1.0, 0.5)
  np.testing.assert_array_equal(old['own_psi'], np.full(3, 4.0))
  for stranger in (-1, 6, 2**31 - 1):
    assert server.receive(stranger)['is_known'] == 0.0


@pytest.mark.parametrize(
  'changed, expected',
  [
    ({}, True),
    ({'embedding': [0.5, 0.6]}, False),
    ({'embedding': [1.5, -0.5]}, False),
    ({'embedding': [np.nan, 0.5]}, False),
    ({'embedding': [0.0, 0.0]}, False),
    ({'rate': 1.5}, False),
    ({'rate': -0.1}, False),
    ({'rate': np.nan}, False),
    ({'psi': [0.0, 1e30, 0.0]}, False),
    ({'psi': [0.0, np.nan, 0.0]}, False),
    ({'client_id': 6}, False),
    ({'client_id': -1}, False),
  ],
)
def test_rows_that_no_honest_client_sends(changed, expected):
  row = {
    'client_id': 1,
    'embedding': [0.25, 0.75],
    'rate': 0.5,
    'psi': [0.0, 1.0, 2.0],
    **changed,
  }
  client_id = tf.constant(row.pop('client_id'))
  values = {name: tf.constant(v, tf.float32) for name, v in row.items()}
  possible = messages.is_possible_row(
    _build(), {'client_id': client_id, 'values': values}
  )
  assert bool(possible) == expected


def test_without_helpers_there_are_no_embeddings():
  exchange = _build(helper_set='')
  assert set(exchange.row_specs) == {'psi', 'rate'}
  sent = exchange.message(exchange.initialize(), None, tf.constant(3))
  received = exchange.receive(sent, tf.constant(0))
  assert set(received) == {'is_known', 'own_psi', 'rate'}
  assert bool(_build(helper_set='', scalars={}).is_possible({}))


def test_nothing_of_it_is_counted_twice():
  exchange = _build()
  sent = exchange.message(exchange.initialize(), None, tf.constant(1))
  received = set(exchange.receive(sent, tf.constant(0)))
  assert received | set(exchange.row_specs) <= set(exchange.not_counted)


def _nearest(points, known, own, num):
  rows, exist = helper_selection.nearest(
    tf.constant(points, tf.float32), tf.constant(known), tf.constant(own), num
  )
  return [int(r) for r, e in zip(rows, exist) if e], exist.numpy().tolist()


def test_the_nearest_rows_are_exact():
  rng = np.random.default_rng(0)
  points = rng.dirichlet(np.ones(5), 40).astype(np.float32)
  known = rng.random(40) < 0.7
  for own in range(40):
    distances = ((points - points[own]) ** 2).sum(1)
    distances[~known] = np.inf
    distances[own] = np.inf
    expected = np.argsort(distances, kind='stable')[:3].tolist()
    assert _nearest(points, known, own, 3)[0] == expected


@pytest.mark.parametrize(
  'known, expected, exist',
  [
    ([True, True, True], [0, 2], [1.0, 1.0]),  # As far: the first one first.
    ([True, True, False], [0], [1.0, 0.0]),
    ([False, True, False], [], [0.0, 0.0]),
    ([False, False, True], [2], [1.0, 0.0]),
  ],
)
def test_fewer_rows_than_wanted(known, expected, exist):
  assert _nearest([[0.0], [1.0], [2.0]], known, 1, 2) == (expected, exist)


def test_more_wanted_than_there_are_rows():
  assert _nearest([[0.0]], [True], 0, 3) == ([], [0.0, 0.0, 0.0])
