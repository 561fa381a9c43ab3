import json

import numpy as np
import pytest

from tff_fssl.hparams import UsageError
from tff_fssl.program import evaluate_main

_RUN = ('--dataset=digits', '--num_labels=40', '--norm=gn')


@pytest.mark.parametrize(
  'flags, expected',
  [
    (['--runtime=tff_worker'], '--runtime: has no effect with --federated=fal'),
    (['--clients_per_evaluation=3'], '--clients_per_evaluation: has no effect'),
    (['--federated', '--examples=test'], '--examples=test: with --federated'),
    (['--federated', '--local_models'], '--local_models: has no effect with'),
    (['--output=/'], '--output=/: is a folder'),
    (['--output=/nowhere/to/be'], '--output=/nowhere/to/be: is a folder, or'),
  ],
)
def test_flags_that_do_not_fit_together(flags, expected):
  with pytest.raises(UsageError, match=f'^{expected}'):
    evaluate_main.evaluate_main(['run', *flags])


def test_json_has_no_nan():
  figures = {
    'num_examples': np.int64(0),
    'teacher': {'loss': np.float64('nan')},
  }
  assert evaluate_main._plain(figures) == {
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

  flags = [*_RUN, '--model=cnn', '--client_test_fraction=0.2']
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
  assert evaluate_main.evaluate_main(argv) == 0
  (figures,) = json.loads(output.read_text())
  assert figures['num_clients'] == 4
  assert figures['num_examples'] == 4 * 14
  assert 0 <= figures['accuracy_worst_decile'] <= figures['accuracy_mean']
  printed = ' '.join(capsys.readouterr().out.split())
  assert '56, held out by 4 clients; 4 of 20 clients were drawn' in printed
  assert f'accuracy of clients, mean {figures["accuracy_mean"]:.4f}' in printed
