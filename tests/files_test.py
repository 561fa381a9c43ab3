"""Reading of files that anybody may have put there."""

import io
import math
import os
import zipfile

import numpy as np
import pytest

from tff_fssl import files


def test_reading(tmp_path):
  path = tmp_path / 'x'
  path.write_bytes(b'[1]')
  assert files.read_bytes(str(path)) == b'[1]'
  for read in (
    lambda: files.read_bytes(str(path), limit=2),
    lambda: files.read_json(str(path)),
    lambda: files.read_text('a\0b'),
    lambda: files.read_text('\ud800'),
    lambda: files.read_text('x' * 5000),
    lambda: files.read_text(f'{path}/y'),
  ):
    with pytest.raises(files.FileError):
      read()


@pytest.mark.parametrize(
  'kind, words',
  [
    ('missing', 'it does not exist'),
    ('folder', 'it is a folder, not a file'),
    ('pipe', 'it is not a regular file'),
    ('loop', 'a link that leads back to itself'),
    ('device', 'it is not a regular file'),
  ],
)
def test_other_things_than_files_are_one_line_and_do_not_hang(
  tmp_path, kind, words
):
  path = tmp_path / 'x'
  if kind == 'folder':
    path.mkdir()
  elif kind == 'pipe':
    os.mkfifo(path)
  elif kind == 'loop':
    path.symlink_to(path)
  elif kind == 'device':
    path = '/dev/zero'
  with pytest.raises(files.FileError, match=words) as error:
    files.read_bytes(str(path))
  assert str(error.value) == f'{path}: {error.value.reason}'
  assert '\n' not in str(error.value)


@pytest.mark.parametrize(
  'read, content, words',
  [
    (files.read_text, b'a\nb\xff', r'not UTF-8 text \(line 2\)'),
    (files.read_json, b'{"a": ', 'not JSON'),
    (files.read_json, b'[' * 100_000, 'not JSON'),
    (files.read_json, b'[1]', 'not a JSON object'),
    (files.read_json, b'{"a": NaN}', r'not JSON \(it holds NaN'),
    (files.read_json, b'{"a": [-Infinity]}', r'holds -Infinity'),
    (files.read_json, b'{"a": -1e999}', r'holds -1e999'),
    (files.read_json, b'{"a": ' + b'1' * 400 + b'}', r'holds 11+\.\.\.'),
    (files.read_json, b'{"a": ' + b'1' * 5000 + b'}', r'holds 11+\.\.\.'),
    (files.read_toml, b'a = ', 'not TOML'),
    (files.read_toml, b'a = ' + b'[' * 100_000, 'not TOML'),
    (files.read_toml, b'a = ' + b'1' * 5000, 'not TOML'),
  ],
  ids=lambda value: value[:20] if isinstance(value, bytes) else None,
)
def test_other_formats(tmp_path, read, content, words):
  path = tmp_path / 'x'
  path.write_bytes(content)
  with pytest.raises(files.FileError, match=words):
    read(str(path))


def test_formats(tmp_path):
  path = tmp_path / 'x'
  path.write_text('{"a": 1}')
  assert files.read_json(str(path)) == {'a': 1}
  path.write_text('a = 1')
  assert files.read_toml(str(path)) == {'a': 1}


def test_numbers_that_others_write():
  text = '{"a": Infinity, "b": 1e400, "c": -1.5e-9, "d": 7}'
  values = files.parse_json('x', text, finite=False)
  assert values == {'a': math.inf, 'b': math.inf, 'c': -1.5e-9, 'd': 7}
  text = '{"a": 0.1, "b": 1e308, "c": -123456789012345678901}'
  values = files.parse_json('x', text)
  assert values == {'a': 0.1, 'b': 1e308, 'c': -123456789012345678901}


def _encrypt(content):
  # The flag of both headers of a member.
  for magic, offset in ((b'PK\3\4', 6), (b'PK\1\2', 8)):
    content[content.index(magic) + offset] |= 1


def _compress_by_lzma(content):
  buffer = io.BytesIO()
  with zipfile.ZipFile(buffer, 'w', zipfile.ZIP_LZMA) as archive:
    archive.writestr('a.npy', bytes(content) * 20)
  content[:] = buffer.getvalue()
  content[60:80] = b'\xff' * 20


def _tear_header(content):
  with zipfile.ZipFile(io.BytesIO(content)) as archive:
    array = archive.read('a.npy')
  buffer = io.BytesIO()
  with zipfile.ZipFile(buffer, 'w') as archive:
    archive.writestr('a.npy', array.replace(b'}', b' '))
  content[:] = buffer.getvalue()


@pytest.mark.parametrize(
  'damage', [_encrypt, _compress_by_lzma, _tear_header, bytearray.clear]
)
def test_damaged_archives(tmp_path, damage):
  buffer = io.BytesIO()
  np.savez(buffer, a=np.arange(3))
  content = bytearray(buffer.getvalue())
  (tmp_path / 'x.npz').write_bytes(content)
  assert list(files.read_npz(str(tmp_path / 'x.npz'))['a']) == [0, 1, 2]
  damage(content)
  (tmp_path / 'x.npz').write_bytes(content)
  with pytest.raises(files.FileError, match='not a whole NPZ file') as error:
    files.read_npz(str(tmp_path / 'x.npz'))
  assert '\n' not in str(error.value)


def test_folders_are_listed_without_hidden_entries(tmp_path):
  for name in ('b', '.hidden'):
    (tmp_path / name).touch()
  (tmp_path / 'a').mkdir()
  assert files.list_folder(str(tmp_path)) == {'a': True, 'b': False}
  for path in (tmp_path / 'b', 'a\0b'):
    with pytest.raises(files.FileError):
      files.list_folder(str(path))


def test_text_for_display():
  assert files.printable('a é') == 'a é'
  # A terminal's escape, and the direction of writing.
  assert files.printable('\x1b[31m\u202e\n') == r'\x1b[31m\u202e\n'
  assert files.printable('a\nb\x07', lines=True) == 'a\nb\\x07'
  assert files.first_line(ValueError('\n  a\nb')) == 'a'
  assert files.first_line(KeyError()) == 'KeyError'
