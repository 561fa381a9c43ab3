"""Mistakes in entries of the registry; what entries say is tested elsewhere."""

import dataclasses

import pytest

from tff_fssl.algorithms import fixmatch
from tff_fssl.algorithms import registry
from tff_fssl.hparams import UsageError
from tff_fssl.hparams import hparam
from tff_fssl.interface import round_hparams


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


def test_an_algorithm_is_registered_by_its_class(monkeypatch):
  monkeypatch.setattr(registry, 'REGISTRY', dict(registry.REGISTRY))

  @dataclasses.dataclass(frozen=True)
  class Own(fixmatch.FixMatch):
    """Does what FixMatch does.

    And no more.
    """

    name = 'own'
    size: int = hparam(3, 'Its size.', minimum=1)

  registry.register(Own)
  registry.register(Own)  # A notebook's cell is run twice.
  entry = registry.REGISTRY['own']
  assert entry.summary == 'Does what FixMatch does.'
  assert entry.hparams(size=5).size == 5
  assert entry.hparams().round == round_hparams.RoundHparams()
  with pytest.raises(UsageError, match='--own.size=0: must be at least 1'):
    entry.hparams(size=0)


def test_wrong_classes_are_not_registered(monkeypatch):
  monkeypatch.setattr(registry, 'REGISTRY', dict(registry.REGISTRY))

  class Undecorated(fixmatch.FixMatch):
    name = 'undecorated'
    size: int = hparam(3, 'Its size.')

  class Nameless(fixmatch.FixMatch):
    name = ''

  class Other(fixmatch.FixMatch):
    name = 'fl2'

  for wrong, message in (
    (Undecorated, 'Undecorated: size would be no flag; decorate'),
    (Nameless, 'Nameless: give it a name'),
    (Other, "fl2 already has an algorithm of the name 'fl2'"),
  ):
    with pytest.raises(TypeError, match=message):
      registry.register(wrong)
