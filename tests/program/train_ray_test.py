"""The training program on a Ray cluster of this machine."""

import pathlib

import leftovers
import pytest

from tff_fssl.program import main
from tff_fssl.program import train_main

pytest.importorskip('ray')

_FLAGS = (
  '--dataset=digits',
  '--algorithm=fixmatch',
  '--scenario=labels_at_clients',
  '--model=cnn',
  '--norm=gn',
  '--num_labels=10',
  '--num_clients=20',
  '--clients_per_round=3',
  '--client_epochs=1',
  '--rounds_per_checkpoint=1',
  '--tensorboard=false',
)


def _train(folder, *flags):
  code = main.run(
    train_main.train_main, [*_FLAGS, *flags, f'--output_dir={folder}']
  )
  assert code == main.DONE


@pytest.mark.slow
def test_equals_in_process_also_when_continued(tmp_path, capfd):
  _train(tmp_path / 'one', '--total_rounds=3', '--clients_per_group=1')
  _train(tmp_path / 'two', '--total_rounds=2', '--runtime=ray')
  assert 'ray, a cluster of this machine alone' in capfd.readouterr().out
  _train(tmp_path / 'two', '--total_rounds=3', '--clients_per_group=1')
  for name in ('train', 'eval'):
    one, two = (
      pathlib.Path(tmp_path, run, 'metrics', f'{name}.csv').read_bytes()
      for run in ('one', 'two')
    )
    # Round 2 was the last one once, and so was evaluated.
    lines = [line for line in two.splitlines() if line in one.splitlines()]
    assert lines == one.splitlines()


@pytest.mark.parametrize(
  ['flags', 'message'],
  [
    (['--client_devices=cpu:0'], 'allowed are auto, cpu, gpu'),
    (['--profile=1'], 'cannot see'),
    (['--runtime=in_process', '--ray_workers=2'], '--ray_workers'),
    (['--ray_address=127.0.0.1:1'], 'cannot connect'),
  ],
)
def test_mistakes(tmp_path, capfd, flags, message):
  arguments = [*_FLAGS, '--runtime=ray', '--total_rounds=1', *flags]
  code = main.run(
    train_main.train_main, [*arguments, f'--output_dir={tmp_path}/run']
  )
  assert code == main.USAGE
  printed = capfd.readouterr().err
  assert message in ' '.join(printed.split())
  assert leftovers.files_in(tmp_path / 'run') == []
