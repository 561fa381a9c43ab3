"""A file with the state of a run, and whether its process lives.

A thread writes it at most once a second, when something has changed, and every
ten seconds in any case. A write that fails is skipped: the file is for people
who look, and nothing is resumed from it.
"""

from collections.abc import Callable, Mapping
import contextlib
import json
import os
import threading
import time
from typing import Any

from tff_fssl import durable
from tff_fssl import files
from tff_fssl.hparams import UsageError

RUNNING = 'running'
FINISHED = 'finished'
STOPPED = 'stopped'
FAILED = 'failed'
# Running by the file, but the process is gone.
DEAD = 'dead'

_SHORTEST_SECS = 1.0
_LONGEST_SECS = 10.0
# A process on another machine that is silent for so long counts as dead.
_PATIENCE_SECS = 6 * _LONGEST_SECS
# The file may be replaced by anything.
_LARGEST = 2**16
_LARGEST_PID = 2**31 - 1
# In the year 5138: `datetime` ends with 9999.
_LATEST = 1e11


class Heart:
  """Writes heartbeats as long as it is entered.

  Attributes:
    state: The state at the end: `FINISHED`, `STOPPED` or `FAILED`.
  """

  def __init__(self, path: str, status: Callable[[], Mapping[str, Any]]):
    """Writes nothing yet.

    Args:
      path: The file, in an existing folder.
      status: Gives values for JSON, in another thread.
    """
    self.state = FAILED
    self._path = path
    self._status = status
    self._process = this_process()
    self._started = time.time()
    self._said: dict[str, Any] = {}
    self._said_at = 0.0
    self._ends = threading.Event()
    self._thread = threading.Thread(target=self._beat, daemon=True)

  def __enter__(self) -> 'Heart':
    self._say_news()
    self._thread.start()
    return self

  def __exit__(self, kind: Any, exception: Any, traceback: Any) -> None:
    self._ends.set()
    self._thread.join()
    if exception is not None:
      interrupted = isinstance(exception, KeyboardInterrupt)
      self.state = STOPPED if interrupted else FAILED
    # The last word must survive a crash of the machine.
    self._write(self.state, flush=True)

  def _beat(self) -> None:
    while not self._ends.wait(_SHORTEST_SECS):
      self._say_news()

  def _say_news(self) -> None:
    # The seconds that are left always change.
    news = {k: v for k, v in self._status().items() if k != 'seconds_left'}
    is_due = time.monotonic() - self._said_at >= _LONGEST_SECS
    if news != self._said or is_due:
      self._write(RUNNING)
      self._said, self._said_at = news, time.monotonic()

  def _write(self, state: str, flush: bool = False) -> None:
    content = {
      'state': state,
      **self._status(),
      'started': self._started,
      'beat': time.time(),
      **self._process,
    }
    text = json.dumps(content, indent=2) + '\n'
    # A disk that is full, a folder that somebody has removed: training will
    # say so where it matters.
    with contextlib.suppress(UsageError, OSError):
      durable.write_file(self._path, [text.encode()], flush=flush)


def this_process() -> dict[str, Any]:
  """Identifies this process among all others, also later ones."""
  return {
    'host': os.uname().nodename,
    # Two machines may have one name, and a container its own numbers.
    'boot': _first_line('/proc/sys/kernel/random/boot_id'),
    'namespace': _link('/proc/self/ns/pid'),
    'pid': os.getpid(),
    'pid_started': _start_ticks(os.getpid()),
  }


def read(path: str) -> dict[str, Any] | None:
  """Reads the last heartbeat, and corrects its state.

  Args:
    path: The file.

  Returns:
    The content, where 'state' may be `DEAD`, or None without a file.

  Raises:
    UsageError: If the file is not a heartbeat.
  """
  if not os.path.lexists(path):
    return None
  beat = files.read_json(path, limit=_LARGEST)
  is_known = beat.get('state') in (RUNNING, FINISHED, STOPPED, FAILED)
  pid = beat.get('pid')
  # In Python, True is an int.
  is_process = type(pid) is int and 0 < pid <= _LARGEST_PID
  if not (is_known and is_process and _has_times(beat)):
    raise files.FileError(path, 'it is not a heartbeat of a run')
  if beat['state'] == RUNNING and not _is_alive(beat):
    beat['state'] = DEAD
  return beat


def _has_times(beat: Mapping[str, Any]) -> bool:
  times = (beat.get(name) for name in ('started', 'beat'))
  return all(isinstance(t, int | float) and 0 <= t < _LATEST for t in times)


def _is_alive(beat: Mapping[str, Any]) -> bool:
  here = this_process()
  # Only on the same boot of the same machine can the process be seen.
  names = ('host', 'boot', 'namespace')
  if here['boot'] and all(beat.get(name) == here[name] for name in names):
    # Numbers of processes are used again: the start must agree, too.
    started = _start_ticks(beat['pid'])
    return started is not None and started == beat.get('pid_started')
  return time.time() - beat['beat'] < _PATIENCE_SECS


def _start_ticks(pid: int) -> int | None:
  """Returns the start of a process in ticks since the boot, or None."""
  # After the name in parentheses, which may hold anything; a zombie is gone.
  fields = _first_line(f'/proc/{pid}/stat').rpartition(')')[2].split()
  return int(fields[19]) if len(fields) > 19 and fields[0] not in 'ZX' else None


def _first_line(path: str) -> str:
  try:
    with open(path, errors='replace') as file:
      return file.readline().strip()
  except OSError:
    return ''


def _link(path: str) -> str:
  try:
    return os.readlink(path)
  except OSError:
    return ''
