import asyncio
import dataclasses
import logging
import os
import re
import signal
import subprocess
import sys

import pytest

from tff_fssl import bridge
from tff_fssl import hparams
from tff_fssl.hparams import hparam
from tff_fssl.program import main
from tff_fssl.program import training_types


def test_the_page_of_runs_names_the_exit_codes(repository):
  page = (repository / 'docs' / 'runs.md').read_text()
  table = page.partition('## Exit codes')[2]
  rows = re.findall(r'(?m)^\| (\d[\d, ]*) \|', table)
  named = {int(code) for row in rows for code in row.split(',')}
  assert named == {
    main.DONE,
    main.FAILED,
    main.USAGE,
    main.NOT_FINITE,
    main.INTERRUPTED,
    main.CLOSED_PIPE,
    main.TERMINATED,
  }


@dataclasses.dataclass(frozen=True)
class _Hparams:
  kind: str = hparam('a', 'Which.', choices=('a', 'b'))
  depth: int = hparam(3, 'How deep.', when=lambda own: own.kind == 'b')

  def __post_init__(self):
    hparams.validate(self)


@main.command('programs/x.py NAME', 'Tries.', _Hparams, missing='none', most=1)
def _program(settings, parsed):
  return settings.depth if parsed.positional == ('code',) else None


def test_a_command_parses_checks_and_returns_a_code(capsys):
  assert _program(['code', '--kind=b', '--depth=7']) == 7
  assert _program(['other']) == main.DONE
  assert _program(['--help']) == main.DONE
  assert '--depth=3' in capsys.readouterr().out
  for argv, message in (
    ([], '^none$'),
    (['a', 'b'], "^'b': give one name only$"),
    (['code', '--depth=7'], '^--depth: has no effect with --kind=a; omit it'),
    (['code', '--kind=c'], '^--kind=c: allowed are a, b'),
  ):
    with pytest.raises(hparams.UsageError, match=message):
      _program(argv)


def _run(send, number, seconds=9.0):
  """Runs logic that ends when asked to; `send` signals, `seconds` apart."""
  now = 0.0
  stop, said = training_types.StopRequest(), []

  async def logic():
    nonlocal now
    for _ in range(send):
      now += seconds
      os.kill(os.getpid(), number)
      await asyncio.sleep(0.05)
    return 'done'

  before = signal.getsignal(number)
  try:
    result = asyncio.run(
      main.run_until_stopped(logic(), stop, said.append, lambda: now)
    )
  finally:
    assert signal.getsignal(number) == before
  return result, stop, said


@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_asks(number):
  result, stop, said = _run(1, number)
  assert result == 'done' and stop.signal == number
  assert len(said) == 1 and 'after this round' in said[0]


@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGTERM])
def test_the_second_signal_cancels(number):
  with pytest.raises(asyncio.CancelledError):
    _run(2, number)


@pytest.mark.parametrize('seconds', [0.0, 0.001, 0.3])
def test_signals_at_once_are_one(seconds):
  """As `timeout` gives them: to the program, its group, and through make."""
  result, stop, said = _run(5, signal.SIGTERM, seconds)
  assert result == 'done' and stop.signal == signal.SIGTERM
  assert len(said) == 1


def test_without_signals():
  result, stop, said = _run(0, signal.SIGINT)
  assert (result, stop.signal, said) == ('done', None, [])


def test_exit_codes():
  assert main.exit_code(signal.SIGINT) == 130
  assert main.exit_code(signal.SIGTERM) == 143
  assert main.exit_code(None) == 130


_LEAVING = """
import atexit
from tff_fssl.program import main

class Graph:
  def __del__(self):
    print('destroyed')

def program(argv):
  global graph
  graph = Graph()
  atexit.register(print, 'library', 'cleaned', flush=False)
  print(argv, end='; ')
  if argv[1:]:
    raise LookupError('a mistake of ours')
  return 3

main.start(program)
"""


def _leave(*argv):
  return subprocess.run(
    [sys.executable, '-c', _LEAVING, *argv],
    capture_output=True,
    text=True,
    check=False,
  )


def test_a_missing_tff_is_one_line(capsys):
  def lack(name):
    raise ModuleNotFoundError('install it so', name=name)

  assert main.run(lambda _: lack(bridge.TFF), []) == main.USAGE
  assert capsys.readouterr().err == 'error: install it so\n'
  with pytest.raises(ModuleNotFoundError):
    main.run(lambda _: lack('numpy'), [])


def test_a_process_ends_without_teardown():
  done = _leave('a')
  assert (done.returncode, done.stderr) == (3, '')
  assert done.stdout == "['a']; library cleaned\n"


def test_an_error_of_ours_ends_a_process_as_usual():
  done = _leave('a', 'b')
  assert done.returncode == 1
  assert 'LookupError: a mistake of ours' in done.stderr
  assert 'destroyed' in done.stdout


def test_a_profiler_sees_the_end_of_a_program(tmp_path):
  path = tmp_path / 'leave.py'
  path.write_text(_LEAVING)
  done = subprocess.run(
    [sys.executable, '-m', 'cProfile', path, 'a'],
    capture_output=True,
    text=True,
    check=False,
  )
  assert 'function calls' in done.stdout and 'main.py' in done.stdout


def test_quiet_programs_drop_what_users_cannot_change(caplog):
  logger = logging.getLogger('tensorflow')
  before = logger.filters[:], logger.level
  try:
    main.quiet()
    with caplog.at_level(logging.ERROR, 'tensorflow'):
      logger.error('Object was never used (type Operation): %s', 'a trace')
      logger.error('out of memory')
  finally:
    logger.filters[:], logger.level = before
  assert [record.getMessage() for record in caplog.records] == ['out of memory']
