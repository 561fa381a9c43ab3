"""A folder of images, from the command line to the exported model."""

import json
import os

import leftovers
import picture_folders
import pytest

from tff_fssl.program import config as config_lib
from tff_fssl.program import evaluation
from tff_fssl.program import main
from tff_fssl.program import train_main

_FLAGS = (
  '--dataset=folder:photos',
  '--image_size=12',
  '--color=gray',
  '--algorithm=supervised',
  '--scenario=labels_at_clients',
  '--model=linear',
  '--norm=none',
  '--num_labels=2',
  '--num_clients=4',
  '--clients_per_round=2',
  '--client_epochs=1',
  '--total_rounds=1',
  '--tensorboard=false',
)


@pytest.fixture(name='train')
def _train(tmp_path, monkeypatch, capsys):
  monkeypatch.chdir(tmp_path)
  picture_folders.class_folders(
    tmp_path / 'photos',
    {'train/cat': 12, 'train/dog': 12, 'test/cat': 4, 'test/dog': 4},
  )

  def train(*more):
    given = [*_FLAGS, f'--cache_dir={tmp_path}/cache', *more]
    code = main.run(train_main.train_main, given)
    return code, *capsys.readouterr()

  return train


def test_train_evaluate_and_continue(train, tmp_path, capsys):
  code, shown, error = train()
  assert code == 0, error
  sizes = '24 training and 8 test images of 12 x 12 x 1, 2 classes'
  assert sizes in ' '.join(shown.split())
  run = 'runs/supervised_photos_labels_at_clients_seed0'
  with open(os.path.join(run, 'model', 'about.json')) as file:
    about = json.load(file)
  assert about['classes'] == ['cat', 'dog']
  assert 0.4 < about['inputs_of_model.keras']['mean'][0] < 0.6
  with open(os.path.join(run, 'flags.txt')) as file:
    recorded = file.read()
  assert '--image_size=12\n' in recorded and '--color=gray\n' in recorded
  # The split is by folders, so this has no effect.
  assert '--test_share' not in recorded and '--split_preset' not in recorded
  for folder in (run, os.path.join(run, 'model')):
    argv = [folder, f'--cache_dir={tmp_path}/elsewhere']
    assert main.run(evaluation.evaluate_main, argv) == 0
    assert '8 test' in capsys.readouterr().out
  assert sorted(os.listdir('cache')) == sorted(os.listdir('elsewhere'))
  # Elsewhere, by another path.
  os.rename('photos', 'moved')
  os.makedirs('there')
  os.rename('moved', 'there/photos')
  code, shown, error = train('--data_dir=there', '--total_rounds=2')
  assert code == 0, error
  assert 'round 2/2' in ' '.join(shown.split())


def test_other_names_of_classes_are_refused(train, tmp_path, capsys):
  assert train()[0] == 0
  for split in ('train', 'test'):
    os.rename(f'photos/{split}/cat', f'photos/{split}/zebra')
  run = 'runs/supervised_photos_labels_at_clients_seed0'
  for folder in (run, os.path.join(run, 'model')):
    argv = [folder, f'--cache_dir={tmp_path}/cache']
    assert main.run(evaluation.evaluate_main, argv) == main.USAGE
    (error,) = capsys.readouterr().err.splitlines()
    assert f"class 0 is 'dog', but {folder} was trained with 'cat'" in error
  code, _, error = train('--total_rounds=2')
  assert code == main.USAGE and 'names of classes' in error


@pytest.mark.parametrize(
  'flags,words',
  [
    (['--dataset=folder:foto'], 'it does not exist'),
    (['--num_labels=3'], 'must be a multiple of the number of classes (2)'),
    (
      ['--test_share=0.5'],
      '--test_share: has no effect with --dataset=folder:',
    ),
    (['--dataset=digits'], '--image_size: has no effect with --dataset=digits'),
  ],
)
def test_mistakes_are_one_line_before_tensorflow(train, flags, words):
  code, shown, error = train(*flags)
  assert code == main.USAGE and 'TensorFlow' not in shown
  assert words in error and len(error.splitlines()) == 1
  assert sorted(os.listdir()) == ['photos']


def test_the_server_has_the_images_of_its_folder(train, tmp_path):
  for folder in ('clients/north', 'clients/south', 'server', 'test'):
    picture_folders.class_folders(
      tmp_path / 'clinics', {f'{folder}/a': 5, f'{folder}/b': 6}
    )
  flags = (
    '--dataset=folder:clinics',
    '--partition=natural',
    '--scenario=labels_at_server',
    '--num_clients=0',
    '--num_pretraining_rounds=0',
    '--client_epochs=5',
    '--accept_findings',  # The pictures of all folders are the same.
  )
  code, shown, error = train(*flags, '--num_labels=0', '--output_dir=all')
  assert code == 0, error
  assert '11 images of its own: 11 for labels' in shown
  assert main.run(evaluation.evaluate_main, ['all']) == 0
  config = config_lib.parse_config(['--algorithm=fixmatch', *flags[:4]])
  assert config.run.num_labels == 0


def test_mistakes_in_images_leave_no_run(train, tmp_path):
  (tmp_path / 'photos/train/cat/0.png').write_text('torn')
  code, shown, error = train()
  assert code == main.USAGE and '--max_unreadable=1' in error
  assert 'TensorFlow' not in shown
  assert len(error.splitlines()) == 1
  assert leftovers.files_in(tmp_path / 'runs') == []
  (tmp_path / 'in_the_way').write_text('')
  code, _, error = train(f'--cache_dir={tmp_path}/in_the_way')
  assert code == main.USAGE and 'in the way' in error
  assert len(error.splitlines()) == 1
