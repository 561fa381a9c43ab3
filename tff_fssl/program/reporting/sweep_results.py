"""Shows the results of a sweep: table, CSV file, picture, flagfile.

Of all trials, only validation accuracy is shown. Test accuracy is read at the
end, for the best trial and for the base configuration.
"""

from collections.abc import Sequence
import csv
import io
import math
import re
from typing import Any
import warnings

import matplotlib
import numpy as np
import optuna
from optuna.visualization import matplotlib as visualization

import tff_fssl
from tff_fssl import durable
from tff_fssl import hparams
from tff_fssl.hparams import UsageError
from tff_fssl.program import console
from tff_fssl.program.configuration import flags
from tff_fssl.program.configuration import sweeps
from tff_fssl.program.reporting import compare
from tff_fssl.program.reporting import plots
from tff_fssl.program.storage import output_tree
from tff_fssl.program.storage import summary
from tff_fssl.program.storage import trials

_ORDER = (
  trials.COMPLETE,
  trials.PRUNED,
  trials.DIVERGED,
  trials.FAILED,
  trials.OPEN,
)
_GAP = '  '


def ranked(records: Sequence[trials.Record]) -> list[trials.Record]:
  """Sorts trials: complete ones first, the best of each state first."""
  return sorted(
    records,
    key=lambda r: (
      _ORDER.index(r.state),
      0.0 if math.isnan(r.mean) else -r.mean,
      r.number,
    ),
  )


def complete(records: Sequence[trials.Record]) -> list[trials.Record]:
  """Returns the complete trials, the best one first."""
  return [r for r in ranked(records) if r.state == trials.COMPLETE]


def winner(records: Sequence[trials.Record]) -> trials.Record | None:
  """Returns the first complete trial with the best mean, if any."""
  return next(iter(complete(records)), None)


def score_text(record: trials.Record) -> str:
  """Formats validation accuracy in percent: '92.5 ± 0.4', or '-'."""
  scores = [100 * score for score in record.scores.values()]
  return compare.mean_and_spread(scores, 1) if scores else '-'


def table(records: Sequence[trials.Record], names: Sequence[str]) -> str:
  """Formats trials as a table of at most 80 columns, the best ones first.

  Args:
    records: The trials.
    names: The flags that vary. Flags without room are dropped.

  Returns:
    The table.
  """
  rows = ranked(records)
  first, *last = (
    (['trial'], [str(r.number) for r in rows]),
    (['validation, %'], [score_text(r) for r in rows]),
    (['state'], [r.state for r in rows]),
  )
  columns: list[tuple[list[str], list[str]]] = []
  for name in names:
    cells = [
      sweeps.value_text(r.values[name]) if name in r.values else ''
      for r in rows
    ]
    column = broken(name, max(map(len, cells), default=0)), cells
    shown = [first, *columns, column, *last]
    # The first flags matter most: the file lists them in that order.
    if sum(map(_width, shown)) + len(_GAP) * (len(shown) - 1) > console.WIDTH:
      break
    columns.append(column)
  height = max(len(header) for header, _ in [first, *columns, *last])
  padded = [
    [
      cell.ljust(_width((header, cells)))
      for cell in [''] * (height - len(header)) + header + cells
    ]
    for header, cells in [first, *columns, *last]
  ]
  lines = [_GAP.join(line).rstrip() for line in zip(*padded)]
  if len(columns) < len(names):
    left_out = ', '.join(names[len(columns) :])
    lines.append(f'(without {left_out}: see the CSV file)')
  return '\n'.join(lines)


def _width(column: tuple[list[str], list[str]]) -> int:
  return max(map(len, [*column[0], *column[1]]))


def broken(name: str, width: int) -> list[str]:
  """Breaks a flag's name into lines of `width`, if its parts allow it."""
  pieces = re.findall(r'[^_. ]+[_. ]?', name)
  width = max(width, *map(len, pieces))
  lines = ['']
  for piece in pieces:
    if len(lines[-1]) + len(piece) > width:
      lines.append('')
    lines[-1] += piece
  return lines


def write_csv(
  folder: output_tree.SweepFolder,
  records: Sequence[trials.Record],
  sweep: sweeps.Sweep,
) -> None:
  """Writes a row for each trial, or raises `UsageError`."""
  names = [space.name for space in sweep.spaces]
  seeds = [f'seed{seed}' for seed in sweep.seeds]
  about = ['validation/accuracy', 'standard_deviation', *seeds, 'state', 'note']
  text = io.StringIO()
  writer = csv.writer(text, lineterminator='\n')
  writer.writerow(['trial', *names, *about])
  for record in records:
    scores = list(record.scores.values())
    writer.writerow(
      [
        record.number,
        *(hparams.format_value(record.values.get(name, '')) for name in names),
        record.mean if scores else '',
        float(np.std(scores, ddof=1)) if len(scores) > 1 else '',
        *(record.scores.get(seed, '') for seed in sweep.seeds),
        record.state,
        record.note,
      ]
    )
  durable.write_file(folder.trials_csv, [text.getvalue().encode()])


def write_winner(
  folder: output_tree.SweepFolder,
  record: trials.Record,
  sweep: sweeps.Sweep,
  num_complete: int,
) -> None:
  """Writes the flagfile of the best trial, or raises `UsageError`."""
  accuracy = f'{score_text(record)} %'
  spread = (
    f' (mean and sample standard deviation over seeds {sweep.search.seeds})'
    if len(record.scores) > 1
    else f' (seed {sweep.search.seeds})'
  )
  about = [
    f'Trial {record.number} of the sweep in {folder.path}: the best validation'
    f' accuracy of {num_complete} complete trials, {accuracy}{spread}, by'
    f' tff_fssl {tff_fssl.__version__}.',
    f'Chosen by the sweep: {flags.join_arguments(record.values)}. The other'
    ' flags were given to it.',
  ]
  command = console.command_line('train', f'--flagfile={folder.winner}')
  arguments = sweep.arguments(record.values)
  # The user's run gets a seed and a folder of its own.
  own = ('--seed=', '--output_dir=')
  lines = [
    *flags.comments(about),
    f'# {command}',
    *(a for a in arguments if not a.startswith(own)),
  ]
  durable.write_file(folder.winner, ['\n'.join([*lines, '']).encode()])


def test_text(folder: output_tree.SweepFolder, record: trials.Record) -> str:
  """Formats test accuracy in the selected rounds: '92.1 ± 0.7 %'.

  Args:
    folder: The sweep's.
    record: A complete trial.

  Returns:
    The mean over seeds and the sample standard deviation.

  Raises:
    UsageError: If the tables of its runs cannot be read, or lack it.
  """
  accuracies = []
  for seed, score in record.scores.items():
    path = folder.run(record.number, seed)
    best = summary.summarize(output_tree.OutputTree(path)).get(
      'best_validation'
    )
    # The folder of a run may have been removed after its trial, or the run
    # continued, so that another round is selected.
    if (
      not best
      or compare.TEST_ACCURACY not in best
      or not math.isclose(
        best.get(summary.VALIDATION_ACCURACY, math.nan), score, abs_tol=1e-6
      )
    ):
      raise UsageError(
        f'{path}: the run of trial {record.number} is no longer whole; give the'
        ' command of the sweep with another --output_dir'
      )
    accuracies.append(100 * best[compare.TEST_ACCURACY])
  return f'{compare.mean_and_spread(accuracies, 1)} %'


def base(
  records: Sequence[trials.Record], sweep: sweeps.Sweep
) -> trials.Record | None:
  """Returns the complete trial with the base's values, if there is one."""
  return next(
    (r for r in complete(records) if r.values == sweep.base_values), None
  )


def draw(path: str, study: optuna.Study, num_axes: int) -> None:
  """Draws the complete trials of a study as lines through parallel axes.

  Args:
    path: The PNG file.
    study: The study, with a complete trial at least.
    num_axes: The number of flags that vary.

  Raises:
    UsageError: If the file cannot be written.
  """
  # No window system is chosen for the whole process.
  matplotlib.use('agg')
  with warnings.catch_warnings():
    # Optuna calls its diagrams experimental.
    warnings.simplefilter('ignore')
    axes = visualization.plot_parallel_coordinate(
      study, target_name='validation accuracy'
    )
  axes.set_title('')
  canvas: Any = axes.figure
  canvas.set_size_inches(max(6.4, 1.6 * (num_axes + 2)), 4.5)
  canvas.set_layout_engine('tight')
  plots.save_png(canvas, path)
