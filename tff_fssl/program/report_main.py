"""`programs/report.py`: reports on runs, as one HTML page."""

import dataclasses
import os
from typing import Any

from tff_fssl import durable
from tff_fssl import hparams
from tff_fssl.hparams import UsageError
from tff_fssl.hparams import borrow
from tff_fssl.hparams import hparam
from tff_fssl.program import console
from tff_fssl.program import evaluation
from tff_fssl.program import flags
from tff_fssl.program import main as main_lib
from tff_fssl.program import output_tree
from tff_fssl.program import report
from tff_fssl.program import runs as runs_lib

_USAGE = 'programs/report.py RUN [RUN ...] [--output=FILE] [--noevaluate]'
_ABOUT = (
  'Writes one HTML page, which needs no network: signs of trouble, tables over'
  ' seeds with the tests of programs/compare.py, curves, partitions, confusion'
  ' matrices, calibration, accuracies of clients, pseudo-labelled examples,'
  ' costs, commands. RUN is the --output_dir of programs/train.py. Runs that'
  ' differ only in their seeds form a group; models and partitions are those of'
  " each group's first run. A path that is not a run, or a run without a"
  ' finished round, is skipped with a warning.'
)


EvaluateHparams = evaluation.EvaluateHparams


def _evaluates(settings: 'ReportHparams') -> bool:
  return settings.evaluate


@dataclasses.dataclass(frozen=True)
class ReportHparams:
  """Flags of `programs/report.py`."""

  output: str = hparam(
    '',
    'The HTML file. If empty: report/report.html in the run; for several runs,'
    ' report.html in the folder that holds them.',
  )
  evaluate: bool = hparam(
    True,
    'Also inspect data and models, which takes some seconds for each group.'
    ' false: use the files of figures only.',
  )
  data_dir: str = borrow(EvaluateHparams, 'data_dir', _evaluates)
  cache_dir: str = borrow(EvaluateHparams, 'cache_dir', _evaluates)
  run_model_file: bool = borrow(EvaluateHparams, 'run_model_file', _evaluates)
  verbose: bool = borrow(EvaluateHparams, 'verbose', _evaluates)

  def __post_init__(self):
    hparams.validate(self)


@main_lib.command(_USAGE, _ABOUT, ReportHparams, missing=runs_lib.NO_RUN)
def report_main(settings: ReportHparams, parsed: flags.ParsedFlags) -> None:
  """Reports on runs, as one HTML page."""
  main_lib.check_output('output', settings.output)
  paths = [os.path.normpath(path) for path in parsed.positional]
  run_groups = runs_lib.group_runs(runs_lib.read_all(paths, main_lib.warn))
  models = []
  if settings.evaluate:
    main_lib.quiet(settings.verbose)
    # The page shows no more, and each takes seconds.
    shown = run_groups[: report.MAX_PICTURES]
    models = [_look_over(group.runs[0].path, settings) for group in shown]
  content = report.page(run_groups, models).encode()
  members = [run.path for group in run_groups for run in group.runs]
  output = settings.output or output_tree.default_report(members, 'report.html')
  with durable.storage_errors('--output'):
    durable.make_folder(os.path.dirname(os.path.abspath(output)))
    durable.write_file(output, [content])
  console.show(output)


def _look_over(path: str, settings: ReportHparams) -> Any:
  """Examines the last model of a run, or says why it cannot."""
  try:
    loaded = evaluation.load_run(
      path,
      hparams.build_from(settings, EvaluateHparams),
      'report',
    )
    from tff_fssl.program import inspection  # pylint: disable=C0415

    figures = inspection.look_over(
      loaded.name,
      loaded.task,
      loaded.model,
      loaded.prediction,
      output_tree.OutputTree(path).partition_json,
      loaded.changed,
    )
  except UsageError as error:
    main_lib.warn(f'not looked over: {error}')
    return report.Model(path, None, str(error))
  return report.Model(path, figures)
