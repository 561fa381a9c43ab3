"""A Python that cannot run the programs is told what to do, in one line."""

import ast
import subprocess
import sys

from tff_fssl import this_python

_ADVICE = 'programs/train.py --seed=3'


def test_this_python_can():
  assert this_python.find_problem(sys.version_info[:2]) == ''


def test_other_versions(monkeypatch):
  monkeypatch.setattr('sys.argv', _ADVICE.split())
  for version in ((3, 6), (3, 10), (3, 14), (4, 0)):
    problem = this_python.find_problem(version)
    words = (
      f') is {version[0]}.{version[1]}; needed is 3.11, 3.12 or 3.13; run '
    )
    assert words in problem and problem.endswith(f'.venv/bin/python {_ADVICE}')
  for version in ((3, 11), (3, 12), (3, 13)):
    assert this_python.find_problem(version) == ''


def test_every_program_says_what_a_python_without_packages_lacks(repository):
  programs = sorted((repository / 'programs').glob('*.py'))
  assert len(programs) > 9
  for path in programs:
    name = f'programs/{path.name}'
    done = subprocess.run(
      # Without `site` there are no packages.
      [sys.executable, '-S', name, '--seed=3'],
      cwd=repository,
      env={},
      capture_output=True,
      text=True,
      check=False,
    )
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2 and line.startswith('error: this Python (')
    assert ') has no absl; run ' in line and line.endswith(f'{name} --seed=3')


def test_old_pythons_can_read_what_says_so(repository):
  paths = [
    *(repository / 'programs').glob('*.py'),
    *(repository / 'tff_fssl' / f for f in ('__init__.py', 'this_python.py')),
  ]
  for path in paths:
    ast.parse(path.read_text(), feature_version=(3, 6))
