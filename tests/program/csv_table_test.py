import os

import numpy as np
import pytest

from tff_fssl.hparams import UsageError
from tff_fssl.program import csv_table


def _table(tmp_path, rows=3):
  table = csv_table.CsvTable(str(tmp_path / 'a.csv'))
  for key in range(rows):
    table.log(key, {'x': np.float32(key / 3), 'n': key, 'name': 'a,"b"'})
  return table


@pytest.mark.parametrize(
  'value, text',
  [
    (np.float32(0.1), '0.1'),
    (np.array(1 / 3, np.float32), '0.33333334'),
    (0.1 + 0.2, '0.30000000000000004'),
    (np.float32('nan'), 'nan'),
    (float('inf'), 'inf'),
    (np.int64(-7), '-7'),
    (True, '1'),
    (None, ''),
    ('text', 'text'),
  ],
)
def test_cells_read_back_as_the_same(value, text):
  assert csv_table.format_cell(value) == text
  if isinstance(value, (float, np.floating, np.ndarray)):
    kind = np.asarray(value).dtype.type
    np.testing.assert_array_equal(kind(text), kind(value))


@pytest.mark.parametrize('value', [np.zeros([2]), 1j, b'x'])
def test_other_values_are_refused(value):
  with pytest.raises(TypeError):
    csv_table.format_cell(value)


def test_rows_are_read_back(tmp_path):
  table = _table(tmp_path)
  columns, rows = csv_table.read(table.path)
  assert columns == table.columns == ['round', 'x', 'n', 'name']
  assert rows[2] == {'round': '2', 'x': '0.6666667', 'n': '2', 'name': 'a,"b"'}
  np.testing.assert_array_equal(csv_table.column(rows, 'n'), [0, 1, 2])
  assert np.isnan(csv_table.column(rows, 'unknown')).all()
  assert csv_table.read(str(tmp_path / 'none.csv')) == ([], [])


def test_new_columns_keep_old_rows(tmp_path):
  table = _table(tmp_path)
  table.log(3, {'x': 1, 'extra': 5})
  table.log(4, {'n': 1})
  _, rows = csv_table.read(table.path)
  assert [row['extra'] for row in rows] == ['', '', '', '5', '']
  assert rows[0]['x'] == '0.0' and rows[4]['x'] == ''
  table.truncate_after(3)
  assert len(csv_table.read(table.path)[1]) == 4


def test_a_row_replaces_its_own_and_later_ones(tmp_path):
  table = _table(tmp_path)
  table.log(1, {'x': 9})
  _, rows = csv_table.read(table.path)
  assert [(row['round'], row['x']) for row in rows] == [
    ('0', '0.0'),
    ('1', '9'),
  ]
  assert table.last_key == 1


def test_cut_anywhere_it_is_repaired_to_whole_rows(tmp_path):
  table = _table(tmp_path)
  with open(table.path, 'rb') as file:
    content = file.read()
  ends = [i + 1 for i, byte in enumerate(content) if byte == ord('\n')]
  for size in range(ends[0], len(content) + 1):
    with open(table.path, 'wb') as file:
      file.write(content[:size])
    whole = max(end for end in ends if end <= size)
    reopened = csv_table.CsvTable(table.path)
    assert os.path.getsize(table.path) == whole
    assert reopened.last_key == (
      ends.index(whole) - 1 if whole > ends[0] else None
    )
    # And what is appended then is a row of its own.
    reopened.log(7, {'x': 1.5, 'n': 7, 'name': ''})
    assert csv_table.read(table.path)[1][-1]['round'] == '7'


@pytest.mark.parametrize(
  'change',
  [
    lambda x: x[:2] + [x[2] + b',7'] + x[3:],
    lambda x: x[:2] + [b'\0' * 9] + x[3:],
    lambda x: [x[0], x[3], x[1], x[2]],
    lambda x: x[:2] + [b'x' + x[2][1:]] + x[3:],
    lambda x: x[:2] + [b'1,\xff,1,a'] + x[3:],
    lambda x: [b'key,x', b'1,2'],
    lambda x: [b''],
  ],
)
def test_a_damaged_table_is_refused_and_left_alone(tmp_path, change):
  table = _table(tmp_path)
  path = tmp_path / 'a.csv'
  lines = path.read_bytes().split(b'\n')[:-1]
  content = b''.join(line + b'\n' for line in change(lines)) + b'9,torn'
  path.write_bytes(content)
  for read in (csv_table.CsvTable, csv_table.read, csv_table.last_key):
    with pytest.raises(UsageError, match='a.csv: is not a table of a run, or'):
      read(table.path)
  assert path.read_bytes() == content


def test_a_cell_that_is_no_number(tmp_path):
  table = csv_table.CsvTable(str(tmp_path / 'a.csv'))
  table.log(3, {'x': 'much'})
  _, rows = csv_table.read(table.path)
  with pytest.raises(UsageError, match="column x of round 3 holds 'much'"):
    csv_table.column(rows, 'x')


def test_lines_of_later_rounds_are_replaced(tmp_path):
  lines = csv_table.RoundLines(str(tmp_path / 'lines.txt'))
  lines.log(1, ['a'])
  lines.log(2, ['b', 'c'])
  lines.log(2, ['d'])
  assert (tmp_path / 'lines.txt').read_text() == 'round 1: a\nround 2: d\n'
