"""The process in which a tracker's library runs. TensorFlow-free.

    python -m tff_fssl.program.reporting.tracker_process mlflow:URI FOLDER

reads JSON, a message in each line, from its standard input: first `name`,
`params` and `tags` of the run, then `round` and `metrics`, `picture` or
`artifact` and `path`, `summary` and `round`, and at last `end`, a state. If the
input ends without that, whoever wrote it was killed. FOLDER/KIND.json says
which run of the tracker this is, and its last round: it is continued, and
rounds that it has are skipped.
"""

from collections.abc import Iterator, Mapping
import importlib
import json
import os
import re
import sys
import time
from typing import Any, Protocol
import uuid

import tff_fssl
from tff_fssl import durable
from tff_fssl import files
from tff_fssl.hparams import UsageError

FINISHED, FAILED, KILLED = 'FINISHED', 'FAILED', 'KILLED'
_FORMAT = 'tff_fssl.tracker'
_EXPERIMENT = 'tff_fssl'
_ROUND = 'round'
# What MLflow takes at once, and in a name.
_MAX_PARAMS, _MAX_METRICS, _MAX_VALUE = 100, 900, 500
_NOT_IN_NAMES = re.compile(r'[^/\w.\- ]')


class Tracker(Protocol):
  """A run of a tracker.

  Attributes:
    id: Its name at the tracker.
  """

  id: str

  def log(self, round_num: int, metrics: Mapping[str, float]) -> None:
    """Adds the metrics of a round."""

  def log_picture(self, name: str, path: str) -> None:
    """Adds a PNG file."""

  def log_artifact(self, name: str, path: str) -> None:
    """Adds a file or a folder."""

  def log_summary(self, round_num: int, summary: Mapping[str, float]) -> None:
    """Adds the results."""

  def end(self, state: str) -> None:
    """Ends the run as FINISHED, FAILED or KILLED."""


class _MlflowTracker:
  """A run of an MLflow server, or in a folder of MLflow's."""

  def __init__(self, uri: str, start: Mapping[str, Any], run_id: str | None):
    mlflow = importlib.import_module('mlflow')
    entities = importlib.import_module('mlflow.entities')

    self._entities = entities
    mlflow.set_tracking_uri(uri)
    self._client = mlflow.MlflowClient(uri)
    if run_id is None or not self._continues(run_id, start['params']):
      run_id = self._begin(start)
    self.id = run_id

  def _begin(self, start: Mapping[str, Any]) -> str:
    name = os.environ.get('MLFLOW_EXPERIMENT_NAME') or _EXPERIMENT
    experiment = self._client.get_experiment_by_name(name)
    if experiment is None:
      experiment_id = self._client.create_experiment(name)
    else:
      experiment_id = experiment.experiment_id
    run = self._client.create_run(
      experiment_id, run_name=start['name'], tags=start['tags']
    )
    params = [
      self._entities.Param(_mlflow_name(name), _short(value))
      for name, value in start['params'].items()
    ]
    for i in range(0, len(params), _MAX_PARAMS):
      self._client.log_batch(
        run.info.run_id, params=params[i : i + _MAX_PARAMS]
      )
    return str(run.info.run_id)

  def _continues(self, run_id: str, params: Mapping[str, str]) -> bool:
    """Whether there is still such a run, which then goes on."""
    exceptions = importlib.import_module('mlflow.exceptions')

    try:
      run = self._client.get_run(run_id)
    except exceptions.MlflowException as error:
      if error.error_code == 'RESOURCE_DOES_NOT_EXIST':
        return False
      raise
    self._client.update_run(run_id, status='RUNNING')
    # Parameters cannot be changed: those of a continued run are tags.
    for name, value in params.items():
      name, value = _mlflow_name(name), _short(value)
      if run.data.params.get(name) != value:
        self._client.set_tag(run_id, f'continued/{name}', value)
    return True

  def log(self, round_num: int, metrics: Mapping[str, float]) -> None:
    made = [
      self._entities.Metric(_mlflow_name(name), value, _now(), round_num)
      for name, value in metrics.items()
    ]
    for i in range(0, len(made), _MAX_METRICS):
      self._client.log_batch(self.id, metrics=made[i : i + _MAX_METRICS])

  def log_picture(self, name: str, path: str) -> None:
    del name
    self._client.log_artifact(self.id, path, 'pictures')

  def log_artifact(self, name: str, path: str) -> None:
    if os.path.isdir(path):
      self._client.log_artifacts(self.id, path, name)
    else:
      self._client.log_artifact(self.id, path)

  def log_summary(self, round_num: int, summary: Mapping[str, float]) -> None:
    self.log(round_num, summary)

  def end(self, state: str) -> None:
    self._client.set_terminated(self.id, state)


class _WandbTracker:
  """A run of Weights & Biases; offline, in the folder."""

  def __init__(
    self,
    project: str,
    start: Mapping[str, Any],
    run_id: str | None,
    folder: str,
  ):
    wandb = importlib.import_module('wandb')

    self._wandb = wandb
    entity, _, name = project.rpartition('/')
    self.id = run_id or uuid.uuid4().hex[:8]
    try:
      self._run = wandb.init(
        entity=entity or None,
        project=name,
        id=self.id,
        resume='allow',
        name=start['name'],
        config=start['params'],
        tags=[start['tags']['algorithm']],
        dir=folder,
        settings=_WANDB,
      )
    except wandb.errors.UsageError as error:
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

  def log_artifact(self, name: str, path: str) -> None:
    kind = 'model' if os.path.isdir(path) else 'file'
    name = re.sub(r'[^\w.\-]', '_', f'{self.id}-{name}')
    artifact = self._wandb.Artifact(name, kind)
    if os.path.isdir(path):
      artifact.add_dir(path)
    else:
      artifact.add_file(path)
    self._run.log_artifact(artifact)

  def log_summary(self, round_num: int, summary: Mapping[str, float]) -> None:
    del round_num
    self._run.summary.update(dict(summary))

  def end(self, state: str) -> None:
    self._run.finish(exit_code=0 if state == FINISHED else 1)


# Nothing of the machine and its users: no code, command, packages or output.
_WANDB = {
  'console': 'off',
  'disable_git': True,
  'host': '-',
  'init_timeout': 60,
  'save_code': False,
  '_disable_machine_info': True,
  '_disable_meta': True,
  '_disable_stats': True,
  '_save_requirements': False,
}


def _mlflow_name(name: str) -> str:
  return _NOT_IN_NAMES.sub('_', name)


def _short(value: str) -> str:
  return value if len(value) <= _MAX_VALUE else f'{value[: _MAX_VALUE - 3]}...'


def _now() -> int:
  """Milliseconds, as MLflow wants them."""
  return round(1000 * time.time())


class _Record:
  """FOLDER/KIND.json: which run it is, and its last round."""

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
  target: str, folder: str, start: Mapping[str, Any], run_id: str | None
) -> Tracker:
  kind, _, where = target.partition(':')
  if kind == 'mlflow':
    return _MlflowTracker(where, start, run_id)
  return _WandbTracker(where, start, run_id, folder)


def track(target: str, folder: str, messages: Iterator[dict[str, Any]]) -> None:
  """Sends a run to a tracker.

  Args:
    target: 'mlflow:URI' or 'wandb:PROJECT'.
    folder: Where to keep which run it is, and what the tracker keeps.
    messages: What there is to send; the module says what they are.
  """
  start = next(messages)
  start['tags'] = {**start['tags'], 'tff_fssl': tff_fssl.__version__}
  record = _Record(folder, target)
  tracker = _open(target, folder, start, record.id)
  if tracker.id != record.id:
    record.write(tracker.id, None)
  state = KILLED
  for message in messages:
    if 'metrics' in message:
      round_num = message[_ROUND]
      if record.round is None or round_num > record.round:
        tracker.log(round_num, message['metrics'])
        record.write(tracker.id, round_num)
    elif 'picture' in message:
      tracker.log_picture(message['picture'], message['path'])
    elif 'artifact' in message:
      tracker.log_artifact(message['artifact'], message['path'])
    elif 'summary' in message:
      tracker.log_summary(message[_ROUND], message['summary'])
    else:
      state = message['end']
  tracker.end(state)


def main() -> int:
  """The process; its last line on standard error says what went wrong."""
  target, folder = sys.argv[1:]
  try:
    track(target, folder, map(json.loads, sys.stdin))
  except Exception as error:  # pylint: disable=broad-except
    # Whatever a tracker's library raises.
    print(f'{type(error).__name__}: {files.first_line(error)}', file=sys.stderr)
    return 1
  return 0


if __name__ == '__main__':
  sys.exit(main())
