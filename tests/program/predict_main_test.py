"""Predictions of new files, after the data of training are gone."""

import csv
import pathlib
import re
import shlex
import shutil

import numpy as np
from PIL import Image
import pytest

from tff_fssl.data import data_hparams
from tff_fssl.data import names as data_names
from tff_fssl.hparams import UsageError
from tff_fssl.program import data_main
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


def _draw(path, is_flu):
  """An image with a bright line, whose place is the class."""
  path.parent.mkdir(parents=True, exist_ok=True)
  pixels = np.random.default_rng(len(str(path))).integers(0, 90, (16, 16))
  pixels[4 if is_flu else 12] += 150
  Image.fromarray(pixels.astype(np.uint8)).save(path)


def _write_images():
  root = pathlib.Path('hospitals')
  for name in ('north', 'south', 'west'):
    for i in range(10):
      _draw(root / 'clients' / name / 'unlabeled' / f'{i}.png', i % 2)
  for split in ('server', 'test'):
    for i in range(20):
      _draw(root / split / ('cold', 'flu')[i % 2] / f'{i}.png', i % 2)
  for i in range(4):
    _draw(pathlib.Path('new_images') / f'{i}.png', i % 2)


def _write_rows(name, new, columns, row_of):
  """A table of classes 0 and 1 in turn, a third without a label."""
  names = 'cold', 'flu'
  rows = [row_of(i % 2) for i in range(180)]
  ends = [
    [('north', 'south', 'west')[i % 3], names[i % 2] if i % 3 else '']
    for i in range(180)
  ]
  for path, head, some in (
    (name, columns, [[*row, *end] for row, end in zip(rows, ends)]),
    (new, columns[:-2], rows[:4]),
  ):
    with open(path, 'w', newline='') as file:
      csv.writer(file).writerows([head, *some])


def _write_table():
  rng = np.random.default_rng(0)
  _write_rows(
    'patients.csv',
    'new_patients.csv',
    ['age', 'smoker', 'hospital', 'diagnosis'],
    lambda flu: [int(rng.normal(30 + 40 * flu, 5)), ('no', 'yes')[flu]],
  )


def _write_texts():
  rng = np.random.default_rng(0)
  words = 'sneezes pollen spring'.split(), 'cough fever chills'.split()
  _write_rows(
    'letters.csv',
    'new_letters.csv',
    ['text', 'hospital', 'label'],
    lambda flu: [' '.join([*words[flu], *rng.choice(list('abcdef'), 3)])],
  )


@pytest.mark.parametrize(
  'section, write',
  [
    ('Images', _write_images),
    pytest.param('A table', _write_table, marks=pytest.mark.slow),
    pytest.param('Texts', _write_texts, marks=pytest.mark.slow),
  ],
)
def test_from_folders_of_hospitals_to_predictions(
  here, capsys, repository, section, write
):
  write()
  page = (repository / 'docs' / 'hospitals.md').read_text()
  text = page.partition(f'\n## {section}\n')[2].partition('\n## ')[0]
  commands = re.findall(r'(?m)^    python programs/((?:.*\\\n)*.*)', text)
  programs = {
    'data.py': data_main.data_main,
    'train.py': train_main.train_main,
    'predict.py': predict_main.predict_main,
  }
  assert len(commands) == len(programs)
  for command in commands:
    name, *argv = shlex.split(command.replace('\\\n', ''))
    if name == 'train.py':
      argv += ['--total_rounds=1', '--num_pretraining_rounds=3']
    assert main.run(programs[name], argv) == 0, capsys.readouterr()
  (output,) = here.glob('*s.csv' if section == 'Images' else 't*.csv')
  with open(output, newline='') as file:
    found = [row['class'] for row in csv.DictReader(file)]
  assert found == ['cold', 'flu', 'cold', 'flu']


@pytest.mark.slow
def test_tables_of_other_columns(here, capsys):
  _write_table()
  _train('--dataset=features:patients.csv', '--model=mlp')
  (here / 'new.csv').write_text('smoker,age\nyes,75\nnever,\n')
  rows, text = _predict(capsys, 'run', 'new.csv')
  assert rows[0]['class'] == 'flu' and len(rows) == 2
  assert rows[0]['example'] == 'line 2' and 'accuracy' not in text
  (here / 'new.csv').write_text('age;smoker;Diagnosis\n75;yes;flu\n35;no;\n')
  _, text = _predict(capsys, 'run', 'new.csv')
  assert '1.0000, of 1 with a label' in text
  (here / 'new.csv').write_text('smoker\nyes\n')
  code = main.run(predict_main.predict_main, ['run', 'new.csv'])
  assert code == 2 and "no column 'age'" in capsys.readouterr().err


@pytest.mark.slow
def test_labels_of_texts_that_are_not_known_do_not_count(here, capsys):
  _write_texts()
  _train('--dataset=text:letters.csv', '--model=text_cnn', '--max_words=6')
  (here / 'new.csv').write_text(
    'text,label\ncough fever a,flu\npollen spring,cold\nfever,nan\n'
  )
  rows, text = _predict(capsys, 'run', 'new.csv')
  assert [row['class'] for row in rows] == ['flu', 'cold', 'flu']
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
