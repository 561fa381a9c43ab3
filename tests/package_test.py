"""`import tff_fssl as fssl`: what it gives, and what it costs."""

import os
import subprocess
import sys

import pytest

import tff_fssl as fssl

_HEAVY = ('tensorflow', 'tensorflow_federated', 'numpy')


@pytest.mark.parametrize('name', sorted(fssl._EXPORTED))
def test_every_name_resolves(name):
  value = getattr(fssl, name)
  assert value is getattr(fssl, name)
  assert name in dir(fssl)
  # A name stands for what its module calls so.
  module = sys.modules[fssl._EXPORTED[name]]
  assert value is module or value is getattr(module, name)


def test_every_algorithm_is_exported():
  for algorithm in fssl.REGISTRY.values():
    assert getattr(fssl, algorithm.hparams.__name__) is algorithm.hparams


def test_the_import_is_cheap():
  code = (
    'import sys; before = set(sys.modules); import tff_fssl as fssl; dir(fssl);'
    f' print(*({_HEAVY} & (set(sys.modules) - before)));'
    " print(fssl.REGISTRY['fl2'].name);"
    f' print(*({_HEAVY} & set(sys.modules)))'
  ).replace(str(_HEAVY), str(set(_HEAVY)))
  printed = subprocess.run(
    [sys.executable, '-c', code], capture_output=True, text=True, check=True
  ).stdout
  assert printed.splitlines() == ['', 'fl2', '']


@pytest.mark.parametrize(
  'code, variable, given, expected',
  [
    ('import tff_fssl', 'TF_CPP_MIN_LOG_LEVEL', None, '3'),
    ('import tff_fssl', 'TF_CPP_MIN_LOG_LEVEL', '1', '1'),
    # What --verbose calls.
    (
      'from tff_fssl.program import main; main.quiet(True)',
      'TF_CPP_MIN_LOG_LEVEL',
      None,
      'None',
    ),
    ('import tff_fssl', 'TF_ENABLE_ONEDNN_OPTS', None, '1'),
    ('import tff_fssl', 'TF_ENABLE_ONEDNN_OPTS', '0', '0'),
  ],
)
def test_tensorflow_is_silent_and_fast_unless_told_otherwise(
  code, variable, given, expected
):
  env = {n: value for n, value in os.environ.items() if n != variable}
  if given is not None:
    env[variable] = given
  code += f"; import os; print(os.environ.get('{variable}'))"
  printed = subprocess.run(
    [sys.executable, '-c', code],
    capture_output=True,
    text=True,
    check=True,
    env=env,
  ).stdout
  assert printed.strip() == expected


def test_other_names_are_errors():
  with pytest.raises(AttributeError, match='no attribute .REGISTER.*REGISTRY'):
    fssl.REGISTER  # noqa: B018
  assert not hasattr(fssl, 'registry_of_algorithms')
