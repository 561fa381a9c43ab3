"""Other programs that end together with this one. TensorFlow-free."""

from collections.abc import Sequence
import signal
import subprocess
from typing import Any

# The shell becomes the program, after starting a watcher that waits for the end
# of a pipe whose other end only this Python process holds. The watcher then
# signals its process group, that is itself and the program. The system cannot
# give the group's number to other processes while the watcher is in it.
# (Linux's signal for a parent's death is no alternative: it is sent when the
# *thread* that started the program ends.)
_LAUNCHER = (
  'exec 3<&0 </dev/null; { read -r _ <&3; kill -%d 0; } >/dev/null 2>&1 &'
  ' exec "$@" 3<&-'
)


def start(
  command: Sequence[str], end_by: int, **options: Any
) -> 'subprocess.Popen[bytes]':
  """Starts a program in a process group of its own.

  A terminal's Ctrl-C thus reaches only this process.

  Args:
    command: The program and its arguments.
    end_by: The signal that it gets when this process ends, even if that is
      killed by SIGKILL, or when `end_watch` is called.
    **options: Of `subprocess.Popen`.

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
  """Ends the watcher of a program that has ended, or is to get its signal."""
  assert process.stdin is not None
  process.stdin.close()


def describe_end(status: int) -> str:
  """How a process ended, given `Popen.returncode`: 'exit code 1', 'SIGSEGV'."""
  how = signal.Signals(-status).name if status < 0 else f'exit code {status}'
  if status == -signal.SIGKILL:
    how += ': killed by hand, or out of memory'
  return how
