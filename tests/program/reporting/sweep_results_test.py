from matplotlib import image
import numpy as np
import optuna

from tff_fssl.program.configuration import config as config_lib
from tff_fssl.program.configuration import flags
from tff_fssl.program.configuration import sweeps
from tff_fssl.program.reporting import sweep_results
from tff_fssl.program.storage import trials

_RECORDS = [
  trials.Record(0, {'momentum': 0.1}, 'complete', {0: 0.5, 1: 0.6}),
  trials.Record(1, {'momentum': 0.2}, 'failed', {}, 'why'),
  trials.Record(2, {'momentum': 0.3}, 'pruned', {0: 0.9}, 'in round 3'),
  trials.Record(3, {'momentum': 0.4}, 'complete', {0: 0.6, 1: 0.6}),
  trials.Record(4, {}, 'open', {}),
  trials.Record(5, {'momentum': 0.5}, 'complete', {0: 0.6, 1: 0.6}),
]


def _sweep(*grid, argv=()):
  groups = [flags.Group(sweeps.SearchHparams), *config_lib.groups()]
  base = ['--dataset=digits', '--num_validation=100', '--num_clients=20']
  parsed = flags.parse([*base, '--seeds=0,1', *argv], groups)
  return sweeps.build(parsed, '', grid)


def test_the_best_complete_trial_wins():
  assert [r.number for r in sweep_results.ranked(_RECORDS)] == [
    3,
    5,
    0,
    2,
    1,
    4,
  ]
  assert sweep_results.winner(_RECORDS).number == 3
  assert sweep_results.winner(_RECORDS[1:3]) is None


def test_the_table_is_in_columns():
  assert sweep_results.table(_RECORDS, ['momentum']).splitlines() == [
    'trial  momentum  validation, %  state',
    '3      0.4       60.0 ± 0.0     complete',
    '5      0.5       60.0 ± 0.0     complete',
    '0      0.1       55.0 ± 7.1     complete',
    '2      0.3       90.0           pruned',
    '1      0.2       -              failed',
    '4                -              open',
  ]


def test_long_names_are_broken_and_too_many_left_out():
  names = ['server_optimizer_learning_rate', 'a_name.of_a_flag', *'bcdefghij']
  values = dict.fromkeys(names, 0.123456)
  text = sweep_results.table(
    [trials.Record(0, values, 'complete', {0: 0.5})], names
  )
  lines = text.splitlines()
  assert all(len(line) <= 80 for line in lines)
  assert [line[7:16].strip() for line in lines[:4]] == [
    'server_',
    'optimizer',
    '_'.join(['learning', '']),
    'rate',
  ]
  assert '0.1235' in lines[4]
  assert lines[5].startswith('(without ') and 'j' in lines[5]


def test_the_base_is_among_the_trials_or_not():
  sweep = _sweep('momentum=0.1,0.4', argv=['--momentum=0.4'])
  assert sweep_results.base(_RECORDS, sweep).number == 3
  sweep = _sweep('momentum=0.1,0.4')
  assert sweep_results.base(_RECORDS, sweep) is None


def test_the_picture(tmp_path):
  path, pictures = str(tmp_path / 'a.png'), []
  study = optuna.create_study(direction='maximize')
  allowed = {
    'momentum': optuna.distributions.FloatDistribution(0, 1),
    'norm': optuna.distributions.CategoricalDistribution(['gn', 'none']),
  }
  for momentum, norm, accuracy in ((0.1, 'gn', 0.5), (0.5, 'none', 0.7)):
    values = {'momentum': momentum, 'norm': norm}
    study.add_trial(
      optuna.trial.create_trial(
        params=values, distributions=allowed, value=accuracy
      )
    )
    sweep_results.draw(path, study, 2)
    pictures.append(image.imread(path))
  assert all(p.shape[1] > 500 and p.std() > 0 for p in pictures)
  # One more line is one more line in the picture.
  assert not np.array_equal(*pictures)
