"""docs/own_data.md runs as it stands."""

import re
import shlex

import client_files
import hub_files
import numpy as np
import picture_folders
import pytest
from tensorflow_federated.python.simulation.datasets import emnist

from tff_fssl.data import sources
from tff_fssl.data.data_hparams import DataHparams
from tff_fssl.data.sources import folder
from tff_fssl.data.sources import hub
from tff_fssl.program import config
from tff_fssl.program import data_main

_SPLITS = ('train', 'test')


@pytest.fixture(name='page')
def _page(repository):
  return (repository / 'docs' / 'own_data.md').read_text()


def _python(page):
  return re.findall(r'```python\n(.*?)```', page, re.DOTALL)


def _commands(page, program='python programs/train.py'):
  """The arguments of each call of a program."""
  found = re.findall(rf'(?m)^    {program} ((?:.*\\\n)*.*)', page)
  return [shlex.split(command.replace('\\\n', '')) for command in found]


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))


def test_its_manifest_and_its_python(page, tmp_path):
  manifest = re.search(r'```csv\n(.*?)```', page, re.DOTALL)[1]
  paths = re.findall(r'(?m)^(\S+\.jpg),', manifest)
  assert len(paths) == 4
  for seed, path in enumerate(paths):
    picture_folders.draw(tmp_path / 'photos' / path, seed, (40, 30))
  more = ''.join(
    f'img/{i}.jpg,{label},,\n'
    for i, label in enumerate(['cat', 'dog', 'cat', 'dog'], 5)
  )
  for i in range(5, 9):
    picture_folders.draw(tmp_path / f'photos/img/{i}.jpg', i)
  (tmp_path / 'photos' / 'manifest.csv').write_text(manifest + more)
  scope = {'client_data': emnist.get_synthetic()}
  for block in _python(page):
    exec(block, scope)
  (x, y), (hidden, unknown) = scope['labeled'], scope['unlabeled']
  assert x.shape == (1, 32, 32, 3) and x.dtype == np.uint8
  assert (y.tolist(), unknown.tolist()) == ([0], [-1])
  np.testing.assert_array_equal(scope['load_client'](1, 0)[1][0], hidden)
  assert scope['y'].tolist() == list(range(10))


def test_its_folders(page, tmp_path):
  block = re.search(r'(?m)(?:^ {4}photos/.*\n)+', page)[0]
  paths = block.split()
  plain = [path for path in paths if path.startswith(('photos/c', 'photos/d'))]
  assert (len(paths), len(plain)) == (6, 2)
  for number, path in enumerate(paths):
    root = tmp_path / ('plain' if path in plain else 'split')
    for copy in range(20):
      name = path.replace('.jpg', f'{copy}.jpg')
      picture_folders.draw(root / name, 20 * number + copy)
  info = sources.find('folder:plain/photos', '', DataHparams())
  assert info.num_train + info.num_test == 40 and info.num_test
  listing = folder.read('split/photos', DataHparams())
  assert (
    listing.marks.y[~listing.marks.in_test].tolist() == [0] * 20 + [-1] * 20
  )
  assert listing.marks.y[listing.marks.in_test].tolist() == [0] * 20
  block = re.search(r'(?m)(?:^ {4}photos/clients/.*\n)+', page)[0]
  for path in block.split():
    picture_folders.draw(tmp_path / 'clients' / path, 1)
  listing = folder.read('clients/photos', DataHparams())
  assert listing.marks.client_names == ('north', 'south')
  assert len(listing.train) == 4 and len(listing.test) == 1


def _write_texts(page, folder):
  rows = re.findall(r'```text\n(.*?)```', page, re.DOTALL)[1]
  more = [f',Text {i},{("sport", "money")[i % 2]},ben,' for i in range(100)]
  (folder / 'news.csv').write_text(rows + '\n'.join(more) + '\n')


def _write_table(page, folder):
  header, *rows = re.findall(r'```text\n(.*?)```', page, re.DOTALL)[0].split()
  for i in range(3, 100):
    label, hospital = ('flu', 'cold', '')[i % 3], ('north', 'south')[i % 2]
    smoker = ('yes', 'no')[i % 7 > 3]
    rows.append(
      f'p{i},{20 + i},{smoker},2024-03-{1 + i % 9:02},{hospital},{label}'
    )
  (folder / 'patients.csv').write_text('\n'.join([header, *rows]) + '\n')


def _write_what_the_commands_name(page, folder):
  exec(_python(page)[0], {})
  _write_texts(page, folder)
  _write_table(page, folder)
  picture_folders.class_folders(folder / 'photos', {'cat': 60, 'dog': 60})
  clients = {
    f'f{i}': (x, np.arange(len(y)) % 10)
    for i, (x, y) in enumerate(
      client_files.draw(dict.fromkeys('abcdefghijkl', 20)).values()
    )
  }
  others = {name: (1 - x, y) for name, (x, y) in clients.items()}
  examples = {
    split: client_files.examples(of)
    for split, of in zip(_SPLITS, (clients, others), strict=True)
  }
  client_files.sqlite(
    folder / 'emnist_all.sqlite',
    {f'{s}_{t}': examples[t] for s in ('all', 'digits_only') for t in _SPLITS},
  )
  for split in _SPLITS:
    hub_files.write(
      folder / f'DIR/uoft-cs/cifar10/plain_text/{split}-00000-of-1.parquet',
      {'img': hub_files.images(200, len(split)), 'label': list(range(10)) * 20},
      [f'class {i}' for i in range(10)],
    )


def test_its_commands(page, tmp_path):
  _write_what_the_commands_name(page, tmp_path)
  checked = [config.parse_config(given) for given in _commands(page)]
  assert [c.info.num_classes for c in checked] == [2, 10, 10, 2, 2, 2]
  assert checked[0].run.output_dir.startswith('runs/fl2_photos_')
  assert checked[1].run.partition == 'natural'
  given = _commands(page, 'python programs/data.py')
  assert len(given) == 6
  for argv in given:
    assert data_main.data_main(argv) == 0
  ((*_, folder),) = _commands(page, 'hf download')
  assert folder == '--local-dir=DIR/uoft-cs/cifar10'
  assert shlex.join(_commands(page, 'hf')[0]) in hub.fetch_command(
    'huggingface:uoft-cs/cifar10', 'DIR'
  )


def test_its_vectors(page):
  exec(_python(page)[0], {})
  checked = config.parse_config(_commands(page)[3])
  data = sources.load_found(checked.info, None)
  assert data.class_names == ('calm', 'loud') and data.example_shape == (1, 16)
  assert len(data.train) + len(data.test) == 400


def test_its_texts(page, tmp_path):
  _write_texts(page, tmp_path)
  checked = config.parse_config(_commands(page)[5])
  data = sources.load_found(checked.info, None)
  assert data.class_names == ('money', 'sport')
  assert data.client_names == ('anna', 'ben')
  assert (data.train.y == -1).sum() == 1
