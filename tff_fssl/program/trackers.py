"""Runs of MLflow and Weights & Biases, in the order of a logger's calls.

FOLDER/KIND.json remembers the run of the tracker and its last round. That run
is continued, and rounds that it has are skipped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
import importlib
import json
import os
import re
import time
from typing import Any
import uuid

import tff_fssl
from tff_fssl import durable
from tff_fssl import files
from tff_fssl.hparams import UsageError

# How a run ends, in MLflow's words.
ENDS = FINISHED, FAILED, KILLED = 'FINISHED', 'FAILED', 'KILLED'
_FORMAT = 'tff_fssl.tracker'
_EXPERIMENT = 'tff_fssl'
_ROUND = 'round'
# MLflow's limit of a value, and the characters that it forbids in names.
_MAX_VALUE = 500
_NOT_IN_NAMES = re.compile(r'[^/\w.\- ]')
# Nothing of the machine and its users: no code, command, packages or output.
_WANDB = {
  'console': 'off',
  'disable_git': True,
  'host': '-',
  'init_timeout': 60,
  'save_code': False,
  'x_disable_machine_info': True,
  'x_disable_meta': True,
  'x_disable_stats': True,
  'x_save_requirements': False,
}


class _MlflowLogger:
  """A run of an MLflow server, or in a database or folder of MLflow's."""

  def __init__(
    self,
    uri: str,
    name: str,
    params: Mapping[str, str],
    tags: Mapping[str, str],
    run_id: str | None,
  ):
    # By name, since type checkers do not have the optional package.
    mlflow = importlib.import_module('mlflow')
    self._entities = importlib.import_module('mlflow.entities')
    mlflow.set_tracking_uri(uri)
    self._client = mlflow.MlflowClient(uri)
    known = {_mlflow_name(n): _short(value) for n, value in params.items()}
    if run_id is None or not self._continues(run_id, known):
      run_id = self._begin(name, known, tags)
    self.id = run_id

  def _begin(
    self, name: str, params: Mapping[str, str], tags: Mapping[str, str]
  ) -> str:
    title = os.environ.get('MLFLOW_EXPERIMENT_NAME') or _EXPERIMENT
    experiment = self._client.get_experiment_by_name(title)
    experiment_id = (
      self._client.create_experiment(title)
      if experiment is None
      else experiment.experiment_id
    )
    run = self._client.create_run(experiment_id, run_name=name, tags=tags)
    made = [self._entities.Param(*param) for param in params.items()]
    self._client.log_batch(run.info.run_id, params=made)
    return str(run.info.run_id)

  def _continues(self, run_id: str, params: Mapping[str, str]) -> bool:
    """Continues a run, and returns whether it exists."""
    exceptions = importlib.import_module('mlflow.exceptions')
    try:
      run = self._client.get_run(run_id)
    except exceptions.MlflowException as error:
      if error.error_code == 'RESOURCE_DOES_NOT_EXIST':
        return False
      raise
    if run.info.lifecycle_stage == 'deleted':
      return False
    self._client.update_run(run_id, status='RUNNING')
    # Parameters cannot be changed: those of a continued run are tags.
    for name, value in params.items():
      if run.data.params.get(name) != value:
        self._client.set_tag(run_id, f'continued/{name}', value)
    return True

  def log(self, round_num: int, metrics: Mapping[str, float]) -> None:
    now = round(1000 * time.time())
    made = [
      self._entities.Metric(_mlflow_name(name), value, now, round_num)
      for name, value in metrics.items()
    ]
    self._client.log_batch(self.id, metrics=made)

  def log_picture(self, name: str, path: str) -> None:
    del name
    self._client.log_artifact(self.id, path, 'pictures')

  def log_file(self, name: str, path: str) -> None:
    if os.path.isdir(path):
      self._client.log_artifacts(self.id, path, name)
    else:
      self._client.log_artifact(self.id, path)

  def log_summary(self, round_num: int, summary: Mapping[str, float]) -> None:
    self.log(round_num, summary)

  def finish(self, state: str) -> None:
    self._client.set_terminated(self.id, state)


class _WandbLogger:
  """A run of Weights & Biases, or an offline run in the folder."""

  def __init__(
    self,
    project: str,
    name: str,
    params: Mapping[str, str],
    tags: Mapping[str, str],
    run_id: str | None,
    folder: str,
  ):
    self._wandb = importlib.import_module('wandb')
    entity, _, project = project.rpartition('/')
    self.id = run_id or uuid.uuid4().hex[:8]
    try:
      self._run = self._wandb.init(
        entity=entity or None,
        project=project,
        id=self.id,
        resume='allow',
        name=name,
        config=dict(params),
        tags=[tags['algorithm']],
        dir=folder,
        settings=_WANDB,
      )
    except self._wandb.errors.UsageError as error:
      raise UsageError(
        f'{files.first_line(error)}; `wandb login` gives it a key, and'
        ' WANDB_MODE=offline does without'
      ) from error
    # Rounds of pre-training are not positive, which wandb's own steps must be.
    self._run.define_metric(_ROUND)
    self._run.define_metric('*', step_metric=_ROUND)

  def log(self, round_num: int, metrics: Mapping[str, float]) -> None:
    self._run.log({_ROUND: round_num, **metrics})

  def log_picture(self, name: str, path: str) -> None:
    self._run.log({name: self._wandb.Image(path)})

  def log_file(self, name: str, path: str) -> None:
    is_folder = os.path.isdir(path)
    artifact = self._wandb.Artifact(
      re.sub(r'[^\w.\-]', '_', f'{self.id}-{name}'),
      'model' if is_folder else 'file',
    )
    (artifact.add_dir if is_folder else artifact.add_file)(path)
    self._run.log_artifact(artifact)

  def log_summary(self, round_num: int, summary: Mapping[str, float]) -> None:
    del round_num
    self._run.summary.update(dict(summary))

  def finish(self, state: str) -> None:
    self._run.finish(exit_code=0 if state == FINISHED else 1)


def _mlflow_name(name: str) -> str:
  return _NOT_IN_NAMES.sub('_', name)


def _short(value: str) -> str:
  return value if len(value) <= _MAX_VALUE else f'{value[: _MAX_VALUE - 3]}...'


class _Record:
  """FOLDER/KIND.json: the run of the tracker, and its last round."""

  def __init__(self, folder: str, target: str):
    self._path = os.path.join(folder, f'{target.partition(":")[0]}.json')
    self._target = target
    self.id: str | None = None
    self.round: int | None = None
    durable.remove_leftovers(folder, lambda n: n.endswith('.json'))
    if not os.path.lexists(self._path):
      return
    values = files.read_json(self._path, limit=2**16)
    known = values.get('id'), values.get(_ROUND)
    if (
      values.get('format') != _FORMAT
      or not isinstance(known[0], str)
      or not isinstance(known[1], (int, type(None)))
    ):
      raise files.FileError(
        self._path, 'it is damaged; move it away, and a new run begins'
      )
    if values.get('target') == target:
      self.id, self.round = known

  def write(self, run_id: str, round_num: int | None) -> None:
    """Replaces the file."""
    self.id, self.round = run_id, round_num
    content = {
      'format': _FORMAT,
      'target': self._target,
      'id': run_id,
      _ROUND: round_num,
    }
    durable.write_file(self._path, [json.dumps(content).encode()])


def _open(
  target: str,
  folder: str,
  run_id: str | None,
  name: str,
  params: Mapping[str, str],
  algorithm: str,
) -> Any:
  """Opens a tracker's run: the logger, with the run's `id`."""
  tags = {'algorithm': algorithm, 'tff_fssl': tff_fssl.__version__}
  kind, _, where = target.partition(':')
  if kind == 'mlflow':
    return _MlflowLogger(where, name, params, tags, run_id)
  return _WandbLogger(where, name, params, tags, run_id, folder)


def track(target: str, folder: str, calls: Iterator[Sequence[Any]]) -> None:
  """Sends a run to a tracker.

  Args:
    target: 'mlflow:URI' or 'wandb:PROJECT'.
    folder: Holds the record of the tracker's run, and the tracker's own files.
    calls: Methods of a `loggers.RunLogger` with their arguments. The first is
      'start', with name, flags and algorithm of the run, the last 'finish'.
  """
  record = _Record(folder, target)
  tracker = _open(target, folder, record.id, *next(calls)[1:])
  # Recorded at once: a kill must not leave a run that nothing continues.
  if tracker.id != record.id:
    record.write(tracker.id, None)
  for method, *arguments in calls:
    if method != 'log':
      getattr(tracker, method)(*arguments)
    # A resumed run repeats rounds that the tracker may have.
    elif record.round is None or arguments[0] > record.round:
      tracker.log(*arguments)
      record.write(tracker.id, arguments[0])
