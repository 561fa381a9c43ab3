"""Runs the Python code of a page."""

import os
import subprocess
import sys

_TENSORFLOW_FIRST = (
  'import tensorflow',
  'import numpy as np\nimport tensorflow',
)


def run(code, repository, folder):
  """What the code prints, run with the package of `repository` in `folder`.

  It must not print errors, with the level of logs that users have.
  """
  env = {**os.environ, 'PYTHONPATH': str(repository)}
  env.pop('TF_CPP_MIN_LOG_LEVEL', None)
  done = subprocess.run(
    [sys.executable, '-c', code],
    cwd=folder,
    env=env,
    capture_output=True,
    text=True,
    check=False,
  )
  assert done.returncode == 0, done.stderr
  # TensorFlow, imported first, has spoken before it can be told to be quiet.
  assert not done.stderr or code.startswith(_TENSORFLOW_FIRST)
  return done.stdout
