"""`programs/compare.py`: compares the results of several runs, as tables."""

import dataclasses
import os

from tff_fssl import hparams
from tff_fssl.hparams import UsageError
from tff_fssl.hparams import hparam
from tff_fssl.program import console
from tff_fssl.program.commands import main as main_lib
from tff_fssl.program.configuration import flags
from tff_fssl.program.reporting import compare
from tff_fssl.program.reporting import runs as runs_lib

_USAGE = 'programs/compare.py RUN RUN [RUN ...] [--last_round=N]'
_ABOUT = (
  'Compares runs at equal budgets, as Markdown tables. Runs that differ only in'
  ' their seeds form a group, shown by mean and sample standard deviation:'
  ' accuracy, pseudo-labels, seconds, bytes and compute (the most, for a client'
  " of mean size). The test accuracy of the first run's group is compared with"
  " each other group by Welch's t-test and by the paired t-test. RUN is the"
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

  def __post_init__(self):
    hparams.validate(self)


@main_lib.command(_USAGE, _ABOUT, CompareHparams, missing=runs_lib.NO_RUN)
def compare_main(settings: CompareHparams, parsed: flags.ParsedFlags) -> None:
  """Compares runs over seeds, as tables."""
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
  console.show(compare.markdown(compare.tables(run_groups, last_round)))
