import os

import faulty_disk
import pytest

from tff_fssl.hparams import UsageError
from tff_fssl.program import config as config_lib
from tff_fssl.program import output_tree


def _open(folder, *argv, record=True):
  config = config_lib.parse_config([f'--output_dir={folder}', *argv])
  tree = output_tree.OutputTree(str(folder))
  tree.open(config)
  if record:
    tree.record(config)
  return tree


def test_a_new_and_a_continued_run(tmp_path):
  folder = tmp_path / 'a' / 'b'
  with _open(folder, '--total_rounds=5') as tree:
    assert tree.is_new
  with _open(folder, '--total_rounds=9', '--client_threads=3') as tree:
    assert not tree.is_new
    with open(tree.flags_file) as file:
      assert '--total_rounds=9\n' in file.read()


def test_a_run_that_protects_clients_says_what_not_to_publish(tmp_path):
  private = ['--algorithm=fixmatch', '--norm=none', '--aggregator=dp']
  private += ['--max_client_examples=60000']
  with _open(tmp_path / 'private', *private) as tree:
    with open(tree.private_txt) as file:
      text = file.read()
  for name in ('partition.json', 'compute.json', 'metrics/timing.csv'):
    assert f'\n  {name}: ' in text
  assert 'Epsilon\ndoes not hold' in text
  with _open(tmp_path / 'other') as tree:
    assert not os.path.lexists(tree.private_txt)


def test_flags_txt_repeats_the_run(tmp_path):
  with _open(tmp_path / 'run', '--seed=4', '--fl2.rho=0.25') as tree:
    again = config_lib.parse_config([f'--flagfile={tree.flags_file}'])
  assert again.run.seed == 4 and again.algorithm.rho == 0.25


def test_a_second_program_is_refused_and_told_who_is_first(tmp_path):
  with _open(tmp_path / 'run'):
    first = rf'process {os.getpid()} on \S+, since 20\d\d-\d\d-\d\d \d\d:'
    with pytest.raises(UsageError, match=first):
      _open(tmp_path / 'run')
  with _open(tmp_path / 'run'):
    pass


def test_another_configuration_is_refused(tmp_path):
  with _open(tmp_path / 'run', '--total_rounds=5'):
    pass
  with pytest.raises(UsageError) as error:
    _open(tmp_path / 'run', '--total_rounds=5', '--seed=3', '--norm=gn')
  message = str(error.value)
  assert '--seed=0 there, 3 now' in message
  assert '--norm=sbn there, gn now' in message
  assert 'data_dir, ' in message and 'total_rounds (upwards)' in message
  with pytest.raises(UsageError, match='--total_rounds=5 there, 4 now'):
    _open(tmp_path / 'run', '--total_rounds=4')
  # Refusing lets go of the lock.
  with _open(tmp_path / 'run', '--total_rounds=5'):
    pass


def test_a_restart_keeps_the_run_that_was_there(tmp_path):
  folder = tmp_path / 'run'
  olds = []
  for seed in range(3):
    config = config_lib.parse_config(
      [f'--output_dir={folder}/', f'--seed={seed}']
    )
    with output_tree.OutputTree(f'{folder}/') as tree:
      tree.open(config, restart=True)
      assert tree.is_new
      tree.record(config)
      olds.append(tree.old)
  assert olds == ['', f'{folder}.old_1', f'{folder}.old_2']
  for path, seed in zip((*olds[1:], folder), range(3)):
    flags = output_tree.OutputTree(str(path)).read_flags()
    assert flags['seed'] == str(seed)


def test_a_run_that_is_in_use_is_not_set_aside(tmp_path, monkeypatch):
  folder = tmp_path / 'run'
  config = config_lib.parse_config([f'--output_dir={folder}', '--seed=7'])
  with _open(folder):
    with pytest.raises(UsageError, match='another program'):
      output_tree.OutputTree(str(folder)).open(config, restart=True)
  monkeypatch.chdir(folder)
  with pytest.raises(UsageError, match='it is the working directory'):
    output_tree.OutputTree('.').open(config, restart=True)
  assert os.listdir(tmp_path) == ['run']


def test_a_folder_with_other_files_is_refused(tmp_path):
  (tmp_path / 'thesis.tex').write_text('')
  with pytest.raises(UsageError, match='thesis.tex'):
    _open(tmp_path)
  assert os.listdir(tmp_path) == ['thesis.tex']


def test_a_start_that_failed_before_it_recorded_does_not_matter(tmp_path):
  with _open(tmp_path, '--seed=1', record=False):
    pass
  with _open(tmp_path, '--seed=2') as tree:
    assert tree.is_new


def test_a_file_in_the_way(tmp_path):
  (tmp_path / 'file').write_text('')
  with pytest.raises(UsageError, match='file'):
    _open(tmp_path / 'file' / 'run')


def test_a_full_disk_at_the_start(tmp_path):
  with faulty_disk.FaultyDisk(0, faulty_disk.FULL).installed():
    with pytest.raises(UsageError, match='the disk is full'):
      _open(tmp_path / 'run')


def test_a_folder_is_locked_once(tmp_path):
  path = str(tmp_path)
  first, second = (output_tree.LockedFolder(path) for _ in range(2))
  assert not output_tree.is_held(path)
  with first:
    first.lock()
    assert output_tree.is_held(path)
    with pytest.raises(UsageError, match=f'process {os.getpid()} on '):
      second.lock()
    assert output_tree.is_held(path)
  assert not output_tree.is_held(path)
  second.lock()
  second.close()


def test_paths_inside(tmp_path):
  class Folder(output_tree.LockedFolder):
    table = output_tree.PathInside('a', 'b.csv')

  assert Folder(str(tmp_path)).table == str(tmp_path / 'a' / 'b.csv')


def test_a_path_that_is_no_folder(tmp_path):
  output_tree.LockedFolder(str(tmp_path)).check_path()
  output_tree.LockedFolder(str(tmp_path / 'new')).check_path()
  (tmp_path / 'file').write_text('')
  with pytest.raises(UsageError, match='it is not a folder'):
    output_tree.LockedFolder(str(tmp_path / 'file')).check_path()
