import dataclasses
import json
import os
import shutil

import pytest
import written_runs

from tests.program import fakes
from tff_fssl import files
from tff_fssl.hparams import UsageError
from tff_fssl.program.storage import checkpoint
from tff_fssl.program.storage import output_tree
from tff_fssl.program.storage import summary


def test_the_first_best_round_counts():
  values = ('', '0.5', '0.75', '0.75', 'nan')
  rows = [
    {'round': str(r), 'validation/accuracy': value}
    for r, value in enumerate(values)
  ]
  assert summary.best_round(rows)['round'] == '2'
  assert summary.best_round(rows[:1]) is None


def test_the_summary_of_a_run(tmp_path):
  tree = output_tree.OutputTree(str(written_runs.write(tmp_path / 'run')))
  result = summary.write(tree)
  assert result['rounds'] == 12 and result['last']['round'] == 12
  with open(tree.summary_json) as file:
    assert json.load(file) == result


_COMPUTE = summary.Compute(20.5e6, 20_421.4, 8_278.0, 27_771.4, 635.7)


def test_what_is_written_is_read(tmp_path):
  path = str(tmp_path / 'compute.json')
  assert summary.read_compute(path) is None
  for written in (_COMPUTE, dataclasses.replace(_COMPUTE, client_authors=None)):
    summary.write_compute(path, written)
    assert summary.read_compute(path) == written


def test_in_words():
  assert _COMPUTE.describe() == (
    'at most 419 GFLOP a client and round (20,421 forward-equivalents; the'
    " authors' code 27,771), server 13 GFLOP a round (636)"
  )
  only_server = summary.Compute(5.0, 0.0, 0.0, None, 100.0)
  assert only_server.describe() == 'server 500 FLOP a round (100)'
  unknown = dataclasses.replace(_COMPUTE, client_authors=None, server=0.0)
  assert unknown.describe().endswith('(20,421 forward-equivalents)')


@pytest.mark.parametrize(
  'changed',
  [
    {'format': 'tff_fssl.partition'},
    {'client': -1.0},
    {'client': float('nan')},
    {'server': True},
    {'server': None},
    {'forward_flops': '1'},
    {'more': 1.0},
  ],
)
def test_other_files_are_refused(tmp_path, changed):
  path = tmp_path / 'compute.json'
  summary.write_compute(str(path), _COMPUTE)
  path.write_text(json.dumps(json.loads(path.read_text()) | changed))
  with pytest.raises(files.FileError, match=str(path)):
    summary.read_compute(str(path))


def _made(folder, **settings):
  """The folder of a run with --rounds_per_checkpoint=10, as by default."""
  settings = {'rounds_per_checkpoint': 10, **settings}
  fakes.run(folder, rounds_per_evaluation=100, **settings)
  return output_tree.OutputTree(str(folder))


def _check(tree):
  summary.check_outputs(fakes.config(tree.path), tree)


def _remove_checkpoints(tree, *rounds):
  for version in rounds or checkpoint.versions(tree.checkpoints):
    os.unlink(checkpoint.path_of(tree.checkpoints, version))


@pytest.mark.parametrize('is_folder_gone', [True, False])
def test_a_run_whose_checkpoints_are_gone_keeps_its_tables(
  is_folder_gone, tmp_path
):
  tree = _made(tmp_path / 'run', total_rounds=20)
  _check(tree)
  if is_folder_gone:
    shutil.rmtree(tree.checkpoints)
  else:
    _remove_checkpoints(tree)
  words = 'none is there, though the tables go to round 20; put them back, or'
  with pytest.raises(UsageError, match=words):
    _check(tree)


def test_the_last_checkpoints_are_gone(tmp_path):
  tree = _made(tmp_path / 'run', total_rounds=30, keep=9)
  assert checkpoint.versions(tree.checkpoints) == [0, 10, 20, 30]
  _remove_checkpoints(tree, 30)
  _check(tree)
  _remove_checkpoints(tree, 20)
  with pytest.raises(UsageError, match='the last one is of round 10 there'):
    _check(tree)
  # It is known to be damaged: going back was announced.
  with open(checkpoint.path_of(tree.checkpoints, 20) + '.damaged', 'w'):
    _check(tree)


def _make_unsaved(folder):
  """A run of rounds 1 to 4 that were not saved, as far as can be told."""
  tree = _made(folder, total_rounds=4)
  _remove_checkpoints(tree)
  with open(tree.train_csv) as file:
    lines = file.readlines()
  with open(tree.train_csv, 'w') as file:
    file.writelines([lines[0], *lines[2:]])  # Round 0 is always saved.
  _check(tree)
  return tree


def test_the_best_round_was_saved_whatever_its_number(tmp_path):
  tree = _make_unsaved(tmp_path / 'run')
  with open(tree.eval_csv) as file:
    header, first, *_ = file.readlines()
  with open(tree.eval_csv, 'w') as file:
    file.write(f'{header}3{first[1:]}')
  with pytest.raises(UsageError, match='go to round 4'):
    _check(tree)


def test_a_short_run_that_had_finished(tmp_path):
  tree = _make_unsaved(tmp_path / 'run')
  with open(tree.summary_json, 'w') as file:
    file.write('{}')
  with pytest.raises(UsageError, match='go to round 4'):
    _check(tree)
