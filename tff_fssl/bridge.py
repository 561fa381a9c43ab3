"""Lets TensorFlow Federated 0.87 be imported beside today's packages.

TFF imports packages that nothing here calls, in versions that are not to be had
for today's Pythons. While TFF is imported, and only then, each of them that
cannot be imported is a stand-in, whose use says what is missing. TensorFlow
itself is imported without what its libraries log while they load.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
import contextlib
import importlib
import os
import sys
import types
from typing import TYPE_CHECKING, Any

from tff_fssl.hparams import UsageError

if TYPE_CHECKING:
  # Only annotations need these, and they load slowly.
  import importlib.abc
  import importlib.machinery

TFF = 'tensorflow_federated'
# Their metadata demand a Python below 3.12, and versions of 2023.
INSTALL_TFF = (
  'pip install --no-deps --ignore-requires-python tensorflow-federated==0.87.0'
  ' tensorflow-model-optimization==0.8.0 tensorflow-privacy==0.9.0'
)

# The modules that TFF imports -> what it needs them for.
STAND_INS = {
  'jax': 'tff.jax',
  'jax.lib.xla_client': 'tff.jax',
  'vizier.client.client_abc': 'tff.learning.programs.train_model_with_vizier',
  'vizier.pyvizier': 'tff.learning.programs.train_model_with_vizier',
}


def _package(module: str) -> str:
  return module.partition('.')[0]


class _Missing:
  """A name of a module that is not there; its attributes are such names."""

  def __init__(self, module: str, name: str):
    self._module = module
    self._name = name

  def __getattr__(self, name: str) -> _Missing:
    if name.startswith('__'):
      raise AttributeError(name)
    return _Missing(self._module, f'{self._name}.{name}')

  def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
    """Makes a class that derives from this name derive from nothing."""
    return ()

  def __call__(self, *args: Any, **kwargs: Any) -> Any:
    """Raises `ImportError`; TFF's own decorators and registrations pass."""
    if _importing:
      return args[0] if args else None
    package = _package(self._module)
    (use,) = {
      use for name, use in STAND_INS.items() if _package(name) == package
    }
    raise ImportError(
      f'{self._name} was called, but {package} is not installed (or too new);'
      f' TensorFlow Federated 0.87 needs it for {use}'
    )


class _StandIn(types.ModuleType):
  """A module that is not there, whose names may be read but not called."""

  def __getattr__(self, name: str) -> _Missing:
    if name.startswith('__'):
      raise AttributeError(name)
    return _Missing(self.__name__, f'{self.__name__}.{name}')


# Whether TFF is being imported.
_importing = False


def _is_there(name: str) -> bool:
  """Tells whether a module can be imported, and imports it."""
  try:
    importlib.import_module(name)
  except Exception:  # Whatever is wrong with it, TFF could not use it either.
    return False
  return True


def _stand_in(name: str, needed: Sequence[str]) -> dict[str, types.ModuleType]:
  """Makes stand-ins of a package's modules, and of all packages above them."""
  modules: dict[str, types.ModuleType] = {}
  for module in needed:
    parts = module.split('.')
    for end in range(1, len(parts) + 1):
      path = '.'.join(parts[:end])
      if path not in modules:
        modules[path] = _StandIn(path)
        modules[path].__path__ = []
      if end > 1:
        setattr(
          modules['.'.join(parts[: end - 1])], parts[end - 1], modules[path]
        )
  return modules


def _add_optimization() -> dict[str, types.ModuleType]:
  """Makes a `tensorflow_model_optimization` without names, if there is none.

  TFF compresses by modules in it. Itself, it imports Keras 2.
  """
  name = 'tensorflow_model_optimization'
  if name in sys.modules:
    return {}
  package = types.ModuleType(name)
  package.__path__ = list(_require(name).submodule_search_locations or ())
  return {name: package}


def _import_privacy() -> None:
  """Imports tensorflow-privacy without its names, until one of them is read.

  TFF's mechanisms of differential privacy are classes of it. Its other names
  need estimators, which TensorFlow no longer has, and tensorflow-probability.
  """
  _require('tensorflow_privacy')
  # pylint: disable=import-outside-toplevel
  import ast
  import inspect

  sys.skip_tf_privacy_import = True  # type: ignore[attr-defined]
  try:
    package = importlib.import_module('tensorflow_privacy')
  finally:
    del sys.skip_tf_privacy_import  # type: ignore[attr-defined]
  modules = {
    alias.name: node.module
    for node in ast.walk(ast.parse(inspect.getsource(package)))
    if isinstance(node, ast.ImportFrom) and node.module
    for alias in node.names
  }

  def find(name: str) -> Any:
    if name not in modules:
      raise AttributeError(f'tensorflow_privacy has no attribute {name!r}')
    return getattr(__import__(modules[name], fromlist=[name]), name)

  package.__getattr__ = find  # type: ignore[method-assign]


def _check_keras() -> None:
  """Refuses environments in which `tf.keras` is not Keras 3 on TensorFlow."""
  wanted = {'KERAS_BACKEND': 'tensorflow', 'TF_USE_LEGACY_KERAS': '0'}
  for name, value in wanted.items():
    given = os.environ.get(name, value)
    if given.lower() != value:
      raise UsageError(
        f'{name}={given}: models are of Keras 3, on TensorFlow; unset it'
      )


@contextlib.contextmanager
def stand_ins() -> Iterator[None]:
  """Enters a context in which what TFF imports and nobody calls is there."""
  global _importing
  _check_keras()
  # These must not find stand-ins, so that they are imported before.
  importlib.import_module('tensorflow').keras  # noqa: B018
  _import_privacy()
  added = _add_optimization()
  # An import that failed, before this module was there, leaves parts of TFF.
  for name in [name for name in sys.modules if name.startswith(f'{TFF}.')]:
    del sys.modules[name]
  packages: dict[str, list[str]] = {}
  for module in STAND_INS:
    packages.setdefault(_package(module), []).append(module)
  for name, needed in packages.items():
    if not all(map(_is_there, needed)):
      added |= _stand_in(name, needed)
  before = {name: sys.modules[name] for name in added if name in sys.modules}
  sys.modules.update(added)
  _importing = True
  try:
    yield
  finally:
    _importing = False
    # Others that look for these packages must not find them.
    for name in added:
      del sys.modules[name]
    sys.modules.update(before)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
  """Enters a context in which `TF_CPP_MIN_LOG_LEVEL` holds for libraries.

  TensorFlow 2.21 heeds it once it is imported; what its libraries log while
  they load goes to descriptor 2. Meanwhile `grep` stands there, and lets
  everything else pass, even when the process is aborted.
  """
  level = os.environ.get('TF_CPP_MIN_LOG_LEVEL', '0')
  severities = 'IWE'[: int(level) if level.isdecimal() else 0]
  log = f'^([{severities}][0-9]{{4}} |WARNING: All log messages before absl::)'
  command = ['grep', '--text', '--line-buffered', '-vE', log]
  with contextlib.ExitStack() as stack:
    # Without `grep`, or without a descriptor 2, the log remains.
    with contextlib.suppress(OSError):
      if severities:
        stack.enter_context(_filter_stderr(command))
    yield


@contextlib.contextmanager
def _filter_stderr(command: Sequence[str]) -> Iterator[None]:
  """Enters a context in which what goes to descriptor 2 goes through a filter.

  Args:
    command: The filter: a program and its arguments.

  Raises:
    OSError: It cannot be started, or there is no such descriptor.
  """
  import subprocess  # pylint: disable=import-outside-toplevel

  stderr = os.dup(2)
  try:
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=stderr)
    assert process.stdin is not None
    with process.stdin as pipe:
      os.dup2(pipe.fileno(), 2)
    try:
      yield
    finally:
      os.dup2(stderr, 2)
      # What other threads have started meanwhile may still write through it.
      with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=1)
  finally:
    os.close(stderr)


# Module -> the context in which it is imported.
_CONTEXTS = {'tensorflow': quiet, TFF: stand_ins}


class _Loader:
  """Loads a module as its own loader does, in its context."""

  def __init__(self, loader: importlib.abc.Loader):
    self._loader = loader

  def create_module(
    self, spec: importlib.machinery.ModuleSpec
  ) -> types.ModuleType | None:
    return self._loader.create_module(spec)

  def exec_module(self, module: types.ModuleType) -> None:
    assert module.__spec__ is not None
    # `importlib.resources` and `inspect` ask it for more.
    module.__spec__.loader = module.__loader__ = self._loader
    with _CONTEXTS[module.__name__]():
      self._loader.exec_module(module)


def _find(name: str) -> importlib.machinery.ModuleSpec | None:
  """Finds a package as Python does without this module."""
  others = (find for find in sys.meta_path if not isinstance(find, _Finder))
  specs = (finder.find_spec(name, None) for finder in others)
  return next((spec for spec in specs if spec), None)


def _require(name: str) -> importlib.machinery.ModuleSpec:
  """Finds TFF or what it calls, or says how to install it."""
  spec = _find(name)
  if spec is None:
    # With TFF's name, since it is TFF that cannot be imported.
    raise ModuleNotFoundError(
      f'{name} is not installed: {INSTALL_TFF}', name=TFF
    )
  return spec


class _Finder:
  """Finds TensorFlow and TFF, which their contexts load."""

  def find_spec(
    self, name: str, path: Any, target: Any = None
  ) -> importlib.machinery.ModuleSpec | None:
    if name not in _CONTEXTS:
      return None
    spec = _require(name) if name == TFF else _find(name)
    if spec is not None and spec.loader is not None:
      spec.loader = _Loader(spec.loader)  # type: ignore[assignment]
    return spec


def install() -> None:
  """Has imports of TensorFlow and TFF go through this module from now on."""
  if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
    sys.meta_path.insert(0, _Finder())
