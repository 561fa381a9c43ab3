"""TFF 0.87 can be imported, and says what it lacks where that is used."""

import re
import subprocess
import sys

import numpy as np
import pytest
import tensorflow_federated as tff

from tff_fssl import bridge


def _run(code):
  done = subprocess.run(
    [sys.executable, '-c', code], capture_output=True, text=True, check=False
  )
  return done.stdout.strip() or done.stderr.strip()


def test_tff_imports_without_what_nobody_calls():
  code = (
    'import sys, tff_fssl, tensorflow_federated;'
    'names = sys.argv[1:];'
    "print([n for n in ('jax', 'vizier', 'tensorflow_model_optimization',"
    " 'tensorflow_privacy', 'tensorflow_probability') if n in sys.modules])"
  )
  assert _run(code) == '[]'


_PACKAGES = sorted({name.partition('.')[0] for name in bridge.STAND_INS})


@pytest.mark.slow
@pytest.mark.parametrize('package', _PACKAGES)
def test_each_stand_in_is_needed(package):
  """A stand-in for what TFF no longer imports should go."""
  code = (
    'import sys; from tff_fssl import bridge;'
    f'ours = [n for n in bridge.STAND_INS if n.split(".")[0] == {package!r}];'
    '[bridge.STAND_INS.pop(name) for name in ours];'
    f'sys.modules[{package!r}] = None;'
    'import tensorflow_federated'
  )
  assert re.search(rf'(ModuleNotFound|Import)Error: .*{package}', _run(code))


def test_use_of_a_stand_in_says_what_is_missing():
  with pytest.raises(ImportError, match=r'jax.* is not installed .* tff\.jax'):
    tff.jax.computation(lambda x: x, np.int32)


def test_without_tff_the_line_that_installs_it_is_named():
  code = (
    'import sys; from tff_fssl import bridge; sys.meta_path[1:] = [];'
    'import tensorflow_federated'
  )
  assert _run(code).endswith(bridge.INSTALL_TFF)


def test_installing_twice_adds_one_finder():
  before = list(sys.meta_path)
  bridge.install()
  assert sys.meta_path == before
