"""The description of a deployment: written, read, and refused if damaged."""

import json
import struct

import numpy as np
import pytest

from tff_fssl import hparams
from tff_fssl.program import checkpoint
from tff_fssl.program.deploy import deployment

_DEPLOYED = deployment.Deployment(
  values={'aggregator': 'dp', 'seed': '4'},
  owner=checkpoint.Owner(flags={'seed': '4'}),
  is_private=True,
  seed=4,
  num_clients=9,
  clients_per_round=2,
  first_round=1,
  done=0,
  total_rounds=3,
  rounds_per_evaluation=1,
  max_bad_rounds=3,
  keep_checkpoints=1,
  min_clients=1,
  participation=deployment.ParticipationHparams(dropout_probability=0.25),
  splits=('test',),
)
_NAMES = ['state/weights', 'state/round']


def test_it_is_read_as_it_was_written(tmp_path):
  (tmp_path / deployment.NAME).write_text(_DEPLOYED.encode())
  found = deployment.read(str(tmp_path))
  assert found == _DEPLOYED
  assert found.is_noised and found.flags() == _DEPLOYED.values


def test_availability_is_beside_it(tmp_path):
  content = json.loads(_DEPLOYED.encode())
  content['participation']['availability_file'] = 'elsewhere.csv'
  (tmp_path / deployment.NAME).write_text(json.dumps(content))
  found = deployment.read(str(tmp_path)).participation.availability_file
  assert found == str(tmp_path / deployment.AVAILABILITY)


@pytest.mark.parametrize(
  'change',
  [
    lambda content: content.clear(),
    lambda content: content.update(version=0),
    lambda content: content.update(more=1),
    lambda content: content.pop('seed'),
    lambda content: content.update(seed='4'),
    lambda content: content.update(num_clients=True),
    lambda content: content.update(values=None),
    lambda content: content.update(owner=3),
    lambda content: content.update(splits=1),
    lambda content: content.update(participation={'x': 1}),
    lambda content: content.update(participation={'dropout_probability': 2}),
  ],
)
def test_damaged_descriptions_are_refused(tmp_path, change):
  content = json.loads(_DEPLOYED.encode())
  change(content)
  (tmp_path / deployment.NAME).write_text(json.dumps(content))
  with pytest.raises(hparams.UsageError, match=deployment.NAME):
    deployment.read(str(tmp_path))


def test_states_are_read_from_the_leaves_of_their_checkpoint():
  state = {'state/weights': np.float32([1, 2]), 'state/round': np.int32(5)}
  saved = deployment.Saved(state, 2)
  leaves = _DEPLOYED.leaves(saved, round_num=5)
  assert leaves['process/weights'] is state['state/weights']
  # Sampling goes on with the next round.
  assert struct.unpack('<qq', leaves['iterator']) == (4, 6)
  assert deployment.read_state(leaves, _NAMES) == saved


@pytest.mark.parametrize('name', ['process/weights', 'num_bad_rounds'])
def test_leaves_of_another_program_are_refused(name):
  saved = deployment.Saved(dict.fromkeys(_NAMES, np.zeros(2)), 0)
  leaves = _DEPLOYED.leaves(saved, round_num=5)
  more = {**leaves, 'process/more': np.zeros(2)}
  less = {k: v for k, v in leaves.items() if k != name}
  for wrong in (more, less):
    with pytest.raises(checkpoint.CheckpointError, match='another program'):
      deployment.read_state(wrong, _NAMES)


def test_metrics_are_named_as_in_train_csv():
  result = {'state/round': 1, 'metrics/a/b': 2.0, 'metrics/c': 3.0}
  assert list(deployment.select_metrics(result).items()) == [
    ('a/b', 2.0),
    ('c', 3.0),
  ]
