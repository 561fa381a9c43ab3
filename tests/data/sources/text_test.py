"""CSV files of texts, and AG News."""

import numpy as np
import pytest

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
