"""tools/find_python.sh finds a Python, has uv bring one, or says what to do."""

import os
import shutil
import subprocess
import sys

import pytest

_TOOLS = ('cp', 'cut', 'getconf', 'mkdir', 'mktemp', 'rm', 'sh', 'uname')
# A Python of another version: code that is given by -c is run for it.
_FAKE = """\
#!/bin/sh
[ "$1" = -c ] || exit 1
exec {real} -S -c 'import sys; sys.version_info = {version}
{hide}exec(sys.argv[1])' "$2"
"""
_FAKE_UV = """\
#!/bin/sh
case "$*" in
  --version) ;;
  'python install 3.12') exit {failure} ;;
  'python find 3.12')
    [ "$UV_PYTHON_PREFERENCE" = only-managed ] && echo {new} ;;
  *) exit 3 ;;
esac
"""
_NEW = '/brought/by/uv/python3.12'


@pytest.fixture(name='place')
def _place(tmp_path, monkeypatch):
  """A PATH with what the script calls, and no Python."""
  folder = tmp_path / 'bin'
  folder.mkdir()
  for tool in _TOOLS:
    (folder / tool).symlink_to(shutil.which(tool))
  monkeypatch.setenv('PATH', str(folder))
  monkeypatch.setenv('OS_RELEASE', str(tmp_path / 'none'))
  return folder


def _write(path, text):
  path.write_text(text)
  path.chmod(0o755)


def _add(folder, name, version, *, venv=True):
  hide = '' if venv else 'sys.modules["venv"] = None\n'
  _write(
    folder / name,
    _FAKE.format(real=sys.executable, version=version, hide=hide),
  )


def _add_uv(folder, *, failure=0):
  _write(folder / 'uv', _FAKE_UV.format(new=_NEW, failure=failure))


@pytest.fixture(name='find')
def _find(repository, place):
  """Calls the script: the Python that it prints, or '', and what it says."""

  def call(*arguments):
    done = subprocess.run(
      [place / 'sh', repository / 'tools' / 'find_python.sh', *arguments],
      capture_output=True,
      text=True,
      check=False,
    )
    assert (done.returncode == 0) == bool(done.stdout)
    return done.stdout.strip(), done.stderr.strip()

  return call


@pytest.mark.parametrize('newest', [11, 12, 13])
def test_the_newest_is_taken(find, place, newest):
  for minor in range(10, newest + 1):
    _add(place, f'python3.{minor}', (3, minor))
  _add(place, 'python3', (3, 14))
  assert find() == (str(place / f'python3.{newest}'), '')


def test_one_that_fails_or_has_no_venv_is_passed_over(find, place):
  _write(place / 'python3.13', '#!/bin/sh\nexit 127\n')
  _add(place, 'python3.12', (3, 12), venv=False)
  _add(place, 'python3', (3, 11))
  assert find() == (str(place / 'python3'), '')


def test_without_one_uv_brings_it(find, place):
  _add(place, 'python3', (3, 10))
  _add_uv(place)
  python, said = find()
  assert python == _NEW
  assert said.startswith('tff_fssl: Python 3.10 is too old: ')
  assert said.endswith('uv brings Python 3.12.')


def test_pip_brings_uv(find, place, tmp_path):
  _add_uv(tmp_path)
  pip = '"$*" = "-m pip install --quiet --target $6 uv"'
  _write(
    place / 'python3',
    f'#!/bin/sh\n[ {pip} ] || exit 1\n'
    f'mkdir "$6/bin" && cp {tmp_path / "uv"} "$6/bin"\n',
  )
  python, said = find()
  assert python == _NEW and said.endswith('uv brings Python 3.12.')


def test_pipx_brings_uv(find, place, tmp_path):
  _add_uv(tmp_path)
  _write(
    place / 'pipx',
    f'#!/bin/sh\n[ "$1 $2" = "run uv" ] && shift 2 && {tmp_path / "uv"} "$@"\n',
  )
  assert find()[0] == _NEW


def test_uv_without_a_network(find, place):
  _add_uv(place, failure=1)
  python, said = find()
  assert not python and 'uv could not bring it. Install Python 3.12' in said


@pytest.mark.parametrize(
  'id_and_version, like, version, remedy',
  [
    ('debian 11', '', (3, 9), 'apt-get install python3-pip'),
    ('debian 12', '', None, 'apt-get install python3.11 python3.11-venv'),
    ('debian 13', '', None, 'apt-get install python3.13 python3.13-venv'),
    ('ubuntu 22.04', 'debian', (3, 10), 'apt-get install python3-pip'),
    (
      'ubuntu 24.04',
      'debian',
      None,
      'apt-get install python3.12 python3.12-venv',
    ),
    ('ubuntu 26.04', 'debian', (3, 14), 'apt-get install python3-pip'),
    ('linuxmint 21', 'ubuntu debian', (3, 10), 'apt-get install python3-pip'),
    ('fedora 43', '', (3, 14), 'dnf install python3.12'),
    ('rhel 9.6', 'fedora', (3, 9), 'dnf install python3.12'),
    ('rocky 9.6', 'rhel centos fedora', (3, 9), 'dnf install python3.12'),
    ('arch ', '', (3, 14), 'install uv, or Python 3.12 with its venv module'),
  ],
)
def test_the_remedy_is_that_of_the_distribution(
  find, place, tmp_path, monkeypatch, id_and_version, like, version, remedy
):
  name, _, number = id_and_version.partition(' ')
  (tmp_path / 'os-release').write_text(
    f'ID={name}\nVERSION_ID="{number}"\nID_LIKE="{like}"\n'
  )
  monkeypatch.setenv('OS_RELEASE', str(tmp_path / 'os-release'))
  reason = 'no Python 3.11, 3.12 or 3.13'
  if version:
    _add(place, 'python3', version)
    reason = (
      f'Python 3.{version[1]} is too {"new" if version[1] > 13 else "old"}'
    )
  python, said = find()
  assert not python and len(said.splitlines()) == 1
  assert said.startswith(f'tff_fssl: {reason}')
  assert f'then the same again: {remedy}.' in said


@pytest.mark.parametrize('os_release', ['debian 12', 'ubuntu 24.04'])
def test_a_python_without_venv_is_named(
  find, place, tmp_path, monkeypatch, os_release
):
  name, number = os_release.split()
  (tmp_path / 'os-release').write_text(f'ID={name}\nVERSION_ID={number}\n')
  monkeypatch.setenv('OS_RELEASE', str(tmp_path / 'os-release'))
  version = {'debian': 11, 'ubuntu': 12}[name]
  _add(place, 'python3', (3, version), venv=False)
  said = find()[1]
  assert f'python3.{version} has no venv module' in said
  assert f'python3.{version}-venv' in said


@pytest.mark.parametrize(
  'version, reason',
  [((3, 10), 'Python 3.10 is too old'), ((3, 14), 'Python 3.14 is too new')],
)
def test_a_given_python_is_refused_with_the_reason(
  find, place, version, reason
):
  _add(place, 'python3.12', (3, 12))
  _add(place, 'other', version)
  _add_uv(place)
  python, said = find('other')
  assert not python and said.startswith(f'tff_fssl: other: {reason}')
  assert find('missing')[1] == (
    'tff_fssl: missing is not a command. Give another PYTHON=, or none.'
  )
  assert find('python3.12')[0] == str(place / 'python3.12')


def test_other_machines_are_refused(find, place):
  (place / 'uname').unlink()
  _write(place / 'uname', '#!/bin/sh\necho Darwin arm64\n')
  assert 'Use a Linux x86-64 machine or container.' in find()[1]
  assert os.sep not in find()[0]
