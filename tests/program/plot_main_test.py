import numpy as np
import pytest

from tff_fssl.hparams import UsageError
from tff_fssl.program import csv_table
from tff_fssl.program import main
from tff_fssl.program import output_tree
from tff_fssl.program import plot_main
from tff_fssl.program import runs

_TRAIN = 'client_work/train'


def _run(folder, seed, algorithm='fl2', rounds=4, offset=0.0, **flags):
  tree = output_tree.OutputTree(str(folder))
  (folder / 'metrics').mkdir(parents=True)
  values = {'algorithm': algorithm, 'seed': seed, 'output_dir': folder, **flags}
  with open(tree.flags_file, 'w') as file:
    file.writelines(f'--{name}={value}\n' for name, value in values.items())
  train = csv_table.CsvTable(tree.train_csv)
  evaluation = csv_table.CsvTable(tree.eval_csv)
  for r in range(1, rounds + 1):
    kept = np.nan if r == 1 else 0.1 * r
    train.log(r, {f'{_TRAIN}/pseudo_label_ratio': kept})
    if r % 2 == 0:
      evaluation.log(r, {'test/accuracy': 0.1 * r + offset})
  return str(folder)


def test_the_program(tmp_path, capsys):
  paths = [_run(tmp_path / 'a', 0), _run(tmp_path / 'b', 1, 'fixmatch')]
  assert main.run(plot_main.plot_main, paths) == 0
  output = capsys.readouterr().out
  assert 'Test accuracy' in output and 'Pseudo-label rate' in output
  assert (tmp_path / 'curves.png').read_bytes().startswith(b'\x89PNG')
  assert main.run(plot_main.plot_main, paths[:1]) == 0
  assert (tmp_path / 'a' / 'report' / 'curves.png').exists()
  named = tmp_path / 'new' / 'x.png'
  assert main.run(plot_main.plot_main, [*paths, f'--output={named}']) == 0
  assert named.exists()


def test_some_diagrams(tmp_path, capsys):
  paths = [_run(tmp_path / 'a', 0), f'--output={tmp_path / "x.png"}']
  assert main.run(plot_main.plot_main, [*paths, '--diagrams=ACCURACY, x']) == 2
  assert "no diagram has 'x' in its title; there are: Test accuracy" in (
    capsys.readouterr().err
  )
  assert not (tmp_path / 'x.png').exists()
  assert main.run(plot_main.plot_main, [*paths, '--diagrams=TEST acc']) == 0
  assert capsys.readouterr().out.endswith('x.png: Test accuracy\n')


def test_what_cannot_be_drawn(tmp_path, capsys):
  assert main.run(plot_main.plot_main, []) == 2
  assert main.run(plot_main.plot_main, [str(tmp_path)]) == 2
  assert 'is not a run' in capsys.readouterr().err
  empty = _run(tmp_path / 'empty', 0, rounds=0)
  with pytest.raises(UsageError, match='no round'):
    runs.read_run(empty)
