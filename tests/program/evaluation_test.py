import pytest

from tff_fssl.hparams import UsageError
from tff_fssl.program import evaluation


def test_recorded_flags_may_have_no_effect():
  # An older version recorded the second; the user typed neither.
  settings = evaluation.EvaluateHparams(data_dir='here')
  config = evaluation.read_config(
    'model', ['--fl2.consistency=none', '--fl2.rho=0.5'], settings
  )
  assert config.algorithm.rho == 0.5
  assert config.run.data_dir == 'here'


def test_images_of_older_runs_are_normalized():
  settings = evaluation.EvaluateHparams()
  fedmatch = ['--algorithm=fedmatch', '--dataset=digits', '--num_labels=40']
  config = evaluation.read_config('run', fedmatch, settings)
  assert config.data.normalization == 'standard'
  newer = [*fedmatch, '--normalization=scale']
  config = evaluation.read_config('run', newer, settings)
  assert config.data.normalization == 'scale'


def test_a_model_has_its_own_mean():
  inputs = {'formula': '', 'mean': [0.1, 1e-7], 'std': [0.5, 2.0]}
  flags = evaluation.moment_flags({'inputs_of_model.keras': inputs})
  assert flags == ['--mean=0.1,1e-07', '--std=0.5,2.0']
  for inputs in (None, [], {'formula': 'image / 255'}, {'mean': 1, 'std': 'a'}):
    assert not evaluation.moment_flags({'inputs_of_model.keras': inputs})


def test_a_python_file_of_a_run_is_not_run_unasked(tmp_path):
  path = tmp_path / 'own.py'
  path.write_text('def build(images, num_classes, norm): pass')
  arguments = [f'--model={path}:build', '--dataset=digits', '--num_labels=40']
  with pytest.raises(UsageError, match='^run: .*give --run_model_file'):
    evaluation.read_config('run', arguments, evaluation.EvaluateHparams())
  settings = evaluation.EvaluateHparams(run_model_file=True)
  config = evaluation.read_config('run', arguments, settings)
  assert config.run.model == f'{path}:build'


_RUN = (
  '--dataset=digits',
  '--num_labels=40',
  '--norm=gn',
  '--max_client_examples=60000',
)


@pytest.mark.parametrize(
  'flags, expected',
  [
    ([], '--federated: the clients of run hold .* --client_test_fraction=0.2'),
    (
      ['--client_test_fraction=0.2', '--aggregator=dp'],
      '--federated: run was trained with --aggregator=dp, whose epsilon',
    ),
  ],
)
def test_runs_whose_clients_cannot_evaluate(flags, expected):
  settings = evaluation.EvaluateHparams(federated=True)
  with pytest.raises(UsageError, match=f'^{expected}'):
    evaluation.read_config(
      'run',
      [*_RUN, '--fl2.learning_status_aggregation=false', *flags],
      settings,
    )


def test_no_single_client_is_evaluated_that_an_aggregator_hides():
  flags = ['--fl2.learning_status_aggregation=false', '--aggregator=dp']
  settings = evaluation.EvaluateHparams(local_models=True)
  with pytest.raises(UsageError, match='^--local_models: run .*aggregator=dp'):
    evaluation.read_config('run', [*_RUN, *flags], settings)
