"""Sweeps over a stand-in for the training program, tests/helpers/fake_train.py.

The validation accuracy that a run ends with is its learning rate.
"""

import csv
import errno
import os
import signal
import subprocess
import sys
import time

import numpy as np
import optuna
import pytest

from tff_fssl.data import partition_draw
from tff_fssl.data import partition_settings
from tff_fssl.hparams import UsageError
from tff_fssl.program import config as config_lib
from tff_fssl.program import flags
from tff_fssl.program import main
from tff_fssl.program import output_tree
from tff_fssl.program import sweep_main

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
from tff_fssl.program import main
from tff_fssl.program import sweep_main
fake = sys.argv.pop(1)
sweep_main.train_command = lambda: [sys.executable, fake]
sys.exit(main.run(sweep_main.sweep_main))
"""


@pytest.fixture(name='fake')
def _fake(repository):
  return str(repository / 'tests' / 'helpers' / 'fake_train.py')


@pytest.fixture(name='folder')
def _folder(tmp_path):
  return str(tmp_path / 'sweep')


@pytest.fixture(name='call')
def _call(monkeypatch, capsys, fake, folder):
  """Calls the program with arguments: (exit code, output, errors)."""
  monkeypatch.setattr(sweep_main, '_POLL_SECS', 0.01)
  monkeypatch.setattr(
    sweep_main, 'train_command', lambda: [sys.executable, fake]
  )

  def call(*arguments):
    arguments = [*_BASE, f'--output_dir={folder}', *arguments]
    code = main.run(sweep_main.sweep_main, arguments)
    return (code, *capsys.readouterr())

  return call


def _run(folder, number, seed=0):
  return os.path.join(folder, 'trials', f'{number:03}', f'seed{seed}')


def _rows(folder):
  with open(os.path.join(folder, 'trials.csv')) as file:
    return list(csv.DictReader(file))


def _starts(folder, number, seed=0):
  with open(os.path.join(_run(folder, number, seed), 'starts')) as file:
    return len(file.readlines())


def _evaluated(folder, number, seed=0):
  path = os.path.join(_run(folder, number, seed), 'metrics', 'eval.csv')
  with open(path) as file:
    return [int(row['round']) for row in csv.DictReader(file)]


def test_a_grid(call, folder):
  arguments = (_GRID, '--grid=client_epochs=1,2', '--seeds=0,1')
  code, output, errors = call(*arguments)
  assert (code, errors) == (main.DONE, '')
  words = ' '.join(output.split())
  assert 'client_learning_rate=0.8 2 80.5 ± 0.7 complete' in words
  # Test data select nothing, and are not shown.
  assert '90.5' not in words and 'The flags of trial 2 are in ' in words
  rows = _rows(folder)
  assert [row['client_learning_rate'] for row in rows] == [
    '0.5',
    '0.5',
    '0.8',
    '0.8',
  ]
  assert (rows[3]['seed0'], rows[3]['seed1']) == ('0.8', '0.81')
  assert 'test/accuracy' not in rows[0]
  winner = os.path.join(folder, 'winner.flags')
  chosen = config_lib.parse_config([f'--flagfile={winner}'])
  assert chosen.round.client_learning_rate == 0.8
  assert chosen.round.client_epochs == 1
  assert chosen.run.total_rounds == 10 and 'sweep' not in chosen.run.output_dir
  # The same command has nothing left to do.
  assert call(*arguments)[0] == main.DONE
  assert [_starts(folder, n, s) for n in range(4) for s in (0, 1)] == [1] * 8
  # Another sweep is refused.
  for more in ('--grid=momentum=0.5', '--total_rounds=11', '--seeds=0'):
    code, output, errors = call(*arguments, more)
    assert (code, output) == (main.USAGE, '') and errors.count('\n') == 1
    assert f'{more.split("=")[-2].lstrip("-")}' in errors
    assert 'holds a sweep of another configuration' in errors


@pytest.mark.parametrize(
  'grid, winner, why',
  [
    (('client_epochs=7,5,9',), 1, "has the base's own values"),
    (('client_epochs=7,9',), 0, 'was given first'),
    (
      ('client_epochs=7,9', 'momentum=0.5,0.9'),
      1,
      "is nearest to the base's values",
    ),
  ],
)
def test_ties_are_told(call, grid, winner, why):
  own = ('--client_epochs=5', '--momentum=0.9')
  code, output, _ = call(*own, *(f'--grid={text}' for text in grid))
  assert code == main.DONE
  (line,) = (line for line in output.splitlines() if 'equal' in line)
  assert line.endswith(f'equal best trials, trial {winner} is kept: it {why}.')
  assert f'The flags of trial {winner} are in' in ' '.join(output.split())


def test_a_single_best_trial_is_no_tie(call):
  assert 'equal best trials' not in call(_GRID)[1]


def test_another_figure_decides(call, folder):
  code, output, errors = call(_GRID, '--best_by=macro_f1')
  # The stand-in reports accuracies alone.
  assert code == main.FAILED and 'best validation macro F1 wins' in output
  assert 'it has no validation macro F1' in errors
  assert 'validation/macro_f1' in _rows(folder)[0]


def test_rounds_may_vary(call):
  for _ in range(2):
    code, _, errors = call('--grid=total_rounds=5,10')
    assert (code, errors) == (main.DONE, '')


def test_a_trial_that_fails_does_not_end_the_sweep(call, folder, monkeypatch):
  monkeypatch.setenv('FAKE_FAILURES', '{"0.5": 1}')
  code, output, errors = call(_GRID)
  assert code == main.FAILED
  reason = f'exit code 1: the disk is full; see {_run(folder, 0)}.log'
  assert reason in errors and errors.startswith('error: trial 0: ')
  assert 'The flags of trial 1 are in' in output
  failed, complete = _rows(folder)
  assert (failed['state'], complete['state']) == ('failed', 'complete')
  assert reason in failed['note']
  # What failed is tried again, from where it was.
  assert call(_GRID)[0] == main.DONE
  assert [row['state'] for row in _rows(folder)] == ['complete'] * 2
  assert (_starts(folder, 0), _starts(folder, 1)) == (2, 1)
  assert _evaluated(folder, 0) == list(range(1, 11))


def test_a_trial_that_diverges_is_over(call, folder, monkeypatch):
  monkeypatch.setenv('FAKE_DIVERGES', '0.8')
  for _ in range(2):
    code, output, errors = call(_GRID)
    assert (code, errors) == (main.DONE, '')
    assert 'The flags of trial 0 are in' in output
    assert [row['state'] for row in _rows(folder)] == ['complete', 'diverged']
  assert _starts(folder, 1) == 1
  assert 'exit code 3: no update could be used; see' in _rows(folder)[1]['note']


def test_without_a_complete_trial(call, monkeypatch):
  monkeypatch.setenv('FAKE_FAILURES', '{"0.5": 9}')
  code, _, errors = call('--grid=client_learning_rate=0.5')
  assert code == main.FAILED and errors.startswith('error: trial 0: ')


def test_pruning(call, folder, monkeypatch):
  monkeypatch.setenv('FAKE_WAITS', '0.2')
  arguments = ('--grid=client_learning_rate=0.8,0.2,0.9', '--seeds=0,1')
  arguments += ('--pruning_trials=1',)
  code, output, _ = call(*arguments)
  assert code == main.DONE
  assert [r['state'] for r in _rows(folder)] == [
    'complete',
    'pruned',
    'complete',
  ]
  assert 'The flags of trial 2 are in' in output
  # It was stopped early, and its second seed was not begun.
  assert len(_evaluated(folder, 1)) <= 3
  assert not os.path.exists(_run(folder, 1, 1))
  assert call(*arguments)[0] == main.DONE and _starts(folder, 1) == 1


# TPE draws its first ten trials at random.
@pytest.mark.parametrize('sampler, trials', [('random', 3), ('tpe', 12)])
def test_drawn_trials_go_on_as_if_never_stopped(
  sampler, trials, call, tmp_path
):
  ranges = ('client_learning_rate=0.01,0.9,log', 'client_epochs=1,20')
  arguments = [f'--range={text}' for text in ranges]
  arguments += ['--grid=norm=gn,none', f'--sampler={sampler}']
  whole, parts = str(tmp_path / 'whole'), str(tmp_path / 'parts')
  for folder, count in ((whole, trials), (parts, trials - 1), (parts, trials)):
    code, _, errors = call(
      *arguments, f'--output_dir={folder}', f'--trials={count}'
    )
    assert (code, errors) == (main.DONE, '')
  assert _rows(whole) == _rows(parts) and len(_rows(whole)) == trials
  assert len({row['client_learning_rate'] for row in _rows(whole)}) == trials


def test_a_failed_draw_keeps_its_values(call, folder, monkeypatch):
  arguments = ('--range=client_learning_rate=0.01,0.9', '--sampler=random')
  arguments += ('--trials=2',)
  assert call(*arguments)[0] == main.DONE
  expected = _rows(folder)
  rate = expected[0]['client_learning_rate']
  again = f'{folder}_again'
  monkeypatch.setenv('FAKE_FAILURES', f'{{"{rate}": 1}}')
  assert call(*arguments, f'--output_dir={again}')[0] == main.FAILED
  assert call(*arguments, f'--output_dir={again}')[0] == main.DONE
  assert _rows(again) == expected


def test_jobs_share_the_cores(call, folder, monkeypatch, tmp_path):
  monkeypatch.setenv('FAKE_TOGETHER', str(tmp_path))
  monkeypatch.setattr(os, 'sched_getaffinity', lambda _: set(range(5)))
  arguments = ('--grid=client_learning_rate=0.5,0.6,0.7', '--jobs=2')
  assert call(*arguments)[0] == main.DONE
  for number in range(3):
    with open(os.path.join(_run(folder, number), 'flags.txt')) as file:
      assert '--intra_op_threads=2\n' in file.read()
  counts = (tmp_path / 'counts').read_text().split()
  assert max(map(int, counts)) == 2


@pytest.mark.parametrize('number', [signal.SIGKILL, signal.SIGTERM])
def test_a_sweep_that_is_stopped_goes_on(
  number, call, folder, fake, repository
):
  arguments = (
    '--grid=client_learning_rate=0.5,0.6,0.7',
    f'--output_dir={folder}',
  )
  process = subprocess.Popen(
    [sys.executable, '-c', _SWEEP, fake, *_BASE, *arguments],
    env={**os.environ, 'PYTHONPATH': str(repository), 'FAKE_WAITS': '0.6'},
    stdout=subprocess.PIPE,
    text=True,
  )
  second = os.path.join(_run(folder, 1), 'metrics', 'eval.csv')
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
  while output_tree.is_held(_run(folder, 1)):
    assert time.monotonic() < deadline
    time.sleep(0.02)
  assert _evaluated(folder, 1) == [1, 2, 3]
  code, output, _ = call(*arguments)
  assert code == main.DONE and 'The flags of trial 2 are in' in output
  assert [_starts(folder, n) for n in range(3)] == [1, 2, 1]
  for n in range(3):
    assert _evaluated(folder, n) == list(range(1, 11))
  assert [row['state'] for row in _rows(folder)] == ['complete'] * 3


def test_a_second_sweep_is_refused(call, folder):
  os.makedirs(folder)
  with output_tree.LockedFolder(folder) as locked:
    locked.lock()
    code, _, errors = call(_GRID)
  assert code == main.USAGE and 'another program (process ' in errors


def test_other_folders_are_refused(call, folder):
  os.makedirs(folder)
  path = os.path.join(folder, 'flags.txt')
  with open(path, 'w'):
    pass
  code, _, errors = call(_GRID)
  assert code == main.USAGE and "other files ('flags.txt') but no" in errors


def test_a_torn_line_of_the_study_is_cut_and_a_damaged_one_refused(
  call, folder
):
  assert call(_GRID)[0] == main.DONE
  study = os.path.join(folder, 'study.log')
  with open(study, 'a') as file:
    file.write('{"op_code": 4, "wor')
  assert call(_GRID)[0] == main.DONE and _starts(folder, 0) == 1
  with open(study, 'rb+') as file:
    file.seek(40)
    file.write(b'\0' * 9)
  code, _, errors = call(_GRID)
  assert code == main.USAGE and errors.count('\n') == 1
  assert 'study.log: it is damaged' in errors
  assert 'give another --output_dir' in errors


def test_a_full_disk_is_one_line(call, folder, monkeypatch):
  assert call(_GRID)[0] == main.DONE

  def refuse(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

  backend = optuna.storages.journal.JournalFileBackend
  monkeypatch.setattr(backend, 'append_logs', refuse)
  code, _, errors = call(_GRID)
  assert code == main.USAGE and errors.count('\n') == 1
  assert 'study.log: the disk is full' in errors


@pytest.mark.parametrize(
  'arguments, words',
  [
    (('--num_validation=0', _GRID), 'selects by validation accuracy'),
    (('--grid=client_learning_rte=1',), "did you mean 'client_learning_rate'"),
    (('--grid=client_learning_rate=',), 'must be FLAG=VALUE,VALUE'),
    (('--grid=client_learning_rate=0.1,x',), 'must be a number'),
    (('--grid=client_learning_rate=0.1,-1',), '--client_learning_rate=-1'),
    (('--grid=norm=gn,xx',), '--norm=xx: allowed are'),
    (('--grid=fedmatch.helpers=now,past',), '--algorithm=fedmatch'),
    (('--grid=alpha=1,2',), '--alpha: has no effect with --partition=iid'),
    (('--grid=clients_per_round=5,30',), 'must be at most --num_clients=20'),
    (('--grid=seed=1,2',), '--seed cannot vary'),
    (('--grid=dataset=digits,mnist',), '--dataset cannot vary'),
    (('--grid=client_threads=1,2',), '--client_threads cannot vary'),
    ((_GRID, _GRID), 'is given twice'),
    ((_GRID, '--seed=1'), 'has no effect with --seeds'),
    ((_GRID, '--seeds=0,0'), 'must be different whole numbers'),
    ((_GRID, '--seeds=0,a'), 'must be different whole numbers'),
    ((_GRID, '--seeds=0,4294967296'), '--seed=4294967296: must'),
    ((_GRID, '--trials=3'), 'no effect with --sampler=grid'),
    ((_GRID, '--range=momentum=0,1'), 'no effect with --sampler=grid'),
    (('--sampler=tpe', '--range=momentum=1,0'), '--range=momentum=1,0: '),
    (('--sampler=tpe', '--range=momentum=0,1,log'), '--range=momentum=0,1,'),
    (('--sampler=tpe', '--range=momentum=0,1,2'), 'must be FLAG=LOW,HIGH'),
    (('--sampler=tpe', '--range=momentum=0.1,2'), '--momentum=2'),
    (('--sampler=tpe', '--range=norm=gn,none'), 'numbers have ranges'),
    ((_GRID, '--jobs=0'), '--jobs=0: must be at least 1'),
    ((_GRID, 'more'), "'more' is not a flag"),
    ((), 'no flag to vary was given'),
  ],
)
def test_mistakes(call, folder, arguments, words):
  code, output, errors = call(*arguments)
  assert (code, output) == (main.USAGE, '')
  assert errors.count('\n') == 1
  assert not os.path.exists(folder)
  assert words in errors


def _build(*arguments):
  groups = [flags.Group(sweep_main.SweepHparams), *config_lib.groups()]
  parsed = flags.parse([*_BASE, *arguments], groups)
  return sweep_main.build(parsed, parsed.build(sweep_main.SweepHparams))


def test_a_grid_may_be_too_large():
  numbers = ','.join(map(str, range(1, 102)))
  with pytest.raises(UsageError, match='10,201 combinations'):
    _build(f'--grid=client_epochs={numbers}', f'--grid=server_epochs={numbers}')


def test_the_definition_is_what_results_depend_on(tmp_path):
  first = _build(_GRID).definition()
  same = ['--output_dir=z', '--client_threads=3', '--client_learning_rate=0.7']
  assert _build(_GRID, *same).definition() == first
  for other in ('--seeds=1', '--num_labels=20', '--total_rounds=900'):
    assert _build(_GRID, other).definition() != first
  # A partition file may be moved, but not changed.
  definitions = []
  for seed in (0, 0, 1):
    path = tmp_path / f'{len(definitions)}.json'
    settings = partition_settings.PartitionSettings(
      num_classes=10,
      num_labels=40,
      num_clients=20,
      num_validation=100,
      seed=seed,
    )
    drawn = partition_draw.build_partition(np.arange(1437) % 10, settings)
    path.write_text(drawn.dump_json())
    definitions.append(_build(_GRID, f'--partition_file={path}').definition())
  assert definitions[0] == definitions[1] != definitions[2]


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
