"""What the registry says of an algorithm."""

import dataclasses

import pytest

from tff_fssl.algorithms import registry
from tff_fssl.interface import base
from tff_fssl.interface import entry as entry_lib
from tff_fssl.interface.round_hparams import RoundHparams


@dataclasses.dataclass(frozen=True)
class _Own(base.Algorithm):
  """An algorithm of one's own,
  whose summary has two lines.

  More.
  """

  name = 'own'
  norm = 'gn'
  round_defaults = {'client_epochs': 3}


def test_an_entry_is_read_from_the_class():
  entry = entry_lib.Entry.describe(_Own)
  assert entry.name == 'own'
  assert entry.summary == (
    "An algorithm of one's own, whose summary has two lines."
  )
  assert entry.run_defaults == {'client_epochs': 3, 'norm': 'gn'}
  assert not (entry.predicts_otherwise or entry.learns_unlabeled)
  assert not entry.keeps_client_state()
  assert registry.REGISTRY['fixmatch'].learns_unlabeled
  fedcon = registry.REGISTRY['fedcon']
  assert fedcon.keeps_client_state(fedcon.hparams(client_state='table'))
  assert registry.REGISTRY['protofssl'].predicts_otherwise


def test_wrong_values_are_a_mistake_of_the_entry():
  @dataclasses.dataclass(frozen=True)
  class Wrong(_Own):
    round_defaults = {'client_epochs': -3}

  with pytest.raises(TypeError, match="entry 'own' has a wrong value"):
    entry_lib.Entry.describe(Wrong)


def test_configured_algorithms_have_the_rounds_given():
  entry, rounds = registry.REGISTRY['fl2'], RoundHparams(client_epochs=2)
  assert entry.configure(None, rounds) == entry.hparams(round=rounds)
  own = entry.hparams(rho=0.25)
  configured = entry.configure(own, rounds)
  assert (configured.rho, configured.round) == (0.25, rounds)
