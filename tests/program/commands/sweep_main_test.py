"""Sweeps over a stand-in for the training program, tests/helpers/fake_train.py.

The validation accuracy that a run ends with is its learning rate.
"""

import csv
import os
import signal
import subprocess
import sys
import time

from matplotlib import image
import pytest

from tff_fssl.program.commands import main
from tff_fssl.program.commands import sweep_main
from tff_fssl.program.configuration import config as config_lib
from tff_fssl.program.loop import sweep as sweep_lib
from tff_fssl.program.storage import csv_table
from tff_fssl.program.storage import output_tree

_BASE = (
  '--dataset=digits',
  '--num_validation=100',
  '--num_clients=20',
  '--total_rounds=10',
  '--client_learning_rate=0.5',
)
_GRID = '--grid=client_learning_rate=0.5,0.8'
_SWEEP = """\
import sys
from tff_fssl.program.commands import main
from tff_fssl.program.commands import sweep_main
fake = sys.argv.pop(1)
sweep_main.train_command = lambda: [sys.executable, fake]
sys.exit(main.run(sweep_main.sweep_main))
"""


@pytest.fixture(name='fake')
def _fake(repository):
  return str(repository / 'tests' / 'helpers' / 'fake_train.py')


@pytest.fixture(name='folder')
def _folder(tmp_path):
  return output_tree.SweepFolder(str(tmp_path / 'sweep'))


@pytest.fixture(name='call')
def _call(monkeypatch, capsys, fake, folder, tmp_path):
  """Calls the program with arguments: (exit code, output, errors)."""
  monkeypatch.setattr(sweep_lib, '_POLL_SECS', 0.01)
  monkeypatch.setattr(
    sweep_main, 'train_command', lambda: [sys.executable, fake]
  )

  def call(*arguments):
    arguments = [*_BASE, f'--output_dir={folder.path}', *arguments]
    code = main.run(sweep_main.sweep_main, arguments)
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    assert all(len(n) <= 80 or str(tmp_path) in n for n in lines)
    return code, captured.out, captured.err

  return call


def _rows(folder):
  with open(folder.trials_csv) as file:
    return list(csv.DictReader(file))


def _starts(folder, number, seed=0):
  with open(os.path.join(folder.run(number, seed), 'starts')) as file:
    return len(file.readlines())


def _evaluated(folder, number, seed=0):
  path = os.path.join(folder.run(number, seed), 'metrics', 'eval.csv')
  with open(path) as file:
    return [int(row['round']) for row in csv.DictReader(file)]


def test_a_grid(call, folder):
  arguments = (_GRID, '--grid=client_epochs=1,2', '--seeds=0,1')
  arguments += ('--client_epochs=2',)
  code, output, errors = call(*arguments)
  assert (code, errors) == (main.DONE, '')
  # Test accuracy is that of the best trial and of the flags as given.
  words = ' '.join(output.split())
  assert 'best trial 2: test accuracy 90.5 ± 0.7 %, validation' in words
  assert 'as given trial 1: test accuracy 60.5 ± 0.7 %, validation' in words
  assert words.count('test accuracy') == 2
  table = [line.split() for line in output.splitlines()]
  assert ['2', '0.8', '1', '80.5', '±', '0.7', 'complete'] in table
  rows = _rows(folder)
  assert [row['client_learning_rate'] for row in rows] == [
    '0.5',
    '0.5',
    '0.8',
    '0.8',
  ]
  assert (rows[3]['seed0'], rows[3]['seed1']) == ('0.8', '0.81')
  assert 'test/accuracy' not in rows[0]
  chosen = config_lib.parse_config([f'--flagfile={folder.winner}'])
  assert (
    chosen.round.client_learning_rate == 0.8 and chosen.round.client_epochs == 1
  )
  assert chosen.run.total_rounds == 10 and 'sweep' not in chosen.run.output_dir
  assert image.imread(folder.picture).std() > 0
  # The same command has nothing left to do.
  assert call(*arguments)[0] == main.DONE
  assert [_starts(folder, n, s) for n in range(4) for s in (0, 1)] == [1] * 8
  # Another sweep is refused.
  for more in ('--grid=momentum=0.5', '--total_rounds=11', '--seeds=0'):
    code, output, errors = call(*arguments, more)
    assert (code, output) == (main.USAGE, '') and errors.count('\n') == 1
    assert f'{more.split("=")[-2].lstrip("-")}' in errors
    assert 'holds a sweep of another configuration' in errors


def test_rounds_may_vary(call):
  for _ in range(2):
    code, output, errors = call('--grid=total_rounds=5,10')
    assert (code, errors) == (main.DONE, '')
    assert 'rounds each' not in output


def test_a_run_that_was_continued_is_not_what_was_selected(call, folder):
  assert call(_GRID)[0] == main.DONE
  for number in range(2):
    tree = output_tree.OutputTree(folder.run(number, 0))
    csv_table.CsvTable(tree.eval_csv).log(
      11, {'validation/accuracy': 0.99, 'test/accuracy': 0.99}
    )
  code, _, errors = call(_GRID)
  assert code == main.USAGE and 'is no longer whole' in errors


def test_a_run_that_fails_is_started_again(call, folder, monkeypatch):
  monkeypatch.setenv('FAKE_FAILURES', '{"0.5": 1}')
  code, output, _ = call(_GRID)
  assert code == main.DONE and 'starting again; seed 0: exit code 1' in output
  assert (_starts(folder, 0), _starts(folder, 1)) == (2, 1)
  assert _evaluated(folder, 0) == list(range(1, 11))


def test_a_trial_that_fails_does_not_end_the_sweep(call, folder, monkeypatch):
  monkeypatch.setenv('FAKE_FAILURES', '{"0.5": 9}')
  code, output, errors = call(_GRID)
  assert code == main.FAILED
  reason = f'the disk is full; see {folder.log(0, 0)}'
  assert reason in errors and errors.startswith('error: trial 0: ')
  assert 'best trial 1:' in ' '.join(output.split())
  failed, complete = _rows(folder)
  assert (failed['state'], complete['state']) == ('failed', 'complete')
  assert reason in failed['note'] and _starts(folder, 0) == 2
  # What failed is tried again.
  monkeypatch.delenv('FAKE_FAILURES')
  assert call(_GRID)[0] == main.DONE
  assert [row['state'] for row in _rows(folder)] == ['complete'] * 2
  assert (_starts(folder, 0), _starts(folder, 1)) == (3, 1)


def test_a_trial_that_diverges_is_over(call, folder, monkeypatch):
  monkeypatch.setenv('FAKE_DIVERGES', '0.8')
  for _ in range(2):
    code, output, errors = call(_GRID)
    assert (code, errors) == (main.DONE, '')
    assert 'best, as given trial 0:' in ' '.join(output.split())
    assert [row['state'] for row in _rows(folder)] == ['complete', 'diverged']
  assert _starts(folder, 1) == 1
  assert 'exit code 3: no update could be used; see' in _rows(folder)[1]['note']


def test_without_a_complete_trial(call, monkeypatch):
  monkeypatch.setenv('FAKE_FAILURES', '{"0.5": 9}')
  code, _, errors = call('--grid=client_learning_rate=0.5', '--retries=0')
  assert code == main.USAGE and 'no trial is complete: trial 0' in errors


def test_pruning(call, folder, monkeypatch):
  monkeypatch.setenv('FAKE_WAITS', '0.2')
  arguments = ('--grid=client_learning_rate=0.8,0.2,0.9', '--seeds=0,1')
  arguments += ('--pruning=median', '--pruning_trials=1')
  code, output, _ = call(*arguments)
  assert code == main.DONE
  assert [r['state'] for r in _rows(folder)] == [
    'complete',
    'pruned',
    'complete',
  ]
  assert 'best trial 2:' in ' '.join(output.split())
  # It was stopped early, and its second seed was not begun.
  assert len(_evaluated(folder, 1)) <= 3
  assert not os.path.exists(folder.run(1, 1))
  assert call(*arguments)[0] == main.DONE and _starts(folder, 1) == 1


# TPE draws its first ten trials at random.
@pytest.mark.parametrize('sampler, trials', [('random', 3), ('tpe', 12)])
def test_drawn_trials_go_on_as_if_never_stopped(
  sampler, trials, call, tmp_path
):
  text = (
    f'sampler = "{sampler}"\n[flags]\n'
    'client_learning_rate = {low = 0.01, high = 0.9, log = true}\n'
    'client_epochs = {low = 1, high = 20, step = 2}\nnorm = ["gn", "none"]'
  )
  path = tmp_path / 'sweep.toml'
  path.write_text(text)
  whole, parts = (
    output_tree.SweepFolder(str(tmp_path / name)) for name in ('whole', 'parts')
  )
  for folder, count in ((whole, trials), (parts, trials - 1), (parts, trials)):
    code, output, errors = call(
      f'--sweep={path}', f'--output_dir={folder.path}', f'--trials={count}'
    )
    assert code == main.DONE and 'as given' not in output
    assert not errors
  assert _rows(whole) == _rows(parts) and len(_rows(whole)) == trials
  assert len({row['client_learning_rate'] for row in _rows(whole)}) == trials


def test_jobs_share_the_cores(call, folder, monkeypatch, tmp_path):
  monkeypatch.setenv('FAKE_TOGETHER', str(tmp_path))
  monkeypatch.setattr(os, 'sched_getaffinity', lambda _: set(range(5)))
  arguments = ('--grid=client_learning_rate=0.5,0.6,0.7', '--jobs=2')
  assert call(*arguments)[0] == main.DONE
  for number in range(3):
    with open(os.path.join(folder.run(number, 0), 'flags.txt')) as file:
      assert '--intra_op_threads=2\n' in file.read()
  counts = (tmp_path / 'counts').read_text().split()
  assert max(map(int, counts)) == 2


@pytest.mark.parametrize('number', [signal.SIGKILL, signal.SIGTERM])
def test_a_sweep_that_is_stopped_goes_on(
  number, call, folder, fake, repository
):
  arguments = (
    '--grid=client_learning_rate=0.5,0.6,0.7',
    f'--output_dir={folder.path}',
  )
  process = subprocess.Popen(
    [sys.executable, '-c', _SWEEP, fake, *_BASE, *arguments],
    env={**os.environ, 'PYTHONPATH': str(repository), 'FAKE_WAITS': '0.6'},
    stdout=subprocess.PIPE,
    text=True,
  )
  second = os.path.join(folder.run(1, 0), 'metrics', 'eval.csv')
  while not os.path.exists(second) or len(_evaluated(folder, 1)) < 3:
    assert process.poll() is None
    time.sleep(0.02)
  process.send_signal(number)
  output, _ = process.communicate()
  if number == signal.SIGTERM:
    assert process.returncode == main.TERMINATED
    assert 'Stopped and saved. To continue' in output
  # Without the sweep, its run has ended, or does so.
  deadline = time.monotonic() + 20
  while output_tree.is_held(folder.run(1, 0)):
    assert time.monotonic() < deadline
    time.sleep(0.02)
  assert _evaluated(folder, 1) == [1, 2, 3]
  code, output, _ = call(*arguments)
  assert code == main.DONE and 'best trial 2:' in ' '.join(output.split())
  assert [_starts(folder, n) for n in range(3)] == [1, 2, 1]
  for n in range(3):
    assert _evaluated(folder, n) == list(range(1, 11))
  assert [row['state'] for row in _rows(folder)] == ['complete'] * 3


def test_a_second_sweep_is_refused(call, folder):
  with folder:
    folder.open({'flags': {}})
    code, _, errors = call(_GRID)
  assert code == main.USAGE and 'another program (process ' in errors


def test_other_folders_are_refused(call, folder):
  os.makedirs(folder.path)
  path = os.path.join(folder.path, 'flags.txt')
  with open(path, 'w'):
    pass
  code, _, errors = call(_GRID)
  assert code == main.USAGE and "other files ('flags.txt') but no" in errors
  os.unlink(path)
  for content in ('{', '[]', '{}', '{"flags": 3}'):
    with open(folder.sweep_json, 'w') as file:
      file.write(content)
    code, _, errors = call(_GRID)
    assert code == main.USAGE and errors.count('\n') == 1
    assert f'{folder.sweep_json}: it is not' in errors
  os.unlink(folder.sweep_json)
  with open(folder.study, 'w') as file:
    file.write('not a data base ' * 100)
  # It is neither a sweep's, since sweep.json is missing, ...
  code, _, errors = call(_GRID)
  assert code == main.USAGE and "other files ('study.db') but no" in errors
  os.unlink(folder.study)
  # ... nor, in a sweep's folder, a study.
  assert (
    call('--grid=client_learning_rate=0.5', '--grid=client_epochs=1')[0] == 0
  )
  with open(folder.study, 'w') as file:
    file.write('not a data base ' * 100)
  code, _, errors = call(
    '--grid=client_learning_rate=0.5', '--grid=client_epochs=1'
  )
  assert code == main.USAGE and errors.count('\n') == 1
  assert 'study.db: the study cannot be used' in errors


def test_dry_run(call, folder):
  code, output, _ = call('--dry_run', _GRID, '--grid=momentum=0,0.9')
  assert code == main.DONE and not os.path.exists(folder.path)
  assert '4: 4 trials with 1 seed (0), of 10 rounds each' in output
  assert 'trial 1: client_learning_rate=0.5 momentum=0.9' in output


@pytest.mark.parametrize(
  'arguments, words',
  [
    (('--num_validation=0', _GRID), 'selects by validation accuracy'),
    (
      ('--grid=client_learning_rte=1',),
      'unknown flag --client_learning_rte; did you mean',
    ),
    (('--grid', 'fedmatch.helpers=now,past'), '--algorithm=fedmatch'),
    ((_GRID, '--jobs=0'), '--jobs=0: must be at least 1'),
    (
      (_GRID, '--sweep=nowhere.toml'),
      '--sweep: nowhere.toml: it does not exist',
    ),
    ((_GRID, 'more'), "'more' is not a flag"),
    ((), 'no flag to vary was given'),
  ],
)
def test_mistakes(call, folder, arguments, words):
  code, output, errors = call(*arguments)
  assert (code, output) == (main.USAGE, '')
  assert errors.count('\n') == 1
  assert not os.path.exists(folder.path)
  assert words in errors


def test_the_training_program_is_the_one_beside(monkeypatch, repository):
  programs = repository / 'programs'
  monkeypatch.setattr(sys, 'argv', [str(programs / 'sweep.py'), '--x'])
  assert sweep_main.train_command() == [
    sys.executable,
    str(programs / 'train.py'),
  ]
  monkeypatch.setattr(sys, 'argv', ['/usr/bin/tff-fssl', 'sweep'])
  assert sweep_main.train_command() == [
    sys.executable,
    '/usr/bin/tff-fssl',
    'train',
  ]
