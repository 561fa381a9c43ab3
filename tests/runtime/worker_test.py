"""TFF's worker ends with the program, however the program ends."""

import asyncio
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest
import tensorflow_federated as tff

from tff_fssl import runtime

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
"""
_ENDS = {'exit': 0, 'raise': 1}


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


def _children():
  for path in pathlib.Path('/proc').glob('[0-9]*/stat'):
    try:
      fields = path.read_text().rsplit(')', 1)[1].split()
    except OSError:
      continue
    if int(fields[1]) == os.getpid() and fields[0] != 'Z':
      yield int(path.parent.name)


def test_close_ends_the_worker(call):
  @tff.federated_computation(tff.FederatedType(np.int32, tff.CLIENTS))
  def comp(x):
    return tff.federated_sum(x)

  before = set(_children())
  with runtime.build_context('tff_worker') as context:
    assert set(_children()) == before
    assert call(context, comp, [lambda: 1, 2]) == 3
    assert len(set(_children()) - before) == 1
  assert set(_children()) == before
  with pytest.raises(RuntimeError, match='closed'):
    call(context, comp, [1])


def test_the_async_twin(call):
  @tff.tensorflow.computation(np.int32)
  def double(x):
    return 2 * x

  async def main():
    with runtime.build_async_context('tff_worker') as context:
      return await context.invoke(double, 4)

  assert asyncio.run(main()) == 8
