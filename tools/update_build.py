"""Writes BUILD.bazel from the imports of the source tree: `make build-file`.

A library for each layer of the package and for each folder's test helpers, a
binary for each program, a test for each test file. Dependencies are what the
files import.
"""

import pathlib
import sys

import source_tree

_RUNNER = 'tests/run_pytest.py'
_HEADER = """\
# Made from the imports by `make build-file`, which a test runs: do not edit.

load("@rules_python//python:py_binary.bzl", "py_binary")
load("@rules_python//python:py_library.bzl", "py_library")
load("@rules_python//python:py_test.bzl", "py_test")

package(default_visibility = ["//visibility:public"])

filegroup(
    name = "project",
    srcs = glob([
        "benchmarks/**",
        "configs/**",
        "programs/**",
        "requirements*",
        "tests/**/*.py",
        "tff_fssl/**/*.j2",
        "tff_fssl/**/*.py",
        "tools/**",
    ]) + [
        "BUILD.bazel",
        "CHANGELOG.md",
        "CITATION.cff",
        "LICENSE",
        "MODULE.bazel",
        "Makefile",
        "README.md",
        "pyproject.toml",
        "setup.py",
        "tff_fssl/py.typed",
    ],
)
"""
# Modules whose package on the index has another name.
DISTRIBUTIONS = {
  'PIL': 'pillow',
  'absl': 'absl-py',
  'dp_accounting': 'dp-accounting',
  'google.protobuf': 'protobuf',
  'grpc': 'grpcio',
  'ml_dtypes': 'ml-dtypes',
  'sklearn': 'scikit-learn',
  'tensorflow_datasets': 'tensorflow-datasets',
  'tensorflow_federated': 'tensorflow-federated',
  'tree': 'dm-tree',
}
# Folders of programs: a binary for each file.
_PROGRAMS = ('programs', 'benchmarks', 'examples')
# Programs whose own names are those of libraries.
_RENAMED = {
  'programs/algorithms.py': 'list_algorithms',
  'programs/data.py': 'look_at_data',
}
# Library -> what it reads besides its modules.
_DATA = {
  'program': [
    f'tff_fssl/program/reporting/{name}.j2'
    for name in ('model_card.md', 'report.html')
  ]
}
# Modules that benchmarks/peers.py installs into an environment of its own.
_ELSEWHERE = ('pfl',)
# Packages that are only in requirements-dev.txt.
_DEVELOPMENT = ('hypothesis', 'pytest')


def distribution(module: str) -> str | None:
  """The package on the index that contains a module.

  Args:
    module: A dotted name that is not of this source tree.

  Returns:
    The package's name, or None if the module is in Python's library, or not in
    this project's environment.
  """
  if module.startswith('google.protobuf'):
    return DISTRIBUTIONS['google.protobuf']
  top = module.partition('.')[0]
  if top in sys.stdlib_module_names or top in _ELSEWHERE:
    return None
  return DISTRIBUTIONS.get(top, top)


def _is_test(source: source_tree.Source) -> bool:
  return source.path.endswith('_test.py')


def target_name(source: source_tree.Source) -> str:
  """The target that a file belongs to."""
  stem = source.path.rpartition('/')[2].removesuffix('.py')
  folders = source.folder.split('/')
  if folders[0] in (*_PROGRAMS, 'tools'):
    return _RENAMED.get(source.path, stem)
  if folders[0] == 'tests':
    return '_'.join(
      [*folders[1:], stem if _is_test(source) else 'test_support']
    )
  return folders[min(1, len(folders) - 1)]


def _rule(kind: str, **attributes: str | bool | list[str]) -> str:
  lines = []
  for name, value in attributes.items():
    if isinstance(value, list) and len(value) > 1:
      items = ''.join(f'        "{item}",\n' for item in value)
      lines.append(f'    {name} = [\n{items}    ],\n')
    elif isinstance(value, list) and value:
      lines.append(f'    {name} = ["{value[0]}"],\n')
    elif isinstance(value, bool):
      lines.append(f'    {name} = {value},\n')
    elif value:
      lines.append(f'    {name} = "{value}",\n')
  return f'\n{kind}(\n{"".join(lines)})\n'


def _label(package: str) -> str:
  hub = 'pypi_dev' if package in _DEVELOPMENT else 'pypi'
  return f'@{hub}//{package.replace("-", "_")}'


def _dependencies(
  tree: source_tree.SourceTree, name: str, members: list[source_tree.Source]
) -> list[str]:
  """Labels of what a target's files need; those of this tree come first."""
  modules = {m for s in members for m in tree.imports(s)}
  # pytest loads the conftest.py files of a test's folder and those above it.
  folders = {s.folder for s in members if s.path.startswith('tests/')}
  modules |= {
    s.module
    for s in tree.sources.values()
    if s.path.endswith('/conftest.py')
    and any(f'{f}/'.startswith(f'{s.folder}/') for f in folders)
  }
  own = {target_name(tree.sources[m]) for m in modules if m in tree.sources}
  others = {distribution(m) for m in modules if m not in tree.sources}
  if any(_is_test(s) for s in members):
    others.add('pytest')
  return [
    *(f':{target}' for target in sorted(own - {name})),
    *(_label(other) for other in sorted(filter(None, others))),
  ]


def render(tree: source_tree.SourceTree) -> str:
  """The text of BUILD.bazel.

  Args:
    tree: The source tree.

  Returns:
    The text; targets are in the order of the folders.
  """
  targets: dict[str, list[source_tree.Source]] = {}
  for source in tree.sources.values():
    if source.path != _RUNNER:
      targets.setdefault(target_name(source), []).append(source)
  text = _HEADER
  for name, members in targets.items():
    paths = sorted(source.path for source in members)
    folder = members[0].folder
    deps = _dependencies(tree, name, members)
    if _is_test(members[0]):
      whole = folder == 'tests' or folder.startswith('tests/program')
      text += _rule(
        'py_test',
        name=name,
        srcs=[*paths, _RUNNER],
        args=paths,
        data=[':project' if whole else 'pyproject.toml'],
        main=_RUNNER,
        deps=deps,
      )
    elif folder in _PROGRAMS:
      main = paths[0] if paths[0] in _RENAMED else ''
      text += _rule('py_binary', name=name, srcs=paths, main=main, deps=deps)
    else:
      by_bare_name = any('.' not in s.module for s in members)
      text += _rule(
        'py_library',
        name=name,
        **({'testonly': True} if folder.startswith('tests') else {}),
        srcs=paths,
        data=_DATA.get(name, []),
        imports=[folder] if by_bare_name and folder != 'tff_fssl' else [],
        deps=deps,
      )
  return text


if __name__ == '__main__':
  root = pathlib.Path(__file__).resolve().parents[1]
  build = root / 'BUILD.bazel'
  build.write_text(render(source_tree.SourceTree(root)), 'utf-8')
