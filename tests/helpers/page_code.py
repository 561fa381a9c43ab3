"""Runs the Python code of a page."""

import os
import subprocess
import sys


def run(code, repository, folder):
  """What the code prints, run with the package of `repository` in `folder`."""
  done = subprocess.run(
    [sys.executable, '-c', code],
    cwd=folder,
    env={**os.environ, 'PYTHONPATH': str(repository)},
    capture_output=True,
    text=True,
    check=False,
  )
  assert done.returncode == 0, done.stderr
  return done.stdout
