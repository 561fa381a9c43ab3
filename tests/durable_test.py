"""Files that survive kills; tests/program/kill_test.py kills whole runs."""

import os

import faulty_disk
import pytest

from tff_fssl import durable
from tff_fssl.hparams import UsageError


@pytest.mark.parametrize(
  'how, stop_at, forgotten, left',
  [
    # write, fsync, replace, fsync of the folder; without the first fsync ...
    (faulty_disk.POWER_NAMES, 2, 'a', b''),
    # ... and without the second.
    (faulty_disk.POWER, 2, 'folder', b'old'),
    (faulty_disk.POWER_NAMES, 3, '', b'new'),
    (faulty_disk.POWER, 3, '', b'old'),
    (faulty_disk.POWER, 4, '', b'new'),
  ],
)
def test_a_power_failure_shows_what_is_not_flushed(
  how, stop_at, forgotten, left, tmp_path, monkeypatch
):
  folder = tmp_path / 'folder'
  folder.mkdir()
  path = folder / 'a'
  path.write_bytes(b'old')
  fsync = durable._fsync

  def forgetful(descriptor, path):
    if not forgotten or not path.endswith(forgotten):
      fsync(descriptor, path)

  monkeypatch.setattr(durable, '_fsync', forgetful)
  disk = faulty_disk.FaultyDisk(stop_at, how, root=str(folder))
  with disk.installed(), pytest.raises(faulty_disk.Killed):
    durable.write_file(str(path), [b'new'])
    durable.remove(str(path))
  assert path.read_bytes() == left


def test_a_full_disk_leaves_the_old_file_and_frees_the_new(tmp_path):
  path = tmp_path / 'a'
  path.write_bytes(b'old')
  for write in (
    lambda: durable.write_file(str(path), [b'new', b'er']),
    lambda: durable.append(str(path), b'more'),
  ):
    for stop_at in range(2):
      disk = faulty_disk.FaultyDisk(stop_at, faulty_disk.FULL)
      with disk.installed():
        with pytest.raises(UsageError, match='a: the disk is full'):
          write()
      assert path.read_bytes() == b'old'
      assert os.listdir(tmp_path) == ['a']


def test_a_link_is_followed_and_stays(tmp_path):
  target, link = tmp_path / 'target', tmp_path / 'link'
  target.write_bytes(b'old')
  link.symlink_to(target)
  durable.write_file(str(link), [b'ne', memoryview(b'w'), b''])
  assert link.is_symlink() and target.read_bytes() == b'new'


@pytest.mark.parametrize('kind', ['folder', 'pipe', 'loop'])
def test_only_files_are_replaced(tmp_path, kind):
  path = tmp_path / 'x'
  if kind == 'folder':
    path.mkdir()
  elif kind == 'pipe':
    os.mkfifo(path)
  else:
    path.symlink_to(path)
  with pytest.raises(UsageError, match='x: '):
    durable.write_file(str(path), [b'new'])
  assert os.listdir(tmp_path) == ['x']


def test_append_rename_and_remove(tmp_path):
  path = tmp_path / 'x'
  durable.write_file(str(path), [b'abc'], flush=False)
  durable.append(str(path), b'def')
  assert path.read_bytes() == b'abcdef'
  durable.rename(str(path), str(tmp_path / 'y'))
  durable.remove(str(tmp_path / 'y'))
  for call in (
    lambda: durable.append(str(path), b'x'),
    lambda: durable.remove(str(path)),
    lambda: durable.rename(str(path), str(path)),
  ):
    with pytest.raises(UsageError, match='x: .*then give the command again'):
      call()
  assert not os.listdir(tmp_path)


def test_made_folders_are_named_outermost_first(tmp_path):
  made = durable.make_folder(str(tmp_path / 'a/b'))
  assert made == [str(tmp_path / 'a'), str(tmp_path / 'a/b')]
  assert durable.make_folder(str(tmp_path / 'a/b')) == []
  (tmp_path / 'file').touch()
  with pytest.raises(UsageError, match='--x, then give the command again$'):
    with durable.storage_errors('--x'):
      os.mkdir(tmp_path / 'file' / 'c')


def test_messages_name_the_flag_of_the_command(tmp_path):
  (tmp_path / 'file').touch()
  path = str(tmp_path / 'file' / 'c')
  with durable.storage_errors():
    for write in (
      lambda: durable.write_file(path, []),
      lambda: durable.make_folder(path),
    ):
      with pytest.raises(UsageError, match='--x, then give the command again$'):
        with durable.storage_errors('--x'):
          write()
      # Afterwards, it is that of runs again.
      with pytest.raises(UsageError, match=r'--output_dir, .* checkpoint\)$'):
        write()


def test_leftovers_are_removed_but_nothing_else(tmp_path):
  for name in ('.writing_a', '.writing_b', 'a'):
    (tmp_path / name).touch()
  (tmp_path / '.writing_folder').mkdir()
  removed = durable.remove_leftovers(str(tmp_path), lambda name: name != 'b')
  assert removed == ['.writing_a']
  assert sorted(os.listdir(tmp_path)) == ['.writing_b', '.writing_folder', 'a']


def test_errors_without_a_file_pass():
  with pytest.raises(OSError, match='x'), durable.storage_errors():
    raise OSError('x')
