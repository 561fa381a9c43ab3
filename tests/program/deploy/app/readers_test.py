"""A client's own files."""

import json
import types

import numpy as np
from PIL import Image
import pytest

_ABOUT = {
  'example_shape': [4, 6, 3],
  'class_names': ['cat', 'dog'],
  'resize': 'crop',
  'vocabulary_size': 100,
  'max_words': 5,
  'text_unit': 'words',
  'bit_depth': 16,
  'unknown_words': ['', '-1', 'nan', 'unlabeled', 'unknown'],
  'columns': [],
  'label_field': '',
}
_COLUMNS = [
  ['age', 'number', 40.0, True, []],
  ['sex', 'category', 0, False, ['f']],
]


@pytest.fixture(name='read')
def _read(app, monkeypatch):
  program = types.SimpleNamespace(read=lambda _: json.dumps(_ABOUT).encode())
  # Large graphs are not in the app, but in a folder of the client.
  programs = {'': None, 'folder': program}
  monkeypatch.setattr(app.work, 'load_program', programs.__getitem__)
  return lambda path: app.load_client.load_client(
    {'data': str(path), 'program': 'folder'}
  )


def test_folders_of_images(read, app, tmp_path):
  for name, level in (('dog/a', 10), ('cat/b', 20), ('Unknown/c', 30)):
    path = tmp_path / f'{name}.png'
    path.parent.mkdir()
    Image.new('RGB', (9, 8), (level,) * 3).save(path)
  (tmp_path / 'dog' / 'notes.txt').write_text('x')
  (x, y), unlabeled = read(tmp_path)
  assert x.shape == (2, 4, 6, 3) and x.dtype == np.uint8
  assert y.tolist() == [0, 1] and x[:, 0, 0, 0].tolist() == [20, 10]
  assert unlabeled.shape == (1, 4, 6, 3) and unlabeled.max() == 30
  (tmp_path / 'bird').mkdir()
  Image.new('L', (9, 8)).save(tmp_path / 'bird' / 'd.png')
  with pytest.raises(app.readers.ReadError, match="'bird' is no class"):
    read(tmp_path)
  (tmp_path / 'empty').mkdir()
  with pytest.raises(app.readers.ReadError, match='no images in CLASS/'):
    read(tmp_path / 'empty')


def test_tables_of_texts(read, app, tmp_path):
  path = tmp_path / 'a.csv'
  path.write_text('text;label\na b;dog\nc;\n', encoding='utf-16')
  (x, y), unlabeled = read(path)
  assert x.shape == (1, 5) and x.dtype == np.int32 and y.tolist() == [1]
  assert len(unlabeled) == 1
  path.write_text('text,label\na b,dog\nc,-1\n')
  (_, y), unlabeled = read(path)
  assert y.tolist() == [1] and len(unlabeled) == 1
  path.write_text('text,label\na b,-2\n')
  with pytest.raises(app.readers.ReadError, match="'-2' is no class"):
    read(path)
  path.write_text('words\na\n')
  with pytest.raises(app.readers.ReadError, match='column text'):
    read(path)


def test_tables_as_in_training(read, app, tmp_path, monkeypatch):
  monkeypatch.setitem(_ABOUT, 'columns', _COLUMNS)
  path = tmp_path / 'a.csv'
  path.write_text('sex;name;Diagnosis;age\nf;ann;dog;50\nm;bob;NaN;\n')
  (x, y), unlabeled = read(path)
  assert x.dtype == np.float32 and x.tolist() == [[[10, 0, 1]]]
  assert y.tolist() == [1] and unlabeled.tolist() == [[[0, 1, 0]]]
  path.write_text('sex,label\nf,dog\n')
  with pytest.raises(Exception, match="no column 'age'"):
    read(path)


def test_arrays(read, app, tmp_path):
  path, x = tmp_path / 'a.npz', np.ones([3, 1, 2], np.float32)
  np.savez(path, x=x, y=[1, -1, 0])
  (labeled, y), unlabeled = read(path)
  assert y.tolist() == [1, 0] and len(labeled) == 2 and len(unlabeled) == 1
  np.savez(path, x=x)
  assert read(path)[0] is None and len(read(path)[1]) == 3
  np.savez(path, x=x, y=['cat', 'dog', 'cat'])
  assert read(path)[0][1].tolist() == [0, 1, 0] and read(path)[1] is None
  np.savez(path, x=x, y=[0, 1, 2])
  with pytest.raises(app.readers.ReadError, match='2 is no class'):
    read(path)
  np.savez(path, x=x, y=[[0], [1], [0]])
  with pytest.raises(app.readers.ReadError, match=r'shape \(3, 1\)'):
    read(path)
  np.savez(path, z=x)
  with pytest.raises(app.readers.ReadError, match='an array x'):
    read(path)
  with pytest.raises(app.readers.ReadError, match='edit load_client.py'):
    read(tmp_path / 'a.txt')


def test_arrays_in_torn_and_foreign_files(read, app, tmp_path):
  path = tmp_path / 'a.npz'
  with pytest.raises(app.readers.ReadError, match='No such file'):
    read(path)
  np.savez(path, x=np.ones([3, 1, 2], np.float32))
  whole = path.read_bytes()
  np.savez(path, x=np.array([{}], object))
  pickled = path.read_bytes()
  for content in (whole[: len(whole) // 2], b'', b'PK no', pickled):
    path.write_bytes(content)
    with pytest.raises(app.readers.ReadError, match='a.npz: cannot be read'):
      read(path)


def test_without_the_readers_it_says_what_to_do(
  read, app, tmp_path, monkeypatch
):
  def fail(_):
    raise ImportError('no tff_fssl')

  monkeypatch.setattr(app.readers.importlib, 'import_module', fail)
  with pytest.raises(app.readers.ReadError, match='--no-deps.*load_client.py'):
    read(tmp_path)
