"""`programs/plot.py`: draws curves of one or several runs as a PNG."""

import dataclasses
import os

from tff_fssl import durable
from tff_fssl import hparams
from tff_fssl.hparams import hparam
from tff_fssl.program import console
from tff_fssl.program import flags
from tff_fssl.program import main as main_lib
from tff_fssl.program import output_tree
from tff_fssl.program import plots
from tff_fssl.program import runs as runs_lib

_USAGE = (
  'programs/plot.py RUN [RUN ...] [--x=rounds|bytes|hours] [--diagrams=WORDS]'
  ' [--output=FILE]'
)
_ABOUT = (
  'Draws the recorded accuracy, pseudo-labels, thresholds, weights and losses'
  ' over rounds. RUN is the --output_dir of programs/train.py. Runs that differ'
  ' only in their seeds become one curve: their mean, with a band of one'
  ' standard deviation. A path that is not a run, or a run without a finished'
  ' round, is skipped with a warning.'
)


@dataclasses.dataclass(frozen=True)
class PlotHparams:
  """Flags of `programs/plot.py`."""

  output: str = hparam(
    '',
    'The PNG file. If empty: report/curves.png in the run; for several runs,'
    ' curves.png in the folder that holds them.',
  )
  diagrams: str = hparam(
    '',
    'Draw only the diagrams whose titles have one of these words, in any case,'
    ' separated by commas: test accuracy,loss. Empty: all.',
  )
  x: str = hparam(
    'rounds',
    'The horizontal axis. rounds; bytes: sent and received by all clients so'
    ' far; hours: taken by the rounds so far.',
    choices=('rounds', 'bytes', 'hours'),
  )

  def __post_init__(self):
    hparams.validate(self)


@main_lib.command(_USAGE, _ABOUT, PlotHparams, missing=runs_lib.NO_RUN)
def plot_main(settings: PlotHparams, parsed: flags.ParsedFlags) -> None:
  """Draws the curves of runs."""
  paths = [os.path.normpath(path) for path in parsed.positional]
  runs = runs_lib.read_all(paths, main_lib.warn)
  paths = [run.path for run in runs]
  output = settings.output or output_tree.default_report(paths, 'curves.png')
  diagrams = [word.strip() for word in settings.diagrams.split(',')]
  with durable.storage_errors('--output'):
    durable.make_folder(os.path.dirname(os.path.abspath(output)))
    titles = plots.plot(
      runs_lib.group_runs(runs),
      output,
      settings.x,
      list(filter(None, diagrams)),
    )
  console.show(f'{output}: {", ".join(titles)}')
