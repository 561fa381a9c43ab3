"""A deployed run: as one in the simulation, stopped and continued."""

import os
import pathlib
import shutil
import subprocess
import sys
import types

import fake_clients
import numpy as np
import pytest
import tensorflow as tf

from tff_fssl.data import clients
from tff_fssl.data import partition
from tff_fssl.data import sources
from tff_fssl.program import checkpoint
from tff_fssl.program import csv_table
from tff_fssl.program import deploy_main
from tff_fssl.program import evaluation
from tff_fssl.program import main
from tff_fssl.program import output_tree
from tff_fssl.program import predict_main
from tff_fssl.program import train_main
from tff_fssl.program.deploy import deployment
from tff_fssl.program.deploy import rounds
from tff_fssl.program.deploy import server

_FLAGS = (
  '--algorithm=fixmatch',
  '--scenario=labels_at_clients',
  '--dataset=digits',
  '--model=linear',
  '--norm=none',
  '--num_labels=10',
  '--num_validation=50',
  '--num_clients=4',
  '--clients_per_round=2',
  '--client_epochs=1',
  '--rounds_per_evaluation=1',
  '--keep_checkpoints=2',
)
_TRAIN = (*_FLAGS, '--tensorboard=false', '--client_threads=1')

# It makes TensorFlow Federated impossible to import, so it is not imported.
_ALONE = pathlib.Path(fake_clients.__file__).with_name('serve_alone.py')


@pytest.fixture(scope='module', name='app')
def _app(tmp_path_factory):
  """An app of three rounds."""
  folder = tmp_path_factory.mktemp('deployed') / 'app'
  arguments = [*_FLAGS, '--total_rounds=3', f'--output_dir={folder}']
  assert main.run(deploy_main.deploy_main, arguments) == main.DONE
  assert [p.name for p in folder.parent.iterdir()] == ['app']
  return folder


@pytest.fixture(scope='module', name='data')
def _data(app, tmp_path_factory):
  """The clients' data, as files."""
  folder = tmp_path_factory.mktemp('data')
  divided = partition.read(str(app / 'server' / 'partition.json'))
  digits = sources.load('digits')
  for client_id in range(divided.num_clients):
    (x, y), (more, _) = clients.client_examples(digits, divided, client_id)
    np.savez(
      folder / f'{client_id}.npz',
      x=np.concatenate([x, more]),
      y=np.concatenate([y, np.full(len(more), -1)]),
    )
  return folder


def _serve(app, data, mode='', code=0):
  threads = tf.config.threading.get_intra_op_parallelism_threads()
  paths = [str(_ALONE.parents[2]), str(_ALONE.parent)]
  done = subprocess.run(
    [sys.executable, str(_ALONE), str(app), str(data), mode],
    env={
      **os.environ,
      'PYTHONPATH': os.pathsep.join(paths),
      'THREADS': str(threads),
    },
    capture_output=True,
    text=True,
    check=False,
  )
  assert done.returncode == code, done.stderr
  return done.stdout


def _leaves(folder, round_num):
  path = checkpoint.path_of(str(folder / 'checkpoints'), round_num)
  return {
    name: np.asarray(value).tobytes()
    for name, value in checkpoint.read(path).items()
  }


@pytest.mark.slow
def test_a_run_equals_the_simulation_and_continues(app, data, tmp_path, capsys):
  trained = tmp_path / 'trained'
  arguments = [*_TRAIN, '--total_rounds=3', f'--output_dir={trained}']
  assert main.run(train_main.train_main, arguments) == main.DONE
  _serve(app, data, 'stop', code=1)
  run = app / 'server' / 'run'
  assert checkpoint.versions(str(run / 'checkpoints')) == [1]
  # The row of a round that was not saved, and a torn checkpoint.
  with open(run / 'metrics' / 'timing.csv', 'a') as file:
    file.write('2,1,1,1\n')
  (run / 'checkpoints' / 'round_2.ckpt').write_bytes(b'torn')
  printed = _serve(app, data)
  assert 'is damaged; going back to round 1' in printed
  assert checkpoint.versions(str(run / 'checkpoints')) == [2, 3]
  # To the bit.
  assert _leaves(run, 3) == _leaves(trained, 3)
  # Its graph divides in another way.
  tables = [
    csv_table.read(str(folder / 'metrics' / 'eval.csv'))
    for folder in (run, trained)
  ]
  assert tables[0][0] == tables[1][0]
  for ours, theirs in zip(*(rows for _, rows in tables), strict=True):
    np.testing.assert_allclose(
      *(np.float64(list(row.values())) for row in (ours, theirs)), rtol=1e-6
    )
  columns, rows = csv_table.read(str(run / 'metrics' / 'train.csv'))
  assert len(rows) == 3 and 'client_work/train/loss_labeled' in columns
  # Another start has nothing to do, and programs read the run.
  assert 'round  3' not in _serve(app, data)
  capsys.readouterr()
  assert main.run(evaluation.evaluate_main, [str(run)]) == main.DONE
  last = float(
    csv_table.read(str(run / 'metrics' / 'eval.csv'))[1][-1]['test/accuracy']
  )
  assert f'{last:.4f}' in capsys.readouterr().out
  test, output = sources.load('digits').test, tmp_path / 'predictions.csv'
  np.savez(tmp_path / 'test.npz', x=test.x, y=test.y)
  arguments = [str(run), str(tmp_path / 'test.npz'), f'--output={output}']
  assert main.run(predict_main.predict_main, arguments) == main.DONE
  assert f'{last:.4f}' in capsys.readouterr().out


def test_liars_are_counted(app, data, tmp_path):
  copy = tmp_path / 'app'
  shutil.copytree(app, copy, ignore=shutil.ignore_patterns('run'))
  _serve(copy, data, 'lie')
  rows = csv_table.read(str(copy / 'server/run/metrics/train.csv'))[1]
  rejected = [int(r['client_work/train/num_rejected_clients']) for r in rows]
  assert sum(rejected) and max(rejected) == 1


@pytest.mark.slow
def test_a_federation_starts_from_a_run(data, tmp_path, capsys):
  trained, folder = tmp_path / 'trained', tmp_path / 'app'
  arguments = [*_TRAIN, '--total_rounds=1', f'--output_dir={trained}']
  assert main.run(train_main.train_main, arguments) == main.DONE
  for wrong, words in (
    ((), 'has finished its 1 rounds'),
    (('--total_rounds=2', '--seed=1'), '--seed=0 there, 1 now'),
  ):
    arguments = [str(trained), *wrong, f'--output_dir={folder}']
    assert main.run(deploy_main.deploy_main, arguments) == main.USAGE
    assert words in capsys.readouterr().err and not folder.exists()
  arguments = [str(trained), '--total_rounds=2', f'--output_dir={folder}']
  assert main.run(deploy_main.deploy_main, arguments) == main.DONE
  assert deployment.read(str(folder / 'server')).done == 1
  _serve(folder, data)
  rows = csv_table.read(str(folder / 'server/run/metrics/train.csv'))[1]
  assert [row['round'] for row in rows] == ['2']
  arguments = [*_TRAIN, '--total_rounds=2', f'--output_dir={trained}']
  assert main.run(train_main.train_main, arguments) == main.DONE
  assert _leaves(folder / 'server' / 'run', 2) == _leaves(trained, 2)


class _Rounds:
  """Rounds in which nobody replies for some attempts."""

  deployment = deployment.Deployment(
    values={},
    owner=checkpoint.NOBODY,
    is_private=False,
    seed=0,
    num_clients=1,
    clients_per_round=1,
    first_round=1,
    done=0,
    total_rounds=2,
    rounds_per_evaluation=1,
    max_bad_rounds=3,
    keep_checkpoints=1,
    min_clients=0,
    participation=deployment.ParticipationHparams(),
    splits=(),
  )

  def __init__(self, num_empty):
    self.num_empty, self.attempts = num_empty, []

  def run(self, state, round_num, attempt):
    self.attempts.append(attempt)
    if attempt < self.num_empty:
      raise rounds.NobodyError(['client 0: no reply in time'])
    return state, round_num


@pytest.fixture(name='run_of')
def _run_of(tmp_path, monkeypatch):
  """Makes a function that makes a run; pauses take no time."""
  now = [0.0]
  pause = lambda seconds: now.__setitem__(0, now[0] + seconds)
  monkeypatch.setattr(server.time, 'monotonic', lambda: now[0])
  monkeypatch.setattr(server.time, 'sleep', pause)
  said = []
  view = types.SimpleNamespace(say=said.append)
  (tmp_path / 'metrics').mkdir()
  tree = output_tree.OutputTree(str(tmp_path))
  return lambda num_empty, wait: (
    server._Run(_Rounds(num_empty), None, tree, view, wait),
    said,
  )


def test_a_round_waits_for_clients_and_says_so_each_minute(run_of):
  run, said = run_of(130, 600.0)
  assert run._outcome('state', 3) == ('state', 3)
  assert run.rounds.attempts == [*range(131)]
  assert [line.startswith('round 3: no client has') for line in said] == [
    *(False, True) * 3
  ]
  assert said[0] == 'round 3: client 0: no reply in time'
  assert 'for 60 s' in said[3] and 'wait=600' in said[3]


def test_a_federation_without_clients_is_not_finished(run_of):
  run, _ = run_of(10**6, 30.0)
  with pytest.raises(server.StoppedError) as error:
    run._outcome('state', 1)
  message = str(error.value)
  assert 'for 30 s (wait=30); start the clients' in message
  assert '--database' in message and '\n' not in message


def test_damaged_data_of_evaluations(tmp_path):
  """Before anything runs."""
  load = lambda folder: None
  folder = tmp_path / deployment.EVALUATION
  folder.mkdir()
  path, x = folder / 'test.npz', np.zeros([3, 2])
  for arrays in ({'x': x}, {'x': x, 'y': [1]}, {'x': x[:0], 'y': []}):
    np.savez(path, **arrays)
    with pytest.raises(main.UsageError, match='test.npz: it is damaged'):
      server._Evaluation(str(tmp_path), ('test',), load)
  np.savez(path, x=x, y=[1, 2, 0])
  server._Evaluation(str(tmp_path), ('test',), load)
  path.write_bytes(path.read_bytes()[:-30])
  with pytest.raises(main.UsageError, match='test.npz: it is not a whole NPZ'):
    server._Evaluation(str(tmp_path), ('test',), load)
