import asyncio
import collections
import json
import os
import re
import socket
import time

import numpy as np
import pytest
import tensorflow as tf

from tff_fssl.program import loggers
from tff_fssl.program import run_hparams
from tff_fssl.program import training


class _Fake:
  """A tracker that remembers."""

  def __init__(self, target, folder, run_id, name, params, algorithm):
    self.calls = [(target.partition(':')[0], params, run_id)]
    self.id = run_id or 'new'

  def __getattr__(self, name):
    return lambda *args: self.calls.append((name, *args))


_START = ['start', 'run', {}, 'fl2']


def test_calls_are_passed_on(tmp_path, monkeypatch):
  made = []

  def make(*args):
    made.append(_Fake(*args))
    return made[-1]

  monkeypatch.setattr(loggers, '_open', make)
  calls = [
    _START,
    ['log', 1, {'a': 1}],
    ['log_picture', 'p', '/p.png'],
    ['log', 2, {'a': 2}],
    ['log_summary', 2, {'b': 3}],
    ['log_file', 'm', '/m'],
    ['finish', 'FINISHED'],
  ]
  loggers.track('fake:x', str(tmp_path), iter(calls))
  assert made[0].calls == [
    ('fake', {}, None),
    ('log', 1, {'a': 1}),
    ('log_picture', 'p', '/p.png'),
    ('log', 2, {'a': 2}),
    ('log_summary', 2, {'b': 3}),
    ('log_file', 'm', '/m'),
    ('finish', 'FINISHED'),
  ]
  # The same run goes on after its last round; that of another target does not.
  calls = [*calls[:2], ['log', 3, {}], ['finish', 'FINISHED']]
  loggers.track('fake:x', str(tmp_path), iter(calls))
  assert made[1].calls == [
    ('fake', {}, 'new'),
    ('log', 3, {}),
    ('finish', 'FINISHED'),
  ]
  loggers.track('fake:y', str(tmp_path), iter(calls))
  assert made[2].calls[:2] == [('fake', {}, None), ('log', 1, {'a': 1})]


@pytest.mark.parametrize(
  'text, rounds',
  [
    ('', []),
    ('3', [3]),
    ('3-5', [3, 4, 5]),
    ('2,4', [2, 4]),
    ('9,1-2,2', [1, 2, 9]),
  ],
)
def test_rounds(text, rounds):
  assert sorted(run_hparams.parse_rounds(text, 9)) == rounds


def test_rounds_are_profiled_one_by_one(tmp_path):
  said = []
  profiler = loggers.RoundProfiler(
    frozenset({1, 2}), str(tmp_path), said.append
  )
  for round_num in range(4):
    with profiler.round(round_num):
      tf.linalg.matmul(tf.ones([9, 9]), tf.ones([9, 9]))
  assert sorted(os.listdir(tmp_path)) == ['round_1', 'round_2']
  assert [text.split(':')[0] for text in said] == [
    'Profile of round 1',
    'Profile of round 2',
  ]


def test_a_round_that_fails_ends_its_profile(tmp_path):
  profiler = loggers.RoundProfiler(
    frozenset({1}), str(tmp_path), lambda text: None
  )
  for _ in range(2):  # The second could not start were the first still on.
    with pytest.raises(KeyError):
      with profiler.round(1):
        raise KeyError
  assert os.listdir(tmp_path) == ['round_1']


def test_a_profile_that_cannot_be_does_not_stop_training(tmp_path):
  said, done = [], []
  profiler = loggers.RoundProfiler(
    frozenset({1}), str(tmp_path / 'a'), said.append
  )
  tf.profiler.experimental.start(str(tmp_path / 'b'))  # There can be one only.
  try:
    with profiler.round(1):
      done.append(1)
  finally:
    tf.profiler.experimental.stop(save=False)
  assert done == [1]
  assert len(said) == 1 and 'AlreadyExistsError' in said[0]


def _start(target, folder, **params):
  return loggers.TrackerLogger(
    target,
    str(folder),
    name='my run',
    params={'fl2.rho': '0.1', **params},
    algorithm='fl2',
  )


def _log(logger, *rounds):
  for round_num in rounds:
    accuracy, unknown = np.float32(round_num / 10), np.float32('nan')
    logger.log(round_num, {'test/accuracy': accuracy, 'unknown': unknown})


@pytest.fixture(name='store')
def _store(request, tmp_path, monkeypatch):
  """A store of MLflow's, and a function that reads its runs."""
  monkeypatch.setenv('MLFLOW_DISABLE_TELEMETRY', 'true')
  mlflow = pytest.importorskip('mlflow')
  # Databases have their files in the current folder's mlruns/.
  monkeypatch.chdir(tmp_path)
  uri = f'sqlite:///{tmp_path / "mlflow.db"}'
  if getattr(request, 'param', '') == 'folder':
    uri = str(tmp_path / 'mlruns')

  def read():
    monkeypatch.setenv('MLFLOW_ALLOW_FILE_STORE', 'true')
    client = mlflow.MlflowClient(uri)
    experiment = client.get_experiment_by_name('tff_fssl')
    runs = client.search_runs([experiment.experiment_id])
    return client, sorted(runs, key=lambda run: run.info.start_time)

  return f'mlflow:{uri}', read


def _steps(client, run, name='test/accuracy'):
  return [m.step for m in client.get_metric_history(run.info.run_id, name)]


@pytest.mark.parametrize('store', ['database', 'folder'], indirect=True)
def test_mlflow_gets_all_and_is_continued(store, tmp_path):
  target, read = store
  folder, file = tmp_path / 'tracking', tmp_path / 'train.csv'
  model = tmp_path / 'model'
  model.mkdir()
  (model / 'README.md').write_text('card')
  file.write_text('round\n')
  first = _start(target, folder)
  _log(first, -1, 0, 1)
  first.finish(loggers.KILLED, 60)
  client, (run,) = read()
  assert run.info.run_name == 'my run' and run.info.status == 'KILLED'
  assert run.data.params == {'fl2.rho': '0.1'}
  assert run.data.tags['algorithm'] == 'fl2'
  assert _steps(client, run) == [-1, 0, 1]
  assert set(run.data.metrics) == {'test/accuracy'}
  # Round 1 is repeated, since its state was not saved.
  second = _start(target, folder, total_rounds='9')
  _log(second, 1, 2)
  second.log_file('model', str(model))
  second.log_file('train.csv', str(file))
  second.log_picture('curves', str(file))
  second.log_summary(2, {'last/round': 2})
  second.finish(loggers.FINISHED, 60)
  client, (run,) = read()
  assert run.info.status == 'FINISHED'
  assert _steps(client, run) == [-1, 0, 1, 2]
  assert run.data.tags['continued/total_rounds'] == '9'
  assert run.data.metrics['last/round'] == 2
  for folder, names in (
    ('', ['model', 'pictures', 'train.csv']),
    ('model', ['model/README.md']),
  ):
    listed = client.list_artifacts(run.info.run_id, folder)
    assert [item.path for item in listed] == names


@pytest.mark.slow
def test_a_run_that_the_tracker_has_lost_begins_anew(store, tmp_path):
  target, read = store
  for rounds in ((1, 2), (3,)):
    logger = _start(target, tmp_path / 'tracking')
    _log(logger, *rounds)
    logger.finish(loggers.KILLED, 60)
    client, (run,) = read()
    assert _steps(client, run) == list(rounds)
    client.delete_run(run.info.run_id)


def _failure(logger):
  """What a logger says when it is ended, and how long that took."""
  start = time.monotonic()
  said = []
  best = training.LoggerReleaseManager(logger, 'MLflow', said.append)
  asyncio.run(best.release({'a': 1}, 1))
  try:
    logger.finish(loggers.FINISHED, 30)
  except loggers.TrackerError as error:
    said.append(str(error))
  return said, time.monotonic() - start


@pytest.mark.parametrize('what', ['torn', 'store', 'unreachable'])
def test_what_a_tracker_cannot_do_is_said_once(
  what, store, tmp_path, monkeypatch
):
  target, read = store
  folder = tmp_path / 'tracking'
  folder.mkdir()
  words = {
    'torn': 'mlflow.json: it is not JSON',
    'store': 'Error',
    'unreachable': 'Max retries exceeded',
  }[what]
  if what == 'torn':
    (folder / 'mlflow.json').write_text('{"id"')
  elif what == 'store':
    (tmp_path / 'mlflow.db').write_text('not a database')
  else:
    monkeypatch.setenv('MLFLOW_HTTP_REQUEST_MAX_RETRIES', '0')
    target = 'mlflow:http://127.0.0.1:9'
  logger = _start(target, folder)
  (said,), _ = _failure(logger)
  assert words in said and '\n' not in said
  # It was said; nothing more is.
  _log(logger, 2)
  logger.finish(loggers.FINISHED, 1)


def test_a_server_that_does_not_answer_ends_with_the_run(store, tmp_path):
  del store
  with socket.create_server(('127.0.0.1', 0)) as server:
    port = server.getsockname()[1]
    logger = _start(f'mlflow:http://127.0.0.1:{port}', tmp_path / 'tracking')
    _log(logger, 1, 2)
    with pytest.raises(loggers.TrackerError, match='within 0.5 s'):
      logger.finish(loggers.FINISHED, 0.5)


def test_wandb_offline(tmp_path, monkeypatch):
  pytest.importorskip('wandb')
  monkeypatch.setenv('WANDB_MODE', 'offline')
  picture = tmp_path / 'curves.png'
  _write_png(picture)
  for rounds in ((-1, 0, 1), (1, 2)):
    logger = _start('wandb:my-project', tmp_path / 'tracking')
    _log(logger, *rounds)
    logger.log_picture('curves', str(picture))
    logger.log_file('curves.png', str(picture))
    logger.log_summary(2, {'last/round': 2})
    logger.finish(loggers.FINISHED, 120)
    time.sleep(1)  # The names of offline runs have seconds.
  runs = sorted((tmp_path / 'tracking' / 'wandb').glob('offline-run-*'))
  with open(tmp_path / 'tracking' / 'wandb.json') as file:
    record = json.load(file)
  assert record['round'] == 2
  assert [run.name.endswith(record['id']) for run in runs] == [True, True]
  content = [max(run.glob('*.wandb')).read_bytes() for run in runs]
  assert b'test/accuracy' in content[0] and b'fl2.rho' in content[0]
  # Nothing of the machine, such as its packages.
  files = {path.name for run in runs for path in run.glob('files/*')}
  assert files == {'media'}


def test_wandb_without_a_key(tmp_path, monkeypatch):
  # It remembers the mode of an earlier run of the process.
  pytest.importorskip('wandb').teardown()
  for name in ('WANDB_API_KEY', 'WANDB_MODE'):
    monkeypatch.delenv(name, raising=False)
  monkeypatch.setenv('HOME', str(tmp_path))
  logger = _start('wandb:my-project', tmp_path / 'tracking')
  with pytest.raises(loggers.TrackerError, match='`wandb login` gives'):
    logger.finish(loggers.FINISHED, 120)


def _write_png(path):
  from PIL import Image

  Image.fromarray(np.zeros([4, 4], np.uint8)).save(path)


def test_what_the_page_shows_runs(repository, store, tmp_path, monkeypatch):
  _, read = store
  page = (repository / 'docs' / 'tracking.md').read_text()
  (code,) = re.findall('```python\n(.*?)```', page, re.DOTALL)
  monkeypatch.chdir(tmp_path)
  names = {'loggers': loggers, 'managers': training}
  # pylint: disable-next=exec-used
  exec(code.replace('/tmp', str(tmp_path)), names)
  # As `train_model` releases metrics.
  value = collections.OrderedDict(client_work={'train': {'loss': 0.5}})
  asyncio.run(names['manager'].release(value, 1))
  names['tracker'].finish(loggers.FINISHED, 60)
  client, (run,) = read()
  assert _steps(client, run, 'client_work/train/loss') == [1]
