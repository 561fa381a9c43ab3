import dataclasses

import pytest

from tff_fssl.algorithms import registry
from tff_fssl.data import streaming
from tff_fssl.hparams import UsageError
from tff_fssl.hparams import hparam
from tff_fssl.program.configuration import config
from tff_fssl.program.configuration import config as config_lib
from tff_fssl.program.configuration import run_config

_CLIENTS = '--scenario=labels_at_clients'


def _config(*argv):
  return config.parse_config(argv)


def test_streaming_is_where_clients_use_unlabelled_examples():
  flags_ = ['--streaming_steps=5', '--streaming_rounds=3']
  assert _config(*flags_).streaming == streaming.Streaming(5, 3, False, 0)
  assert _config().streaming.steps == 1
  supervised = ['--algorithm=supervised', _CLIENTS]
  # For the statistics of static batch norm: not of parts that are to come.
  assert _config(*flags_, *supervised).streaming.steps == 5
  for argv, reason in (
    (['--algorithm=supervised'], '--algorithm=supervised'),
    ([*supervised, '--norm=gn'], '--norm=gn'),
    ([*supervised, '--norm=bn'], '--norm=bn'),
    (['--algorithm=uda', _CLIENTS, '--full_labels'], '--full_labels=true'),
  ):
    with pytest.raises(UsageError, match=f'--streaming_.*{reason}'):
      _config(*flags_, *argv)


def test_norm_decides_the_statistics():
  assert _config('--norm=bn').round.batch_norm_statistics == 'moving_average'
  assert _config('--norm=bn').model_norm == 'bn'
  assert _config('--norm=sbn').model_norm == 'bn'
  assert _config('--norm=gn').model_norm == 'gn'
  assert 'batch_norm_statistics' not in _config('--norm=gn').flags()


@dataclasses.dataclass(frozen=True)
class _Hparams:
  kind: str = hparam('a', 'Which.', choices=('a', 'b'))
  rate: float = hparam(0.5, 'How fast.', when=lambda own: own.is_b)
  depth: int = hparam(3, 'How deep.', when=lambda own: own.is_b and own.rate)
  width: int = hparam(3, 'How wide.', when=lambda own: own.is_over(0.7))

  @property
  def is_b(self):
    return self.kind == 'b'

  def is_over(self, least):
    return self.rate > least


@pytest.mark.parametrize(
  'given, expected',
  [
    ({'kind': 'b', 'rate': 0.8}, {}),
    ({'rate': 0.8}, {'x.rate': '--x.kind=a', 'x.depth': '--x.kind=a'}),
    (
      {'kind': 'b', 'rate': 0.0},
      {'x.depth': '--x.rate=0.0', 'x.width': '--x.rate=0.0'},
    ),
  ],
)
def test_the_flag_that_is_read_last_is_the_reason(given, expected):
  assert run_config.find_idle(_Hparams(**given), 'x.') == expected


def test_predicates_read_the_whole_configuration():
  given = ['--algorithm=supervised', '--num_labels=40', '--dataset=digits']
  config = config_lib.parse_config(given)
  found = config.idle()
  assert found['overselect'] == found['aggregator'] == '--algorithm=supervised'
  assert found['image_size'] == '--dataset=digits'
  own = config_lib.parse_config([*given[1:], '--algorithm=fl2']).idle()
  flag = '--fl2.learning_status_aggregation=true'
  assert own['client_weighting'] == flag
  assert own['overselect'] == '--straggler_probability=0.0'
  assert 'image_size' in own and 'aggregator' not in own


@pytest.mark.parametrize('algorithm', registry.REGISTRY)
def test_predicates_of_all_flags_can_be_evaluated(algorithm):
  entry = registry.REGISTRY[algorithm]
  scenario = entry.scenarios[-1]
  config = config_lib.parse_config(
    [
      f'--algorithm={algorithm}',
      f'--scenario={scenario}',
      '--num_labels=50',
      '--num_clients=10',
    ]
  )
  idle_flags = config.idle()
  assert not idle_flags.keys() & config.flags().keys()
  assert all(why.startswith('--') for why in idle_flags.values())


@dataclasses.dataclass(frozen=True)
class _Wrong:
  depth: int = hparam(3, 'How deep.', when=lambda own: own.general)


def test_reading_what_is_no_flag_is_an_error_of_the_author():
  with pytest.raises(AttributeError, match="_Wrong: .* 'general', which is no"):
    run_config.find_idle(_Wrong())
