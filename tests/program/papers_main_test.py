import dataclasses
import shlex

import pytest
import row_runs

from tff_fssl.program import config as config_lib
from tff_fssl.program import console
from tff_fssl.program import csv_table
from tff_fssl.program import flags
from tff_fssl.program import main
from tff_fssl.program import output_tree
from tff_fssl.program import papers
from tff_fssl.program import papers_main
from tff_fssl.program import train_main

_ROW = 'fl2/table2/cat'


@pytest.fixture(name='call')
def _call(capsys):
  """Calls the program with arguments: (exit code, output, errors)."""

  def call(*arguments):
    code = main.run(papers_main.papers_main, arguments)
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    # Commands are in one line, so that they can be copied.
    assert arguments[:1] == ('command',) or all(len(n) <= 80 for n in lines)
    return code, captured.out, captured.err

  return call


@pytest.fixture(name='trained')
def _trained(monkeypatch):
  """The arguments of training, whose rounds -1 to 2 take 10, 4, 20, 5 s."""
  calls = []

  def train(arguments):
    calls.append(arguments)
    config = config_lib.parse_config(arguments)
    tree = output_tree.OutputTree(config.run.output_dir)
    with tree:
      tree.open(config)
      tree.record(config)
      table = csv_table.CsvTable(tree.timing_csv)
      for round_num, seconds in zip((-1, 0, 1, 2), (10, 4, 20, 5)):
        evaluation = {'seconds/evaluation': 60.0} if round_num == 2 else {}
        table.log(round_num, {'seconds/round': seconds, **evaluation})
    return main.DONE

  monkeypatch.setattr(train_main, 'train_main', train)
  return calls


def test_help_and_lists(call):
  assert call('--help')[0] == main.DONE
  code, output, _ = call('list')
  assert code == main.DONE
  for row in papers.rows().values():
    assert row.table in output
  code, output, _ = call('list', '*')
  assert code == main.DONE
  assert len(output.splitlines()) == len(papers.rows()) + 3
  name = 'protofssl/table3/cifar10-iid/fedrgd'
  line = next(n for n in output.splitlines() if n.startswith(name))
  assert line.split() == [name, '69.7', 'no']
  assert call('list', 'tableB3')[1].count(' data\n') == 6


def test_show_says_what_there_is_to_know(call):
  _, output, _ = call('show', 'fedmatch/table1/iid-server/fedavg-sl')
  words = ' '.join(output.split())
  assert '52.45(0.23) %; in parentheses: standard deviation over 3' in words
  assert 'those of all their examples' in words
  _, output, _ = call('show', 'protofssl/table3/cifar10-iid/fedrgd')
  assert "cannot be run quoted from FedRGD's" in ' '.join(output.split())
  _, output, _ = call('show', 'protofssl/table7/cifar10-iid/20')
  assert 'best validation accuracy' in ' '.join(output.split())
  assert '--client_batch_size=20' in output
  assert 'needs' in call('show', 'fedmatch/tableB3/server/fedmatch')[1]


def test_flags_is_a_flagfile(call, tmp_path):
  path = tmp_path / 'a.flags'
  for name in (_ROW, 'protofssl/table3/stl10/fedavg'):
    code, output, _ = call('flags', name, '--seed=3', '--budget=rounds=20')
    assert code == main.DONE
    path.write_text(output)
    values = flags.read_flagfile(str(path))
    assert (values['seed'], values['total_rounds']) == ('3', '20')
    for flag, value in papers.find(name).flags.items():
      if flag in values and flag != 'total_rounds':
        assert values[flag] == config_lib.hparams.format_value(value)


def test_command_is_the_run(call, trained, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  more = (_ROW, '--budget=rounds=2')
  _, output, _ = call('command', *more)
  assert len(output.splitlines()) == 1
  words = shlex.split(output)
  assert words[:2] == shlex.split(console.command_line('train'))
  assert call('run', *more)[0] == main.DONE
  assert trained == [words[2:]]
  config = config_lib.parse_config(words[2:])
  row = papers.find(_ROW).config()
  assert config.run == dataclasses.replace(
    row.run,
    total_rounds=2,
    output_dir=f'runs/papers/{_ROW}/rounds=2/seed0',
  )
  assert config.round == row.round
  trained.clear()
  assert call('run', *more, '--compute_dtype=bfloat16')[0] == main.DONE
  config = config_lib.parse_config(trained[0])
  assert config.round == dataclasses.replace(
    row.round, compute_dtype='bfloat16'
  )
  folder = f'runs/papers/{_ROW}/rounds=2,bfloat16/seed0'
  assert config.run.output_dir == folder


def test_hours(call, trained):
  code, output, _ = call('hours', 'fl2/table2/cat')
  assert code == main.DONE
  rows = [line.split(None, 1) for line in output.splitlines()[1:]]
  assert [row[1] for row in rows if row[0] != 'in'] == [
    '1 h 06 min: 800 of 5.00 s',
    '6 min 48 s: 102 of 4.00 s',
    '1 h 20 min: 80 of 1 min 00 s',
  ]
  assert rows[-1] == ['in', 'all        2 h 33 min']
  (arguments,) = trained
  assert {'--total_rounds=2', '--num_pretraining_rounds=2'} <= set(arguments)


def test_a_budget_of_hours_is_measured_once(call, trained, tmp_path):
  more = (_ROW, f'--runs_dir={tmp_path}', '--budget=0.5h')
  for _ in range(2):
    assert call('run', *more)[0] == main.DONE
  measured, first, again = trained
  # 1,800 s less 408 s of pre-training, at 5 + 60 / 10 s a round.
  assert '--total_rounds=126' in first and first == again
  assert measured[0] == first[0] and '--total_rounds=2' in measured
  code, _, errors = call('run', _ROW, '--budget=0.1h', f'--runs_dir={tmp_path}')
  assert code == main.USAGE and 'not even one round fits' in errors


def test_compare(call, tmp_path):
  more = f'--runs_dir={tmp_path}'
  code, _, errors = call('compare', more)
  assert code == main.USAGE and 'nothing has been run' in errors
  accuracies = {790: (0.5, 0), 800: (0.682, 0)}
  row_runs.write(tmp_path, _ROW, 'paper', 0, accuracies)
  row_runs.write(tmp_path, _ROW, 'paper', 1, {800: (0.702, 0)})
  row_runs.write(tmp_path, _ROW, 'rounds=2', 0, {2: (0.1, 0)})
  row_runs.write(
    tmp_path,
    _ROW,
    'rounds=2,bfloat16',
    1,
    {2: (0.2, 0)},
    compute_dtype='bfloat16',
  )
  # Not finished, and of the round that validation selects.
  best = 'protofssl/table8/20-clients/2-episodes'
  row_runs.write(tmp_path, best, 'paper', 0, {10: (0.4, 0.3), 20: (0.3, 0.2)})
  # Of another configuration.
  row_runs.write(
    tmp_path, 'fl2/table2/sacr', 'paper', 0, accuracies, momentum=0.5
  )
  code, output, errors = call('compare', more)
  assert code == main.DONE
  assert output.splitlines() == [
    _ROW,
    '  paper            68.2 %',
    '  ours             69.2 ± 1.4 % after 800 of 800 rounds, seeds 0, 1',
    '  rounds=2         10.0 % after 2 of 800 rounds, seed 0',
    '  rounds=2         20.0 % after 2 of 800 rounds, seed 1, bfloat16',
    best,
    '  paper            42.7 %',
    '  ours, unfinished 40.0 % after 20 of 300 rounds, seed 0',
  ]
  assert 'sacr/paper/seed0: this run is not of the row' in errors
  assert '--momentum differs' in errors
  output = call('compare', 'protofssl', more)[1]
  assert output.splitlines()[0] == best and _ROW not in output
  assert '69.2 ± 1.4 % after 800' in call('show', _ROW, more)[1]


@pytest.mark.parametrize(
  'arguments, words',
  [
    ((), 'no command was given'),
    (('lits',), "did you mean 'list'"),
    (('show',), 'give a row, such as'),
    (('show', _ROW, _ROW), 'give one name only'),
    (('list', 'nothing'), 'no row of a table has such a name'),
    (('run', 'fl2/table2/cta'), f"did you mean '{_ROW}'"),
    (('run', 'fl2/table3/agnews-20-iid/fl2'), 'ag_news_bert.npz'),
    (('run', _ROW, '--budget=2'), '--budget=2: must be paper'),
    (('run', _ROW, '--budget=rounds=0'), 'must be paper'),
    (('run', _ROW, '--budget=0h'), 'must be paper'),
    (('run', _ROW, '--budget=rounds=801'), 'the paper has 800 rounds'),
    (('command', _ROW, '--budget=2h'), 'only `run` converts'),
    (('hours', _ROW, '--budget=2h'), 'only `run` converts'),
    (('run', _ROW, '--rounds=2'), 'unknown flag --rounds'),
    (('run', 'fedmatch/tableB3/clients/fedmatch'), 'covid19'),
  ],
)
def test_mistakes(call, arguments, words):
  code, output, errors = call(*arguments)
  assert (code, output) == (main.USAGE, '')
  assert words in errors and errors.count('\n') == 1
