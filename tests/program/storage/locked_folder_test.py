import os

import pytest

from tff_fssl.hparams import UsageError
from tff_fssl.program.storage import locked_folder


def test_a_folder_is_locked_once(tmp_path):
  path = str(tmp_path)
  first, second = (locked_folder.LockedFolder(path) for _ in range(2))
  assert not locked_folder.is_held(path)
  with first:
    first.lock()
    assert locked_folder.is_held(path)
    with pytest.raises(UsageError, match=f'process {os.getpid()} on '):
      second.lock()
    assert locked_folder.is_held(path)
  assert not locked_folder.is_held(path)
  second.lock()
  second.close()


def test_a_file_that_is_no_lock_stays(tmp_path):
  (tmp_path / '.lock').write_text('mine')
  with pytest.raises(UsageError, match='is not the lock of a run'):
    locked_folder.LockedFolder(str(tmp_path)).lock()
  assert (tmp_path / '.lock').read_text() == 'mine'
  (tmp_path / '.lock').unlink()
  os.mkfifo(tmp_path / '.lock')
  with pytest.raises(UsageError):
    locked_folder.LockedFolder(str(tmp_path)).lock()


def test_paths_inside(tmp_path):
  class Folder(locked_folder.LockedFolder):
    table = locked_folder.PathInside('a', 'b.csv')

  assert Folder(str(tmp_path)).table == str(tmp_path / 'a' / 'b.csv')


def test_a_path_that_is_no_folder(tmp_path):
  locked_folder.LockedFolder(str(tmp_path)).check_path()
  locked_folder.LockedFolder(str(tmp_path / 'new')).check_path()
  (tmp_path / 'file').write_text('')
  with pytest.raises(UsageError, match='it is not a folder'):
    locked_folder.LockedFolder(str(tmp_path / 'file')).check_path()
