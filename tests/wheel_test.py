"""The wheel: what is in it, and that it works away from the source tree."""

import configparser
import glob
import os
import shutil
import subprocess
import sys
import zipfile

import pytest

import tff_fssl
from tff_fssl import bridge

_PARTS = ('README.md', 'LICENSE', 'pyproject.toml', 'setup.py')
_FOLDERS = ('tff_fssl', 'configs')
# The console script, as installers write it.
_SCRIPT = """\
import sys
import {module}
sys.argv[0] = '/somewhere/tff-fssl'
assert {module}.__file__.startswith({site!r}), {module}.__file__
sys.exit({module}.{function}())
"""


@pytest.fixture(scope='module', name='wheel')
def _wheel(repository, tmp_path_factory):
  """The wheel's file, built in a copy of the tree."""
  copy = tmp_path_factory.mktemp('copy')
  for name in _FOLDERS:
    ignored = shutil.ignore_patterns('__pycache__')
    shutil.copytree(repository / name, copy / name, ignore=ignored)
  for name in _PARTS:
    shutil.copy(repository / name, copy)
  build = 'from setuptools import build_meta; build_meta.build_wheel("dist")'
  subprocess.run(
    [sys.executable, '-c', build],
    cwd=copy,
    check=True,
    capture_output=True,
  )
  (path,) = (copy / 'dist').glob('*.whl')
  return path


@pytest.fixture(scope='module', name='tff_fssl_command')
def _tff_fssl_command(wheel, tmp_path_factory):
  """Calls the wheel's console script in an empty folder."""
  site = str(tmp_path_factory.mktemp('site'))
  folder = tmp_path_factory.mktemp('empty')
  with zipfile.ZipFile(wheel) as archive:
    archive.extractall(site)
  entry_points = configparser.ConfigParser()
  info = f'tff_fssl-{tff_fssl.__version__}.dist-info'
  entry_points.read(os.path.join(site, info, 'entry_points.txt'))
  assert list(entry_points['console_scripts']) == ['tff-fssl']
  entry = entry_points['console_scripts']['tff-fssl']
  module, _, function = entry.partition(':')
  code = _SCRIPT.format(module=module, function=function, site=site)

  def call(*arguments):
    return subprocess.run(
      [sys.executable, '-c', code, *arguments],
      cwd=folder,
      env={**os.environ, 'PYTHONPATH': site},
      capture_output=True,
      text=True,
      check=False,
    )

  return call


def test_it_has_the_package_its_types_and_the_configs(wheel, repository):
  with zipfile.ZipFile(wheel) as archive:
    names = {n for n in archive.namelist() if '.dist-info/' not in n}
  expected = {'tff_fssl/py.typed'}
  for folder, pattern, inside in (
    ('tff_fssl', '*.py', 'tff_fssl'),
    ('tff_fssl', '*.j2', 'tff_fssl'),
    ('tff_fssl', '*.toml', 'tff_fssl'),
    ('configs', '*.flags', 'tff_fssl/configs'),
    ('configs', '*.toml', 'tff_fssl/configs'),
  ):
    for path in (repository / folder).rglob(pattern):
      relative = path.relative_to(repository / folder)
      expected.add(f'{inside}/{relative.as_posix()}')
  assert names == expected


def test_its_command_works_in_an_empty_folder(tff_fssl_command, repository):
  done = tff_fssl_command('--version')
  assert done.stdout == f'tff_fssl {tff_fssl.__version__}\n'
  files = tff_fssl_command('configs').stdout.split()
  assert files and all((repository / name).is_file() for name in files)
  assert len(files) == len(list((repository / 'configs').rglob('*.flags')))
  # The file is read: it is what selects the algorithm.
  done = tff_fssl_command(
    'train',
    '--flagfile=configs/fl2/cpu_cifar10_250_fixmatch.flags',
    '--fl2.rho=0.1',
  )
  assert done.returncode == 2
  assert '--algorithm=fixmatch is selected' in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize('name', ['python3.11', 'python3.12', 'python3.13'])
def test_it_installs_without_make(name, wheel, repository, tmp_path):
  # Its commands are found whichever version pyenv has chosen.
  folders = glob.glob(os.path.expanduser('~/.pyenv/versions/*/bin'))
  path = os.pathsep.join([*folders, os.environ['PATH']])
  found = subprocess.run(
    ['sh', repository / 'tools' / 'find_python.sh', name],
    env={**os.environ, 'PATH': path},
    capture_output=True,
    text=True,
    check=False,
  )
  if found.returncode:
    pytest.skip(f'no {name}')
  python = found.stdout.strip()
  subprocess.run([python, '-m', 'venv', tmp_path / 'new'], check=True)
  folder = tmp_path / 'new' / 'bin'
  pip = [folder / 'python', '-m', 'pip', '--disable-pip-version-check']
  known = subprocess.run(
    [*pip, 'download', '--quiet', '--no-deps', '--dest', tmp_path, 'six'],
    capture_output=True,
    check=False,
  )
  if known.returncode:
    pytest.skip('no package index')
  # The commands of docs/getting_started.md.
  page = (repository / 'docs' / 'getting_started.md').read_text()
  assert f'    pip install {wheel.name}\n    {bridge.INSTALL_TFF}\n' in page
  for line in (f'pip install --quiet {wheel}', bridge.INSTALL_TFF):
    subprocess.run([*pip, *line.split()[1:]], cwd=tmp_path, check=True)
  done = subprocess.run(
    [folder / 'tff-fssl', 'train', '--flagfile=configs/quickstart.flags']
    + ['--num_pretraining_rounds=0', '--total_rounds=1'],
    cwd=tmp_path,
    capture_output=True,
    text=True,
    check=False,
  )
  assert done.returncode == 0, done.stderr
  assert 'test accuracy' in done.stdout


@pytest.mark.slow
def test_a_run_from_training_to_plot(tff_fssl_command):
  train = tff_fssl_command(
    'train',
    '--flagfile=configs/quickstart.flags',
    '--total_rounds=2',
    '--num_pretraining_rounds=1',
  )
  assert train.returncode == 0, train.stderr
  assert 'tff-fssl evaluate runs/quickstart' in train.stdout
  for program in ('evaluate', 'plot', 'compare', 'report'):
    done = tff_fssl_command(program, 'runs/quickstart')
    assert done.returncode == 0, done.stderr
    assert done.stdout
