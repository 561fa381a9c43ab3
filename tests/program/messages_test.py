import dataclasses
import os
import pathlib
import shlex
import types

import numpy as np

from tests.program import fakes
from tff_fssl.algorithms import registry
from tff_fssl.data import partition_draw
from tff_fssl.program import checkpoint
from tff_fssl.program import config
from tff_fssl.program import console
from tff_fssl.program import messages
from tff_fssl.program import output_tree

_CLIENTS = '--scenario=labels_at_clients'
_SMALL = (
  '--dataset=digits',
  '--algorithm=supervised',
  _CLIENTS,
  '--model=cnn',
  '--norm=none',
  '--num_labels=10',
  '--num_clients=20',
  '--clients_per_round=2',
  '--client_epochs=2',
  '--total_rounds=4',
  '--tensorboard=false',
)


def test_the_banner_shows_the_values_of_the_paper(monkeypatch):
  entry = dataclasses.replace(
    registry.REGISTRY['supervised'],
    name='paper',
    # The second has no effect without clients' batch norm.
    round_defaults={'client_epochs': 3, 'batch_norm_statistics': 'batch_mean'},
  )
  monkeypatch.setitem(registry.REGISTRY, 'paper', entry)
  small = ['--algorithm=paper', *(f for f in _SMALL if 'algorithm' not in f)]
  for given, shown in ((small, '2'), (small[:-3], '3')):
    parsed = config.parse_config(given)
    task = types.SimpleNamespace(
      config=parsed,
      data=types.SimpleNamespace(
        name='digits',
        train=[],
        test=[],
        example_shape=(8, 8, 1),
        num_classes=10,
      ),
      partition=partition_draw.build_partition(
        np.arange(1_000) % 10, parsed.partition_settings
      ),
      network=types.SimpleNamespace(trainable_weights=[]),
    )
    lines = messages.banner(task, None, None, None, None).splitlines()
    (line,) = [line for line in lines if line.startswith('  with ')]
    assert line.split() == ['with', f'--client_epochs={shown}']


def test_parts_that_are_not_reached():
  flags = ['--streaming_steps=10', '--streaming_rounds=5', '--total_rounds']
  for total, words in (
    (16, '--total_rounds=16: clients have 4 of --streaming_steps=10 parts'),
    (45, 'have 9 of --streaming_steps=10 parts of their examples; the last'),
    (46, ''),
  ):
    given = config.parse_config([*flags[:2], f'{flags[2]}={total}'])
    said = messages.unreached_parts(given)
    assert words in said and bool(said) == bool(words)


def test_the_command_that_resumes_pre_training(tmp_path):
  tree = output_tree.OutputTree(str(tmp_path / 'a run'))
  settings = fakes.settings(first_round=-4)
  command = console.command_line('train', f'--flagfile={tree.flags_file}')
  os.makedirs(tree.checkpoints)
  for saved, words in (
    (None, 'at the start'),
    (-5, 'at the start'),
    (-2, 'after pre-training 3/5'),
    (2, 'after round 2'),
  ):
    if saved is not None:
      pathlib.Path(checkpoint.path_of(tree.checkpoints, saved)).touch()
    text = messages.how_to_resume(settings, tree)
    assert text == f'To continue {words}:\n  {command}'


def test_the_command_that_evaluates_trusts_the_run_s_own_model(tmp_path):
  file = tmp_path / 'net.py'
  file.write_text('def build(images, num_classes, norm): pass\n')
  tree = output_tree.OutputTree('a run')
  for model, more in (('cnn', []), (f'{file}:build', ['--run_model_file'])):
    given = config.parse_config(['--dataset=digits', f'--model={model}'])
    command = messages.evaluate_command(given, tree)
    words = shlex.split(console.command_line('evaluate'))
    assert shlex.split(command) == [*words, 'a run', *more]
