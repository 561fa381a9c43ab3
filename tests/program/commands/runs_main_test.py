import functools
import json
import time

import pytest
import written_runs

from tff_fssl.hparams import UsageError
from tff_fssl.program.commands import main
from tff_fssl.program.commands import runs_main
from tff_fssl.program.reporting import status as status_lib
from tff_fssl.program.storage import heartbeat

_write = functools.partial(written_runs.write, weight_decay=0.0)
_beat = written_runs.beat


def _call(capsys, *arguments):
  code = main.run(runs_main.runs_main, [str(a) for a in arguments])
  return code, *capsys.readouterr()


def test_json(tmp_path, capsys):
  paths = [_write(tmp_path / str(s), seed=s) for s in (0, 1)]
  _beat(paths[1], heartbeat.RUNNING)
  code, out, _ = _call(capsys, tmp_path, '--json')
  first, second = json.loads(out)
  assert code == 0
  assert (first['path'], second['path']) == tuple(paths)
  assert first['state'] == 'finished' and first['started'] is None
  assert second['state'] == 'running' and second['seed'] == '1'
  assert second['round_num'] == second['total_rounds'] == 12
  assert first['group'] == second['group'] == 'fixmatch (2 seeds)'
  assert _call(capsys, tmp_path / '1' / 'metrics', '--json')[1] == '[]\n'


def test_watching_ends_with_ctrl_c(tmp_path, capsys, monkeypatch):
  _write(tmp_path / 'a')
  (tmp_path / 'b').mkdir()
  (tmp_path / 'b' / 'flags.txt').write_text('Our flags\n')
  pauses = []

  def sleep(seconds):
    pauses.append(seconds)
    if len(pauses) == 3:
      raise KeyboardInterrupt

  monkeypatch.setattr(time, 'sleep', sleep)
  code, out, err = _call(capsys, tmp_path, '--watch=0.5')
  assert (code, err, pauses) == (0, '', [0.5] * 3)
  assert out.count('1 finished') == out.count('warning: skipped: ') == 3


def test_watching_on_a_terminal_shows_what_fits(tmp_path, capsys, monkeypatch):
  monkeypatch.chdir(tmp_path)
  for i in range(9):
    _write(tmp_path / str(i), seed=i)
  monkeypatch.setattr('sys.stdout.isatty', lambda: True)
  monkeypatch.setenv('LINES', '8')
  monkeypatch.setenv('COLUMNS', '80')

  def sleep(_):
    raise KeyboardInterrupt

  monkeypatch.setattr(time, 'sleep', sleep)
  _, out, _ = _call(capsys, '.', '--watch=1')
  assert out.startswith('\x1b[H\x1b[Jrun')
  assert len(out.splitlines()) == 7
  assert out.endswith('... and 8 more\n')


@pytest.mark.parametrize(
  'arguments, words',
  [
    (('nowhere',), 'nowhere: does not exist'),
    ((), 'runs: does not exist'),
    (('file',), 'file: is not a folder'),
    (('--json', '--watch=2'), '--json: has no effect with --watch=2'),
    (('--watch=-1',), 'must be at least 0'),
    (('--watch=1e20', '.'), '--watch=1e+20: must be at most'),
  ],
)
def test_mistakes(tmp_path, capsys, monkeypatch, arguments, words):
  monkeypatch.chdir(tmp_path)
  (tmp_path / 'file').touch()
  code, out, err = _call(capsys, *arguments)
  assert (code, out) == (2, '')
  assert words in err and len(err.splitlines()) == 1


def test_no_runs(tmp_path, capsys):
  assert _call(capsys, tmp_path) == (
    0,
    f'There are no runs in {tmp_path}.\n',
    '',
  )
  with pytest.raises(UsageError):
    status_lib.read(str(tmp_path), print)
