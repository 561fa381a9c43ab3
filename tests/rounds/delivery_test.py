"""Which weights travel."""

import numpy as np
import tensorflow as tf

from tff_fssl.interface import groups as groups_lib
from tff_fssl.models import server_model
from tff_fssl.models.weights import Weights
from tff_fssl.rounds import delivery as delivery_lib

_WEIGHTS = Weights(
  (tf.constant([1.0, 2.0]), tf.constant([3.0]), tf.constant(4.0)),
  (tf.constant(5.0),),
  tf.constant(1.0),
)


def test_everything_travels_by_default():
  delivery = delivery_lib.Delivery()
  model = server_model.ServerModel(*_WEIGHTS)
  sent = delivery.select_model(model)
  assert sent == delivery.received(sent) == _WEIGHTS
  assert delivery.kept_bytes == 0


def test_kept_weights_arrive_as_zeros():
  kept = {1: tf.TensorSpec([1]), 0: tf.TensorSpec([2])}
  delivery = delivery_lib.Delivery(kept=kept)
  assert delivery.kept_bytes == 3 * 4
  sent = delivery.select_weights(_WEIGHTS)
  assert [float(t) for t in sent.trainable] == [4.0]
  received = delivery.received(sent)
  for tensor, expected in zip(received.trainable, ([0, 0], [0], 4)):
    np.testing.assert_array_equal(tensor, expected)
  assert received.non_trainable == _WEIGHTS.non_trainable


def test_a_client_of_a_group_receives_its_row():
  rows = tf.nest.map_structure(lambda t: tf.stack([t, 10 * t]), _WEIGHTS)
  groups = groups_lib.Groups(
    2, 2, lambda model: rows, lambda slot, seed: groups_lib.Place(slot, slot)
  )
  delivery = delivery_lib.Delivery(groups)
  sent = delivery.select_model(server_model.ServerModel(*_WEIGHTS))
  row = delivery.received(sent, tf.constant(1))
  np.testing.assert_array_equal(row.trainable[0], [10.0, 20.0])
  assert float(row.statistics_count) == 10.0
