import io
import os
import pathlib

import hub_files
import numpy as np
from PIL import Image
import pyarrow as pa
from pyarrow import parquet
import pytest

from tff_fssl.data import image_cache
from tff_fssl.data import sources
from tff_fssl.data.data_hparams import DataHparams
from tff_fssl.data.sources import hub
from tff_fssl.hparams import UsageError

_NAME = 'huggingface:owner/pets'


@pytest.fixture(name='root')
def _root(tmp_path):
  return tmp_path / 'owner' / 'pets'


@pytest.fixture(name='load')
def _load(tmp_path):
  def load(name=_NAME, **settings):
    settings = {'cache_dir': str(tmp_path / 'cache'), **settings}
    return sources.load(name, str(tmp_path), DataHparams(**settings))

  return load


def _write(root, name, labels, seed=0, **more):
  columns = {'image': hub_files.images(len(labels), seed), 'label': labels}
  hub_files.write(root / name, {**columns, **more})


def _decoded(content):
  return np.asarray(Image.open(io.BytesIO(content)))


def test_shards_splits_and_names(root, load, monkeypatch):
  _write(root, 'data/train-00000-of-00002-abc.parquet', [0, 1, 1, 0, None])
  _write(root, 'data/train-00001-of-00002-abc.parquet', [1, -1], seed=1)
  _write(root, 'data/test-00000-of-00001.parquet', [1, 0], seed=2)
  _write(root, 'data/unsupervised-00000-of-00001.parquet', [1], seed=3)
  data = load()
  assert data.train.y.tolist() == [0, 1, 1, 0, -1, 1, -1, -1]
  assert data.test.y.tolist() == [1, 0]
  assert data.class_names == ('cat', 'dog')
  assert data.example_shape == (5, 6, 1) and data.owners is None
  for number, content in ((0, (0, 0)), (6, (1, 1)), (7, (3, 0))):
    expected = _decoded(hub_files.png(1_000 * content[0] + content[1]))
    np.testing.assert_array_equal(data.train.x[number, ..., 0], expected)
  monkeypatch.setattr(image_cache, '_make', None)
  assert isinstance(load().train.x, np.memmap)


def test_secret_test_labels(root, load):
  _write(root, 'train.parquet', [0, 1])
  _write(root, 'test.parquet', [-1, -1], seed=1)
  _write(root, 'validation.parquet', [1, 0, 1], seed=2)
  assert load().test.y.tolist() == [1, 0, 1]


def test_a_share_for_testing_and_clients(root, load):
  labels = [0, 1] * 50
  _write(
    root, 'train.parquet', labels, writer=[f'w{i // 40}' for i in range(100)]
  )
  data = load(client_field='writer')
  assert 10 < len(data.test) < 30
  assert data.client_names == ('w0', 'w1', 'w2')
  assert (np.bincount(data.owners) > 10).all()
  with pytest.raises(UsageError, match='--client_field=who: there is no such'):
    load(client_field='who')


def test_other_columns_and_types(root, load):
  hub_files.write(
    root / 'train.parquet',
    {
      'img': [hub_files.png(i) for i in range(30)],
      'coarse': [0] * 30,
      'fine': ['b', 'a'] * 15,
    },
    class_names=(),
  )
  with pytest.raises(
    UsageError, match='are coarse, fine, img; name the right one by --label'
  ):
    load()
  assert load(label_field='fine').class_names == ('a', 'b')
  with pytest.raises(UsageError, match='needs two classes or more; given: 0'):
    load(label_field='coarse')


def test_configurations(root, load):
  _write(root, 'small/train/0000.parquet', [0, 1])
  _write(root, 'small/test/0000.parquet', [0, 1], seed=1)
  _write(root, 'large/train-00000-of-00001.parquet', [0, 1, 1], seed=2)
  _write(root, 'large/test-00000-of-00001.parquet', [0, 1], seed=1)
  assert len(load(f'{_NAME}/small').train) == 2
  assert len(load(f'{_NAME}/large').train) == 3
  for name in (_NAME, f'{_NAME}/smal'):
    with pytest.raises(UsageError, match='configurations large, small; give'):
      load(name)
  _write(root, 'default/train/0000.parquet', [0, 1, 1, 0], seed=3)
  _write(root, 'default/test/0000.parquet', [0, 1], seed=1)
  assert len(load().train) == 4


def test_the_cache_of_the_hubs_client(tmp_path, load):
  cached = tmp_path / 'datasets--owner--pets'
  blob = cached / 'blobs' / 'abc'
  _write(tmp_path, blob, [0, 1, 0, 1, 1, 1, 0, 0])
  for revision in ('old', 'new'):
    link = cached / 'snapshots' / revision / 'data' / 'train.parquet'
    link.parent.mkdir(parents=True)
    link.symlink_to(blob)
  with pytest.raises(UsageError, match='no snapshot that .*main names; fetch'):
    load()
  (cached / 'refs').mkdir()
  (cached / 'refs' / 'main').write_text('new')
  assert len(load(test_share=0.3).train) < 8
  assert hub.folder_of(_NAME, str(tmp_path)).endswith('snapshots/new')


def test_default_folder(monkeypatch):
  for name in ('HF_HOME', 'HF_HUB_CACHE'):
    monkeypatch.delenv(name, raising=False)
  assert hub.base_of('') == '~/.cache/huggingface/hub'
  monkeypatch.setenv('HF_HOME', '/models')
  assert hub.base_of('') == '/models/hub'
  monkeypatch.setenv('HF_HUB_CACHE', '/cache')
  assert hub.base_of('') == '/cache' and hub.base_of('x') == 'x'
  assert '--local-dir' not in hub.fetch_command(_NAME, '')


@pytest.mark.parametrize(
  'name', ['pets', '', '/pets', 'a/../b', '../b', 'a/b/', 'a//b', 'a/b\0']
)
def test_names(load, name):
  with pytest.raises(UsageError, match='give huggingface:OWNER/NAME'):
    load(f'huggingface:{name}')


def test_what_is_not_there(load, tmp_path):
  with pytest.raises(UsageError) as error:
    load()
  command = 'hf download owner/pets --repo-type=dataset'
  command += f' --local-dir={tmp_path}/owner/pets'
  assert command in str(error.value)


_TRAIN = pathlib.Path('data') / 'train-00000-of-00001.parquet'


def _torn(path):
  path.write_bytes(path.read_bytes()[:-50])


def _damaged(path):
  content = bytearray(path.read_bytes())
  content[4:200] = b'?' * 196
  path.write_bytes(content)


@pytest.mark.parametrize(
  'spoil,words',
  [
    (_torn, 'it is not Parquet, or damaged'),
    (_damaged, 'or damaged'),
    (lambda path: path.write_bytes(b''), 'it is not Parquet, or damaged'),
    (lambda path: path.write_text('version https://git-lfs.x'), 'git lfs pull'),
    (lambda path: path.unlink(), 'it has no Parquet files'),
    (lambda path: (path.unlink(), os.mkfifo(path)), 'not a regular file'),
    (lambda path: (path.unlink(), path.symlink_to(path)), 'leads back'),
    (lambda path: path.rename(path.parent / 'some.parquet'), 'some'),
  ],
)
def test_hostile_files_are_one_line(root, load, spoil, words):
  _write(root, _TRAIN, [0, 1] * 5)
  _write(root, 'data/other-00000-of-00001.parquet', [0, 1])
  if 'no Parquet' in words:
    (root / 'data/other-00000-of-00001.parquet').unlink()
  spoil(root / _TRAIN)
  with pytest.raises(UsageError) as error:
    load()
  message = str(error.value)
  assert words in message and len(message.splitlines()) == 1


def test_rows_that_cannot_be_read(root, load):
  images = hub_files.images(20)
  images[3] = {'bytes': None, 'path': 'elsewhere.png'}
  images[5] = {'bytes': b'torn', 'path': 'a.png'}
  labels = [0, 1] * 10
  labels[7] = 2
  hub_files.write(root / 'train.parquet', {'image': images, 'label': labels})
  _write(root, 'test.parquet', [0, 1])
  with pytest.raises(UsageError) as error:
    load()
  message = str(error.value)
  for words in (
    '3 images cannot be read',
    'train 3: its image is not in the file',
    'train 7: its label is 2, of 2 classes',
    '--max_unreadable=3',
  ):
    assert words in message
  assert len(load(max_unreadable=3).train) == 17


def test_shards_of_different_columns(root, load):
  _write(root, 'train-00000-of-00002.parquet', [0, 1])
  parquet.write_table(
    pa.table({'image': [b'']}), root / 'train-00001-of-00002.parquet'
  )
  with pytest.raises(UsageError, match="00001-.* has no column 'label'"):
    load()
