"""CSV files of texts, and AG News."""

import gzip
import zipfile

import numpy as np
import pytest

from tff_fssl import files
from tff_fssl.data import sources
from tff_fssl.data.data_hparams import DataHparams
from tff_fssl.hparams import UsageError

_SETTINGS = DataHparams(max_words=6, vocabulary_size=512)


def _load(path, settings=_SETTINGS):
  return sources.load(f'text:{path}', settings=settings)


def _write(path, *rows, header='text,label'):
  path.write_text('\n'.join([header, *rows]) + '\n')
  return path


_ROWS = [
  f'word{i % 7} of animal {i},{("cat", "dog")[i % 2]}' for i in range(40)
]


def test_texts_labels_clients_and_splits(tmp_path):
  path = _write(
    tmp_path / 'a.csv',
    'Hello,"The, ""big"" dog",dog,anna,train',
    ',a cat,cat,,train',
    'x,nobody knows,,ben,',
    'y,the big dog,dog,,test',
    header='\ufefftitle, text ,label,client,split',
  )
  data = _load(path)
  assert data.class_names == ('cat', 'dog') and data.num_classes == 2
  assert data.client_names == ('anna', 'ben')
  assert data.owners.tolist() == [0, -1, 1]
  assert data.train.y.tolist() == [1, 0, -1] and data.test.y.tolist() == [1]
  assert data.train.x.dtype == np.int32 and data.example_shape == (6,)
  first, second, _ = data.train.x
  assert (first > 0).sum() == 4 and (second > 0).sum() == 2
  # 'the big dog' after the title.
  np.testing.assert_array_equal(first[1:4], data.test.x[0, 1:4])


def test_equal_texts_are_on_one_side(tmp_path):
  info = sources.find(
    f'text:{_write(tmp_path / "a.csv", *_ROWS)}', '', _SETTINGS
  )
  assert 'test_share' in info.uses and info.num_test > 2
  data = _load(_write(tmp_path / 'a.csv', *_ROWS, *_ROWS))
  assert len(data.test) == 2 * info.num_test
  assert '0.2 of it is for testing' in data.notes


@pytest.mark.parametrize(
  'content,words',
  [
    (b'', 'its columns are none; it must have text and label'),
    (b'txt,label\na,b\n', 'did you mean'),
    (b'text,lable\na,b\n', 'did you mean'),
    (b'text,text,label\na,a,b\n', 'its columns are text, text, label'),
    (b'text,label\na,b\nc\n', 'line 3: has 1 values for 2 columns'),
    (b'text,label\n"a,b\n', 'unexpected end of data'),
    (b'text,label\na\xff,b\n', 'it is not UTF-8 text (line 2)'),
    (b'text,label\n', 'the data have no training examples'),
    (b'text,label,split\na,b,train\nc,b,test\n', 'two classes or more'),
    (
      b'text,label,split\na,b,train\nb,c,train\nc,d,test\n',
      'without a training example: d',
    ),
    (b'text,label,split\na,b,val\n', "line 2: its split is 'val'"),
    (b'text,label,split\na,,test\n', 'line 2: a test example needs a label'),
    (
      b'text,label,split\n?,b,train\n!,c,train\na,b,test\n',
      'no training text has a word',
    ),
  ],
)
def test_mistakes_are_one_line(tmp_path, content, words):
  path = tmp_path / 'a.csv'
  path.write_bytes(content)
  with pytest.raises(UsageError) as caught:
    _load(path)
  assert words in str(caught.value) and '\n' not in str(caught.value)
  assert 'a.csv' in str(caught.value)


def _ag_news(folder, train):
  (folder / 'ag_news').mkdir()
  (folder / 'ag_news/classes.txt').write_text('World\nSci/Tech\n')
  rows = [f'"{1 + i % 2}","Title {i}","Text {i}"' for i in range(40)]
  (folder / 'ag_news/test.csv').write_text('\n'.join(rows[:30]) + '\n')
  if train:
    (folder / 'ag_news/train.csv').write_text('\n'.join(rows) + '\n')


def test_ag_news(tmp_path):
  _ag_news(tmp_path, True)
  data = sources.load('ag_news', str(tmp_path), _SETTINGS)
  assert (len(data.train), len(data.test)) == (40, 30)
  assert data.class_names == ('World', 'Sci/Tech')
  assert data.train.y.tolist()[:3] == [0, 1, 0] and 'only' not in data.notes
  info = sources.find('ag_news', str(tmp_path), _SETTINGS)
  assert 'test_share' not in info.uses


def test_a_part_of_ag_news_says_so(tmp_path):
  _ag_news(tmp_path, False)
  data = sources.load('ag_news', str(tmp_path), _SETTINGS)
  assert len(data.train) + len(data.test) == 30 and len(data.test)
  assert 'only its test.csv' in data.notes


def test_wrong_ag_news(tmp_path):
  with pytest.raises(UsageError, match=r'classes.txt: it does not exist'):
    sources.load('ag_news', str(tmp_path))
  _ag_news(tmp_path, True)
  (tmp_path / 'ag_news/test.csv').write_text('"1","a","b"\n"3","a","b"\n')
  with pytest.raises(UsageError, match='line 2: must be a class from 1 to 2'):
    sources.load('ag_news', str(tmp_path))


def _pack(kind, path, text):
  if kind == 'gzip':
    path.write_bytes(gzip.compress(text.encode()))
  elif kind == 'zip':
    with zipfile.ZipFile(path, 'w') as archive:
      archive.writestr('a/news.csv', text)
  elif kind == 'utf-16':
    path.write_bytes(text.encode('utf-16'))
  else:
    path.write_text(text.replace(',', kind))


@pytest.mark.parametrize('kind', ['gzip', 'zip', 'utf-16', ';', '\t', '|'])
def test_how_programs_write_tables(tmp_path, kind):
  plain = _load(_write(tmp_path / 'a.csv', *_ROWS))
  _pack(kind, tmp_path / 'b.csv', (tmp_path / 'a.csv').read_text())
  data = _load(tmp_path / 'b.csv')
  np.testing.assert_array_equal(data.train.x, plain.train.x)
  np.testing.assert_array_equal(data.train.y, plain.train.y)


def test_packed_files_that_cannot_be_read(tmp_path):
  path = tmp_path / 'a.csv'
  path.write_bytes(gzip.compress(b'text,label\n' * 9)[:-9])
  with pytest.raises(UsageError, match='a.csv: it cannot be unpacked'):
    _load(path)
  with zipfile.ZipFile(path, 'w') as archive:
    archive.writestr('a.csv', 'text,label')
    archive.writestr('b.csv', 'text,label')
  with pytest.raises(UsageError, match='it packs 2 files, not one'):
    _load(path)
  with open(path, 'wb') as file:
    with gzip.open(file, 'wb') as packed:
      packed.write(bytes(2**20))
  with pytest.raises(UsageError, match='it unpacks to more than'):
    files.read_text(str(path), limit=1_000 + path.stat().st_size, packed=True)


def test_a_backslash_before_quotes(tmp_path):
  rows = [f'"she said \\"word{i}\\", i",{"ab"[i % 2]}' for i in range(20)]
  data = _load(_write(tmp_path / 'a.csv', *rows))
  assert len(data.train) + len(data.test) == 20
  assert ((data.train.x > 0).sum(axis=1) == 4).all()


@pytest.mark.parametrize('separator', [',', ';', '\t'])
def test_rows_that_a_quote_swallows(tmp_path, separator):
  rows = list(_ROWS)
  rows[4], rows[20] = f'"{rows[4]}', rows[20].replace(',', '",')
  settings = DataHparams(max_words=6, vocabulary_size=512)
  info = sources.find(f'text:{_write(tmp_path / "a.csv", *rows)}', '', settings)
  (problem,) = [p for p in info.problems if p.misleads]
  assert problem.text.startswith('line 6: a quote begins a field of 17 lines')


@pytest.mark.parametrize('spaces', [False, True])
def test_texts_without_spaces(tmp_path, spaces):
  words = '\u5f88\u597d \u559c\u6b22 \u6ee1\u610f \u63a8\u8350 \u8d28\u91cf'
  text = words if spaces else words.replace(' ', '')
  rows = [
    f'{text},{"ab"[i % 2]},{"train" if i < 9 else "test"}' for i in range(12)
  ]
  path = _write(tmp_path / 'a.csv', *rows, header='text,label,split')
  info = sources.describe(f'text:{path}', '', _SETTINGS)
  found = [p for p in info.problems if '--text_unit' in p.text]
  assert len(found) == (not spaces)
  settings = DataHparams(max_words=12, text_unit='characters')
  assert ((_load(path, settings).train.x > 0).sum(axis=1) == 10).all()


@pytest.mark.parametrize(
  'word', ['-1', '-1.0', 'nan', 'NA', 'null', 'None', '?']
)
def test_words_for_unknown_classes(tmp_path, word):
  path = _write(tmp_path / 'a.csv', *_ROWS, *[f'more {i},{word}' for i in 'ab'])
  data = _load(path)
  assert data.class_names == ('cat', 'dog') and (data.train.y < 0).sum() == 2
  settings = DataHparams(max_words=6, vocabulary_size=512, class_words=word)
  assert word in _load(path, settings).class_names


def test_whole_numbers_as_floats(tmp_path):
  rows = [f'word {i},{i % 2}.0' for i in range(20)]
  assert _load(_write(tmp_path / 'a.csv', *rows)).class_names == ('0', '1')
  rows[0] = 'word,0.5'
  data = _load(_write(tmp_path / 'a.csv', *rows))
  assert data.class_names == ('0.0', '0.5', '1.0')


def test_a_split_by_client(tmp_path):
  rows = [f'word {i},{"ab"[i % 2]},c{i % 15}' for i in range(150)]
  path = _write(tmp_path / 'a.csv', *rows, header='text,label,client')
  info = sources.find(f'text:{path}', '', _SETTINGS)
  assert {'test_share', 'split_by'} <= info.uses
  assert any(
    'in training and testing' in problem.brief for problem in info.problems
  )
  settings = DataHparams(max_words=6, vocabulary_size=512, split_by='client')
  info = sources.find(f'text:{path}', '', settings)
  assert not info.problems and info.num_test % 10 == 0 < info.num_test
  data = info.read()
  assert np.bincount(data.owners).tolist() == [10] * len(data.client_names)


def test_long_fields(tmp_path):
  path = _write(tmp_path / 'a.csv', *_ROWS, f'{"word " * 50_000},cat')
  assert len(_load(path).train) + len(_load(path).test) == 41
