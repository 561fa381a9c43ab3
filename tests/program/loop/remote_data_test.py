"""Clients that another process loads by a run's flags."""

import os
import pickle

import numpy as np
import pytest

from tff_fssl.data import sources
from tff_fssl.hparams import UsageError
from tff_fssl.program.configuration import config as config_lib
from tff_fssl.program.loop import remote_data
from tff_fssl.program.loop import run_data

_FLAGS = [
  '--dataset=digits',
  '--num_clients=10',
  '--partition=dirichlet',
  '--alpha=0.3',
  '--min_client_examples=2',
  '--streaming_steps=2',
  '--client_test_fraction=0.2',
  '--seed=3',
]


@pytest.fixture(scope='module', name='held')
def _held():
  config = config_lib.parse_config([*_FLAGS, '--algorithm=fixmatch'])
  data = sources.load_found(config.info, None)
  partition = run_data.load_partition(config, data)
  return remote_data.Held(config, data, partition)


def test_gives_what_the_program_has(held):
  loader = remote_data.Loader(held, remote_data.training_examples)
  sent = pickle.dumps(loader)
  assert len(sent) < 10_000
  here, there = loader(), pickle.loads(sent)()
  for round_num in (1, 2):
    for client_id in range(10):
      for ours, theirs in zip(
        here(round_num, client_id), there(round_num, client_id)
      ):
        assert (ours is None) == (theirs is None)
        if ours is not None:
          np.testing.assert_array_equal(ours[0], theirs[0])
          np.testing.assert_array_equal(ours[1], theirs[1])


def test_gives_what_clients_hold_out(held):
  loader = remote_data.Loader(held, remote_data.test_examples)
  here, there = loader(), pickle.loads(pickle.dumps(loader))()
  sizes = []
  for client_id in range(10):
    (x, y), _ = here(0, client_id)
    np.testing.assert_array_equal(x, there(0, client_id)[0][0])
    sizes.append(len(y))
  assert min(sizes) > 0


def test_other_data_are_refused(held, monkeypatch):
  loader = pickle.dumps(remote_data.Loader(held, remote_data.training_examples))
  load = sources.load_found

  def load_others(*args):
    others = load(*args)
    others.train.x[5, 0, 0] ^= 1
    return others

  monkeypatch.setattr(sources, 'load_found', load_others)
  with pytest.raises(UsageError, match='copy the same files'):
    pickle.loads(loader)()


def test_relative_paths_begin_at_the_programs_folder(
  held, tmp_path, monkeypatch
):
  folder = os.getcwd()
  loader = pickle.dumps(remote_data.Loader(held, remote_data.training_examples))
  monkeypatch.chdir(tmp_path)
  pickle.loads(loader)()
  assert os.getcwd() == folder
