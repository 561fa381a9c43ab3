import os

import picture_folders
import pyarrow as pa
from pyarrow import parquet
import pytest

from tff_fssl.data import listings
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
  found = listings.read(str(tmp_path), 0.5)
  assert found.class_names == ('a', 'b') and found.client_names == ()
  assert _paths(found.train) == [
    *('train/a/0.png', 'train/a/1.jpg', 'train/a/2.BMP'),
    *('train/b/0.png', 'train/b/1.jpg'),
    *('unlabeled/0.png', 'unlabeled/1.jpg'),
  ]
  assert found.labels('train').tolist() == [0, 0, 0, 1, 1, -1, -1]
  assert _paths(found.test) == ['test/a/0.png', 'test/b/0.png']
  assert not found.uses_share and found.num_ignored == 1
  assert not found.problems()


def test_a_share_of_each_class_is_for_testing_and_stays(tmp_path):
  picture_folders.class_folders(tmp_path, {'x': 60, 'y': 60})
  before = listings.read(str(tmp_path), 0.25)
  assert before.uses_share
  for label in (0, 1):
    assert 6 <= before.labels('test').tolist().count(label) <= 24
  picture_folders.class_folders(tmp_path, {'x': 90, 'z': 20})
  after = listings.read(str(tmp_path), 0.25)
  for split in ('train', 'test'):
    old, new = (set(_paths(getattr(f, split))) for f in (before, after))
    assert old < new
  larger = listings.read(str(tmp_path), 0.5)
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
  found = listings.read(str(tmp_path), 0.5)
  assert found.kind == 'manifest.csv'
  assert found.class_names == ('9', '10')  # By their size.
  assert found.client_names == ('ann', 'bob')
  assert found.labels('train').tolist() == [1, 0, -1, 0]
  assert [row.owner for row in found.train] == [0, 1, 0, -1]
  assert _paths(found.test) == ['4.png', '5.png'] and not found.uses_share


def test_parquet_is_read_as_csv_is(tmp_path):
  picture_folders.manifest(
    tmp_path, ['path,label,client', '0.png,3,7', '1.png,,8', '2.png,4,']
  )
  from_csv = listings.read(str(tmp_path), 0.001)
  (tmp_path / 'manifest.csv').unlink()
  table = pa.table(
    {
      'path': ['0.png', '1.png', '2.png'],
      'label': [3, None, 4],
      'client': pa.array([7.0, 8.0, float('nan')]),
    }
  )
  parquet.write_table(table, tmp_path / 'manifest.parquet')
  from_parquet = listings.read(str(tmp_path), 0.001)
  for field in ('train', 'test', 'class_names', 'client_names'):
    assert getattr(from_csv, field) == getattr(from_parquet, field)
  (tmp_path / 'manifest.parquet').write_bytes(b'PAR1 torn')
  with pytest.raises(UsageError, match='it is not Parquet'):
    listings.read(str(tmp_path), 0.5)


@pytest.mark.parametrize(
  'lines,words',
  [
    (['path,lable', '0.png,a'], 'path and label.*did you mean .label'),
    (['path,label,label', '0.png,a,a'], 'its columns are'),
    ([''], 'its columns are none'),
    (
      ['path;label', '0.png;a'],
      "separated by ';' .path;label.; they must be separated by ','",
    ),
    (['path\tlabel', '0.png\ta'], r"separated by '.t'"),
    (['path,label', '0.png'], 'row 2: has 1 values for 2 columns'),
    (['path,label', ',a'], 'row 2: path is empty'),
    (['path,label,split', '0.png,a,val'], "row 2: split is 'val'"),
    (['path,label,split', '0.png,,test'], 'row 2: a test image needs a label'),
    (['path,label', '"0.png,a'], 'line 2: unexpected end'),
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
    listings.read(str(tmp_path), 0.5)
  assert '\n' not in str(error.value)


def test_wrong_folders(tmp_path):
  with pytest.raises(UsageError, match='it does not exist'):
    listings.read(str(tmp_path / 'none'), 0.5)
  with pytest.raises(UsageError, match='has no images; it must hold'):
    listings.read(str(tmp_path), 0.5)
  (tmp_path / 'a.jpg').write_text('')
  with pytest.raises(UsageError, match='a part of its path is not a folder'):
    listings.read(str(tmp_path / 'a.jpg'), 0.5)
  os.mkfifo(tmp_path / 'manifest.csv')
  with pytest.raises(UsageError, match='not a regular file'):
    listings.read(str(tmp_path), 0.5)


@pytest.mark.parametrize(
  'counts,words',
  [
    ({'train/a': 1, 'test/a': 1}, ['two classes or more; given: a']),
    ({'train/a': 1, 'train/b': 1, 'test': 0}, ['there are no test examples']),
    (
      {'train/a': 1, 'train/b': 1, 'test/a': 1, 'test/c': 1},
      ['without a training example: c', 'without a test example: b'],
    ),
  ],
)
def test_problems(tmp_path, counts, words):
  picture_folders.class_folders(tmp_path, counts)
  problems = listings.read(str(tmp_path), 0.5).problems()
  assert problems[0].stops
  text = '; '.join(problem.text for problem in problems)
  for word in words:
    assert word in text


def test_changes_of_files_are_seen(tmp_path):
  picture_folders.manifest(tmp_path, ['path,label', '0.png,a', 'none.png,b'])
  before = listings.read(str(tmp_path), 0.001).train
  assert before[1].state == ()
  os.utime(tmp_path / '0.png', (1, 1))
  assert before[0] != listings.read(str(tmp_path), 0.001).train[0]
