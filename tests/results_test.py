"""Pages of results: their tables are those of the CSV files, and are short."""

import re
import shutil

import pytest
import results
import row_runs
from scipy import stats
import written_runs

from tff_fssl.hparams import UsageError
from tff_fssl.program import compare
from tff_fssl.program import papers_main

_MAX_WORDS = 1200
_MAX_WORDS_OF_ALL = 5000
_PAGES = sorted(results.PAGES.glob('*.md'))
_DATA = results.PAGES / 'data'


def _write(path, text):
  path.write_text(text, encoding='utf-8')
  return path


@pytest.mark.parametrize('page', _PAGES, ids=lambda page: page.stem)
def test_pages_have_the_tables_of_their_files(page):
  text = page.read_text(encoding='utf-8')
  assert results.write_page(text, _DATA) == text


def test_every_file_has_a_table_and_is_linked():
  pages = ''.join(page.read_text(encoding='utf-8') for page in _PAGES)
  for path in _DATA.iterdir():
    assert f'](data/{path.name})' in pages
    assert path.stem.endswith('_seeds') or f'table: {path.name}' in pages


@pytest.mark.parametrize(
  'path',
  [p for p in sorted(_DATA.glob('*.csv')) if 'as_reported' in p.read_text()],
  ids=lambda path: path.stem,
)
def test_recorded_runs_are_of_rows_of_papers(path):
  recorded = results.read(path)
  runs = [(run['setting'], run['method'], run['seed']) for run in recorded]
  assert len({*runs}) == len(runs)
  for run in recorded:
    assert set(run) <= {*results.PAPER_COLUMNS}
    setting = run['setting'].removesuffix(', bfloat16')
    named = papers_main.matching(f'*/{setting}/{run["method"]}')
    figure = run['published, %']  # Two tables may have a row of this name.
    (row,) = [row for row in named if row.short_figure == figure]
    assert run['last_round'] == str(row.flags['total_rounds'])
    assert int(run['seed']) >= 0
    assert re.match(r'\d+\.\d+\.\d+', run['version'])
    assert all(0 <= float(run[c]) <= 100 for c in ('as_reported', 'test_last'))


def test_pages_are_short():
  """Without tables and commands."""
  words = {}
  for page in _PAGES:
    text = page.read_text(encoding='utf-8')
    text = re.sub(r'(?ms)^<!-- table: .*?^<!-- end -->$', '', text)
    text = re.sub(r'(?m)^(    |\|).*$', '', text)
    words[page.stem] = len(text.split())
  assert max(words.values()) <= _MAX_WORDS
  assert sum(words.values()) <= _MAX_WORDS_OF_ALL


@pytest.mark.parametrize('page', _PAGES, ids=lambda page: page.stem)
def test_pages_begin_with_a_command(page):
  title, aim, command = page.read_text(encoding='utf-8').split('\n\n')[:3]
  assert title.startswith('# ')
  assert re.match(r'With th(is page|ese pages) you ', aim)
  assert command.startswith('    ')


@pytest.fixture(name='runs')
def _runs(tmp_path):
  folders = []
  for algorithm, gain in (('fixmatch', 0.02), ('supervised', 0.0)):
    for seed in range(3):
      folders.append(
        written_runs.write(
          tmp_path / f'{algorithm}_{seed}',
          algorithm,
          seed,
          evaluation={
            'test/accuracy': 0.5 + gain + seed * (0.1 + gain / 2),
            'validation/accuracy': lambda r: 0.9 - abs(r - 7) / 100,
          },
        )
      )
  return folders


def _collect(capsys, *arguments):
  code = results.main(['collect', *map(str, arguments)])
  captured = capsys.readouterr()
  assert not captured.out
  return code, captured.err


def test_collecting_writes_a_row_for_each_run(runs, tmp_path, capsys):
  out = tmp_path / 'new.csv'
  written_runs.write_inputs(runs[0], made_by={'tff_fssl': '1.2.3'})
  assert _collect(capsys, *runs, f'--out={out}') == (0, '')
  rows = results.read(out)
  assert [row['method'] for row in rows] == ['fixmatch'] * 3 + [
    'supervised'
  ] * 3
  assert [row['seed'] for row in rows] == ['0', '1', '2'] * 2
  assert rows[0] == {
    'method': 'fixmatch',
    'seed': '0',
    'last_round': '12',
    'best_round': '7',
    'test_last': '52.0000',
    'test_best': '52.0000',
    'pseudo_label_rate': '57.5000',
    'pseudo_label_accuracy': '90.0000',
    'confident_rate': '',
    'confident_accuracy': '',
    'mb_down': '',
    'mb_up': '',
    'seconds': '2.0000',
    'forwards': '',
    'version': '1.2.3',
  }


def test_collecting_again_replaces_rows(runs, tmp_path, capsys):
  out = tmp_path / 'new.csv'
  for methods in (('A', 'B'), ('A',)):
    for method, folders in zip(methods, (runs[:3], runs[3:])):
      arguments = [*folders, f'--method={method}', f'--out={out}']
      assert _collect(capsys, *arguments) == (0, '')
  rows = results.read(out)
  assert [row['method'] for row in rows] == ['A'] * 3 + ['B'] * 3


def test_old_rows_have_no_new_figures(runs, tmp_path, capsys):
  out = tmp_path / 'new.csv'
  assert _collect(capsys, *runs[:3], '--method=A', f'--out={out}') == (0, '')
  _write(out, out.read_text().replace(',forwards', '').replace(',,\n', ',\n'))
  assert _collect(capsys, *runs[3:], '--method=B', f'--out={out}') == (0, '')
  assert [row['forwards'] for row in results.read(out)] == [''] * 6
  assert len(results.make_table(out).rows) == 2


def test_a_name_for_several_methods_is_refused(runs, tmp_path, capsys):
  out = tmp_path / 'new.csv'
  code, error = _collect(capsys, *runs, '--method=A', f'--out={out}')
  assert code == 1 and 'fixmatch' in error and 'supervised' in error
  assert not out.exists()


def test_files_of_other_columns_stay(runs, tmp_path, capsys):
  out = _write(tmp_path / 'a.csv', 'method,x\na,1\n')
  code, error = _collect(capsys, *runs, f'--out={out}')
  assert code == 1 and 'a row for each run' in error
  assert out.read_text() == 'method,x\na,1\n'
  code, error = _collect(capsys, *runs, f'--out={tmp_path / "none" / "a.csv"}')
  assert code == 1 and 'No such file' in error


def test_runs_that_have_not_finished_are_refused(tmp_path, capsys):
  run = written_runs.write(tmp_path / 'a', 'fixmatch', 0, total_rounds='900')
  out = tmp_path / 'x.csv'
  code, error = _collect(capsys, run, f'--out={out}')
  assert code == 1 and 'of 900; continue it' in error
  assert not out.exists()


def test_runs_that_differ_in_nothing_are_refused(runs, tmp_path, capsys):
  twice = shutil.copytree(runs[0], str(tmp_path / 'again'))
  code, error = _collect(capsys, runs[0], twice, f'--out={tmp_path / "x.csv"}')
  assert code == 1 and 'would count as two samples' in error
  with pytest.raises(UsageError, match='is not a run'):
    results.collect([str(tmp_path)], tmp_path / 'x.csv')


def test_a_table_over_seeds_has_paired_differences(runs, tmp_path, capsys):
  out = tmp_path / 'new.csv'
  _collect(capsys, *runs, f'--out={out}')
  table = results.make_table(out, against=['supervised'], without=['MB'])
  assert table.header == [
    '',
    'seeds',
    'last round, %',
    'best-validation round, %',
    'pseudo-label rate, %',
    'pseudo-label accuracy, %',
    'seconds a round',
    'last round by seed',
    'minus supervised (p)',
  ]
  first, second = table.rows
  # 52, 63, 74 against 50, 60, 70: t = 3 / (1 / sqrt(3)), 2 degrees.
  assert first[2] == '63.0 ± 11.0' and second[2] == '60.0 ± 10.0'
  assert first[-2:] == ['52.0, 63.0, 74.0', '+3.0 (0.035)']
  assert second[-1] == ''


def test_p_values_of_a_table_are_corrected(tmp_path):
  values = {'a': [50, 53, 58], 'b': [40, 45, 47], 'c': [41, 45, 48]}
  path = _write(
    tmp_path / 'a.csv',
    'method,seed,test_last\n'
    + ''.join(
      f'{method},{seed},{value}\n'
      for method, accuracies in values.items()
      for seed, value in enumerate(accuracies)
    ),
  )
  table = results.make_table(path, against=['b', 'c'], corrected=['holm'])
  assert table.header[-2:] == ['minus b (p by Holm)', 'minus c (p by Holm)']
  # Three pairs, though the table shows that of b and c twice.
  pairs = [('a', 'b'), ('a', 'c'), ('b', 'c')]
  corrected = compare.holm(
    [stats.ttest_rel(values[x], values[y]).pvalue for x, y in pairs]
  )
  ab, ac, bc = (f'{value:.3f}' for value in corrected)
  assert [row[-2:] for row in table.rows] == [
    [f'+9.7 ({ab})', f'+9.0 ({ac})'],
    ['', f'-0.7 ({bc})'],
    [f'+0.7 ({bc})', ''],
  ]
  with pytest.raises(UsageError, match='allowed is holm'):
    results.make_table(path, against=['b'], corrected=['bonferroni'])


def test_differences_are_of_the_seeds_in_common(tmp_path):
  path = _write(
    tmp_path / 'a.csv',
    'method,seed,test_last\na,0,50\na,1,60\nb,1,58\nc,5,1\n',
  )
  table = results.make_table(path, against=['b'])
  assert [row[-1] for row in table.rows] == ['+2.0', '', '']


def test_many_seeds_are_not_listed(tmp_path):
  rows = ''.join(f'a,{seed},{50 + seed}\n' for seed in range(5))
  path = _write(tmp_path / 'a.csv', f'method,seed,test_last\n{rows}')
  assert results.make_table(path).header == ['', 'seeds', 'last round, %']


def test_recorded_tables_show_deviations_and_seeds(tmp_path):
  path = _write(
    tmp_path / 'a.csv',
    'labels,method,last,last sd,empty,version\n'
    '1,a,50.0,1.5,,0.1.0\n5,a,60.0,,,0.2.0\n',
  )
  _write(
    tmp_path / 'a_seeds.csv',
    'labels,method,seed,test_last\n1,a,0,49\n1,a,1,51\n',
  )
  table = results.make_table(path)
  assert table.header == ['labels', '', 'last', 'last round by seed']
  assert table.rows == [
    ['1', 'a', '50.0 ± 1.5', '49, 51'],
    ['5', 'a', '60.0', ''],
  ]
  _write(tmp_path / 'b.csv', 'x\n**{a.csv|1; a|last}**\n')
  assert results.make_table(tmp_path / 'b.csv').rows == [['**50.0 ± 1.5**']]


def test_a_reference_to_several_rows_is_refused(tmp_path):
  _write(tmp_path / 'a.csv', 'method,x\na,1\na,2\n')
  path = _write(tmp_path / 'b.csv', 'y\n{a.csv|a|x}\n')
  with pytest.raises(KeyError):
    results.make_table(path)


def test_pages_are_rewritten_between_the_marks(tmp_path):
  _write(tmp_path / 'a.csv', 'method,x,y,version\na,1,2,0.1\nb,3,4,\n')
  page = (
    'Before.\n\n<!-- table: a.csv; without: y -->\n{}<!-- end -->\n\nAfter.'
  )
  text = results.write_page(page.format('Old.\n'), tmp_path)
  assert text == page.format(
    '\n|  | x |\n| --- | --- |\n| a | 1 |\n| b | 3 |\n\n'
    '[a.csv](data/a.csv), version 0.1\n\n'
  )
  assert results.write_page(text, tmp_path) == text


def test_runs_of_papers_stand_beside_published_figures(tmp_path, capsys):
  row = 'niid/fmnist/iid/fedavg'
  # It reports the best round on the test set.
  rounds = {49: (0.9, 0), 50: (0.88, 0)}
  row_runs.write(tmp_path, row, 'paper', 3, rounds)
  row_runs.write(tmp_path, row, 'paper', 4, {49: (0.95, 0)}, total_rounds=50)
  row_runs.write(tmp_path, row, '2h', 5, rounds)
  out = tmp_path / 'new.csv'
  arguments = ['papers', 'niid/fmnist', f'--out={out}']
  assert results.main([*arguments, f'--runs_dir={tmp_path}']) == 0
  assert 'seed4: has not finished' in capsys.readouterr().err
  table = results.make_table(out)
  assert table.header[:6] == [
    '',
    'setting',
    'published, %',
    'seeds',
    'ours, %',
    'last round, %',
  ]
  assert table.rows[0][:6] == [
    'fedavg',
    'iid',
    '89.23(0.45)',
    '1',
    '90.00',
    '88.0',
  ]
  for of_row in ('iid/fedprox', 'dirichlet/fedavg'):
    row_runs.write(tmp_path, f'niid/fmnist/{of_row}', 'paper', 3, rounds)
  row_runs.write(tmp_path, row, 'paper', 5, rounds)
  in_bfloat16 = {'compute_dtype': 'bfloat16'}
  row_runs.write(tmp_path, row, 'paper,bfloat16', 3, rounds, **in_bfloat16)
  assert results.main([*arguments, f'--runs_dir={tmp_path}']) == 0
  assert [
    (r['setting'], r['method'], r['seed']) for r in results.read(out)
  ] == [
    ('iid', 'fedavg', '3'),
    ('iid', 'fedavg', '5'),
    ('iid', 'fedprox', '3'),
    ('iid, bfloat16', 'fedavg', '3'),
    ('dirichlet', 'fedavg', '3'),
  ]
  capsys.readouterr()
  assert results.main([*arguments, f'--runs_dir={tmp_path}/none']) == 1
  assert 'has no finished run' in capsys.readouterr().err


def test_a_recorded_run_is_repeated(tmp_path, capsys, monkeypatch):
  name, out = 'fashion/server/40-iid/fl2', tmp_path / 'new.csv'
  row_runs.write(tmp_path / 'old', name, 'paper', 3, {60: (0.7, 0)})
  results.main(
    ['papers', name, f'--out={out}', f'--runs_dir={tmp_path / "old"}']
  )

  def train(arguments):
    assert arguments[:3] == ['run', name, '--seed=3']
    row_runs.write(tmp_path / 'new', name, 'paper', 3, {60: (0.69, 0)})
    return 0

  monkeypatch.setattr(papers_main, 'papers_main', train)
  repeat = ['repeat', name, f'--of={out}', f'--runs_dir={tmp_path / "new"}']
  assert results.main([*repeat, '--seed=3']) == 0
  shown = capsys.readouterr().out
  assert '69.00%' in shown and '70.00%' in shown and '-1.00' in shown
  assert results.main([*repeat, '--seed=4']) == 1
  assert 'has no run of fashion/server/40-iid/fl2' in capsys.readouterr().err
