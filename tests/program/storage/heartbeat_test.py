import json
import os
import subprocess
import sys
import time

import pytest
import written_runs

from tff_fssl.hparams import UsageError
from tff_fssl.program.storage import heartbeat


@pytest.fixture(name='path')
def _path(tmp_path):
  return tmp_path / 'heartbeat.json'


def _change(path, **fields):
  path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def test_a_life(path):
  assert heartbeat.read(str(path)) is None
  with heartbeat.Heart(str(path), lambda: {'phase': 'round'}) as heart:
    beat = heartbeat.read(str(path))
    assert beat['state'] == heartbeat.RUNNING and beat['phase'] == 'round'
    assert beat['pid'] == os.getpid() and beat['host'] == os.uname().nodename
    assert beat['started'] <= beat['beat'] <= time.time()
    heart.state = heartbeat.FINISHED
  assert heartbeat.read(str(path))['state'] == heartbeat.FINISHED
  assert os.listdir(path.parent) == [path.name]


@pytest.mark.parametrize(
  'error, state',
  [(ValueError, heartbeat.FAILED), (KeyboardInterrupt, heartbeat.STOPPED)],
)
def test_how_it_ends_with_an_error(path, error, state):
  with pytest.raises(error):
    with heartbeat.Heart(str(path), dict):
      raise error
  assert heartbeat.read(str(path))['state'] == state


def test_beats_only_when_there_is_news(path, monkeypatch):
  monkeypatch.setattr(heartbeat, '_SHORTEST_SECS', 0.01)
  status = {'round': 1, 'seconds_left': 9.0}
  written = []
  write = heartbeat.Heart._write

  def count(self, state, flush=False):
    write(self, state, flush)
    written.append((dict(status), flush))

  monkeypatch.setattr(heartbeat.Heart, '_write', count)

  def wait(num):
    deadline = time.monotonic() + 10
    while len(written) < num and time.monotonic() < deadline:
      time.sleep(0.01)

  with heartbeat.Heart(str(path), lambda: status):
    status['seconds_left'] = 8.0  # This changes all the time.
    time.sleep(0.1)
    assert len(written) == 1
    status['round'] = 2
    wait(2)
    assert heartbeat.read(str(path))['round'] == 2
    monkeypatch.setattr(heartbeat, '_LONGEST_SECS', 0.05)
    wait(4)
  assert len(written) >= 4
  # Only how it ended is flushed.
  assert [flush for _, flush in written] == [False] * (len(written) - 1) + [
    True
  ]


def test_trouble_with_the_disk_is_no_trouble(tmp_path, monkeypatch):
  monkeypatch.setattr(heartbeat, '_SHORTEST_SECS', 0.01)
  folder = tmp_path / 'run'
  folder.mkdir()
  path = folder / 'heartbeat.json'
  rounds = [0]
  with heartbeat.Heart(str(path), lambda: {'round': rounds[0]}) as heart:
    path.unlink()
    folder.rmdir()
    rounds[0] = 1
    time.sleep(0.1)
    assert heart._thread.is_alive()
    folder.mkdir()

    def full(*_):
      raise OSError(28, 'No space left on device')

    monkeypatch.setattr(os, 'write', full)
    rounds[0] = 2
    time.sleep(0.1)
    assert heart._thread.is_alive()
    monkeypatch.undo()
    heart.state = heartbeat.FINISHED
  assert heartbeat.read(str(path))['round'] == 2


def test_a_killed_process_is_dead(path):
  code = """
import os, sys
from tff_fssl.program.storage import heartbeat
with heartbeat.Heart(sys.argv[1], dict):
  print('beats', flush=True)
  sys.stdin.read()
"""
  process = subprocess.Popen(
    [sys.executable, '-c', code, str(path)],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
  )
  assert process.stdout.readline() == b'beats\n'
  assert heartbeat.read(str(path))['state'] == heartbeat.RUNNING
  process.kill()
  process.wait()
  assert heartbeat.read(str(path))['state'] == heartbeat.DEAD
  process.stdin.close()
  process.stdout.close()


def test_who_is_taken_for_alive(path):
  with heartbeat.Heart(str(path), dict):
    running = path.read_text()

  def state(**fields):
    path.write_text(running)
    _change(path, **fields)
    return heartbeat.read(str(path))['state']

  assert state() == heartbeat.RUNNING
  # Here, the process counts, however long it says nothing.
  assert state(beat=0) == heartbeat.RUNNING
  # Its number has been given to another one.
  assert state(pid_started=1) == heartbeat.DEAD
  assert state(pid_started=None) == heartbeat.DEAD
  assert state(pid=2**22 + 1) == heartbeat.DEAD
  # Elsewhere, the last news count: another machine, boot or container.
  for name in ('host', 'boot', 'namespace'):
    other = {name: 'other', 'pid': 2**22 + 1}
    assert state(**other) == heartbeat.RUNNING
    assert state(**other, beat=time.time() - 61) == heartbeat.DEAD


@pytest.mark.parametrize(
  'content',
  ['', '[]', '{}', '{"state": "running"}', '{"state": "x", "beat": 1}'],
)
def test_other_files_are_refused(path, content):
  path.write_text(content)
  with pytest.raises(UsageError) as error:
    heartbeat.read(str(path))
  assert str(error.value).startswith(f'{path}: it is not ')


@pytest.mark.parametrize('name', ['pid', 'started', 'beat'])
@pytest.mark.parametrize(
  'value',
  ['NaN', 'Infinity', '9e11', '-9e11', pytest.param('1' * 400, id='long')],
)
def test_numbers_that_no_process_has(path, name, value):
  for state in (heartbeat.RUNNING, heartbeat.FINISHED):
    written_runs.beat(path.parent, state, **{name: 'here'})
    path.write_text(path.read_text().replace('"here"', value))
    with pytest.raises(UsageError, match='it is not (a heartbeat|JSON)'):
      heartbeat.read(str(path))
