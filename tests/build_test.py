"""BUILD.bazel and the requirements agree with the sources."""

import itertools
import re
import sys
import tomllib

import pytest
import source_tree

import tff_fssl
from tff_fssl import bridge

# Modules whose package on the index has another name.
_DISTRIBUTIONS = {
  'PIL': 'pillow',
  'absl': 'absl-py',
  'dp_accounting': 'dp-accounting',
  'google': 'protobuf',
  'grpc': 'grpcio',
  'ml_dtypes': 'ml-dtypes',
  'sklearn': 'scikit-learn',
  'tensorflow_datasets': 'tensorflow-datasets',
  'tensorflow_federated': 'tensorflow-federated',
  'tree': 'dm-tree',
}
# Modules of other environments: that of benchmarks/peers.py, and those of the
# machines of a federation, where `fssl_app` is the app itself.
_ELSEWHERE = ('pfl', 'flwr', 'fssl_app')


@pytest.fixture(scope='module')
def tree(repository):
  return source_tree.SourceTree(repository)


@pytest.fixture(scope='module')
def targets(repository):
  """Target name -> its rule's name and attributes."""
  result = {}

  def glob(include, exclude=()):
    found = [{*repository.glob(pattern)} for pattern in include]
    left_out = {p for pattern in exclude for p in repository.glob(pattern)}
    return sorted(
      path.relative_to(repository).as_posix()
      for path in set().union(*found) - left_out
      if path.is_file()
    )

  def rule(kind):
    def add(name, **attributes):
      assert name not in result
      result[name] = {'kind': kind, **attributes}

    return add

  kinds = ('py_binary', 'py_library', 'py_test', 'filegroup')
  # What the file says, Python understands, too.
  exec(
    (repository / 'BUILD.bazel').read_text(),
    {
      'glob': glob,
      'load': lambda *_: None,
      'package': lambda **_: None,
      **{kind: rule(kind) for kind in kinds},
    },
  )
  return result


def _labels(targets, hub):
  return {
    label.removeprefix(f'@{hub}//')
    for rule in targets.values()
    for label in rule.get('deps', ())
    if label.startswith(f'@{hub}//')
  }


def test_build_file_is_short(repository):
  assert (repository / 'BUILD.bazel').stat().st_size < 15_000


def test_every_file_is_in_a_target(targets, tree):
  listed = {
    path
    for rule in targets.values()
    if rule['kind'] != 'filegroup'
    for path in rule['srcs']
  }
  assert listed == {source.path for source in tree.sources.values()}


def test_every_test_file_is_a_test(targets, tree):
  tests = [p for t in targets.values() for p in t.get('args', ())]
  paths = [s.path for s in tree.sources.values()]
  assert sorted(tests) == sorted(p for p in paths if p.endswith('_test.py'))


def test_dependencies_and_files_exist(repository, targets):
  for rule in targets.values():
    for label in itertools.chain(rule.get('deps', ()), rule.get('data', ())):
      if label.startswith(':'):
        assert label[1:] in targets
    for path in rule['srcs']:
      assert (repository / path).is_file()


def _distribution(module):
  """The package on the index that holds a module; None if there is none."""
  top = module.partition('.')[0]
  if top in sys.stdlib_module_names or top in _ELSEWHERE:
    return None
  return _DISTRIBUTIONS.get(top, top)


def _names(requirements):
  """Their names, without bounds and extras."""
  return {re.match(r'[a-z0-9-]+', text)[0] for text in requirements}


@pytest.fixture(scope='module')
def required(repository):
  """The names of what is asked for, by the part of the installation."""
  file = tomllib.loads((repository / 'pyproject.toml').read_text())
  parts = {
    'run': file['project']['dependencies'],
    **file['project']['optional-dependencies'],
    **file['dependency-groups'],
  }
  return {part: _names(texts) for part, texts in parts.items()}


def test_what_is_imported_is_required(required, tree):
  # griffe comes with mkdocstrings.
  for_others = required['dev'] | {'griffe'}
  for source in tree.sources.values():
    modules = tree.imports(source) - tree.sources.keys()
    packages = {_distribution(m) for m in modules} - {None}
    allowed = required['run'] | required['tff']
    if not source.path.startswith('tff_fssl'):
      allowed = allowed | for_others
    assert packages <= allowed, source.path


def test_build_file_names_the_requirements(required, targets):
  names = required['run'] | required['tff']
  assert _labels(targets, 'pypi') == {name.replace('-', '_') for name in names}
  assert _labels(targets, 'pypi_dev') <= required['dev']


def test_tff_is_what_the_bridge_installs(repository):
  pins = dict(_pins(repository / 'requirements.txt'))
  names = bridge.INSTALL_TFF.split()[-3:]
  file = tomllib.loads((repository / 'pyproject.toml').read_text())
  assert names == file['dependency-groups']['tff']
  assert names == [f'{name}=={pins[name]}' for name in sorted(_names(names))]


def test_tff_brings_nothing(repository):
  """What it asks for and never calls is not installed."""
  lock = dict(_pins(repository / 'requirements.txt'))
  for module in bridge.STAND_INS:
    package = module.partition('.')[0].replace('_', '-')
    assert not any(package in name for name in lock), package


@pytest.mark.parametrize(
  'lock',
  [
    f'requirements{part}.txt'
    for part in ('', '-dev', '-flower', '-gpu', '-ray', '-track')
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
  labels = _labels(targets, hub)
  names = {name.replace('-', '_') for name, _ in _pins(repository / lock)}
  assert labels and labels <= names


def test_locks_agree(repository):
  """All are installed into one environment."""
  found = {}
  for lock in repository.glob('requirements*.txt'):
    pins = _pins(lock)
    for name in dict(pins):
      versions = {v for n, v in pins if n == name}
      assert found.setdefault(name, versions) == versions, name


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
