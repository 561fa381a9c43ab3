"""The pages on extending show the code of examples/extend.py, and that runs."""

import csv
import os
import re
import subprocess
import sys

import pytest

from tff_fssl.aggregators import hparams as aggregator_hparams
from tff_fssl.algorithms import registry
from tff_fssl.data import names as data_names
from tff_fssl.models import names as model_names
from tff_fssl.program import cli
from tff_fssl.program import compare
from tff_fssl.program import console
from tff_fssl.program import evaluation
from tff_fssl.program import main
from tff_fssl.program import plots
from tff_fssl.program import runs
from tff_fssl.program import train_main

_TABLES = (
  registry.REGISTRY,
  aggregator_hparams.AGGREGATORS,
  data_names.DATA_SETS,
  model_names.MODELS,
)
_MODULE = 'examples.extend'


@pytest.fixture(scope='module', name='call')
def _call():
  """Calls the example with arguments; undoes what it registers."""
  previous = [dict(table) for table in _TABLES]
  command = console.command('{}')
  __import__(_MODULE)

  def call(*arguments):
    with pytest.MonkeyPatch.context() as patch:
      patch.setattr(sys, 'argv', ['examples/extend.py', *arguments])
      return cli.main()

  yield call
  console.name_programs(command)
  sys.modules.pop(_MODULE)
  for table, before in zip(_TABLES, previous, strict=True):
    table.clear()
    table.update(before)


def test_the_page_shows_the_example(repository):
  page = (repository / 'docs' / 'extending.md').read_text()
  code = (repository / 'examples' / 'extend.py').read_text()
  blocks = re.findall(r'```python\n(.*?)```', page, re.DOTALL)
  # Nothing else is in the file but its first docstring.
  rest = code
  for block in blocks:
    assert rest.count(block) == 1, block
    rest = rest.replace(block, '')
  assert re.fullmatch(r'"""[^"]*"""\s*', rest)
  for command in re.findall(r'(?m)^    (python (?:.*\\\n)*.*)$', page)[:1]:
    assert ' '.join(command.split()) in ' '.join(code.split())


def test_its_entries_are_in_the_help(call, capsys):
  assert call('train', '--helpfull') == 0
  text = ' '.join(capsys.readouterr().out.split())
  assert text.startswith('usage: python examples/extend.py train ')
  for words in (
    'fashion_mnist, digits, parity.',
    'wrn28_8, one_layer.',
    'dp, clipped.',
    '--fixmatch_confidence.confidence_threshold=0.95',
    '--momentum_teacher.decay=0.9',
  ):
    assert words in text


def test_its_entries_are_used_in_a_run(call, tmp_path, monkeypatch, capsys):
  monkeypatch.chdir(tmp_path)
  code = call(
    'train',
    '--dataset=parity',
    '--model=one_layer',
    '--norm=gn',
    '--aggregator=clipped',
    '--algorithm=fixmatch_confidence',
    '--num_labels=40',
    '--num_clients=20',
    '--clients_per_round=2',
    '--client_epochs=1',
    '--server_epochs=1',
    '--num_pretraining_rounds=0',
    '--total_rounds=2',
    '--tensorboard=false',
    '--progress=none',
  )
  output = ' '.join(capsys.readouterr().out.split())
  assert code == 0
  folder = 'runs/fixmatch_confidence_parity_labels_at_server_seed0'
  assert '2 classes' in output and 'one_layer, norm gn, 4,418 weights' in output
  assert f'python examples/extend.py evaluate {folder}' in output
  with open(os.path.join(folder, 'metrics', 'train.csv')) as file:
    rows = list(csv.DictReader(file))
  assert len(rows) == 2
  for row in rows:
    assert 0.5 <= float(row['client_work/train/confidence']) <= 1
    assert float(row['aggregator/inner/clipping_norm']) == 1
  assert call('evaluate', folder) == 0


def test_its_algorithm(call, tmp_path, capsys):
  folder = str(tmp_path / 'teacher')
  code = call(
    'train',
    '--dataset=digits',
    '--model=one_layer',
    '--norm=gn',
    '--algorithm=momentum_teacher',
    '--momentum_teacher.decay=0.5',
    '--momentum_teacher.confidence_threshold=0.3',
    '--num_labels=40',
    '--num_clients=20',
    '--clients_per_round=2',
    '--client_epochs=1',
    '--server_epochs=2',
    '--num_pretraining_rounds=3',
    '--total_rounds=2',
    '--rounds_per_evaluation=1',
    '--tensorboard=false',
    '--progress=none',
    f'--output_dir={folder}',
  )
  assert code == 0

  def rows(name):
    with open(os.path.join(folder, 'metrics', name)) as file:
      return list(csv.DictReader(file))

  train = rows('train.csv')[-1]
  assert 0 < float(train['client_work/train/pseudo_label_ratio']) <= 1
  sizes = [
    train[f'communication/bytes_down_{name}'] for name in ('model', 'teacher')
  ]
  assert sizes[0] == sizes[1]
  evaluation = rows('eval.csv')[-1]
  assert evaluation['test/teacher/loss'] != evaluation['test/loss']
  capsys.readouterr()
  assert call('evaluate', folder) == 0
  output = capsys.readouterr().out
  figure = float(evaluation['test/teacher/accuracy'])
  assert f'teacher accuracy  {figure:.4f}' in output
  _check_other_programs(folder, capsys)


def test_the_conformance_tests_run_its_algorithm(repository):
  page = (repository / 'docs' / 'extending.md').read_text()
  command = re.search(r'python (-m pytest -p (?:.*\\\n)*.*)', page)[1]
  # One test is enough to see that they know it.
  argv = command.replace('\\\n', '').split()
  argv[-1] += ' and without_clients'
  result = subprocess.run(
    [sys.executable, *argv], cwd=repository, capture_output=True, text=True
  )
  assert result.stdout.count(' passed') == 1 and not result.returncode


def _check_other_programs(folder, capsys):
  """They never run the file that made the run."""
  with pytest.MonkeyPatch.context() as patch:
    patch.delitem(registry.REGISTRY, 'momentum_teacher')
    for program, argv in (
      (evaluation.evaluate_main, folder),
      (train_main.train_main, f'--flagfile={folder}/flags.txt'),
    ):
      assert main.run(program, [argv]) == 2
      assert 'momentum_teacher' in capsys.readouterr().err
    for program in (compare.compare_main, plots.plot_main):
      assert main.run(program, [folder]) == 0, program
    assert main.run(runs.runs_main, [folder]) == 0
