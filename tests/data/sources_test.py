import os

import numpy as np
import pytest
import tiny_tfds

from tff_fssl.data import names
from tff_fssl.data import sources
from tff_fssl.data.data_hparams import DataHparams
from tff_fssl.hparams import UsageError


@pytest.fixture(scope='module')
def small(tmp_path_factory):
  folder = tmp_path_factory.mktemp('tfds')
  counts = {'train': 30, 'test': 11}
  return str(folder), tiny_tfds.write(folder, 'fashion_mnist', counts)


def test_tfds_data_come_in_stored_order(small):
  folder, arrays = small
  data = sources.load('fashion_mnist', folder)
  for split in ('train', 'test'):
    examples = getattr(data, split)
    assert isinstance(examples.x, np.memmap)
    np.testing.assert_array_equal(examples.x, arrays[split][0])
    np.testing.assert_array_equal(examples.y, arrays[split][1])
    assert examples.y.dtype == np.int32
  assert data.num_classes == len(data.class_names) == 10
  assert data.example_shape == (28, 28, 1)
  assert 'Made for a test' in data.notes


def test_truncated_file_is_refused(tmp_path):
  tiny_tfds.write(tmp_path, 'fashion_mnist', {'train': 30, 'test': 11})
  file = min(tmp_path.glob('*/*/*test*tfrecord*'))
  os.truncate(file, file.stat().st_size // 2)
  with pytest.raises(
    UsageError, match='(?s)cannot be read.*; remove .*tfds.load'
  ):
    sources.load('fashion_mnist', str(tmp_path))


def test_damaged_metadata_are_refused(tmp_path):
  tiny_tfds.write(tmp_path, 'fashion_mnist', {'train': 4, 'test': 4})
  (tmp_path / 'fashion_mnist/1.0.0/features.json').write_text('{"half')
  with pytest.raises(UsageError, match='cannot be read'):
    sources.load('fashion_mnist', str(tmp_path))


def test_another_data_set_is_refused(tmp_path):
  tiny_tfds.write(
    tmp_path, 'svhn_cropped', {'train': 4, 'test': 4}, num_classes=7
  )
  with pytest.raises(UsageError, match='is not svhn_cropped: it has 7 classes'):
    sources.load('svhn_cropped', str(tmp_path))


def test_missing_data_set_names_the_command(tmp_path):
  with pytest.raises(UsageError) as e:
    sources.load('cifar100', str(tmp_path))
  assert f'--data_dir={tmp_path}' in str(e.value)
  assert f"tfds.load('cifar100', data_dir='{tmp_path}')" in str(e.value)


def test_default_folder_is_that_of_tfds(tmp_path, monkeypatch):
  monkeypatch.setenv('TFDS_DATA_DIR', str(tmp_path))
  with pytest.raises(UsageError, match=str(tmp_path)):
    sources.load('cifar100')


def test_unknown_name_is_refused():
  with pytest.raises(UsageError, match="did you mean 'digits'"):
    sources.load('digit')


def test_digits(digits):
  assert (len(digits.train), len(digits.test)) == (1437, 360)
  assert digits.train.x.shape[1:] == digits.example_shape == (8, 8, 1)
  assert digits.train.x.max() == 255
  share = np.bincount(digits.test.y) / np.bincount(digits.train.y)
  assert np.all(np.abs(share - 0.25) < 0.02)
  again = sources.load('digits')
  np.testing.assert_array_equal(again.train.x, digits.train.x)
  # No image is on both sides but for true duplicates.
  train = {x.tobytes() for x in digits.train.x}
  assert sum(x.tobytes() in train for x in digits.test.x) == 0


def test_published_sizes_and_moments(digits):
  info = names.DATA_SETS['digits']
  assert (info.num_train, info.num_test) == (1437, 360)
  pixels = digits.train.x / 255
  np.testing.assert_allclose(pixels.mean(), info.mean[0], atol=1e-4)
  np.testing.assert_allclose(pixels.std(), info.std[0], atol=1e-4)


def test_real_cifar10(cifar10):
  assert np.bincount(cifar10.train.y).tolist() == [5000] * 10
  assert np.bincount(cifar10.test.y).tolist() == [1000] * 10
  assert cifar10.class_names[0] == 'airplane'
  assert 100 < cifar10.train.x[:100].mean() < 140


def test_examples_of_a_wrong_kind_are_refused():
  with pytest.raises(UsageError, match=r'images \(uint8'):
    sources.Examples(np.zeros((2, 3, 3, 1)), np.zeros(2, np.int32))
  with pytest.raises(UsageError, match='must be integers'):
    sources.Examples(np.zeros((2, 3, 3, 1), np.uint8), np.zeros(3, np.int32))


def _find(name, folder=''):
  return sources.find(name, str(folder), DataHparams())


def test_named_sets_need_no_files():
  assert _find('digits') is names.DATA_SETS['digits']
  info = _find('cifar10')
  assert info.num_train == 50_000
  assert info.mean == names.DATA_SETS['cifar10'].mean


@pytest.mark.parametrize(
  'prefix, words',
  [
    (names.FOLDER, 'it does not exist'),
    (names.CLIENT_DATA, 'it does not exist'),
    (names.TEXT, 'it does not exist'),
    (names.FEATURES, 'ends with .npz'),
    (names.HUB, 'as the hub calls it'),
  ],
)
def test_a_prefix_chooses_the_reader(tmp_path, prefix, words):
  with pytest.raises(UsageError, match=words):
    _find(f'{prefix}missing', tmp_path)


def test_a_text_file_is_found_and_loaded(tmp_path):
  (tmp_path / 'news.csv').write_text(
    'text,label,split\nfirst one,a,train\nsecond,b,train\nthird,a,test\n'
  )
  info = _find('text:news.csv', tmp_path)
  assert (info.num_train, info.num_test, info.num_classes) == (2, 1, 2)
  data = sources.load_found(info, str(tmp_path))
  assert data.class_names == ('a', 'b')


def test_other_names_are_looked_for_in_tfds(tmp_path):
  with pytest.raises(UsageError, match="known are .*did you mean 'digits'"):
    _find('digit', tmp_path)
