import errno
import multiprocessing
import os

import numpy as np
import pytest

from tff_fssl.data import image_cache
from tff_fssl.hparams import UsageError

_SHAPE = (2, 3, 3)
_KEY = image_cache.key_of('a', 1)


def _images(count=5):
  rng = np.random.default_rng(0)
  return rng.integers(0, 256, (count, *_SHAPE), np.uint8)


def _open(folder, make=None, images=None, most=8):
  images = _images() if images is None else images

  def make_all(put):
    for i in reversed(range(len(images))):  # In any order.
      put(i, images[i])
    return len(images), 3, {'names': ['é']}

  cached = image_cache.find(str(folder), _KEY)
  if cached is not None:
    return cached
  return image_cache.make(str(folder), _KEY, _SHAPE, most, make or make_all)


def _must_not_make(put):
  raise AssertionError('made again')


def test_images_are_made_once_and_mapped(tmp_path):
  images = _images()
  made = _open(tmp_path / 'new' / 'cache')
  found = _open(tmp_path / 'new' / 'cache', _must_not_make)
  for cached in (made, found):
    assert isinstance(cached.images, np.memmap)
    assert not cached.images.flags.writeable
    np.testing.assert_array_equal(cached.images, images)
    assert cached.facts == {'names': ['é']}
    np.testing.assert_allclose(cached.mean, (images[:3] / 255).mean((0, 1, 2)))
    np.testing.assert_allclose(cached.std, (images[:3] / 255).std((0, 1, 2)))
  # The reserved space was given back.
  assert os.path.getsize(os.path.join(found.path, 'images.bin')) == images.size


def test_removed_while_they_are_mapped(tmp_path):
  cached = _open(tmp_path)
  os.mkdir(tmp_path / f'{"0" * 32}.writing')
  # Not ours: other names, a link, other files.
  others = ['1' * 32, 'photos']
  for name in others:
    os.mkdir(tmp_path / name)
    (tmp_path / name / 'mine.txt').write_text('')
  os.symlink(tmp_path / 'photos', tmp_path / ('3' * 32))
  (found,) = image_cache.made(str(tmp_path))
  assert found.path == cached.path and found.shape == (5, *_SHAPE)
  assert found.num_bytes > cached.images.size
  image_cache.remove(str(tmp_path), [found, found])
  assert sorted(os.listdir(tmp_path)) == [
    others[0],
    '3' * 32,
    'lock',
    others[1],
  ]
  np.testing.assert_array_equal(cached.images, _images())
  assert not image_cache.made(str(tmp_path))
  _open(tmp_path)
  assert image_cache.made(str(tmp_path))


def test_nothing_to_remove(tmp_path):
  missing = str(tmp_path / 'missing')
  assert image_cache.made(missing) == []
  image_cache.remove(missing, [])
  assert not os.path.exists(missing)
  (tmp_path / 'file').write_text('')
  with pytest.raises(UsageError, match='in the way'):
    image_cache.made(str(tmp_path / 'file'))


def test_links_are_not_what_a_kill_left(tmp_path):
  (tmp_path / 'mine').mkdir()
  (tmp_path / 'mine' / 'file').touch()
  link = tmp_path / f'{_KEY}.writing'
  link.symlink_to(tmp_path / 'mine')
  image_cache.remove(str(tmp_path), [])
  assert (tmp_path / 'mine' / 'file').exists() and link.is_symlink()


def test_images_of_one_color_can_be_normalized(tmp_path):
  cached = _open(tmp_path, images=np.full((5, *_SHAPE), 7, np.uint8))
  assert min(cached.std) > 0


def test_keys():
  keys = [
    image_cache.key_of(*parts)
    for parts in (('a', 1), ('a', 2), ('a', (1,)), ('a1',), (), ('\udcff',))
  ]
  assert len(set(keys)) == len(keys)
  assert image_cache.key_of('a', 1) == _KEY


def test_nothing_is_left_of_what_failed(tmp_path):
  def fail(put):
    put(0, _images()[0])
    raise RuntimeError('decoder')

  with pytest.raises(RuntimeError, match='decoder'):
    _open(tmp_path, fail)
  assert os.listdir(tmp_path) == ['lock']
  assert len(_open(tmp_path).images) == 5


def _die(folder):
  def die(put):
    put(0, _images()[0])
    os._exit(9)

  _open(folder, die)


def test_what_a_kill_left_is_removed(tmp_path):
  process = multiprocessing.get_context('fork').Process(
    target=_die, args=(tmp_path,)
  )
  process.start()
  process.join()
  assert process.exitcode == 9
  assert (tmp_path / f'{_KEY}.writing').is_dir()
  (tmp_path / 'mine.writing').mkdir()
  assert len(_open(tmp_path).images) == 5
  assert sorted(os.listdir(tmp_path)) == sorted([_KEY, 'lock', 'mine.writing'])


def test_two_programs_make_it_once(tmp_path):
  context = multiprocessing.get_context('fork')
  made = context.Value('i', 0)

  def program():
    def make(put):
      with made.get_lock():
        made.value += 1
      for i, image in enumerate(_images()):
        put(i, image)
      return 5, 3, {}

    assert len(_open(tmp_path, make).images) == 5

  programs = [context.Process(target=program) for _ in range(4)]
  for process in programs:
    process.start()
  for process in programs:
    process.join()
  assert [process.exitcode for process in programs] == [0] * 4
  assert made.value == 1


@pytest.mark.parametrize(
  'number,words',
  [
    (errno.ENOSPC, 'the disk is full'),
    (errno.EACCES, 'no permission; choose another --cache_dir'),
    (errno.EROFS, 'read-only; choose another --cache_dir'),
  ],
)
def test_disk_errors_are_one_line(tmp_path, monkeypatch, number, words):
  def refuse(*_):
    raise OSError(number, os.strerror(number))

  monkeypatch.setattr(os, 'posix_fallocate', refuse)
  with pytest.raises(UsageError, match=words) as error:
    _open(tmp_path)
  assert '\n' not in str(error.value) and _KEY in str(error.value)
  assert os.listdir(tmp_path) == ['lock']


def test_a_full_disk_while_writing(tmp_path):
  with pytest.raises(UsageError, match='the disk is full'):

    def make(put):
      with open('/dev/full', 'wb', buffering=0) as full:
        full.write(b'x')

    _open(tmp_path, make)


def test_a_file_in_the_way(tmp_path):
  (tmp_path / 'file').write_text('')
  with pytest.raises(UsageError, match='in the way'):
    _open(tmp_path / 'file')


def _flip(path, position):
  content = bytearray(path.read_bytes())
  content[position] ^= 1
  path.write_bytes(content)


@pytest.mark.parametrize(
  'damage',
  [
    lambda path: (path / 'index.json').unlink(),
    lambda path: (path / 'index.json').write_text('{"format'),
    lambda path: _flip(path / 'index.json', 9),
    lambda path: _flip(path / 'images.bin', 0),
    lambda path: _flip(path / 'images.bin', -1),
    lambda path: os.truncate(path / 'images.bin', 7),
    lambda path: (path / 'images.bin').unlink(),
    lambda path: (
      (path / 'images.bin').unlink(),
      os.mkfifo(path / 'images.bin'),
    ),
  ],
)
def test_damage_is_one_line(tmp_path, damage):
  path = tmp_path / os.path.basename(_open(tmp_path).path)
  damage(path)
  with pytest.raises(UsageError, match='remove this folder') as error:
    _open(tmp_path, _must_not_make)
  assert '\n' not in str(error.value) and str(path) in str(error.value)
