"""Names that an algorithm gives."""

import pytest

from tff_fssl.hparams import UsageError
from tff_fssl.interface import names


def test_an_unknown_name_is_refused_with_the_known_ones():
  names.check('teacher', ['teacher'], 'networks', 'weights')
  with pytest.raises(UsageError) as error:
    names.check('techer', ['teacher', 'psi'], 'networks', 'weights')
  message = str(error.value)
  assert "networks='techer'" in message
  assert 'the weights: teacher, psi' in message
  assert "did you mean 'teacher'" in message


def test_reading_an_unknown_name_lists_the_known_ones():
  values = names.Named(weak=1)
  assert values['weak'] == 1
  with pytest.raises(KeyError, match="'waek': there is no such name.*weak"):
    values['waek']
  with pytest.raises(KeyError, match='none'):
    names.Named()['x']
