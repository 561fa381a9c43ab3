import pytest

from tff_fssl.hparams import UsageError
from tff_fssl.program.commands import evaluate_main


def test_recorded_flags_may_have_no_effect():
  # An older version recorded the second; the user typed neither.
  settings = evaluate_main.EvaluateHparams(data_dir='here')
  config = evaluate_main._config(
    'model', ['--fl2.consistency=none', '--fl2.rho=0.5'], settings
  )
  assert config.algorithm.rho == 0.5
  assert config.run.data_dir == 'here'


def test_a_python_file_of_a_run_is_not_run_unasked(tmp_path):
  path = tmp_path / 'own.py'
  path.write_text('def build(images, num_classes, norm): pass')
  arguments = [f'--model={path}:build', '--dataset=digits', '--num_labels=40']
  with pytest.raises(UsageError, match='^run: .*give --run_model_file'):
    evaluate_main._config('run', arguments, evaluate_main.EvaluateHparams())
  settings = evaluate_main.EvaluateHparams(run_model_file=True)
  config = evaluate_main._config('run', arguments, settings)
  assert config.run.model == f'{path}:build'
