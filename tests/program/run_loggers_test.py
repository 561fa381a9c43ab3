"""The loggers of a run; stand-ins for TensorBoard and for trackers."""

import os
import types

import pytest

from tff_fssl.program import config as config_lib
from tff_fssl.program import inspection
from tff_fssl.program import loggers
from tff_fssl.program import output_tree
from tff_fssl.program import run_loggers


class _Logger:
  """Remembers calls; fails in a round."""

  def __init__(self, calls, name, fails_in=None):
    self._calls, self._name, self._fails_in = calls, name, fails_in

  def log(self, round_num, metrics):
    if round_num == self._fails_in:
      raise OSError('the disk is full')
    self._calls.append((self._name, round_num, sorted(metrics)))

  def __getattr__(self, method):
    return lambda *args: self._calls.append((self._name, method))


@pytest.fixture(name='start')
def _start(tmp_path, monkeypatch):
  """Starts the loggers of flags: (loggers, their calls, messages)."""

  def start(*argv, fails_in=None):
    calls, said = [], []
    monkeypatch.setattr(
      loggers,
      'TensorBoardLogger',
      lambda folder: _Logger(calls, 'TensorBoard', fails_in),
    )
    monkeypatch.setattr(
      loggers,
      'TrackerLogger',
      lambda target, *_, **__: _Logger(calls, target.partition(':')[0]),
    )
    monkeypatch.setattr(inspection, 'sample_views', lambda task: None)
    config = config_lib.parse_config(
      [f'--output_dir={tmp_path}', '--track=mlflow:x,wandb:y', *argv]
    )
    tree = output_tree.OutputTree(str(tmp_path))
    os.makedirs(tree.checkpoints, exist_ok=True)
    experiment = types.SimpleNamespace(
      task=types.SimpleNamespace(config=config)
    )
    return run_loggers.RunLoggers(experiment, tree, said.append), calls, said

  return start


def test_all_get_the_metrics(start):
  watching, calls, said = start()
  del calls[:]
  watching.log(1, {'a': 1, 'seconds/round': 2})
  names = ['a', 'seconds/round']
  assert calls == [(n, 1, names) for n in ('TensorBoard', 'mlflow', 'wandb')]
  watching.finish(loggers.KILLED)
  assert calls[3:] == [
    (n, 'finish') for n in ('TensorBoard', 'mlflow', 'wandb')
  ]
  watching.finish(loggers.FAILED)
  assert len(calls) == 6 and not said


def test_trackers_get_no_times_of_protected_clients(start):
  watching, calls, _ = start(
    '--algorithm=fixmatch',
    '--norm=none',
    '--aggregator=dp',
    '--max_client_examples=60000',
  )
  assert ('mlflow', 'log_picture') not in calls
  del calls[:]
  watching.log(1, {'a': 1, 'seconds/round': 2, 'peak_memory_mb': 3})
  assert [len(names) for _, _, names in calls] == [3, 1, 1]


def test_a_failure_is_reported_once(start):
  watching, calls, said = start(fails_in=2)
  del calls[:]
  for round_num in (1, 2, 3):
    watching.log(round_num, {'a': 1})
  with watching:
    pass
  assert said == ['TensorBoard stops: OSError: the disk is full']
  assert [c[:2] for c in calls if c[0] == 'TensorBoard'] == [('TensorBoard', 1)]
  assert [c[1] for c in calls if c[0] == 'wandb'] == [1, 2, 3, 'finish']
