"""`programs/compare.py`: compares the results of several runs, as tables."""

import csv
import dataclasses
import io
import os

from tff_fssl import durable
from tff_fssl import hparams
from tff_fssl.hparams import UsageError
from tff_fssl.hparams import hparam
from tff_fssl.program import compare
from tff_fssl.program import console
from tff_fssl.program import flags
from tff_fssl.program import main as main_lib
from tff_fssl.program import runs as runs_lib

_USAGE = (
  'programs/compare.py RUN RUN [RUN ...] [--columns=WORD,...] [--markdown]'
)
_ABOUT = (
  'Compares runs at equal budgets, as tables. Runs that differ only in'
  ' their seeds form a group, shown by mean and sample standard deviation:'
  ' accuracy, pseudo-labels, seconds, bytes and compute (the most, for a client'
  " of mean size). The test accuracy of the first run's group is compared with"
  " each other group by Welch's t-test and by the paired t-test of"
  ' runs with equal data, partition and initial weights (seed), whose'
  ' p-values are also corrected for the number of groups (Holm). RUN is the'
  ' --output_dir of programs/train.py. A path that is not a run, or a run'
  ' without an evaluation, is skipped with a warning.'
)


@dataclasses.dataclass(frozen=True)
class CompareHparams:
  """Flags of `programs/compare.py`."""

  last_round: int = hparam(
    0,
    'Rounds after this one are ignored. 0: the last round that all runs have'
    ' evaluated.',
    minimum=0,
  )
  columns: str = hparam(
    '',
    'The columns to show: words of their titles, separated by commas, such as'
    ' test,GFLOP. If empty, the most usual ones, at most eight.',
  )
  markdown: bool = hparam(
    False,
    'Prints Markdown, with all columns unless --columns is given.',
  )
  csv: str = hparam(
    '',
    'Also write all columns to this file, with a column for each standard'
    ' deviation.',
  )

  def __post_init__(self):
    hparams.validate(self)


@main_lib.command(_USAGE, _ABOUT, CompareHparams, missing=runs_lib.NO_RUN)
def compare_main(settings: CompareHparams, parsed: flags.ParsedFlags) -> None:
  """Compares runs over seeds, as tables."""
  if settings.csv:
    main_lib.check_output('csv', settings.csv)
    folder = os.path.dirname(os.path.abspath(settings.csv))
    if not os.path.isdir(folder):
      raise UsageError(
        f'--csv={settings.csv}: there is no folder {folder}; make it, or give'
        ' another file'
      )
  paths = [os.path.normpath(path) for path in parsed.positional]
  run_groups = runs_lib.group_runs(
    runs_lib.read_all(paths, main_lib.warn, compare.TEST_ACCURACY)
  )
  compare.check_seeds(run_groups)
  common = compare.last_common_round(run_groups)
  last_round = settings.last_round or common
  if last_round > common:
    raise UsageError(
      f'--last_round={last_round}: the last round that all runs have evaluated'
      f' is {common}'
    )
  console.show(
    f'Rounds up to {last_round}; mean ± standard deviation over runs.\n'
  )
  results, *tests = compare.tables(run_groups, last_round)
  words = [word.strip() for word in settings.columns.split(',') if word.strip()]
  shown = results
  if words or not settings.markdown:
    shown = compare.select_columns(results, words)
  write = compare.markdown if settings.markdown else compare.plain_text
  console.show(write([shown, *tests]))
  if settings.csv:
    table = io.StringIO(newline='')
    csv.writer(table).writerows(compare.comma_separated(results))
    with durable.storage_errors('--csv'):
      durable.write_file(settings.csv, [table.getvalue().encode()])
  for text in compare.remarks(run_groups):
    line = f'{text[:1].upper()}{text[1:]}.'
    console.show('\n' + '\n'.join(console.wrapped(line)))
  left_out = [title for title in results.header if title not in shown.header]
  if left_out and not words:
    console.show(
      '\n' + '\n'.join(console.wrapped(f'More columns: {"; ".join(left_out)}.'))
    )
