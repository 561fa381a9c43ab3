"""A sweep over real training runs."""

import os
import subprocess
import sys

import pytest

from tff_fssl.program import csv_table
from tff_fssl.program import output_tree
from tff_fssl.program import runs as runs_lib
from tff_fssl.program import summary

_FLAGS = (
  '--flagfile=configs/quickstart.flags',
  '--model=linear',
  '--total_rounds=3',
  '--num_pretraining_rounds=0',
  '--rounds_per_evaluation=1',
)


@pytest.mark.slow
def test_a_sweep_of_real_runs(repository, tmp_path):
  folder = str(tmp_path / 'sweep')

  def call(program, *arguments):
    done = subprocess.run(
      [sys.executable, f'programs/{program}.py', *arguments],
      cwd=repository,
      env={**os.environ, 'PYTHONPATH': str(repository)},
      capture_output=True,
      text=True,
      check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout

  arguments = (
    *_FLAGS,
    '--grid=server_learning_rate=0.000001,0.1',
    '--seeds=0,1',
    '--jobs=2',
    f'--output_dir={folder}',
  )
  output = call('sweep', *arguments)
  assert 'The flags of trial 1 are in' in output
  assert (
    call('sweep', *arguments).split('values')[-1] == output.split('values')[-1]
  )
  paths = [
    f'{folder}/trials/00{n}/seed{seed}' for n in range(2) for seed in range(2)
  ]
  runs = runs_lib.read_all(paths, print)
  assert [len(group.runs) for group in runs_lib.group_runs(runs)] == [2, 2]
  # The flagfile repeats the best trial.
  again = str(tmp_path / 'again')
  flagfile = f'--flagfile={folder}/winner.flags'
  call('train', flagfile, '--seed=1', f'--output_dir={again}')
  first, second = (
    output_tree.OutputTree(path).eval_csv for path in (paths[3], again)
  )
  rows, others = (
    [row[summary.VALIDATION_ACCURACY] for row in csv_table.read(path)[1]]
    for path in (first, second)
  )
  # The sweep's runs had one core each, and so other rounding.
  for value, other in zip(rows, others, strict=True):
    assert float(value) == pytest.approx(float(other), abs=0.02)
