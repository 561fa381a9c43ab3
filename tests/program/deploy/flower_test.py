"""The whole way: an app, a SuperLink, SuperNodes that die, a server too."""

import os
import pathlib
import shutil
import subprocess
import sys

import fake_clients
import flower_net
import numpy as np
import pytest

from tff_fssl.data import clients
from tff_fssl.data import partition
from tff_fssl.data import sources
from tff_fssl.program import checkpoint
from tff_fssl.program import csv_table
from tff_fssl.program import deploy_main
from tff_fssl.program import main

_ALONE = pathlib.Path(fake_clients.__file__).with_name('serve_alone.py')
_FLAGS = (
  '--algorithm=fixmatch',
  '--scenario=labels_at_clients',
  '--dataset=digits',
  '--model=cnn',
  '--num_labels=20',
  '--num_validation=0',
  '--num_clients=2',
  '--clients_per_round=2',
  '--client_steps=2',
  '--rounds_per_evaluation=1',
  '--total_rounds=3',
)


def _write(folder):
  """Writes an app of two phases, and the data of its two clients."""
  app, data = folder / 'app', folder / 'data'
  arguments = [*_FLAGS, f'--output_dir={app}']
  assert main.run(deploy_main.deploy_main, arguments) == main.DONE
  data.mkdir()
  divided = partition.read(str(app / 'server' / 'partition.json'))
  digits = sources.load('digits')
  for client_id in range(2):
    (x, y), (more, _) = clients.client_examples(digits, divided, client_id)
    np.savez(
      data / f'{client_id}.npz',
      x=np.concatenate([x, more]),
      y=np.concatenate([y, np.full(len(more), -1)]),
    )
  return app, data


def _leaves(app, round_num):
  folder = str(app / 'server' / 'run' / 'checkpoints')
  return checkpoint.read(checkpoint.path_of(folder, round_num))


@pytest.mark.slow
def test_a_federation(repository, tmp_path):
  if not (flower_net.BINARIES / 'flower-superlink').exists():
    pytest.skip('no Flower (make setup-flower)')
  app, data = _write(tmp_path)
  alone = tmp_path / 'alone'
  shutil.copytree(app, alone)
  saved = app / 'server' / 'run' / 'checkpoints'

  def net(name, certificates=None):
    return flower_net.Net(
      tmp_path / name,
      pythonpath=str(repository),
      server=app / 'server',
      certificates=certificates,
    )

  def start(flower):
    flower.start_link()
    for client_id in range(2):
      path = data / f'{client_id}.npz'
      config = f'client={client_id} data="{path}" threads=1'
      flower.start_node(f'node{client_id}', config)
    flower.run(app / 'app', 'threads=1 timeout=100 patience=60')

  def reach(flower, round_num):
    path = saved / f'round_{round_num}.ckpt'
    try:
      flower_net.wait(path.exists, f'round {round_num}')
    except AssertionError as error:
      raise AssertionError(flower.logs()) from error

  with net('first') as flower:
    start(flower)
    reach(flower, 1)
  # All is gone, and begins anew with TLS. Then a client dies.
  shutil.copytree(alone / 'app', app / 'app', dirs_exist_ok=True)
  certificates = flower_net.make_certificates(tmp_path / 'certificates')
  with net('second', certificates) as flower:
    start(flower)
    reach(flower, 2)
    flower.kill('node1')
    reach(flower, 3)
  rows = csv_table.read(str(saved.parent / 'metrics' / 'train.csv'))[1]
  counts = [int(row['client_work/train/num_clients']) for row in rows]
  assert counts == [2, 2, 1]
  # The same clients, without Flower.
  paths = [str(repository), str(_ALONE.parent)]
  subprocess.run(
    [sys.executable, str(_ALONE), str(alone), str(data), 'die'],
    env={
      **os.environ,
      'PYTHONPATH': os.pathsep.join(paths),
      'THREADS': '1',
    },
    check=True,
  )
  ours, theirs = _leaves(app, 3), _leaves(alone, 3)
  assert ours.keys() == theirs.keys()
  for name, value in theirs.items():
    assert np.asarray(ours[name]).tobytes() == np.asarray(value).tobytes()
