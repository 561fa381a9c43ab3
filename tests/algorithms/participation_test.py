"""Algorithms whose clients drop out, straggle and are too few."""

import contexts
import numpy as np
import pytest
import tiny_task

from tff_fssl.aggregators import hparams as aggregator_hparams
from tff_fssl.program import training
from tff_fssl.program import training_types
from tff_fssl.rounds import sampling

_SERVER, _CLIENTS = 'labels_at_server', 'labels_at_clients'
_LOSSY = sampling.ParticipationHparams(
  dropout_probability=0.5, straggler_probability=0.5, overselect=0.5
)
# With statistics of a second phase; rows of clients; slots; a sum of rows.
_CASES = (
  pytest.param('fl2', _SERVER, {}, marks=pytest.mark.slow),
  pytest.param('fedmatch', _CLIENTS, {}, marks=pytest.mark.slow),
  ('fedrgd', _SERVER, {'norm': 'none'}),
  pytest.param('protofssl', _CLIENTS, {}, marks=pytest.mark.slow),
  pytest.param('fedswitch', _CLIENTS, {}, marks=pytest.mark.slow),
  pytest.param('fedcon', _SERVER, {}, marks=pytest.mark.slow),
)
_context = contexts.of_each_module(simulate_secure_aggregation=True)


def _are_equal(first, second):
  """Whether all but the counters of rounds is equal; NaN is NaN."""
  return all(
    np.array_equal(a, b, equal_nan=a.dtype.kind == 'f')
    for a, b in zip(_kept(first), _kept(second), strict=True)
  )


def _kept(state):
  finalizer = dict(state.finalizer, round_num=())
  parts = (state.aggregator, finalizer)
  return tiny_task.flat(state) + [
    np.asarray(t) for part in parts for t in training.flatten(part).values()
  ]


@pytest.mark.parametrize('name, scenario, options', _CASES)
def test_rounds_with_losses(name, scenario, options):
  process = tiny_task.build(
    name, scenario, stragglers=True, min_clients=2, **options
  )
  source = tiny_task.data_source(
    process, scenario, clients_per_round=3, participation=_LOSSY
  )
  iterator, state = source.iterator(), process.initialize()
  # At the start, FedSwitch's divergences: nobody has measured them.
  unknown = [np.isnan(w) for w in tiny_task.flat(state)]
  few = []
  for round_num in range(iterator.round_num, 7):
    counts = source.counts(3, round_num)
    cohort = iterator.select()
    output = process.next(state, cohort)
    metrics = training.flatten(output.metrics)
    train = output.metrics['client_work']['train']
    assert train['num_clients'] == len(cohort)
    assert train['num_non_finite_clients'] == train['num_rejected_clients'] == 0
    assert output.state.client_work == state.client_work + 1
    assert not training_types.is_bad_round(metrics)
    if round_num >= 1:
      num_reported = counts['participation/num_reported']
      is_too_few = num_reported < 2
      few.append(is_too_few)
      assert len(cohort) == (0 if is_too_few else num_reported)
      assert _are_equal(state, output.state) == is_too_few
    else:
      is_too_few = False
    assert metrics['participation/too_few_clients'] == is_too_few
    for weight, is_unknown in zip(tiny_task.flat(output.state), unknown):
      assert np.all(np.isfinite(weight) | is_unknown)
    state = output.state
  assert any(few) and not all(few)


def _elements(process, scenario, *, spoilt=(), shares=(1.0, 1.0, 1.0)):
  elements = tiny_task.cohort(scenario)
  for i, (element, share) in enumerate(zip(elements, shares)):
    element['share'] = np.float32(share)
    if i in spoilt:
      for part in ('labeled', 'unlabeled'):
        element[part]['x'] = np.full_like(element[part]['x'], tiny_task.SPOILT)
  return [tiny_task.dataset(element, process) for element in elements]


@pytest.mark.parametrize(
  'num_held, is_kept', [(0, False), (1, False), (2, True)]
)
def test_clients_without_examples_do_not_count(num_held, is_kept):
  process = tiny_task.build(
    'fedmatch', _CLIENTS, stragglers=True, min_clients=2
  )
  state = process.next(process.initialize(), _elements(process, _CLIENTS)).state
  elements = tiny_task.cohort(_CLIENTS)[:num_held]
  elements += [tiny_task.client(7 + i, 2, unlabeled=0) for i in range(3)]
  for element in elements:
    element['share'] = np.float32(1.0)
  output = process.next(
    state, [tiny_task.dataset(element, process) for element in elements]
  )
  assert output.metrics['participation']['too_few_clients'] == (not is_kept)
  assert _are_equal(state, output.state) == (not is_kept)


def test_clients_that_cannot_be_used_do_not_count():
  process = tiny_task.build(
    'fedmatch', _CLIENTS, stragglers=True, min_clients=2
  )
  state = process.next(process.initialize(), _elements(process, _CLIENTS)).state
  for spoilt, shares in (
    ((0, 2), (1.0, 1.0, 1.0)),
    ((0,), (1.0, 2.0, 1.0)),  # No share is 2.
    ((), (np.nan, -1.0, 1.0)),
  ):
    output = process.next(
      state, _elements(process, _CLIENTS, spoilt=spoilt, shares=shares)
    )
    train = output.metrics['client_work']['train']
    assert train['num_non_finite_clients'] == len(spoilt)
    assert train['num_rejected_clients'] == 2 - len(spoilt)
    assert output.metrics['participation']['too_few_clients'] == 1
    assert output.metrics['exchange']['num_rows'] == 0
    assert _are_equal(state, output.state)
    assert not training_types.is_bad_round(training.flatten(output.metrics))
  two = process.next(state, _elements(process, _CLIENTS, spoilt=(1,)))
  assert two.metrics['participation']['too_few_clients'] == 0
  assert not _are_equal(state, two.state)


def test_stragglers_weigh_what_they_have_done():
  """Where clients are weighed by examples; and so they are counted."""
  process = tiny_task.build(
    'supervised',
    _CLIENTS,
    norm='none',
    stragglers=True,
    client_epochs=4,
    client_weighting='examples',
  )
  output = process.next(
    process.initialize(),
    _elements(process, _CLIENTS, shares=(1.0, 0.5, 0.0)),
  )
  train = output.metrics['client_work']['train']
  # 4 labelled examples, a batch an epoch.
  assert train['num_examples'] == 16 + 8 + 4
  assert train['aggregation_weight_max'] == pytest.approx(16 / 28)
  assert train['aggregation_weight_min'] == pytest.approx(4 / 28)


@pytest.mark.parametrize(
  'aggregator', ['dp', pytest.param('secure', marks=pytest.mark.slow)]
)
def test_too_few_clients_where_only_the_sum_is_known(aggregator):
  process = tiny_task.build(
    'supervised',
    _CLIENTS,
    norm='none',
    aggregator=aggregator_hparams.AggregatorHparams(aggregator),
    stragglers=True,
    min_clients=2,
  )
  elements = _elements(process, _CLIENTS, shares=(1.0, 0.3, 1.0))
  first = process.next(process.initialize(), elements)
  train = first.metrics['client_work']['train']
  assert list(train) == ['num_clients']  # Nor who was a straggler.
  assert first.metrics['participation']['too_few_clients'] == 0
  # The source gives no client, so that nothing is spent.
  source = tiny_task.data_source(
    process,
    _CLIENTS,
    participation=sampling.ParticipationHparams(dropout_probability=0.9),
  )
  assert source.counts(3, 1)['participation/num_reported'] < 2
  second = process.next(first.state, source.cohort(3, 1))
  assert second.metrics['participation']['too_few_clients'] == 1
  assert _are_equal(first.state, second.state)
  if aggregator == 'dp':
    assert (
      second.metrics['aggregator']['epsilon']
      == first.metrics['aggregator']['epsilon']
    )
