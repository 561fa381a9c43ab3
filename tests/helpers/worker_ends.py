"""A program that ends in every way there is while it has a worker.

    python worker_ends.py FOLDER

Importing TFF takes long, so that one process does it and forks one program for
each way to end. Prints, as JSON, what became of each: its exit status, and the
worker's process with the targets of its streams.
"""

import json
import os
import pathlib
import signal
import sys
import time

import numpy as np

from tff_fssl import runtime
from tff_fssl.lazy import tf, tff

_SIGNALS = {
  'SIGINT': signal.SIGINT,
  'SIGTERM': signal.SIGTERM,
  'SIGKILL': signal.SIGKILL,
}
ENDS = ('exit', 'raise', *_SIGNALS)


def waits_for_files(folder: pathlib.Path) -> tff.Computation:
  """The clients' sum, when `folder/go` exists; shows itself as `folder/here`.

  Args:
    folder: Where the files are.

  Returns:
    A computation of float32 values at clients.
  """
  here, go = str(folder / 'here'), str(folder / 'go')

  @tff.tensorflow.computation(np.float32)
  def wait(x):
    with tf.control_dependencies([tf.io.write_file(here, '')]):
      number = tf.while_loop(
        lambda n: tf.equal(n, 0),
        lambda n: (tf.size(tf.io.matching_files(go)),),
        (tf.constant(0),),
      )[0]
    return x * tf.cast(number, tf.float32)

  @tff.federated_computation(tff.FederatedType(np.float32, tff.CLIENTS))
  def total(x):
    return tff.federated_sum(tff.federated_map(wait, x))

  return total


def processes(field: str, value: int) -> list[int]:
  """The ids of live processes, by 'parent' or 'group'."""
  found = []
  for path in pathlib.Path('/proc').glob('[0-9]*/stat'):
    try:
      fields = path.read_text().rsplit(')', 1)[1].split()
    except OSError:
      continue
    number = int(fields[{'parent': 1, 'group': 2}[field]])
    if number == value and fields[0] != 'Z':
      found.append(int(path.parent.name))
  return found


def until(condition, secs: float = 60.0):
  """What `condition` gives once it is true, or after `secs`."""
  deadline = time.monotonic() + secs
  while not (result := condition()) and time.monotonic() < deadline:
    time.sleep(0.02)
  return result


def _program(end: str, folder: pathlib.Path) -> None:
  context = runtime.build_context(runtime.Settings('tff_worker'))
  tff.framework.set_default_context(context)
  assert waits_for_files(folder)([1.0, 2.0]) == 3.0
  if end == 'raise':
    raise ValueError('on purpose')


def _watch(end: str, program: int, folder: pathlib.Path) -> dict:
  until((folder / 'here').exists)
  (worker,) = processes('parent', program)
  streams = [os.readlink(f'/proc/{worker}/fd/{fd}') for fd in range(3)]
  if end in _SIGNALS:
    os.kill(program, _SIGNALS[end])
  else:
    (folder / 'go').touch()
  status = os.waitstatus_to_exitcode(os.waitpid(program, 0)[1])
  return {'status': status, 'worker': worker, 'streams': streams}


def _main(folder: pathlib.Path) -> None:
  programs = {}
  for end in ENDS:
    (folder / end).mkdir()
    programs[end] = os.fork()
    if not programs[end]:
      return _program(end, folder / end)
  result = {e: _watch(e, p, folder / e) for e, p in programs.items()}
  print(json.dumps(result))


if __name__ == '__main__':
  _main(pathlib.Path(sys.argv[1]))
