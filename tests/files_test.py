"""Reading of files that anybody may have put there."""

import os

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
    (files.read_toml, b'a = ', 'not TOML'),
  ],
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
