"""Lets TensorFlow Federated 0.87 be imported beside today's packages.

TFF imports packages that nothing here calls, in versions that are not to be had
for today's Pythons. While TFF is imported, and only then, each of them that
cannot be imported is a stand-in, whose use says what is missing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
import contextlib
import importlib
import importlib.abc
import importlib.machinery
import sys
import types
from typing import Any

TFF = 'tensorflow_federated'
# Its metadata demand a Python below 3.12, and versions of 2023.
INSTALL_TFF = (
  'pip install --no-deps --ignore-requires-python tensorflow-federated==0.87.0'
  ' tensorflow-privacy==0.9.0'
)

# The modules that TFF imports -> what it needs them for.
STAND_INS = {
  'jax': 'tff.jax',
  'jax.lib.xla_client': 'tff.jax',
  'tensorflow_model_optimization.python.core.internal.tensor_encoding': (
    'tff.aggregators.EncodedSumFactory'
  ),
  'vizier.client.client_abc': 'tff.learning.programs.train_model_with_vizier',
  'vizier.pyvizier': 'tff.learning.programs.train_model_with_vizier',
}
# TFF's mechanisms of differential privacy are classes of these modules. The
# package itself imports estimators, which TensorFlow no longer has.
_QUERIES = 'tensorflow_privacy.privacy.dp_query'
_QUERY_MODULES = (
  'dp_query',
  'gaussian_query',
  'no_privacy_query',
  'normalized_query',
  'quantile_adaptive_clip_sum_query',
  'quantile_estimator_query',
)


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
    package = self._module.partition('.')[0]
    raise ImportError(
      f'{self._name} was called, but {package} is not installed (or too new);'
      f' TensorFlow Federated 0.87 needs it for {STAND_INS[self._module]}'
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


def _empty_privacy() -> types.ModuleType:
  """Makes a `tensorflow_privacy` without names, whose modules are there."""
  spec = importlib.machinery.PathFinder.find_spec('tensorflow_privacy')
  if spec is None:
    raise ImportError(
      'tensorflow-privacy is not installed: pip install --no-deps'
      ' tensorflow-privacy==0.9.0'
    )
  package = types.ModuleType(spec.name)
  package.__path__ = list(spec.submodule_search_locations or ())
  return package


def _add_queries(package: types.ModuleType) -> None:
  """Adds the classes that TFF uses to an empty `tensorflow_privacy`."""
  for name in _QUERY_MODULES:
    module = importlib.import_module(f'{_QUERIES}.{name}')
    for key, value in vars(module).items():
      if isinstance(value, type) and value.__module__ == module.__name__:
        setattr(package, key, value)


@contextlib.contextmanager
def stand_ins() -> Iterator[None]:
  """Enters a context in which what TFF imports and nobody calls is there."""
  global _importing
  added: dict[str, types.ModuleType] = {}
  packages: dict[str, list[str]] = {}
  for module in STAND_INS:
    packages.setdefault(module.partition('.')[0], []).append(module)
  for name, needed in packages.items():
    if not all(map(_is_there, needed)):
      added |= _stand_in(name, needed)
  if 'tensorflow_privacy' not in sys.modules:
    added['tensorflow_privacy'] = _empty_privacy()
  before = {name: sys.modules.get(name) for name in added}
  sys.modules.update(added)
  _importing = True
  try:
    if 'tensorflow_privacy' in added:
      _add_queries(added['tensorflow_privacy'])
    yield
  finally:
    _importing = False
    # Others that look for these packages must not find them.
    for name, module in before.items():
      if module is None:
        sys.modules.pop(name, None)
      else:
        sys.modules[name] = module


class _Loader(importlib.abc.Loader):
  """Loads TFF as its own loader does, with stand-ins."""

  def __init__(self, loader: importlib.abc.Loader):
    self._loader = loader

  def create_module(self, spec: Any) -> types.ModuleType | None:
    return self._loader.create_module(spec)

  def exec_module(self, module: types.ModuleType) -> None:
    with stand_ins():
      self._loader.exec_module(module)

  def __getattr__(self, name: str) -> Any:
    # `importlib.resources` and `inspect` ask for more.
    return getattr(self._loader, name)


class _Finder(importlib.abc.MetaPathFinder):
  """Finds TFF, and says how to install it if it is not there."""

  def find_spec(
    self, name: str, path: Any, target: Any = None
  ) -> importlib.machinery.ModuleSpec | None:
    if name != TFF:
      return None
    others = (finder for finder in sys.meta_path if finder is not self)
    specs = (finder.find_spec(name, path, target) for finder in others)
    spec = next((spec for spec in specs if spec), None)
    if spec is None or spec.loader is None:
      raise ModuleNotFoundError(
        f'TensorFlow Federated is not installed: {INSTALL_TFF}', name=name
      )
    spec.loader = _Loader(spec.loader)
    return spec


def install() -> None:
  """Has imports of TFF go through this module from now on."""
  if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
    sys.meta_path.insert(0, _Finder())
