import row_runs

from tff_fssl.program.configuration import papers
from tff_fssl.program.reporting import paper_runs

_ROW = papers.find('fl2/table2/cat')


def test_results_are_of_each_budget_over_seeds(tmp_path):
  for seed, accuracy in ((0, 0.6), (2, 0.65), (10, 0.7)):
    rounds = {700: (0.1, 0), 800: (accuracy, 0)}
    row_runs.write(tmp_path, _ROW.name, 'paper', seed, rounds)
  row_runs.write(tmp_path, _ROW.name, '2h', 0, {10: (0.2, 0), 20: (0.3, 0)})
  row_runs.write(tmp_path, _ROW.name, '2h', 1, {10: (0.4, 0)})
  row_runs.write(
    tmp_path,
    _ROW.name,
    '2h,bfloat16',
    3,
    {10: (0.5, 0)},
    compute_dtype='bfloat16',
  )
  for name in ('notes', '2h,', '2h,float16'):
    (tmp_path / _ROW.name / name / 'seed0').mkdir(parents=True)
  warnings = []
  ours, small, other = paper_runs.results(str(tmp_path), _ROW, warnings.append)
  assert not warnings
  assert ours == paper_runs.Result(
    'paper', '65.0 ± 5.0', 800, 800, ('0', '2', '10')
  )
  assert (ours.label, small.label) == ('ours', '2h')
  # Of the last round that both have evaluated.
  assert small == paper_runs.Result('2h', '30.0 ± 14.1', 10, 800, ('0', '1'))
  assert other == paper_runs.Result('2h', '50.0', 10, 800, ('3',), 'bfloat16')


def test_what_is_no_result_is_left_out(tmp_path):
  assert not paper_runs.results(str(tmp_path), _ROW, print)
  row_runs.write(tmp_path, _ROW.name, 'paper', 0, {})
  row_runs.write(tmp_path, _ROW.name, 'paper', 1, {800: (0.6, 0)}, alpha=0.3)
  row_runs.write(tmp_path, _ROW.name, 'paper', 2, {800: (0.6, 0)}, momentum=0.1)
  (tmp_path / _ROW.name / 'paper' / 'seed3').mkdir()
  # Where only what computes in float32 belongs.
  bfloat16 = {'compute_dtype': 'bfloat16'}
  row_runs.write(tmp_path, _ROW.name, 'paper', 4, {800: (0.6, 0)}, **bfloat16)
  warnings = []
  (result,) = paper_runs.results(str(tmp_path), _ROW, warnings.append)
  # Without an effect, a flag does not matter.
  assert result.seeds == ('1',)
  assert [w.split('/')[-1].split(':')[0] for w in warnings] == [
    'seed0',
    'seed2',
    'seed3',
    'seed4',
  ]
  expected = (
    'no evaluation yet',
    '--momentum differs',
    'is not a run',
    '--compute_dtype differs',
  )
  for words, warning in zip(expected, warnings, strict=True):
    assert words in warning
