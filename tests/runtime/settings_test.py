import pytest

from tff_fssl.hparams import UsageError
from tff_fssl.runtime import settings


@pytest.mark.parametrize(
  'values, words',
  [
    ({'runtime': 'rai'}, 'allowed are in_process, tff_worker, ray; did you'),
    ({'default_num_clients': -1}, 'default_num_clients=-1: must be at least 0'),
    ({'clients_per_group': -1}, '--clients_per_group=-1: must be at least 0'),
    ({'clients_per_gpu': 0}, '--clients_per_gpu=0: must be at least 1'),
    (
      {'runtime': 'ray', 'call_timeout_secs': float('inf')},
      '--call_timeout_secs=inf: must be at least 0',
    ),
    ({'call_timeout_secs': 1.0}, 'no calls with --runtime=in_process'),
    (
      {'runtime': 'tff_worker', 'client_devices': 'gpu'},
      'allowed are auto and cpu',
    ),
    (
      {'runtime': 'tff_worker', 'intra_op_threads': 2},
      '--clients_per_group, --intra_op_threads: not known',
    ),
    (
      {'runtime': 'tff_worker', 'client_threads': -1},
      '--client_threads=-1: must be at least 0',
    ),
    ({'runtime': 'ray', 'client_devices': 'gpu:0'}, 'allowed are auto, cpu'),
  ],
)
def test_wrong_values_are_refused_in_one_line(values, words):
  with pytest.raises(UsageError) as error:
    settings.Settings(**values)
  assert words in str(error.value) and '\n' not in str(error.value)


@pytest.mark.parametrize('runtime', settings.RUNTIMES)
def test_defaults_fit_each_runtime(runtime):
  assert settings.Settings(runtime).runtime == runtime
