"""Data sets by the name in --dataset."""

import pytest

from tff_fssl.data import catalog
from tff_fssl.data import names
from tff_fssl.data import sources
from tff_fssl.data.data_hparams import DataHparams
from tff_fssl.hparams import UsageError


def _find(name, folder=''):
  return catalog.find(name, str(folder), DataHparams())


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
