import subprocess
import sys

import pytest

import tff_fssl
from tff_fssl.program import cli
from tff_fssl.program import console
from tff_fssl.program import main


@pytest.fixture(name='call')
def _call(monkeypatch, capsys):
  """Calls `tff-fssl` with arguments: (exit code, output, errors)."""
  previous = console.command('{}')

  def call(*arguments, script='/usr/bin/tff-fssl'):
    monkeypatch.setattr(sys, 'argv', [script, *arguments])
    code = cli.main()
    return code, *capsys.readouterr()

  yield call
  console.name_programs(previous)


@pytest.mark.parametrize('program', cli._PROGRAMS)
def test_help_names_programs_as_they_were_called(call, program):
  code, output, _ = call(program, '--help')
  assert code == main.DONE
  assert output.startswith(f'usage: tff-fssl {program} ')
  assert 'programs/' not in output
  assert program in call('--help')[1]
  _, output, _ = call(program, '--help', script='mine.py')
  assert output.startswith(f'usage: python mine.py {program} ')


def test_version(call):
  assert call('--version') == (
    main.DONE,
    f'tff_fssl {tff_fssl.__version__}\n',
    '',
  )


@pytest.mark.parametrize(
  'arguments, words',
  [
    ((), 'no program was named'),
    (('',), "'' is not a program"),
    (('trian',), "did you mean 'train'?"),
    (('--train',), "'--train' is not a program"),
    (('plot.py',), "did you mean 'plot'?"),
    (('configs', 'quickstart'), 'takes no arguments'),
    (('plot',), 'no run was given'),
    (('train', 'digits'), "'digits' is not a flag"),
  ],
)
def test_mistakes_are_one_line(call, arguments, words):
  code, output, errors = call(*arguments)
  assert (code, output) == (main.USAGE, '')
  assert words in errors and len(errors.splitlines()) == 1


def test_starts_without_numpy_and_tensorflow():
  code = """
import sys
from tff_fssl.program import cli
cli.main()
print({'numpy', 'tensorflow', 'tensorflow_federated'} & set(sys.modules))
"""
  for argument in ('--version', '--help', 'configs', 'wrong'):
    done = subprocess.run(
      [sys.executable, '-c', code, argument],
      capture_output=True,
      text=True,
      check=True,
    )
    assert done.stdout.splitlines()[-1] == 'set()'
