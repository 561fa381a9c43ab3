"""The Python files of the source tree, and what each of them imports.

tests/architecture_test.py checks the layers with it, tests/build_test.py the
requirements.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
import dataclasses
import functools
import pathlib

FOLDERS = ('tff_fssl', 'programs', 'benchmarks', 'examples', 'tests', 'tools')
# Folders whose files are imported by their bare names: `pythonpath` in
# pyproject.toml, except the root; and benchmarks, which import each other.
_PATH = ('tests/helpers', 'tools', 'benchmarks')
# The package, and its table of names that it imports when they are used.
_PACKAGE, _TABLE = 'tff_fssl', '_EXPORTED'
# What `from tff_fssl.lazy import ...` imports on first use.
_LAZY = {
  'tff_fssl.lazy.np': 'numpy',
  'tff_fssl.lazy.tf': 'tensorflow',
  'tff_fssl.lazy.tff': 'tensorflow_federated',
}


@dataclasses.dataclass(frozen=True)
class Source:
  """A Python file.

  Attributes:
    path: Relative to the root, with slashes.
    module: The name by which others import it.
    text: Its text.
  """

  path: str
  module: str
  text: str

  @functools.cached_property
  def tree(self) -> ast.Module:
    """Its syntax tree."""
    return ast.parse(self.text, self.path)

  @property
  def folder(self) -> str:
    """The folder that it is in, relative to the root."""
    return self.path.rpartition('/')[0]


def _module(path: pathlib.PurePath) -> str:
  if str(path.parent) in _PATH:
    return path.stem
  parts = path.with_suffix('').parts
  return '.'.join(parts[:-1] if parts[-1] == '__init__' else parts)


class SourceTree:
  """All Python files below a root."""

  def __init__(self, root: pathlib.Path):
    """Reads the files.

    Args:
      root: The folder that holds `FOLDERS`.
    """
    paths = [p for f in FOLDERS for p in sorted((root / f).rglob('*.py'))]
    sources = [
      Source(p.as_posix(), _module(p), (root / p).read_text('utf-8'))
      for p in (path.relative_to(root) for path in paths)
    ]
    self.sources = {source.module: source for source in sources}
    if len(self.sources) < len(sources):
      raise ValueError('two files are imported by the same name')

  def imports(self, source: Source, *, deferred: bool = True) -> set[str]:
    """Names of the modules that a file imports.

    Args:
      source: The file.
      deferred: Whether imports within functions, those for types only, and
        those by `tff_fssl.lazy` count.

    Returns:
      The full names of modules of this tree, together with the packages that
      contain them (and those that contain the file itself); other modules as
      they are written.
    """
    result = set()
    names = {*_imported_names(source.tree, deferred), source.module}
    if deferred:
      names |= {_LAZY[name] for name in names & _LAZY.keys()}
    for name in names | self._lazily_imported(source):
      if name not in self.sources:
        # The name may be one that the module defines.
        parent = name.rpartition('.')[0]
        name = parent if parent in self.sources else name
      parts = name.split('.')
      packages = {'.'.join(parts[:i]) for i in range(1, len(parts))}
      result |= {name} | (packages & self.sources.keys())
    return result - {source.module}

  def _lazily_imported(self, source: Source) -> set[str]:
    """Modules behind the names `fssl.NAME` of `import tff_fssl as fssl`."""
    nodes = list(ast.walk(source.tree))
    aliases = {
      alias.asname
      for node in nodes
      if isinstance(node, ast.Import)
      for alias in node.names
      if alias.name == _PACKAGE and alias.asname
    }
    used = {
      node.attr
      for node in nodes
      if isinstance(node, ast.Attribute)
      and isinstance(node.value, ast.Name)
      and node.value.id in aliases
    }
    if not used:
      return set()
    table = next(
      node.value
      for node in self.sources[_PACKAGE].tree.body
      if isinstance(node, ast.Assign)
      and [ast.unparse(target) for target in node.targets] == [_TABLE]
    )
    return {m for n, m in ast.literal_eval(table).items() if n in used}


def _is_deferred(node: ast.AST) -> bool:
  """Whether a statement's body is not run when its module is imported."""
  if isinstance(node, ast.If) and isinstance(node.test, ast.Name):
    return node.test.id == 'TYPE_CHECKING'
  return isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))


def _imported_names(tree: ast.Module, deferred: bool) -> Iterator[str]:
  """Dotted names: of `from a import b`, `a.b`."""
  todo: list[ast.AST] = [tree]
  while todo:
    node = todo.pop()
    if isinstance(node, ast.Import):
      yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
      if node.level or not node.module:
        raise ValueError(f'line {node.lineno}: a relative import')
      yield from (f'{node.module}.{alias.name}' for alias in node.names)
    elif deferred or not _is_deferred(node):
      todo.extend(ast.iter_child_nodes(node))
