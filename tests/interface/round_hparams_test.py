"""Every hyper-parameter of the round does what it says."""

import dataclasses

import numpy as np
import pytest
import tiny_task

from tff_fssl.interface import round_hparams

_AT_SERVER = round_hparams.LABELS_AT_SERVER
_AT_CLIENTS = round_hparams.LABELS_AT_CLIENTS

# Field -> (algorithm, scenario, settings of both, the change).
_CHANGES = {
  'client_epochs': ('fixmatch', _AT_CLIENTS, {}, 2),
  'client_batch_size': ('fixmatch', _AT_CLIENTS, {}, 3),
  'client_labeled_batch_size': ('fixmatch', _AT_CLIENTS, {}, 2),
  'client_optimizer': ('fixmatch', _AT_CLIENTS, {}, 'rmsprop'),
  'client_learning_rate': ('fixmatch', _AT_CLIENTS, {}, 0.1),
  'server_epochs': ('fixmatch', _AT_SERVER, {}, 2),
  'server_batch_size': ('fixmatch', _AT_SERVER, {}, 4),
  'server_learning_rate': ('fixmatch', _AT_SERVER, {}, 0.1),
  'momentum': ('supervised', _AT_CLIENTS, {'client_epochs': 2}, 0.0),
  'nesterov': ('supervised', _AT_CLIENTS, {'client_epochs': 2}, False),
  'weight_decay': ('supervised', _AT_CLIENTS, {}, 0.1),
  'max_gradient_norm': ('supervised', _AT_CLIENTS, {}, 0.01),
  'proximal_strength': ('supervised', _AT_CLIENTS, {'client_epochs': 2}, 1.0),
  'learning_rate_schedule': (
    'supervised',
    _AT_CLIENTS,
    {'schedule_rounds': 4},
    'cosine',
  ),
  'schedule_rounds': (
    'supervised',
    _AT_CLIENTS,
    {'learning_rate_schedule': 'cosine'},
    4,
  ),
  'server_keeps_momentum': ('fixmatch', _AT_SERVER, {}, True),
  'num_pretraining_rounds': ('fixmatch', _AT_SERVER, {}, 2),
  'client_weighting': ('supervised', _AT_CLIENTS, {}, 'examples'),
  'max_client_examples': ('supervised', _AT_CLIENTS, {}, 2),
  'min_clients': ('supervised', _AT_CLIENTS, {}, 4),
  'server_optimizer': (
    'supervised',
    _AT_CLIENTS,
    {'server_optimizer_learning_rate': 0.05},
    'adam',
  ),
  'server_optimizer_learning_rate': ('supervised', _AT_CLIENTS, {}, 0.5),
  'server_optimizer_momentum': ('supervised', _AT_CLIENTS, {}, 0.0),
  'batch_norm_statistics': ('supervised', _AT_CLIENTS, {}, 'batch_mean'),
  'statistics_batch_size': (
    'supervised',
    _AT_CLIENTS,
    {'batch_norm_statistics': 'batch_mean'},
    3,
  ),
  'statistics_phase': ('supervised', _AT_CLIENTS, {}, 'training'),
  'compute_dtype': ('supervised', _AT_CLIENTS, {}, 'bfloat16'),
  'client_steps': ('supervised', _AT_CLIENTS, {}, 7),
}
# Other quick tests show these at work.
_ELSEWHERE = {
  'client_epochs',
  'client_batch_size',
  'client_labeled_batch_size',
  'server_epochs',
  'server_learning_rate',
  'momentum',
  'weight_decay',
  'max_gradient_norm',
  'proximal_strength',
  'nesterov',
  'learning_rate_schedule',
  'schedule_rounds',
  'client_optimizer',
  'batch_norm_statistics',
  'client_steps',
  'client_weighting',
  'max_client_examples',
  'min_clients',
  'num_pretraining_rounds',
  'server_keeps_momentum',
  'server_optimizer',
  'server_optimizer_learning_rate',
  'server_optimizer_momentum',
  'statistics_batch_size',
  'statistics_phase',
}
# What has no influence on the result, or is checked elsewhere.
_OTHERS = {
  'average_decay',  # See skeleton_test.py.
  'pseudo_label_quota',  # See quota_test.py.
  'schedule_patience',  # See optimizers_test.py.
  'schedule_divisor',  # See optimizers_test.py.
  'scenario',  # The conformance tests run all.
  'jit_compile',  # Below.
}


def _uneven(round_num):
  return [
    tiny_task.client(i, round_num, unlabeled=6 + i, labeled=4 + 2 * i)
    for i in range(3)
  ]


def _final(name, scenario, settings, norm='none'):
  process = tiny_task.build(name, scenario, norm=norm, **settings)
  state = process.initialize()
  while int(state.client_work) < 1:
    state = process.next(state, []).state
  for round_num in (1, 2):
    cohort = (
      _uneven(round_num)
      if scenario == _AT_CLIENTS
      else tiny_task.cohort(scenario, 2, round_num)
    )
    state = process.next(state, [tiny_task.dataset(e) for e in cohort]).state
  return state


def _largest_difference(first, second):
  return max(
    np.max(np.abs(a - b))
    for a, b in zip(tiny_task.flat(first), tiny_task.flat(second), strict=True)
  )


@pytest.mark.parametrize(
  'field',
  [
    pytest.param(field, marks=pytest.mark.slow if field in _ELSEWHERE else ())
    for field in _CHANGES
  ],
)
def test_does_something(field):
  name, scenario, settings, value = _CHANGES[field]
  norm = 'bn' if 'statistics' in field else 'none'
  base = _final(name, scenario, settings, norm)
  changed = _final(name, scenario, {**settings, field: value}, norm)
  assert _largest_difference(base, changed) > 1e-5


def test_none_is_forgotten():
  fields = {f.name for f in dataclasses.fields(round_hparams.RoundHparams)}
  assert fields == set(_CHANGES) | _OTHERS


@pytest.mark.parametrize(
  'name', ['semifl', pytest.param('fl2', marks=pytest.mark.slow)]
)
def test_jit_compile_changes_nothing_but_rounding(name):
  """The terms of the others: tests/local/terms_test.py."""
  base = _final(name, _AT_SERVER, {})
  compiled = _final(name, _AT_SERVER, {'jit_compile': True})
  assert _largest_difference(base, compiled) < 1e-5


def test_a_mean_of_batches_has_the_server_s_batches():
  """As in the authors' code; the count is of batches."""
  process = tiny_task.build(
    'fixmatch',
    _AT_SERVER,
    batch_norm_statistics='batch_mean',
    server_batch_size=2,
    statistics_batch_size=8,
  )
  state = process.initialize()
  # Nine labels by two; the last one joins the batch before.
  assert state.global_model_weights.statistics_count == 4
  cohort = [tiny_task.dataset(e) for e in tiny_task.cohort(_AT_SERVER, 3)]
  state = process.next(state, cohort).state
  assert state.global_model_weights.statistics_count == 4 + 3 * 2


def test_momentum_that_outlives_the_round_is_that_of_one_long_training():
  """Two rounds of one epoch, without clients, against one of two."""
  settings = {
    'num_pretraining_rounds': 2,
    'server_batch_size': 9,  # All labels: their order plays no part.
    'server_learning_rate': 0.1,
  }
  finals = []
  for keeps, epochs, rounds in ((True, 1, 2), (False, 2, 1)):
    process = tiny_task.build(
      'fixmatch',
      _AT_SERVER,
      norm='none',
      plain=True,
      server_keeps_momentum=keeps,
      server_epochs=epochs,
      **settings,
    )
    state = process.initialize()
    for _ in range(rounds):
      state = process.next(state, []).state
    finals.append(state)
  assert _largest_difference(*finals) < 1e-6


def test_moving_averages_travel_with_the_updates():
  process = tiny_task.build(
    'supervised', _AT_CLIENTS, batch_norm_statistics='moving_average'
  )
  state = process.initialize()
  before = process.get_model_weights(state).non_trainable
  state, metrics = process.next(
    state, [tiny_task.dataset(e) for e in _uneven(1)]
  )
  after = process.get_model_weights(state).non_trainable
  assert not np.allclose(before[0], after[0])
  # One phase: weights go down once.
  size = sum(w.nbytes for w in tiny_task.flat(state))
  assert metrics['communication']['bytes_down_per_client'] == 4 + size
