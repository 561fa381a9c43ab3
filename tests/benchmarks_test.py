"""Every benchmark runs, for all that it accepts: briefly, and slowly."""

import importlib
import json
import subprocess
import sys

import pytest

from tff_fssl.algorithms import registry
from tff_fssl.data import names as data_names
from tff_fssl.models import names as model_names

pytestmark = pytest.mark.slow
_TRAINED = [
  (name, scenario)
  for name, entry in registry.REGISTRY.items()
  for scenario in entry.trains_clients
]


@pytest.fixture(name='local_step')
def _local_step(repository, monkeypatch):
  """The module, in this process: most of its time is TensorFlow's import."""
  for folder in ('tools', 'benchmarks'):
    monkeypatch.syspath_prepend(repository / folder)
  return importlib.import_module('local_step')


def _measure(local_step, capsys, *argv):
  local_step.main(
    [*argv, '--model=cnn', '--batch_size=2', '--steps=1', '--repetitions=1']
  )
  printed = capsys.readouterr().out
  assert 'bare / complete' in printed
  return printed


@pytest.mark.parametrize('name, scenario', _TRAINED)
def test_the_local_step_of_each_algorithm(local_step, capsys, name, scenario):
  printed = _measure(
    local_step, capsys, f'--algorithm={name}', f'--scenario={scenario}'
  )
  assert ('unlabelled example' in printed) == ('supervised' not in name)
  is_labeled = scenario == 'labels_at_clients'
  assert ('  labelled example' in printed) == is_labeled


def test_the_local_step_in_bfloat16(local_step, capsys):
  assert 'bfloat16' in _measure(local_step, capsys, '--bfloat16')


@pytest.mark.parametrize('name, scenario', [('supervised', 'labels_at_server')])
def test_the_local_step_where_clients_do_not_train(
  local_step, capsys, name, scenario
):
  with pytest.raises(SystemExit) as ended:
    _measure(
      local_step, capsys, f'--algorithm={name}', f'--scenario={scenario}'
    )
  assert ended.value.code == 2
  assert 'do not train' in capsys.readouterr().err


def test_networks_of_images_only(local_step, capsys):
  """Of the others, nothing here could make inputs."""
  others = [
    name
    for name, info in model_names.MODELS.items()
    if data_names.IMAGES not in info.inputs
  ]
  assert others
  for name in others:
    with pytest.raises(SystemExit):
      local_step.main([f'--model={name}'])
    assert 'invalid choice' in capsys.readouterr().err


def _run(repository, name, *argv):
  """What a benchmark prints, in a process of its own."""
  done = subprocess.run(
    [sys.executable, str(repository / 'benchmarks' / f'{name}.py'), *argv],
    capture_output=True,
    text=True,
    check=False,
  )
  assert done.returncode == 0, done.stderr[-2000:]
  return done.stdout


def test_a_round(repository):
  printed = _run(
    repository,
    'round',
    '--num_clients=2',
    '--num_images=32',
    '--repetitions=1',
    '--worker',
  )
  assert 'tff_worker / bare parts' in printed


def test_peers(repository):
  """But for pfl, which would be installed."""
  printed = _run(
    repository, 'peers', '--rounds=1', '--peers=bare,ours,tff_worker'
  )
  assert 'ours / bare' in printed


@pytest.mark.parametrize(
  'what, size', [('cohort', 10), ('population', 100), ('uploads', 2)]
)
def test_scale(repository, tmp_path, what, size):
  found = tmp_path / 'found.json'
  _run(repository, 'scale', '--measure', what, str(size), str(found))
  assert all(value >= 0 for value in json.loads(found.read_text()).values())


def test_scale_of_owners(repository, tmp_path, monkeypatch):
  monkeypatch.syspath_prepend(repository / 'benchmarks')
  importlib.import_module('scale').write_owners(str(tmp_path), 1_000)
  monkeypatch.setenv('TFF_FSSL_SCALE_FOLDER', str(tmp_path))
  found = tmp_path / 'found.json'
  _run(repository, 'scale', '--measure', 'natural', '1000', str(found))
  assert json.loads(found.read_text())['in all'] > 0


def test_ray(repository):
  pytest.importorskip('ray')
  printed = _run(
    repository,
    'ray_runtime',
    '--sections=driver',
    '--sleeping_workers=1',
    '--sleep=0.01',
  )
  assert 'clients a second' in printed


@pytest.mark.parametrize(
  'name', ['semifl', 'fedswitch', 'protofssl', 'fedmatch']
)
def test_lies(repository, name):
  """Of clients that send weights of their own, reports, rows, several sets."""
  table = subprocess.run(
    [
      *(sys.executable, 'benchmarks/lies.py', f'--algorithms={name}'),
      *('--total_rounds=1', '--aggregators=robust'),
    ],
    check=True,
    cwd=repository,
    stdout=subprocess.PIPE,
    text=True,
  ).stdout
  header, _, row = table.splitlines()[-3:]
  cells = dict(zip(header.split('|'), row.split('|'), strict=True))
  lies = [lie for lie, cell in cells.items() if cell.strip()]
  assert len(lies) >= 12
  rejected = [lie.strip() for lie in lies if 'rejected' in cells[lie]]
  assert 'constant' in rejected and 'flip' not in rejected
