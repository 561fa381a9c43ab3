"""Files of vectors and of texts, from the command line to the served model."""

import csv
import json
import re
import subprocess
import sys

import numpy as np
import pytest

from tff_fssl.program import data_main
from tff_fssl.program import evaluation
from tff_fssl.program import main
from tff_fssl.program import train_main

_SMALL = (
  '--norm=none',
  '--num_labels=8',
  '--num_validation=10',
  '--num_clients=4',
  '--clients_per_round=2',
  '--client_epochs=1',
  '--num_pretraining_rounds=1',
  '--total_rounds=2',
  '--tensorboard=false',
  '--output_dir=run',
)
_WORDS = ('goal team match player win', 'stock market price bank shares')
# Uses what is exported where there is no tff_fssl.
_SERVE = """
import json, re, os, sys
import numpy as np
import tensorflow as tf
serve = tf.saved_model.load('run/model').signatures['serving_default']
assert not any(name.startswith('tff_fssl') for name in sys.modules)
x = json.loads(sys.argv[2])
x = tf.constant(x, tf.float32 if sys.argv[1] == 'features' else tf.string)
found = serve(**{sys.argv[1]: x})['probabilities'].numpy()
network = tf.keras.models.load_model('run/model/model.keras')
print(json.dumps([found.tolist(), network.input_shape]))
os.chdir('run/model')
with open('README.md') as file:
  (code,) = re.findall('```python\\n(.*?)```', file.read(), re.DOTALL)
exec(code)
"""


def _texts():
  rng = np.random.default_rng(0)
  return [
    (' '.join(rng.choice(_WORDS[i % 2].split(), 6)), ('sport', 'money')[i % 2])
    for i in range(120)
  ]


@pytest.fixture(autouse=True)
def _files(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  with open('news.csv', 'w', newline='') as file:
    csv.writer(file).writerows([('text', 'label'), *_texts()])
  rng = np.random.default_rng(0)
  y = np.arange(120) % 2
  np.savez('news.npz', x=rng.normal(y[:, None] * 3.0, 1, (120, 5)), y=y)


def _train(*flags):
  return main.run(train_main.train_main, [*_SMALL, *flags])


_KINDS = {
  'texts': (
    [
      '--dataset=text:news.csv',
      '--model=text_cnn',
      '--max_words=8',
      '--vocabulary_size=512',
    ],
    ['GOAL, goal! goal team win', '', 'market price, stock'],
    [None, 8],
  ),
  'features': (
    ['--dataset=features:news.npz', '--model=mlp'],
    [[0.0] * 5, [3.0] * 5, [1.5] * 5],
    [None, 5],
  ),
}


@pytest.mark.parametrize(
  'kind,algorithm',
  [
    ('texts', 'fixmatch'),
    pytest.param('features', 'fixmatch', marks=pytest.mark.slow),
    pytest.param('texts', 'fl2', marks=pytest.mark.slow),
    pytest.param('features', 'fl2', marks=pytest.mark.slow),
  ],
)
def test_train_evaluate_serve(kind, algorithm, capsys):
  flags, examples, shape = _KINDS[kind]
  assert _train(*flags, f'--algorithm={algorithm}') == 0
  assert kind.replace('features', 'vectors') in capsys.readouterr().out
  scores = []
  for folder in ('run', 'run/model'):
    assert main.run(evaluation.evaluate_main, [folder]) == 0
    shown = capsys.readouterr().out
    assert '0.2 of it is for testing' in shown
    scores.append([row for row in shown.split('\n') if 'accuracy' in row])
  assert scores[0] == scores[1] and scores[0]
  served = subprocess.run(
    [sys.executable, '-c', _SERVE, kind, json.dumps(examples)],
    capture_output=True,
    check=True,
    text=True,
  )
  first, by_the_card = served.stdout.splitlines()
  probabilities, input_shape = json.loads(first)
  assert re.fullmatch(r"\['(\w+)', '(\w+)'\]", by_the_card)
  assert np.shape(probabilities) == (3, 2) and input_shape == shape
  np.testing.assert_allclose(np.sum(probabilities, axis=1), 1, rtol=1e-5)
  # The network alone, given what about.json says, predicts the same.
  with open('run/model/about.json') as file:
    assert json.load(file)['inputs_of_model.keras']['formula']


@pytest.mark.parametrize(
  'flags,words',
  [
    (['--dataset=text:news.csv', '--model=mlp'], 'allowed are text_cnn and'),
    (
      ['--dataset=text:news.csv', '--model=text_cnn', '--algorithm=mixmatch'],
      'cannot be mixed; set --mixmatch.mixup_concentration=0',
    ),
    (
      ['--dataset=features:news.npz', '--model=mlp', '--max_words=9'],
      '--max_words: has no effect with --dataset=features:',
    ),
    (
      ['--dataset=text:news.csv', '--model=text_cnn', '--weak_noise=1'],
      '--weak_noise: has no effect',
    ),
    (['--dataset=text:nwes.csv', '--model=text_cnn'], 'it does not exist'),
  ],
)
def test_mistakes_are_one_line_before_tensorflow(flags, words, capsys):
  assert _train(*flags) == main.USAGE
  shown, error = capsys.readouterr()
  assert words in error and len(error.splitlines()) == 1
  assert 'TensorFlow' not in shown


@pytest.mark.parametrize(
  'name,noun', [('text:news.csv', 'texts'), ('features:news.npz', 'vectors')]
)
def test_data_are_looked_over(name, noun, capsys):
  assert main.run(data_main.data_main, [name]) == 0
  shown = capsys.readouterr().out
  assert f'  {noun} ' in shown and 'OK. Train with' in shown
