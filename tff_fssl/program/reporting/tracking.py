"""Release managers that send runs to MLflow and to Weights & Biases.

A tracker's library runs in a process of its own (`tracker_process`). A server
that does not answer, a full disk or a library that fails neither delays nor
ends training, and a training program that is killed leaves no run behind that
seems to go on.
"""

from __future__ import annotations

from collections.abc import Mapping
import contextlib
import json
import math
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from typing import Any

import numpy as np

from tff_fssl import durable
from tff_fssl.lazy import tff
from tff_fssl.program.reporting import managers
from tff_fssl.program.reporting import tracker_process

FINISHED = tracker_process.FINISHED
FAILED = tracker_process.FAILED
KILLED = tracker_process.KILLED
# Messages that wait for a slow tracker; one for each round.
_MAX_WAITING = 100_000
_MAX_ERROR = 2**16
# Defaults of the libraries' own settings: they do not try for long, and say
# nothing. Whoever sets these variables wants other values.
_SETTINGS = {
  'GIT_PYTHON_REFRESH': 'quiet',
  'MLFLOW_HTTP_REQUEST_MAX_RETRIES': '3',
  'MLFLOW_HTTP_REQUEST_TIMEOUT': '20',
  'WANDB_ERROR_REPORTING': 'false',
  'WANDB_SILENT': 'true',
}


class TrackerError(Exception):
  """A tracker does not take what it is sent; the message says why."""


class TrackerReleaseManager(tff.program.ReleaseManager):
  """Releases the metrics of rounds to a tracker.

  Nothing here waits for the tracker, except `end`. Rounds that the tracker's
  run has already are not sent again. Use it with `BestEffortReleaseManager`,
  unless the end of a tracker shall end the program.
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
    """Starts the tracker's process.

    Args:
      target: 'mlflow:URI', a server or a folder; or 'wandb:PROJECT', perhaps
        with 'ENTITY/' before it.
      folder: A folder of this run alone. It remembers the tracker's run, which
        is continued by a later manager with the same folder.
      name: What the tracker calls the run.
      params: Flags or hyper-parameters, which the tracker shows. Nothing
        secret.
      algorithm: The algorithm, as a tag.
    """
    durable.make_folder(folder)
    # Nothing reads a pipe while training goes on.
    self._errors = tempfile.TemporaryFile()
    module = tracker_process.__name__
    self._process = subprocess.Popen(
      [sys.executable, '-m', module, target, os.path.abspath(folder)],
      stdin=subprocess.PIPE,
      stdout=subprocess.DEVNULL,
      stderr=self._errors,
      # Ctrl-C is for the program, which then ends the tracker.
      start_new_session=True,
      env={
        **_SETTINGS,
        **os.environ,
        'PYTHONPATH': os.pathsep.join(filter(None, sys.path)),
      },
    )
    self._waiting: queue.Queue[dict[str, Any] | None] = queue.Queue(
      _MAX_WAITING
    )
    self._has_raised = False
    threading.Thread(target=self._write, daemon=True).start()
    self._send(name=name, params=dict(params), tags={'algorithm': algorithm})

  @property
  def has_failed(self) -> bool:
    """Whether a failure of the tracker was raised."""
    return self._has_raised

  async def release(self, value: Any, key: int) -> None:
    """Sends metrics; those that are not scalars or not known are left out.

    Args:
      value: Nested mapping of scalars, or of references to scalars.
      key: The round.

    Raises:
      TrackerError: Once, if the tracker has failed.
    """
    value = await tff.program.materialize_value(value)
    self._check()
    metrics = {}
    for name, item in managers.flatten(value).items():
      if np.ndim(item) == 0 and not isinstance(item, (str, bytes)):
        number = float(item)
        if not math.isnan(number):
          metrics[name] = number
    self._send(round=int(key), metrics=metrics)

  def send_picture(self, name: str, path: str) -> None:
    """Sends a PNG file, which must stay until `end`."""
    self._send(picture=name, path=os.path.abspath(path))

  def send_artifact(self, name: str, path: str) -> None:
    """Sends a file or a folder, which must stay until `end`."""
    self._send(artifact=name, path=os.path.abspath(path))

  def send_summary(self, summary: Mapping[str, float], round_num: int) -> None:
    """Sends the results after the last round."""
    self._send(summary=dict(summary), round=round_num)

  def end(self, state: str, seconds: float) -> None:
    """Ends the tracker's run, and waits until it has taken all; once.

    Args:
      state: `FINISHED`, `FAILED` or `KILLED`.
      seconds: How long to wait. After that, the tracker's process is ended.

    Raises:
      TrackerError: If the tracker has not taken all, and `release` has not said
        so.
    """
    self._send(end=state)
    self._send()
    try:
      self._process.wait(seconds)
    except subprocess.TimeoutExpired as error:
      with contextlib.suppress(ProcessLookupError):
        # With the processes that it has started.
        os.killpg(self._process.pid, signal.SIGKILL)
      self._process.wait()
      if not self._has_raised:
        raise TrackerError(
          f'it has not taken everything within {seconds:g} s, and was ended'
        ) from error
    self._check()

  def _send(self, **message: Any) -> None:
    """Queues a message; an empty one is the last."""
    try:
      self._waiting.put_nowait(message or None)
    except queue.Full:
      # It hangs, or its disk does. `end` ends it.
      return

  def _check(self) -> None:
    """Raises `TrackerError`, once, if the process has failed."""
    if self._has_raised or not self._process.poll():
      return
    self._has_raised = True
    self._errors.seek(0)
    text = self._errors.read(_MAX_ERROR).decode(errors='replace')
    lines = [line for line in text.splitlines() if line.strip()]
    code = self._process.returncode
    raise TrackerError(lines[-1] if lines else f'its process ended with {code}')

  def _write(self) -> None:
    """Passes messages on, until the last one or the end of the process."""
    assert self._process.stdin is not None
    # What is wrong with the process, `_check` says.
    with contextlib.suppress(OSError), self._process.stdin as stream:
      while (message := self._waiting.get()) is not None:
        stream.write(json.dumps(message).encode() + b'\n')
        stream.flush()
