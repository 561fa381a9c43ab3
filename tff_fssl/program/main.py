"""The frame of all programs: errors, exit codes, signals, silence.

Exit codes: 0 done, 1 failure, 2 a user's mistake (the message gives the
remedy), 3 no finite update, 130 Ctrl-C, 141 a reader closed standard output
(nothing is printed about it), 143 SIGTERM (the same command continues the run).
"""

import asyncio
import atexit
from collections.abc import Callable, Coroutine, Iterator, Sequence
import contextlib
import dataclasses
import functools
import gc
import logging
import os
import signal
import sys
import textwrap
import threading
import time
import types
from typing import Any, NoReturn, TypeVar
import warnings

from tff_fssl import bridge
from tff_fssl import durable
from tff_fssl import files
from tff_fssl.hparams import UsageError
from tff_fssl.program import console
from tff_fssl.program import flags
from tff_fssl.program import training_types
from tff_fssl.program import usage

# What a message has before each command, which must stay in one piece.
_COMMAND = '\n  '
# The endings of formats that programs write.
_ENDINGS = {'.csv', '.html', '.json', '.pdf', '.png', '.svg'}
# New objects between two passes of Python's garbage collector, whose own number
# of 700 costs a start a tenth of its time: graphs are many objects that stay.
_NEW_OBJECTS = 20_000
_T = TypeVar('_T')
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
# `timeout make train` signals the program, its process group and, through make,
# the program again, all at once. Signals within this time count as one.
ONE_SIGNAL_SECS = 2.0

DONE = 0
FAILED = 1
USAGE = 2
NOT_FINITE = 3
INTERRUPTED = 128 + signal.SIGINT
CLOSED_PIPE = 128 + signal.SIGPIPE
TERMINATED = 128 + signal.SIGTERM


def start(program: Callable[[Sequence[str]], int]) -> NoReturn:
  """Runs a program as this process, which ends with the program's exit code.

  Args:
    program: As in `run`.
  """
  codes: list[int] = []
  # Before the program imports libraries: their own clean-up precedes this one.
  atexit.register(_skip_teardown, codes)
  codes.append(run(program))
  sys.exit(codes[0])


def _skip_teardown(codes: Sequence[int]) -> None:
  """Ends the process at once, unless an exception ends the program.

  Python would destroy each object of TensorFlow, which takes 2 s.
  """
  if not codes:
    return
  logging.shutdown()
  for stream in (sys.stdout, sys.stderr):
    # The stream is closed, or its reader is gone.
    with contextlib.suppress(AttributeError, OSError, ValueError):
      stream.flush()
  os._exit(codes[0])


def run(
  program: Callable[[Sequence[str]], int], argv: Sequence[str] | None = None
) -> int:
  """Runs a program, and turns a user's mistakes into messages.

  Args:
    program: A function that takes the arguments, without the program's name,
      and returns the exit code.
    argv: The arguments, by default those of the process.

  Returns:
    The exit code.
  """
  gc.set_threshold(_NEW_OBJECTS)
  try:
    _check_streams()
    with durable.storage_errors():
      code = program(sys.argv[1:] if argv is None else argv)
      # Now, not at exit, where Python itself would report an error.
      sys.stdout.flush()
    return code
  # A reader such as `head` that has seen enough is no failure of ours.
  except BrokenPipeError:
    _drop_output()
    return CLOSED_PIPE
  except UsageError as error:
    _flush()
    complain(str(error))
    return USAGE
  except ModuleNotFoundError as error:
    # `bridge` says how to install it.
    if error.name != bridge.TFF:
      raise
    _flush()
    complain(str(error))
    return USAGE
  except KeyboardInterrupt:
    _flush()
    complain('interrupted')
    return INTERRUPTED


def command(
  usage_line: str,
  about: str,
  own: type[Any],
  *,
  more: Callable[[], Sequence[flags.Group]] = tuple,
  shown: Callable[[], Sequence[flags.Group]] | None = None,
  missing: str = '',
  most: int | None = None,
) -> Callable[
  [Callable[[Any, flags.ParsedFlags], int | None]],
  Callable[[Sequence[str]], int],
]:
  """Makes a program of a function: it parses, prints the help and checks.

  Args:
    usage_line: The line that `usage.help_text` shows first.
    about: The description for `usage.help_text`.
    own: The dataclass of the program's own flags.
    more: Returns the other flags that exist.
    shown: Returns the other flags that `--help` shows, if not all of `more`.
    missing: The error if no positional argument is given. '': none is needed.
    most: The largest number of positional arguments. None: any number.

  Returns:
    A decorator. The function takes an instance of `own` and all flags. It
    returns the exit code, or None for `DONE`. The program takes the arguments
    and raises `UsageError` for a user's mistake.
  """

  def decorate(
    function: Callable[[Any, flags.ParsedFlags], int | None],
  ) -> Callable[[Sequence[str]], int]:
    @functools.wraps(function)
    def program(argv: Sequence[str]) -> int:
      groups = [flags.Group(own, 'Flags')] if dataclasses.fields(own) else []
      in_help = None if shown is None else [*groups, *shown()]
      parsed = usage.parse(
        argv,
        usage_line,
        about,
        [*groups, *more()],
        in_help,
        allow_positional=most != 0,
      )
      if parsed is None:
        return DONE
      settings, given = parsed.build(own), parsed.positional
      # A flag that does nothing is more often a mistake than a wish.
      parsed.refuse(usage.find_idle(settings))
      if missing and not given:
        raise UsageError(missing)
      if most is not None and len(given) > most:
        allowed = 'one name only' if most == 1 else f'at most {most} names'
        raise UsageError(f'{given[most]!r}: give {allowed}')
      code = function(settings, parsed)
      return DONE if code is None else code

    return program

  return decorate


def prepare_output(flag: str, path: str, *endings: str) -> None:
  """Makes the folder of a file before the work whose result it will hold.

  Args:
    flag: The flag that names the file.
    path: The file. '' is none.
    endings: Those of the formats in which it can be written. A file may also
      have none, or one of no format.

  Raises:
    UsageError: If it is a folder or has another format's ending, or its folder
      cannot be made.
  """
  if not path:
    return
  if os.path.isdir(path):
    raise UsageError(f'--{flag}={path}: is a folder; give the name of a file')
  ending = os.path.splitext(path)[1].lower()
  if ending in _ENDINGS - {*endings}:
    raise UsageError(
      f'--{flag}={path}: is written as {" or ".join(endings)}, not as {ending};'
      ' give another name'
    )
  with durable.storage_errors(f'--{flag}'):
    durable.make_folder(os.path.dirname(os.path.abspath(path)))


@dataclasses.dataclass(frozen=True)
class NoHparams:
  """The flags of a program that has none of its own."""


def complain(message: str) -> None:
  """Prints an error: wrapped on a terminal, as one line elsewhere.

  Args:
    message: What is wrong. Commands in it are at its end, each after a line
      feed and two spaces.
  """
  text = f'error: {_join_lines(message)}'
  if sys.stderr.isatty():
    # Commands, which are on lines of their own, stay in one piece.
    first, *commands = message.split(_COMMAND)
    lines = textwrap.wrap(
      f'error: {_join_lines(first)}',
      console.WIDTH,
      break_long_words=False,
      break_on_hyphens=False,
    )
    text = '\n'.join([*lines, *(f'  {_join_lines(one)}' for one in commands)])
  with contextlib.suppress(OSError):
    print(text, file=sys.stderr, flush=True)


def warn(message: str) -> None:
  """Prints a warning on standard error, in one line."""
  with contextlib.suppress(OSError):
    print(f'warning: {_join_lines(message)}', file=sys.stderr, flush=True)


def _join_lines(message: str) -> str:
  """Joins a message to one line."""
  return files.printable(' '.join(message.split(_COMMAND)))


def _check_streams() -> None:
  """Makes standard output and error fit for use, or raises `UsageError`."""
  if sys.stderr is None:
    # A file opened later would get descriptor 2, and the error messages in it.
    sys.stderr = open(os.open(os.devnull, os.O_WRONLY), 'w')
  if sys.stdout is None:
    raise UsageError(
      'standard output is closed; send it to a file or to /dev/null'
    )
  for stream in (sys.stdout, sys.stderr):
    reconfigure = getattr(stream, 'reconfigure', None)
    if reconfigure is not None:
      # A name in another script must not end a program with a traceback.
      reconfigure(errors='backslashreplace')


def _flush() -> None:
  """Flushes standard output, if that is possible."""
  try:
    if sys.stdout is not None:
      sys.stdout.flush()
  except OSError:
    _drop_output()


def _drop_output() -> None:
  """Discards further output, which Python would complain about at exit."""
  with contextlib.suppress(OSError, ValueError):
    nowhere = os.open(os.devnull, os.O_WRONLY)
    # Python flushes standard output once more at exit.
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def _is_about_us(record: logging.LogRecord) -> bool:
  """Tells whether a user can do something about a message of TensorFlow."""
  # TFF's secure sums make assertions that nothing runs, each a page of this.
  return 'Object was never used' not in record.getMessage()


def quiet(verbose: bool = False) -> None:
  """Silences start-up messages. Call it before TensorFlow is imported."""
  if verbose:
    # What `import tff_fssl` has set. Another level is the user's.
    if os.environ.get('TF_CPP_MIN_LOG_LEVEL') == '3':
      del os.environ['TF_CPP_MIN_LOG_LEVEL']
    return
  logger = logging.getLogger('tensorflow')
  logger.setLevel(logging.ERROR)
  logger.addFilter(_is_about_us)
  # TFF, Keras and TFDS warn about each other's deprecated functions.
  warnings.filterwarnings('ignore', category=DeprecationWarning)
  warnings.filterwarnings('ignore', category=FutureWarning)


def exit_code(number: int | None) -> int:
  """Returns a shell's exit code: 130 for Ctrl-C, 143 for SIGTERM."""
  return 128 + (number or signal.SIGINT)


@contextlib.contextmanager
def exit_at_once(
  is_started: Callable[[], bool], close: Callable[[str], None]
) -> Iterator[None]:
  """Lets Ctrl-C and SIGTERM end the process without an exception.

  Libraries that are being imported swallow exceptions, and continue half made.

  Args:
    is_started: Whether Ctrl-C raises `KeyboardInterrupt` from now on.
    close: Called before the end, with the event in words.

  Yields:
    Once.
  """

  def handle(number: int, frame: types.FrameType | None) -> None:
    if number == signal.SIGINT and is_started():
      signal.default_int_handler(number, frame)
    for each in _SIGNALS:  # Another one must not interrupt this.
      signal.signal(each, signal.SIG_IGN)
    close('interrupted' if number == signal.SIGINT else 'terminated')
    os._exit(exit_code(number))

  ours = (signal.SIG_DFL, signal.default_int_handler)
  before = {number: signal.getsignal(number) for number in _SIGNALS}
  # Handlers of the user's own stay. Threads cannot set any.
  if threading.current_thread() is not threading.main_thread():
    before = {}
  before = {number: old for number, old in before.items() if old in ours}
  for number in before:
    signal.signal(number, handle)
  try:
    yield
  finally:
    for number, old in before.items():
      signal.signal(number, old)


async def run_until_stopped(
  logic: Coroutine[Any, Any, _T],
  stop: training_types.StopRequest,
  say: Callable[[str], None],
  clock: Callable[[], float] = time.monotonic,
) -> _T:
  """Runs `logic`, which signals can stop.

  The first Ctrl-C or SIGTERM sets `stop`: `logic` then finishes its round,
  saves and returns. The second cancels it. A third ends the process. A signal
  within `ONE_SIGNAL_SECS` of the last one that counted does not count.

  Args:
    logic: The coroutine to run.
    stop: Set by the first signal.
    say: Tells the user.
    clock: Gives seconds.

  Returns:
    The result of `logic`.

  Raises:
    asyncio.CancelledError: On the second signal.
  """
  task = asyncio.ensure_future(logic)
  loop = asyncio.get_running_loop()
  is_cancelled = False
  counted_at = float('-inf')

  def handle(number: int) -> None:
    nonlocal is_cancelled, counted_at
    now = clock()
    # The time is from the last signal that counted, so that a held-down Ctrl-C
    # counts again.
    if now - counted_at < ONE_SIGNAL_SECS:
      return
    counted_at = now
    if stop.signal is None:
      stop.set(number)
      say(
        f'{signal.Signals(number).name}: stopping after this round; to stop at'
        f' once, send it again after {ONE_SIGNAL_SECS:g} seconds or more.'
      )
    elif not is_cancelled:
      is_cancelled = True
      task.cancel()
    else:
      os._exit(exit_code(number))

  before = {number: signal.getsignal(number) for number in _SIGNALS}
  for number in _SIGNALS:
    loop.add_signal_handler(number, handle, number)
  try:
    return await task
  finally:
    for number, handler in before.items():
      loop.remove_signal_handler(number)
      signal.signal(number, handler)
