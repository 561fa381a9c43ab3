import functools
import json

import pytest
import written_runs

from tff_fssl.hparams import UsageError
from tff_fssl.program import main
from tff_fssl.program import output_tree
from tff_fssl.program import runs_main
from tff_fssl.program import status as status_lib

_write = functools.partial(written_runs.write, weight_decay=0.0)


def _call(capsys, *arguments):
  code = main.run(runs_main.runs_main, [str(a) for a in arguments])
  return code, *capsys.readouterr()


def test_json(tmp_path, capsys):
  paths = [_write(tmp_path / str(s), seed=s) for s in (0, 1)]
  with output_tree.OutputTree(paths[1]) as tree:
    tree.lock()
    code, out, _ = _call(capsys, tmp_path, '--json')
  first, second = json.loads(out)
  assert code == 0
  assert (first['path'], second['path']) == tuple(paths)
  assert first['state'] == 'finished' and first['started'] is None
  assert second['state'] == 'running' and second['seed'] == '1'
  assert second['round_num'] == second['total_rounds'] == 12
  assert first['group'] == second['group'] == 'fixmatch (2 seeds)'
  assert _call(capsys, tmp_path / '1' / 'metrics', '--json')[1] == '[]\n'


@pytest.mark.parametrize(
  'arguments, words',
  [
    (('nowhere',), 'nowhere: does not exist'),
    ((), 'runs: does not exist'),
    (('file',), 'file: is not a folder'),
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
