"""The algorithms under every aggregator."""

import dataclasses

import contexts
import numpy as np
import pytest
import tensorflow_federated as tff
import tiny_rounds
import tiny_task

from tff_fssl import hparams
from tff_fssl import runtime
from tff_fssl.aggregators import hparams as aggregator_hparams
from tff_fssl.algorithms import registry
from tff_fssl.program import config
from tff_fssl.program import training
from tff_fssl.program import training_types

_SERVER, _CLIENTS = 'labels_at_server', 'labels_at_clients'
_NAMES = ('mean', 'robust', 'secure', 'compression', 'dp')


_secure_context = contexts.of_each_module(simulate_secure_aggregation=True)


def _build(algorithm, aggregator, norm='none', **settings):
  own = {}
  if algorithm == 'fl2':
    own['confidence_threshold'] = 0.34
    own['learning_status_aggregation'] = aggregator != 'dp'
  return tiny_task.build(
    algorithm,
    _SERVER,
    norm=norm,
    aggregator=aggregator_hparams.AggregatorHparams(aggregator),
    hparams=tuple(sorted(own.items())),
    **settings,
  )


def _next(process, state, elements):
  return process.next(state, [tiny_task.dataset(e) for e in elements])


@pytest.mark.parametrize(
  'algorithm, name',
  [
    *(('fl2', name) for name in _NAMES),
    *(
      pytest.param('fixmatch', name, marks=pytest.mark.slow)
      for name in ('robust', 'secure', 'compression')
    ),
  ],
)
def test_rounds_with_clients_and_with_clients_that_weigh_nothing(
  algorithm, name
):
  process = _build(algorithm, name)
  state = _next(process, process.initialize(), []).state
  output = _next(process, state, tiny_task.cohort(_SERVER))
  assert all(np.all(np.isfinite(w)) for w in tiny_task.flat(output.state))
  assert output.metrics['finalizer']['update_skipped'] == 0
  assert output.metrics['client_work']['train']['num_clients'] == 3
  if name == 'dp':
    return
  # Clients without examples: the round does not count. Where nobody may know
  # that they have none, the server trains alone, as without clients.
  empty = [tiny_task.client(i, 2, unlabeled=0) for i in range(2)]
  nobody, _ = _next(process, output.state, [])
  weightless, metrics = _next(process, output.state, empty)
  assert metrics['finalizer']['update_skipped'] == 1
  assert not training_types.is_bad_round(training.flatten(metrics))
  expected = nobody if name == 'secure' else output.state
  for a, b in zip(
    tiny_task.flat(expected), tiny_task.flat(weightless), strict=True
  ):
    np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
  'name', ['secure', pytest.param('compression', marks=pytest.mark.slow)]
)
def test_small_updates_pass_unchanged(name):
  """Below the clipping norms these aggregators are the weighted mean."""
  cohort = tiny_task.cohort(_SERVER)
  finals = []
  for aggregator in ('mean', name):
    process = _build('fl2', aggregator)
    finals.append(_next(process, process.initialize(), cohort).state)
  for a, b in zip(*map(tiny_task.flat, finals), strict=True):
    np.testing.assert_allclose(a, b, atol=1e-5)


def test_private_rounds_release_nothing_else_of_clients():
  process = _build('fl2', 'dp')
  state = process.initialize()
  epsilons = []
  for elements in ([], *(tiny_task.cohort(_SERVER, 3, r) for r in (1, 2))):
    state, metrics = _next(process, state, elements)
    assert list(metrics['client_work']['train']) == ['num_clients']
    assert 'last_phase' not in metrics
    assert set(metrics['aggregator']) == {'inner', 'epsilon', 'delta'}
    epsilons.append(metrics['aggregator']['epsilon'])
  assert 0 == epsilons[0] < epsilons[1] < epsilons[2]


def test_private_metrics_do_not_depend_on_clients():
  """But for what the noise went into."""
  process = _build('fl2', 'dp')
  state = _next(process, process.initialize(), []).state
  some, others = (
    _next(process, state, cohort).metrics
    for cohort in (
      tiny_task.cohort(_SERVER),
      [tiny_task.client(i, unlabeled=0) for i in range(3)],
    )
  )
  for key in ('client_work', 'communication', 'distributor'):
    assert str(some[key]) == str(others[key])
  assert some['aggregator']['epsilon'] == others['aggregator']['epsilon']


@pytest.mark.parametrize(
  'algorithm, settings, words',
  [
    ('fl2', {}, ['weights that the algorithm sets', 'turn them off']),
    ('fixmatch', {'norm': 'bn'}, ['static batch norm', '--norm=gn']),
    (
      'fixmatch',
      {'norm': 'bn', 'batch_norm_statistics': 'moving_average'},
      ['batch norm', '--norm=gn'],
    ),
    (
      'fixmatch',
      {'client_weighting': 'examples'},
      ['--client_weighting=examples', 'uniform'],
    ),
  ],
)
def test_privacy_refuses_what_it_cannot_cover(algorithm, settings, words):
  with pytest.raises(hparams.UsageError) as error:
    tiny_task.build(
      algorithm,
      _SERVER,
      aggregator=aggregator_hparams.AggregatorHparams('dp'),
      **{'norm': 'none', **settings},
    )
  for word in words:
    assert word in str(error.value)


def test_bare_unweighted_aggregators_are_refused(monkeypatch):
  monkeypatch.setattr(
    tiny_task.factory,
    'build_aggregator',
    lambda *_, **__: tff.learning.dp_aggregator(1.0, 100.0),
  )
  with pytest.raises(hparams.UsageError, match='build_aggregator'):
    tiny_task.build.__wrapped__(
      'fixmatch', aggregator=aggregator_hparams.AggregatorHparams('dp')
    )


def test_secure_needs_a_runtime_that_has_it():
  process = _build('fl2', 'secure')
  state = process.initialize()
  stack = tff.framework.get_context_stack()
  with stack.install(runtime.build_context()):
    with pytest.raises(NotImplementedError, match='secure'):
      _next(process, state, tiny_task.cohort(_SERVER))


def test_every_field_has_an_effect_under_some_aggregator():
  fields = {
    f.name for f in dataclasses.fields(aggregator_hparams.AggregatorHparams)
  }
  read = [set(aggregator_hparams.AGGREGATORS[name].fields) for name in _NAMES]
  assert set.union(*read) == fields - {'aggregator'}
  assert not set.intersection(*read)


@pytest.mark.parametrize('name', ['mean', 'secure'])
def test_clients_that_are_sure_of_everything(name):
  """Learning status 1 - 1e-4 or so, hence weights of 1e-4 or so."""
  process = _build('fl2', name)
  state = _next(process, process.initialize(), []).state
  weights = state.global_model_weights
  bias = np.array([10.0, 0.0, 0.0], np.float32)
  weights = weights._replace(trainable=(*weights.trainable[:-1], bias))
  state = state._replace(global_model_weights=weights)
  state, metrics = _next(process, state, tiny_task.cohort(_SERVER))
  if name != 'secure':  # Which has no metrics of clients.
    assert 0.999 < metrics['client_work']['train']['learning_status_min'] < 1
  assert metrics['aggregator']['num_weighted_clients'] == 3
  assert metrics['finalizer']['update_skipped'] == 0
  assert metrics['finalizer']['update_norm'] < 1
  assert all(np.all(np.isfinite(w)) for w in tiny_task.flat(state))


def test_secure_sums_refuse_statistics_beside_them():
  """Also of an aggregator that is not ours."""
  with pytest.raises(hparams.UsageError, match='static batch norm'):
    _build('fixmatch', 'secure', norm='bn')
  with pytest.raises(hparams.UsageError, match='static batch norm'):
    tiny_task.build.__wrapped__(
      'fixmatch', model_aggregator=tff.learning.secure_aggregator()
    )
  moving = tiny_task.build(
    'fixmatch',
    _SERVER,
    norm='bn',
    batch_norm_statistics='moving_average',
    aggregator=aggregator_hparams.AggregatorHparams('secure'),
  )
  cohort = tiny_task.cohort(_SERVER)
  assert _next(moving, moving.initialize(), cohort).metrics['aggregator']


def test_clients_that_fail_are_counted_under_secure_sums():
  """By the sums themselves: a weight of NaN, no report."""
  process = _build('fixmatch', 'secure', client_learning_rate=1e30)
  state = _next(process, process.initialize(), []).state
  metrics = training.flatten(
    _next(process, state, tiny_task.cohort(_SERVER)).metrics
  )
  assert metrics['aggregator/num_rejected_clients'] == 3
  assert metrics['finalizer/update_skipped'] == 1
  assert training_types.is_bad_round(metrics)


def test_a_discarded_round_spends_what_it_has_released():
  process = _build('fixmatch', 'dp', min_clients=3)
  state = _next(process, process.initialize(), []).state
  spent, models = [], []
  for size in (3, 2, 2):
    output = _next(process, state, tiny_task.cohort(_SERVER, size))
    state = output.state
    spent.append(float(state.aggregator['num_releases']))
    models.append(state.global_model_weights.trainable)
    # A noised sum is released in any case.
    assert output.metrics['aggregator']['epsilon'] > 0
  assert spent == sorted(set(spent))
  for first, later in zip(*models[:2], strict=True):
    np.testing.assert_array_equal(first, later)


_GIVEN = ('--norm=gn', '--num_labels=30', '--max_client_examples=60000')
_PROTECTED = {
  'secure': ('--aggregator=secure', '--simulate_secure_aggregation'),
  'dp': ('--aggregator=dp', '--dp_delta=0.001'),
  'robust': ('--aggregator=robust',),
  'compression': ('--aggregator=compression',),
  'cross_device': ('--cross_device',),
}
_SINGLE_CLIENTS = 'not part of the sum'


@pytest.mark.parametrize(
  'name, own, kinds, words, remedy',
  [
    (
      'fedmatch',
      (),
      ('secure', 'dp', 'cross_device'),
      '',
      ('remembered_clients=0',),
    ),
    (
      'fedmatch',
      (),
      ('secure',),
      '',
      ('remembered_clients=0', 'helpers=past'),
    ),
    (
      'protofssl',
      (),
      ('secure', 'dp'),
      _SINGLE_CLIENTS,
      ('prototypes=global',),
    ),
    ('fedswitch', (), ('secure', 'dp'), _SINGLE_CLIENTS, ('labeler=teacher',)),
    ('cbafed', (), ('dp',), '', ('weigh_by_examples=false',)),
    ('feddb', (), ('secure', 'dp'), '', ('weights=uniform',)),
    ('feddb', ('weights=last_mean',), ('dp',), '', ('weights=uniform',)),
    (
      'proxyfl',
      ('tuning=gpt',),
      ('secure', 'dp'),
      _SINGLE_CLIENTS,
      ('tuning=none',),
    ),
    (
      'fedcon',
      ('client_state=table',),
      ('secure', 'dp'),
      '',
      ('client_state=none',),
    ),
    (
      'fedrgd',
      (),
      ('secure', 'dp', 'robust', 'compression'),
      'leave them',
      ('num_groups=1',),
    ),
  ],
)
def test_protection_refuses_what_single_clients_send_with_what_helps(
  name, own, kinds, words, remedy
):
  flags = lambda values: [f'--{name}.{value}' for value in values]
  scenario = registry.REGISTRY[name].scenarios[-1]
  for kind in kinds:
    given = [f'--algorithm={name}', f'--scenario={scenario}', *_GIVEN]
    if kind in ('robust', 'compression'):
      given.remove('--max_client_examples=60000')
    given += _PROTECTED[kind]
    with pytest.raises(hparams.UsageError) as refused:
      config.parse_config([*given, *flags(own)])
    message = str(refused.value)
    assert message.startswith(_PROTECTED[kind][0])
    assert flags(remedy)[0] in message and words in message
    assert '\n' not in message
    config.parse_config([*given, *flags(remedy)])


_PAST_MODELS = {'helpers': 'past', 'num_helpers': 1, 'remembered_clients': 0}


def _quick_or_slow(name, kind, own):
  marks = () if (name, kind) == ('protofssl', 'secure') else pytest.mark.slow
  return pytest.param(name, kind, own, marks=marks)


@pytest.mark.parametrize(
  'name, kind, own',
  [
    _quick_or_slow('protofssl', 'secure', {'prototypes': 'global'}),
    _quick_or_slow('protofssl', 'dp', {'prototypes': 'global'}),
    _quick_or_slow('cbafed', 'secure', {'warmup_rounds': 5}),
    _quick_or_slow(
      'cbafed', 'dp', {'warmup_rounds': 5, 'weigh_by_examples': False}
    ),
    _quick_or_slow(
      'feddb', 'secure', {'app_u': 'start', 'weights': 'last_mean'}
    ),
    _quick_or_slow('fedmatch', 'secure', _PAST_MODELS),
    _quick_or_slow('fedmatch', 'dp', _PAST_MODELS),
    _quick_or_slow('proxyfl', 'secure', {}),
    _quick_or_slow('proxyfl', 'dp', {}),
  ],
)
def test_what_else_is_in_a_protected_sum(name, kind, own):
  """One clip scales all numbers alike, so that their ratios stay."""
  outputs = []
  for aggregator in (aggregator_hparams.AggregatorHparams(kind), None):
    process = tiny_task.build(
      name,
      _CLIENTS,
      norm='none',
      hparams=tuple(own.items()),
      aggregator=aggregator,
      max_client_examples=50,
    )
    first = _next(process, process.initialize(), tiny_task.cohort(_CLIENTS))
    outputs.append(first)
    if aggregator is not None:
      second = _next(process, first.state, tiny_task.cohort(_CLIENTS, 3, 2))
      assert list(second.metrics['client_work']['train']) == ['num_clients']
      assert all(np.all(np.isfinite(w)) for w in tiny_task.flat(second.state))
  if kind == 'secure':  # It has no noise, but rounds.
    memories = (
      (model.sets, model.control)
      for model in (o.state.global_model_weights for o in outputs)
    )
    tiny_rounds.assert_same(*memories, atol=0.02)
