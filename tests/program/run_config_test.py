import pytest

from tff_fssl.data import clients
from tff_fssl.hparams import UsageError
from tff_fssl.program import config

_CLIENTS = '--scenario=labels_at_clients'


def _config(*argv):
  return config.parse_config(argv)


def test_streaming_is_where_clients_use_unlabelled_examples():
  flags_ = ['--streaming_steps=5', '--streaming_rounds=3']
  assert _config(*flags_).streaming == clients.Streaming(5, 3, False, 0)
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
