"""What clients report."""

import dataclasses

import hypothesis
from hypothesis import strategies as st
import numpy as np
import pytest
import tiny_task
import two_sets

from tff_fssl.algorithms import fixmatch
from tff_fssl.interface import base
from tff_fssl.interface import round_hparams
from tff_fssl.models import server_model

_CLIENTS = round_hparams.LABELS_AT_CLIENTS


def test_clients_that_keep_no_pseudo_label_count_in_the_kept_ratio():
  process = tiny_task.build(
    'fl2',
    hparams=(
      ('adaptive_threshold', False),
      ('confidence_threshold', 0.45),
      ('consistency', 'none'),
      ('learning_status_aggregation', False),
    ),
  )
  state = process.next(process.initialize(), []).state

  def train(*elements):
    cohort = [tiny_task.dataset(element) for element in elements]
    return process.next(state, cohort).metrics['client_work']['train']

  keeps_some = tiny_task.client(0)  # 12 examples.
  keeps_none = tiny_task.client(2, unlabeled=4)
  report = train(keeps_some)
  for name in ('min', 'mean', 'max'):  # The one that is applied.
    for kind in ('lowest', 'mean'):
      np.testing.assert_allclose(report[f'{kind}_class_threshold_{name}'], 0.45)
  # Known whatever decides what is kept.
  assert 1 / 3 < report['learning_status_mean'] < 0.6
  alone = report['pseudo_label_ratio']
  assert 0.0 < alone < 1.0
  none = train(keeps_none)
  assert none['pseudo_label_ratio'] == 0.0
  assert np.isnan(none['pseudo_label_accuracy'])
  both = train(keeps_some, keeps_none)
  np.testing.assert_allclose(both['pseudo_label_ratio'], alone * 12 / 16)
  assert both['aggregation_weight_min'] == 0.0
  assert both['aggregation_weight_max'] == 1.0


def _broken(element, kind, how, where):
  """An element one of whose labels is `how`, or which lacks one."""
  part = element[kind]
  if how is None:
    part['y'] = part['y'][:-1]
  else:
    part['y'] = part['y'].copy()
    part['y'][where % len(part['y'])] = how
  return element


@hypothesis.settings(max_examples=20)
@hypothesis.given(
  st.sampled_from(['labeled', 'unlabeled']),
  st.none()
  | st.integers(tiny_task.NUM_CLASSES, 2**31 - 1)
  | st.integers(-(2**31), -2),
  st.integers(0, 11),
)
def test_a_client_with_impossible_labels_is_left_out_of_both_phases(
  kind, how, where
):
  process = tiny_task.build('fixmatch', 'labels_at_clients')
  state = process.initialize()
  make = lambda i: tiny_task.client(i, labeled=4)
  cohort = [make(0), make(1)]
  bad = _broken(make(2), kind, how, where)
  good = process.next(state, [tiny_task.dataset(e) for e in cohort])
  cohort.insert(1, bad)
  both = process.next(state, [tiny_task.dataset(e) for e in cohort])
  for a, b in zip(tiny_task.flat(good.state), tiny_task.flat(both.state)):
    np.testing.assert_array_equal(a, b)
  train = both.metrics['client_work']['train']
  assert train['num_rejected_clients'] == 1 and train['num_clients'] == 3
  assert both.metrics['last_phase']['num_rejected_clients'] == 0


def test_unknown_labels_are_for_unlabelled_examples_only():
  process = tiny_task.build('fixmatch', 'labels_at_clients')
  state = process.initialize()
  for kind, rejected in (('unlabeled', 0), ('labeled', 1)):
    element = tiny_task.client(0, labeled=4)
    element[kind]['y'][:] = -1
    output = process.next(state, [tiny_task.dataset(element)])
    train = output.metrics['client_work']['train']
    assert train['num_rejected_clients'] == rejected


@pytest.mark.parametrize(
  'name, hparams',
  [
    pytest.param('fixmatch', (), marks=pytest.mark.slow),
    pytest.param(
      'fedmatch', (('delta_threshold', -1.0),), marks=pytest.mark.slow
    ),
    pytest.param('fedswitch', (), marks=pytest.mark.slow),
    ('fl2', ()),
  ],
)
def test_with_one_client_its_model_is_the_next_of_the_server(name, hparams):
  """Averages over one, statistics too: no server trains afterwards."""
  process = tiny_task.build(
    name,
    _CLIENTS,
    hparams=hparams,
    server_optimizer_momentum=0.0,
  )
  state = process.initialize()
  dataset = tiny_task.dataset(tiny_task.client(1, labeled=6), process)
  own = process.local_model(state, dataset, 1)
  model = server_model.ServerModel(
    *process.next(state, [dataset]).state.global_model_weights
  )
  start = state.global_model_weights.trainable
  assert np.any(own.trainable[0] != start[0])
  assert own.statistics_count > 0
  pairs = [
    (own.trainable, model.trainable),
    (own.non_trainable, model.non_trainable),
  ]
  if name == 'fedmatch':
    pairs.append((own.sets['psi'].trainable, model.sets['psi'].trainable))
  for ours, theirs in pairs:
    for a, b in zip(ours, theirs, strict=True):
      np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.slow
def test_a_big_model_trains_more_than_once():
  process = tiny_task.build('fixmatch', _CLIENTS, model=tiny_task.big_model_fn)
  state = process.initialize()
  dataset = tiny_task.dataset(tiny_task.client(1, labeled=6), process)
  first, second = (process.local_model(state, dataset, 1) for _ in range(2))
  for a, b in zip(first.trainable, second.trainable, strict=True):
    np.testing.assert_array_equal(a, b)


def test_a_client_that_is_not_finite_leaves_the_model():
  process = tiny_task.build('fixmatch', _CLIENTS, norm='none')
  state = process.initialize()
  element = tiny_task.client(1, labeled=6)
  element['labeled']['x'] = np.full_like(
    element['labeled']['x'], tiny_task.SPOILT
  )
  own = process.local_model(state, tiny_task.dataset(element), 1)
  for a, b in zip(own.trainable, state.global_model_weights.trainable):
    np.testing.assert_array_equal(a, b)


def test_a_rejected_client_is_explained():
  @dataclasses.dataclass(frozen=True)
  class Wrong(fixmatch.FixMatch):
    name = 'wrong'

    def unlabeled_loss(self, networks, batch):
      loss, metrics = super().unlabeled_loss(networks, batch)
      # As if an example counted 10,000 times.
      count = 1e4 * batch.unlabeled.size
      return loss, {**metrics, 'agreement': base.Mean.ratio(0.0, count)}

  process = two_sets.build(Wrong())
  state = process.initialize()
  cohort = [tiny_task.dataset(tiny_task.client(i), process) for i in range(2)]
  train = process.next(state, cohort).metrics['client_work']['train']
  assert train['num_rejected_clients'] == 2
  reason = process.find_rejected(state, cohort[0], 1)
  assert reason == (
    'count of the metric agreement is 120000 (allowed: 0 to 100000)'
  )


def test_other_clients_are_not_rejected():
  process = tiny_task.build('fl2')
  dataset = tiny_task.dataset(tiny_task.client(0), process)
  assert process.find_rejected(process.initialize(), dataset, 1) is None
