"""TFF 0.87 can be imported, and says what it lacks where that is used."""

import importlib.machinery
import os
import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest
import tensorflow_federated as tff

from tff_fssl import bridge
from tff_fssl.hparams import UsageError


def _run(code, **environment):
  done = subprocess.run(
    [sys.executable, '-c', code],
    env={**os.environ, **environment},
    capture_output=True,
    text=True,
    check=False,
  )
  return done.stdout.strip() or done.stderr.strip()


def test_tff_imports_without_what_nobody_calls():
  """And TensorFlow writes nothing, which `2>&1` would show here."""
  code = (
    'import os, sys; os.dup2(1, 2); import tff_fssl, tensorflow_federated;'
    "print([n for n in ('jax', 'vizier', 'tensorflow_model_optimization',"
    " 'tensorflow_probability') if n in sys.modules])"
  )
  assert _run(code, TF_CPP_MIN_LOG_LEVEL='3') == '[]'


_LOG = [
  'WARNING: All log messages before absl::InitializeLog() is called ...',
  'I0000 00:00:1795817197.073794     690 cudart_stub.cc:31] No CUDA drivers.',
  'W0000 00:00:1795817197.073794     690 a.cc:1] Odd.',
  'E0000 00:00:1795817197.073794     690 a.cc:1] Wrong.',
  'F0000 00:00:1795817197.073794     690 a.cc:1] No AVX instructions.',
  'ImportError: libc.so.6: version not found',
]


@pytest.mark.parametrize(
  'level, first', [('0', 0), ('1', 2), ('2', 3), ('3', 4), ('x', 0)]
)
def test_the_level_of_the_log_holds_while_libraries_load(level, first):
  """What is no log passes, though the process is aborted."""
  lines = '\n'.join(_LOG)
  code = (
    'import os; from tff_fssl import bridge\n'
    f'with bridge.quiet(): os.write(2, {lines!r}.encode()); os.abort()'
  )
  shown = _run(code, TF_CPP_MIN_LOG_LEVEL=level).splitlines()
  assert shown == _LOG[first:]


def test_stderr_is_as_before_when_libraries_are_loaded():
  code = (
    'import os; from tff_fssl import bridge\n'
    "with bridge.quiet(): os.write(2, b'during ')\n"
    "os.write(2, b'I0000 after')"
  )
  assert _run(code, TF_CPP_MIN_LOG_LEVEL='3') == 'during \nI0000 after'


def test_without_a_stderr_or_a_filter_libraries_load():
  code = (
    'import os; from tff_fssl import bridge\n'
    "os.environ['PATH'] = ''\n"
    "with bridge.quiet(): print('no grep', flush=True)\n"
    'os.close(2)\n'
    "with bridge.quiet(): print('no stderr')"
  )
  assert _run(code, TF_CPP_MIN_LOG_LEVEL='3') == 'no grep\nno stderr'


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


def test_use_of_any_part_of_a_stand_in_says_what_is_missing():
  (logic,) = (m for name, m in sys.modules.items() if 'vizier_program' in name)
  assert isinstance(logic.pyvizier, bridge._StandIn)
  vizier = bridge._stand_in('vizier', ['vizier.client.client_abc'])
  for module in vizier.values():
    with pytest.raises(ImportError, match='needs it for tff.*with_vizier'):
      module.anything.at_all()


@pytest.mark.slow
def test_an_installed_package_is_used(tmp_path):
  client = tmp_path / 'vizier' / 'client'
  client.mkdir(parents=True)
  (client / 'client_abc.py').write_text('TrialInterface = StudyInterface = 0')
  (client.parent / 'pyvizier.py').write_text('Measurement = "theirs"')
  code = (
    'import sys, tff_fssl, tensorflow_federated as tff;'
    'fn = tff.learning.programs.train_model_with_vizier;'
    'module = sys.modules[fn.__module__];'
    "print(module.pyvizier.Measurement, sys.modules['vizier'].__path__[0])"
  )
  path = os.pathsep.join([str(tmp_path), os.environ.get('PYTHONPATH', '')])
  assert _run(code, PYTHONPATH=path) == f'theirs {client.parent}'


def test_tff_finds_all_that_it_uses_of_tensorflow_privacy():
  package = sys.modules['tensorflow_privacy']
  names = {
    name
    for path in pathlib.Path(tff.__file__).parent.rglob('*.py')
    if 'import tensorflow_privacy as tfp' in (text := path.read_text())
    for name in re.findall(r'\btfp\.(\w+)', text)
  }
  assert len(names) > 10
  for name in names:
    try:
      assert getattr(package, name).__name__.endswith(name)
    except ModuleNotFoundError as error:
      # Of discrete noise, and of histograms.
      assert error.name in ('tensorflow_probability', 'distutils')
  with pytest.raises(AttributeError, match='NoSuchQuery'):
    package.NoSuchQuery  # noqa: B018


@pytest.mark.slow
def test_tff_can_be_imported_after_it_could_not_be():
  code = (
    'try: import tensorflow_federated\n'
    'except ImportError: print("failed")\n'
    'import tff_fssl, tensorflow_federated as tff\n'
    'print(tff.aggregators.DifferentiallyPrivateFactory.__name__)'
  )
  lines = _run(code).splitlines()
  assert lines == ['failed', 'DifferentiallyPrivateFactory']


@pytest.mark.parametrize(
  'name',
  [
    'tensorflow_federated',
    'tensorflow_privacy',
    'tensorflow_model_optimization',
  ],
)
def test_without_tff_the_line_that_installs_it_is_named(name, monkeypatch):
  def find_spec(asked, path=None, target=None):
    return None if asked == name else find(asked, path, target)

  finder = importlib.machinery.PathFinder
  find = finder.find_spec
  monkeypatch.setattr(finder, 'find_spec', staticmethod(find_spec))
  monkeypatch.delitem(sys.modules, name, raising=False)
  with pytest.raises(ModuleNotFoundError) as raised:
    if name == bridge.TFF:
      bridge._Finder().find_spec(name, None)
    with bridge.stand_ins():
      pass
  assert str(raised.value) == f'{name} is not installed: {bridge.INSTALL_TFF}'
  assert raised.value.name == bridge.TFF


def test_installing_twice_adds_one_finder():
  before = list(sys.meta_path)
  bridge.install()
  assert sys.meta_path == before


@pytest.mark.parametrize(
  'name, value', [('KERAS_BACKEND', 'jax'), ('TF_USE_LEGACY_KERAS', '1')]
)
def test_another_keras_is_refused(name, value, monkeypatch):
  monkeypatch.setenv(name, value)
  with pytest.raises(UsageError, match=f'{name}={value}: .* unset it'):
    with bridge.stand_ins():
      pass
