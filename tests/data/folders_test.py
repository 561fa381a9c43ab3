import json
import os
import pathlib

import numpy as np
import picture_folders
from PIL import Image
import pytest

from tff_fssl.data import catalog
from tff_fssl.data import image_cache
from tff_fssl.data import sources
from tff_fssl.data.data_hparams import DataHparams
from tff_fssl.hparams import UsageError

_MANIFEST = [
  'path,label,client,split',
  '0.png,cat,ann,train',
  '1.png,dog,bob,train',
  '2.png,,ann,train',
  '3.png,dog,,train',
  '4.png,cat,,test',
  '5.png,dog,,test',
]


@pytest.fixture(name='load')
def _load(tmp_path):
  """Loads the folder `images` with settings; its cache is beside it."""

  def load(**settings):
    settings = {'image_size': '8', **settings}
    return sources.load(
      'folder:images',
      str(tmp_path),
      DataHparams(cache_dir=str(tmp_path / 'cache'), **settings),
    )

  return load


def test_manifest_with_clients(load, tmp_path):
  root = tmp_path / 'images'
  picture_folders.manifest(root, _MANIFEST)
  data = load(image_size='7x9')
  assert isinstance(data.train.x, np.memmap)
  with Image.open(root / '1.png') as image:
    np.testing.assert_array_equal(data.train.x[1], np.asarray(image))
  assert data.train.y.tolist() == [0, 1, -1, 1]
  assert data.test.y.tolist() == [0, 1]
  assert data.owners.tolist() == [0, 1, 0, -1]
  assert data.owners.dtype == np.int32
  assert data.client_names == ('ann', 'bob')
  assert data.class_names == ('cat', 'dog')
  assert data.example_shape == (7, 9, 3)
  pixels = data.train.x / 255
  np.testing.assert_allclose(data.mean, pixels.mean((0, 1, 2)))
  np.testing.assert_allclose(data.std, pixels.std((0, 1, 2)))


def test_class_folders(load, tmp_path):
  picture_folders.class_folders(tmp_path / 'images', {'a': 20, 'b': 20})
  data = load(color='gray', resize='squash', test_share=0.3)
  assert data.example_shape == data.train.x.shape[1:] == (8, 8, 1)
  assert len(data.train) + len(data.test) == 40
  assert data.owners is None and data.client_names == ()
  assert '0.3 of each class' in data.notes


def _count(monkeypatch):
  made = []
  make = image_cache._make
  monkeypatch.setattr(
    image_cache, '_make', lambda *args: (made.append(1), make(*args))
  )
  return made


def test_decoded_once_and_anew_after_a_change(load, tmp_path, monkeypatch):
  made = _count(monkeypatch)
  root = tmp_path / 'images'
  picture_folders.manifest(root, _MANIFEST)
  steps = [
    lambda: load(),
    lambda: load(image_size='9'),
    lambda: load(resize='squash'),
    lambda: os.utime(root / '2.png', (1, 1)),
    lambda: picture_folders.draw(root / '3.png', 99),
    lambda: (root / 'manifest.csv').write_text('\n'.join(_MANIFEST[:-1])),
  ]
  for number, step in enumerate(steps, 1):
    step()
    again = [load(), load(flip=False, max_unreadable=5)]
    assert len(made) == number
    np.testing.assert_array_equal(again[0].train.x, again[1].train.x)


def test_unreadable_files(load, tmp_path):
  root = tmp_path / 'images'
  picture_folders.manifest(root, [*_MANIFEST, '6.png,cat,cyd,train'])
  (root / '0.png').write_text('no image')
  (root / '5.png').unlink()
  with pytest.raises(UsageError) as error:
    load()
  message = str(error.value)
  for words in (
    '2 image files cannot be read',
    '0.png: it is not an image',
    '5.png: it does not exist',
    '--max_unreadable=2',
  ):
    assert words in message
  assert '\n' not in message
  data = load(max_unreadable=2)
  assert data.train.y.tolist() == [1, -1, 1, 0]
  assert data.owners.tolist() == [1, 0, -1, 2]
  assert data.test.y.tolist() == [0]


def test_a_class_of_which_nothing_is_left(load, tmp_path):
  root = tmp_path / 'images'
  picture_folders.manifest(root, _MANIFEST)
  (root / '0.png').write_text('no image')
  with pytest.raises(UsageError, match='without a training example: cat'):
    load(max_unreadable=9)


def test_what_is_wrong_is_found_without_opening_an_image(tmp_path):
  picture_folders.class_folders(tmp_path / 'one', {'a': 9})
  for path, words in (
    ('one', 'two classes or more; given: a; put this right'),
    ('none', 'it does not exist'),
    ('', 'give the folder'),
  ):
    with pytest.raises(UsageError, match=words) as error:
      catalog.find(f'folder:{path}', str(tmp_path), DataHparams())
    assert str(error.value).startswith(f'--dataset=folder:{path}: ')


def test_facts_are_known_without_loading(tmp_path, monkeypatch):
  picture_folders.class_folders(
    tmp_path, {'train/a': 2, 'train/b': 1, 'test/a': 1}
  )
  monkeypatch.chdir(tmp_path.parent)
  settings = DataHparams(image_size='16x24', color='gray', flip=False)
  for data_dir, path in (
    ('', str(tmp_path)),
    ('', tmp_path.name),
    (str(tmp_path.parent), tmp_path.name),
    ('/nowhere', str(tmp_path)),
  ):
    info = catalog.find(f'folder:{path}', data_dir, settings)
    assert (info.num_classes, info.num_train, info.num_test) == (2, 3, 1)
    assert info.example_shape == (16, 24, 1) and not info.flip
    assert 'test_share' not in info.uses and 'image_size' in info.uses


def test_foreign_facts_are_refused(load, tmp_path):
  picture_folders.manifest(tmp_path / 'images', _MANIFEST)
  load()
  index = next(pathlib.Path(tmp_path / 'cache').glob('*/index.json'))
  content = json.loads(index.read_text())
  for facts in (
    {},
    {**content['facts'], 'y': [0]},
    {**content['facts'], 'unreadable': 3},
  ):
    index.write_text(json.dumps({**content, 'facts': facts}))
    with pytest.raises(UsageError, match='remove this folder'):
      load()


def test_odd_names_of_classes_and_files(load, tmp_path):
  root = tmp_path / 'images'
  for number, label in enumerate(['a b', 'a\nb', 'é', os.fsdecode(b'\xff')]):
    for split in ('train', 'test'):
      name = root / split / label / os.fsdecode(b'\xfe \n.png')
      picture_folders.draw(root / f'{number}.png', number)
      name.parent.mkdir(parents=True)
      os.rename(root / f'{number}.png', name)
  data = load()
  assert data.class_names == ('a\nb', 'a b', 'é', '\udcff')
  assert data.train.y.tolist() == data.test.y.tolist() == [0, 1, 2, 3]
  np.testing.assert_array_equal(load().test.x, data.train.x)
