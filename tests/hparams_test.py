import dataclasses

import pytest

from tff_fssl import hparams
from tff_fssl.hparams import hparam


@dataclasses.dataclass(frozen=True)
class _Hparams:
  kind: str = hparam('a', 'Which.', choices=('a', 'b'))
  rate: float = hparam(0.5, 'How fast, with b.', needs={'kind': ('b',)})
  depth: int = hparam(
    3, 'How deep.', needs={'kind': ('b',), 'general': (True,)}
  )


@pytest.mark.parametrize(
  'kind, general, expected',
  [
    ('b', True, {}),
    ('b', False, {'x.depth': '--general=false'}),
    ('a', True, {'x.rate': '--x.kind=a', 'x.depth': '--x.kind=a'}),
  ],
)
def test_needs_refer_to_own_fields_first(kind, general, expected):
  # Another dataclass has a flag of the same name.
  values = {'x.kind': kind, 'kind': 'z', 'general': general}
  assert hparams.without_effect(_Hparams, values, 'x.') == expected


def test_needs_of_flags_that_do_not_exist_are_an_error_of_the_author():
  with pytest.raises(TypeError, match="_Hparams.depth needs 'general'"):
    hparams.without_effect(_Hparams, {'kind': 'b'})
