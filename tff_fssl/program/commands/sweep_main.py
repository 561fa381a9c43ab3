"""`programs/sweep.py`: searches flags by validation accuracy."""

import asyncio
import dataclasses
import os
import sys
from typing import TYPE_CHECKING

from tff_fssl import hparams
from tff_fssl.hparams import UsageError
from tff_fssl.hparams import hparam
from tff_fssl.program import console
from tff_fssl.program import training_types
from tff_fssl.program.commands import main as main_lib
from tff_fssl.program.configuration import config as config_lib
from tff_fssl.program.configuration import flags
from tff_fssl.program.configuration import sweeps
from tff_fssl.program.storage import output_tree

if TYPE_CHECKING:
  from tff_fssl.program.storage import trials as trials_lib

_USAGE = 'programs/sweep.py --grid=FLAG=VALUE,VALUE [--FLAG=VALUE ...]'
_ABOUT = (
  'Trains with every combination of some values of flags, or searches by random'
  ' or TPE search, and chooses the trial with the best validation accuracy, the'
  ' mean over seeds. Needs --num_validation. All flags of programs/train.py but'
  ' --restart may be given; they are those of every trial. The same command'
  ' continues a sweep that was stopped.\n'
  '--output_dir, on the command line, is the folder of the sweep, whose runs'
  " are in trials/; otherwise it is that of the flagfile's run, followed by"
  ' _sweep. At the end, the test accuracies of the best trial and of the'
  " flagfile's own values are printed, once. docs/sweeps.md has an example."
)


@dataclasses.dataclass(frozen=True)
class SweepHparams:
  """Flags of `programs/sweep.py`, without those of the search."""

  sweep: str = hparam(
    '',
    'A TOML file with the flags that vary, and the search (docs/sweeps.md).',
  )
  grid: tuple[str, ...] = hparam(
    (),
    'FLAG=VALUE,VALUE,...: the values of a flag. May be given several times.',
  )
  jobs: int = hparam(
    1,
    'Number of parallel trials. They share the cores, by --intra_op_threads,'
    ' unless that is given.',
    minimum=1,
    maximum=1024,
  )
  retries: int = hparam(
    1,
    'Number of restarts of a run that fails or is killed, from its last'
    ' checkpoint.',
    minimum=0,
    maximum=100,
  )
  dry_run: bool = hparam(False, 'Only list the trials, and count their runs.')

  def __post_init__(self):
    hparams.validate(self)


@main_lib.command(
  _USAGE,
  _ABOUT,
  SweepHparams,
  more=lambda: [flags.Group(sweeps.SearchHparams), *config_lib.groups()],
  shown=lambda: [flags.Group(sweeps.SearchHparams)],
  most=0,
)
def sweep_main(settings: SweepHparams, parsed: flags.ParsedFlags) -> int:
  """Searches flags by validation accuracy."""
  sweep = sweeps.build(parsed, settings.sweep, settings.grid)
  if settings.dry_run:
    console.show(_plan(sweep))
    if sweep.search.sampler == sweeps.GRID:
      for number, values in enumerate(sweep.grid()):
        console.show(f'trial {number}: {sweeps.values_text(values)}')
    return main_lib.DONE
  view = console.Console()
  with output_tree.SweepFolder(sweep.folder) as folder:
    folder.open(sweep.definition())
    return _sweep(sweep, folder, settings, view)


def train_command() -> list[str]:
  """Returns the command that trains, started as this program was."""
  script = os.path.abspath(sys.argv[0])
  # An installed package has no programs/, and one command for all.
  folder, name = os.path.split(script)
  if name == 'sweep.py':
    return [sys.executable, os.path.join(folder, 'train.py')]
  return [sys.executable, script, 'train']


def _sweep(
  sweep: sweeps.Sweep,
  folder: output_tree.SweepFolder,
  settings: SweepHparams,
  view: console.Console,
) -> int:
  """Makes the remaining trials, and returns the exit code."""
  # Optuna is slow to import.
  # pylint: disable=import-outside-toplevel
  from tff_fssl.program.loop import sweep as sweep_lib
  from tff_fssl.program.storage import trials as trials_lib

  view.say(_plan(sweep))
  trials = trials_lib.Trials(folder.study, sweep, settings.jobs)
  stop = training_types.StopRequest()
  sweeper = sweep_lib.Sweeper(
    sweep,
    folder,
    trials,
    sweep_lib.Settings(
      train_command(),
      main_lib.NOT_FINITE,
      settings.jobs,
      settings.retries,
      _threads(sweep, settings),
    ),
    stop,
    view.say,
  )
  again = 'To continue, give the same command again.'
  try:
    asyncio.run(main_lib.run_until_stopped(sweeper.run(), stop, view.say))
  except asyncio.CancelledError:
    view.say(f'Stopped at once. {again}')
    return main_lib.exit_code(stop.signal)
  if stop.signal is not None:
    view.say(f'Stopped and saved. {again}')
    return main_lib.exit_code(stop.signal)
  return _close(sweep, folder, trials, view)


def _threads(sweep: sweeps.Sweep, settings: SweepHparams) -> int:
  """Returns the cores of a run if trials share them, else 0."""
  has_effect = 'intra_op_threads' in sweep.config.flags()
  if settings.jobs == 1 or sweep.base.is_set('intra_op_threads'):
    return 0
  # A container or `taskset` may allow fewer cores than there are.
  cores = len(os.sched_getaffinity(0))
  return max(1, cores // settings.jobs) if has_effect else 0


def _plan(sweep: sweeps.Sweep) -> str:
  """Describes the trials and their runs."""
  search, run = sweep.search, sweep.config.run
  num_runs = sweep.num_trials * len(sweep.seeds)
  how = search.sampler
  if search.sampler == sweeps.GRID:
    how += ', every combination'
  if search.pruning != sweeps.NO_PRUNING:
    how += (
      f', pruning by the {search.pruning} of {search.pruning_trials} trials or'
      ' more'
    )
  varies = any(space.name == 'total_rounds' for space in sweep.spaces)
  rounds = '' if varies else f', of {run.total_rounds:,} rounds each'
  rows = {
    **{f'--{space.name}': space.text for space in sweep.spaces},
    'search': how,
    'runs': f'{num_runs:,}: {sweep.num_trials:,} trials with'
    f' {len(sweep.seeds)} seed{"s" * (len(sweep.seeds) > 1)}'
    f' ({search.seeds}){rounds}',
    'chosen by': 'the mean of the best validation accuracy of each run, on'
    f' {run.num_validation:,} examples',
    'output': sweep.folder,
  }
  return console.table(rows)


def _close(
  sweep: sweeps.Sweep,
  folder: output_tree.SweepFolder,
  trials: 'trials_lib.Trials',
  view: console.Console,
) -> int:
  """Writes and shows the results, and returns the exit code."""
  # pylint: disable=import-outside-toplevel
  from tff_fssl.program.reporting import sweep_results as results
  from tff_fssl.program.storage import trials as trials_lib

  records = trials.records()
  names = [space.name for space in sweep.spaces]
  view.say('')
  console.show(results.table(records, names), flush=True)
  best, given = results.winner(records), results.base(records, sweep)
  if best is None:
    raise UsageError(
      f'no trial is complete: trial {records[0].number}: {records[0].note}'
    )
  results.draw(folder.picture, trials.study, len(names))
  results.write_winner(folder, best, sweep, len(results.complete(records)))
  shown = {'best, as given' if given is best else 'best': best}
  if given and given is not best:
    shown['as given'] = given
  rows = {
    label: f'trial {record.number}: test accuracy'
    f' {results.test_text(folder, record)}, validation'
    f' {results.score_text(record)} %'
    for label, record in shown.items()
  }
  rows |= {
    'table': folder.trials_csv,
    'picture': folder.picture,
    'flagfile': folder.winner,
  }
  view.say('')
  view.say(console.table(rows))
  failed = [r for r in records if r.state == trials_lib.FAILED]
  for record in failed:
    main_lib.complain(f'trial {record.number}: {record.note}')
  if failed:
    view.say('The same command tries the failed trials again.')
  return main_lib.FAILED if failed else main_lib.DONE
