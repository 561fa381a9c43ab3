import os
import sqlite3

import client_files
import numpy as np
import pytest

from tff_fssl.data import clients
from tff_fssl.data import image_cache
from tff_fssl.data import sources
from tff_fssl.data.data_hparams import DataHparams
from tff_fssl.hparams import UsageError

_TRAIN = client_files.draw({'b': 4, 'a': 3, 'c': 2}, seed=1)
_TEST = client_files.draw({'b': 2, 'a': 2}, seed=2)


@pytest.fixture(name='load')
def _load(tmp_path):
  def load(path, **settings):
    settings = {'cache_dir': str(tmp_path / 'cache'), **settings}
    return sources.load(
      f'clientdata:{path}', str(tmp_path), DataHparams(**settings)
    )

  return load


@pytest.fixture(name='sqlite')
def _sqlite(tmp_path):
  client_files.sqlite(
    tmp_path / 'emnist.sqlite',
    {
      'train': client_files.examples(_TRAIN),
      'test': client_files.examples(_TEST),
    },
  )
  return tmp_path / 'emnist.sqlite'


def _check(data, train=_TRAIN):
  assert data.example_shape == (5, 5, 1) and data.num_classes == 2
  assert data.client_names == tuple(sorted(train))
  people = clients.NaturalClients(data)
  for name, (x, y) in train.items():
    (images, labels), (unlabeled, _) = people[name]
    np.testing.assert_array_equal(images[..., 0], np.rint(255 * x))
    np.testing.assert_array_equal(labels, y)
    assert not len(unlabeled)


def test_sqlite_as_tff_reads_it(sqlite, load):
  data = load('emnist.sqlite')
  _check(data)
  assert isinstance(data.train.x, np.memmap)
  from tensorflow_federated.python.simulation.datasets import sql_client_data

  theirs = sql_client_data.SqlClientData(str(sqlite), 'test')
  assert theirs.client_ids == ['a', 'b']
  assert len(data.test) == sum(
    1
    for name in theirs.client_ids
    for _ in theirs.create_tf_dataset_for_client(name)
  )


def test_a_share_for_testing(tmp_path, load):
  def write(name, counts):
    drawn = client_files.examples(client_files.draw(counts))
    client_files.sqlite(tmp_path / name, {'train': drawn})

  write('few', {'a': 200, 'b': 100})
  data = load('few')
  assert 40 < len(data.test) < 80
  assert len(data.train) + len(data.test) == 300
  assert '0.2 of the images' in data.notes
  assert len(load('few', test_share=0.1).test) < len(data.test)
  # The images of an added client move no other.
  write('more', {'a': 200, 'b': 100, 'c': 30})
  after = clients.NaturalClients(load('more'))
  before = clients.NaturalClients(data)
  for name in before:
    np.testing.assert_array_equal(after[name][0][0], before[name][0][0])


def test_one_of_several_sets(tmp_path, load):
  client_files.sqlite(
    tmp_path / 'all.sqlite',
    {
      'digits_only_train': client_files.examples(_TRAIN),
      'digits_only_test': client_files.examples(_TEST),
      'all_train': client_files.examples(_TEST),
      'all_test': client_files.examples(_TRAIN),
    },
  )
  _check(load('all.sqlite/digits_only'))
  _check(load('all.sqlite/all'), _TEST)
  for path in ('all.sqlite', 'all.sqlite/none'):
    with pytest.raises(UsageError, match='all.sqlite/all or clientdata:.*only'):
      load(path)


def test_the_only_set_needs_no_choice(tmp_path, load):
  client_files.sqlite(
    tmp_path / 'a.sqlite',
    {
      'by_clients_train': client_files.examples(_TRAIN),
      'by_clients_test': client_files.examples(_TEST),
    },
  )
  _check(load('a.sqlite'))


def test_labels_that_are_not_known_and_names_of_classes(tmp_path, load):
  pixels = np.arange(9)
  contents = [
    client_files.example(image=pixels, label=b'dog'),
    client_files.example(image=pixels, label=b''),
    client_files.example(image=pixels, label=b'cat'),
  ]
  client_files.sqlite(
    tmp_path / 'a.sqlite',
    {'train': {'z': contents}, 'test': {'y': contents[::2]}},
  )
  data = load('a.sqlite')
  assert data.class_names == ('cat', 'dog')
  assert data.train.y.tolist() == [1, -1, 0]
  assert data.train.x[0].ravel().tolist() == pixels.tolist()


def test_decoded_once(sqlite, load, monkeypatch):
  first = load('emnist.sqlite')
  monkeypatch.setattr(image_cache, '_make', None)
  again = load('emnist.sqlite', flip=False)
  np.testing.assert_array_equal(first.train.x, again.train.x)
  os.utime(sqlite, (1, 1))
  with pytest.raises(TypeError):
    load('emnist.sqlite')


def test_facts(sqlite, tmp_path):
  settings = DataHparams(cache_dir=str(tmp_path / 'c'), image_size='7x6')
  info = sources.find(f'clientdata:{sqlite}', '', settings)
  assert (info.num_train, info.num_test) == (9, 4)
  assert info.example_shape == (7, 6, 1)
  assert 'test_share' not in info.uses and 'client_field' not in info.uses


def _torn(path):
  content = path.read_bytes()
  # The table's pages, but not the first one, which has the schema.
  path.write_bytes(content[:4096] + b'\xff' * (len(content) - 4096))


def _schema_that_is_no_text(path):
  content = path.read_bytes()
  path.write_bytes(content.replace(b'TABLE examples', b'TABL\xff examples'))


def _other_schema(path):
  path.unlink()
  with sqlite3.connect(path) as connection:
    connection.execute('CREATE TABLE people (name TEXT)')
  connection.close()


def _endless_view(path):
  path.unlink()
  with sqlite3.connect(path) as connection:
    connection.execute(
      'CREATE VIEW examples AS WITH RECURSIVE n(split_name, client_id,'
      " serialized_example_proto) AS (VALUES ('train', 'a', x'00') UNION ALL"
      ' SELECT * FROM n) SELECT * FROM n'
    )
  connection.close()


def _computed_column(path):
  path.unlink()
  with sqlite3.connect(path) as connection:
    connection.execute(
      'CREATE TABLE examples (client_id TEXT, serialized_example_proto BLOB,'
      ' split_name TEXT GENERATED ALWAYS AS (hex(zeroblob(9))) VIRTUAL)'
    )
  connection.close()


def _replaced(path, contents):
  path.unlink()
  client_files.sqlite(path, {'train': {'a': contents}})


_GOOD = client_files.example(pixels=np.ones(25), label=0)


@pytest.mark.parametrize(
  'spoil,words',
  [
    (_torn, 'or damaged (database disk image is malformed)'),
    (_schema_that_is_no_text, 'it is no SQLite file of TFF, or damaged ('),
    (_other_schema, 'it has no table examples'),
    (_endless_view, 'it has no table examples'),
    (_computed_column, 'it has no table examples'),
    (lambda path: path.write_text('?' * 99), 'it is no SQLite file'),
    (lambda path: path.write_bytes(b''), 'it is no SQLite file'),
    (lambda path: path.unlink(), 'it does not exist'),
    (lambda path: (path.unlink(), os.mkfifo(path)), 'not a regular file'),
    (lambda path: (path.unlink(), path.symlink_to(path)), 'leads back'),
    (lambda path: (path.unlink(), path.mkdir()), 'it is a folder'),
    (
      lambda path: _replaced(path, [client_files.example(pixels=[0.5])]),
      'its fields are pixels; name the right one by --label_field',
    ),
    (
      lambda path: _replaced(path, [client_files.example(label=[1])]),
      'its fields are label; name the right one by --image_field',
    ),
    (
      lambda path: _replaced(
        path, [client_files.example(pixels=[0.5] * 7, label=1)]
      ),
      'train a/0: it is not a readable image (7 values are no square',
    ),
    (lambda path: _replaced(path, ['text']), 'it is no tf.train.Example'),
    (
      lambda path: _replaced(path, [_GOOD] * 8),
      'needs two classes or more; given: 0',
    ),
  ],
)
def test_hostile_files_are_one_line(sqlite, load, tmp_path, spoil, words):
  spoil(sqlite)
  with pytest.raises(UsageError) as error:
    load('emnist.sqlite')
  message = str(error.value)
  assert words in message and 'emnist.sqlite' in message
  assert len(message.splitlines()) == 1
  cache = tmp_path / 'cache'
  left = sorted(os.listdir(cache)) if cache.exists() else []
  assert not [name for name in left if name.endswith('.writing')]


@pytest.mark.parametrize(
  'features,words',
  [
    ({'label': 1}, "it has no feature 'pixels'"),
    ({'pixels': np.full(25, np.nan), 'label': 1}, 'its values go from nan'),
    ({'pixels': np.full(25, 1.5), 'label': 1}, 'floats must be from 0 to 1'),
    ({'pixels': np.full(25, -1), 'label': 1}, 'integers must be from 0 to 255'),
    ({'pixels': np.ones(25), 'label': 0.5}, 'neither a whole number nor'),
    ({'pixels': np.ones(25), 'label': [1, 2]}, 'neither a whole number nor'),
    ({'pixels': np.ones(25), 'label': -7}, 'its label is -7'),
    ({'pixels': np.ones(25), 'label': 2**40}, 'its label is 1099511627776'),
    ({'pixels': b'\x89PNG?', 'label': 1}, '5 values are no square'),
    ({'pixels': [], 'label': 1}, 'it is empty'),
  ],
)
def test_examples_that_cannot_be_read(tmp_path, load, features, words):
  good = client_files.examples(client_files.draw({'a': 20}))['a']
  bad = client_files.example(**features)
  client_files.sqlite(
    tmp_path / 'a.sqlite',
    {'train': {'a': [*good, bad]}, 'test': {'a': good[:2]}},
  )
  with pytest.raises(UsageError) as error:
    load('a.sqlite')
  message = str(error.value)
  assert '1 images cannot be read (train a/20: it' in message
  assert words in message and '--max_unreadable=1' in message
  assert len(load('a.sqlite', max_unreadable=1).train) == 20


def test_many_that_cannot_be_read(tmp_path, load):
  good = client_files.examples(client_files.draw({'a': 20}))['a']
  bad = client_files.example(pixels=np.full(25, np.nan), label=1)
  client_files.sqlite(
    tmp_path / 'a.sqlite', {'train': {'a': [*good, *[bad] * 1_100]}}
  )
  with pytest.raises(UsageError, match='more than 1,000 images cannot be read'):
    load('a.sqlite')
