"""A check that this Python can run the programs, which any Python 3.6 runs."""

import importlib.machinery
import os
import shlex
import sys

_LEAST, _BELOW = (3, 11), (3, 14)
# All other dependencies are installed together with these.
_NEEDED = ('absl', 'numpy', 'tensorflow', 'tensorflow_federated', 'tqdm')


def check() -> None:
  """Ends the program with a line that says what to do, if it cannot run."""
  problem = find_problem(sys.version_info[:2])
  if problem:
    sys.stderr.write(f'error: {problem}\n')
    sys.exit(2)


def find_problem(version: 'tuple[int, int]') -> str:
  """Describes in one line why this Python cannot run the programs, or ''."""
  find = importlib.machinery.PathFinder.find_spec
  lacking = [name for name in _NEEDED if find(name) is None]
  if _LEAST <= version < _BELOW and not lacking:
    return ''
  problem = f'has no {lacking[0]}' if lacking else ''
  if not _LEAST <= version < _BELOW:
    problem = f'is {version[0]}.{version[1]}; needed is 3.11, 3.12 or 3.13'
  root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
  python = os.path.join(root, '.venv', 'bin', 'python')
  way = '' if os.path.exists(python) else f'`make setup` in {root}, then '
  words = ' '.join(map(shlex.quote, [python] + sys.argv))
  return f'this Python ({sys.executable}) {problem}; run {way}{words}'
