import os
import sqlite3

import client_files
import h5py
import numpy as np
import pytest
import tensorflow as tf

from tff_fssl import files
from tff_fssl.data import clients
from tff_fssl.data import image_cache
from tff_fssl.data import sources
from tff_fssl.data.data_hparams import DataHparams
from tff_fssl.data.sources import client_data
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


def test_a_client_may_have_the_name_of_a_split(tmp_path, load):
  clients = dict(zip(('anna', 'coli_strain', 'latest'), _TRAIN.values()))
  client_files.users(tmp_path / 'users', client_files.examples(clients))
  assert load('users').client_names == tuple(sorted(clients))


def test_other_layouts_are_the_same(tmp_path, load):
  users, h5 = tmp_path / 'users', tmp_path / 'h5'
  client_files.users(users / 'train', client_files.examples(_TRAIN))
  client_files.users(users / 'test', client_files.examples(_TEST))
  client_files.hdf5(h5 / 'fed_emnist_train.h5', _TRAIN)
  client_files.hdf5(h5 / 'fed_emnist_test.h5', _TEST)
  loaded = [load('users'), load('h5')]
  for data in loaded:
    _check(data)
  np.testing.assert_array_equal(loaded[0].test.x, loaded[1].test.x)
  np.testing.assert_array_equal(loaded[0].test.y, loaded[1].test.y)


def test_a_share_for_testing(tmp_path, load):
  drawn = client_files.draw({'a': 200, 'b': 100})
  client_files.users(tmp_path / 'users', client_files.examples(drawn))
  data = load('users')
  assert 40 < len(data.test) < 80
  assert len(data.train) + len(data.test) == 300
  assert '0.2 of the images' in data.notes
  fewer = load('users', test_share=0.1)
  assert len(fewer.test) < len(data.test)
  # The images of an added client move no other.
  more = client_files.draw({'c': 30}, seed=3)
  client_files.users(tmp_path / 'more', client_files.examples(more))
  os.rename(tmp_path / 'more' / 'c', tmp_path / 'users' / 'c')
  after = clients.NaturalClients(load('users'))
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
    (lambda path: path.write_text('?' * 99), 'it is no TFRecord file'),
    (lambda path: path.write_bytes(b''), "it has no split 'train', but no"),
    (lambda path: path.unlink(), 'it does not exist'),
    (lambda path: (path.unlink(), os.mkfifo(path)), 'not a regular file'),
    (lambda path: (path.unlink(), path.symlink_to(path)), 'leads back'),
    (lambda path: (path.unlink(), path.mkdir()), 'has no files'),
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


def test_hdf5_that_cannot_be_read(tmp_path, load):
  path = tmp_path / 'a.h5'
  client_files.hdf5(path, _TRAIN)
  with h5py.File(path, 'a') as file:
    file['examples/b/pixels'][2] = np.inf
  with pytest.raises(UsageError, match='train b/2: .* from .* to inf'):
    load('a.h5')
  with h5py.File(path, 'a') as file:
    del file['examples/b/label']
    file['examples/b/label'] = h5py.ExternalLink('/etc/hosts', 'x')
  with pytest.raises(UsageError, match="there is no 'label' in /examples/b"):
    load('a.h5')
  with h5py.File(path, 'a') as file:
    del file['examples/b']
    # A file of some kilobytes.
    file.create_dataset(
      'examples/b/pixels', (3, 10**5, 10**5), 'f4', chunks=True
    )
    file['examples/b/label'] = [0, 1, 0]
  with pytest.raises(UsageError, match=r'has \[3, 100000, 100000\] values'):
    load('a.h5')
  path.write_bytes(path.read_bytes()[:600])
  with pytest.raises(UsageError, match='cannot be read as HDF5'):
    load('a.h5')


@pytest.mark.parametrize('kind', ['external', 'virtual'])
@pytest.mark.parametrize('field', ['pixels', 'label'])
def test_hdf5_with_values_in_other_files(tmp_path, load, kind, field):
  client_files.hdf5(tmp_path / 'a.h5', _TRAIN)
  shape = (3, 5, 5) if field == 'pixels' else (3,)
  name = f'examples/a/{field}'
  (tmp_path / 'secret').write_bytes(b'\x01' * 75)
  client_files.hdf5(tmp_path / 'secret.h5', _TRAIN)
  with h5py.File(tmp_path / 'a.h5', 'a') as file:
    del file[name]
    if kind == 'external':
      secret = [(str(tmp_path / 'secret'), 0, 75)]
      file.create_dataset(name, shape, 'u1', external=secret)
    else:
      layout = h5py.VirtualLayout(shape, 'f4')
      layout[:] = h5py.VirtualSource(
        str(tmp_path / 'secret.h5'), name, shape=shape
      )
      file.create_virtual_dataset(name, layout)
  with pytest.raises(UsageError, match=f'/{name} lies in another file'):
    load('a.h5')


def test_two_files_for_training(tmp_path, load):
  client_files.hdf5(tmp_path / 'x' / 'a_train.h5', _TRAIN)
  client_files.hdf5(tmp_path / 'x' / 'b_train.h5', _TRAIN)
  with pytest.raises(UsageError, match='a_train.h5 and b_train.h5 are both'):
    load('x')


def test_many_that_cannot_be_read(tmp_path, load):
  good = client_files.examples(client_files.draw({'a': 20}))['a']
  bad = client_files.example(pixels=np.full(25, np.nan), label=1)
  client_files.sqlite(
    tmp_path / 'a.sqlite', {'train': {'a': [*good, *[bad] * 1_100]}}
  )
  with pytest.raises(UsageError, match='more than 1,000 images cannot be read'):
    load('a.sqlite')


def _example(**features):
  return tf.train.Example(
    features=tf.train.Features(feature=features)
  ).SerializeToString()


def test_values_are_those_of_tensorflow():
  parsed = client_data.parse_example(
    _example(
      floats=tf.train.Feature(float_list=tf.train.FloatList(value=[0.25, -3])),
      integers=tf.train.Feature(
        int64_list=tf.train.Int64List(value=[-(2**40), 7])
      ),
      text=tf.train.Feature(bytes_list=tf.train.BytesList(value=[b'a\xff'])),
      empty=tf.train.Feature(),
      two=tf.train.Feature(bytes_list=tf.train.BytesList(value=[b'a', b'b'])),
    )
  )
  assert sorted(parsed) == ['empty', 'floats', 'integers', 'text', 'two']
  floats = client_data.read_value(parsed['floats'])
  assert floats.dtype == np.float32 and floats.tolist() == [0.25, -3]
  integers = client_data.read_value(parsed['integers'])
  assert integers.dtype == np.int64 and integers.tolist() == [-(2**40), 7]
  assert client_data.read_value(parsed['text']) == b'a\xff'
  for name in ('empty', 'two'):
    with pytest.raises(ValueError):
      client_data.read_value(parsed[name])


@pytest.mark.parametrize('content', [b'\xff' * 9, 'text', None, 3])
def test_what_is_no_example(content):
  with pytest.raises(ValueError, match='no tf.train.Example'):
    client_data.parse_example(content)


def _records(path):
  with files.open_binary(str(path)) as file:
    return list(client_data.read_records(str(path), file))


def test_records(tmp_path):
  path = tmp_path / 'a'
  contents = [os.urandom(n) for n in (0, 1, 9, 70_000)]
  with tf.io.TFRecordWriter(str(path)) as writer:
    for content in contents:
      writer.write(content)
  assert _records(path) == contents
  whole = path.read_bytes()
  for size in (len(whole) - 1, len(whole) - 5, 50, 19):
    path.write_bytes(whole[:size])
    with pytest.raises(files.FileError, match='record at byte .* is damaged'):
      _records(path)
  # A length of 2 ** 60, with its checksum.
  path.write_bytes(bytes.fromhex('0000000000000010') + whole[8:12])
  with pytest.raises(files.FileError, match='no TFRecord file'):
    _records(path)
  huge = (2**60).to_bytes(8, 'little')
  checksum = client_data._masked_crc(huge).to_bytes(4, 'little')
  path.write_bytes(huge + checksum + b'0' * 9)
  with pytest.raises(files.FileError, match='byte 0 is damaged'):
    _records(path)
