"""A run that is stopped anywhere goes on as if it had not been."""

import contextlib
import os
import subprocess
import sys

import faulty_disk
import pytest

from tests.program import fakes
from tff_fssl.hparams import UsageError

_SHORT = {'total_rounds': 2, 'rounds_per_evaluation': 1, 'keep': 1}


@pytest.fixture(scope='module')
def reference(tmp_path_factory):
  """(results, disk calls) of a run that is not stopped."""
  folder = tmp_path_factory.mktemp('reference') / 'run'
  with faulty_disk.FaultyDisk().installed() as disk:
    fakes.run(folder, **_SHORT)
  assert {call.name for call in disk.calls} == set(faulty_disk.CALLS)
  return fakes.results(folder), disk.calls


# Rounds in which clients come again.
_REMEMBERING = {**_SHORT, 'total_rounds': 4}


@pytest.fixture(scope='module')
def remembering(tmp_path_factory):
  """The same of a process whose clients' rows are in files."""
  folder = tmp_path_factory.mktemp('reference') / 'run'
  with faulty_disk.FaultyDisk().installed() as disk:
    fakes.run(folder, fakes.RememberingProcess(), **_REMEMBERING)
  results = fakes.results(folder)
  rows = [name for name in results if name.endswith('.row')]
  # The last rows of all clients that took part; older ones were removed.
  assert 2 < len(rows) <= fakes.NUM_CLIENTS
  assert len({call.path for call in disk.calls if '.row' in call.path}) > len(
    rows
  )
  return results, disk.calls


@pytest.mark.parametrize(
  'how',
  [
    faulty_disk.KILL,
    pytest.param(faulty_disk.TEAR, marks=pytest.mark.slow),
    pytest.param(faulty_disk.FULL, marks=pytest.mark.slow),
    pytest.param(faulty_disk.POWER, marks=pytest.mark.slow),
    pytest.param(faulty_disk.POWER_NAMES, marks=pytest.mark.slow),
  ],
)
def test_stopped_at_every_disk_call(how, reference, tmp_path):
  expected, calls = reference
  assert len(calls) > 60
  error = UsageError if how == faulty_disk.FULL else faulty_disk.Killed
  for stop_at, call in enumerate(calls):
    if how == faulty_disk.TEAR and call.name != 'write':
      continue
    folder = tmp_path / str(stop_at)
    first, second = fakes.FakeProcess(), fakes.FakeProcess()
    disk = faulty_disk.FaultyDisk(stop_at, how, root=str(folder))
    with disk.installed(), pytest.raises(error):
      fakes.run(folder, first, **_SHORT)
    fakes.run(folder, second, **_SHORT)
    assert fakes.results(folder) == expected, stop_at
    # Rounds 0 to 2: at most one is repeated.
    assert len(first.rounds) + len(second.rounds) <= 4, stop_at
    for path, _, names in os.walk(folder):
      assert not [n for n in names if n.startswith('.writing')], (stop_at, path)


@pytest.mark.parametrize(
  'how, rounds_per_checkpoint, every',
  [
    (faulty_disk.KILL, 1, 2),
    pytest.param(faulty_disk.KILL, 3, 7, marks=pytest.mark.slow),
    pytest.param(faulty_disk.FULL, 1, 7, marks=pytest.mark.slow),
    pytest.param(faulty_disk.POWER_NAMES, 1, 7, marks=pytest.mark.slow),
  ],
)
def test_rows_in_files_survive(
  how, rounds_per_checkpoint, every, remembering, tmp_path
):
  expected, calls = remembering
  settings = {**_REMEMBERING, 'rounds_per_checkpoint': rounds_per_checkpoint}
  error = UsageError if how == faulty_disk.FULL else faulty_disk.Killed
  for stop_at in range(0, len(calls), every):
    folder = tmp_path / str(stop_at)
    disk = faulty_disk.FaultyDisk(stop_at, how, root=str(folder))
    with disk.installed(), contextlib.suppress(error):
      fakes.run(folder, fakes.RememberingProcess(), **settings)
    fakes.run(folder, fakes.RememberingProcess(), **settings)
    results = fakes.results(folder)
    # A checkpoint that was to be removed keeps its rows.
    assert {n: results.get(n) for n in expected} == expected, stop_at


def test_killed_again_and_again(reference, tmp_path):
  expected, _ = reference
  for calls in range(9, 60, 3):
    with faulty_disk.FaultyDisk(calls, faulty_disk.TEAR).installed():
      try:
        fakes.run(tmp_path / 'run', **_SHORT)
      except faulty_disk.Killed:
        continue
      break
  fakes.run(tmp_path / 'run', **_SHORT)
  assert fakes.results(tmp_path / 'run') == expected


def test_rare_checkpoints(reference, tmp_path):
  expected, calls = reference
  settings = {**_SHORT, 'rounds_per_checkpoint': 2}
  for stop_at in range(0, len(calls), 3):
    folder = tmp_path / str(stop_at)
    with faulty_disk.FaultyDisk(stop_at).installed():
      try:
        fakes.run(folder, **settings)
      except faulty_disk.Killed:
        pass
    fakes.run(folder, **settings)
    assert fakes.results(folder) == expected, stop_at


def test_content_is_flushed_before_a_name_and_the_name_after(reference):
  """In all calls of a run: what the next ones build on is on the disk."""
  calls = [c for c in reference[1] if not c.path.endswith('.lock')]
  dirty = None
  for call, following in zip(calls, [*calls[1:], None]):
    if dirty is not None:
      # Nothing else happens between the writes of a file and their fsync.
      assert call in (('write', dirty), ('fsync', dirty)), call
    if call.name in ('write', 'ftruncate'):
      dirty = call.path
    elif call.name == 'fsync':
      dirty = None
    else:  # A name has changed.
      assert following == ('fsync', os.path.dirname(call.path)), call


@pytest.mark.slow
def test_a_real_program_is_killed_and_resumed(repository, tmp_path):
  program = str(repository / 'benchmarks' / 'kill_resume.py')
  # TensorFlow's complaints are the log's.
  with open(tmp_path / 'out', 'w+') as out, open(tmp_path / 'log', 'w') as log:
    code = subprocess.call(
      [sys.executable, program, '--quick', f'--folder={tmp_path}'],
      stdout=out,
      stderr=log,
    )
    out.seek(0)
    printed = out.read()
  assert code == 0, printed + (tmp_path / 'log').read_text()
  assert ': 0 differences' in printed
  assert max(map(len, printed.splitlines())) <= 80
  assert sorted(os.listdir(tmp_path)) == ['log', 'out']
