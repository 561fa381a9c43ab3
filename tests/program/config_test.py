import dataclasses

import client_files
import pytest

from tff_fssl.algorithms import registry
from tff_fssl.hparams import UsageError
from tff_fssl.program import config
from tff_fssl.program import flags
from tff_fssl.program import main
from tff_fssl.program import run_hparams
from tff_fssl.program import train_main

_CLIENTS = '--scenario=labels_at_clients'
_MOST = '--max_client_examples=60000'
_PRIVATE = ('--algorithm=fixmatch', '--aggregator=dp', _MOST)


def _config(*argv):
  return config.parse_config(argv)


def test_defaults_are_a_configuration():
  default = _config()
  assert default.run.algorithm == 'fl2'
  assert default.first_round == 1 - default.round.num_pretraining_rounds
  assert default.trains_clients
  assert default.run.output_dir == 'runs/fl2_cifar10_labels_at_server_seed0'


def test_flags_repeat_the_configuration(tmp_path):
  for argv in (
    [],
    ['--algorithm=fixmatch', _CLIENTS, '--num_labels=10', '--norm=gn'],
    ['--algorithm=supervised', _CLIENTS, '--full_labels', '--norm=bn'],
    ['--algorithm=uda', _CLIENTS, '--labeled_clients=0.1', '--num_labels=50'],
    ['--algorithm=uda', _CLIENTS, '--client_labels=own', '--num_labels=7'],
    ['--partition=dirichlet', '--alpha=0.3', '--nofl2.adaptive_threshold'],
    ['--partition=dirichlet', '--equal_sizes', '--alpha_meaning=total'],
    ['--partition=extreme', '--class_draws=multinomial', '--label_noise=0.1'],
    ['--partition=natural'],
    ['--num_unlabeled=1000'],
    [
      *('--algorithm=uda', _CLIENTS, '--client_label_classes=2'),
      '--num_labels=6',
    ],
    ['--streaming_steps=10', '--streaming_rounds=1', '--streaming_cycles'],
    ['--partition=natural', '--algorithm=uda', _CLIENTS],
    ['--partition=shards', '--shards_per_client=3'],
    ['--server_optimizer=adam', '--learning_rate_schedule=cosine'],
    ['--dropout_probability=0.3', '--overselect=0.5'],
    [
      '--availability_file=x.csv',
      '--availability_period=24',
      '--min_clients=3',
    ],
    ['--straggler_probability=0.5', '--straggler_least_share=0.2'],
  ):
    first = _config(*argv)
    path = tmp_path / 'flags.txt'
    path.write_text(flags.flagfile_text(first.flags()))
    # Named on the command line they must be allowed as well.
    assert _config(f'--flagfile={path}') == first
    assert _config(*path.read_text().split()) == first


def test_what_follows_does_not_depend_on_where_output_goes():
  for more in ([], ['--output_dir=x']):
    full = _config('--algorithm=supervised', _CLIENTS, '--full_labels', *more)
    assert full.run.num_labels == 0


def test_with_all_labels_clients_train_beside_the_server():
  supervised = ['--algorithm=supervised', '--num_labels=100']
  assert not _config(*supervised).trains_clients
  both = _config(*supervised, '--full_labels')
  assert both.trains_clients and both.aggregates
  assert both.run.num_labels == 100
  assert both.first_round == _config(*supervised).first_round


def test_clients_of_client_data_are_natural_unless_said_otherwise(tmp_path):
  clients = client_files.draw({'a': 6, 'b': 4})
  client_files.train_and_test(tmp_path / 'x', clients)
  flags = [
    f'--dataset=clientdata:{tmp_path}/x',
    f'--cache_dir={tmp_path}/cache',
    '--num_labels=2',
  ]
  run = _config(*flags).run
  assert (run.partition, run.num_clients) == ('natural', 0)
  assert run.output_dir.startswith('runs/fl2_x_labels')
  iid = _config(
    *flags, '--partition=iid', '--num_clients=2', '--clients_per_round=1'
  )
  assert iid.run.partition == 'iid'
  with pytest.raises(UsageError, match='no effect with --partition=natural'):
    _config(*flags, '--alpha=0.3')


def test_natural_clients_are_all_that_there_are_and_label_their_own():
  natural = _config('--partition=natural', '--algorithm=uda', _CLIENTS)
  assert natural.run.num_clients == 0
  assert natural.partition_settings.labels_own
  assert (
    _config('--partition=natural', '--num_clients=20').run.num_clients == 20
  )


def test_labels_at_clients_have_no_pretraining():
  assert (
    _config('--algorithm=fixmatch', _CLIENTS, '--num_labels=10').first_round
    == 1
  )


_OWN_DATA = [
  *_PRIVATE,
  '--norm=none',
  '--num_clients=8',
  '--num_labels=8',
  '--clients_per_round=4',
]


def test_the_size_of_clients_images_is_not_looked_up(tmp_path):
  clients = client_files.draw(dict.fromkeys('abcdefgh', 12))
  examples = client_files.examples(clients)
  path = tmp_path / 'a.sqlite'
  client_files.sqlite(path, {'train': examples, 'test': examples})
  argv = [*_OWN_DATA, f'--dataset=clientdata:{path}', '--flip=false']
  argv += [f'--cache_dir={tmp_path}', '--partition=iid']
  assert _config(*argv, '--aggregator=mean').info.example_shape == (5, 5, 1)
  for more, words in (
    ([], '--image_size would be that of the first images of'),
    (['--image_size=5'], '--color would be that of the first images of'),
  ):
    with pytest.raises(UsageError, match=f'^--aggregator=dp: {words}'):
      _config(*argv, *more)
  config = _config(*argv, '--image_size=5', '--color=gray')
  assert config.info.example_shape == (5, 5, 1)


def test_what_networks_see_of_images():
  assert _config().data.normalization == 'standard'
  assert _config('--algorithm=fedmatch').data.normalization == 'scale'
  fedmatch = _config('--algorithm=fedmatch', '--normalization=standard')
  assert fedmatch.data.normalization == 'standard'
  given = _config('--mean=0.5', '--std=0.2,0.3,0.4')
  assert given.data.moments(3) == ((0.5, 0.5, 0.5), (0.2, 0.3, 0.4))
  for name in ('normalization', 'mean', 'std'):
    assert name in given.flags()
  for argv, words in (
    (['--mean=1'], '--mean=1: needs --std'),
    (['--mean=1', '--std=0'], '--std=0: must be greater than 0'),
    (['--mean=1', '--std=1,2'], '--std=1,2: has 2 numbers; the data need 3'),
    (['--mean=nan', '--std=1'], '--mean=nan: must be a number'),
    (['--mean=1e39', '--std=1'], '--mean=1e39: must be a number of float32'),
    (['--mean=0', '--std=1e-31'], '--std=1e-31: must be greater than 0'),
    (['--mean=1;2', '--std=1'], '--mean=1;2: must be a number'),
    (
      ['--mean=1', '--std=1', '--normalization=scale'],
      '--mean: has no effect with --normalization=scale',
    ),
  ):
    with pytest.raises(UsageError) as error:
      _config(*argv)
    assert str(error.value).startswith(words)


def test_what_networks_see_of_vectors_and_texts(own_data):
  del own_data
  vectors = [*_OWN_DATA, '--aggregator=mean', '--dataset=features:a.npz']
  vectors += ['--model=linear']
  for algorithm in ('fixmatch', 'fedmatch'):
    config = _config(*vectors, f'--algorithm={algorithm}')
    assert config.data.normalization == 'standard'
  with pytest.raises(UsageError, match='^--normalization=scale: is of pixels'):
    _config(*vectors, '--normalization=scale')
  texts = [*_OWN_DATA, '--dataset=text:a.csv', '--model=text_cnn']
  with pytest.raises(UsageError, match='^--normalization: has no effect'):
    _config(*texts, '--normalization=none')


def test_aggregators():
  assert _config().aggregator.aggregator == 'mean'
  private = _config(*_PRIVATE, '--norm=gn', '--dp_delta=1e-6')
  assert private.aggregator.dp_delta == 1e-6
  assert private.flags()['dp_delta'] == 1e-6
  assert 'aggregator_limits' not in private.flags()
  secure = ['--aggregator=secure', '--simulate_secure_aggregation', _MOST]
  assert _config(*secure, '--norm=gn').run.simulate_secure_aggregation
  with pytest.raises(UsageError, match='static batch norm'):
    _config(*secure)
  with pytest.raises(UsageError, match='--debug_non_finite'):
    _config(*secure, '--norm=gn', '--debug_non_finite')


def test_robust_aggregation_takes_robust_statistics():
  kind = lambda *argv: _config(*argv).round.batch_norm_statistics
  assert kind() == 'pooled'
  assert kind('--aggregator=robust') == 'median'
  assert kind('--aggregator=robust', '--batch_norm_statistics=pooled') == (
    'pooled'
  )
  assert kind('--aggregator=robust', '--norm=bn') == 'moving_average'


@pytest.fixture(name='paper_defaults')
def _paper_defaults(monkeypatch):
  """Registers `paper`: supervised, with two values of a paper of its own."""
  values = {'client_epochs': 2, 'learning_rate_schedule': 'cosine'}
  entry = dataclasses.replace(
    registry.REGISTRY['supervised'], name='paper', round_defaults=values
  )
  monkeypatch.setitem(registry.REGISTRY, 'paper', entry)
  return ['--algorithm=paper', _CLIENTS, '--num_labels=10']


def test_round_defaults_hold_unless_the_flag_is_given(paper_defaults, tmp_path):
  argv = paper_defaults
  used = _config(*argv)
  assert used.round.client_epochs == 2
  assert used.flags()['learning_rate_schedule'] == 'cosine'
  assert used.flags()['schedule_rounds'] == 800
  given = _config(*argv, '--client_epochs=5').round
  assert (given.client_epochs, given.learning_rate_schedule) == (5, 'cosine')
  path = tmp_path / 'a.flags'
  path.write_text('--learning_rate_schedule=constant\n')
  assert _config(*argv, f'--flagfile={path}').round.client_epochs == 2
  with pytest.raises(UsageError, match='--learning_rate_schedule=constant'):
    _config(*argv, f'--flagfile={path}', '--schedule_rounds=3')
  path.write_text(flags.flagfile_text(used.flags()))
  assert _config(f'--flagfile={path}') == used
  # Other algorithms keep the general defaults.
  assert _config('--algorithm=supervised').round.client_epochs == 5


def test_round_defaults_are_in_the_help(paper_defaults, capsys):
  del paper_defaults
  assert main.run(train_main.train_main, ['--helpfull']) == 0
  title, note = (
    capsys.readouterr()
    .out.split('--algorithm=paper (')[1]
    .split('\n\n')[0]
    .split(':\n')
  )
  assert title.startswith('Labels only')
  assert ' '.join(note.split()) == (
    'Unless given: --client_epochs=2, --learning_rate_schedule=cosine.'
  )


def test_a_flagfile_may_set_flags_without_effect(tmp_path):
  path = tmp_path / 'a.flags'
  path.write_text('--partition=dirichlet\n--alpha=0.3\n')
  assert _config(f'--flagfile={path}').run.alpha == 0.3
  assert 'alpha' not in _config(f'--flagfile={path}', '--partition=iid').flags()
  path.write_text('--fl2.consistency=none\n--fl2.rho=0.5\n')
  dead = _config(f'--flagfile={path}')
  assert dead.algorithm.rho == 0.5
  assert not dead.flags().keys() & {'fl2.rho', 'fl2.consistency_weight'}
  assert 'fl2.rho' in _config('--fl2.rho=0.5').flags()
  path.write_text('--fixmatch.confidence_threshold=0.9\n')
  with pytest.raises(UsageError, match='a.flags'):
    _config(f'--flagfile={path}')


@pytest.mark.parametrize(
  'in_file, typed',
  [
    (
      '--scenario=labels_at_clients --client_label_classes=3 --num_labels=30',
      '--full_labels',
    ),
    (
      '--scenario=labels_at_clients --client_label_classes=3 --num_labels=21',
      '--client_labels=own',
    ),
    ('--client_label_classes=11 --labeled_clients=3', '--seed=1'),
    ('--partition=dirichlet --alpha=0.3 --equal_sizes', '--partition=iid'),
    ('--partition=shards --shards_per_client=3', '--partition=fedmatch'),
  ],
)
def test_flags_without_effect_do_not_change_the_partition(
  tmp_path, in_file, typed
):
  path = tmp_path / 'a.flags'
  path.write_text('\n'.join(['--algorithm=supervised', *in_file.split()]))
  found = _config(f'--flagfile={path}', typed)
  again = _config(*flags.arguments(found.flags()))
  assert again.partition_settings == found.partition_settings


def test_rounds_that_may_be_empty_must_have_a_client():
  for flag, min_clients in (
    ('--dropout_probability=0.3', 1),
    ('--availability_file=x.csv', 1),
    ('--straggler_probability=0.3', 0),
  ):
    assert _config(flag).round.min_clients == min_clients
    assert _config(flag, '--min_clients=4').round.min_clients == 4
  assert _config('--dropout_probability=0.3', '--min_clients=0') != _config(
    '--dropout_probability=0.3'
  )


def test_algorithms_that_read_the_flags_of_another():
  given = ['--algorithm=local_uda', _CLIENTS, '--num_labels=10']
  found = _config(*given, '--uda.tsa=log')
  assert found.algorithm.tsa == 'log' and found.flags()['uda.tsa'] == 'log'
  found = _config('--algorithm=ts_client_ema', '--fedswitch.ema_decay=0.5')
  assert found.algorithm.ema_decay == 0.5
  # TS-Client EMA has some of FedSwitch's flags.
  with pytest.raises(UsageError, match='is a flag of --algorithm=fedswitch'):
    _config('--algorithm=ts_client_ema', '--fedswitch.labeler=teacher')


def test_participation_is_nothing_where_clients_do_not_train(tmp_path):
  path = tmp_path / 'a.flags'
  path.write_text('--dropout_probability=0.3\n--min_clients=3\n')
  alone = _config(f'--flagfile={path}', '--algorithm=supervised')
  assert not alone.participation.is_on and not alone.round.min_clients
  assert not alone.flags().keys() & {'dropout_probability', 'min_clients'}
  own = [f'--flagfile={path}', '--algorithm=local_uda', _CLIENTS]
  assert _config(*own, '--num_labels=50').participation.is_on
  assert not _config(*own, '--num_labels=50').round.min_clients


@pytest.mark.parametrize('name', ['robust', 'dp', 'mean'])
def test_an_aggregator_in_a_flagfile_is_refused_if_nothing_is_aggregated(
  tmp_path, name
):
  path = tmp_path / 'a.flags'
  path.write_text(f'--aggregator={name}\n')
  alone = ['--algorithm=local_fixmatch', _CLIENTS, '--num_labels=10']
  with pytest.raises(UsageError) as error:
    _config(f'--flagfile={path}', *alone)
  assert str(error.value) == (
    f'--aggregator (in {path}): has no effect with'
    ' --algorithm=local_fixmatch; omit it'
  )
  with pytest.raises(UsageError, match='--aggregator: has no effect'):
    _config(f'--aggregator={name}', *alone)
  # Other flags of a common model are left alone, as are other algorithms.
  path.write_text('--server_optimizer=adam\n--aggregator_limits=false\n')
  assert 'aggregator' not in _config(f'--flagfile={path}', *alone).flags()
  path.write_text(f'--aggregator={name}\n')
  kept = _config(
    f'--flagfile={path}', '--algorithm=fixmatch', '--norm=gn', _MOST
  )
  assert kept.aggregator.aggregator == name


def test_every_config_file_is_valid(repository):
  # Those of texts need the data: tests/configs/text_test.py has some.
  paths = [
    path
    for path in (repository / 'configs').rglob('*.flags')
    if path.parent.name != 'text'
  ]
  assert len(paths) > 10
  for path in paths:
    assert _config(f'--flagfile={path}').flags(), path


def test_differences():
  old = {'seed': '0', 'total_rounds': '5', 'client_threads': '1'}
  new = {'seed': '0', 'total_rounds': '9', 'client_threads': '2'}
  assert config.differences(old, new) == (
    [],
    ['client_threads', 'total_rounds'],
  )
  assert config.differences(new, old)[0] == ['total_rounds']
  assert config.differences(old, old | {'seed': '1'})[0] == ['seed']
  # A flag that older runs did not know has its default there.
  default = str(run_hparams.RunHparams().num_clients)
  assert config.differences(old, old | {'num_clients': default}) == (
    [],
    [],
  )
  assert config.differences(old, old | {'num_clients': '7'})[0] == [
    'num_clients'
  ]


def test_flags_without_effect_are_not_compared():
  # An older version wrote flags that this one knows to have no effect.
  old = {'fl2.consistency': 'none', 'fl2.rho': '0.5'}
  new = {'fl2.consistency': 'none'}
  assert config.differences(old, new) == ([], [])
  # The reason differs, and is named.
  new = {'fl2.consistency': 'sacr'}
  assert config.differences(new | {'fl2.rho': '0.5'}, old) == (
    ['fl2.consistency'],
    [],
  )
  iid = {'partition': 'iid'}
  dirichlet = {'partition': 'dirichlet', 'alpha': '0.3'}
  assert config.differences(dirichlet, iid)[0] == ['partition']
  assert config.differences(iid, dirichlet)[0] == ['alpha', 'partition']
  # What no version knows is compared.
  assert config.differences({'zzz': '1'}, {})[0] == ['zzz']


def test_help_and_page_name_the_changeable_flags(repository, capsys):
  page = (repository / 'docs' / 'runs.md').read_text()
  assert main.run(train_main.train_main, ['--helpfull']) == 0
  shown = ' '.join(capsys.readouterr().out.split())
  for text in (page, shown):
    assert f'these may differ: {config.changeable_text()}.' in text
  assert 'total_rounds (upwards)' in config.changeable_text()
  assert 'seed' not in config.changeable_flags()
