"""Files of vectors: what they may hold, and what is wrong with them."""

import os

import numpy as np
import pyarrow as pa
from pyarrow import parquet
import pytest

from tff_fssl.data import sources
from tff_fssl.data.data_hparams import DataHparams
from tff_fssl.data.sources import vectors
from tff_fssl.hparams import UsageError

_NUM, _SIZE = 40, 3


def _columns(**changes):
  rng = np.random.default_rng(0)
  columns = {
    'x': rng.normal(5, 2, (_NUM, _SIZE)),
    'x_weak': rng.normal(5, 2, (_NUM, 2, _SIZE)),
    'y': np.array(['cat', 'dog', 'cat', ''] * 10),
    'client': np.array(['anna', 'ben'] * 20),
    'split': np.array(['train'] * 32 + ['test', 'test', 'test', 'train'] * 2),
    **changes,
  }
  return {name: v for name, v in columns.items() if v is not None}


def _write_npz(path, columns):
  np.savez(path, **columns)


def _write_parquet(path, columns):
  parquet.write_table(
    pa.table({name: values.tolist() for name, values in columns.items()}), path
  )


_WRITE = {
  'npz': _write_npz,
  'parquet': _write_parquet,
}


def _load(path, **settings):
  return sources.load(f'features:{path}', settings=DataHparams(**settings))


@pytest.mark.parametrize('kind', list(_WRITE))
def test_all_kinds_of_files_say_the_same(tmp_path, kind):
  columns, path = _columns(), tmp_path / f'a.{kind}'
  _WRITE[kind](path, columns)
  info = sources.find(f'features:{path}', '', DataHparams())
  assert (info.num_train, info.num_test, info.num_classes) == (34, 6, 2)
  assert info.example_shape == (3, 3) and info.input_shape == (3,)
  assert (info.num_weak, info.num_strong) == (2, 0)
  # The split is given, but validation may take whole clients.
  assert info.uses == {'strong_noise', 'strong_dropout', 'split_by'}
  data = _load(path)
  train = columns['split'] == 'train'
  x = np.concatenate([columns['x'][:, None], columns['x_weak']], axis=1)
  np.testing.assert_allclose(data.train.x, x[train], rtol=1e-6)
  np.testing.assert_allclose(data.test.x, x[~train], rtol=1e-6)
  assert data.train.x.dtype == np.float32
  assert data.class_names == ('cat', 'dog')
  assert data.train.y.tolist()[:5] == [0, 1, 0, -1, 0]
  assert data.client_names == ('anna', 'ben')
  assert data.owners.tolist()[:3] == [0, 1, 0]
  np.testing.assert_allclose(data.mean, columns['x'][train].mean(0), rtol=1e-5)
  np.testing.assert_allclose(data.std, columns['x'][train].std(0), rtol=1e-5)


@pytest.mark.parametrize('kind', list(_WRITE))
def test_integers_are_classes_and_a_share_is_for_testing(tmp_path, kind):
  y = np.array([2, 10, -1, 2, 10] * 8)
  path = tmp_path / f'a.{kind}'
  _WRITE[kind](path, _columns(y=y, split=None, client=None, x_weak=None))
  data = _load(path, test_share=0.4)
  assert data.class_names == ('2', '10') and data.owners is None
  assert len(data.train) + len(data.test) == _NUM
  assert 4 < len(data.test) < 24 and data.test.y.min() == 0
  assert (data.train.y == -1).sum() == 8
  assert '0.4 of it is for testing' in data.notes
  # By content: what is added moves nothing.
  first = {row.tobytes() for row in data.test.x}
  more = _columns(y=y, split=None, client=None, x_weak=None)
  more = {n: np.concatenate([v, v[:5] + (n == 'x')]) for n, v in more.items()}
  _WRITE[kind](path, more)
  assert first <= {row.tobytes() for row in _load(path, test_share=0.4).test.x}


def test_names_of_classes(tmp_path):
  names = np.array(['z', 'b', 'a'])
  y = np.array([0, 1, 2, -1] * 10)
  _write_npz(tmp_path / 'a.npz', _columns(y=y, class_names=names))
  data = _load(tmp_path / 'a.npz')
  assert data.class_names == ('z', 'b', 'a')
  assert data.train.y.tolist()[:4] == [0, 1, 2, -1]


def test_a_number_that_is_constant_is_no_division_by_zero(tmp_path):
  x = _columns()['x']
  x[:, 1] = 0.1
  _write_npz(tmp_path / 'a.npz', _columns(x=x))
  assert _load(tmp_path / 'a.npz').std[1] == 1.0


def _at(name, row, value):
  values = _columns()[name].astype(np.float64 if name != 'y' else object)
  values[row] = value
  return {name: values}


_WRONG = {
  'x is missing': ({'x': None}, 'it must have x, and may have'),
  'an unknown column': ({'x_weka': np.zeros((_NUM, 3))}, 'did you mean'),
  'no classes': ({'y': None}, 'row 33: a test example needs a label'),
  'one class': ({'y': np.array(['cat'] * _NUM)}, 'two classes or more'),
  'class in test only': (
    {'y': np.array(['cat'] * 20 + ['dog'] * 14 + ['owl'] + ['dog'] * 5)},
    'without a training example: owl',
  ),
  'too few labels': ({'y': np.array(['cat', 'dog'])}, '2 values for 40'),
  'a fraction': ({'y': np.arange(_NUM) / 2}, 'row 2: class 0.5; classes are'),
  'less than -1': ({'y': np.arange(_NUM) - 2}, 'row 1: class -2'),
  'one-hot': (
    {'y': np.eye(2)[np.arange(_NUM) % 2]},
    'y is float64 [40, 2], one-hot; it must be one class for each example, (N,)'
    ': y.argmax(1)',
  ),
  'two classes each': (
    {'y': np.ones((_NUM, 2), int)},
    'y is int64 [40, 2]; it must be one class for each example, (N,)',
  ),
  'class of no name': (
    {'y': np.arange(_NUM) % 5, 'class_names': np.array(['a', 'b'])},
    'row 3: class 2; classes are integers from 0 to 1',
  ),
  'a split': (
    {'split': np.array(['val'] * _NUM)},
    "row 1: its split is 'val'",
  ),
  'nan': (_at('x', 7, np.nan), 'x has numbers that are not finite'),
  'too large': (_at('x_weak', 7, 1e39), 'in 1 rows, first in row 8'),
  'flat': ({'x': np.arange(40.0)}, 'it must be numbers (N, D)'),
  'text': ({'x': np.array([['a']] * _NUM)}, 'it must be numbers (N, D)'),
  'several plain ones': (
    {'x': np.zeros((_NUM, 2, 3))},
    '(N, D); views are',
  ),
  'other sizes': ({'x_strong': np.zeros((_NUM, 4))}, '40 vectors of 3 numbers'),
  'others': ({'x_strong': np.zeros((9, 3))}, 'x has 40 vectors'),
  'objects': ({'y': np.array([{}] * _NUM, object)}, 'Python objects'),
  'ragged': (
    {'x': np.array([[1.0], [1.0, 2.0]] * 20, object)},
    'rows of x must be equally long',
  ),
  'none': ({n: v[:0] for n, v in _columns().items()}, 'no training examples'),
  'no numbers': ({'x': np.zeros((_NUM, 0))}, 'it must be numbers (N, D)'),
}


@pytest.mark.parametrize('name', list(_WRONG))
def test_mistakes_are_one_line(tmp_path, name):
  changes, words = _WRONG[name]
  _write_npz(tmp_path / 'a.npz', _columns(**changes))
  with pytest.raises(UsageError) as caught:
    _load(tmp_path / 'a.npz')
  assert words in str(caught.value) and '\n' not in str(caught.value)
  assert 'a.npz' in str(caught.value)


def test_vectors_far_away(tmp_path):
  _write_npz(tmp_path / 'a.npz', _columns(**_at('x_weak', 7, 1e7)))
  info = sources.find(f'features:{tmp_path}/a.npz', '', DataHparams())
  data = sources.load_found(info, None)
  words = 'a.npz, row 8: a number is more than 10,000'
  with pytest.raises(UsageError, match=words):
    vectors.check_range(info, data.mean, data.std)
  others = np.flatnonzero(info.rows != 7)
  vectors.check_range(info, data.mean, data.std, others)


@pytest.mark.parametrize('kind', list(_WRITE))
def test_torn_foreign_and_missing_files(tmp_path, kind):
  path = tmp_path / f'a.{kind}'
  with pytest.raises(UsageError, match='it does not exist'):
    _load(path)
  _WRITE[kind](path, _columns())
  whole = path.read_bytes()
  for content in (whole[: len(whole) // 2], b'', b'PK\x03\x04 no', b'[1, 2]'):
    path.write_bytes(content)
    with pytest.raises(UsageError, match=rf'a\.{kind}: it') as caught:
      _load(path)
    assert '\n' not in str(caught.value)
  path.unlink()
  os.mkfifo(path)
  with pytest.raises(UsageError, match='not a regular file'):
    _load(path)


def test_rows_that_differ(tmp_path):
  rows = [[1.0, 2.0]] * 5 + [[1.0]]
  table = pa.table({'x': rows, 'y': ['a', 'b'] * 3})
  parquet.write_table(table, tmp_path / 'a.parquet')
  with pytest.raises(UsageError, match='rows of x differ: one has 1 numbers'):
    _load(tmp_path / 'a.parquet')
  parquet.write_table(
    pa.table({'x': [[1.0], None], 'y': ['a', 'b']}), tmp_path / 'a.parquet'
  )
  with pytest.raises(UsageError, match='another nothing'):
    _load(tmp_path / 'a.parquet')


@pytest.mark.parametrize('kind', ['npz', 'parquet'])
@pytest.mark.parametrize('name', ['client', 'split'])
def test_booleans_are_neither_text_nor_numbers(tmp_path, kind, name):
  path = tmp_path / f'a.{kind}'
  for values in (np.arange(_NUM) % 2 == 0, np.zeros(_NUM, bool)):
    _WRITE[kind](path, _columns(**{name: values}))
    with pytest.raises(UsageError, match=r'a column is bool \[40\]; .* must'):
      _load(path)


def test_other_files(tmp_path):
  with pytest.raises(UsageError, match=r'ends with \.npz, \.parquet'):
    _load(tmp_path / 'a.xlsx')
  with pytest.raises(UsageError, match='give the path, features:PATH'):
    _load('')


def test_large_classes_are_not_rounded(tmp_path):
  y = 2**53 + np.arange(_NUM) % 4
  _write_npz(tmp_path / 'a.npz', _columns(y=y))
  assert len(_load(tmp_path / 'a.npz').class_names) == 4
  _write_npz(tmp_path / 'a.npz', _columns(y=y.astype(np.float64) * 2))
  with pytest.raises(UsageError, match='row 1: class'):
    _load(tmp_path / 'a.npz')


def test_what_pandas_adds(tmp_path):
  table = pa.table(
    {
      'x': [[float(i), 1.0] for i in range(40)],
      'y': pa.array([i % 2 == 0 for i in range(40)]),
      '__index_level_0__': list(range(0, 80, 2)),
    }
  )
  parquet.write_table(table, tmp_path / 'a.parquet')
  data = _load(tmp_path / 'a.parquet')
  assert data.class_names == ('False', 'True') and data.example_shape == (1, 2)


def test_moments_of_numbers_far_from_zero():
  x = np.float32(1.7e9) + np.arange(40, dtype=np.float32)[:, None] * 512
  (mean,), (std,) = vectors.moments(x)
  np.testing.assert_allclose((x - mean) / std, (x - mean) / x.std(), rtol=1e-3)
  constant = np.full((7, 1), 1.7e9, np.float32)
  assert vectors.moments(constant) == ((float(constant[0, 0]),), (1.0,))
