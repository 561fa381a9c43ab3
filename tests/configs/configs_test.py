"""Every flagfile, and every row of a paper's table, run on tiny data.

The data have the shape and the classes of the published sets, few examples and
random pixels. What files and rows say of labels, split, algorithm and round is
run as it is; runs that ask for the same learning process share it.
"""

import csv
import pathlib
import re

import numpy as np
import picture_folders
import pytest
import tiny_tfds
import tiny_vectors

from tff_fssl import hparams
from tff_fssl import runtime
from tff_fssl.data import names as data_names
from tff_fssl.program import config as config_lib
from tff_fssl.program import experiment
from tff_fssl.program import flags
from tff_fssl.program import main
from tff_fssl.program import output_tree
from tff_fssl.program import papers_main
from tff_fssl.program import train_main
from tff_fssl.rounds import process as process_lib

_FOLDER = pathlib.Path(__file__).resolve().parents[2] / 'configs'
# Those of texts have other data: `text_test.py`.
_FILES = {
  path.stem: path
  for path in sorted(_FOLDER.rglob('*.flags'))
  if path.parent.name != 'text'
}
_TINY = {
  # Others need as many images as there are in the real sets.
  'split_preset': 'official',
  'num_clients': 4,
  'clients_per_round': 2,
  'client_epochs': 1,
  'server_epochs': 1,
  'num_pretraining_rounds': 1,
  'total_rounds': 2,
  'rounds_per_evaluation': 2,
  'progress': 'none',
  'tensorboard': False,
  # The other one would compile the same things at the same time.
  'client_threads': 1,
}
_TFDS = {
  'cifar10': {'train': 200, 'test': 20},
  'cifar100': {'train': 180, 'test': 20},
  'svhn_cropped': {'train': 200, 'test': 20},
  'fashion_mnist': {'train': 200, 'test': 20},
  'stl10': {'train': 180, 'test': 20, 'unlabelled': 40},
}
# What decides who holds which examples, but not the server's labelled ones;
# the learning process does not know it.
_CLIENTS_DATA = {
  'alpha',
  'class_draws',
  'client_label_classes',
  'min_client_examples',
  'num_unlabeled',
  'num_validation',
  'output_dir',
  'partition',
  'rounds_per_evaluation',
}
_ROWS = [row for row in papers_main.rows().values() if not row.why]


def _config(name, **overrides) -> config_lib.Config:
  """The configuration of a flagfile, or of a row."""
  if name not in _FILES:
    return papers_main.find(name).config(overrides)
  given = [f'--{k}={hparams.format_value(v)}' for k, v in overrides.items()]
  return config_lib.parse_config([f'--flagfile={_FILES[name]}', *given])


def _arguments(name, overrides):
  """The arguments of the training program."""
  if name not in _FILES:
    return papers_main.find(name).arguments(overrides)
  given = [f'--{k}={hparams.format_value(v)}' for k, v in overrides.items()]
  return [f'--flagfile={_FILES[name]}', *given]


def _says(name):
  """The flags of a flagfile or a row, as text."""
  if name in _FILES:
    return flags.read_flagfile(str(_FILES[name]))
  return {
    n: hparams.format_value(v) for n, v in papers_main.find(name).flags.items()
  }


def _overrides(name, **more):
  """Flags that make a file or a row fit to the tiny data."""
  config = _config(name, **more)
  known = config.flags()
  result = {
    **{flag: value for flag, value in _TINY.items() if flag in known},
    'num_labels': config.info.num_classes
    * getattr(config.algorithm, 'least_labels', 1),
    'num_validation': min(config.run.num_validation, 20),
    'num_unlabeled': min(config.run.num_unlabeled, 40),
    **more,
  }
  if hasattr(config.algorithm, 'confidence_threshold'):
    # Nothing is confident about noise: no step would be taken.
    result[f'{config.prefix}confidence_threshold'] = 0.0
  if hasattr(config.algorithm, 'ramp_rounds'):
    # The only step of round 1 would have weight 0.
    result[f'{config.prefix}ramp_rounds'] = 0
  if hasattr(config.algorithm, 'warmup_rounds'):
    # From round 1 on, all examples are kept.
    result[f'{config.prefix}warmup_rounds'] = 0
    result[f'{config.prefix}threshold_cap'] = 0.0
  return result


def _process_key(config):
  """Configurations of one key have the same learning process."""
  values = config.flags()
  return tuple((k, values[k]) for k in sorted(values.keys() - _CLIENTS_DATA))


def _kind(name):
  """What a file trains."""
  return _config(name).run.algorithm


def _network(row):
  """What the network of a row is built of."""
  return tuple(
    row.flags.get(name, '')
    for name in ('algorithm', 'model', 'norm', 'dataset')
  )


def _small(row):
  """The small network, where a row is of images."""
  is_image = not str(row.flags['dataset']).startswith(data_names.FEATURES)
  return {'model': 'cnn'} if is_image else {}


# A file of two sets of weights, and the first row with each network. (What each
# algorithm does, conformance tests.)
_QUICK_KINDS = ('fedmatch',)
_OF_EACH_KIND = {_kind(name): name for name in reversed(_FILES)}
_QUICK = [_OF_EACH_KIND[kind] for kind in _QUICK_KINDS]
_OF_EACH_NETWORK = {_network(r): r.name for r in reversed(_ROWS)}.values()


@pytest.fixture(scope='module')
def data_dir(tmp_path_factory):
  folder = tmp_path_factory.mktemp('tfds')
  for name, counts in _TFDS.items():
    known = name in data_names.DATA_SETS
    more = {} if known else {'num_classes': 10, 'shape': (96, 96, 3)}
    tiny_tfds.write(folder, name, counts, **more)
  of_class = dict.fromkeys(('covid', 'normal', 'viral'), 80)
  picture_folders.class_folders(folder / 'covid19', of_class)
  tiny_vectors.write(folder / 'ag_news_bert.npz', num_classes=4, num=1_000)
  return str(folder)


@pytest.fixture(scope='module')
def shared_processes():
  """A learning process, and what it compiles to, for tests one after another.

  Only the last one is kept: all of them would take tens of gigabytes.
  """
  processes, context = {}, runtime.build_async_context()
  build_experiment = experiment.build_experiment
  build = process_lib.build_process

  def build_shared(task, server_data_dir):
    held = task.partition.server_labeled
    key = _process_key(task.config), held.tobytes()

    def cached(*args, **kwargs):
      if key not in processes:
        processes.clear()
        processes[key] = build(*args, **kwargs)
      return processes[key]

    with pytest.MonkeyPatch.context() as patch:
      patch.setattr(process_lib, 'build_process', cached)
      return build_experiment(task, server_data_dir)

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(experiment, 'build_experiment', build_shared)
    patch.setattr(runtime, 'build_async_context', lambda *_, **__: context)
    yield


def _check_run(name, folder, data_dir, capsys, **overrides):
  """Runs a file and looks at what came out."""
  overrides = _overrides(
    name, data_dir=data_dir, output_dir=folder, **overrides
  )
  config = _config(name, **overrides)
  code = main.run(train_main.train_main, _arguments(name, overrides))
  assert code == 0, (name, capsys.readouterr().err)
  tree = output_tree.OutputTree(folder)
  # What was run is what the file or the row says.
  recorded = flags.read_flagfile(tree.flags_file)
  for flag, value in _says(name).items():
    if flag in config.flags() and flag not in overrides:
      assert recorded[flag] == value, name
  with open(tree.train_csv) as file:
    rows = list(csv.DictReader(file))
  at_clients = config.round.labels_at_clients
  rounds = ['1', '2'] if at_clients else ['0', '1', '2']
  assert [row['round'] for row in rows] == rounds
  losses = {
    'uda': 'loss_soft_pseudo_label',
    'mixmatch': 'loss_guess',
    'protofssl': 'loss_prototype_label',
    'fedcon': 'loss_similarity',
    'supervised': 'loss_labeled',
    'sage': 'loss_corrected_label',
  }
  loss = losses.get(
    config.run.algorithm.removeprefix('local_'), 'loss_pseudo_label'
  )
  for row in rows:
    assert row['bad_round'] == '0'
    if not at_clients:
      assert np.isfinite(float(row['finalizer/server_loss_labeled']))
  learns = config.run.algorithm.removeprefix('local_')
  if config.trains_clients and learns != 'supervised':
    # In ProtoFSSL's first rounds there are no prototypes to label with.
    num_without = 0
    if config.run.algorithm == 'protofssl':
      num_without = config.algorithm.helper_interval
    for row in rows[-2:][num_without:]:
      assert row['client_work/train/num_clients'] == '2'
      # These have no pseudo-labels.
      if config.run.algorithm not in ('fedcon', 'supervised'):
        assert 0 < float(row['client_work/train/pseudo_label_ratio']) <= 1
      assert np.isfinite(float(row[f'client_work/train/{loss}']))
      assert config.trains_alone or float(row['finalizer/update_norm']) > 0
      if config.run.algorithm == 'fl2':
        column = {
          'sacr': 'client_work/train/loss_consistency',
          'sam': 'client_work/train/loss_perturbed',
        }.get(config.algorithm.consistency)
        for name in ('loss_consistency', 'loss_perturbed'):
          assert (f'client_work/train/{name}' in row) == (
            column == f'client_work/train/{name}'
          )
        assert column is None or float(row[column]) > 0
  with open(tree.eval_csv) as file:
    (row,) = [row for row in csv.DictReader(file) if row['round'] == '2']
  assert 0 <= float(row['test/accuracy']) <= 1
  assert ('validation/accuracy' in row) == bool(config.run.num_validation)


@pytest.mark.slow
@pytest.mark.parametrize(
  'name',
  [
    pytest.param(n, marks=[] if n in _QUICK else pytest.mark.slow)
    for n in _FILES
  ],
)
def test_every_file_runs(name, data_dir, shared_processes, tmp_path, capsys):
  _check_run(name, str(tmp_path / 'run'), data_dir, capsys, model='cnn')


@pytest.mark.slow
@pytest.mark.parametrize('table', dict.fromkeys(row.table for row in _ROWS))
def test_every_row_runs(table, data_dir, shared_processes, tmp_path, capsys):
  configs = {
    row.name: _config(
      row.name, **_overrides(row.name, data_dir=data_dir, **_small(row))
    )
    for row in _ROWS
    if row.table == table
  }
  # Some rows do not differ on the tiny data.
  distinct = {
    str({**config.flags(), 'output_dir': ''}): name
    for name, config in configs.items()
  }
  names = sorted(distinct.values(), key=lambda n: str(_process_key(configs[n])))
  for name in names:
    more = _small(papers_main.find(name))
    _check_run(name, str(tmp_path / name), data_dir, capsys, **more)


@pytest.mark.slow
@pytest.mark.parametrize('name', _OF_EACH_NETWORK)
def test_every_network_runs(name, data_dir, tmp_path, capsys):
  _check_run(name, str(tmp_path / 'run'), data_dir, capsys)


@pytest.mark.parametrize('name', _FILES)
def test_headers(name):
  lines = _FILES[name].read_text().splitlines()
  header = [line for line in lines if line.startswith('#')]
  assert lines[: len(header)] == header
  path = _FILES[name].relative_to(_FOLDER.parent)
  assert header.pop() == f'# python programs/train.py --flagfile={path}'
  assert max(map(len, header)) <= 80
  about, paper, figures = ' '.join(line[2:] for line in header).partition(
    ' Paper: '
  )
  assert paper and ' Ours: ' in figures
  # It speaks of what is run.
  config = _config(name)
  run = config.run
  titles = {'cifar10': 'CIFAR-10', 'svhn_cropped': 'SVHN'}
  title = titles.get(run.dataset, run.dataset)
  assert re.search(rf'\b{title}\b', about)
  assert run.full_labels or f' {run.num_labels} labels' in about
  dirichlet = run.partition == 'dirichlet'
  assert ('Dir(' in about) == dirichlet
