import dataclasses
import os
import subprocess
import sys

import pytest

from tff_fssl.hparams import UsageError
from tff_fssl.hparams import hparam
from tff_fssl.program import cli
from tff_fssl.program import config
from tff_fssl.program import flags
from tff_fssl.program import usage


@dataclasses.dataclass(frozen=True)
class _Hparams:
  count: int = hparam(3, 'How many.', minimum=1)
  rate: float = hparam(0.5, 'How fast.', minimum=0, maximum=1)
  name: str = hparam('a', 'Which.', choices=('a', 'b'))
  fast: bool = hparam(True, 'Whether.')


_GROUPS = [
  flags.Group(_Hparams, 'Plain'),
  flags.Group(_Hparams, 'Prefixed', 'x.'),
]


def _parse(*argv, **kwargs):
  return flags.parse(argv, _GROUPS, **kwargs)


def _file(tmp_path, text, name='a.flags'):
  path = tmp_path / name
  path.write_text(text)
  return str(path)


def test_defaults_types_and_prefixes():
  parsed = _parse('--count=5', '--x.rate', '0.25', '--nofast', '--x.fast=false')
  assert parsed.build(_Hparams) == _Hparams(count=5, fast=False)
  assert parsed.build(_Hparams, 'x.') == _Hparams(rate=0.25, fast=False)
  assert parsed.command_line == {'count', 'x.rate', 'fast', 'x.fast'}
  assert type(parsed.values['x.rate']) is float


@pytest.mark.parametrize('file_first', [True, False])
def test_the_command_line_beats_the_file_wherever_it_stands(
  tmp_path, file_first
):
  path = _file(tmp_path, '# comment\n--count=7\n\n// too\n--name=b\n')
  argv = [f'--flagfile={path}', '--count=9']
  parsed = _parse(*(argv if file_first else argv[::-1]))
  assert parsed.values['count'] == 9
  assert parsed.values['name'] == 'b'
  assert parsed.command_line == {'count'}
  assert parsed.files == {'count': path, 'name': path}


def test_a_flag_may_be_given_several_times(tmp_path):
  @dataclasses.dataclass(frozen=True)
  class Several:
    each: tuple[str, ...] = hparam((), 'Which.')

  groups = [flags.Group(Several, 'Flags')]
  path = _file(tmp_path, '--each=a\n--each=b')
  parsed = flags.parse([f'--flagfile={path}', '--each', 'c,d'], groups)
  assert parsed.build(Several).each == ('a', 'b', 'c,d')
  assert flags.parse([], groups).build(Several).each == ()
  assert '  --each=\n' in usage.help_text('', '', groups)
  with pytest.raises(UsageError, match='unprintable'):
    flags.parse(['--each=a', '--each=a\nb'], groups)


def test_flagfiles_nest_relative_to_the_file_that_names_them(tmp_path):
  (tmp_path / 'base').mkdir()
  _file(tmp_path / 'base', '--count=4\n--name=b\n', 'b.flags')
  path = _file(tmp_path, '--flagfile=base/b.flags\n--count=6\n')
  parsed = _parse('--flagfile', path)
  assert (parsed.values['count'], parsed.values['name']) == (6, 'b')


@pytest.mark.parametrize(
  'argv, words',
  [
    (['--cout=3'], ['--cout', 'did you mean --count?']),
    (['--ra=3'], ['--ra', 'did you mean --rate, --x.rate?']),
    (['--x.late=3'], ['--x.late', 'did you mean --x.rate']),
    (['--x.rat=3'], ['--x.rat', 'did you mean --x.rate?']),
    (['stray'], ["'stray' is not a flag"]),
    (['--', 'stray'], ["'stray' is not a flag"]),
    (['--count=many'], ['--count=many', 'a whole number']),
    (['--count=1.5'], ['--count=1.5', 'a whole number']),
    (['--rate=fast'], ['--rate=fast', 'a number']),
    (['--fast=maybe'], ['--fast=maybe', 'true or false']),
    (['--count'], ['missing value', '--count']),
    (['--undefok=foo', '--foo=1'], ['unknown flag --undefok']),
    (['--flagfile'], ['--flagfile']),
    (['--flagfile=/nowhere'], ['/nowhere', 'No such file']),
  ],
)
def test_bad_command_lines_give_one_clear_line(argv, words):
  with pytest.raises(UsageError) as error:
    _parse(*argv)
  message = str(error.value)
  assert '\n' not in message
  for word in words:
    assert word in message


def test_bad_flagfiles_are_named(tmp_path):
  for text, word in (
    ('--cuont=3\n', 'did you mean --count'),
    ('count=3\n', 'line 1'),
    ('--count=x\n', 'a whole number'),
  ):
    path = _file(tmp_path, text)
    with pytest.raises(UsageError, match=word) as error:
      _parse(f'--flagfile={path}')
    assert path in str(error.value)
  loop = _file(tmp_path, f'--flagfile={tmp_path}/a.flags\n')
  with pytest.raises(UsageError, match='includes itself'):
    _parse(f'--flagfile={loop}')
  with pytest.raises(UsageError, match='did you mean'):
    _parse(f'--flagfile={tmp_path}/b.flags')


def test_positional_arguments_where_they_are_allowed():
  parsed = _parse('run1', '--count=2', 'run2', allow_positional=True)
  assert parsed.positional == ('run1', 'run2')


def test_flagfile_round_trip(tmp_path):
  values = {'count': 7, 'rate': 1 / 3, 'name': 'b', 'fast': False}
  text = flags.flagfile_text(values)
  assert text.splitlines() == sorted(text.splitlines())
  path = _file(tmp_path, text)
  assert _parse(f'--flagfile={path}').build(_Hparams) == _Hparams(**values)
  assert flags.read_flagfile(path)['rate'] == repr(1 / 3)


def test_a_field_without_documentation_is_an_error_of_its_author():
  @dataclasses.dataclass(frozen=True)
  class Bare:
    count: int = 3

  @dataclasses.dataclass(frozen=True)
  class Silent:
    good: int = hparam(3, 'How many.')
    rate: float = hparam(0.5, '')

  for cls, name in ((Bare, 'Bare.count'), (Silent, 'Silent.rate')):
    group = flags.Group(cls, 'A')
    for call in (
      lambda: flags.parse([], [group]),  # pylint: disable=cell-var-from-loop
      lambda: usage.help_text('', '', [group]),  # pylint: disable=cell-var-from-loop
    ):
      with pytest.raises(TypeError, match=f'^{name} has no documentation'):
        call()


def test_no_two_flags_have_one_name():
  names = [n for g in config.groups() for n, _ in g.named_fields()]
  assert len(names) == len(set(names))


def test_help_and_bad_flags_do_not_import_tensorflow():
  code = """
import sys
from tff_fssl.program import cli, main
for name in cli._PROGRAMS:
  for argv, expected in ((['--help'], 0), (['--zzz=1'], 2)):
    sys.argv[1:] = argv
    assert main.run(cli.load(name)) == expected, name
    for heavy in ('tensorflow', 'tensorflow_federated', 'matplotlib', 'jinja2'):
      assert heavy not in sys.modules, (name, heavy)
"""
  done = subprocess.run(
    [sys.executable, '-c', code], capture_output=True, text=True, check=False
  )
  assert done.returncode == 0, done.stderr
  assert done.stdout.count('usage:') == len(cli._PROGRAMS)
  assert done.stderr.count('--zzz') == len(cli._PROGRAMS)


def test_a_file_that_is_there_is_no_hint_at_itself(tmp_path):
  with pytest.raises(UsageError) as error:
    flags.read_flagfile(str(tmp_path))  # A folder.
  assert 'did you mean' not in str(error.value)


def test_names_are_the_files_of_configs(repository):
  files = (repository / 'configs').rglob('*.flags')
  expected = sorted(str(path.relative_to(repository)) for path in files)
  assert flags.list_configs() == expected
  assert 'configs/quickstart.flags' in expected


def test_a_name_is_found_from_any_folder(tmp_path, monkeypatch, repository):
  monkeypatch.chdir(tmp_path)
  file = repository / 'configs' / 'quickstart.flags'
  for name in ('configs/quickstart.flags', './configs//quickstart.flags'):
    assert os.path.samefile(flags.find_config(name), file)
  assert flags.read_flagfile('configs/quickstart.flags')['dataset'] == 'digits'


def test_a_file_that_is_there_comes_first(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  path = tmp_path / 'configs' / 'quickstart.flags'
  path.parent.mkdir()
  path.symlink_to('nowhere')
  # A broken link is still the user's file: the message names it.
  assert (
    flags.find_config('configs/quickstart.flags') == 'configs/quickstart.flags'
  )
  path.unlink()
  path.write_text('--seed=3\n')
  assert (
    flags.find_config('configs/quickstart.flags') == 'configs/quickstart.flags'
  )


def test_other_names_stay_as_they_are(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  for name in (
    '',
    '.',
    '/',
    '..',
    'configs',
    'configs/',
    'configs/fl2',
    'quickstart.flags',
    'configs/../quickstart.flags',
    'configs/../../README.md',
    '/configs/quickstart.flags',
    'other/configs/quickstart.flags',
    'configs/quickstart.flags\0',
  ):
    assert flags.find_config(name) == name
