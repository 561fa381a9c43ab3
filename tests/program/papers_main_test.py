import collections
import dataclasses
import fnmatch
import json
import re

import picture_folders
import pytest
import row_runs
import tiny_vectors

from tff_fssl import files
from tff_fssl.hparams import UsageError
from tff_fssl.program import config as config_lib
from tff_fssl.program import csv_table
from tff_fssl.program import flags
from tff_fssl.program import main
from tff_fssl.program import output_tree
from tff_fssl.program import papers_main
from tff_fssl.program import train_main

# The cells of the papers' tables, and the runs of their figures.
_COUNTS = {
  'fedmatch/table1': 4 * 7,
  'fedmatch/table2': 3 + 2 * 9,
  'fedmatch/table5': 4 * 4,
  'fedmatch/tableB3': 2 * 3,
  'fedmatch/table6': 5 * 7,
  'fedmatch/figure6a': 2,
  'fedmatch/figure6b': 1,
  'fedmatch/figure6c': 3,
  'fedmatch/mixmatch': 4,
  'fedswitch/table2': 4 * 7,
  'fedswitch/table3': 2 * 6,
  'fedswitch/figure4': 6 * 4,
  'fl2/table1': 3 * 4 * 6,
  'fl2/table2': 5 + 1,
  'fl2/table3': 2 * 2 * 2,
  'fl2/figure4': 4,
  'protofssl/table3': 2 * 4 + 2 * 3 + 5 * 5 + 2 + 2 * 5,
  'protofssl/table4': 2 * 10,
  'protofssl/table7': 2 * 6,
  'protofssl/table8': 2 * 4,
  'protofssl/table9': 5 * 7,
  'protofssl/sectionB1': 1,
  'sage/labels10': 192,
  'sage/labels20': 156,
  'sage/small': 18,
  'protofssl/figure3': 3 * (2 * 4 - 1),
  'protofssl/figure4a': 3 * 2 * 2,
  'protofssl/figure4b': 3 * 2 * 2,
  'protofssl/figure5a': 4 * 2,
  'protofssl/figure5b': 3 * 2,
  'niid/fmnist': 8 * 2,
  'fashion/server': 15 * 2 * 2,
  'fashion/controls': 7 * 2,
  'fashion/client_controls': 6 * 2,
  'fashion/clients': 18 * 2,
  'semifl/settings': 3 * 6,
}
_ROW = 'fl2/table2/cat'


@pytest.fixture(scope='module', name='data_dir')
def _data_dir(tmp_path_factory):
  """What has to be looked at: STL-10's facts, own files."""
  folder = tmp_path_factory.mktemp('data')
  tiny_vectors.write(folder / 'ag_news_bert.npz', num_classes=4, num=400)
  picture_folders.class_folders(
    folder / 'covid19', dict.fromkeys(('covid', 'normal', 'viral'), 80)
  )
  stl10 = folder / 'stl10' / '1.0.0'
  stl10.mkdir(parents=True)
  sizes = {'train': 5000, 'test': 8000, 'unlabelled': 100_000}
  splits = [{'name': n, 'shardLengths': [s]} for n, s in sizes.items()]
  (stl10 / 'dataset_info.json').write_text(json.dumps({'splits': splits}))
  features = {
    'image': {'image': {'shape': {'dimensions': [96, 96, 3]}}},
    'label': {'classLabel': {'numClasses': 10}},
  }
  (stl10 / 'features.json').write_text(
    json.dumps({'featuresDict': {'features': features}})
  )
  return str(folder)


def test_every_cell_is_a_row():
  rows = papers_main.rows().values()
  assert collections.Counter(row.table for row in rows) == _COUNTS
  # A name's rows would otherwise be one.
  assert sum(_COUNTS.values()) == len(rows)
  for row in rows:
    assert re.fullmatch(r'[a-z0-9]+/\w+(/[a-z0-9.-]+)+', row.name)


def _misplaced(figures, axes):
  """Keys that are no value of their axis, and lists of another length."""
  axis, *inner = axes
  if isinstance(figures, list):
    return [] if not inner and len(figures) == len(axis) else [figures]
  if isinstance(figures, str):  # Of all values of these axes.
    return []
  wrong = [key for key in figures if key not in axis]
  for value in figures.values():
    wrong += _misplaced(value, inner) if inner else [value]
  return wrong


def test_no_figure_and_no_rule_is_for_nothing(repository):
  names = [row.name.split('/', 1) for row in papers_main.rows().values()]
  for path in (repository / 'configs' / 'papers').glob('*.toml'):
    content = files.read_toml(str(path))
    for name, table in content['tables'].items():
      wrong = _misplaced(table['figures'], list(table['axes'].values()))
      assert not wrong, (path.stem, name)
    for rule in content.get('rules', ()):
      for glob in rule['rows']:
        assert any(
          paper == path.stem and fnmatch.fnmatchcase(row, glob)
          for paper, row in names
        ), (path.stem, glob)


def test_every_row_is_a_configuration(data_dir):
  tables = set()
  for row in papers_main.rows().values():
    if row.why:
      with pytest.raises(UsageError, match='cannot be run'):
        row.config()
      continue
    more = {'data_dir': data_dir}
    values = row.config(more).flags()
    # The command of one row in a table: parsing takes most of the time.
    if row.table not in tables:
      tables.add(row.table)
      given = row.arguments(more)
      assert config_lib.parse_config(given).flags() == values, row.name
    # What the name says.
    words = row.name.split('/')[2].split('-')
    at_clients = values['scenario'] == 'labels_at_clients'
    assert not ('server' in words and at_clients), row.name
    assert at_clients or 'clients' not in words, row.name
    assert values['partition'] == 'iid' or 'iid' not in words, row.name
    assert ('fedprox' in row.name) <= (values.get('proximal_strength', 0) > 0)


def test_figures_are_percentages():
  words = (papers_main.CURVE, papers_main.UNKNOWN, papers_main.OURS)
  for row in papers_main.rows().values():
    assert (row.figure is None) == (row.printed in words), row.name
    if row.figure is not None:
      mean, spread = row.figure
      assert 0 < mean < 100 and 0 <= (spread or 0) < 50, row.name
      assert (spread is not None) == bool(row.spread), row.name


def test_figures_as_printed():
  def row(name):
    found = papers_main.find(name)
    return found.figure, found.short_figure

  assert row('fl2/table1/svhn-250-dir03/semifl') == ((42.7, 40.1), '42.7(40.1)')
  assert row('fl2/table2/cat-sacr') == ((71.7, None), '71.7')
  assert row('fl2/figure4/cat') == (None, 'curve')
  fedmatch = papers_main.find('fedmatch/table1/iid-server/fedmatch')
  assert fedmatch.printed == '44.95(0.49) S2C 45 %, C2S 22 %'
  assert row(fedmatch.name) == ((44.95, 0.49), '44.95(0.49)')
  assert row('protofssl/table9/svhn-noniid/10.0') == ((86.2, None), '86.2')


def test_flags_that_no_row_uses_exist_as_well(repository):
  known = {n for g in config_lib.groups() for n, _ in g.named_fields()}
  named = set()
  for path in (repository / 'configs' / 'papers').glob('*.toml'):
    # Neither figures nor values of axes.
    found = re.findall(r'([a-z0-9_]+\.[a-z]\w*) = (?![\[{])', path.read_text())
    named |= {name.removeprefix('flags.') for name in found}
  assert len(named) > 30 and named <= known


def test_layers():
  row = papers_main.find('fl2/table1/cifar100-400-dir01/fedmatch')
  assert row.flags['fedmatch.labeled_loss_weight'] == 1.0  # The paper's flags.
  assert (row.flags['alpha'], row.flags['num_labels']) == (0.1, 400)  # Axes.
  assert row.flags['num_pretraining_rounds'] == 1  # The last rule.
  assert 'fl2.rho' not in row.flags  # Of another algorithm.
  differs = papers_main.find('fl2/table1/cifar100-400-dir01/fedcon').differs
  assert len(differs) == 2 and '\n' not in ''.join(differs)
  assert row.folder('runs', 'rounds=2', 3) == (
    f'runs/{row.name}/rounds=2/seed3'
  )


def test_names():
  names = [row.name for row in papers_main.matching('fl2/*/fl2')]
  assert len(names) == 3 * 6 + 1 + 2 * 2 and 'fl2/table2/fl2' in names
  assert len(papers_main.matching('cifar10-40-')) == 3 * 4
  assert papers_main.find('fl2/table2/cat/').name == 'fl2/table2/cat'
  for name, words in (
    ('fl2/table2/cta', "did you mean 'fl2/table2/cat'"),
    ('table2/ca', 'those are e.g. fl2/table2/cat, fl2/table2/cat-sacr'),
    ('', 'is not the name of a row'),
  ):
    with pytest.raises(UsageError, match=words):
      papers_main.find(name)
  with pytest.raises(UsageError, match="mean 'fl2/table2'"):
    papers_main.matching('fl2/tabel2')


def test_a_damaged_file(tmp_path, monkeypatch):
  (tmp_path / 'papers').mkdir()
  for name in papers_main.names():
    (tmp_path / 'papers' / f'{name}.toml').write_text('[tables\n')
  monkeypatch.setattr(
    papers_main.flags, 'config_path', lambda name: str(tmp_path / name)
  )
  papers_main.rows.cache_clear()
  with pytest.raises(UsageError, match='fashion.toml: it is not TOML .*line 1'):
    papers_main.rows()
  papers_main.rows.cache_clear()


def test_a_flagfile_of_a_row(tmp_path):
  row = papers_main.find('fedswitch/table2/noniid-server/fedswitch')
  path = tmp_path / 'row.flags'
  path.write_text('\n'.join(row.arguments()))
  read = config_lib.parse_config([f'--flagfile={path}'])
  assert read.flags() == row.config().flags()
  assert flags.read_flagfile(str(path))['fedswitch.prior_divergence'] == (
    '0.677455'
  )


_TABLE_ROW = papers_main.find('fl2/table2/cat')


def test_results_are_of_each_budget_over_seeds(tmp_path):
  for seed, accuracy in ((0, 0.6), (2, 0.65), (10, 0.7)):
    rounds = {700: (0.1, 0), 800: (accuracy, 0)}
    row_runs.write(tmp_path, _TABLE_ROW.name, 'paper', seed, rounds)
  row_runs.write(
    tmp_path, _TABLE_ROW.name, '2h', 0, {10: (0.2, 0), 20: (0.3, 0)}
  )
  row_runs.write(tmp_path, _TABLE_ROW.name, '2h', 1, {10: (0.4, 0)})
  row_runs.write(
    tmp_path,
    _TABLE_ROW.name,
    '2h,bfloat16',
    3,
    {10: (0.5, 0)},
    compute_dtype='bfloat16',
  )
  for name in ('notes', '2h,', '2h,float16'):
    (tmp_path / _TABLE_ROW.name / name / 'seed0').mkdir(parents=True)
  warnings = []
  ours, small, other = papers_main.results(
    str(tmp_path), _TABLE_ROW, warnings.append
  )
  assert not warnings
  assert ours == papers_main.Result(
    'paper', '65.0 ± 5.0', 800, 800, ('0', '2', '10')
  )
  assert (ours.label, small.label) == ('ours', '2h')
  # Of the last round that both have evaluated.
  assert small == papers_main.Result('2h', '30.0 ± 14.1', 10, 800, ('0', '1'))
  assert other == papers_main.Result('2h', '50.0', 10, 800, ('3',), 'bfloat16')


def test_what_is_no_result_is_left_out(tmp_path):
  assert not papers_main.results(str(tmp_path), _TABLE_ROW, print)
  row_runs.write(tmp_path, _TABLE_ROW.name, 'paper', 0, {})
  row_runs.write(
    tmp_path, _TABLE_ROW.name, 'paper', 1, {800: (0.6, 0)}, alpha=0.3
  )
  row_runs.write(
    tmp_path, _TABLE_ROW.name, 'paper', 2, {800: (0.6, 0)}, momentum=0.1
  )
  (tmp_path / _TABLE_ROW.name / 'paper' / 'seed3').mkdir()
  # Where only what computes in float32 belongs.
  bfloat16 = {'compute_dtype': 'bfloat16'}
  row_runs.write(
    tmp_path, _TABLE_ROW.name, 'paper', 4, {800: (0.6, 0)}, **bfloat16
  )
  warnings = []
  (result,) = papers_main.results(str(tmp_path), _TABLE_ROW, warnings.append)
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
  for row in papers_main.rows().values():
    assert row.table in output
  code, output, _ = call('list', '*')
  assert code == main.DONE
  assert len(output.splitlines()) == len(papers_main.rows()) + 3
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
    for flag, value in papers_main.find(name).flags.items():
      if flag in values and flag != 'total_rounds':
        assert values[flag] == config_lib.hparams.format_value(value)


def test_run_trains_as_the_row_says(call, trained, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  more = (_ROW, '--budget=rounds=2')
  assert call('run', *more)[0] == main.DONE
  config = config_lib.parse_config(trained[0])
  row = papers_main.find(_ROW).config()
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


def test_show_has_our_results(call, tmp_path):
  for seed, accuracy in ((0, 0.682), (1, 0.702)):
    row_runs.write(tmp_path, _ROW, 'paper', seed, {800: (accuracy, 0)})
  row_runs.write(tmp_path, _ROW, 'rounds=2', 0, {2: (0.1, 0)})
  # Not finished, and of the round that validation selects.
  best = 'protofssl/table8/20-clients/2-episodes'
  row_runs.write(tmp_path, best, 'paper', 0, {10: (0.4, 0.3), 20: (0.3, 0.2)})
  more = f'--runs_dir={tmp_path}'
  assert call('show', _ROW, more)[1].splitlines()[-2:] == [
    '  ours             69.2 ± 1.4 % after 800 of 800 rounds, seeds 0, 1',
    '  rounds=2         10.0 % after 2 of 800 rounds, seed 0',
  ]
  assert call('show', best, more)[1].splitlines()[-1] == (
    '  ours, unfinished 40.0 % after 20 of 300 rounds, seed 0'
  )
  best = 'niid/fmnist/iid/fedavg'  # Of the round that the test set selects.
  row_runs.write(tmp_path, best, 'paper', 0, {10: (0.4, 0), 50: (0.3, 0)})
  assert call('show', best, more)[1].splitlines()[-1] == (
    '  ours             40.0 % after 50 of 50 rounds, seed 0'
  )


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
    (('flags', _ROW, '--budget=2h'), 'only `run` converts'),
    (('hours', _ROW, '--budget=2h'), 'only `run` converts'),
    (('run', _ROW, '--rounds=2'), 'unknown flag --rounds'),
    (('run', 'fedmatch/tableB3/clients/fedmatch'), 'covid19'),
  ],
)
def test_mistakes(call, arguments, words):
  code, output, errors = call(*arguments)
  assert (code, output) == (main.USAGE, '')
  assert words in errors and errors.count('\n') == 1
