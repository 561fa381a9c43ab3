"""Hyper-parameters of aggregation, and settings that they reject."""

import types

import pytest

from tff_fssl import hparams
from tff_fssl.aggregators import hparams as aggregator_hparams


@pytest.mark.parametrize('name', aggregator_hparams.AGGREGATORS)
def test_every_aggregator_has_a_builder_and_fields(name):
  settings = aggregator_hparams.AggregatorHparams(aggregator=name)
  info = aggregator_hparams.AGGREGATORS[name]
  assert callable(hparams.import_function(info.builder))
  fields = {f.name: f for f in hparams.documented_fields(settings)}
  assert set(info.fields) <= set(fields)
  run = types.SimpleNamespace(aggregator=name, aggregates=True)
  used = {
    n
    for n, f in fields.items()
    if n != 'aggregator' and f.metadata['when'](run)
  }
  assert used == set(info.fields)


@pytest.mark.parametrize(
  'fields, words',
  [
    ({'aggregator': 'means'}, "allowed are mean,.*did you mean 'mean'"),
    ({'dp_noise_multiplier': 0.0}, 'greater than 0'),
    ({'dp_delta': 0.7}, 'at most 0.5'),
  ],
)
def test_values_out_of_range_are_rejected(fields, words):
  with pytest.raises(hparams.UsageError, match=words):
    aggregator_hparams.AggregatorHparams(**fields)


def test_sizes_and_majorities():
  aggregator_hparams.check_sizes(
    delta=1e-5, clients_per_round=10, population=10
  )
  for cohort in (0, 11):
    with pytest.raises(hparams.UsageError, match='from 1 to 10'):
      aggregator_hparams.check_sizes(
        delta=1e-5, clients_per_round=cohort, population=10
      )
  with pytest.raises(hparams.UsageError, match='less than 1/10'):
    aggregator_hparams.check_sizes(
      delta=0.1, clients_per_round=5, population=10
    )
  aggregator_hparams.check_majority(None)
  aggregator_hparams.check_majority(3)
  with pytest.raises(hparams.UsageError, match='at least 3 clients'):
    aggregator_hparams.check_majority(2)


_PRIVATE = {
  'own_weights': False,
  'client_weighting': 'uniform',
  'batch_norm': False,
  'static': False,
}


@pytest.mark.parametrize(
  'aggregator, changed, words',
  [
    ('secure', {}, ''),
    ('dp', {}, ''),
    ('secure', {'own_weights': True, 'client_weighting': 'examples'}, ''),
    ('secure', {'batch_norm': True}, ''),
    ('secure', {'static': True}, 'set --norm=gn'),
    ('secure', {'also_sends': True}, 'use another aggregator'),
    ('dp', {'also_sends': '--x=0'}, 'set --x=0, use another'),
    ('dp', {'own_weights': True}, 'turn them off'),
    ('dp', {'own_weights': '--fl2.adaptive=false'}, 'set --fl2.adaptive=false'),
    ('dp', {'client_weighting': 'examples'}, 'set --client_weighting=uniform'),
    ('dp', {'batch_norm': True}, 'than the noise can hide'),
  ],
)
def test_private_aggregators_reject_further_releases(
  aggregator, changed, words
):
  settings = _PRIVATE | changed
  if not words:
    aggregator_hparams.check_confidential(aggregator, **settings)
    return
  with pytest.raises(hparams.UsageError, match=words) as error:
    aggregator_hparams.check_confidential(aggregator, **settings)
  assert '\n' not in str(error.value)
