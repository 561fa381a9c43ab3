"""BUILD.bazel and the requirements agree with the sources."""

import itertools
import re
import sys

import pytest
import source_tree

import tff_fssl

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


def _required(text):
  return set(re.findall(r'^ *"?([a-z][a-z0-9-]*)', text, re.MULTILINE))


def test_what_is_imported_is_required(repository, tree):
  project = (repository / 'pyproject.toml').read_text()
  project = re.search(r'\ndependencies = \[(.*?)\n\]', project, re.DOTALL)[1]
  required = _required((repository / 'requirements.in').read_text())
  for_tests = _required((repository / 'requirements-dev.in').read_text())
  # griffe comes with mkdocstrings.
  for_docs = _required((repository / 'requirements-docs.in').read_text())
  for_docs.add('griffe')
  for source in tree.sources.values():
    modules = tree.imports(source) - tree.sources.keys()
    packages = {_distribution(m) for m in modules} - {None}
    if source.path.startswith('tools/'):
      packages -= for_docs
    if source.path.startswith('tff_fssl'):
      assert packages <= required & _required(project), source.path
    else:
      assert packages <= required | for_tests, source.path


def test_build_file_names_the_requirements(repository, targets):
  required = _required((repository / 'requirements.in').read_text())
  assert _labels(targets, 'pypi') == {n.replace('-', '_') for n in required}
  for_tests = _required((repository / 'requirements-dev.in').read_text())
  assert _labels(targets, 'pypi_dev') <= for_tests


@pytest.mark.parametrize(
  'lock',
  [
    f'requirements{part}.txt'
    for part in (
      '',
      '-dev',
      '-docs',
      '-flower',
      '-flower-latest',
      '-gpu',
      '-ray',
      '-track',
    )
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
  runtime = _pins(repository / 'requirements.txt')
  names = {name for name, _ in runtime}
  for name, version in _pins(repository / 'requirements-dev.txt'):
    assert name not in names or (name, version) in runtime, name


def test_constraints_are_the_lock_without_hashes(repository):
  lock = (repository / 'requirements.txt').read_text().splitlines()
  pins = [line.removesuffix(' \\') for line in lock if line[:1].isalpha()]
  constraints = (repository / 'constraints.txt').read_text().splitlines()
  assert [line for line in constraints if line[:1] != '#'] == pins


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
