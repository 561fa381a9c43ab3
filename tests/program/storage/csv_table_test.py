import os

import hypothesis
from hypothesis import strategies as st
import numpy as np
import pytest

from tff_fssl.hparams import UsageError
from tff_fssl.program.storage import csv_table


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
  'change, reason',
  [
    (lambda x: x[:2] + [b''] + x[2:], 'line 3: it is empty'),
    (lambda x: x[:2] + [x[2] + b',7'] + x[3:], 'line 3: it has 5 cells'),
    (lambda x: x[:2] + [b'1,1'] + x[3:], 'line 3: it has 2 cells'),
    (
      lambda x: [x[0], x[3], x[1], x[2]],
      'line 3: round 0 follows round 2',
    ),
    (lambda x: [x[0], b'7' + x[1][1:], *x[2:]], 'round 1 follows round 7'),
    (lambda x: x[:2] + [b'x' + x[2][1:]] + x[3:], "'x' is not the number"),
    (lambda x: x[:2] + [b'+1' + x[2][1:]] + x[3:], "'+1' is not the number"),
    (lambda x: x[:2] + [b'1,\0,1,a'] + x[3:], 'line 3: it is empty, or is not'),
    (
      lambda x: x[:2] + [b'1,\xff,1,a'] + x[3:],
      'line 3: it is empty, or is not',
    ),
    (lambda x: [line + b'\r' for line in x], 'line 1'),
    (lambda x: [b'round,x,x,name', *x[1:]], 'line 1: a column has no name, or'),
    (lambda x: x[1:], "line 1: the first column is not 'round'"),
  ],
)
def test_a_change_is_refused_and_nothing_is_lost(tmp_path, change, reason):
  table = _table(tmp_path)
  path = tmp_path / 'a.csv'
  lines = path.read_bytes().split(b'\n')[:-1]
  content = b''.join(line + b'\n' for line in change(lines)) + b'9,torn'
  path.write_bytes(content)
  for read in (csv_table.CsvTable, csv_table.read):
    with pytest.raises(UsageError) as error:
      read(table.path)
    assert reason in str(error.value) and table.path in str(error.value)
  assert path.read_bytes() == content


_CONTENT = ''.join(
  ['round,a,b\n', *(f'{r},{r / 7},\n' for r in range(7))]
).encode()


@st.composite
def _edited(draw):
  """The table with some spans replaced."""
  content = _CONTENT
  for _ in range(draw(st.integers(1, 3))):
    start = draw(st.integers(0, len(content)))
    end = draw(st.integers(start, min(len(content), start + 40)))
    odd = [b'\n', b'\n\n', b',', b'"', b'9', b'-', content[start:end] * 2]
    new = draw(st.one_of(st.binary(max_size=6), st.sampled_from(odd)))
    content = content[:start] + new + content[end:]
  return content


@hypothesis.given(_edited(), st.integers(-2, 8))
@hypothesis.settings(
  max_examples=400, deadline=None, derandomize=True, database=None,
  suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)  # fmt: skip
def test_of_whatever_edit_nothing_is_lost(tmp_path, content, done):
  """Refused as it is, or cut at a torn last line and after the checkpoint."""
  path = tmp_path / 'a.csv'
  path.write_bytes(content)
  try:
    table = csv_table.CsvTable(str(path))
  except UsageError as error:
    assert '\n' not in str(error) and str(path) in str(error)
    assert path.read_bytes() == content
    return
  whole = content[: content.rfind(b'\n') + 1]
  assert path.read_bytes() == whole
  try:
    table.check_after(done)
  except UsageError:
    return
  table.truncate_after(done)
  left = path.read_bytes()
  assert whole.startswith(left)
  cut = whole[len(left) :].splitlines()
  # All that is cut are the rows of the next rounds, one after another.
  expected = range(done + 1, done + 1 + len(cut))
  assert [int(line.split(b',')[0]) for line in cut] == list(expected)
  assert csv_table.CsvTable(str(path)).columns == table.columns


def test_rows_that_the_run_cannot_have_written(tmp_path):
  table = csv_table.CsvTable(str(tmp_path / 'a.csv'))
  for key in (1, 2, 4):
    table.log(key, {'x': 1})
  table.check_after(4)
  table.check_after(1, last=4)
  for done, last in ((2, None), (1, None), (2, 3)):
    with pytest.raises(UsageError, match='round 4'):
      table.check_after(done, last)


def test_a_cell_that_is_no_number(tmp_path):
  table = csv_table.CsvTable(str(tmp_path / 'a.csv'))
  table.log(3, {'x': 'much'})
  _, rows = csv_table.read(table.path)
  with pytest.raises(UsageError, match="column x of round 3 holds 'much'"):
    csv_table.column(rows, 'x')


def test_other_files_are_left_alone(tmp_path):
  path = tmp_path / 'a.csv'
  path.write_text('key,x\n1,2\n')
  with pytest.raises(UsageError, match='first column is not'):
    csv_table.CsvTable(str(path))
  assert path.read_text() == 'key,x\n1,2\n'


def test_the_last_key_is_read_without_the_rest(tmp_path, monkeypatch):
  path = str(tmp_path / 'a.csv')
  assert csv_table.last_key(path) is None
  table = _table(tmp_path, rows=0)
  assert csv_table.last_key(path) is None
  table.log(-3, {'x': 1})
  assert csv_table.last_key(path) == -3
  for key in range(200):
    table.log(key, {'x': key})
  monkeypatch.setattr(csv_table, 'read', None)  # It is not called.
  for size in (100, 10**6):
    monkeypatch.setattr(csv_table, '_TAIL_BYTES', size)
    assert csv_table.last_key(path) == 199
  with open(path, 'ab') as file:
    file.write(b'200,')  # A kill has cut it.
  assert csv_table.last_key(path) == 199
  monkeypatch.undo()
  # Rows that are longer than what is read.
  monkeypatch.setattr(csv_table, '_TAIL_BYTES', 8)
  assert csv_table.last_key(path) == 199


def test_the_last_key_of_another_file(tmp_path):
  path = tmp_path / 'a.csv'
  path.write_text('round,x\nseven,1\n')
  with pytest.raises(UsageError):
    csv_table.last_key(str(path))


def _numbers(tmp_path, *keys, tail=''):
  path = str(tmp_path / 'a.csv')
  with open(path, 'w') as file:
    file.write('round,x\n' + ''.join(f'{key},0.5\n' for key in keys) + tail)
  return path


@pytest.mark.parametrize(
  'keys, tail, saved',
  [
    ((), '', None),
    ((), '', 3),  # It was moved away.
    ((2, 3, 4), '', 4),
    ((2, 3, 4), '5,0.', 4),  # A kill while round 5 was written.
    ((2, 3, 4), '5', 4),
    ((2, 3, 4, 5), '', 4),
  ],
)
def test_tables_that_a_kill_can_leave(tmp_path, keys, tail, saved):
  path = _numbers(tmp_path, *keys, tail=tail)
  for every_round in (True, False):
    csv_table.check(path, saved, every_round=every_round)
  csv_table.check(str(tmp_path / 'none'), saved, every_round=True)


@pytest.mark.parametrize(
  'keys, tail, row',
  [
    ((1, 2, 3), '', 4),
    ((1, 2, 3), '4', 4),
    ((1, 2, 4), '', 3),
    ((1, 2, 3, 5, 6), '', 4),
    ((1, 2, 10**17), '', 3),
  ],
)
def test_a_table_without_the_row_of_a_saved_round(tmp_path, keys, tail, row):
  path = _numbers(tmp_path, *keys, tail=tail)
  with pytest.raises(UsageError, match=f'the row of round {row} is missing'):
    csv_table.check(path, 4, every_round=True)
  csv_table.check(path, 4, every_round=False)


def test_a_torn_row_of_a_saved_round(tmp_path):
  path = _numbers(tmp_path, 2, tail='4,0.')
  with pytest.raises(UsageError, match='the row of round 4 is missing or torn'):
    csv_table.check(path, 4, every_round=False)


def test_a_cell_that_is_not_a_number(tmp_path):
  path = _numbers(tmp_path, 1, tail='2,abc\n')
  with pytest.raises(UsageError, match=r"a.csv: column x of round 2 .*'abc'"):
    csv_table.check(path, 2, every_round=False)
