"""What clients hand over is not believed."""

import functools

import numpy as np
import pytest
import tensorflow as tf
import tiny_kinds

from tff_fssl.algorithms import fixmatch
from tff_fssl.data import clients
from tff_fssl.interface.round_hparams import RoundHparams
from tff_fssl.rounds import client_data
from tff_fssl.rounds import process as process_lib

_KINDS = tiny_kinds.KINDS


def _spoilt(x, value):
  wrong = x.copy()
  wrong[3, ..., 2] = value
  return wrong


@pytest.mark.parametrize('kind', list(_KINDS))
def test_values_that_cannot_be_reject_the_whole_client(kind):
  x, views, _, hostile = _KINDS[kind]
  read = tf.function(
    functools.partial(
      client_data.read_client, num_classes=2, accepts=views.accepts
    )
  )
  for value in hostile:
    element = tiny_kinds.element(_spoilt(x, value))
    data, usable = read(tf.data.Dataset.from_tensors(element))
    assert not usable and not len(data['unlabeled']['x'])
  data, usable = read(tf.data.Dataset.from_tensors(tiny_kinds.element(x)))
  assert usable and len(data['unlabeled']['x']) == len(x)


def test_a_round_counts_such_clients_and_goes_on():
  x, views, network, hostile = _KINDS['texts']
  process = process_lib.build_process(
    functools.partial(network, norm='bn'),
    fixmatch.FixMatch(
      round=RoundHparams(
        num_pretraining_rounds=0, client_epochs=1, server_epochs=1
      )
    ),
    process_lib.DataSpec(
      clients.element_spec(x.shape[1:]),
      views,
      clients.build_server_data_fn(x, np.arange(8) % 2),
      num_classes=2,
    ),
    seed=1,
  )
  for value, rejected in ((hostile[0], 1), (hostile[1], 1), (None, 0)):
    first = x if value is None else _spoilt(x, value)
    cohort = [
      tf.data.Dataset.from_tensors(tiny_kinds.element(part, i))
      for i, part in enumerate((first, x))
    ]
    result = process.next(process.initialize(), cohort)
    metrics = result.metrics['client_work']['train']
    assert metrics['num_rejected_clients'] == rejected
    weights = tf.nest.flatten(result.state.global_model_weights)
    assert all(np.isfinite(w).all() for w in weights)


def test_a_placeholder_is_rejected_for_all_kinds():
  for x, views, *_ in _KINDS.values():
    element = clients.unusable_example(clients.element_spec(x.shape[1:]))
    _, usable = client_data.read_client(
      tf.data.Dataset.from_tensors(element), 2, views.accepts
    )
    assert not usable
