import dataclasses
import io

import numpy as np
from PIL import Image
import pytest

from tff_fssl.data import inspection
from tff_fssl.data.data_hparams import DataHparams
from tff_fssl.data.sources import images
from tff_fssl.hparams import UsageError

_TORN = 'torn'


def _source(labels, **more):
  """A split for each keyword, with as many rows as it has labels."""

  def read(of_split):
    for i, label in enumerate(of_split):
      pixels = np.full((2, 2), i % 255, np.uint8)
      if label is _TORN:
        yield images.Row(str(i), b'', problem='it is torn')
      else:
        yield images.Row(str(i), pixels, label, owner=f'w{i % 2}')

  splits = {'train': labels, **more}
  return {
    name: images.Split(len(held), lambda held=held: read(held))
    for name, held in splits.items()
  }


def _decode(tmp_path, splits, **settings):
  settings = DataHparams(cache_dir=str(tmp_path / 'cache'), **settings)
  found = images.Found(
    name='rows',
    root=str(tmp_path),
    key=((),),
    settings=settings,
    open=lambda: images.open_splits(splits, settings),
    uses=images.SHAPED | {'test_share'},
  )
  info = images.find(found)
  inspection.refuse('rows', info.problems)
  return info


def test_labels_of_which_some_are_texts(tmp_path):
  info = _decode(tmp_path, _source(['b', 7, None, 'a'], test=['b', '7', 'a']))
  assert info.read().class_names == ('7', 'a', 'b')
  assert info.read().train.y.tolist() == [2, 0, -1, 1]
  assert info.read().test.y.tolist() == [2, 0, 1]
  assert info.read().owners.tolist() == [0, 1, 0, 1]
  assert info.read().example_shape == (2, 2, 1)


def test_what_is_not_labelled_is_not_for_testing(tmp_path):
  info = _decode(
    tmp_path, _source([0, 1] * 20 + [None] * 40, unlabeled=[0] * 3)
  )
  y = info.read().train.y
  assert (y < 0).sum() == 43
  assert len(info.read().test) == 40 - (y >= 0).sum() > 0
  assert 'test_share' in info.uses


def test_splits_that_cannot_be_used(tmp_path):
  with pytest.raises(UsageError, match="it has no split 'train', but a, b"):
    _decode(tmp_path, _source([], a=[1], b=[0]))
  with pytest.raises(
    UsageError, match='1 images cannot be read .*test 1: a te'
  ):
    _decode(tmp_path, _source([0, 1], test=[0, None]))
  with pytest.raises(UsageError, match="no split 'train', but no rows"):
    _decode(tmp_path / 'empty', _source([]))


def test_a_test_split_may_begin_with_rows_that_cannot_be_read(tmp_path):
  splits = _source([0, 1] * 20, test=[_TORN, *[0, 1] * 10])
  with pytest.raises(UsageError, match='1 images cannot .*test 0: it is torn'):
    _decode(tmp_path, splits)
  info = _decode(tmp_path, splits, max_unreadable=1)
  assert (info.num_train, info.num_test) == (40, 20)
  assert 'test_share' not in info.uses
  # The rows of a split that cannot be read at all are reported, too.
  with pytest.raises(UsageError, match='2 images cannot be read .*test 1'):
    _decode(tmp_path / 'all', _source([0, 1], test=[_TORN, _TORN]))


@pytest.mark.parametrize('num_same, side', [(15, 32), (16, 2)])
def test_the_first_images_choose_the_shape(tmp_path, num_same, side):
  def read():
    for i in range(20):
      shape = (2, 2) if i < num_same else (3, 3, 3)
      yield images.Row(str(i), np.zeros(shape, np.uint8), i % 2)

  split = images.Split(20, read)
  info = _decode(tmp_path, {'train': split, 'test': split})
  channels = 1 if num_same == 16 else 3
  assert info.example_shape == (side, side, channels)
  facts = {f.name: f.metadata['help'] for f in dataclasses.fields(DataHparams)}
  for flag in ('image_size', 'color'):
    assert 'first 16' in facts[flag]


def test_fields():
  choose = images.choose_fields
  assert choose(['img', 'pixels', 'label'], '', '') == ('pixels', 'label')
  assert choose({'image', 'class', 'label'}, '', 'class') == ('image', 'class')
  with pytest.raises(
    UsageError, match="--label_field=kind: .*did you mean 'ki"
  ):
    choose(['image', 'kinds', 'label'], '', 'kind')


def _texts(info):
  return [problem.text for problem in info.problems]


def test_words_for_unknown_classes(tmp_path):
  words = ['NaN', 'none', '-1', '']
  rows = ['a', 'b'] * 4 + words

  def read(labels):
    for i, label in enumerate(labels):
      image = np.full((2, 2), 9 * i, np.uint8)
      image[0, 0] = 255
      yield images.make_row(settings, str(i), image, label)

  for given, unknown in (('', 4), ('none,NA', 3)):
    settings = DataHparams(class_words=given)
    splits = {
      'train': images.Split(len(rows), lambda: read(rows)),
      'test': images.Split(8, lambda: read(['a', 'b', 'none'][: 6 - unknown])),
    }
    info = _decode(tmp_path / str(unknown), splits, class_words=given)
    data = info.read()
    assert (data.train.y < 0).sum() == unknown
    assert ('none' in data.class_names) == (unknown == 3)
    assert any(f'{unknown - 2} examples are' in text for text in _texts(info))


def test_bits_that_no_image_uses(tmp_path):
  def read(for_test):
    for i in range(4):
      values = np.full((4, 4), 1_000 * i, np.uint16)
      values[0, 0] = 3_100
      file = io.BytesIO()
      Image.fromarray(values).save(file, 'PNG')
      yield images.Row(f'{for_test} {i}', file.getvalue(), i % 2)

  splits = {
    name: images.Split(4, lambda name=name: read(name))
    for name in ('train', 'test')
  }
  info = _decode(tmp_path, splits)
  data = info.read()
  assert data.train.x[:, 2, 2, 0].tolist() == [0, 62, 125, 187]
  assert data.bit_depth == 12
  assert any('files of 16 bits use 12' in text for text in _texts(info))
  data = _decode(tmp_path, splits, bit_depth=14).read()
  assert data.train.x[:, 2, 2, 0].tolist() == [0, 15, 31, 46]


def test_images_without_content(tmp_path):
  def read():
    for i in range(6):
      yield images.Row(str(i), np.full((2, 2), i // 4, np.uint8), i % 2)

  split = images.Split(6, read)
  texts = '; '.join(_texts(_decode(tmp_path, {'train': split, 'test': split})))
  assert '12 images are of one color' in texts
  assert '2 different values, 0 to 1 of 255' in texts
