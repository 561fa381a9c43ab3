"""MNIST's kind of files."""

import gzip
import struct

import numpy as np
import pytest

from tff_fssl.data import sources
from tff_fssl.data.data_hparams import DataHparams
from tff_fssl.data.sources import idx
from tff_fssl.data.sources import tfds
from tff_fssl.hparams import UsageError


def _write(folder, name, values, ending=''):
  header = struct.pack(
    f'>BBBB{values.ndim}I', 0, 0, 8, values.ndim, *values.shape
  )
  content = header + values.tobytes()
  if ending:
    content = gzip.compress(content)
  (folder / f'{name}-ubyte{ending}').write_bytes(content)


def _folder(folder, ending='', num=20):
  folder.mkdir(exist_ok=True)
  rng = np.random.default_rng(0)
  arrays = {}
  for split, count in (('train', num), ('t10k', num // 2)):
    x = rng.integers(0, 256, (count, 28, 28), np.uint8)
    y = (np.arange(count) % 10).astype(np.uint8)
    _write(folder, f'{split}-images-idx3', x, ending)
    _write(folder, f'{split}-labels-idx1', y, ending)
    arrays[split] = x, y
  return arrays


@pytest.fixture(name='settings')
def _settings(tmp_path):
  return DataHparams(cache_dir=str(tmp_path / 'cache'))


@pytest.mark.parametrize('ending', ['', '.gz'])
def test_a_folder(tmp_path, settings, ending):
  arrays = _folder(tmp_path / 'a', ending)
  data = sources.load(f'idx:{tmp_path}/a', settings=settings)
  for split, examples in (('train', data.train), ('t10k', data.test)):
    np.testing.assert_array_equal(examples.x[..., 0], arrays[split][0])
    np.testing.assert_array_equal(examples.y, arrays[split][1])
  assert data.example_shape == (28, 28, 1) and data.num_classes == 10


def test_debians_fashion_mnist(tmp_path, settings, monkeypatch):
  arrays = _folder(tmp_path / 'debian')
  monkeypatch.setattr(idx, 'FASHION_MNIST', str(tmp_path / 'debian'))
  stored = tfds._FASHION_MNIST._replace(sizes={'train': 20, 'test': 10})
  monkeypatch.setattr(tfds, '_FASHION_MNIST', stored)
  data = sources.load('fashion_mnist', str(tmp_path), settings)
  np.testing.assert_array_equal(data.train.x[..., 0], arrays['train'][0])
  assert data.class_names[9] == 'Ankle boot' and 'Debian' in data.notes
  assert data.mean == (0.2860,)


def test_damaged_files(tmp_path, settings):
  name = f'idx:{tmp_path}/a'
  with pytest.raises(
    UsageError, match='it has neither train-images-idx3-ubyte'
  ):
    sources.find(name, '', settings)
  _folder(tmp_path / 'a')
  path = tmp_path / 'a/train-images-idx3-ubyte'
  whole = path.read_bytes()
  for content, words in (
    (whole[:-1], r'bytes, but states \[20, 28, 28\]'),
    (b'PNG' + whole[3:], 'it is no IDX file of unsigned bytes'),
    (b'', 'it is no IDX file of unsigned bytes'),
    # Dimensions whose product overflows.
    (bytes([0, 0, 8, 3]) + b'\xff' * 12, 'bytes, but states'),
  ):
    path.write_bytes(content)
    with pytest.raises(UsageError, match=words):
      sources.find(name, '', settings)
  path.write_bytes(whole)
  _write(tmp_path / 'a', 'train-labels-idx1', np.zeros(19, np.uint8))
  with pytest.raises(UsageError, match=r'images are \[20, 28, 28\]'):
    sources.find(name, '', settings)
