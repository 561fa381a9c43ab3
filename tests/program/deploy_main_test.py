"""`tff-fssl deploy`: one message for each mistake, and nothing half-written."""

import json
import os

import numpy as np
import pytest

from tff_fssl.data import partition
from tff_fssl.data import sources
from tff_fssl.program import deploy_main
from tff_fssl.program import main
from tff_fssl.program import train_main
from tff_fssl.program.deploy import deployment
from tff_fssl.program.deploy import flower
from tff_fssl.runtime import artefact

_FLAGS = (
  '--algorithm=fixmatch',
  '--dataset=digits',
  '--model=linear',
  '--norm=none',
  '--num_labels=20',
  '--num_validation=20',
  '--num_clients=4',
  '--clients_per_round=2',
  '--num_pretraining_rounds=1',
  '--total_rounds=2',
)


def _deploy(*arguments):
  return main.run(deploy_main.deploy_main, arguments)


@pytest.fixture(scope='module', name='app')
def _app(tmp_path_factory):
  folder = tmp_path_factory.mktemp('deployed') / 'app'
  folder.mkdir()  # An empty folder is taken.
  assert _deploy(*_FLAGS, f'--output_dir={folder}') == main.DONE
  return folder


def _files(folder):
  return {
    path.relative_to(folder).as_posix(): path.read_bytes()
    for path in folder.rglob('*')
    if path.is_file()
  }


def test_what_is_written(app):
  assert [path.name for path in app.parent.iterdir()] == ['app']
  assert sorted(os.listdir(app)) == ['README.md', 'app', 'server']
  inside = _files(app / 'app')
  assert 'pyproject.toml' in inside and 'fssl_app/packed.py' in inside
  # Flower sends Python, TOML and Markdown in all versions.
  assert {name.rpartition('.')[2] for name in inside} == {'py', 'toml'}
  # Where it was written is nothing that clients need to know.
  assert not [name for name, text in inside.items() if os.fsencode(app) in text]
  deployed = deployment.read(str(app / 'server'))
  assert (deployed.first_round, deployed.done) == (0, -1)
  assert deployed.splits == ('test', 'validation')
  assert 'output_dir' not in deployed.values
  text = (app / 'README.md').read_text()
  assert 'its labelled examples' in text and '(0 to 3)' in text
  # The client's program is the server's.
  programs = [
    artefact.Program(str(app / 'app' / 'fssl_app')),
    artefact.Program(str(app / 'server')),
  ]
  assert programs[0].digest == programs[1].digest


def test_nothing_of_the_server_reaches_a_client(app):
  divided = partition.read(str(app / 'server' / 'partition.json'))
  images = sources.load('digits').train.x[divided.server_labeled]
  assert len(images) == 20
  program = artefact.Program(str(app / 'app' / 'fssl_app'))
  packed = json.loads((app / 'app' / 'fssl_app' / 'packed.py').read_text())
  assert sorted(packed) == ['client.json', 'client/work0.pb', 'program.json']
  at_client = [program.read(name) for name in packed]
  at_client += _files(app / 'app').values()
  at_server = b''.join(_files(app / 'server').values())
  for image in images:
    assert image.tobytes() in at_server
    assert not any(image.tobytes() in content for content in at_client)


def test_graphs_that_are_too_large_for_an_app(tmp_path, monkeypatch, capsys):
  monkeypatch.setattr(flower, '_MOST_PACKED_BYTES', 1000)
  folder = tmp_path / 'app'
  assert _deploy(*_FLAGS, f'--output_dir={folder}') == main.DONE
  assert 'too large for a Flower app' in capsys.readouterr().err
  assert not (folder / 'app' / 'fssl_app' / 'packed.py').exists()
  assert 'program="PATH"' in (folder / 'README.md').read_text()
  client = artefact.Program(str(folder / 'clients'))
  assert client.digest == artefact.Program(str(folder / 'server')).digest
  assert client.read('client.json')


@pytest.mark.parametrize(
  'arguments, words',
  [
    ([*_FLAGS], '--output_dir: give the folder'),
    ([*_FLAGS, '--output_dir='], '--output_dir: give the folder'),
    ([*_FLAGS, '--output_dir={used}'], 'is not empty'),
    ([*_FLAGS, '--output_dir={file}'], 'is not a folder'),
    ([*_FLAGS, '--to=x', '--output_dir={new}'], '--to=x'),
    (['{new}', '--output_dir={new}'], 'is not a run'),
    (['{used}', '--output_dir={new}'], 'is not a run'),
    (['{new}', '{used}', '--output_dir={new}'], 'one name only'),
    (
      [
        '--algorithm=local_supervised',
        '--scenario=labels_at_clients',
        '--output_dir={new}',
      ],
      'clients train alone',
    ),
    (
      ['--algorithm=supervised', '--output_dir={new}', '--num_labels=100'],
      'rounds have no clients',
    ),
    ([*_FLAGS, '--metrics=auroc', '--output_dir={new}'], 'accuracy and loss'),
    ([*_FLAGS, '--aggregator=secure', '--output_dir={new}'], 'secure sums'),
    ([*_FLAGS, '--dataset=folder:/nowhere', '--output_dir={new}'], 'nowhere'),
  ],
)
def test_mistakes(tmp_path, capsys, arguments, words):
  (tmp_path / 'used').mkdir()
  (tmp_path / 'used' / 'x').touch()
  (tmp_path / 'file').touch()
  paths = {name: tmp_path / name for name in ('used', 'file', 'new')}
  given = [argument.format(**paths) for argument in arguments]
  assert _deploy(*given) == main.USAGE
  error = capsys.readouterr().err
  assert words in error and error.count('\n') == 1
  assert sorted(os.listdir(tmp_path)) == ['file', 'used']


_ALONE = (
  '--algorithm=fixmatch',
  '--scenario=labels_at_clients',
  '--dataset=classes:cat,dog',
  '--image_size=8',
  '--model=linear',
  '--norm=none',
  '--num_clients=2',
  '--clients_per_round=2',
  '--total_rounds=2',
)


def test_a_server_without_images(tmp_path):
  folder = tmp_path / 'app'
  more = ['--normalization=scale', '--max_client_examples=9']
  assert _deploy(*_ALONE, *more, f'--output_dir={folder}') == main.DONE
  deployed = deployment.read(str(folder / 'server'))
  assert (deployed.num_clients, deployed.splits) == (2, ())
  program = artefact.Program(str(folder / 'app' / 'fssl_app'))
  about = json.loads(program.read('client.json'))
  assert about['class_names'] == ['cat', 'dog']
  assert (about['example_shape'], about['max_examples']) == ([8, 8, 3], 9)


@pytest.mark.parametrize(
  'more, words',
  [
    (['--normalization=scale'], 'give the most, --max_client_examples'),
    (['--max_client_examples=9'], 'give --mean and --std, or set --norm'),
    (['--dataset=classes:a'], 'give two classes or more'),
    (
      ['--num_clients=0', '--partition=natural', '--normalization=scale']
      + ['--max_client_examples=9'],
      'give how many clients there are',
    ),
  ],
)
def test_what_a_server_without_images_must_say(tmp_path, capsys, more, words):
  folder = tmp_path / 'app'
  assert _deploy(*_ALONE, *more, f'--output_dir={folder}') == main.USAGE
  assert words in capsys.readouterr().err


def test_training_needs_images(tmp_path, capsys):
  flags = [*_ALONE, '--normalization=scale', f'--output_dir={tmp_path}/run']
  assert main.run(train_main.train_main, flags) == main.USAGE
  assert 'only deploy takes it' in capsys.readouterr().err


def test_a_failure_leaves_nothing(tmp_path, monkeypatch):
  class Writer:
    def __init__(self, config, start, folder):
      self.folder = folder

    def write(self, run):
      os.mkdir(os.path.join(self.folder, 'half'))
      raise OSError(28, 'No space left on device', 'x')

  monkeypatch.setattr(flower, '_start', lambda *_: None)
  monkeypatch.setattr(flower, '_Writer', Writer)
  folder = tmp_path / 'app'
  assert _deploy(*_FLAGS, f'--output_dir={folder}') == main.USAGE
  assert not os.listdir(tmp_path)


def test_noise_has_no_seed(tmp_path):
  folder = tmp_path / 'app'
  arguments = [
    '--aggregator=dp',
    '--dp_noise_multiplier=1.0',
    '--max_client_examples=60000',
  ]
  assert _deploy(*_FLAGS, *arguments, f'--output_dir={folder}') == main.DONE
  program = artefact.Program(str(folder / 'server'))
  reply = [np.zeros_like(value) for value in program.unusable(0)]
  found = []
  for _ in range(2):
    server = program.start(program.initial())
    program.stage(0, server)
    totals = program.begin(0, server)
    for _ in range(2):
      totals = program.add(0, server, totals, reply)
    program.end(0, server, totals)
    program.stage(1, server)
    found.append(program.finish(server))
  name = 'state/global_model_weights/trainable/0'
  assert not np.array_equal(found[0][name], found[1][name])
  assert deployment.read(str(folder / 'server')).is_noised
