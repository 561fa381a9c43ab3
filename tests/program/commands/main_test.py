import dataclasses
import re

import pytest

from tff_fssl import hparams
from tff_fssl.hparams import hparam
from tff_fssl.program.commands import main


def test_the_page_of_runs_names_the_exit_codes(repository):
  page = (repository / 'docs' / 'files.md').read_text()
  table = page.partition('## Exit codes')[2]
  rows = re.findall(r'(?m)^\| (\d[\d, ]*) \|', table)
  named = {int(code) for row in rows for code in row.split(',')}
  assert named == {
    main.DONE,
    main.FAILED,
    main.USAGE,
    main.NOT_FINITE,
    main.INTERRUPTED,
    main.CLOSED_PIPE,
    main.TERMINATED,
  }


@dataclasses.dataclass(frozen=True)
class _Hparams:
  kind: str = hparam('a', 'Which.', choices=('a', 'b'))
  depth: int = hparam(3, 'How deep.', when=lambda own: own.kind == 'b')

  def __post_init__(self):
    hparams.validate(self)


@main.command('programs/x.py NAME', 'Tries.', _Hparams, missing='none', most=1)
def _program(settings, parsed):
  return settings.depth if parsed.positional == ('code',) else None


def test_a_command_parses_checks_and_returns_a_code(capsys):
  assert _program(['code', '--kind=b', '--depth=7']) == 7
  assert _program(['other']) == main.DONE
  assert _program(['--help']) == main.DONE
  assert '--depth=3' in capsys.readouterr().out
  for argv, message in (
    ([], '^none$'),
    (['a', 'b'], "^'b': give one name only$"),
    (['code', '--depth=7'], '^--depth: has no effect with --kind=a; omit it'),
    (['code', '--kind=c'], '^--kind=c: allowed are a, b'),
  ):
    with pytest.raises(hparams.UsageError, match=message):
      _program(argv)
