"""Tables as vectors."""

import numpy as np
import pyarrow as pa
from pyarrow import parquet
import pytest

from tff_fssl.data import sources
from tff_fssl.data.data_hparams import DataHparams
from tff_fssl.data.sources import columns
from tff_fssl.hparams import UsageError

_CELLS = {
  'age': ['30', '', '50', '40', 'NaN'],
  'sex': ['f', 'm', 'f', '', 'x'],
  'born': ['1970-01-02', '1970-01-05', '1970-01-03', '1970-01-04', ''],
}
_PLACES = [f'line {i + 2}' for i in range(5)]
_IN_TEST = np.array([False] * 4 + [True])


def test_numbers_dates_and_categories():
  learned, problems = columns.learn('a', _CELLS, _PLACES, _IN_TEST)
  assert not problems
  assert [c.kind for c in learned] == ['number', 'category', 'date']
  assert [c.has_gaps for c in learned] == [True, True, False]
  assert learned[1].values == ['f', 'm']
  x = columns.encode(learned, _CELLS, 'a')
  assert x.dtype == np.float32
  # The median of 30, 50, 40 is 40; of the days 1, 4, 2, 3 it is 2.5.
  assert x.tolist() == [
    [-10, 0, 1, 0, 0, -1.5],
    [0, 1, 0, 1, 0, 1.5],
    [10, 0, 1, 0, 0, -0.5],
    [0, 0, 0, 0, 1, 0.5],
    # Of the test row nothing is learned: not x, nor that dates are missing.
    [0, 1, 0, 0, 0, 0],
  ]
  again = columns.parse([list(column) for column in learned])
  np.testing.assert_array_equal(columns.encode(again, _CELLS, 'a'), x)


def test_large_numbers_are_not_rounded():
  cells = {'t': [str(1_700_000_000_000_000_000 + i * 1000) for i in range(9)]}
  learned, _ = columns.learn('a', cells, ['r'] * 9, np.zeros(9, bool))
  x = columns.encode(learned, cells, 'a')
  assert np.ptp(x) == pytest.approx(8_000, rel=0.1)


def test_findings():
  cells = {
    'id': [str(i) for i in range(9)],
    'same': ['a'] * 9,
    'none': [''] * 9,
    'x': [str(i * i) for i in range(9)],
  }
  learned, problems = columns.learn('a', cells, ['r'] * 9, np.zeros(9, bool))
  assert [column.name for column in learned] == ['id', 'x']
  texts = ' '.join(problem.text for problem in problems)
  for words in ('column id: 9', '--drop=id', 'constant', 'same', 'empty'):
    assert words in texts


@pytest.mark.parametrize(
  'texts, words',
  [
    ([*map(str, range(60)), '12 mg'], "line 60: .*a number .* '12 mg' here"),
    ([f'name{i}' for i in range(61)], 'an identifier.*--drop=c'),
    ([f'the text number {i} is' for i in range(61)], 'text:PATH'),
    (['a'] * 61, 'has no column with different values'),
  ],
)
def test_columns_of_other_kinds(texts, words):
  with pytest.raises(UsageError, match=words):
    columns.learn(
      'a', {'c': texts}, [f'line {i}' for i in range(61)], np.zeros(61, bool)
    )


def test_rows_to_come():
  learned, _ = columns.learn('a', _CELLS, _PLACES, _IN_TEST)
  with pytest.raises(UsageError, match="no column 'born'"):
    columns.encode(learned, {'age': ['1'], 'sex': ['f']}, 'new.csv')
  wrong = {'age': ['old'], 'sex': ['f'], 'born': ['']}
  with pytest.raises(UsageError, match="new.csv, row 1: 'old' is no number"):
    columns.encode(learned, wrong, 'new.csv')


def _table(path, **changes):
  rng = np.random.default_rng(0)
  cells = {
    'id': [f'p{i}' for i in range(60)],
    'age': rng.integers(20, 90, 60),
    'smoker': rng.choice(['yes', 'no'], 60),
    'diagnosis': [('ill', 'well', '')[i % 3] for i in range(60)],
    'Hospital': [f'h{i % 4}' for i in range(60)],
    **changes,
  }
  if str(path).endswith('.parquet'):
    parquet.write_table(pa.table({n: list(v) for n, v in cells.items()}), path)
  else:
    rows = [
      ','.join(cells),
      *(','.join(map(str, r)) for r in zip(*cells.values())),
    ]
    path.write_text('\n'.join(rows) + '\n')
  return f'features:{path}'


@pytest.mark.parametrize('ending', ['csv', 'parquet'])
def test_a_table_is_a_data_set(tmp_path, ending):
  name = _table(tmp_path / f'a.{ending}')
  with pytest.raises(UsageError, match='column id has .*--drop=id'):
    sources.find(name, '', DataHparams())
  info = sources.find(name, '', DataHparams(drop='id'))
  data = sources.load_found(info, None)
  assert data.class_names == ('ill', 'well')
  assert data.client_names == ('h0', 'h1', 'h2', 'h3')
  assert data.example_shape == (1, 3) and (data.train.y < 0).sum() == 20
  assert 'label diagnosis, client Hospital' in data.notes
  assert [c.name for c in info.columns] == ['age', 'smoker']


def test_columns_by_flags(tmp_path):
  name = _table(tmp_path / 'a.csv')
  settings = DataHparams(label_field='smoker', drop='id, Hospital')
  data = sources.load(name, settings=settings)
  assert data.class_names == ('no', 'yes') and not data.client_names
  for flags, words in (
    ({'drop': 'aeg'}, "no column 'aeg'.*did you mean 'age'"),
    ({'label_field': 'diag'}, '--label_field=diag: there is no such column'),
    ({'drop': 'diagnosis,id'}, 'name that of the classes by --label_field'),
  ):
    with pytest.raises(UsageError, match=words):
      sources.find(name, '', DataHparams(**flags))


def test_the_test_set_of_equal_rows_is_a_sample(tmp_path):
  rows = ['smoker,label', *['yes,ill', 'no,well'] * 200]
  (tmp_path / 'a.csv').write_text('\n'.join(rows))
  name = f'features:{tmp_path}/a.csv'
  info = sources.find(name, '', DataHparams())
  data = sources.load_found(info, None)
  assert 25 < (data.test.y == 0).sum() < 60 > (data.test.y == 1).sum() > 25
  # Equal rows are no copies of each other.
  found = sources.find_problems(info, data)
  assert found and not any(problem.misleads for problem in found)
