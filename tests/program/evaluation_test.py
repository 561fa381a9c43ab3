import json

import numpy as np
import pytest

from tff_fssl.hparams import UsageError
from tff_fssl.program import evaluation

_RUN_FOLDER = ('--dataset=digits', '--num_labels=40', '--norm=gn')


@pytest.mark.parametrize(
  'flags, expected',
  [
    (['--runtime=tff_worker'], '--runtime: has no effect with --federated=fal'),
    (['--clients_per_evaluation=3'], '--clients_per_evaluation: has no effect'),
    (['--federated', '--examples=test'], '--examples=test: with --federated'),
    (['--federated', '--local_models'], '--local_models: has no effect with'),
    (['--output=/'], '--output=/: is a folder'),
    (['--output=a.csv'], '--output=a.csv: is written as .json, not as .csv'),
  ],
)
def test_flags_that_do_not_fit_together(flags, expected):
  with pytest.raises(UsageError, match=f'^{expected}'):
    evaluation.evaluate_main(['run', *flags])


def test_json_has_no_nan():
  figures = {
    'num_examples': np.int64(0),
    'teacher': {'loss': np.float64('nan')},
  }
  assert evaluation._plain(figures) == {
    'num_examples': 0,
    'teacher': {'loss': None},
  }


@pytest.mark.slow  # It exports a model.
def test_it_evaluates_an_exported_model_at_the_clients(tmp_path, capsys):
  # pylint: disable=import-outside-toplevel
  from tff_fssl.models import adapter
  from tff_fssl.models import server_model
  from tff_fssl.program import config as config_lib
  from tff_fssl.program import experiment
  from tff_fssl.program import export
  from tff_fssl.program import runs

  flags = [*_RUN_FOLDER, '--model=cnn', '--client_test_fraction=0.2']
  config = config_lib.parse_config([*flags, '--num_clients=20'])
  task = experiment.build_task(config)
  weights = adapter.Network(task.model_fn, seed=0).initial_weights()
  model = server_model.ServerModel(*weights)
  run = runs.Run('', {}, ([], [], []))
  folder = str(tmp_path / 'model')
  export.export_model(task, model, folder, 3, run, is_best=False)
  output = tmp_path / 'figures.json'
  argv = [str(tmp_path / 'model'), '--federated', '--client_threads=1']
  argv += ['--clients_per_evaluation=4', f'--output={output}']
  assert evaluation.evaluate_main(argv) == 0
  (figures,) = json.loads(output.read_text())
  assert figures['num_clients'] == 4
  assert figures['num_examples'] == 4 * 14
  assert 0 <= figures['accuracy_worst_decile'] <= figures['accuracy_mean']
  printed = ' '.join(capsys.readouterr().out.split())
  assert '56, held out by 4 clients; 4 of 20 clients were drawn' in printed
  assert f'accuracy of clients, mean {figures["accuracy_mean"]:.4f}' in printed


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
  inputs = {'formula': 'image / 255'}
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
