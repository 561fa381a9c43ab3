"""The files of configs/text/, on a tiny AG News."""

import pathlib

import pytest

from tff_fssl.program import config as config_lib
from tff_fssl.program import main
from tff_fssl.program import train_main

_FILES = sorted(
  (pathlib.Path(__file__).resolve().parents[2] / 'configs/text').glob('*.flags')
)


@pytest.fixture(name='data_dir')
def _data_dir(tmp_path):
  folder = tmp_path / 'ag_news'
  folder.mkdir()
  (folder / 'classes.txt').write_text('World\nSports\nBusiness\nSci/Tech\n')
  for split, count in (('train', 1_000), ('test', 40)):
    rows = [f'"{1 + i % 4}","Title {i}","Text {i % 9}"' for i in range(count)]
    (folder / f'{split}.csv').write_text('\n'.join(rows) + '\n')
  return str(tmp_path)


def _arguments(path, data_dir):
  return [f'--flagfile={path}', f'--data_dir={data_dir}']


def test_there_are_files():
  assert len(_FILES) == 3


@pytest.mark.parametrize('path', _FILES, ids=lambda path: path.stem)
def test_they_say_what_is_run(path, data_dir):
  config = config_lib.parse_config(_arguments(path, data_dir))
  assert path.stem == f'{config.run.dataset}_{config.run.algorithm}'
  text = path.read_text()
  assert f'--flagfile=configs/text/{path.name}\n' in text
  assert f'{config.run.num_labels} labels at the server' in text
  given = [line for line in text.splitlines() if line.startswith('--')]
  assert given[0] == f'--algorithm={config.run.algorithm}'
  assert given[1:] == [
    line
    for line in _FILES[0].read_text().splitlines()
    if line.startswith('--') and not line.startswith('--algorithm')
  ]


@pytest.mark.slow
@pytest.mark.parametrize('path', _FILES, ids=lambda path: path.stem)
def test_they_run(path, data_dir, tmp_path):
  more = [
    '--total_rounds=1',
    '--num_pretraining_rounds=0',
    '--tensorboard=false',
    f'--output_dir={tmp_path / "run"}',
  ]
  arguments = [*_arguments(path, data_dir), *more]
  assert main.run(train_main.train_main, arguments) == 0
