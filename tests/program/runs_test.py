import numpy as np

from tff_fssl.program import csv_table
from tff_fssl.program import output_tree
from tff_fssl.program import runs

_TRAIN = 'client_work/train'


def _run(folder, seed, algorithm='fl2', rounds=4, offset=0.0, **flags):
  tree = output_tree.OutputTree(str(folder))
  (folder / 'metrics').mkdir(parents=True)
  values = {'algorithm': algorithm, 'seed': seed, 'output_dir': folder, **flags}
  with open(tree.flags_file, 'w') as file:
    file.writelines(f'--{name}={value}\n' for name, value in values.items())
  train = csv_table.CsvTable(tree.train_csv)
  evaluation = csv_table.CsvTable(tree.eval_csv)
  for r in range(1, rounds + 1):
    kept = np.nan if r == 1 else 0.1 * r
    train.log(r, {f'{_TRAIN}/pseudo_label_ratio': kept})
    if r % 2 == 0:
      evaluation.log(r, {'test/accuracy': 0.1 * r + offset})
  return str(folder)


def test_runs_that_differ_by_seed_are_one_group(tmp_path):
  paths = [
    _run(tmp_path / 'a', 0, client_threads=1),
    _run(tmp_path / 'b', 1, offset=0.2, client_threads=2),
    _run(tmp_path / 'c', 0, 'fixmatch', alpha=0.3),
    _run(tmp_path / 'd', 0, 'fixmatch', alpha=0.1),
  ]
  groups = runs.group_runs([runs.read_run(path) for path in paths])
  assert [len(group.runs) for group in groups] == [2, 1, 1]
  assert groups[0].label == 'fl2 (2 seeds)'
  assert groups[1].label == 'fixmatch alpha=0.3'
  assert groups[2].label == 'fixmatch'  # Its alpha is the default.
  rounds, mean, spread = groups[0].curve('test/accuracy')
  np.testing.assert_array_equal(rounds, [2, 4])
  np.testing.assert_allclose(mean, [0.3, 0.5])
  np.testing.assert_allclose(spread, [0.2 / np.sqrt(2)] * 2)
  rounds, _, _ = groups[0].curve(f'{_TRAIN}/pseudo_label_ratio')
  np.testing.assert_array_equal(rounds, [2, 3, 4])
  assert groups[0].curve('unknown') is None


def test_an_algorithm_at_its_own_defaults_is_no_variant(tmp_path):
  own = {'client_batch_size': 10, 'learning_rate_schedule': 'cosine'}
  paths = [
    _run(tmp_path / 'a', 0, 'semifl', **own),
    _run(tmp_path / 'b', 0, 'semifl', **{**own, 'client_batch_size': 32}),
    _run(tmp_path / 'c', 0, 'fixmatch', client_batch_size=32),
  ]
  groups = runs.group_runs([runs.read_run(path) for path in paths])
  assert [group.label for group in groups] == [
    'semifl',
    'semifl client_batch_size=32',
    'fixmatch',
  ]


def test_a_flag_that_a_run_does_not_know_is_at_its_default(tmp_path):
  paths = [
    _run(tmp_path / 'old', 0),
    _run(tmp_path / 'new', 1, compute_dtype='float32'),
    _run(tmp_path / 'other', 0, compute_dtype='bfloat16'),
  ]
  groups = runs.group_runs([runs.read_run(path) for path in paths])
  assert [group.label for group in groups] == [
    'fl2 (2 seeds)',
    'fl2 compute_dtype=bfloat16',
  ]


def test_runs_of_different_length_meet_where_all_have_rounds(tmp_path):
  paths = [_run(tmp_path / 'a', 0, rounds=8), _run(tmp_path / 'b', 1)]
  (group,) = runs.group_runs([runs.read_run(path) for path in paths])
  np.testing.assert_array_equal(group.curve('test/accuracy')[0], [2, 4])


def test_curves_without_a_common_round_are_unknown(tmp_path):
  paths = [_run(tmp_path / name, i) for i, name in enumerate('ab')]
  for path, known in zip(paths, (1, 2), strict=True):
    table = csv_table.CsvTable(output_tree.OutputTree(path).train_csv)
    table.truncate_after(0)
    for r in (1, 2):
      value = 0.5 if r == known else np.nan
      table.log(r, {f'{_TRAIN}/pseudo_label_accuracy': value})
  (group,) = runs.group_runs([runs.read_run(path) for path in paths])
  assert group.curve(f'{_TRAIN}/pseudo_label_accuracy') is None


def test_a_mean_is_over_all_runs_of_a_group(tmp_path):
  paths = [_run(tmp_path / name, i) for i, name in enumerate('ab')]
  column = f'{_TRAIN}/pseudo_label_accuracy'
  for path, value in zip(paths, (0.5, np.nan), strict=True):
    table = csv_table.CsvTable(output_tree.OutputTree(path).train_csv)
    table.truncate_after(0)
    table.log(1, {column: value})
  (group,) = runs.group_runs([runs.read_run(path) for path in paths])
  assert group.curve(column) is None
