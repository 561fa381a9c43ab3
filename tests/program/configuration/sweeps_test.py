import numpy as np
import pytest

from tff_fssl.data import partition_draw
from tff_fssl.data import partition_settings
from tff_fssl.hparams import UsageError
from tff_fssl.program.configuration import config as config_lib
from tff_fssl.program.configuration import flags
from tff_fssl.program.configuration import sweeps

_BASE = ('--dataset=digits', '--num_validation=100', '--num_clients=20')


def _build(*grid, text='', argv=(), tmp_path=None):
  """The sweep of --grid flags, or of the text of a sweep file."""
  groups = [flags.Group(sweeps.SearchHparams), *config_lib.groups()]
  path = ''
  if text:
    path = str(tmp_path / 'sweep.toml')
    (tmp_path / 'sweep.toml').write_text(text)
  parsed = flags.parse([*_BASE, *argv], groups)
  return sweeps.build(parsed, path, grid)


def test_a_grid():
  sweep = _build(
    'client_learning_rate=0.01,0.1',
    'client_epochs=1,2,5',
    argv=['--seeds=3,1', '--momentum=0.5'],
  )
  assert (sweep.num_trials, sweep.seeds) == (6, (3, 1))
  assert sweep.grid()[:2] == [
    {'client_learning_rate': 0.01, 'client_epochs': 1},
    {'client_learning_rate': 0.01, 'client_epochs': 2},
  ]
  values = {**sweep.grid()[4], 'seed': 1, 'output_dir': 'x'}
  assert sweep.config_of(values).round.client_learning_rate == 0.1
  # What was given, and nothing else.
  assert set(sweep.arguments(values)) == {
    *_BASE,
    '--momentum=0.5',
    '--client_learning_rate=0.1',
    '--client_epochs=2',
    '--seed=1',
    '--output_dir=x',
  }
  assert sweep.folder.endswith('_sweep')
  assert _build('alpha=1,2', argv=['--partition=dirichlet', '--output_dir=y'])
  typed = _build('client_learning_rate=1,2', argv=['--output_dir=y'])
  assert typed.folder == 'y'


def test_a_file(tmp_path):
  text = """
sampler = "tpe"
trials = 7
seeds = [0, 2]
pruning = "median"
pruning_trials = 2
[flags]
client_learning_rate = {low = 0.01, high = 1, log = true}
client_epochs = {low = 1, high = 5, step = 2}
norm = ["gn", "none"]
fl2.rho = [0.1, 0.2]
"""
  sweep = _build(text=text, argv=['--algorithm=fl2'], tmp_path=tmp_path)
  assert [(s.name, s.text) for s in sweep.spaces] == [
    ('client_learning_rate', '0.01 to 1.0 (log)'),
    ('client_epochs', '1 to 5 (step 2)'),
    ('norm', 'gn, none'),
    ('fl2.rho', '0.1, 0.2'),
  ]
  assert sweep.search == sweeps.SearchHparams(
    'tpe', 7, 0, '0,2', 'median', 2, 0
  )
  # The command line comes first.
  again = _build(
    'norm=gn',
    text=text,
    argv=['--algorithm=fl2', '--trials=9', '--sampler=random'],
    tmp_path=tmp_path,
  )
  assert (again.num_trials, again.search.sampler) == (9, 'random')
  assert again.spaces[2].choices == ('gn',)


def test_steps_are_a_grid(tmp_path):
  text = '[flags]\nmomentum = {low = 0.1, high = 0.5, step = 0.1}'
  sweep = _build(text=text, tmp_path=tmp_path)
  assert sweep.spaces[0].choices == (0.1, 0.2, 0.3, 0.4, 0.5)


def test_the_definition_is_what_results_depend_on():
  def definition(*grid, argv=()):
    return _build(*(grid or ['momentum=0,0.5']), argv=argv).definition()

  first = definition()
  assert 'momentum' not in first['flags'] and 'seed' not in first['flags']
  same = ['--output_dir=z', '--client_threads=3', '--momentum=0.7']
  assert definition(argv=same) == first
  for argv in ('--seeds=1', '--num_labels=20', '--total_rounds=900'):
    assert definition(argv=[argv]) != first
  assert definition('momentum=0,0.6') != first


@pytest.mark.parametrize(
  'grid, argv, words',
  [
    ((), (), 'no flag to vary was given'),
    (
      ('client_learning_rte=1',),
      (),
      "client_learning_rte; did you mean 'client_learning_rate'",
    ),
    (('client_learning_rate',), (), 'must be FLAG=VALUE,VALUE'),
    (('client_learning_rate=',), (), 'must be FLAG=VALUE,VALUE'),
    (('client_learning_rate=0.1,x',), (), 'must be a number'),
    (('client_learning_rate=0.1,0.10',), (), '0.1 is given twice'),
    (('client_learning_rate=0.1,-1',), (), '--client_learning_rate=-1'),
    (('norm=gn,xx',), (), '--norm=xx: allowed are'),
    (('fedmatch.helpers=now,past',), (), '--algorithm=fedmatch'),
    (('alpha=1,2',), (), '--alpha: has no effect with --partition=iid'),
    (('clients_per_round=5,30',), (), 'must be at most --num_clients=20'),
    (('seed=1,2',), (), '--seed cannot vary'),
    (('num_validation=100,200',), (), '--num_validation cannot vary'),
    (('dataset=digits,mnist',), (), '--dataset cannot vary'),
    (('split_preset=official,fedmatch',), (), '--split_preset cannot vary'),
    (('client_threads=1,2',), (), 'does not change results'),
    (('momentum=0',), ('--num_validation=0',), 'selects by validation'),
    (('momentum=0', 'momentum=0.5'), (), '--grid=momentum: is given twice'),
    (('momentum=0',), ('--seed=1',), 'has no effect with --seeds'),
    (('momentum=0',), ('--seeds=0,0',), 'a seed is given twice'),
    (('momentum=0',), ('--seeds=0,a',), 'must be whole numbers'),
    (('momentum=0',), ('--seeds=0,4294967296',), '--seed=4294967296: must'),
    (('momentum=0',), ('--trials=3',), 'no effect with --sampler=grid'),
    (('momentum=0',), ('--pruning_trials=3',), 'no effect with --pruning=none'),
  ],
)
def test_mistakes(grid, argv, words):
  with pytest.raises(UsageError) as error:
    _build(*grid, argv=argv)
  assert words in str(error.value) and '\n' not in str(error.value)


@pytest.mark.parametrize(
  'text, words',
  [
    ('x = [', 'it is not TOML'),
    ('trails = 3', "'trails' is not a key of a sweep file"),
    ('sampler = "gird"', "did you mean 'grid'"),
    ('flags = 3', 'flags must be a table'),
    ('trials = 3', 'sweep.toml): has no effect with --sampler=grid'),
    ('[flags]\nmomentum = 0.5', 'must be a list of values, or a range'),
    ('[flags]\nmomentum = []', 'the list is empty'),
    ('[flags]\nmomentum = {low = 0, high = 1}', 'tries every value'),
    ('[flags]\nmomentum = {low = 0, hihg = 1}', 'or a range'),
    ('[flags]\nmomentum = {low = 0, high = 1, by = 2}', "'by' is not a key"),
    ('[flags]\nmomentum = {low = 1, high = 0}', 'low must be less than high'),
    ('[flags]\nmomentum = {low = 0, high = 1, log = true}', 'must be above 0'),
    ('[flags]\nmomentum = {low = 0, high = 1, step = 2}', 'at most high - low'),
    (
      '[flags]\nmomentum = {low = 0.0, high = 1.0, step = 1e-320}',
      'momentum: 0.0 to 1.0 (step 1e-320) are more than',
    ),
    ('[flags]\nnorm = {low = "a", high = "b"}', 'only flags that are numbers'),
    ('[flags]\nfl2.rho = [0.1, 0.2]', '--algorithm=fl2'),
    (
      'sampler="tpe"\n[flags]\nmomentum = {low = 0.1, high = 2}',
      '--momentum=2',
    ),
  ],
)
def test_mistakes_in_a_file(text, words, tmp_path):
  text = text if 'flags' in text else f'{text}\n[flags]\nmomentum = [0.5]'
  argv = ['--algorithm=supervised', '--scenario=labels_at_clients']
  argv += ['--num_labels=10']
  with pytest.raises(UsageError) as error:
    _build(text=text, argv=argv, tmp_path=tmp_path)
  assert words in str(error.value) and '\n' not in str(error.value)


def test_a_grid_may_be_too_large():
  numbers = ','.join(map(str, range(1, 102)))
  with pytest.raises(UsageError, match='10,201 combinations'):
    _build(f'client_epochs={numbers}', f'server_epochs={numbers}')


def test_another_partition_file_is_another_sweep(tmp_path):
  definitions = []
  for seed in (0, 0, 1):
    path = tmp_path / f'{len(definitions)}.json'
    drawn = partition_draw.build_partition(
      np.arange(1437) % 10,
      partition_settings.PartitionSettings(
        num_classes=10,
        num_labels=40,
        num_clients=20,
        num_validation=100,
        seed=seed,
      ),
    )
    path.write_text(drawn.dump_json())
    sweep = _build('momentum=0', argv=(f'--partition_file={path}',))
    definitions.append(sweep.definition())
  assert definitions[0] == definitions[1] != definitions[2]
