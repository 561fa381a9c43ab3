"""Every file that a program opens, in every bad shape: one line, exit code 2.

And numbers, streams and names that are bad.
"""

import asyncio
import contextlib
import errno
import io
import os
import pathlib
import shutil
import subprocess
import sys
import types

import pytest

from tests.program import fakes
from tff_fssl.hparams import UsageError
from tff_fssl.program import compare
from tff_fssl.program import config as config_lib
from tff_fssl.program import evaluation
from tff_fssl.program import main
from tff_fssl.program import plots
from tff_fssl.program import train_main
from tff_fssl.program import training

_PROGRAMS = {
  'train': train_main.train_main,
  'evaluate': evaluation.evaluate_main,
  'plot': plots.plot_main,
  'compare': compare.compare_main,
}
_FAULTS = ('missing', 'folder', 'empty', 'torn', 'elsewhere', 'unreadable')


def _break(path, fault, monkeypatch):
  """Puts a fault in the place of a file."""
  content = path.read_bytes() if path.is_file() else b''
  if fault in ('missing', 'folder'):
    path.unlink()
  if fault == 'folder':
    path.mkdir()
  elif fault == 'empty':
    path.write_bytes(b'')
  elif fault == 'torn':
    # A header is never torn: it is renamed into its place.
    keep = -5 if path.suffix == '.csv' else len(content) // 2
    path.write_bytes(content[:keep])
  elif fault == 'elsewhere':
    path.write_bytes(b'\x7fELF\n' + bytes(200) + b'\n')
  elif fault == 'unreadable':
    # Not by permissions, which do not bind root.
    real = os.open

    def refuse(name, mode, *args, **kwargs):
      if os.fspath(name) == str(path):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), name)
      return real(name, mode, *args, **kwargs)

    monkeypatch.setattr(os, 'open', refuse)


def _snapshot(folder):
  """What is in a folder: a file's bytes, else what it is."""
  result = {}
  for path in sorted(pathlib.Path(folder).rglob('*')):
    if path.name == '.lock':
      continue
    if path.is_symlink():
      result[path] = os.readlink(path)
    else:
      result[path] = (
        path.read_bytes() if path.is_file() else path.stat().st_mode
      )
  return result


def _assert_one_line(code, captured):
  lines = captured.err.splitlines()
  assert code == main.USAGE, captured
  assert len(lines) == 1 and lines[0].startswith('error: '), captured.err
  assert 'Traceback' not in captured.err


@pytest.fixture(name='made', scope='module')
def _made(tmp_path_factory):
  folder = tmp_path_factory.mktemp('made') / 'run'
  fakes.run(folder, total_rounds=2, keep=1)
  return folder


@pytest.fixture
def run(made, tmp_path):
  """The folder of a run of two rounds of fakes, with its last checkpoint."""
  return pathlib.Path(shutil.copytree(made, tmp_path / 'run'))


_GOES_ON = {
  # Not needed: a new table. A torn row is removed.
  ('train', 'metrics/train.csv'): ('missing', 'torn'),
  ('train', 'metrics/eval.csv'): ('missing', 'torn'),
  ('train', 'metrics/timing.csv'): ('missing', 'torn'),
  ('plot', 'metrics/train.csv'): ('torn',),
  ('plot', 'metrics/timing.csv'): ('missing', 'torn'),
  ('compare', 'metrics/eval.csv'): ('torn',),
}


@pytest.mark.parametrize('fault', _FAULTS)
@pytest.mark.parametrize(
  'program, name',
  [
    *((p, 'flags.txt') for p in _PROGRAMS),
    *(('train', f'metrics/{t}.csv') for t in ('train', 'eval', 'timing')),
    ('plot', 'metrics/train.csv'),
    ('plot', 'metrics/timing.csv'),
    ('compare', 'metrics/eval.csv'),
    ('evaluate', 'checkpoints/round_2.ckpt'),
    ('evaluate', 'metrics/eval.csv'),
  ],
)
def test_a_file_of_a_run(program, name, fault, run, capsys, monkeypatch):
  monkeypatch.setattr(train_main, '_train', lambda *args: 'continues')
  _break(run / name, fault, monkeypatch)
  before = _snapshot(run)
  argv = [str(run)]
  if program == 'train':
    argv = [f'--output_dir={run}']
  if name == 'metrics/eval.csv' and program == 'evaluate':
    argv.append('--round=best')
  code = main.run(_PROGRAMS[program], argv)
  captured = capsys.readouterr()
  if fault in _GOES_ON.get((program, name), ()):
    assert code in ('continues', main.DONE), captured
    return
  if name == 'flags.txt' and fault in ('torn', 'empty'):
    # What is left may be flags; these programs need few of them.
    assert code in (main.DONE, main.USAGE) and 'Traceback' not in captured.err
    return
  _assert_one_line(code, captured)
  assert _snapshot(run) == before


@pytest.mark.parametrize('fault', _FAULTS)
@pytest.mark.parametrize('program', ['train', 'evaluate'])
def test_a_file_that_a_flag_names(program, fault, run, capsys, monkeypatch):
  path = run.parent / 'file'
  path.write_bytes(b'PK\x03\x04' + bytes(range(256)))
  _break(path, fault, monkeypatch)
  argv = ['--dataset=digits', f'--output_dir={run.parent / "new"}']
  if program == 'evaluate':
    argv = [str(run)]
  if fault == 'empty':
    path.write_bytes(b'stray')
  _assert_one_line(
    main.run(_PROGRAMS[program], [*argv, f'--flagfile={path}']),
    capsys.readouterr(),
  )
  if program == 'train' and fault != 'torn':
    code = main.run(_PROGRAMS[program], [*argv, f'--init_from={path}'])
    _assert_one_line(code, capsys.readouterr())


@pytest.mark.parametrize('fault', _FAULTS[1:])
def test_the_only_checkpoint(fault, run, monkeypatch):
  """As training loads it."""
  path = run / 'checkpoints' / 'round_2.ckpt'
  _break(path, fault, monkeypatch)
  manager = training.DurableProgramStateManager(str(run / 'checkpoints'))
  before = _snapshot(run)
  with pytest.raises(UsageError) as error:
    with contextlib.closing(asyncio.new_event_loop()) as loop:
      loop.run_until_complete(manager.load_latest({}))
  assert '\n' not in str(error.value) and 'round_2.ckpt' in str(error.value)
  assert _snapshot(run) == before


@pytest.mark.parametrize('program', ['plot', 'compare', 'evaluate'])
def test_what_is_no_run_is_left_out_with_a_warning(
  program, run, capsys, monkeypatch
):
  monkeypatch.setattr(
    evaluation, 'load_run', lambda *_: types.SimpleNamespace(changed=())
  )
  monkeypatch.setattr(
    evaluation,
    '_evaluate_loaded',
    lambda *_: evaluation.Evaluation({'model': 'run'}, {}),
  )
  folder = run.parent
  (folder / 'notes.txt').write_text('')
  (folder / 'empty').mkdir()
  (folder / 'loop').symlink_to(folder / 'loop')
  others = [str(folder / n) for n in ('notes.txt', 'empty', 'loop', 'none')]
  extra = [f'--output={folder / "x.png"}'] if program == 'plot' else []
  code = main.run(_PROGRAMS[program], [*others, str(run), *extra])
  captured = capsys.readouterr()
  assert code == main.DONE, captured.err
  lines = captured.err.splitlines()
  assert [line.split(': ')[2] for line in lines] == others
  assert all(line.startswith('warning: skipped: ') for line in lines)
  code = main.run(_PROGRAMS[program], others)
  _assert_one_line(code, capsys.readouterr())


@pytest.mark.parametrize('name', ['a\nb', '\ud800', ' a'])
def test_names_that_no_line_can_hold(name, tmp_path, capsys, monkeypatch):
  monkeypatch.chdir(tmp_path)
  for program, argv in (
    *(('train', [f'--{f}={name}']) for f in ('output_dir', 'init_from')),
    ('train', [f'--data_dir={name}']),
    ('train', [f'--dataset=folder:{name}']),
    ('train', [f'--dataset={name}']),
    ('train', [f'--cache_dir={name}']),
    ('train', [f'--flagfile={name}']),
    *((p, [name]) for p in _PROGRAMS),
    ('evaluate', ['x', f'--data_dir={name}']),
    ('plot', ['x', f'--output={name}']),
  ):
    _assert_one_line(main.run(_PROGRAMS[program], argv), capsys.readouterr())
  assert not os.listdir(tmp_path)


def _number_flags():
  for group in config_lib.groups():
    for name, field in group.named_fields():
      if type(field.default) in (int, float):
        yield group, name, field


@pytest.mark.parametrize(
  'value',
  ['1e300', '-99999999999', '9' * 5000, 'nan', '1e-39', ''],
)
def test_absurd_numbers_are_refused(value, capsys, tmp_path):
  for _, name, field in _number_flags():
    if value.isdigit() and isinstance(field.default, float):
      continue  # A size that float32 holds may be meant.
    code = main.run(
      train_main.train_main,
      [f'--output_dir={tmp_path / "x"}', f'--{name}={value}'],
    )
    captured = capsys.readouterr()
    _assert_one_line(code, captured)
    assert name in captured.err, captured.err
  assert not (tmp_path / 'x').exists()


@pytest.mark.parametrize('largest', [True, False])
def test_extreme_numbers_that_are_allowed_do_not_hang_the_start(
  largest, monkeypatch, tmp_path, capsys
):
  """Refused, or got as far as TensorFlow: quickly."""
  monkeypatch.setattr(train_main, '_train', lambda *args: main.DONE)
  for index, (_, name, field) in enumerate(_number_flags()):
    low, high = (field.metadata[m] for m in ('minimum', 'maximum'))
    if isinstance(field.default, int):
      value = (high or 2**31 - 1) if largest else (low or 0)
    else:
      value = (high or 3.4e38) if largest else 1.3e-38
    algorithm = name.partition('.')[0] if '.' in name else 'fl2'
    code = main.run(
      train_main.train_main,
      [
        f'--algorithm={algorithm}',
        '--dataset=digits',
        '--partition=dirichlet',
        '--num_clients=20',
        f'--output_dir={tmp_path / str(index)}',
        f'--{name}={value}',
      ],
    )
    assert code in (main.DONE, main.USAGE)
    assert 'Traceback' not in capsys.readouterr().err


def test_profiles_of_too_many_rounds(capsys):
  argv = ['--total_rounds=9000000', '--profile=1-9000000']
  _assert_one_line(main.run(train_main.train_main, argv), capsys.readouterr())


class _Closed(io.TextIOBase):
  """A pipe whose reader has gone."""

  encoding = 'utf-8'

  def write(self, text):
    raise BrokenPipeError(errno.EPIPE, 'Broken pipe')

  def fileno(self):
    raise OSError


def test_output_that_nobody_reads(run, capsys, monkeypatch):
  for program in ('plot', 'compare'):
    with monkeypatch.context() as patch:
      patch.setattr(sys, 'stdout', _Closed())
      code = main.run(_PROGRAMS[program], [str(run)])
    assert code == main.CLOSED_PIPE and not capsys.readouterr().err
    with monkeypatch.context() as patch:
      patch.setattr(sys, 'stdout', None)
      code = main.run(_PROGRAMS[program], [str(run)])
    _assert_one_line(code, capsys.readouterr())


_ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
  'shell, code, words',
  [
    ('{program} {run} >&-', 2, 'standard output is closed'),
    ('{program} {run} >/dev/full', 2, 'the disk is full'),
    (
      '{program} --help | head -0; exit ${{PIPESTATUS[0]}}',
      141,
      '',
    ),
    ('{program} {run} 2>&-', 0, ''),
    ('env -u HOME {program} {run}', 0, ''),
    ('PYTHONIOENCODING=ascii LC_ALL=C {program} {run} {other}', 0, r'\xb1'),
  ],
)
def test_streams(shell, code, words, run, tmp_path):
  """As a shell has them."""
  other = tmp_path / 'other'
  shutil.copytree(run, other)
  text = (other / 'flags.txt').read_text()
  (other / 'flags.txt').write_text(text.replace('--seed=0', '--seed=1'))
  program = f'{sys.executable} {_ROOT}/programs/compare.py'
  done = subprocess.run(
    ['bash', '-c', shell.format(program=program, run=run, other=other)],
    capture_output=True,
    check=False,
  )
  error = done.stderr.decode()
  assert done.returncode == code, error
  assert 'Traceback' not in error and 'Exception ignored' not in error
  assert words in error + done.stdout.decode()
  assert len(error.splitlines()) == (code == 2)


def test_text_that_a_terminal_cannot_show():
  stream = io.TextIOWrapper(io.BytesIO(), encoding='ascii')
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(sys, 'stdout', stream)
    assert main.run(lambda argv: print('1 ± 2 \udcff é') or 0, []) == 0
  assert stream.buffer.getvalue() == b'1 \\xb1 2 \\udcff \\xe9\n'


def test_unprintable_values_in_a_flagfile(tmp_path, capsys):
  path = tmp_path / 'f'
  path.write_text('--data_dir=a\x07b\n')
  code = main.run(train_main.train_main, [f'--flagfile={path}'])
  _assert_one_line(code, capsys.readouterr())
