import pytest

from tff_fssl.data import clients
from tff_fssl.hparams import UsageError
from tff_fssl.program import config

_CLIENTS = '--scenario=labels_at_clients'


_PRIVATE = (
  '--algorithm=fixmatch',
  '--aggregator=dp',
  '--max_client_examples=60000',
)


def _config(*argv):
  return config.parse_config(argv)


@pytest.mark.parametrize(
  'argv, words',
  [
    (['--algorithm=fl3'], ['--algorithm=fl3', "did you mean 'fl2'?"]),
    (['--dataset=cifar11'], ['--dataset=cifar11', 'cifar10']),
    (['--fixmatch.unlabeled_loss_weight=2'], ['--algorithm=fl2 is selected']),
    (['--fl2.rho=-1'], ['--fl2.rho=-1', 'at least 0']),
    (['--num_labels=45'], ['--num_labels=45', 'multiple', '40 or 50']),
    (['--num_labels=60000'], ['--num_labels=60000', '50000']),
    (
      ['--clients_per_round=20', '--num_clients=10'],
      ['--clients_per_round=20', '--num_clients=10'],
    ),
    (
      [_CLIENTS, '--algorithm=semifl'],
      ['--scenario=labels_at_clients', 'semifl', 'fixmatch'],
    ),
    (
      ['--norm=bn', '--batch_norm_statistics=pooled'],
      ['--batch_norm_statistics=pooled', '--norm=bn'],
    ),
    (['--batch_norm_statistics=moving_average'], ['moving_average']),
    (['--num_clients=0'], ['--num_clients=0', 'at least 1']),
    (['--equal_sizes'], ['--equal_sizes', 'no effect', '--partition=iid']),
    (
      ['--partition=dirichlet', '--equal_sizes', '--min_client_examples=3'],
      ['--min_client_examples', 'no effect', '--equal_sizes=true'],
    ),
    (
      ['--partition=dirichlet', '--class_draws=exact'],
      ['--class_draws', 'no effect', '--partition=dirichlet'],
    ),
    (
      ['--partition=fedmatch', '--dataset=cifar100', '--num_labels=100'],
      ['--partition=fedmatch', 'of 10 classes, but the data have 100'],
    ),
    (
      [
        *('--partition=natural', '--algorithm=uda', _CLIENTS),
        '--client_labels=balanced',
      ],
      ['--client_labels=balanced', '--partition=natural', 'own'],
    ),
    (
      ['--partition=natural', *_PRIVATE, '--norm=gn'],
      ['--aggregator=dp', '--num_clients'],
    ),
    (
      ['--overselect=0.3'],
      ['--overselect', 'no effect', '--straggler_probability=0.0'],
    ),
    (
      ['--overselect=3', '--dropout_probability=0.2', '--num_clients=39'],
      ['--overselect=3.0: 40 clients', '--clients_per_round=10', 'are 39'],
    ),
    (['--dropout_probability=1'], ['=1.0', 'at most 0.999']),
    (
      ['--straggler_least_share=0.2'],
      ['no effect', '--straggler_probability=0.0'],
    ),
    (['--availability_period=24'], ['no effect', '--availability_file=;']),
    (
      ['--min_clients=11'],
      ['--min_clients=11', '--clients_per_round=10', 'none would count'],
    ),
    (
      ['--algorithm=supervised', '--dropout_probability=0.2'],
      ['--dropout_probability', 'no effect', '--algorithm=supervised'],
    ),
    (
      ['--algorithm=local_uda', _CLIENTS, '--num_labels=50', '--min_clients=2'],
      ['--min_clients', 'no effect', '--algorithm=local_uda'],
    ),
    (
      [*_PRIVATE, '--norm=gn', '--availability_file=x.csv'],
      ['--availability_file=x.csv', '--aggregator=dp', 'epsilon'],
    ),
    (
      ['--learning_rate_schedule=plateau'],
      ['--learning_rate_schedule=plateau', 'give --num_validation=N'],
    ),
    (['--streaming_rounds=5'], ['no effect with --streaming_steps=1']),
    (['--streaming_steps=0'], ['--streaming_steps=0', 'at least 1']),
    (['--alpha=0.3'], ['--alpha', 'no effect', '--partition=iid']),
    (['--full_labels'], ['--full_labels', 'supervised', 'labels_at_clients']),
    (
      ['--algorithm=supervised', '--full_labels', '--num_labels=0'],
      ['--num_labels=0', 'labels_at_server', 'at least 10'],
    ),
    (['--track=mlflow'], ["'mlflow' is not a tracker", 'mlflow:URI']),
    (['--track=comet:x'], ["'comet:x' is not", 'wandb:PROJECT']),
    (['--track=wandb:a/b/c'], ['--track=wandb:a/b/c', 'ENTITY/PROJECT']),
    (['--track=wandb:a,wandb:b'], ['wandb is given twice']),
    (
      ['--track=mlflow:https://me:secret@host/x'],
      ['mlflow:https://...@host/x', 'MLFLOW_TRACKING_PASSWORD'],
    ),
    (['--profile=3-'], ['--profile=3-', "'3-' is not a round", '3-5']),
    (['--profile=5-3'], ['ascending']),
    (['--profile=0'], ['1 to']),
    (['--profile=2,801'], ['801 is not within', '--total_rounds=800']),
    (
      ['--profile=2', '--runtime=tff_worker'],
      ['--runtime=tff_worker', 'in_process'],
    ),
    (
      ['--call_timeout_secs=5'],
      ['--call_timeout_secs=5:', '--runtime=tff_worker'],
    ),
    (['--num_clients=60000'], ['--num_clients=60000', 'training examples']),
    (
      ['--algorithm=fixmatch', _CLIENTS, '--num_labels=1000'],
      ['--num_labels=1000', '100 clients', '50000'],
    ),
    (['--labeled_clients=3'], ['--labeled_clients', 'no effect', 'scenario']),
    (
      ['--algorithm=uda', _CLIENTS, '--full_labels', '--client_labels=own'],
      ['--client_labels', 'no effect', '--full_labels'],
    ),
    (
      [
        *('--algorithm=uda', _CLIENTS, '--client_labels=own'),
        '--client_label_classes=2',
      ],
      ['--client_label_classes', 'no effect', '--client_labels=own'],
    ),
    (
      [
        *('--algorithm=protofssl', _CLIENTS, '--num_labels=6'),
        '--client_label_classes=6',
      ],
      ['--num_labels=6', '2 labels of each of 6 classes', 'at least 12'],
    ),
    (
      ['--num_unlabeled=99'],
      ['--num_unlabeled=99', '--num_clients=100', 'to 0 for all'],
    ),
    (
      ['--num_validation=50000'],
      [
        '--num_validation=50000: cifar10 has 50000 training examples',
        '140 are needed for --num_labels=40 and for --num_clients=100',
        'set it to at most 49860',
      ],
    ),
    (
      ['--num_unlabeled=49900', '--num_validation=100'],
      ['--num_unlabeled=49900: only 49860 of cifar10', 'at most that'],
    ),
    (
      [
        *('--algorithm=uda', _CLIENTS, '--client_labels=own'),
        *('--num_labels=50', '--num_unlabeled=45001'),
      ],
      ['--num_unlabeled=45001: only 45000 of cifar10'],
    ),
    (
      [
        *('--algorithm=uda', _CLIENTS, '--client_labels=own'),
        *('--num_labels=50', '--num_unlabeled=100', '--labeled_clients=1'),
      ],
      ['--num_labels=50', 'own', 'has 1 examples of cifar10', '--num_unlabel'],
    ),
    (
      ['--algorithm=uda', _CLIENTS, '--labeled_clients=101'],
      ['--labeled_clients=101', 'all', 'from 1 to --num_clients=100', '0.1'],
    ),
    (
      ['--algorithm=uda', _CLIENTS, '--client_labels=own', '--num_labels=501'],
      ['--num_labels=501', 'own', '100 clients has 500 examples of cifar10'],
    ),
    (
      [
        *('--algorithm=uda', _CLIENTS, '--labeled_clients=2'),
        '--num_labels=25000',
      ],
      ['--num_clients=100: only 0'],
    ),
    (['--cross_device'], ['--norm=sbn', 'second client phase', '--norm=gn']),
    (['--aggregator=median'], ['--aggregator=median', 'robust, secure']),
    (['--dp_delta=1e-6'], ['--dp_delta', 'no effect', '--aggregator=mean']),
    (['--simulate_secure_aggregation'], ['no effect', '--aggregator=mean']),
    (
      ['--fl2.consistency=none', '--fl2.rho=0.5'],
      ['--fl2.rho: has no effect with --fl2.consistency=none; omit it'],
    ),
    (
      ['--client_weighting=examples'],
      [
        '--client_weighting: has no effect with'
        ' --fl2.learning_status_aggregation=true'
      ],
    ),
    (['--aggregator=secure'], ['--simulate_secure_aggregation', 'protect']),
    (
      ['--algorithm=supervised', '--aggregator=robust'],
      ['--aggregator', 'no effect', '--algorithm=supervised'],
    ),
    (
      ['--aggregator=robust', '--clients_per_round=2'],
      ['--clients_per_round=2', 'at least 3 clients', 'outvote'],
    ),
    (
      # Of a cohort, at least half must train.
      [
        '--algorithm=supervised',
        '--scenario=labels_at_clients',
        '--aggregator=robust',
        '--num_labels=10',
        '--labeled_clients=4',
        '--clients_per_round=9',
      ],
      [
        '4 clients have labels',
        'at least 5 of --clients_per_round=9',
        'another aggregator',
      ],
    ),
    (
      ['--aggregator=dp', '--norm=gn'],
      ['algorithm sets', '--fl2.learning_status_aggregation=false'],
    ),
    ([*_PRIVATE], ['--aggregator=dp', 'batch norm', '--norm=gn']),
    (
      [*_PRIVATE, '--norm=gn', '--max_client_examples=0'],
      ['--aggregator=dp: --max_client_examples', 'largest client', 'set it'],
    ),
    (
      [
        '--algorithm=fixmatch',
        '--aggregator=secure',
        '--simulate_secure_aggregation',
        '--norm=gn',
      ],
      ['--aggregator=secure: --max_client_examples', 'set it'],
    ),
    (
      [*_PRIVATE, '--norm=gn', '--debug_non_finite'],
      ['--debug_non_finite', 'single clients', '--aggregator=dp'],
    ),
    (
      ['--algorithm=supervised', '--debug_non_finite'],
      ['--debug_non_finite', 'no effect', '--algorithm=supervised'],
    ),
    (
      [*_PRIVATE, '--norm=gn', '--client_weighting=examples'],
      ['--client_weighting=examples', 'uniform'],
    ),
    (
      [*_PRIVATE, '--norm=gn', '--dp_delta=0.01'],
      ['--dp_delta=0.01', '1/100'],
    ),
    (
      [*_PRIVATE, '--norm=gn', '--dp_noise_multiplier=0'],
      ['--dp_noise_multiplier=0', 'greater than 0'],
    ),
  ],
)
def test_what_makes_no_sense_is_refused(argv, words):
  with pytest.raises(UsageError) as error:
    _config(*argv)
  message = str(error.value)
  assert '\n' not in message
  for word in words:
    assert word in message


_OWN_DATA = [
  *_PRIVATE,
  '--norm=none',
  '--num_clients=8',
  '--num_labels=8',
  '--clients_per_round=4',
]


@pytest.mark.parametrize(
  'argv, words',
  [
    (
      ['--dataset=features:a.npz', '--model=linear'],
      "of clients' vectors; give --mean and --std, set --normalization=none, or"
      ' --num_validation=N or --scenario=labels_at_server',
    ),
    (
      ['--dataset=text:a.csv', '--model=text_cnn'],
      '--strong_replacement=0.5 needs to know how often words occur',
    ),
  ],
)
@pytest.mark.parametrize('aggregator', ['dp', 'secure'])
def test_statistics_of_clients_are_refused(own_data, argv, words, aggregator):
  del own_data
  secure = aggregator == 'secure'
  given = [f'--aggregator={aggregator}'] if secure else []
  given += ['--simulate_secure_aggregation'] if secure else []
  argv = [*_OWN_DATA, *given, _CLIENTS, *argv]
  with pytest.raises(UsageError, match=f'^--aggregator={aggregator}: ') as e:
    _config(*argv)
  assert words in str(e.value) and '\n' not in str(e.value)
  instead = {
    'text': ['--strong_replacement=0'],
    'feat': ['--normalization=none'],
  }[argv[-2].partition('=')[2][:4]]
  ways = [instead, ['--num_validation=9'], ['--scenario=labels_at_server']]
  if 'feat' in argv[-2]:
    ways.append(['--mean=1', '--std=2'])
  for way in ways:
    assert _config(*argv, *way).is_private
  unprotected = [flag for flag in argv if not flag.startswith('--simulate')]
  assert not _config(*unprotected, '--aggregator=mean').is_private


def test_cross_device_names_what_stands_against_it():
  assert _config('--cross_device', '--norm=gn').run.cross_device
  with pytest.raises(UsageError, match='identity.*remembered_clients=0'):
    _config('--cross_device', '--norm=gn', '--algorithm=fedmatch')


def test_streaming_is_where_clients_use_more_than_given_labels():
  flags_ = ['--streaming_steps=5', '--streaming_rounds=3']
  assert _config(*flags_).streaming == clients.Streaming(5, 3, False, 0)
  assert _config().streaming.steps == 1
  supervised = ['--algorithm=supervised', _CLIENTS]
  # For the statistics of static batch norm: not of parts that are to come.
  assert _config(*flags_, *supervised).streaming.steps == 5
  full = [*supervised, '--norm=gn', '--full_labels']
  assert _config(*flags_, *full).streaming.steps == 5
  for argv, reason in (
    (['--algorithm=supervised'], '--algorithm=supervised'),
    ([*supervised, '--norm=gn'], '--norm=gn'),
    ([*supervised, '--norm=bn'], '--norm=bn'),
  ):
    with pytest.raises(UsageError, match=f'--streaming_.*{reason}'):
      _config(*flags_, *argv)


def test_norm_decides_the_statistics():
  assert _config('--norm=bn').round.batch_norm_statistics == 'moving_average'
  assert _config('--norm=bn').model_norm == 'bn'
  assert _config('--norm=sbn').model_norm == 'bn'
  assert _config('--norm=gn').model_norm == 'gn'
  assert 'batch_norm_statistics' not in _config('--norm=gn').flags()
