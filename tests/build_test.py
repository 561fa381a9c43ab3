"""BUILD.bazel and the requirements agree with the sources."""

import ast
import graphlib
import re

import pytest
import source_tree
import update_build

import tff_fssl

_RUNNER = 'tests/run_pytest.py'


@pytest.fixture(scope='module')
def tree(repository):
  return source_tree.SourceTree(repository)


@pytest.fixture(scope='module')
def targets(repository):
  """Target name -> its rule's name and its literal attributes."""
  result = {}
  for node in ast.parse((repository / 'BUILD.bazel').read_text()).body:
    call = node.value
    if isinstance(call, ast.Call) and call.func.id.startswith('py_'):
      rule = {k.arg: ast.literal_eval(k.value) for k in call.keywords}
      assert rule['name'] not in result
      result[rule['name']] = {'kind': call.func.id, **rule}
  return result


def test_build_file_is_up_to_date(repository, tree):
  current = (repository / 'BUILD.bazel').read_text()
  assert current == update_build.render(tree), 'run `make build-file`'


def test_every_file_is_in_one_target(targets, tree):
  # The tests' runner is in each of them: Bazel wants `main` among `srcs`.
  listed = [p for t in targets.values() for p in t['srcs'] if p != _RUNNER]
  paths = [s.path for s in tree.sources.values() if s.path != _RUNNER]
  assert sorted(listed) == sorted(paths)


def test_every_test_file_is_a_test(targets, tree):
  tests = {p for t in targets.values() for p in t.get('args', ())}
  paths = {s.path for s in tree.sources.values()}
  assert tests == {p for p in paths if p.endswith('_test.py')}


def test_dependencies_exist_and_have_no_cycle(targets):
  graph = {
    name: [d[1:] for d in rule.get('deps', ()) if d.startswith(':')]
    for name, rule in targets.items()
  }
  assert {d for deps in graph.values() for d in deps} <= graph.keys()
  graphlib.TopologicalSorter(graph).prepare()


def test_dependencies_are_the_imports(tmp_path):
  files = {
    'tff_fssl/__init__.py': '',
    'tff_fssl/data/__init__.py': '',
    'tff_fssl/data/a.py': 'import os\nimport sklearn.datasets',
    'tff_fssl/models/b.py': 'def f():\n  from tff_fssl.data.a import x',
    'programs/train.py': 'from tff_fssl.models import b',
    'tests/conftest.py': 'import pytest',
    'tests/data/conftest.py': 'import numpy as np',
    'tests/data/a_test.py': 'from tff_fssl.data import a\nimport tool',
    'tools/tool.py': '',
  }
  for path, text in files.items():
    (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / path).write_text(text)
  text = update_build.render(source_tree.SourceTree(tmp_path))
  deps = {}
  for name, rule in re.findall(r'name = "(\w+)",(.*?)\n\)', text, re.DOTALL):
    if 'deps' in rule:
      deps[name] = re.findall(r'"([:@][^"]+)"', rule.split('deps =')[1])
  assert deps == {
    'data': [':tff_fssl', '@pypi//scikit_learn'],
    'models': [':data', ':tff_fssl'],
    'train': [':models', ':tff_fssl'],
    'test_support': ['@pypi_dev//pytest'],
    'data_test_support': [':test_support', '@pypi//numpy'],
    'data_a_test': [
      ':data',
      ':data_test_support',
      ':test_support',
      ':tff_fssl',
      ':tool',
      '@pypi_dev//pytest',
    ],
  }


def _required(text):
  return set(re.findall(r'^ *"?([a-z][a-z0-9-]*)', text, re.MULTILINE))


def test_what_is_imported_is_required(repository, tree):
  project = (repository / 'pyproject.toml').read_text()
  project = re.search(r'\ndependencies = \[(.*?)\n\]', project, re.DOTALL)[1]
  required = _required((repository / 'requirements.in').read_text())
  for_tests = _required((repository / 'requirements-dev.in').read_text())
  for source in tree.sources.values():
    modules = tree.imports(source) - tree.sources.keys()
    packages = {update_build.distribution(m) for m in modules} - {None}
    if source.path.startswith('tff_fssl'):
      assert packages <= required & _required(project), source.path
    else:
      assert packages <= required | for_tests, source.path


@pytest.mark.parametrize(
  'lock',
  [
    f'requirements{part}.txt' for part in ('', '-dev', '-gpu', '-ray', '-track')
  ],
)
def test_locks_are_complete_and_name_no_host(repository, lock):
  text = (repository / lock).read_text()
  assert '://' not in text and 'index-url' not in text
  for block in re.split(r'\n(?=[a-z])', text):
    if block[0] != '#':
      assert re.match(r'[a-z0-9-]+==\S+', block), block[:60]
      assert '--hash=sha256:' in block, block[:60]


def _pins(lock):
  """(name, version) of all packages of a lock."""
  pin = r'^([a-z][a-z0-9-]*)==(\S+)'
  return set(re.findall(pin, lock.read_text(), re.MULTILINE))


@pytest.mark.parametrize(
  'hub,lock',
  [('pypi', 'requirements.txt'), ('pypi_dev', 'requirements-dev.txt')],
)
def test_dependencies_are_locked(repository, targets, hub, lock):
  labels = {
    d.removeprefix(f'@{hub}//')
    for rule in targets.values()
    for d in rule.get('deps', ())
    if d.startswith(f'@{hub}//')
  }
  names = {name.replace('-', '_') for name, _ in _pins(repository / lock)}
  assert labels and labels <= names


def test_locks_agree(repository):
  runtime = _pins(repository / 'requirements.txt')
  names = {name for name, _ in runtime}
  for name, version in _pins(repository / 'requirements-dev.txt'):
    assert name not in names or (name, version) in runtime, name


def test_versions_agree(repository):
  version = re.escape(tff_fssl.__version__)
  for file, pattern in (
    ('MODULE.bazel', rf'version = "{version}",'),
    ('CITATION.cff', rf'version: {version}'),
  ):
    text = (repository / file).read_text()
    assert re.search(rf'^ *{pattern}$', text, re.MULTILINE), file
  changes = (repository / 'CHANGELOG.md').read_text()
  unreleased = r'## \[Unreleased\]\n((?!\n## ).)*\n'
  released = rf'## \[{version}\] - \d{{4}}-\d\d-\d\d\n'
  assert re.match(
    rf'# Changelog\n\n[^#]*({unreleased})?{released}', changes, re.DOTALL
  )
