"""Other programs: their command lines, and their end with this program."""

from collections.abc import Sequence
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from typing import Any

# The shell starts a watcher, then becomes the program. The watcher waits for
# the end of a pipe whose other end only this Python process holds. Then it
# signals its process group, that is itself and the program. The system cannot
# give the group's number to other processes while the watcher is in it.
# (Linux's signal for a parent's death is no alternative: it is sent when the
# *thread* that started the program ends.)
_LAUNCHER = (
  'exec 3<&0 </dev/null; { read -r _ <&3; kill -%d 0; } >/dev/null 2>&1 &'
  ' exec "$@" 3<&-'
)


def python() -> str:
  """Returns the command of this Python, 'python' if a shell finds it so."""
  found = shutil.which('python')
  if not sys.executable or (
    found
    and os.path.dirname(found) == os.path.dirname(sys.executable)
    and os.path.samefile(found, sys.executable)
  ):
    return 'python'
  return shorter(sys.executable)


def shorter(path: str) -> str:
  """Makes a path relative to the current folder, if it is below."""
  relative = os.path.relpath(path)
  return path if relative.startswith(os.pardir) else relative


def python_code(code: str) -> str:
  """Makes the shell command that runs a line of code."""
  # Most code has single quotes, which double quotes keep readable.
  quoted = shlex.quote(code) if re.search(r'["$`\\!]', code) else f'"{code}"'
  return f'{shlex.quote(python())} -c {quoted}'


def start(
  command: Sequence[str], end_by: int, **options: Any
) -> 'subprocess.Popen[bytes]':
  """Starts a program in a process group of its own.

  A terminal's Ctrl-C thus reaches only this process.

  Args:
    command: The program and its arguments.
    end_by: The signal for the program when this process ends, even by SIGKILL,
      or when `end_watch` is called.
    **options: Options of `subprocess.Popen`.

  Returns:
    The process.
  """
  return subprocess.Popen(
    ['/bin/sh', '-c', _LAUNCHER % end_by, 'sh', *command],
    stdin=subprocess.PIPE,
    start_new_session=True,
    **options,
  )


def end_watch(process: 'subprocess.Popen[bytes]') -> None:
  """Ends the watcher of a program, which signals the program if it runs."""
  assert process.stdin is not None
  process.stdin.close()


def describe_end(status: int) -> str:
  """Describes a `Popen.returncode`: 'exit code 1', 'SIGSEGV'."""
  if status >= 0:
    return f'exit code {status}'
  try:
    how = signal.Signals(-status).name
  except ValueError:  # Most real-time signals have no name in Python.
    how = f'signal {-status}'
  if status == -signal.SIGKILL:
    how += ': killed by hand, or out of memory'
  return how
