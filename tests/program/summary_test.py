import dataclasses
import json
import shutil

import pytest
import written_runs

from tests.program import fakes
from tff_fssl import files
from tff_fssl.hparams import UsageError
from tff_fssl.program import output_tree
from tff_fssl.program import summary


def test_the_first_best_round_counts():
  values = ('', '0.5', '0.75', '0.75', 'nan')
  rows = [
    {'round': str(r), 'validation/accuracy': value}
    for r, value in enumerate(values)
  ]
  assert summary.best_round(rows)['round'] == '2'
  assert summary.best_round(rows[:1]) is None


def test_another_figure_selects():
  rows = [
    {'round': '1', 'validation/accuracy': '0.9', 'validation/macro_f1': '0.1'},
    {'round': '2', 'validation/accuracy': '0.8', 'validation/macro_f1': '0.2'},
  ]
  assert summary.best_round(rows, 'macro_f1')['round'] == '2'
  assert summary.best_round(rows, 'auroc') is None


def test_the_summary_of_a_run(tmp_path):
  tree = output_tree.OutputTree(str(written_runs.write(tmp_path / 'run')))
  result = summary.write(tree)
  assert result['rounds'] == 12 and result['last']['round'] == 12
  with open(tree.summary_json) as file:
    assert json.load(file) == result


_COMPUTE = summary.Compute(20.5e6, 20_421.4, 8_278.0, 635.7)


def test_what_is_written_is_read(tmp_path):
  path = str(tmp_path / 'compute.json')
  assert summary.read_compute(path) is None
  summary.write_compute(path, _COMPUTE)
  assert summary.read_compute(path) == _COMPUTE


def test_in_words():
  assert _COMPUTE.describe() == (
    'at most 419 GFLOP a client and round (20,421 forward-equivalents),'
    ' server 13 GFLOP a round (636)'
  )
  only_server = summary.Compute(5.0, 0.0, 0.0, 100.0)
  assert only_server.describe() == 'server 500 FLOP a round (100)'
  unknown = dataclasses.replace(_COMPUTE, server=0.0)
  assert unknown.describe().endswith('(20,421 forward-equivalents)')


@pytest.mark.parametrize(
  'changed',
  [
    {'format': 'tff_fssl.partition'},
    {'more': 1.0},
  ],
)
def test_other_files_are_refused(tmp_path, changed):
  path = tmp_path / 'compute.json'
  summary.write_compute(str(path), _COMPUTE)
  path.write_text(json.dumps(json.loads(path.read_text()) | changed))
  with pytest.raises(files.FileError, match=str(path)):
    summary.read_compute(str(path))


def _check(tree):
  summary.check_outputs(fakes.config(tree.path), tree)


def test_a_finished_run_whose_checkpoints_are_gone_keeps_its_tables(tmp_path):
  fakes.run(tmp_path, total_rounds=2)
  tree = output_tree.OutputTree(str(tmp_path))
  shutil.rmtree(tree.checkpoints)
  _check(tree)
  summary.write(tree)
  with pytest.raises(UsageError, match='finished run are gone; put them back'):
    _check(tree)
