import re

import pytest
import written_runs

from tff_fssl.program import main
from tff_fssl.program import report_main


@pytest.fixture(scope='module')
def paths(tmp_path_factory):
  folder = tmp_path_factory.mktemp('runs')
  result = [
    written_runs.write(folder / f'{name}{seed}', name, seed)
    for name in ('fl2', 'fixmatch')
    for seed in range(2)
  ]
  written_runs.write_partition(result[0])
  return result


def _report(capsys, *argv):
  code = main.run(report_main.report_main, list(argv))
  return code, *capsys.readouterr()


def test_the_program(paths, capsys, tmp_path):
  output = str(tmp_path / 'new' / 'x.html')
  arguments = [*paths, '--noevaluate', f'--output={output}']
  code, out, _ = _report(capsys, *arguments, str(tmp_path))
  assert code == 0 and out.strip() == output
  with open(output) as file:
    text = file.read()
  assert text.startswith('<!DOCTYPE html>')
  assert len(text) < 2_000_000
  _report(capsys, *arguments)
  with open(output) as file:
    assert file.read() == text
  assert not re.search('Models</', text)


def test_where_it_is_written(tmp_path, capsys):
  path = written_runs.write(tmp_path / 'a')
  assert _report(capsys, path, '--noevaluate')[0] == 0
  assert (tmp_path / 'a' / 'report' / 'report.html').exists()


def test_what_cannot_be_reported(paths, capsys, tmp_path):
  for arguments, text in (
    ([], 'no run was given'),
    ([str(tmp_path)], 'is not a run'),
    ([paths[0], f'--output={tmp_path}'], 'is a folder'),
    ([paths[0], '--noevaluate', '--data_dir=x'], '--data_dir: has no effect'),
  ):
    code, _, err = _report(capsys, *arguments)
    assert code == 2 and text in err


def test_a_model_that_cannot_be_looked_over_is_a_note(paths, capsys, tmp_path):
  output = tmp_path / 'x.html'
  code, _, err = _report(capsys, paths[0], f'--output={output}')
  assert code == 0 and 'not looked over' in err
  assert 'Models</' in output.read_text()
