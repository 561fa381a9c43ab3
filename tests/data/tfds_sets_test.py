import json
import os

import pytest
import tiny_tfds

from tff_fssl.data import catalog
from tff_fssl.data import names
from tff_fssl.data.data_hparams import DataHparams
from tff_fssl.hparams import UsageError


def _find(name, folder, **settings):
  return catalog.find(name, str(folder), DataHparams(**settings))


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
