"""Mistakes in entries of the registry; what entries say is tested elsewhere."""

import dataclasses

import pytest

from tff_fssl.algorithms import registry
from tff_fssl.rounds import round_hparams


@pytest.mark.parametrize('name', registry.REGISTRY)
def test_values_of_entries_are_allowed(name):
  entry = registry.REGISTRY[name]
  assert entry.name == name
  defaults = round_hparams.RoundHparams(**entry.round_defaults)
  for field, value in entry.round_defaults.items():
    assert type(value) is type(getattr(round_hparams.RoundHparams(), field))
    assert getattr(defaults, field) == value
  # Which scenario is meant depends on the data, not on the paper.
  assert 'scenario' not in entry.round_defaults
  assert entry.hparams(**entry.tiny_hparams)


@pytest.mark.parametrize(
  'wrong, word',
  [
    ({'round_defaults': {'client_epoch': 5}}, 'client_epoch'),
    ({'round_defaults': {'client_epochs': 0}}, '--client_epochs=0'),
    ({'tiny_hparams': {'threshold': 0.5}}, 'threshold'),
    ({'tiny_hparams': {'confidence_threshold': 2.0}}, 'at most 1'),
  ],
)
def test_wrong_values_are_refused(wrong, word):
  with pytest.raises(TypeError, match=f"'fixmatch' has a wrong value.*{word}"):
    dataclasses.replace(registry.REGISTRY['fixmatch'], **wrong)
