"""The table of the clients' own models."""

import numpy as np
import pytest
import tensorflow as tf

from tff_fssl.algorithms import own_models
from tff_fssl.hparams import UsageError
from tff_fssl.interface import base
from tff_fssl.interface import exchange as exchange_lib
from tff_fssl.models.weights import Weights

_COMMON = Weights(
  (tf.constant([1.0, 2.0]),), (tf.constant(7, tf.int64),), tf.constant(0.0)
)
_SPECS = tf.nest.map_structure(tf.TensorSpec.from_tensor, _COMMON)


def test_a_client_gets_back_what_it_kept():
  exchange = own_models.build_exchange(base.Setup(3, _SPECS))
  table = exchange.initialize()
  new = exchange.receive(table, tf.constant(1))
  assert own_models.read_own(_COMMON, new).trainable[0].numpy().tolist() == [
    1.0,
    2.0,
  ]
  changed = _COMMON._replace(
    trainable=(tf.constant([5.0, 6.0]),), statistics_count=tf.constant(4.0)
  )
  row = own_models.make_row(changed)
  rows = exchange_lib.Rows(
    tf.constant([1]), {name: value[None] for name, value in row.items()}
  )
  table = exchange.accept(table, rows, None, tf.constant(1))
  own = own_models.read_own(_COMMON, exchange.receive(table, tf.constant(1)))
  np.testing.assert_array_equal(own.trainable[0], [5.0, 6.0])
  assert float(own.statistics_count) == 4.0
  # Integers never change in training.
  assert int(own.non_trainable[0]) == 7
  other = own_models.read_own(_COMMON, exchange.receive(table, tf.constant(2)))
  np.testing.assert_array_equal(other.trainable[0], [1.0, 2.0])


def test_a_false_id_reads_some_row():
  exchange = own_models.build_exchange(base.Setup(3, _SPECS))
  table = exchange.initialize()
  for client_id in (-5, 3, 2**31 - 1):
    row = exchange.receive(table, tf.constant(client_id))
    assert int(row['own_num_rounds']) == 0


def test_too_large_tables_are_refused():
  large = _SPECS._replace(trainable=(tf.TensorSpec([10**8]),))
  with pytest.raises(UsageError, match=r'at most 1.5 GB .* 3 clients'):
    own_models.build_exchange(base.Setup(4, large))
