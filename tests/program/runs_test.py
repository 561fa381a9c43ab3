import functools
import json
import os
import time

import numpy as np
import pytest
import written_runs

from tff_fssl.hparams import UsageError
from tff_fssl.program import csv_table
from tff_fssl.program import main
from tff_fssl.program import output_tree
from tff_fssl.program import runs

_write = functools.partial(written_runs.write, weight_decay=0.0)
_TRAIN = 'client_work/train'


def _read(path):
  warnings = []
  return runs.read_status(str(path), warnings.append), warnings


def _call(capsys, *arguments):
  code = main.run(runs.runs_main, [str(a) for a in arguments])
  return code, *capsys.readouterr()


def test_a_run_that_is_going_on(tmp_path):
  path = _write(
    tmp_path / 'a', rounds=5, total_rounds=60, num_pretraining_rounds=3
  )
  with output_tree.OutputTree(path) as tree:
    tree.lock()
    status, warnings = _read(path)
  assert not warnings
  assert status.state == runs.RUNNING
  assert (status.first_round, status.round_num, status.total_rounds) == (
    *(-2, 5, 60),
  )
  assert status.last == status.best == pytest.approx(0.6)
  assert status.seconds_left == 55 * 2
  assert status.holder == f'process {os.getpid()} on {os.uname().nodename}'
  assert _read(path)[0].state == runs.STOPPED
  assert _read(path)[0].seconds_left is None


def test_the_best_round_is_not_chosen_by_test_data(tmp_path):
  path = _write(
    tmp_path / 'a',
    rounds=3,
    evaluation={
      'test/accuracy': lambda r: r / 10,
      'validation/accuracy': lambda r: -r / 10,
    },
  )
  status, _ = _read(path)
  assert (status.last, status.best) == (0.3, 0.1)


def test_a_run_that_has_ended(tmp_path):
  finished = _write(tmp_path / 'a', rounds=5)
  assert _read(finished)[0].state == runs.FINISHED
  # A kill after the last round leaves no summary.
  os.remove(output_tree.OutputTree(finished).summary_json)
  assert _read(finished)[0].state == runs.STOPPED


def test_runs_are_found_once_and_at_any_depth(tmp_path):
  first = _write(tmp_path / 'runs' / 'seed_10')
  _write(tmp_path / 'runs' / 'seed_2')
  inner = tmp_path / 'runs' / 'seed_2' / 'again' / 'x'
  _write(inner)
  for name in ('checkpoints', 'model'):
    _write(tmp_path / 'runs' / 'seed_2' / name / 'not')
  _write(tmp_path / 'runs' / '.hidden')
  (tmp_path / 'runs' / 'loop').symlink_to(tmp_path / 'runs')
  warnings = []
  found = runs.find_folders([str(tmp_path / 'runs'), first], warnings.append)
  names = [os.path.relpath(path, tmp_path / 'runs') for path in found]
  assert names == ['seed_2', 'seed_2/again/x', 'seed_10']
  assert not warnings
  assert runs.find_folders([first], warnings.append) == [first]


def test_folders_are_sorted_by_numbers(tmp_path, capsys, monkeypatch):
  monkeypatch.chdir(tmp_path)
  # The last digit is none of a number.
  for name in ('b_10', 'b_9', 'b_1²'):
    _write(tmp_path / name, seed=1)
    # The titles of groups are sorted, too.
    with open(tmp_path / name / 'flags.txt', 'a') as file:
      file.write(f'--another.flag={name}-{"1" * 5000}\n')
  _, out, err = _call(capsys, '.')
  lines = [line.split()[0] for line in out.splitlines() if line[:4] == '  b_']
  assert (lines, err) == (['b_1²', 'b_9', 'b_10'], '')


def test_files_that_cannot_be_used_cost_one_line_each(
  tmp_path, capsys, monkeypatch
):
  monkeypatch.chdir(tmp_path)
  _write(tmp_path / 'good')
  torn = output_tree.OutputTree(_write(tmp_path / 'torn'))
  with open(torn.eval_csv, 'w'):
    pass
  with open(torn.train_csv, 'ab') as file:
    file.write(b'13,0.1,')  # A row that a kill has cut.
  (tmp_path / 'foreign').mkdir()
  (tmp_path / 'foreign' / 'flags.txt').write_text('Our flags\n')
  code, out, err = _call(capsys, '.')
  assert code == 0
  lines = {
    words[0]: words[1:] for line in out.splitlines() if (words := line.split())
  }
  assert lines['good'] == ['finished', '12/12', '74.0%', '74.0%']
  assert lines['torn'] == ['finished', '12/12']
  assert len(err.splitlines()) == 2
  for name in ('foreign/flags.txt', 'torn/metrics/eval'):
    assert f' {name}' in err


def test_a_run_of_another_program_has_a_short_heading(
  tmp_path, capsys, monkeypatch
):
  monkeypatch.chdir(tmp_path)
  _write(tmp_path / 'ours')
  for seed in (0, 1):
    path = _write(tmp_path / f'theirs_{seed}', algorithm='another', seed=seed)
    with open(os.path.join(path, 'flags.txt'), 'a') as file:
      file.writelines(f'--another.flag_{i}={i}\n' for i in range(100))
  code, out, _ = _call(capsys, '.')
  lines = out.splitlines()
  assert code == 0
  assert sum(line.startswith('another ') for line in lines) == 1
  assert 'more lines of flags; --json has all)' in out
  assert len(lines) < 16


def test_the_list(tmp_path, capsys, monkeypatch):
  monkeypatch.chdir(tmp_path)
  monkeypatch.setenv('TZ', 'UTC')
  time.tzset()
  folder = tmp_path / 'runs'
  for seed in (0, 1):
    _write(folder / f'fixmatch_{seed}', seed=seed)
  path = _write(folder / 'more', num_labels=100, total_rounds=800)
  long = 'x' * 70
  _write(folder / long, algorithm='fl2', rounds=0, total_rounds=20)
  with output_tree.OutputTree(path) as tree:
    tree.lock()
    os.utime(os.path.join(path, output_tree.LOCK), (1e9, 1e9))
    code, out, err = _call(capsys)
  assert (code, err) == (0, '')
  assert max(map(len, out.splitlines())) <= 80
  assert (
    out
    == f"""\
run                state      round   last   best    left      started

fixmatch num_labels=100
  runs/more        running   12/800  74.0%  74.0%  26 min  09-09 01:46

fl2
  runs/{long}
                   stopped     0/20

fixmatch (2 seeds)
  runs/fixmatch_0  finished   12/12  74.0%  74.0%
  runs/fixmatch_1  finished   12/12  75.0%  75.0%

1 running, 1 stopped, 2 finished
"""
  )


def test_pretraining(tmp_path, capsys):
  path = _write(
    tmp_path / 'a', rounds=0, num_pretraining_rounds=20, total_rounds=60
  )
  with open(output_tree.OutputTree(path).train_csv, 'a') as file:
    file.write('-19\n-18\n')
  assert 'stopped  pre 2/20' in _call(capsys, path)[1]


def test_json(tmp_path, capsys):
  paths = [_write(tmp_path / str(s), seed=s) for s in (0, 1)]
  with output_tree.OutputTree(paths[1]) as tree:
    tree.lock()
    code, out, _ = _call(capsys, tmp_path, '--json')
  first, second = json.loads(out)
  assert code == 0
  assert (first['path'], second['path']) == tuple(paths)
  assert first['state'] == 'finished' and first['started'] is None
  assert second['state'] == 'running' and second['seed'] == '1'
  assert second['round_num'] == second['total_rounds'] == 12
  assert first['group'] == second['group'] == 'fixmatch (2 seeds)'
  assert _call(capsys, tmp_path / '1' / 'metrics', '--json')[1] == '[]\n'


@pytest.mark.parametrize(
  'arguments, words',
  [
    (('nowhere',), 'nowhere: does not exist'),
    ((), 'runs: does not exist'),
    (('file',), 'file: is not a folder'),
  ],
)
def test_mistakes(tmp_path, capsys, monkeypatch, arguments, words):
  monkeypatch.chdir(tmp_path)
  (tmp_path / 'file').touch()
  code, out, err = _call(capsys, *arguments)
  assert (code, out) == (2, '')
  assert words in err and len(err.splitlines()) == 1


def test_no_runs(tmp_path, capsys):
  assert _call(capsys, tmp_path) == (
    0,
    f'There are no runs in {tmp_path}.\n',
    '',
  )
  with pytest.raises(UsageError):
    runs.read_status(str(tmp_path), print)


def test_runs_that_differ_by_seed_are_one_group(tmp_path):
  paths = [
    written_runs.write_short(tmp_path / 'a', 0, client_threads=1),
    written_runs.write_short(tmp_path / 'b', 1, offset=0.2, client_threads=2),
    written_runs.write_short(tmp_path / 'c', 0, 'fixmatch', alpha=0.3),
    written_runs.write_short(tmp_path / 'd', 0, 'fixmatch', alpha=0.1),
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
    written_runs.write_short(tmp_path / 'a', 0, 'semifl', **own),
    written_runs.write_short(
      tmp_path / 'b', 0, 'semifl', **{**own, 'client_batch_size': 32}
    ),
    written_runs.write_short(
      tmp_path / 'c', 0, 'fixmatch', client_batch_size=32
    ),
  ]
  groups = runs.group_runs([runs.read_run(path) for path in paths])
  assert [group.label for group in groups] == [
    'semifl',
    'semifl client_batch_size=32',
    'fixmatch',
  ]


def test_labels_have_the_ends_of_long_values_that_differ_there(tmp_path):
  zeros = ','.join('0' * 30)
  paths = [
    written_runs.write_short(tmp_path / f'{i}', 0, class_shares=shares)
    for i, shares in enumerate([f'1,{zeros}', f'2,{zeros}', f'{zeros},1'])
  ]
  groups = runs.group_runs([runs.read_run(path) for path in paths])
  assert [group.label for group in groups] == [
    'fl2 class_shares=1,0,0,0,0,0,0,0,...,0,0,0,0,0,0,0,0',
    'fl2 class_shares=2,0,0,0,0,0,0,0,...,0,0,0,0,0,0,0,0',
    'fl2 class_shares=0,0,0,0,0,0,0,0,...,0,0,0,0,0,0,0,1',
  ]
  # A shortened value never stands for two.
  middle = [f'{zeros},{i},{zeros}' for i in (1, 2)]
  assert runs.shorten(middle) == {value: value for value in middle}


def test_a_flag_that_a_run_does_not_know_is_at_its_default(tmp_path):
  paths = [
    written_runs.write_short(tmp_path / 'old', 0),
    written_runs.write_short(tmp_path / 'new', 1, compute_dtype='float32'),
    written_runs.write_short(tmp_path / 'other', 0, compute_dtype='bfloat16'),
  ]
  groups = runs.group_runs([runs.read_run(path) for path in paths])
  assert [group.label for group in groups] == [
    'fl2 (2 seeds)',
    'fl2 compute_dtype=bfloat16',
  ]


def test_runs_of_different_length_meet_where_all_have_rounds(tmp_path):
  paths = [
    written_runs.write_short(tmp_path / 'a', 0, rounds=8),
    written_runs.write_short(tmp_path / 'b', 1),
  ]
  (group,) = runs.group_runs([runs.read_run(path) for path in paths])
  np.testing.assert_array_equal(group.curve('test/accuracy')[0], [2, 4])


def test_curves_without_a_common_round_are_unknown(tmp_path):
  paths = [
    written_runs.write_short(tmp_path / name, i) for i, name in enumerate('ab')
  ]
  for path, known in zip(paths, (1, 2), strict=True):
    table = csv_table.CsvTable(output_tree.OutputTree(path).train_csv)
    table.truncate_after(0)
    for r in (1, 2):
      value = 0.5 if r == known else np.nan
      table.log(r, {f'{_TRAIN}/pseudo_label_accuracy': value})
  (group,) = runs.group_runs([runs.read_run(path) for path in paths])
  assert group.curve(f'{_TRAIN}/pseudo_label_accuracy') is None


def test_a_mean_is_over_all_runs_of_a_group(tmp_path):
  paths = [
    written_runs.write_short(tmp_path / name, i) for i, name in enumerate('ab')
  ]
  column = f'{_TRAIN}/pseudo_label_accuracy'
  for path, value in zip(paths, (0.5, np.nan), strict=True):
    table = csv_table.CsvTable(output_tree.OutputTree(path).train_csv)
    table.truncate_after(0)
    table.log(1, {column: value})
  (group,) = runs.group_runs([runs.read_run(path) for path in paths])
  assert group.curve(column) is None
