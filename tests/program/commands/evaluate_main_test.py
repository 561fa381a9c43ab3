from tff_fssl.program.commands import evaluate_main


def test_recorded_flags_may_have_no_effect():
  # An older version recorded the second; the user typed neither.
  settings = evaluate_main.EvaluateHparams(data_dir='here')
  config = evaluate_main._config(
    'model', ['--fl2.consistency=none', '--fl2.rho=0.5'], settings
  )
  assert config.algorithm.rho == 0.5
  assert config.run.data_dir == 'here'
