"""What all programs share: errors, exit codes, quiet. TensorFlow-free.

Exit codes: 0 done; 1 a failure; 2 a user's mistake (the message says what to
do); 3 training stopped since no update was finite; 130 Ctrl-C; 143 SIGTERM,
saved: the same command goes on.
"""

from collections.abc import Callable, Sequence
import logging
import os
import signal
import sys
import textwrap
import warnings

from tff_fssl import durable
from tff_fssl.hparams import UsageError
from tff_fssl.program import console

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
    with durable.storage_errors():
      return program(sys.argv[1:] if argv is None else argv)
  except UsageError as error:
    complain(str(error))
    return USAGE
  except KeyboardInterrupt:
    complain('interrupted')
    return INTERRUPTED
  except BrokenPipeError:
    # Who read the output has gone; Python would complain again at exit.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return FAILED


def complain(message: str) -> None:
  """Prints an error, wrapped on a terminal, one line elsewhere."""
  text = f'error: {message}'
  if sys.stderr.isatty():
    text = '\n'.join(
      textwrap.fill(
        line, console.WIDTH, break_long_words=False, break_on_hyphens=False
      )
      for line in text.splitlines()
    )
  print(text, file=sys.stderr, flush=True)


def quiet(verbose: bool = False) -> None:
  """Silences start-up messages; to be called before TensorFlow is imported."""
  if verbose:
    return
  os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')
  logging.getLogger('tensorflow').setLevel(logging.ERROR)
  # TFF, Keras and TFDS warn of each other's deprecations.
  warnings.filterwarnings('ignore', category=DeprecationWarning)
  warnings.filterwarnings('ignore', category=FutureWarning)
