import dataclasses

import pytest

from tff_fssl import hparams
from tff_fssl.hparams import hparam


@dataclasses.dataclass(frozen=True)
class _Hparams:
  kind: str = hparam('a', 'Which.', choices=('a', 'b'))
  rate: float = hparam(0.5, 'How fast.', minimum=0, maximum=1)
  size: int = hparam(1, 'How large.', minimum=1)
  seed: int = hparam(0, 'Any.')


@pytest.mark.parametrize(
  'given, message',
  [
    ({'kind': 'aa'}, "^--x.kind=aa: allowed are a, b; did you mean 'a'?"),
    ({'rate': -0.1}, '^--x.rate=-0.1: must be at least 0'),
    ({'rate': float('nan')}, 'must be a finite number'),
    ({'rate': 1e-40}, 'the range of float32'),
    ({'size': -(10**11)}, 'must be from 1 to 2,147,483,647'),
    ({'seed': -3_000_000_000}, 'from -2,147,483,647 to 2,147,483,647'),
    ({'seed': 10**30}, r'=1000000000\.\.\.\(31 digits\): must be from'),
  ],
)
def test_values_are_checked_against_their_fields(given, message):
  hparams.validate(_Hparams())
  with pytest.raises(hparams.UsageError, match=message):
    hparams.validate(_Hparams(**given), 'x.')


def test_fields_without_documentation_are_an_error_of_the_author():
  cls = dataclasses.make_dataclass('Wrong', [('depth', int, 3)])
  with pytest.raises(TypeError, match='Wrong.depth has no documentation'):
    hparams.documented_fields(cls)
