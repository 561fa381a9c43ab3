import json
import os
import pathlib

import numpy as np
import picture_folders
from PIL import Image
import pyarrow as pa
from pyarrow import parquet
import pytest

from tff_fssl.data import image_cache
from tff_fssl.data import sources
from tff_fssl.data.data_hparams import DataHparams
from tff_fssl.data.sources import folder
from tff_fssl.hparams import UsageError


def _paths(rows):
  return [row.path for row in rows]


def test_train_and_test_folders(tmp_path):
  picture_folders.class_folders(
    tmp_path,
    {'train/b': 2, 'train/a': 3, 'test/a': 1, 'test/b': 1, 'unlabeled': 2},
  )
  (tmp_path / 'train/a/notes.txt').write_text('no image')
  (tmp_path / 'train/a/.hidden.png').write_text('')
  found = folder.read(str(tmp_path), DataHparams(test_share=0.5))
  assert (
    found.marks.class_names == ('a', 'b') and found.marks.client_names == ()
  )
  assert _paths(found.train) == [
    *('train/a/0.png', 'train/a/1.jpg', 'train/a/2.BMP'),
    *('train/b/0.png', 'train/b/1.jpg'),
    *('unlabeled/0.png', 'unlabeled/1.jpg'),
  ]
  assert found.marks.y[~found.marks.in_test].tolist() == [0, 0, 0, 1, 1, -1, -1]
  assert _paths(found.test) == ['test/a/0.png', 'test/b/0.png']
  assert 'test_share' not in found.marks.uses and len(found.left_out) == 1
  assert not found.marks.problems


def test_a_share_of_each_class_is_for_testing_and_stays(tmp_path):
  picture_folders.class_folders(tmp_path, {'x': 60, 'y': 60})
  before = folder.read(str(tmp_path), DataHparams(test_share=0.25))
  assert 'test_share' in before.marks.uses
  for label in (0, 1):
    assert 6 <= before.marks.y[before.marks.in_test].tolist().count(label) <= 24
  picture_folders.class_folders(tmp_path, {'x': 90, 'z': 20})
  after = folder.read(str(tmp_path), DataHparams(test_share=0.25))
  for split in ('train', 'test'):
    old, new = (set(_paths(getattr(f, split))) for f in (before, after))
    assert old < new
  larger = folder.read(str(tmp_path), DataHparams(test_share=0.5))
  assert set(_paths(after.test)) < set(_paths(larger.test))


def test_manifest(tmp_path):
  picture_folders.manifest(
    tmp_path,
    [
      'path, label,client,split',
      '0.png,10,ann,train',
      '1.png,9,bob,train',
      '2.png,,ann,',
      '3.png,9,,train',
      '',
      '4.png,10,ann,test',
      '"5.png",9,bob,test',
    ],
  )
  found = folder.read(str(tmp_path), DataHparams(test_share=0.5))
  assert found.kind == 'manifest.csv'
  assert found.marks.class_names == ('9', '10')  # By their size.
  assert found.marks.client_names == ('ann', 'bob')
  assert found.marks.y[~found.marks.in_test].tolist() == [1, 0, -1, 0]
  assert [row.owner for row in found.train] == [0, 1, 0, -1]
  assert (
    _paths(found.test) == ['4.png', '5.png']
    and 'test_share' not in found.marks.uses
  )


def test_parquet_is_read_as_csv_is(tmp_path):
  picture_folders.manifest(
    tmp_path, ['path,label,client', '0.png,3,7', '1.png,,8', '2.png,4,']
  )
  from_csv = folder.read(str(tmp_path), DataHparams(test_share=0.001))
  (tmp_path / 'manifest.csv').unlink()
  table = pa.table(
    {
      'path': ['0.png', '1.png', '2.png'],
      'label': [3, None, 4],
      'client': pa.array([7.0, 8.0, float('nan')]),
    }
  )
  parquet.write_table(table, tmp_path / 'manifest.parquet')
  from_parquet = folder.read(str(tmp_path), DataHparams(test_share=0.001))
  for field in ('train', 'test'):
    assert getattr(from_csv, field) == getattr(from_parquet, field)
  for field in ('class_names', 'client_names'):
    assert getattr(from_csv.marks, field) == getattr(from_parquet.marks, field)
  (tmp_path / 'manifest.parquet').write_bytes(b'PAR1 torn')
  with pytest.raises(UsageError, match='it is not Parquet'):
    folder.read(str(tmp_path), DataHparams(test_share=0.5))


@pytest.mark.parametrize(
  'lines,words',
  [
    (['path,lable', '0.png,a'], 'path and label.*did you mean .label'),
    (['path,label,label', '0.png,a,a'], 'its columns are'),
    ([''], 'its columns are none'),
    (['path#label', '0.png#a'], 'its columns are path#label; it must have'),
    (['path,label', '0.png'], 'line 2: has 1 values for 2 columns'),
    (['path,label', ',a'], 'line 2: path is empty'),
    (['path,label,split', '0.png,a,val'], "line 2: its split is 'val'"),
    (
      ['path,label,split', '0.png,,test'],
      'line 2: a test example needs',
    ),
    (['path,label', '', '"0.png,a', 'b,c'], 'line 3: a row that .*in line 4'),
    (['path,label', '\udcff.png,a'], 'it is not UTF-8'),
    (['path,label'], 'has no images'),
  ],
)
def test_wrong_manifests(tmp_path, lines, words):
  text = '\n'.join(lines) + '\n'
  (tmp_path / 'manifest.csv').write_bytes(
    text.encode('utf-8', 'surrogateescape')
  )
  with pytest.raises(UsageError, match=words) as error:
    folder.read(str(tmp_path), DataHparams(test_share=0.5))
  assert '\n' not in str(error.value)


def test_wrong_folders(tmp_path):
  with pytest.raises(UsageError, match='it does not exist'):
    folder.read(str(tmp_path / 'none'), DataHparams(test_share=0.5))
  with pytest.raises(UsageError, match='has no images; it must have'):
    folder.read(str(tmp_path), DataHparams(test_share=0.5))
  (tmp_path / 'a.jpg').write_text('')
  with pytest.raises(UsageError, match='a part of its path is not a folder'):
    folder.read(str(tmp_path / 'a.jpg'), DataHparams(test_share=0.5))
  os.mkfifo(tmp_path / 'manifest.csv')
  with pytest.raises(UsageError, match='not a regular file'):
    folder.read(str(tmp_path), DataHparams(test_share=0.5))


@pytest.mark.parametrize(
  'counts,words',
  [
    ({'train/a': 1, 'test/a': 1}, ['two classes or more; given: a']),
    ({'train/a': 1, 'train/b': 1, 'test': 0}, ['have no test examples']),
    (
      {'train/a': 1, 'train/b': 1, 'test/a': 1, 'test/c': 1},
      ['without a training example: c', 'without a test example: b'],
    ),
  ],
)
def test_problems(tmp_path, counts, words):
  picture_folders.class_folders(tmp_path, counts)
  problems = folder.read(
    str(tmp_path), DataHparams(test_share=0.5)
  ).marks.problems
  assert problems[0].stops
  text = '; '.join(problem.text for problem in problems)
  for word in words:
    assert word in text


def test_changes_of_files_are_seen(tmp_path):
  picture_folders.manifest(tmp_path, ['path,label', '0.png,a', 'none.png,b'])
  before = folder.read(str(tmp_path), DataHparams(test_share=0.001)).train
  assert before[1].state == ()
  os.utime(tmp_path / '0.png', (1, 1))
  assert (
    before[0]
    != folder.read(str(tmp_path), DataHparams(test_share=0.001)).train[0]
  )


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
  assert '0.3 of the images' in data.notes


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
    '2 images cannot be read',
    '0.png: it is not a readable image',
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
    ('one', 'two classes or more; given: a; fix it, then retry'),
    ('none', 'it does not exist'),
    ('', 'give the path'),
  ):
    with pytest.raises(UsageError, match=words) as error:
      sources.find(f'folder:{path}', str(tmp_path), DataHparams())
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
    info = sources.find(f'folder:{path}', data_dir, settings)
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


@pytest.mark.parametrize('name', ['Unlabelled', 'UNKNOWN', 'unsorted'])
@pytest.mark.parametrize('train', ['', 'train/'])
def test_folders_of_unknown_classes(tmp_path, name, train):
  picture_folders.class_folders(
    tmp_path, {f'{train}a': 8, f'{train}b': 8, f'{train}{name}': 5}
  )
  marks = folder.read(str(tmp_path), DataHparams()).marks
  assert marks.class_names == ('a', 'b') and (marks.y < 0).sum() == 5
  assert not marks.in_test[marks.y < 0].any()
  settings = DataHparams(class_words=name)
  assert name in folder.read(str(tmp_path), settings).marks.class_names


def test_folders_of_clients(tmp_path):
  counts = {
    'clients/north/a': 3,
    'clients/north/unlabeled': 4,
    'clients/south/b': 2,
    'server/a': 2,
    'test/a': 2,
    'test/b': 1,
  }
  picture_folders.class_folders(tmp_path, counts)
  found = folder.read(str(tmp_path), DataHparams())
  assert found.marks.client_names == ('north', 'south')
  owners = [image.owner for image in found.train]
  assert [owners.count(i) for i in (0, 1, -1)] == [7, 2, 2]
  assert len(found.test) == 3 and found.marks.class_names == ('a', 'b')
  info = folder.find(
    f'folder:{tmp_path}', '', DataHparams(cache_dir=str(tmp_path / 'cache'))
  )
  data = info.read()
  assert info.num_server == 2 and data.server.sum() == 2
  assert (data.owners[data.server] == -1).all()


@pytest.mark.parametrize('folders', [('test',), ('server', 'test')])
def test_folders_of_a_server_whose_clients_are_elsewhere(tmp_path, folders):
  counts = {f'{name}/{c}': 3 for name in folders for c in 'ab'}
  picture_folders.class_folders(tmp_path / 'x', counts)
  info = sources.find(
    f'folder:{tmp_path}/x', '', DataHparams(cache_dir=str(tmp_path / 'cache'))
  )
  assert not info.has_clients and info.num_test == 6
  data = sources.load_found(info, None)
  assert data.class_names == ('a', 'b') and data.server.all()
  assert len(data.train) == info.num_server == 6 * (len(folders) - 1)


def test_hospitals_that_would_be_classes_are_told(tmp_path):
  picture_folders.class_folders(tmp_path, {'north/a': 2, 'a': 2, 'b': 2})
  found = folder.read(str(tmp_path), DataHparams())
  (unused, empty) = found.unused()
  assert '2 in north/a' in unused.text and 'clients/' in unused.text
  assert 'north' in empty.text


def test_what_programs_leave_in_folders(tmp_path):
  picture_folders.class_folders(
    tmp_path, {'a': 8, 'b': 8, '.ipynb_checkpoints': 1, '__MACOSX/a': 1}
  )
  for name in ('Thumbs.db', '._0.png', 'desktop.ini'):
    (tmp_path / 'a' / name).write_text('x')
  found = folder.read(str(tmp_path), DataHparams())
  assert found.marks.class_names == ('a', 'b') and not found.left_out


def test_files_of_other_endings_are_told(tmp_path):
  picture_folders.class_folders(tmp_path, {'a': 8, 'b': 8})
  for name in ('1.heic', '2.dcm', '3.dcm', 'notes'):
    (tmp_path / 'a' / name).write_text('x')
  (problem,) = folder.read(str(tmp_path), DataHparams()).problems()
  for words in ('4 files', '2 .dcm', '1 without', 'convert DICOM', 'HEIC'):
    assert words in problem.text


@pytest.mark.parametrize('given', ['{}', '{}.PNG', 'x\\{}.png', 'x/{}.jpg'])
def test_paths_that_nearly_name_a_file(tmp_path, given):
  inner = tmp_path / ('x' if given.startswith('x') else '')
  for i in range(8):
    picture_folders.draw(inner / f'{i}.png', i)
  lines = [f'{given.format(i)},{"ab"[i % 2]}' for i in range(8)]
  (tmp_path / 'manifest.csv').write_text('\n'.join(['path,label', *lines]))
  found = folder.read(str(tmp_path), DataHparams(test_share=0.5))
  assert all(image.state for image in (*found.train, *found.test))
