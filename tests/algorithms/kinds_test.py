"""Every algorithm trains on vectors and on texts."""

import functools

import numpy as np
import pytest
import tensorflow as tf
import tiny_kinds

from tff_fssl.algorithms import registry
from tff_fssl.data import clients
from tff_fssl.interface.round_hparams import RoundHparams
from tff_fssl.models import names
from tff_fssl.rounds import process as process_lib


@pytest.mark.slow
@pytest.mark.parametrize('kind', list(tiny_kinds.KINDS))
@pytest.mark.parametrize('name', list(registry.REGISTRY))
def test_a_round(name, kind):
  x, views, network, _ = tiny_kinds.KINDS[kind]
  entry = registry.REGISTRY[name]
  capabilities = entry.capabilities
  values = dict(entry.tiny_hparams)
  if kind == 'texts' and capabilities.without_mixing:
    flag, _, value = capabilities.without_mixing.partition('=')
    values[flag] = {'0': 0.0, 'false': False}[value]
  scenario = entry.scenarios[-1]
  at_clients = scenario == 'labels_at_clients'
  round_hparams = RoundHparams(
    scenario=scenario,
    num_pretraining_rounds=0,
    client_epochs=1,
    server_epochs=1,
  )
  norm = entry.norm or 'none'
  if norm == names.STATIC_BATCH_NORM:
    norm = 'bn'
  server_data_fn = None
  if not at_clients:
    server_data_fn = clients.build_server_data_fn(x, np.arange(8) % 2)
  process = process_lib.build_process(
    functools.partial(network, norm=norm),
    entry.hparams(**values, round=round_hparams),
    process_lib.DataSpec(
      clients.element_spec(x.shape[1:]), views, server_data_fn, 2, 3
    ),
    seed=1,
  )
  cohort = []
  for index in range(3):
    element = tiny_kinds.element(x, index, labeled=at_clients)
    if process.num_clients:
      element['client_id'] = np.int32(index)
    if process.needs_slots:
      element['slot'] = np.int32(index)
    cohort.append(tf.data.Dataset.from_tensors(element))
  state = process.initialize()
  for _ in range(2):
    result = process.next(state, cohort)
    state = result.state
    train = result.metrics['client_work']['train']
    assert train['num_rejected_clients'] == 0
  weights = tf.nest.flatten(state.global_model_weights)
  assert all(np.isfinite(w).all() for w in weights)
  before = tf.nest.flatten(process.initialize().global_model_weights)
  alone = entry.is_alone
  assert alone or any(np.any(a != b) for a, b in zip(weights, before))
