"""Tables that compare runs."""

import csv
import dataclasses
import math

import numpy as np
import pytest
from scipy import stats
import written_runs

from tff_fssl import metrics
from tff_fssl.program import catalogue
from tff_fssl.program import compare
from tff_fssl.program import csv_table
from tff_fssl.program import main
from tff_fssl.program import output_tree
from tff_fssl.program import summary

_TRAIN = metrics.CLIENTS


def _run(
  folder, algorithm, seed, accuracies, validation=(), every=2, **of_clients
):
  """A run with a test accuracy every second round.

  Args:
    folder: The run's.
    algorithm: Its algorithm.
    seed: Its seed.
    accuracies: Of the evaluated rounds.
    validation: The validation accuracies, if any.
    every: How often it is evaluated.
    **of_clients: Further columns about the test accuracies of clients.
  """
  tree = output_tree.OutputTree(str(folder))
  (folder / 'metrics').mkdir(parents=True)
  with open(tree.flags_file, 'w') as file:
    file.write(f'--algorithm={algorithm}\n--seed={seed}\n')
  train = csv_table.CsvTable(tree.train_csv)
  evaluation = csv_table.CsvTable(tree.eval_csv)
  for r in range(1, every * len(accuracies) + 1):
    row = {
      f'{_TRAIN}/num_clients': 5,
      'communication/bytes_up': 10_000_000,
    }
    if algorithm != 'supervised':
      row[f'{_TRAIN}/pseudo_label_ratio'] = 0.25
    train.log(r, row)
    if r % every == 0:
      row = {'test/accuracy': accuracies[r // every - 1]}
      row |= {f'test/accuracy_{k}': v for k, v in of_clients.items()}
      if validation:
        row['validation/accuracy'] = validation[r // every - 1]
      evaluation.log(r, row)
  return str(folder)


def _compare_runs(capsys, *argv):
  code = main.run(compare.compare_main, list(argv))
  captured = capsys.readouterr()
  return code, captured.out, captured.err


def test_what_cannot_be_compared(tmp_path, capsys):
  assert _compare_runs(capsys)[0] == 2
  assert _compare_runs(capsys, 'x', '--last_round=-1')[0] == 2
  assert 'is not a run' in _compare_runs(capsys, str(tmp_path))[2]
  first = _run(tmp_path / 'a', 'fl2', 0, [0.1], every=2)
  other = _run(tmp_path / 'b', 'fl2', 1, [0.1], every=3)
  code, _, err = _compare_runs(capsys, first, other)
  assert code == 2 and 'no evaluated round in common' in err
  none = _run(tmp_path / 'c', 'fl2', 2, [0.1])
  csv_table.CsvTable(output_tree.OutputTree(none).eval_csv).truncate_after(0)
  assert 'no evaluation yet' in _compare_runs(capsys, first, none)[2]
  same = _run(tmp_path / 'd', 'fl2', 0, [0.2])
  code, _, err = _compare_runs(capsys, first, same)
  assert code == 2 and 'would count as two samples' in err


def _compare(capsys, *argv, markdown=True):
  argv = ['--markdown', *argv] if markdown else argv
  code = main.run(compare.compare_main, list(argv))
  captured = capsys.readouterr()
  return code, captured.out, captured.err


def _cells(out, label):
  """The cells of all rows of a group."""
  rows = [
    [cell.strip() for cell in line.strip('|').split('|')]
    for line in out.splitlines()
  ]
  return [row[1:] for row in rows if row[0].startswith(label)]


def test_means_spread_and_tests(tmp_path, capsys):
  ours, theirs = [0.50, 0.52, 0.57], [0.40, 0.47, 0.42]
  paths = [
    _run(tmp_path / f'{name}{seed}', name, seed, [0.1, values[seed]])
    for name, values in (('fl2', ours), ('supervised', theirs))
    for seed in range(3)
  ]
  code, out, _ = _compare(capsys, *paths)
  assert code == 0
  assert out.startswith('Rounds up to 4;')
  (first,) = _cells(out, 'fl2')[:1]
  assert first[:2] == ['3', '53.0 ± 3.6']
  assert '25.0 ± 0.0' in first  # The pseudo-label rate.
  assert '10.0 ± 0.0' in first  # MB up.
  second, tested = _cells(out, 'supervised')
  assert second[:2] == ['3', '43.0 ± 3.6']
  welch = stats.ttest_ind(ours, theirs, equal_var=False).pvalue
  paired = stats.ttest_rel(ours, theirs).pvalue
  assert tested == ['+10.0', f'{welch:.3f}', f'{paired:.3f}']


def test_equal_differences_tell_no_spread(tmp_path, capsys):
  assert np.isnan(
    compare.paired_p_value(np.array([[90.3, 80.3], [91.3, 81.3]]))
  )
  paths = [
    _run(tmp_path / f'{name}{seed}', name, seed, [0.1, accuracy])
    for name, accuracy in (('fl2', 0.9), ('supervised', 0.8))
    for seed in range(2)
  ]
  _, out, _ = _compare(capsys, *paths)
  # Neither Welch's test nor the paired one knows a spread.
  assert _cells(out, 'supervised')[1][0] == '+10.0' and '0.001' not in out


def test_seeds_that_are_not_paired_are_named(tmp_path, capsys):
  values = {
    'fl2': {0: 0.99, 1: 0.80, 2: 0.815},
    'supervised': {1: 0.82, 2: 0.83, 3: 0.50},
  }
  paths = [
    _run(tmp_path / f'{name}{seed}', name, seed, [0.1, accuracy])
    for name, accuracies in values.items()
    for seed, accuracy in accuracies.items()
  ]
  _, out, _ = _compare(capsys, *paths)
  tested = _cells(out, 'supervised')[1]
  assert tested[0] == '+15.2'
  assert tested[-1].endswith('(-1.8 over 2 pairs)')


def test_pairs_are_of_equal_data_and_weights(tmp_path, capsys):
  values = {'fl2': [0.99, 0.80, 0.815], 'supervised': [0.50, 0.82, 0.83]}
  paths = {
    (name, seed): _run(tmp_path / f'{name}{seed}', name, seed, [0.1, accuracy])
    for name, accuracies in values.items()
    for seed, accuracy in enumerate(accuracies)
  }
  for (name, seed), path in paths.items():
    # Seed 0 of one of them has another --partition_file.
    partition = name if seed == 0 else str(seed)
    written_runs.write_inputs(path, partition=partition)
  _, out, _ = _compare(capsys, *paths.values())
  tested = _cells(out, 'supervised')[1]
  assert tested[-1].endswith('(-1.8 over 2 pairs)')
  text = ' '.join(out.split())
  assert 'supervised (3 seeds) (other partition), seeds 0' in text
  assert 'Runs of one seed of fl2 (3 seeds) and others are not paired' in text


def test_several_differences_are_corrected(tmp_path, capsys):
  values = {
    'fl2': [0.50, 0.52, 0.57],
    'fixmatch': [0.40, 0.47, 0.42],
    'supervised': [0.31, 0.35, 0.36],
  }
  paths = [
    _run(tmp_path / f'{name}{seed}', name, seed, [0.1, accuracies[seed]])
    for name, accuracies in values.items()
    for seed in range(3)
  ]
  _, out, _ = _compare(capsys, *paths)
  assert 'that by Holm' in out
  p = {
    name: stats.ttest_rel(values['fl2'], values[name]).pvalue
    for name in ('fixmatch', 'supervised')
  }
  less, more = sorted(p.values())
  corrected = {less: 2 * less, more: max(2 * less, more)}
  for name, value in p.items():
    assert _cells(out, name)[1][-2:] == [
      f'{value:.3f}',
      f'{corrected[value]:.3f}',
    ]


@pytest.mark.parametrize(
  'given,corrected',
  [
    ([], []),
    ([0.2], [0.2]),
    ([0.01, 0.04, 0.03], [0.03, 0.06, 0.06]),
    ([0.9, 0.8], [1, 1]),
    # What could not be tested is not a test.
    ([math.nan, 0.01, 0.2], [math.nan, 0.02, 0.2]),
  ],
)
def test_holm(given, corrected):
  np.testing.assert_allclose(compare.holm(given), corrected)


def test_seconds_leave_out_rounds_that_compile(tmp_path, capsys):
  path = _run(tmp_path / 'a', 'fl2', 0, [0.5, 0.6])
  timing = csv_table.CsvTable(output_tree.OutputTree(path).timing_csv)
  for r, (compiling, seconds) in enumerate([(8, 10.0), (1e-5, 2.0)] * 2, 1):
    timing.log(r, {'seconds/compile': compiling, 'seconds/round': seconds})
  _, out, _ = _compare(capsys, path)
  assert _cells(out, 'fl2')[0][-1] == '2.00'
  _, out, _ = _compare(capsys, path, '--last_round=2')
  assert _cells(out, 'fl2')[0][-1] == '2.00'


def test_budgets_are_equal(tmp_path, capsys):
  long = _run(tmp_path / 'a', 'fl2', 0, [0.1, 0.3, 0.9])
  short = _run(tmp_path / 'b', 'fixmatch', 0, [0.1, 0.2])
  code, out, _ = _compare(capsys, long, short)
  assert code == 0 and 'up to 4;' in out
  assert _cells(out, 'fl2')[0][1] == '30.0'
  code, out, _ = _compare(capsys, long, short, '--last_round=2')
  assert code == 0
  assert _cells(out, 'fl2')[0][1] == '10.0'
  code, _, err = _compare(capsys, long, short, '--last_round=6')
  assert code == 2 and 'have evaluated is 4' in err


def test_the_best_validation_round_is_the_first_within_the_budget(
  tmp_path, capsys
):
  run = _run(
    tmp_path / 'a', 'fl2', 0, [0.1, 0.2, 0.3, 0.4], [0.5, 0.6, 0.6, 0.9]
  )
  _, out, _ = _compare(capsys, run, '--last_round=6')
  assert _cells(out, 'fl2')[0][1:3] == ['30.0', '20.0']


def test_clients_with_own_models_have_a_spread(tmp_path, capsys):
  alone = [
    _run(
      tmp_path / f'a{seed}',
      'local_uda',
      seed,
      [0.5],
      deviation=0.1 + 0.02 * seed,
      worst_decile=0.25,
    )
    for seed in range(2)
  ]
  common = _run(tmp_path / 'b', 'uda', 0, [0.7])
  _, out, _ = _compare(capsys, *alone, common)
  header = [cell.strip() for cell in out.splitlines()[2].split('|')]
  assert header[3:6] == [
    'test, last round, %',
    'deviation over clients, %',
    'worst decile of clients, %',
  ]
  assert _cells(out, 'local_uda')[0][1:4] == [
    '50.0 ± 0.0',
    '11.0 ± 1.4',
    '25.0 ± 0.0',
  ]
  assert _cells(out, 'uda')[0][1:4] == ['70.0', '', '']
  assert 'clients, %' not in _compare(capsys, common)[1]


def test_metrics_of_any_unit(tmp_path, capsys, monkeypatch):
  column = f'{_TRAIN}/pseudo_label_ratio'
  units = {unit: metrics.Metric(column, 'x', unit) for unit in metrics.UNITS}
  shown = [
    dataclasses.replace(metric, compared=f'in {unit}')
    for unit, metric in units.items()
  ]
  monkeypatch.setattr(catalogue, 'all_metrics', lambda: shown)
  code, out, _ = _compare(capsys, _run(tmp_path / 'a', 'fl2', 0, [0.5]))
  assert code == 0
  assert all(f'| in {unit}' in out for unit in metrics.UNITS)
  assert _cells(out, 'fl2')[0].count('0.250') == len(metrics.UNITS) - 4


def _record(path, client):
  figures = summary.Compute(2e6, client, client, 500.0)
  summary.write_compute(output_tree.OutputTree(path).compute_json, figures)


def test_compute_is_shown_if_all_runs_say_it(tmp_path, capsys):
  ours = _run(tmp_path / 'a', 'fl2', 0, [0.1])
  theirs = _run(tmp_path / 'b', 'fixmatch', 0, [0.2])
  _record(ours, 8_000)
  _, out, _ = _compare(capsys, ours, theirs)
  assert 'forward-equivalents' not in out
  _record(theirs, 4_000)
  _, out, _ = _compare(capsys, ours, theirs)
  titles = [cell.strip() for cell in out.splitlines()[2].split('|')[3:-1]]
  assert titles[-3:] == [
    'GFLOP a client and round, at most',
    'forward-equivalents, at most',
    'GFLOP of the server, a round',
  ]
  assert _cells(out, 'fl2')[0][-3:] == ['16.0', '8000', '1.0']
  assert _cells(out, 'fixmatch')[0][-3:] == ['8.0', '4000', '1.0']
  with open(output_tree.OutputTree(ours).compute_json, 'w') as file:
    file.write('{"format": "tff_fssl.compute", "client": ')
  code, _, err = _compare(capsys, ours, theirs)
  assert code == 2 and 'compute.json: it is not JSON' in err


@pytest.fixture(name='three')
def _three(tmp_path):
  """Runs of three groups with two seeds each, of which one has more epochs."""
  paths = []
  for name, epochs in (('fl2', 5), ('fixmatch', 5), ('supervised', 10)):
    for seed in range(2):
      path = _run(tmp_path / f'{name}{seed}', name, seed, [0.5 + seed / 10])
      _record(path, 8_000)
      with open(output_tree.OutputTree(path).flags_file, 'a') as file:
        file.write(f'--client_epochs={epochs}\n')
        if name == 'fl2':
          file.write('--fl2.rho=0.5\n--fl2.consistency=none\n')
      paths.append(path)
  return paths


def test_a_terminal_gets_few_aligned_columns(three, capsys):
  code, out, _ = _compare(capsys, *three, markdown=False)
  assert code == 0
  lines = out.splitlines()
  assert max(map(len, lines)) <= 80
  rules = [index for index, line in enumerate(lines) if line.startswith('---')]
  assert len(rules) == 2
  rows = lines[rules[0] + 1 : rules[0] + 4]
  ends = {row.index('55.0 ± 7.1') for row in (rows[0], rows[2])}
  assert len(ends) == 1
  text = ' '.join(out.split())
  assert 'differ in --client_epochs (5, 10): differences in accuracy' in text
  assert 'rho (' not in text
  assert 'More columns: ' in text and 'forward-equivalents, at most' in text


def test_columns_are_chosen_by_words(three, capsys):
  code, out, _ = _compare(
    capsys, *three, '--columns=forward, GFLOP of', markdown=False
  )
  assert code == 0
  assert '8000 ± 0  1.0 ± 0.0' in ' '.join(out.split()).replace(' 1.0', '  1.0')
  assert '55.0' not in out and 'More columns' not in out
  _, out, _ = _compare(capsys, *three, '--columns=forward')
  assert '|  | runs | forward-equivalents, at most |' in out
  code, _, err = _compare(capsys, *three, '--columns=test,zzz')
  assert code == 2 and "'zzz'" in err and 'there are: test, last' in err


def test_a_file_has_all_columns(three, tmp_path, capsys):
  path = tmp_path / 'new' / 'table.csv'
  assert _compare(capsys, *three, f'--csv={path}', markdown=False)[0] == 0
  with open(path, newline='') as file:
    rows = list(csv.reader(file))
  assert [row[1] for row in rows] == ['runs', '2', '2', '2']
  assert len({len(row) for row in rows}) == 1
  named = dict(zip(rows[0], rows[1], strict=True))
  assert named['test, last round, %'] == '55.0'
  assert named['test, last round, %, standard deviation'] == '7.1'
  assert named['forward-equivalents, at most'] == '8000'
