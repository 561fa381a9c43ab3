import dataclasses
import json
import math
import os

import numpy as np
import pytest
import tiny_tfds

from tff_fssl.data import names
from tff_fssl.data import pictures
from tff_fssl.data import sources
from tff_fssl.data.data_hparams import DataHparams
from tff_fssl.hparams import UsageError


def _find(name, folder, **settings):
  return sources.find(name, str(folder), DataHparams(**settings))


def _facts(info):
  return info.num_classes, info.example_shape, info.num_train, info.num_test


@pytest.fixture(scope='module', name='folder')
def _folder(tmp_path_factory):
  folder = tmp_path_factory.mktemp('tfds')
  tiny_tfds.write(
    folder, 'leaves', {'train': 30, 'test': 9}, num_classes=3, shape=(6, 5, 1)
  )
  tiny_tfds.write(
    folder,
    'flowers',
    {'train': 40},
    num_classes=4,
    shape=(None, None, 3),
    keys=('photo', 'species'),
  )
  tiny_tfds.write(
    folder,
    'stl10',
    {'train': 9, 'test': 8, 'unlabelled': 7},
    num_classes=2,
    shape=(6, 6, 3),
  )
  return folder


def test_facts_come_from_the_disk(folder):
  assert _facts(_find('leaves', folder)) == (3, (6, 5, 1), 30, 9)
  info = _find('leaves', folder, image_size='8', color='rgb', flip=False)
  assert _facts(info) == (3, (8, 8, 3), 30, 9) and not info.flip
  info = _find('flowers', folder)
  assert info.num_train + info.num_test == 40 and info.num_test
  assert info.example_shape == (32, 32, 3)
  assert 'test_share' in info.uses
  assert 'test_share' not in _find('leaves', folder).uses
  assert _facts(_find('stl10', folder)) == (2, (6, 6, 3), 16, 8)


def test_configurations(folder, tmp_path):
  tiny_tfds.write(
    tmp_path / 'leaves', 'big', {'train': 3, 'test': 3}, 3, shape=(9, 9, 3)
  )
  assert _find('leaves/big', tmp_path).example_shape == (9, 9, 3)


def test_known_sets_keep_their_facts_without_files(tmp_path):
  for name, info in names.DATA_SETS.items():
    found = _find(name, tmp_path)
    assert _facts(found) == _facts(info)
    for field in ('mean', 'std', 'flip'):
      assert getattr(found, field) == getattr(info, field)
    assert not found.num_validation


@pytest.mark.parametrize(
  'name,preset,sizes',
  [
    ('cifar10', 'fedmatch', (57_000, 3_000, 3_000)),
    ('cifar10', 'fedmatch_code', (58_000, 2_000, 2_000)),
    ('fashion_mnist', 'fedmatch', (66_500, 3_500, 3_500)),
    ('cifar10', 'protofssl', (57_000, 3_000, 3_000)),
    ('svhn_cropped', 'protofssl', (56_000, 2_000, 2_000)),
  ],
)
def test_presets(tmp_path, name, preset, sizes):
  info = _find(name, tmp_path, split_preset=preset)
  assert (info.num_train, info.num_test, info.num_validation) == sizes
  assert info.mean == names.DATA_SETS[name].mean
  assert info.example_shape == names.DATA_SETS[name].example_shape


def test_presets_of_other_sets_are_refused(folder):
  for name in ('cifar100', 'leaves'):
    with pytest.raises(UsageError, match='svhn_cropped, stl10, not'):
      _find(name, folder, split_preset='protofssl')


def test_extra_images_count(tmp_path):
  info = _find('svhn_cropped', tmp_path, svhn_extra=True)
  assert info.num_train == 73_257 + 531_131
  assert 'svhn_extra' not in _find('cifar10', tmp_path).uses


@pytest.mark.parametrize('name', ['leave', '../leaves', 'a b', '', 'lea/ves/x'])
def test_unknown_names(folder, name):
  with pytest.raises(UsageError) as error:
    _find(name, folder)
  message = str(error.value)
  assert '\n' not in message
  for words in ('cifar10, ', 'folder:PATH', 'flowers, leaves, stl10'):
    assert words in message
  assert ("did you mean 'leaves'" in message) == ('lea' in name)


def _edit(path, edit):
  content = json.loads(path.read_text())
  edit(content)
  path.write_text(json.dumps(content))


def _features(edit):
  return lambda folder: _edit(
    folder / 'features.json', lambda c: edit(c['featuresDict']['features'])
  )


def _sizes(size):
  return lambda folder: _edit(
    folder / 'dataset_info.json',
    lambda c: c['splits'][0].update(shardLengths=[str(size)]),
  )


def _classes(number):
  def damage(folder):
    _features(
      lambda c: c['label']['classLabel'].update(numClasses=str(number))
    )(folder)
    (folder / 'label.labels.txt').unlink(missing_ok=True)

  return damage


@pytest.mark.parametrize(
  'damage,words',
  [
    (lambda f: (f / 'features.json').write_text('{"half'), 'not JSON'),
    (lambda f: (f / 'features.json').unlink(), 'cannot be read'),
    (
      lambda f: (f / 'features.json').write_text('{}'),
      'cannot be read',
    ),
    (
      lambda f: (
        (f / 'features.json').unlink(),
        os.mkfifo(f / 'features.json'),
      ),
      'not a regular file',
    ),
    (
      _features(lambda c: c['label']['classLabel'].update(numClasses=math.inf)),
      'it holds Infinity',
    ),
    (
      lambda f: _edit(
        f / 'features.json',
        lambda c: (c.clear(), c.update(content='{"image": 1e999}')),
      ),
      'it holds 1e999',
    ),
    (
      lambda f: _edit(
        f / 'dataset_info.json',
        lambda c: c['splits'][0].update(shardLengths=[math.nan]),
      ),
      'it holds NaN',
    ),
    (_features(lambda c: c.pop('image')), '0 features of kind image'),
    (_features(lambda c: c.pop('label')), '0 features of kind classLabel'),
    (
      _features(lambda c: c['image']['image'].update(dtype='uint16')),
      r'its images are uint16 \[6, 5, 1\]',
    ),
    (
      lambda f: _edit(f / 'dataset_info.json', lambda c: c['splits'].pop(0)),
      "no split 'train', but test",
    ),
    *(
      (_sizes(size), 'cannot be read .*: its splits have .* rows')
      for size in (2**31, -1)
    ),
    *(
      (_classes(number), f'cannot be read .*: it has {number} classes')
      for number in (-1, 100_001)
    ),
    (
      lambda f: (f / 'label.labels.txt').write_text('a\nb\n'),
      'names 2 of 3 classes',
    ),
  ],
)
def test_damaged_sets_are_refused(tmp_path, damage, words):
  tiny_tfds.write(
    tmp_path, 'leaves', {'train': 3, 'test': 3}, num_classes=3, shape=(6, 5, 1)
  )
  damage(tmp_path / 'leaves' / '1.0.0')
  with pytest.raises(UsageError, match=words) as error:
    _find('leaves', tmp_path)
  reason, _, command = str(error.value).partition('\n  ')
  assert '\n' not in reason + command and 'leaves/1.0.0' in reason


def test_folders_that_cannot_be_read(tmp_path, monkeypatch):
  tiny_tfds.write(
    tmp_path, 'leaves', {'train': 3, 'test': 3}, num_classes=3, shape=(6, 5, 1)
  )
  (tmp_path / 'other').mkdir()
  (tmp_path / 'file').write_text('')
  listdir = os.listdir

  def refuse(path):
    if str(path).endswith('other'):
      raise PermissionError(13, 'Permission denied')
    return listdir(path)

  monkeypatch.setattr(os, 'listdir', refuse)
  with pytest.raises(UsageError, match='no permission to read it'):
    _find('other', tmp_path)
  with pytest.raises(UsageError, match=r'\(leaves\)'):
    _find('unknown', tmp_path)


@pytest.fixture(name='load')
def _load(tmp_path):
  def load(name, **settings):
    settings = DataHparams(cache_dir=str(tmp_path / 'cache'), **settings)
    return sources.load(name, str(tmp_path), settings)

  return load


def _small(monkeypatch, preset, name, split):
  """Makes a preset fit a small set."""
  splits = {**names.SPLIT_PRESETS[preset], name: split}
  monkeypatch.setitem(names.SPLIT_PRESETS, preset, splits)


def _rows(x):
  return [image.tobytes() for image in x]


def test_images_of_one_shape(load, tmp_path):
  arrays = tiny_tfds.write(
    tmp_path, 'leaves', {'train': 30, 'test': 9}, num_classes=3, shape=(6, 5, 1)
  )
  data = load('leaves')
  assert isinstance(data.train.x, np.memmap)
  for split in ('train', 'test'):
    examples = getattr(data, split)
    np.testing.assert_array_equal(examples.x, arrays[split][0])
    np.testing.assert_array_equal(examples.y, arrays[split][1])
  np.testing.assert_allclose(data.mean, [(data.train.x / 255).mean()])
  assert 'Made for a test' in data.notes


def test_images_of_many_shapes_and_a_share_for_testing(load, tmp_path):
  arrays = tiny_tfds.write(
    tmp_path,
    'flowers',
    {'train': 40},
    num_classes=2,
    shape=(None, None, 3),
    keys=('photo', 'species'),
  )
  data = load('flowers', image_size='4x6', resize='squash')
  form = pictures.Form((4, 6, 3), 'squash')
  expected = _rows(pictures.convert(x, form) for x in arrays['train'][0])
  found = [*_rows(data.train.x), *_rows(data.test.x)]
  assert len(data.test) and sorted(found) == sorted(expected)
  labels = [*data.train.y, *data.test.y]
  of = dict(zip(expected, arrays['train'][1]))
  assert [of[row] for row in found] == labels
  assert [row for row in expected if row in set(_rows(data.test.x))] == _rows(
    data.test.x
  )


def _old_form(content, form):
  """What older versions of TFDS wrote instead of `content`."""
  kind = 'tensorflow_datasets.core.features.{}'.format
  proto = {'features': content['featuresDict']['features']}
  if form == 'json':
    image = {'shape': [6, None, 1], 'dtype': 'uint8', 'encoding_format': 'png'}
    features = {
      'image': {'type': kind('image_feature.Image'), 'content': image},
      'label': {
        'type': kind('class_label_feature.ClassLabel'),
        'content': {'num_classes': 3},
      },
    }
    name = ''
  else:
    features = json.dumps(proto) if form == 'text' else proto
    name = 'tensorflow_datasets.FeaturesDict'
  return {
    'type': kind('features_dict.FeaturesDict'),
    'content': features,
    'proto_cls': name,
  }


@pytest.mark.parametrize('form', ['json', 'text', 'proto'])
def test_sets_that_an_older_tfds_wrote(load, tmp_path, form):
  arrays = tiny_tfds.write(
    tmp_path, 'leaves', {'train': 9, 'test': 4}, num_classes=3, shape=(6, 5, 1)
  )
  file = tmp_path / 'leaves' / '1.0.0' / 'features.json'
  old = _old_form(json.loads(file.read_text()), form)
  file.write_text(json.dumps(old))
  data = load('leaves', image_size='6x5')
  np.testing.assert_array_equal(data.train.x, arrays['train'][0])
  np.testing.assert_array_equal(data.test.y, arrays['test'][1])


def test_unlabelled_images_are_for_training(load, tmp_path):
  counts = {'train': 9, 'test': 8, 'unlabelled': 7}
  arrays = tiny_tfds.write(
    tmp_path, 'stl10', counts, num_classes=2, shape=(6, 6, 3)
  )
  data = load('stl10')
  assert data.train.y.tolist() == [*arrays['train'][1], *[-1] * 7]
  np.testing.assert_array_equal(data.train.x[9:], arrays['unlabelled'][0])
  assert len(data.test) == 8


@pytest.mark.parametrize('of_class', [False, True])
def test_presets_pool_and_split_anew(load, tmp_path, monkeypatch, of_class):
  arrays = tiny_tfds.write(tmp_path, 'cifar10', {'train': 50, 'test': 20})
  split = names.SplitPreset(*((4, 1, 1) if of_class else (40, 5, 6)), of_class)
  _small(monkeypatch, 'fedmatch', 'cifar10', split)
  data = load('cifar10', split_preset='fedmatch')
  sizes = (50, 10) if of_class else (45, 6)
  assert (len(data.train), len(data.test)) == sizes
  if of_class:
    assert np.bincount(data.train.y).tolist() == [5] * 10
    assert np.bincount(data.test.y).tolist() == [1] * 10
  pool = dict(
    zip(
      _rows(np.concatenate([arrays['train'][0], arrays['test'][0]])),
      np.concatenate([arrays['train'][1], arrays['test'][1]]),
    )
  )
  train, test = _rows(data.train.x), _rows(data.test.x)
  assert len({*train, *test}) == sum(sizes)
  assert [pool[row] for row in train] == data.train.y.tolist()
  assert [pool[row] for row in test] == data.test.y.tolist()
  # Both come from both.
  published = set(_rows(arrays['test'][0]))
  assert 0 < len(published & set(train)) < 20
  # Known sets keep the moments of their tables.
  assert data.mean == names.DATA_SETS['cifar10'].mean
  np.testing.assert_array_equal(
    load('cifar10', split_preset='fedmatch').test.x, data.test.x
  )


def test_too_small_for_a_preset(load, tmp_path):
  tiny_tfds.write(tmp_path, 'cifar10', {'train': 50, 'test': 20})
  with pytest.raises(UsageError, match='needs 6,000 images of each class'):
    load('cifar10', split_preset='protofssl')


def test_svhn_extra(load, tmp_path, monkeypatch):
  counts = {'train': 20, 'test': 10, 'extra': 15}
  arrays = tiny_tfds.write(tmp_path, 'svhn_cropped', counts)
  data = load('svhn_cropped', svhn_extra=True)
  for split, rows in (('train', slice(20)), ('extra', slice(20, 35))):
    np.testing.assert_array_equal(data.train.x[rows], arrays[split][0])
    np.testing.assert_array_equal(data.train.y[rows], arrays[split][1])
  np.testing.assert_array_equal(data.test.y, arrays['test'][1])
  assert len(load('svhn_cropped').train) == 20
  _small(monkeypatch, 'protofssl', 'svhn_cropped', names.SplitPreset(12, 3, 5))
  data = load('svhn_cropped', svhn_extra=True, split_preset='protofssl')
  assert (len(data.train), len(data.test)) == (30, 5)


def test_a_missing_split(load, tmp_path):
  tiny_tfds.write(tmp_path, 'svhn_cropped', {'train': 20, 'test': 10})
  with pytest.raises(UsageError, match="has no split 'extra'; remove it"):
    load('svhn_cropped', svhn_extra=True)
  tiny_tfds.write(tmp_path, 'cifar10', {'train': 20, 'validation': 10})
  with pytest.raises(UsageError, match="has no split 'test'; remove it"):
    load('cifar10')


def test_damaged_files_are_refused_and_leave_nothing(load, tmp_path):
  tiny_tfds.write(
    tmp_path, 'leaves', {'train': 30, 'test': 9}, num_classes=3, shape=(6, 5, 1)
  )
  file = min(tmp_path.glob('*/*/*test*tfrecord*'))
  os.truncate(file, file.stat().st_size // 2)
  with pytest.raises(
    UsageError, match='(?s)cannot be read.*; remove .*tfds.load'
  ):
    load('leaves')
  assert os.listdir(tmp_path / 'cache') == ['lock']


def test_a_class_without_images(load, tmp_path):
  tiny_tfds.write(
    tmp_path, 'leaves', {'train': 2, 'test': 3}, num_classes=3, shape=(6, 5, 1)
  )
  with pytest.raises(UsageError, match='without a training example: 2'):
    load('leaves')


def test_loaders_of_users_still_give_what_is_loaded(load, monkeypatch, digits):
  info = names.DATA_SETS['digits']
  mine = dataclasses.replace(info, name='mine')
  monkeypatch.setitem(names.DATA_SETS, 'mine', mine)
  data = load('mine')
  np.testing.assert_array_equal(data.train.x, digits.train.x)
  assert (data.name, data.mean, data.std) == ('mine', info.mean, info.std)
