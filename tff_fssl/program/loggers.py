"""Takers of the metrics of a run: TensorBoard, MLflow, Weights & Biases.

A tracker's library runs in a thread of its own: a server that does not answer
and a library that fails neither delay nor end training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import importlib
import json
import logging
import math
import os
import queue
import re
import threading
import time
from typing import Any, Protocol
import uuid

import numpy as np

import tff_fssl
from tff_fssl import durable
from tff_fssl import files
from tff_fssl.hparams import UsageError
from tff_fssl.lazy import tf

# How a run ends, in MLflow's words.
FINISHED, FAILED, KILLED = 'FINISHED', 'FAILED', 'KILLED'
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
# Columns of the HParams dashboard.
_RESULTS = {
  'test/accuracy': 'test accuracy, last round',
  'best_validation/test/accuracy': 'test accuracy, best validation',
  'best_validation/round': 'round, best validation',
}
# Messages that wait for a slow tracker; one for each round.
_MAX_WAITING = 100_000
# Defaults of the libraries' own settings: they do not try for long, and tell
# nothing to others. Variables that the user set take precedence.
_SETTINGS = {
  'GIT_PYTHON_REFRESH': 'quiet',
  # Folders get no new features; databases do.
  'MLFLOW_ALLOW_FILE_STORE': 'true',
  'MLFLOW_DISABLE_TELEMETRY': 'true',
  'MLFLOW_HTTP_REQUEST_MAX_RETRIES': '3',
  'MLFLOW_HTTP_REQUEST_TIMEOUT': '20',
  'MLFLOW_LOGGING_LEVEL': 'ERROR',
  'MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT': 'true',
  'WANDB_ERROR_REPORTING': 'false',
  'WANDB_SILENT': 'true',
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
    if values.get('target') == target:
      self.id, self.round = values['id'], values[_ROUND]

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


class Logger(Protocol):
  """A place for metrics: a CSV table, TensorBoard, MLflow, Weights & Biases."""

  def log(self, round_num: int, metrics: Mapping[str, Any]) -> None:
    """Adds the metrics of a round: scalars by name."""


class RunLogger(Logger, Protocol):
  """A logger that shows a whole run."""

  def log_picture(self, name: str, path: str) -> None:
    """Adds a PNG file, which must stay until `finish`."""

  def log_file(self, name: str, path: str) -> None:
    """Adds a file or a folder, which must stay until `finish`."""

  def log_summary(self, round_num: int, summary: Mapping[str, float]) -> None:
    """Adds the results after the last round."""

  def finish(self, state: str, seconds: float) -> None:
    """Ends the run.

    Args:
      state: `FINISHED`, `FAILED` or `KILLED`.
      seconds: How long to wait until everything is sent.
    """


def failure(name: str, error: Exception) -> str:
  """Returns the warning that a logger has failed, and is not used again."""
  return f'{name} stops: {type(error).__name__}: {files.first_line(error)}'


class TensorBoardLogger:
  """Writes a run to TensorBoard, under TFF's names.

  TFF's own manager cannot write pictures and hyper-parameters into the same
  file. TensorBoard follows only the newest of several files in a folder.
  """

  def __init__(self, folder: str):
    """Begins a file.

    Args:
      folder: The folder of the run's events, which is made if missing.
    """
    self._writer = tf.summary.create_file_writer(folder)

  def log(self, round_num: int, metrics: Mapping[str, Any]) -> None:
    """Writes numbers as scalars, and arrays as histograms."""
    with self._writer.as_default(round_num):
      for name, value in metrics.items():
        array = np.asarray(value)
        # TensorBoard shows numbers only.
        if array.dtype.kind not in 'biuf':
          continue
        if array.ndim:
          tf.summary.histogram(name, array)
        else:
          tf.summary.scalar(name, array)

  def log_picture(self, name: str, path: str, round_num: int = 0) -> None:
    """Writes a PNG file."""
    from PIL import Image  # pylint: disable=import-outside-toplevel

    with Image.open(path) as picture:
      self.log_pixels(name, np.asarray(picture.convert('RGB')), round_num)

  def log_pixels(
    self, name: str, pixels: np.ndarray, round_num: int, about: str = ''
  ) -> None:
    """Writes a picture, uint8 [H, W, 1 or 3], and a caption."""
    with self._writer.as_default(round_num):
      tf.summary.image(name, pixels[np.newaxis], description=about or None)
    # Pictures are few, and looked at while the run continues.
    self._writer.flush()

  def log_hparams(self, values: Mapping[str, Any]) -> None:
    """Writes hyper-parameters: bool, int, float or str by name."""
    # TensorBoard's plugin takes a second.
    # pylint: disable-next=import-outside-toplevel
    from tensorboard.plugins.hparams import api

    with self._writer.as_default(0):
      api.hparams_config(
        [api.HParam(name) for name in values],
        [api.Metric(tag, display_name=name) for tag, name in _RESULTS.items()],
      )
      api.hparams(dict(values))

  def log_file(self, name: str, path: str) -> None:
    """Does nothing: TensorBoard shows no files."""

  def log_summary(self, round_num: int, summary: Mapping[str, float]) -> None:
    """Writes the results of the best round. `log` wrote those of the last."""
    best = {n: v for n, v in summary.items() if n.startswith('best_')}
    self.log(round_num, best)

  def finish(self, state: str, seconds: float = 0.0) -> None:
    """Writes whether the run has reached its last round, and ends the file."""
    # pylint: disable=import-outside-toplevel
    from tensorboard.plugins.hparams import api_pb2
    from tensorboard.plugins.hparams import summary

    del seconds  # The disk is near.
    status = api_pb2.STATUS_FAILURE
    if state == FINISHED:
      status = api_pb2.STATUS_SUCCESS
    with self._writer.as_default(0):
      tf.summary.experimental.write_raw_pb(
        summary.session_end_pb(status).SerializeToString()
      )
    self._writer.close()


class RoundProfiler:
  """Profiles rounds. A failure is reported, and training continues."""

  def __init__(
    self, rounds: frozenset[int], folder: str, say: Callable[[str], None]
  ):
    """Chooses rounds.

    Args:
      rounds: Numbers of the rounds.
      folder: TensorBoard's folder. Each profile is a run `round_N` in it, so
        that two profiles made in one second do not overwrite each other.
      say: Tells the user.
    """
    self._rounds = rounds
    self._folder = folder
    self._say = say

  @contextlib.contextmanager
  def round(self, round_num: int) -> Iterator[None]:
    """Profiles the body of the `with` block, if the round was chosen."""
    if round_num not in self._rounds:
      yield
      return
    profiler = tf.profiler.experimental
    folder = os.path.join(self._folder, f'round_{round_num}')
    started = self._succeeds(lambda: profiler.start(folder))
    try:
      # TensorBoard's profile plugin recognizes a step by this trace.
      with profiler.Trace('round', step_num=round_num, _r=1):
        yield
    finally:
      if started and self._succeeds(profiler.stop):
        self._say(f'Profile of round {round_num}: {folder}')

  def _succeeds(self, action: Callable[[], None]) -> bool:
    try:
      action()
    except Exception as error:  # pylint: disable=broad-except
      self._say(f'--profile: {type(error).__name__}: {error}')
      return False
    return True


class TrackerError(Exception):
  """A failure of a tracker, with its reason."""


class TrackerLogger:
  """Sends a run to a tracker.

  Only `finish` waits for the tracker. Rounds that the tracker's run has already
  are not sent again. Each method raises `TrackerError`, once, if the tracker
  has failed.
  """

  def __init__(
    self,
    target: str,
    folder: str,
    *,
    name: str,
    params: Mapping[str, str],
    algorithm: str,
  ):
    """Starts the tracker's thread.

    Args:
      target: 'mlflow:URI', a server or a folder, or 'wandb:PROJECT', perhaps
        with 'ENTITY/' before it.
      folder: A folder of this run alone. It remembers the tracker's run, which
        is continued by a later logger with the same folder.
      name: The name of the run at the tracker.
      params: Flags or hyper-parameters, which the tracker shows. Nothing
        secret.
      algorithm: The algorithm, as a tag.
    """
    durable.make_folder(folder)
    for variable, value in _SETTINGS.items():
      os.environ.setdefault(variable, value)
    self._calls: queue.Queue[Sequence[Any]] = queue.Queue(_MAX_WAITING)
    self._error: Exception | None = None
    self._thread = threading.Thread(
      target=self._track, args=(target, os.path.abspath(folder)), daemon=True
    )
    self._thread.start()
    self._send('start', name, dict(params), algorithm)

  def log(self, round_num: int, metrics: Mapping[str, Any]) -> None:
    """Sends the known scalars of a round."""
    self._check()
    scalars = {
      name: float(value)
      for name, value in metrics.items()
      if np.ndim(value) == 0 and not isinstance(value, (str, bytes))
    }
    known = {name: v for name, v in scalars.items() if not math.isnan(v)}
    self._send('log', round_num, known)

  def log_picture(self, name: str, path: str) -> None:
    """Sends a PNG file, which must stay until `finish`."""
    self._send('log_picture', name, os.path.abspath(path))

  def log_file(self, name: str, path: str) -> None:
    """Sends a file or a folder, which must stay until `finish`."""
    self._send('log_file', name, os.path.abspath(path))

  def log_summary(self, round_num: int, summary: Mapping[str, float]) -> None:
    """Sends the results after the last round."""
    self._send('log_summary', round_num, dict(summary))

  def finish(self, state: str, seconds: float) -> None:
    """Ends the tracker's run, once, and waits until it has received all.

    Args:
      state: `FINISHED`, `FAILED` or `KILLED`.
      seconds: How long to wait. What is not sent then is lost.
    """
    self._send('finish', state)
    self._send()
    self._thread.join(seconds)
    self._check()
    if self._thread.is_alive():
      raise TrackerError(f'it has not taken everything within {seconds:g} s')

  def _send(self, *call: Any) -> None:
    """Queues a call. An empty one is the last."""
    # If the queue is full, the tracker hangs. `finish` does not wait for it.
    with contextlib.suppress(queue.Full):
      self._calls.put_nowait(call)

  def _check(self) -> None:
    """Raises `TrackerError`, once, if the tracker has failed."""
    error, self._error = self._error, None
    if error is not None:
      reason = f'{type(error).__name__}: {files.first_line(error)}'
      raise TrackerError(reason) from error

  def _track(self, target: str, folder: str) -> None:
    # It warns before each new attempt. The last failure is reported anyway.
    logging.getLogger('urllib3').setLevel(logging.ERROR)
    try:
      track(target, folder, iter(self._calls.get, ()))
    except Exception as error:  # pylint: disable=broad-except
      # A tracker's library may raise anything.
      self._error = error
