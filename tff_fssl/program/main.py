"""What all programs share: errors, exit codes, quiet. TensorFlow-free.

Exit codes: 0 done; 1 a failure; 2 a user's mistake (the message says what to
do); 3 training stopped since no update was finite; 130 Ctrl-C; 143 SIGTERM,
saved: the same command goes on.
"""

import codecs
from collections.abc import Callable, Sequence
import contextlib
import logging
import os
import signal
import sys
import textwrap
import warnings

from tff_fssl import durable
from tff_fssl.hparams import UsageError
from tff_fssl.program import console

_REPLACING = 'tff_fssl.readable'
_PLAIN = {'±': '+-', '…': '...', '–': '-', '—': '-'}

DONE = 0
FAILED = 1
USAGE = 2
NOT_FINITE = 3
INTERRUPTED = 128 + signal.SIGINT
TERMINATED = 128 + signal.SIGTERM


def run(
  program: Callable[[Sequence[str]], int], argv: Sequence[str] | None = None
) -> int:
  """Runs a program; turns a user's mistakes into messages.

  Args:
    program: Takes the arguments without the program's name, returns the exit
      code.
    argv: These arguments; the process's own by default.

  Returns:
    The exit code.
  """
  try:
    _check_streams()
    with durable.storage_errors():
      code = program(sys.argv[1:] if argv is None else argv)
      # Not at exit, where an error would be Python's to report.
      sys.stdout.flush()
    return code
  except BrokenPipeError:
    _drop_output()
    complain(
      'standard output was closed before all was printed; give the command'
      ' again (a run goes on where it was saved)'
    )
    return USAGE
  except UsageError as error:
    _flush()
    complain(str(error))
    return USAGE
  except KeyboardInterrupt:
    _flush()
    complain('interrupted')
    return INTERRUPTED


def complain(message: str) -> None:
  """Prints an error, wrapped on a terminal, one line elsewhere."""
  text = f'error: {printable(message)}'
  if sys.stderr.isatty():
    text = textwrap.fill(
      text, console.WIDTH, break_long_words=False, break_on_hyphens=False
    )
  with contextlib.suppress(OSError):
    print(text, file=sys.stderr, flush=True)


def warn(message: str) -> None:
  """Prints a warning on standard error, in one line."""
  with contextlib.suppress(OSError):
    print(f'warning: {printable(message)}', file=sys.stderr, flush=True)


def printable(text: str) -> str:
  """One line of text: unprintable characters as Python writes them."""
  return ''.join(
    c if c.isprintable() else ascii(c)[1:-1]
    for c in ' '.join(text.split('\n  '))
  )


def _check_streams() -> None:
  """Makes standard output and error fit for use; raises `UsageError`."""
  if sys.stderr is None:
    # Else a file that is opened later would get its number, and its messages.
    sys.stderr = open(os.open(os.devnull, os.O_WRONLY), 'w')
  if sys.stdout is None:
    raise UsageError(
      'standard output is closed; send it to a file or to /dev/null'
    )
  for stream in (sys.stdout, sys.stderr):
    reconfigure = getattr(stream, 'reconfigure', None)
    if reconfigure is not None:
      reconfigure(errors=_REPLACING)


def _flush() -> None:
  """Prints what is still to be printed, as far as that is possible."""
  try:
    if sys.stdout is not None:
      sys.stdout.flush()
  except OSError:
    _drop_output()


def _drop_output() -> None:
  """Sends output to nowhere; Python would complain of it at exit."""
  with contextlib.suppress(OSError, ValueError):
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def _replace(error: UnicodeError) -> tuple[str, int]:
  """Writes for a terminal what its encoding lacks: '+-' for a plus-minus."""
  if not isinstance(error, UnicodeEncodeError):
    raise error
  part = error.object[error.start : error.end]
  text = ''.join(_PLAIN.get(c) or ascii(c)[1:-1] for c in part)
  return text, error.end


codecs.register_error(_REPLACING, _replace)


def quiet(verbose: bool = False) -> None:
  """Silences start-up messages; to be called before TensorFlow is imported."""
  if verbose:
    return
  os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')
  logging.getLogger('tensorflow').setLevel(logging.ERROR)
  # TFF, Keras and TFDS warn of each other's deprecations.
  warnings.filterwarnings('ignore', category=DeprecationWarning)
  warnings.filterwarnings('ignore', category=FutureWarning)
