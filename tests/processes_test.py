import signal
import subprocess
import sys
import time

import pytest

from tff_fssl import processes

# Tells which signal it gets, after the line that says that it is ready.
_CHILD = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
print('ready', flush=True)
# A signal just before a sleep is handled only after it: many short ones.
for _ in range(6_000):
  time.sleep(0.1)
"""
_PARENT = """
import signal, sys, time
from tff_fssl import processes
process = processes.start([sys.executable, '-c', sys.argv[1]], signal.SIGTERM)
time.sleep(600)
"""


def test_it_ends_on_its_own():
  process = processes.start(
    ['/bin/sh', '-c', 'echo $0; exit 5'], signal.SIGTERM, stdout=subprocess.PIPE
  )
  assert process.stdout.read() == b'/bin/sh\n'
  assert process.wait() == 5
  processes.end_watch(process)


def test_the_end_of_the_watch_is_its_signal():
  process = processes.start(
    [sys.executable, '-c', _CHILD], signal.SIGTERM, stdout=subprocess.PIPE
  )
  assert process.stdout.readline() == b'ready\n'
  processes.end_watch(process)
  assert process.wait(timeout=300) == 7


def test_it_ends_with_its_parent(repository):
  parent = subprocess.Popen(
    [sys.executable, '-c', _PARENT, _CHILD],
    cwd=repository,
    stdout=subprocess.PIPE,
  )
  assert parent.stdout.readline() == b'ready\n'
  parent.kill()
  start = time.monotonic()
  # The pipe closes when the last process that holds it has ended.
  assert parent.stdout.read() == b''
  assert time.monotonic() - start < 300
  parent.wait()


@pytest.mark.parametrize(
  'status, words',
  [
    (1, 'exit code 1'),
    (-signal.SIGSEGV, 'SIGSEGV'),
    # Real-time signals but the first and the last have no name in Python.
    (-signal.SIGRTMIN - 1, f'signal {signal.SIGRTMIN + 1}'),
    (-signal.SIGKILL, 'SIGKILL: killed by hand, or out of memory'),
  ],
)
def test_how_it_ended(status, words):
  assert processes.describe_end(status) == words
