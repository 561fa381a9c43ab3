"""Optimizers of clients and server."""

import pytest
import tensorflow as tf

from tff_fssl.client import optimizer as optimizer_lib
from tff_fssl.interface.round_hparams import RoundHparams
from tff_fssl.rounds import optimizers


def test_clients_use_the_servers_sgd_unless_told_otherwise():
  hparams = RoundHparams(momentum=0.5, nesterov=False, weight_decay=0.1)
  assert optimizers.client_optimizer(hparams) == optimizers.sgd(hparams)
  assert optimizers.sgd(hparams).momentum == 0.5
  rmsprop = optimizers.client_optimizer(
    RoundHparams(client_optimizer='rmsprop', max_gradient_norm=2.0)
  )
  assert isinstance(rmsprop, optimizer_lib.RmsProp)
  assert rmsprop.max_gradient_norm == 2.0
  adam = optimizers.client_optimizer(
    RoundHparams(client_optimizer='adam', weight_decay=0.2)
  )
  assert isinstance(adam, optimizer_lib.Adam)
  assert adam.weight_decay == 0.2


def test_the_learning_rate_starts_from_its_initial_value():
  rate = optimizers.learning_rate_fn(
    RoundHparams(learning_rate_schedule='cosine', schedule_rounds=10), 0.3
  )
  assert float(rate(tf.constant(1))) == pytest.approx(0.3)
  assert float(rate(tf.constant(10))) < 0.1
