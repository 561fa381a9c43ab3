import os

from tff_fssl.program.configuration import configs
from tff_fssl.program.configuration import flags


def test_names_are_the_files_of_configs(repository):
  files = (repository / 'configs').rglob('*.flags')
  expected = sorted(str(path.relative_to(repository)) for path in files)
  assert configs.names() == expected
  assert 'configs/quickstart.flags' in expected


def test_a_name_is_found_from_any_folder(tmp_path, monkeypatch, repository):
  monkeypatch.chdir(tmp_path)
  file = repository / 'configs' / 'quickstart.flags'
  for name in ('configs/quickstart.flags', './configs//quickstart.flags'):
    assert os.path.samefile(configs.find(name), file)
  assert flags.read_flagfile('configs/quickstart.flags')['dataset'] == 'digits'


def test_a_file_that_is_there_comes_first(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  path = tmp_path / 'configs' / 'quickstart.flags'
  path.parent.mkdir()
  path.symlink_to('nowhere')
  # A broken link is still the user's file: the message names it.
  assert configs.find('configs/quickstart.flags') == 'configs/quickstart.flags'
  path.unlink()
  path.write_text('--seed=3\n')
  assert configs.find('configs/quickstart.flags') == 'configs/quickstart.flags'


def test_other_names_stay_as_they_are(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  for name in (
    '',
    '.',
    '/',
    '..',
    'configs',
    'configs/',
    'configs/fl2',
    'quickstart.flags',
    'configs/../quickstart.flags',
    'configs/../../README.md',
    '/configs/quickstart.flags',
    'other/configs/quickstart.flags',
    'configs/quickstart.flags\0',
  ):
    assert configs.find(name) == name
