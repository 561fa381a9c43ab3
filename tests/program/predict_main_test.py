"""Predictions of new files, after the data of training are gone."""

import csv
import shutil

import numpy as np
from PIL import Image
import pytest

from tff_fssl.data import data_hparams
from tff_fssl.data import names as data_names
from tff_fssl.hparams import UsageError
from tff_fssl.program import main
from tff_fssl.program import predict_main
from tff_fssl.program import train_main

_TRAIN = (
  '--algorithm=fixmatch',
  '--norm=none',
  '--num_labels=8',
  '--num_clients=2',
  '--clients_per_round=2',
  '--num_pretraining_rounds=3',
  '--total_rounds=1',
  '--output_dir=run',
)


@pytest.fixture(name='here')
def _here(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
  return tmp_path


def _train(*argv):
  assert main.run(train_main.train_main, [*_TRAIN, *argv]) == 0


def _predict(capsys, *argv):
  capsys.readouterr()
  assert main.run(predict_main.predict_main, argv) == 0
  with open('predictions.csv', newline='') as file:
    return list(csv.DictReader(file)), capsys.readouterr().out


def _class_folders(root):
  rng = np.random.default_rng(0)
  for c, name in enumerate(('cat', 'dog')):
    (root / name).mkdir(parents=True)
    for i in range(40):
      # Of 16 bits, of which 12 are used.
      pixels = rng.integers(0, 800, (9, 9)).astype(np.uint16)
      pixels[4 * c : 4 * c + 5] += 3_200
      Image.fromarray(pixels).save(root / name / f'{i}.png')


@pytest.mark.slow
def test_images(here, capsys):
  _class_folders(here / 'photos')
  _train('--dataset=folder:photos', '--image_size=8', '--model=linear')
  rows, text = _predict(capsys, 'run', 'photos')
  assert len(rows) == 80 and 'accuracy' in text
  right = sum(row['class'] == row['label'] for row in rows)
  assert right == 80 and 'of 80 with a label' in text
  shutil.move('photos/cat', 'new')
  shutil.rmtree('photos')
  (here / 'new/torn.png').write_bytes(b'no image')
  rows, text = _predict(capsys, 'run/model', 'new')
  assert 'accuracy' not in text and '1, whose rows say why' in text
  torn = rows.pop()
  assert torn['example'] == 'torn.png' and torn['class'] == ''
  assert torn['problem'].startswith('it is not a readable image')
  assert {row['class'] for row in rows} == {'cat'}
  for row in rows:
    assert float(row['p(cat)']) + float(row['p(dog)']) == pytest.approx(1)
  rows, _ = _predict(capsys, 'run', 'new/1.png')
  assert [row['class'] for row in rows] == ['cat']


@pytest.mark.slow
def test_a_table(here, capsys):
  rng = np.random.default_rng(0)
  lines = ['age,smoker,label']
  for i in range(200):
    ill = i % 2
    age = '' if i % 9 == 0 else int(rng.normal(40 + 30 * ill, 5))
    lines.append(f'{age},{("no", "yes")[ill]},{("well", "ill")[ill]}')
  (here / 'a.csv').write_text('\n'.join(lines))
  _train('--dataset=features:a.csv', '--model=mlp')
  (here / 'a.csv').unlink()
  (here / 'new.csv').write_text('smoker,age\nyes,75\nno,35\nnever,\n')
  rows, text = _predict(capsys, 'run', 'new.csv')
  assert [row['class'] for row in rows][:2] == ['ill', 'well']
  assert rows[0]['example'] == 'line 2' and 'accuracy' not in text
  (here / 'new.csv').write_text('age;smoker;Diagnosis\n75;yes;ill\n35;no;\n')
  _, text = _predict(capsys, 'run', 'new.csv')
  assert '1.0000, of 1 with a label' in text
  (here / 'new.csv').write_text('smoker\nyes\n')
  code = main.run(predict_main.predict_main, ['run', 'new.csv'])
  assert code == 2 and "no column 'age'" in capsys.readouterr().err


@pytest.mark.slow
def test_texts(here, capsys):
  words = 'ball goal match', 'bank share price'
  rng = np.random.default_rng(0)
  rows = [
    f'{words[i % 2]} {" ".join(rng.choice(list("abcdef"), 3))},{"sm"[i % 2]}'
    for i in range(160)
  ]
  (here / 'a.csv').write_text('\n'.join(['text,label', *rows]))
  _train('--dataset=text:a.csv', '--model=text_cnn', '--max_words=6')
  (here / 'new.csv').write_text(
    'text,label\ngoal match a,s\nbank price,m\nball,nan\n'
  )
  rows, text = _predict(capsys, 'run', 'new.csv')
  assert [row['class'] for row in rows] == ['s', 'm', 's']
  assert '1.0000, of 2 with a label' in text


@pytest.mark.parametrize(
  'argv, words',
  [
    (['none', 'x.png'], 'none: is not a whole exported model'),
    (['none'], 'give the data to predict, too'),
    ([], 'no model was given'),
  ],
)
def test_mistakes(here, capsys, argv, words):
  assert main.run(predict_main.predict_main, argv) == 2
  assert words in capsys.readouterr().err


@pytest.mark.parametrize(
  'arrays, words',
  [
    ({'z': [1]}, 'has no x; the model takes x, numbers, N of [1, 2]'),
    ({'x': [['a', 'b']]}, 'the model takes x, numbers'),
    ({'x': [[1.0, 2.0, 3.0]]}, 'has x float64 [1, 3]'),
    ({'x': [[1.0, 2.0], [np.nan, 1.0]]}, 'not finite, first in row 2'),
    ({'x': [[1.0, 2.0]], 'y': [0, 1]}, 'x has 1 rows, y has shape (2,)'),
  ],
)
def test_arrays_that_a_model_does_not_take(here, arrays, words):
  about = {'example_shape': [1, 2], 'classes': ['a', 'b']}
  model = predict_main.Model(
    about, data_hparams.DataHparams(), data_names.VECTORS, len
  )
  np.savez('a.npz', **arrays)
  with pytest.raises(UsageError) as caught:
    predict_main.read('a.npz', model)
  assert words in str(caught.value)
