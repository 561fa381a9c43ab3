"""TFF's worker ends with the program, however the program ends."""

import os
import pathlib
import subprocess
import sys

import pytest

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_PROGRAM = """
import os, pathlib, sys
import numpy as np
import tensorflow as tf
import tensorflow_federated as tff
from tff_fssl import runtime


@tff.federated_computation(tff.FederatedType(np.int32, tff.CLIENTS))
def comp(x):
  return tff.federated_sum(x)


def workers():
  for path in pathlib.Path('/proc').glob('[0-9]*/stat'):
    try:
      fields = path.read_text().rsplit(')', 1)[1].split()
    except OSError:
      continue
    if int(fields[1]) == os.getpid() and fields[0] != 'Z':
      yield int(path.parent.name)


context = runtime.build_context('tff_worker')
tff.framework.set_default_context(context)
assert not list(workers())
assert comp([lambda: 1, 2]) == 3
pathlib.Path(sys.argv[2]).write_text(' '.join(map(str, workers())))
if sys.argv[1] == 'raise':
  raise SystemError('on purpose')
if sys.argv[1] == 'close':
  context.close()
  assert not list(workers())
  try:
    comp([1])
  except RuntimeError as error:
    assert 'closed' in str(error)
"""
_ENDS = {'exit': 0, 'raise': 1, 'close': 0}


@pytest.fixture(scope='module')
def programs(tmp_path_factory):
  """Runs a program once for each way to end, at the same time."""
  folder = tmp_path_factory.mktemp('programs')
  environment = {**os.environ, 'PYTHONPATH': str(_ROOT)}
  running = {}
  for end in _ENDS:
    # Never a pipe: a worker that outlived its program would hold it.
    with open(folder / f'{end}.log', 'w') as log:
      running[end] = subprocess.Popen(
        [sys.executable, '-c', _PROGRAM, end, str(folder / end)],
        env=environment,
        stdout=log,
        stderr=subprocess.STDOUT,
      )
  codes = {end: process.wait(120) for end, process in running.items()}
  return folder, codes


@pytest.mark.parametrize('end', list(_ENDS))
def test_no_worker_outlives_its_program(programs, end):
  folder, codes = programs
  assert codes[end] == _ENDS[end], (folder / f'{end}.log').read_text()
  workers = (folder / end).read_text().split()
  assert len(workers) == 1
  assert not pathlib.Path(f'/proc/{workers[0]}').exists()
