"""Makes the tables of docs/results/ from CSV files, and these from runs.

`results.py collect RUN ... --out=FILE` writes a row for each run, and replaces
rows of the same method and seed. `results.py papers PATTERN --out=FILE` does so
for the finished runs of rows of papers (`programs/papers.py run`), beside the
figures that the papers print. `results.py repeat ROW --seed=N --of=FILE` trains
one of these runs again, and prints both accuracies. `results.py pages` (`make
results`) rewrites what stands in a page between `<!-- table: FILE -->` and
`<!-- end -->`.

A file with a column `seed` has a row for each run: its table shows means and
sample standard deviations. Any other file has the rows of its table. There, `X`
and `X sd` become one column, FILE_seeds.csv adds accuracies by seed, and
`{FILE|ROW|COLUMN}` is a cell of another table.

Options follow the file's name in the marker: `; against: METHOD, METHOD` adds
differences from these methods, with p-values of paired t-tests (rows for runs
only). `; corrected: holm` corrects these p-values for the number of pairs in
the table. `; without: WORD, WORD` hides columns with these words in their
titles.
"""

import argparse
from collections.abc import Mapping, Sequence
import csv
import math
import pathlib
import re
import sys

import numpy as np

from tff_fssl import metrics
from tff_fssl.hparams import UsageError
from tff_fssl.program import compare
from tff_fssl.program import papers_main
from tff_fssl.program import runs as runs_lib

PAGES = pathlib.Path(__file__).resolve().parents[1] / 'docs' / 'results'
_DATA = 'data'
_TEST = 'test_last'
# Column of a file with a row for each run -> (title, digits).
_MEASURES = {
  'as_reported': ('ours, %', 2),
  _TEST: ('last round, %', 1),
  'test_best': ('best-validation round, %', 1),
  'pseudo_label_rate': ('pseudo-label rate, %', 1),
  'pseudo_label_accuracy': ('pseudo-label accuracy, %', 1),
  'confident_rate': ('confident rate, %', 1),
  'confident_accuracy': ('confident accuracy, %', 1),
  'mb_down': ('MB down', 1),
  'mb_up': ('MB up', 1),
  'forwards': ('forward-equivalents of a client and round', 0),
  'seconds': ('seconds a round', 2),
}
# Columns of such a file that its table does not show.
_HIDDEN = ('seed', 'last_round', 'best_round', 'version')
# Measure -> column of a run's tables, scale. Means over the last ten rounds.
_LATE = {
  'pseudo_label_rate': (f'{metrics.CLIENTS}/pseudo_label_ratio', 100),
  'pseudo_label_accuracy': (f'{metrics.CLIENTS}/pseudo_label_accuracy', 100),
  'confident_rate': (f'{metrics.CLIENTS}/high_confidence_ratio', 100),
  'confident_accuracy': (f'{metrics.CLIENTS}/high_confidence_accuracy', 100),
  'mb_down': ('communication/bytes_down', 1e-6),
  'mb_up': ('communication/bytes_up', 1e-6),
  'seconds': ('seconds/round', 1),
}
_OF_RUN = (
  'seed',
  'last_round',
  'best_round',
  _TEST,
  'test_best',
  *_LATE,
  'forwards',
  'version',
)
_COLUMNS = ('method', *_OF_RUN)
PAPER_COLUMNS = (
  'method',
  'setting',
  'published, %',
  'as_reported',
  *_OF_RUN,
)
# By so many seeds, means hide less than accuracies by seed show.
_FEW_SEEDS = 4
_BLOCK = re.compile(
  r'(?ms)^<!-- table: (?P<file>\w+\.csv)(?P<options>(?:; [^;\n]+)*) -->$'
  r'.*?^<!-- end -->$'
)
_REFERENCE = re.compile(r'\{(\w+\.csv)\|([^{}|]+)\|([^{}|]+)\}')

_Rows = list[dict[str, str]]


def read(path: pathlib.Path) -> _Rows:
  """Reads the rows of a CSV file: column -> text."""
  with open(path, newline='', encoding='utf-8') as file:
    return list(csv.DictReader(file))


def measure(run: runs_lib.Run, method: str) -> dict[str, str]:
  """Measures a run, as a row of a CSV file.

  Args:
    run: A run with an evaluation.
    method: What the row calls its method.

  Returns:
    The cells by column. Accuracies and rates are in %. A cell is empty if the
    run does not have the figure.

  Raises:
    UsageError: If the run has not finished.
  """
  rounds, _ = run.curve(compare.TEST_ACCURACY)
  last_round = int(rounds.max())
  total = int(run.flags.get('total_rounds', last_round))
  if last_round < total:
    raise UsageError(
      f'{run.path}: has not finished: its last evaluation is that of round'
      f' {last_round} of {total}; continue it, or leave it out'
    )
  best_round = compare.best_round(run, last_round)
  made_by = run.inputs.made_by if run.inputs else {}
  values = {
    _TEST: 100 * compare.value_at(run, compare.TEST_ACCURACY, last_round),
    'test_best': 100 * compare.best_validation(run, last_round),
  }
  values |= {
    name: scale * compare.late_mean(run, column, last_round)
    for name, (column, scale) in _LATE.items()
  }
  values['forwards'] = compare.forward_equivalents(run)
  return {
    'method': method,
    'seed': run.flags.get('seed', ''),
    'last_round': str(last_round),
    'best_round': '' if best_round is None else str(best_round),
    **{k: f'{v:.4f}' if math.isfinite(v) else '' for k, v in values.items()},
    'version': made_by.get('tff_fssl', ''),
  }


def collect(paths: Sequence[str], out: pathlib.Path, method: str = '') -> None:
  """Writes a row for each run into a CSV file.

  Args:
    paths: Folders of runs. Those without an evaluation are skipped with a
      warning.
    out: The file. Rows of other methods and seeds stay.
    method: What the rows call the method. If empty, the flags in which the runs
      differ.

  Raises:
    UsageError: If no run is left, one has not finished, two differ in nothing,
      or the file has other columns.
  """
  warn = lambda text: print(f'warning: {text}', file=sys.stderr)
  runs = runs_lib.read_all(paths, warn, compare.TEST_ACCURACY)
  groups = runs_lib.group_runs(runs)
  if method and len(groups) > 1:
    labels = ', '.join(group.label for group in groups)
    raise UsageError(
      f'--method={method}: the runs are of several methods ({labels}); collect'
      ' them one after another'
    )
  compare.check_seeds(groups)
  _add(
    out,
    _COLUMNS,
    [
      measure(run, method or f'{group.algorithm} {group.variant}'.strip())
      for group in groups
      for run in group.runs
    ],
  )


def collect_papers(pattern: str, runs_dir: str, out: pathlib.Path) -> None:
  """Writes a row for each finished run of rows of papers, at full budget.

  The setting of runs in bfloat16 ends with it.

  Args:
    pattern: The rows, as for `programs/papers.py list`.
    runs_dir: The folder of all runs of rows.
    out: The file. Rows of other methods, settings and seeds stay.

  Raises:
    UsageError: If no such run has finished, or the file has other columns.
  """
  warn = lambda text: print(f'warning: {text}', file=sys.stderr)
  found, order = [], []
  for row in papers_main.matching(pattern):
    order += [_of_row(row.name, dtype) for dtype in papers_main.DTYPES]
    for budget, dtype, runs in papers_main.runs_of(runs_dir, row, warn):
      if budget != papers_main.ALL_ROUNDS:
        continue
      method, setting = _of_row(row.name, dtype)
      for run in runs:
        try:
          cells = measure(run, method)
        except UsageError as error:
          warn(str(error))
          continue
        value = papers_main.accuracy(run, row, int(cells['last_round']))
        cells |= {
          'setting': setting,
          'published, %': row.short_figure,
          'as_reported': f'{value:.4f}',
        }
        found.append(cells)
  if not found:
    raise UsageError(f'{runs_dir}: has no finished run of {pattern!r}')
  _add(out, PAPER_COLUMNS, found, order)


def _of_row(name: str, dtype: str) -> tuple[str, str]:
  """Returns the method and the setting of a row PAPER/TABLE/SETTING/METHOD."""
  *setting, method = name.split('/')[2:]
  other = f', {dtype}' if dtype != papers_main.FLOAT32 else ''
  return method, '/'.join(setting) + other


def repeat(
  name: str, seed: int, of: pathlib.Path, runs_dir: str, dtype: str
) -> int:
  """Trains a recorded run again, and prints both accuracies.

  Args:
    name: The row, as for `programs/papers.py run`.
    seed: The seed of the recorded run.
    of: The file that has it.
    runs_dir: The folder of the new run. One that was stopped there continues.
    dtype: The dtype in which the network of the recorded run computes.

  Returns:
    The exit code of the training.

  Raises:
    UsageError: If there is no such row, or the file does not have the run.
  """
  row = papers_main.find(name)
  wanted = (*_of_row(name, dtype), str(seed))
  found = [
    r for r in read(of) if (r['method'], r.get('setting'), r['seed']) == wanted
  ]
  if not found:
    raise UsageError(f'{of}: has no run of {name} with seed {seed} in {dtype}')
  flags = [f'--seed={seed}', f'--runs_dir={runs_dir}']
  code = papers_main.papers_main(
    ['run', name, *flags, f'--compute_dtype={dtype}']
  )
  if code == 0:
    folder = row.folder(runs_dir, papers_main.ALL_ROUNDS, seed, dtype)
    cells = measure(runs_lib.read_run(folder), '')
    before, now = _number(found[0][_TEST]), _number(cells[_TEST])
    print(
      f'Test accuracy after the last round: {now:.2f}%; recorded:'
      f' {before:.2f}%, with version {found[0]["version"]}; difference:'
      f' {now - before:+.2f}'
    )
  return code


def _add(
  out: pathlib.Path,
  columns: Sequence[str],
  more: _Rows,
  order: Sequence[tuple[str, str]] = (),
) -> None:
  """Adds rows, in place of those of the same method, setting and seed.

  Args:
    out: The file.
    columns: Its columns.
    more: The rows.
    order: The methods and settings of rows. Settings come in their order, and
      the methods of each in theirs. Others follow.
  """
  old = read(out) if out.exists() else []
  # A figure that is new here is empty in old rows.
  if old and ({*old[0]} ^ {*columns}) - {*_MEASURES}:
    raise UsageError(f'{out}: does not have a row for each run; give another')
  rows = {
    (row['method'], row.get('setting'), row['seed']): row
    for row in [*old, *more]
  }
  settings = list(dict.fromkeys(setting for _, setting in order))
  ordered = sorted(order, key=lambda key: settings.index(key[1]))
  place = {key: i for i, key in enumerate(ordered)}
  sort = lambda row: place.get((row['method'], row.get('setting')), len(place))
  with open(out, 'w', newline='', encoding='utf-8') as file:
    writer = csv.DictWriter(file, columns, lineterminator='\n')
    writer.writeheader()
    writer.writerows(sorted(rows.values(), key=sort))


def make_table(
  path: pathlib.Path,
  against: Sequence[str] = (),
  without: Sequence[str] = (),
  corrected: Sequence[str] = (),
) -> compare.Table:
  """Makes the table of a CSV file.

  Args:
    path: The file.
    against: Methods from which each other one's accuracy is subtracted, if the
      file has a row for each run.
    without: Columns with one of these words in their titles are hidden.
    corrected: 'holm' if the differences' p-values are corrected for the number
      of pairs that the table compares.

  Returns:
    The table, without empty columns.

  Raises:
    UsageError: If another correction is asked for.
  """
  if list(corrected) not in ([], ['holm']):
    raise UsageError(f'corrected: {", ".join(corrected)}: allowed is holm')
  rows = read(path)
  if 'seed' in rows[0]:
    header, cells = _over_seeds(rows, against, bool(corrected))
  else:
    header, cells = _as_recorded(path, rows)
  shown = [
    i
    for i, title in enumerate(header)
    if any(row[i] for row in cells) and not any(w in title for w in without)
  ]
  # The title of the methods says nothing.
  titles = ['' if header[i] == 'method' else header[i] for i in shown]
  return compare.Table(titles, [[row[i] for i in shown] for row in cells])


def _over_seeds(
  rows: _Rows, against: Sequence[str], is_corrected: bool
) -> tuple[list[str], list[list[str]]]:
  """Summarizes runs over their seeds."""
  keys = [c for c in rows[0] if c not in _MEASURES and c not in _HIDDEN]
  measures = [c for c in _MEASURES if c in rows[0]]
  groups: dict[tuple[str, ...], _Rows] = {}
  for row in rows:
    groups.setdefault(tuple(row[key] for key in keys), []).append(row)
  tested = {
    key: {row['seed']: _number(row[_TEST]) for row in group}
    for key, group in groups.items()
  }
  is_short = max(map(len, groups.values())) <= _FEW_SEEDS
  header = [*keys, 'seeds', *(_MEASURES[c][0] for c in measures)]
  header += ['last round by seed'] * is_short
  p = 'p by Holm' if is_corrected else 'p'
  header += [f'minus {name} ({p})' for name in against]
  # A pair that stands in the table twice is one test.
  pairs = {
    frozenset((key, (name, *key[1:])))
    for key in tested
    for name in against
    if name != key[0]
  }
  p_values = {
    pair: compare.paired_p_value(compare.pair(*(tested[key] for key in pair)))
    for pair in pairs
  }
  if is_corrected:
    p_values = dict(zip(p_values, compare.holm(list(p_values.values()))))
  cells = []
  for key, group in groups.items():
    shown = [*key, str(len(group))]
    shown += [
      compare.mean_and_spread(
        [_number(run[c]) for run in group], _MEASURES[c][1]
      ).removesuffix(' ± 0')  # Of a count that is always the same.
      for c in measures
    ]
    if is_short:
      shown.append(', '.join(f'{v:.1f}' for v in tested[key].values()))
    for name in against:
      other = (name, *key[1:])
      shown.append(
        ''
        if other == key
        else _difference(
          tested[key], tested[other], p_values[frozenset((key, other))]
        )
      )
    cells.append(shown)
  return header, cells


def _difference(
  ours: Mapping[str, float], theirs: Mapping[str, float], p_value: float
) -> str:
  """Writes the mean difference over common seeds, with its p-value."""
  pairs = compare.pair(ours, theirs)
  if not len(pairs) or not np.isfinite(pairs).all():
    return ''
  text = f'{np.mean(pairs[:, 0] - pairs[:, 1]):+.1f}'
  shown = compare.p_value(p_value)
  return f'{text} ({shown})' if shown else text


def _as_recorded(
  path: pathlib.Path, rows: _Rows
) -> tuple[list[str], list[list[str]]]:
  """Shows rows as they are, with deviations beside their means."""
  columns = [c for c in rows[0] if not c.endswith(' sd') and c != 'version']
  by_seed = path.with_name(f'{path.stem}_seeds.csv')
  seeds = read(by_seed) if by_seed.exists() else []
  keys = [c for c in columns if seeds and c in seeds[0]]

  def cell(row: dict[str, str], column: str) -> str:
    deviation = row.get(f'{column} sd')
    text = row[column] + (f' ± {deviation}' if deviation else '')
    return _REFERENCE.sub(lambda m: _look_up(path.parent, m), text)

  cells = [[cell(row, column) for column in columns] for row in rows]
  for row, shown in zip(rows, cells):
    own = [s[_TEST] for s in seeds if all(s[key] == row[key] for key in keys)]
    shown.append(', '.join(own))
  return [*columns, 'last round by seed'], cells


def _look_up(folder: pathlib.Path, reference: re.Match[str]) -> str:
  """Finds the cell of another table, or raises `KeyError`."""
  file, row, column = reference.groups()
  table = make_table(folder / file)
  index = table.header.index(column)
  # `1; fixmatch` is the row with both cells.
  wanted = {part.strip() for part in row.split(';')}
  found = [cells[index] for cells in table.rows if wanted <= set(cells)]
  if len(found) != 1:
    raise KeyError(reference[0])
  return found[0]


def _number(text: str) -> float:
  return float(text) if text else math.nan


def write_page(text: str, folder: pathlib.Path) -> str:
  """Replaces a page's tables by those of the CSV files.

  Args:
    text: The page.
    folder: The folder of the CSV files.

  Returns:
    The page. Below each table are its file and the versions of its runs.
  """

  def replace(match: re.Match[str]) -> str:
    marker, file = match[0].partition('\n')[0], match['file']
    given = re.findall(
      r'; (against|without|corrected): ([^;]+)', match['options']
    )
    options = {name: words.split(', ') for name, words in given}
    table = compare.markdown([make_table(folder / file, **options)])
    names = [file, f'{file[:-4]}_seeds.csv']
    links = [f'[{n}]({_DATA}/{n})' for n in names if (folder / n).exists()]
    versions = {row.get('version', '') for row in read(folder / file)} - {''}
    if versions:
      links.append(f'version {", ".join(sorted(versions))}')
    return '\n\n'.join([marker, table, ', '.join(links), '<!-- end -->'])

  return _BLOCK.sub(replace, text)


def main(argv: Sequence[str]) -> int:
  """Collects runs, or rewrites the pages.

  Args:
    argv: The command line's arguments.

  Returns:
    The exit code.
  """
  parser = argparse.ArgumentParser(description=__doc__.partition('\n')[0])
  commands = parser.add_subparsers(dest='command', required=True)
  collecting = commands.add_parser('collect', help='runs -> a CSV file')
  collecting.add_argument('runs', nargs='+', help='folders of runs')
  collecting.add_argument('--out', required=True, type=pathlib.Path)
  collecting.add_argument('--method', default='', help='what to call them')
  papers = commands.add_parser('papers', help="papers' rows -> a CSV file")
  papers.add_argument('pattern', help='as for programs/papers.py list')
  papers.add_argument('--runs_dir', default='runs/papers')
  papers.add_argument('--out', required=True, type=pathlib.Path)
  repeating = commands.add_parser('repeat', help='trains a recorded run again')
  repeating.add_argument('row', help='as for programs/papers.py run')
  repeating.add_argument('--seed', default=0, type=int)
  repeating.add_argument('--of', required=True, type=pathlib.Path)
  repeating.add_argument('--runs_dir', default='runs/repeated')
  repeating.add_argument(
    '--compute_dtype', default=papers_main.FLOAT32, choices=papers_main.DTYPES
  )
  commands.add_parser('pages', help='CSV files -> docs/results/*.md')
  given = parser.parse_args(argv)
  if given.command == 'pages':
    for page in sorted(PAGES.glob('*.md')):
      text = page.read_text(encoding='utf-8')
      page.write_text(write_page(text, PAGES / _DATA), encoding='utf-8')
    return 0
  try:
    if given.command == 'repeat':
      return repeat(
        given.row, given.seed, given.of, given.runs_dir, given.compute_dtype
      )
    if given.command == 'papers':
      collect_papers(given.pattern, given.runs_dir, given.out)
    else:
      collect(given.runs, given.out, given.method)
  except (UsageError, OSError) as error:
    print(f'error: {error}', file=sys.stderr)
    return 1
  return 0


if __name__ == '__main__':
  sys.exit(main(sys.argv[1:]))
