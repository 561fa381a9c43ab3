"""Pins the rows of every format, every split and every partition to the bit.

A seed means the same run only while rows, their order and who holds them stay
the same. Digests are of the bytes, types and shapes of arrays. The files that
they are of are made here, so no download is needed.
"""

import csv
import hashlib
import itertools
import json
import pathlib

import client_files
import hub_files
import numpy as np
import picture_folders
import pyarrow as pa
from pyarrow import parquet
import pytest
import tensorflow as tf
import tiny_tfds

from tff_fssl.data import clients
from tff_fssl.data import names
from tff_fssl.data import partition_draw
from tff_fssl.data import sources
from tff_fssl.data.data_hparams import DataHparams
from tff_fssl.data.partition_settings import PartitionSettings

_TRAIN = client_files.draw({'b': 14, 'a': 9, 'c': 12}, seed=1)
_TEST = client_files.draw({'b': 3, 'a': 2}, seed=2)


def _digest(*values):
  """16 digits of SHA-256 of arrays (bytes, type, shape) and of plain values."""
  digest = hashlib.sha256()
  for value in values:
    if isinstance(value, np.ndarray):
      digest.update(f'{value.dtype.str} {value.shape}'.encode())
      digest.update(np.ascontiguousarray(value).tobytes())
    else:
      digest.update(json.dumps(value).encode())
  return digest.hexdigest()[:16]


def _data_digest(data):
  # Sums of floats may end otherwise on another processor.
  moments = [f'{value:.6g}' for value in (*data.mean, *data.std)]
  return _digest(
    data.train.x,
    data.train.y,
    data.test.x,
    data.test.y,
    data.owners,
    data.client_names,
    data.class_names,
    data.num_classes,
    data.example_shape,
    moments,
  )


# Class folders and manifests.


def _class_folders(root):
  picture_folders.class_folders(root, {'cat': 9, 'dog': 12, '10': 7, '9': 8})


def _split_folders(root):
  counts = {'train/cat': 5, 'train/dog': 6, 'test/cat': 2, 'test/dog': 3}
  picture_folders.class_folders(root, counts | {'unlabeled': 4})


def _train_folder(root):
  picture_folders.class_folders(root, {'train/a': 9, 'train/b': 9})
  picture_folders.class_folders(root, {'unlabeled': 3})


_MANIFEST = (
  ('path', 'label', 'client', 'split'),
  ('0.png', 'cat', 'anna', 'train'),
  ('1.png', 'dog', '10', ''),
  ('2.png', '', 'anna', ''),
  ('3.png', 'dog', '', 'test'),
  ('4.png', 'cat', '9', ''),
  ('5.png', 'cat', 'ben', 'test'),
  ('5.png', 'dog', 'ben', ''),
  ('6.png', 'dog', '9', ''),
  *((f'{i}.png', 'cat', 'ben', '') for i in range(7, 12)),
)


def _csv_manifest(root):
  root.mkdir()
  lines = [','.join(row) for row in _MANIFEST]
  picture_folders.manifest(root, ['\ufeff' + lines[0], *lines[1:]])


def _parquet_manifest(root):
  picture_folders.manifest(root, [])
  (root / 'manifest.csv').unlink()
  header, *rows = _MANIFEST
  columns = {n: list(values) for n, values in zip(header, zip(*rows))}
  # Integers of which some are missing come as floats.
  columns['client'] = [None, *[float(i % 3) for i in range(len(rows) - 1)]]
  parquet.write_table(pa.table(columns), root / 'manifest.parquet')


# Vectors.


def _vector_columns(**changes):
  rng = np.random.default_rng(0)
  columns = {
    'x': rng.normal(5, 2, (40, 3)),
    'x_weak': rng.normal(5, 2, (40, 2, 3)),
    'x_strong': rng.normal(5, 2, (40, 3)),
    'y': np.array(['cat', 'dog', 'cat', ''] * 10),
    'client': np.array(['anna', 'ben', '', '7'] * 10),
    'split': np.array(['train'] * 20 + ['test', 'test', 'test'] + [''] * 17),
    **changes,
  }
  return {name: v for name, v in columns.items() if v is not None}


_FEW = {'x_weak': None, 'x_strong': None, 'client': None, 'split': None}


def _npz(path, **changes):
  np.savez(path, **_vector_columns(**changes))


def _numbered_npz(path):
  y = np.arange(40) % 4 - 1
  _npz(path, **_FEW, y=y, class_names=np.array(['sun', 'rain', 'fog']))


def _half_npz(path):
  x = np.arange(80, dtype=np.float16).reshape(40, 2)
  y = np.where(np.arange(40) % 7, np.arange(40) % 11, np.nan)
  _npz(path, **_FEW | {'x': x, 'y': y})


def _vector_parquet(path):
  columns = _vector_columns(y=np.arange(40) % 12 - 1)
  table = {name: values.tolist() for name, values in columns.items()}
  table['client'] = [None, *range(39)]
  table['split'] = [None if not v else v for v in table['split']]
  parquet.write_table(pa.table(table), path)


# Texts.

_WORDS = 'oil match shares goal Ärger 42 win, lost! dear 東京 the of'.split()


def _text_rows(columns):
  rng = np.random.default_rng(3)
  for i in range(60):
    words = ' '.join(rng.choice(_WORDS, 1 + i % 9))
    yield {
      'title': f'{_WORDS[i % 7]} "{i}"',
      'text': f' {words} ',
      'label': ['sport', 'money', '', 'sport'][i % 4],
      'client': ['anna', '', '12', '7'][i // 2 % 4],
      'split': 'test' if i in (4, 5, 13) else ['', 'train'][i % 5 == 0],
    }


def _text_csv(path, columns=('title', 'text', 'label', 'client', 'split')):
  with open(path, 'w', encoding='utf-8', newline='') as file:
    writer = csv.DictWriter(file, columns, extrasaction='ignore')
    writer.writeheader()
    writer.writerows(_text_rows(columns))


def _plain_text_csv(path):
  _text_csv(path, ('label', 'text'))


def _ag_news(folder, *splits):
  folder.mkdir()
  (folder / 'classes.txt').write_text('World\nSports\n\nBusiness\n')
  for split in splits:
    with open(folder / f'{split}.csv', 'w', encoding='utf-8') as file:
      writer = csv.writer(file, quoting=csv.QUOTE_ALL)
      for i, row in enumerate(_text_rows(())):
        writer.writerow([i % 3 + 1, f'{split} {row["title"]}', row['text']])


# TFF's ClientData.


def _sqlite(path):
  splits = {'train': _TRAIN, 'test': _TEST}
  client_files.sqlite(
    path, {name: client_files.examples(v) for name, v in splits.items()}
  )


def _sets_sqlite(path):
  splits = {'big_train': _TRAIN, 'big_test': _TEST, 'few_train': _TEST}
  splits['few_test'] = _TEST
  client_files.sqlite(
    path, {name: client_files.examples(v) for name, v in splits.items()}
  )


def _picture_clients(path):
  """Contents of image files, and labels as text or unknown."""
  labels = [b'tree', b'shrub', b'']
  contents = {
    name: [
      client_files.example(image=hub_files.png(9 * n + i), kind=labels[i % 3])
      for i in range(12)
    ]
    for n, name in enumerate(('zoe', 'adam'))
  }
  client_files.sqlite(path, {'train': contents})


# Hugging Face's hub.


def _hub_file(path, labels, seed=0, **more):
  columns = {'image': hub_files.images(len(labels), seed), 'label': labels}
  hub_files.write(path, {**columns, **more})


def _hub(root):
  shard = 'data/train-0000{}-of-00002.parquet'
  _hub_file(root / shard.format(1), [1, -1, 0], 1)
  _hub_file(root / shard.format(0), [0, 1, None, 0, 1], 2)
  _hub_file(root / 'data/test-00000-of-00001.parquet', [1, 0], 3)
  _hub_file(root / 'data/unsupervised-00000-of-00001.parquet', [1, 0], 4)


def _hub_clients(root):
  labels = np.arange(40) % 2
  writers = [None, *[f'w{i % 5}' for i in range(39)]]
  _hub_file(root / 'big/train/0000.parquet', labels, 1, writer=writers)
  _hub_file(root / 'small/train.parquet', labels, 2, writer=writers)


# Sets of TFDS.


def _tfds(folder, name='leaves', counts=None, **more):
  counts = counts or {'train': 30, 'test': 9}
  more = {'num_classes': 3, 'shape': (6, 5, 1)} | more
  tiny_tfds.write(folder, name, counts, **more)


def _tfds_varied(folder):
  keys = ('photo', 'species')
  _tfds(folder, 'flowers', {'train': 40}, shape=(None, None, 3), keys=keys)


def _tfds_unlabelled(folder):
  counts = {'train': 24, 'test': 18, 'unlabelled': 7}
  _tfds(folder, 'stl10', counts, shape=(6, 6, 3))


def _tfds_validation(folder):
  _tfds(folder, counts={'train': 20, 'validation': 9}, shape=(5, 5, 4))


def _tfds_svhn(folder):
  tiny_tfds.write(
    folder, 'svhn_cropped', {'train': 50, 'test': 20, 'extra': 12}
  )


def _nothing(path):
  del path


# Case -> (function that makes its files at PATH, data set, further settings).
_IMAGES = {
  'folder classes': (_class_folders, 'folder:PATH', {}),
  'folder share': (
    _class_folders,
    'folder:PATH',
    {'image_size': '6x9', 'resize': 'squash', 'test_share': 0.4},
  ),
  'folder splits': (
    _split_folders,
    'folder:PATH',
    {'image_size': '8', 'color': 'gray'},
  ),
  'folder train': (_train_folder, 'folder:PATH', {}),
  'folder csv': (_csv_manifest, 'folder:PATH', {'image_size': '8'}),
  'folder parquet': (_parquet_manifest, 'folder:PATH', {'image_size': '8'}),
  'clientdata sqlite': (_sqlite, 'clientdata:PATH', {}),
  'clientdata sets': (_sets_sqlite, 'clientdata:PATH/big', {'color': 'rgb'}),
  'clientdata pictures': (
    _picture_clients,
    'clientdata:PATH',
    {'label_field': 'kind', 'test_share': 0.3},
  ),
  'hub': (_hub, 'huggingface:owner/pets', {}),
  'hub clients': (
    _hub_clients,
    'huggingface:owner/pets/big',
    {'client_field': 'writer', 'image_size': '8'},
  ),
  'tfds': (_tfds, 'leaves', {}),
  'tfds varied': (_tfds_varied, 'flowers', {'image_size': '4x6'}),
  'tfds unlabelled': (_tfds_unlabelled, 'stl10', {}),
  'tfds validation': (_tfds_validation, 'leaves', {'resize': 'squash'}),
  'tfds preset': (_tfds_unlabelled, 'stl10', {'split_preset': 'fedmatch'}),
  'tfds preset of class': (
    _tfds_unlabelled,
    'stl10',
    {'split_preset': 'protofssl'},
  ),
  'tfds svhn': (_tfds_svhn, 'svhn_cropped', {}),
  'tfds svhn extra': (_tfds_svhn, 'svhn_cropped', {'svhn_extra': True}),
  'digits': (_nothing, 'digits', {}),
}
_OTHERS = {
  'vectors npz': (_npz, 'features:PATH.npz', {}),
  'vectors npz numbered': (_numbered_npz, 'features:PATH.npz', {}),
  'vectors npz half': (
    _half_npz,
    'features:PATH.npz',
    {'test_share': 0.3},
  ),
  'vectors parquet': (_vector_parquet, 'features:PATH.parquet', {}),
  'texts': (_text_csv, 'text:PATH.csv', {}),
  'texts plain': (
    _plain_text_csv,
    'text:PATH.csv',
    {'test_share': 0.4, 'max_words': 5, 'vocabulary_size': 300},
  ),
}
_DIGESTS = {
  'folder classes': '94535fea4478092e',
  'folder share': '504561a83c9ebbc1',
  'folder splits': '89fce192b053a5f7',
  'folder train': 'e7ea82d6e10b4fe9',
  'folder csv': 'd264cc40247ffd35',
  'folder parquet': 'c92a6cc3624edff1',
  'clientdata sqlite': '20fc7a289d9de769',
  'clientdata sets': 'de8dbd957fdbeea1',
  'clientdata pictures': 'd8d2a5cb65d64a92',
  'hub': '241368a71bf5361c',
  'hub clients': '95fd0a6b0ef72f04',
  'tfds': '7145ec106f97a36e',
  'tfds varied': '035806a9bf044235',
  'tfds unlabelled': '8c7d08ab4fa4ff07',
  'tfds validation': 'd1885e9ccded39da',
  'tfds preset': 'a39caa18474d4f77',
  'tfds preset of class': '941d05fa402e1f4b',
  'tfds svhn': 'a647efe6af7d8e1e',
  'tfds svhn extra': '36df99ffc60874ec',
  'digits': 'bafe4aecb9828797',
  'vectors npz numbered': 'a0137e4ec649904c',
  'vectors npz half': '99ee07d8a8547ad4',
  'texts': '6620949dc6c22410',
  'texts plain': '41a613de25e257ae',
  'ag_news train test': 'df9a0127afcf3406',
  'ag_news test': '324cbe455d0d95fd',
  'iid': '0311ae07ad408899',
  'dirichlet': 'd75a2d940bf43504',
  'dirichlet total': '2c07c509a34ac032',
  'dirichlet equal': 'c58f019d2031e5bb',
  'fedmatch': '749ba5ec807df8b8',
  'fedmatch drawn': 'ae3a901df9dfcbbc',
  'extreme': '68fc41863597e923',
  'extreme drawn': 'e9a1eb9b0bc35d6a',
  'shards': 'a764b5077ea735f2',
  'natural': 'e3c1e6357f48068c',
  'natural some': 'fe1dbb730e2b4c41',
  'tables': '28aa3dfb3b8a7b83',
  'digits at clients': 'c8858521f68e0b35',
  'vectors npz': '91ddcb66022a5094',
  'vectors parquet': 'c4ddfac6aeafa4e2',
}


def _load(make, name, settings, tmp_path):
  path = tmp_path / 'set'
  if name.startswith('huggingface:'):
    path = tmp_path / 'owner' / 'pets'
  elif ':' not in name:
    path = tmp_path
  if 'PATH.' in name:
    path = pathlib.Path(f'{path}{name[name.index(".") :]}')
    name = name.partition('PATH')[0] + str(path)
  make(path)
  hparams = DataHparams(cache_dir=str(tmp_path / 'cache'), **settings)
  name = name.replace('PATH', 'set')
  return lambda: sources.load(name, str(tmp_path), hparams)


@pytest.mark.parametrize('case', [*_IMAGES, *_OTHERS])
def test_rows(case, tmp_path, monkeypatch):
  # As large as the set that is made here.
  for preset, split in (
    ('fedmatch', names.SplitPreset(20, 9, 11)),
    ('protofssl', names.SplitPreset(7, 2, 3, True)),
  ):
    splits = {**names.SPLIT_PRESETS[preset], 'stl10': split}
    monkeypatch.setitem(names.SPLIT_PRESETS, preset, splits)
  load = _load(*{**_IMAGES, **_OTHERS}[case], tmp_path)
  found = _data_digest(load())
  assert _data_digest(load()) == found  # The second time from the cache.
  assert (case, found) == (case, _DIGESTS.get(case))


@pytest.mark.parametrize('splits', [('train', 'test'), ('test',)])
def test_ag_news(splits, tmp_path):
  _ag_news(tmp_path / 'ag_news', *splits)
  data = sources.load('ag_news', str(tmp_path))
  case = f'ag_news {" ".join(splits)}'
  assert (case, _data_digest(data)) == (case, _DIGESTS.get(case))


def test_tables_of_known_sets():
  presets = {
    name: {data: list(vars(split).values()) for data, split in splits.items()}
    for name, splits in names.SPLIT_PRESETS.items()
  }
  facts = {
    name: [
      info.num_classes,
      info.example_shape,
      info.num_train,
      info.num_test,
      info.flip,
      info.mean,
      info.std,
    ]
    for name, info in names.DATA_SETS.items()
  }
  assert _digest(presets, facts) == _DIGESTS.get('tables')


# Partitions.

_BASE = {'num_classes': 10, 'num_clients': 8, 'num_labels': 40, 'seed': 5}
_AT_CLIENTS = {'scenario': names.LABELS_AT_CLIENTS, 'num_labels': 10}
_OWN = {**_AT_CLIENTS, 'client_labels': names.OWN, 'num_labels': 7}
_SCHEMES = {
  'iid': {},
  'dirichlet': {'partition': names.DIRICHLET, 'alpha': 0.5},
  'dirichlet total': {
    'partition': names.DIRICHLET,
    'alpha': 3.0,
    'alpha_meaning': names.TOTAL,
    'min_client_examples': 3,
  },
  'dirichlet equal': {
    'partition': names.DIRICHLET,
    'alpha': 0.1,
    'equal_sizes': True,
  },
  'fedmatch': {'partition': names.FEDMATCH},
  'fedmatch drawn': {
    'partition': names.FEDMATCH,
    'class_draws': names.MULTINOMIAL,
  },
  'extreme': {'partition': names.EXTREME},
  'extreme drawn': {
    'partition': names.EXTREME,
    'class_draws': names.MULTINOMIAL,
  },
  'shards': {'partition': names.SHARDS, 'shards_per_client': 3},
  'natural': {'partition': names.NATURAL, 'num_clients': 0},
  'natural some': {'partition': names.NATURAL, 'num_clients': 5},
}
_PLACES = {
  'server': {'num_validation': 23},
  'server drawn': {
    'num_validation': 7,
    'num_unlabeled': 400,
    'client_test_fraction': 0.2,
    'label_noise': 0.15,
  },
  'clients': {**_AT_CLIENTS, 'labeled_clients': '3', 'label_noise': 0.3},
  'clients classes': {
    **_AT_CLIENTS,
    'num_labels': 9,
    'client_label_classes': 3,
    'num_validation': 11,
  },
  'own': {**_OWN, 'labeled_clients': '0.5', 'min_client_examples': 20},
  'own drawn': {**_OWN, 'num_unlabeled': 500, 'client_test_fraction': 0.1},
  'all': {**_AT_CLIENTS, 'num_labels': 0, 'full_labels': True},
}


def _labels_and_owners():
  rng = np.random.default_rng(11)
  labels = rng.integers(0, 10, 1_500)
  labels[rng.permutation(1_500)[:90]] = names.UNKNOWN_LABEL
  return labels.astype(np.int32), rng.integers(-1, 9, 1_500).astype(np.int32)


@pytest.mark.parametrize('scheme', list(_SCHEMES))
def test_partitions(scheme):
  labels, owners = _labels_and_owners()
  found = []
  for place, settings in _PLACES.items():
    merged = {**_BASE, **settings, **_SCHEMES[scheme]}
    if scheme.startswith('natural') and place.startswith('clients'):
      continue
    partition = partition_draw.build_partition(
      labels, PartitionSettings(**merged), owners, [f'c{i}' for i in range(9)]
    )
    held = [
      partition.server_labeled,
      partition.validation,
      *partition.client_labeled,
      *partition.client_unlabeled,
      *partition.client_test,
      partition.labeled,
      partition.given_labels(labels, partition.labeled),
    ]
    found.append(_digest(partition.dump_json(), *held))
  assert (scheme, _digest(*found)) == (scheme, _DIGESTS.get(scheme))


def test_digits_at_clients():
  data = sources.load('digits')
  settings = PartitionSettings(
    **{**_BASE, 'label_noise': 0.1}, **_SCHEMES['dirichlet']
  )
  partition = partition_draw.build_partition(data.train.y, settings)
  found = []
  for cycles, client, round_num in itertools.product(
    (False, True), range(8), (1, 4, 9)
  ):
    examples = clients.client_examples(
      data, partition, client, round_num, clients.Streaming(3, 2, cycles, 7)
    )
    element = clients.make_example(
      seed=clients.client_seed(5, round_num, client),
      labeled=examples[0],
      unlabeled=examples[1],
    )
    found.append(_digest(*tf.nest.flatten(element)))
  assert _digest(*found) == _DIGESTS.get('digits at clients')
