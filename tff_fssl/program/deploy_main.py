"""`programs/deploy.py`: writes an algorithm as an app of a federation."""

import dataclasses
import os

from tff_fssl import hparams
from tff_fssl.hparams import UsageError
from tff_fssl.hparams import hparam
from tff_fssl.program import config as config_lib
from tff_fssl.program import console
from tff_fssl.program import evaluation
from tff_fssl.program import flags
from tff_fssl.program import main as main_lib
from tff_fssl.program import output_tree

_USAGE = 'programs/deploy.py [RUN] --output_dir=FOLDER [--FLAG=VALUE ...]'
_ABOUT = (
  'Writes the algorithm of a run, or of the flags of programs/train.py, as an'
  ' app of Flower (docs/federation.md): clients need TensorFlow alone, and the'
  ' server no TensorFlow Federated. With RUN (the --output_dir of'
  ' programs/train.py), the federation starts from its latest checkpoint; of'
  ' its flags only --total_rounds and other neutral flags may differ. Without,'
  ' it starts as a new run does. The data set that the flags name gives the'
  ' classes, the shape and the statistics of examples, the test set, and the'
  ' labels of the server; where the server has no images,'
  ' --dataset=classes:NAME,NAME gives the classes alone.'
)


@dataclasses.dataclass(frozen=True)
class DeployHparams:
  """Flags of `programs/deploy.py`."""

  to: str = hparam(
    'flower',
    'The framework that the app is for.',
    choices=('flower',),
  )  # fmt: skip
  run_model_file: bool = hparam(
    False,
    "Run the Python file that a run's --model=FILE.py:function names. Only for"
    ' runs of your own: the flags that name it come with the folder.',
  )

  def __post_init__(self):
    hparams.validate(self)


@main_lib.command(
  _USAGE,
  _ABOUT,
  DeployHparams,
  more=config_lib.groups,
  shown=list,
  most=1,
)
def deploy_main(settings: DeployHparams, parsed: flags.ParsedFlags) -> None:
  """Writes an algorithm as an app of a federation."""
  output_dir = parsed.values['output_dir']
  if 'output_dir' not in parsed.command_line or not output_dir:
    raise UsageError('--output_dir: give the folder to write, new or empty')
  run = None
  if parsed.positional:
    run = output_tree.OutputTree(os.path.normpath(parsed.positional[0]))
    config = _read_run(run, settings, parsed)
  else:
    config = config_lib.build_config(parsed)
  main_lib.quiet(config.run.verbose)
  # It imports TensorFlow. pylint: disable=import-outside-toplevel
  from tff_fssl.program.deploy import flower

  written = flower.write_app(config, output_dir, run=run)
  rows = {
    'written': output_dir,
    'messages in a round': f'{written.num_phases} to each client,'
    f' {written.sent_bytes / 1e6:.1f} MB',
    'examples of a client': f'at most {written.max_examples:,}'
    ' (--max_client_examples)',
    'graphs': f'{written.app_bytes / 1e6:.1f} MB',
    'next': os.path.join(output_dir, 'README.md'),
  }
  console.show(console.table(rows))
  if written.has_clients:
    main_lib.warn(
      "the clients' graphs are too large for a Flower app (10 MB): copy the"
      f' folder {os.path.join(output_dir, "clients")} to each client, as'
      ' README.md says'
    )


def _read_run(
  run: output_tree.OutputTree,
  settings: DeployHparams,
  parsed: flags.ParsedFlags,
) -> config_lib.Config:
  """Reads the configuration of a run, with the flags that were typed."""
  if not os.path.lexists(run.flags_file):
    raise UsageError(
      f'{run.path}: is not a run (there is no {output_tree.FLAGS}); give the'
      ' --output_dir of programs/train.py'
    )
  own = {field.name for field in hparams.documented_fields(DeployHparams)}
  typed = {
    name: parsed.values[name]
    for name in sorted({*parsed.command_line, *parsed.files} - own)
  }
  config = evaluation.read_run_config(
    run,
    evaluation.EvaluateHparams(run_model_file=settings.run_model_file),
    flags.arguments(typed),
  )
  old = run.read_flags()
  new = {n: hparams.format_value(v) for n, v in config.flags().items()}
  refused, _ = config_lib.differences(old, new)
  if refused:
    raise UsageError(
      f'{run.path}: these flags are not those of the run:'
      f' {config_lib.describe_differences(refused, old, new)}; omit them'
    )
  return config
