"""`tff-fssl`: all programs as one command."""

from collections.abc import Callable, Sequence
import importlib
import sys
from typing import NoReturn

import tff_fssl
from tff_fssl.hparams import UsageError
from tff_fssl.hparams import closest
from tff_fssl.program import console
from tff_fssl.program import flags
from tff_fssl.program import main as main_lib
from tff_fssl.program import usage

# Program -> its purpose. Its function is `NAME_main`.
_PROGRAMS = {
  'train': 'Trains a model, or continues a run that was stopped.',
  'runs': 'Lists runs and their status.',
  'evaluate': 'Measures the accuracy of a run or of an exported model.',
  'predict': 'Predicts the classes of new files by a trained model.',
  'plot': 'Draws the curves of runs.',
  'compare': 'Compares runs over seeds, as tables.',
  'report': 'Reports on runs, as one HTML page.',
  'data': 'Lists the data sets, or looks one over.',
  'sweep': 'Searches flags by validation accuracy.',
  'papers': "Lists, explains, times and runs the rows of the papers' tables.",
  'partition': 'Draws, describes or compares partitions of the examples.',
  'deploy': 'Writes an algorithm as an app of a federation (Flower).',
  'algorithms': 'Lists the algorithms, or explains the one that is named.',
}
# The modules of those that others import, too. The rest are `NAME_main`.
_MODULES = {
  'runs': 'runs',
  'evaluate': 'evaluation',
  'plot': 'plots',
  'compare': 'compare',
  'report': 'report',
  'partition': 'partitions',
}
# The one program without a module of its own.
_CONFIGS = 'configs'
_ABOUT_CONFIGS = 'Lists the flagfiles that come with the package.'


def start() -> NoReturn:
  """Runs the console script `tff-fssl`, and ends the process."""
  console.name_programs('tff-fssl {}')
  main_lib.start(command_main)


def main() -> int:
  """Runs the console script from a file of a user's own.

  A Python file that ends in `sys.exit(cli.main())` is the same command, plus
  the algorithms, models and so on that the file has registered before.

  Returns:
    The exit code.
  """
  script = sys.argv[0]
  name = 'tff-fssl'
  # A user's own file that calls this function, not the console script.
  if script.endswith('.py'):
    name = f'python {script}'
  console.name_programs(f'{name} {{}}')
  return main_lib.run(command_main)


def load(program: str) -> Callable[[Sequence[str]], int]:
  """Imports the function of a program, such as 'train'."""
  # Only the program's own module: others import slow packages.
  name = f'{program}_main'
  module = importlib.import_module(
    f'tff_fssl.program.{_MODULES.get(program, name)}'
  )
  return getattr(module, name)


def command_main(argv: Sequence[str]) -> int:
  """Runs the program that the first argument names.

  Args:
    argv: The arguments.

  Returns:
    The exit code.

  Raises:
    UsageError: If the user has to put something right.
  """
  known = (*_PROGRAMS, _CONFIGS)
  allowed = f'{", ".join(known)} (--help explains them)'
  if not argv:
    raise UsageError(f'no program was named; give one of {allowed}')
  name, arguments = argv[0], argv[1:]
  if name in _PROGRAMS:
    return load(name)(arguments)
  if usage.wants_help([name]):
    console.show(_help())
  elif name == '--version':
    console.show(f'tff_fssl {tff_fssl.__version__}')
  elif name != _CONFIGS:
    raise UsageError(
      f'{name!r} is not a program; there are {allowed}{closest(name, known)}'
    )
  elif usage.wants_help(arguments):
    console.show(_help())
  elif arguments:
    raise UsageError(f'{arguments[0]!r}: {_CONFIGS} takes no arguments')
  else:
    console.show('\n'.join(flags.list_configs()))
  return main_lib.DONE


def _help() -> str:
  about = {**_PROGRAMS, _CONFIGS: _ABOUT_CONFIGS}
  return f"""\
usage: {console.command('PROGRAM')} [--FLAG=VALUE ...]

Federated semi-supervised learning on TensorFlow Federated.

Programs:
{console.table(about)}

train reads the flagfiles that come with the package from any folder:
  {console.command('train')} --flagfile=configs/quickstart.flags

Always:
  --help     Shows this; after a program's name, the program's flags.
  --version  Shows the version."""
