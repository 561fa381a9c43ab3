"""`programs/evaluate.py`: accuracy of checkpoints or of exported models."""

from collections.abc import Mapping, Sequence
import dataclasses
import os
import re
from typing import Any

from tff_fssl import hparams
from tff_fssl.data import names as data_names
from tff_fssl.hparams import UsageError
from tff_fssl.hparams import hparam
from tff_fssl.models import names as model_names
from tff_fssl.program import console
from tff_fssl.program.commands import main as main_lib
from tff_fssl.program.configuration import config as config_lib
from tff_fssl.program.configuration import flags
from tff_fssl.program.configuration import usage
from tff_fssl.program.reporting import runs
from tff_fssl.program.storage import checkpoint
from tff_fssl.program.storage import exported
from tff_fssl.program.storage import output_tree
from tff_fssl.program.storage import ownership
from tff_fssl.program.storage import summary
from tff_fssl.program.storage import warm_start

_USAGE = 'programs/evaluate.py RUN|MODEL [RUN|MODEL ...] [--FLAG=VALUE ...]'
_ABOUT = (
  'Evaluates checkpoints of runs (RUN is the --output_dir of'
  ' programs/train.py) or exported models (MODEL is a folder model/ or'
  ' model_best/, or a copy of it), on the data set that they were trained for.'
  ' A path that is neither, or a run without a checkpoint, is left out with a'
  ' warning. Only numbers are read from these files: they are safe to open.'
)
_LAST, _BEST = 'last', 'best'


@dataclasses.dataclass(frozen=True)
class EvaluateHparams:
  """Flags of `programs/evaluate.py`."""

  examples: str = hparam(
    'test', 'Evaluate on the test set, or on the run\'s validation examples.',
    choices=('test', 'validation'),
  )  # fmt: skip
  round: str = hparam(
    _LAST,
    'Which checkpoint of a run is evaluated. last: the last complete one; best:'
    ' the one with the best validation accuracy; or the number of a round.',
  )
  data_dir: str = hparam(
    '', "The data's folder, as for train; if empty, the run's own setting."
  )
  cache_dir: str = hparam(
    '', "Folder of decoded images; if empty, the run's own setting."
  )
  batch_size: int = hparam(
    256, 'Number of images in a batch.', minimum=1, maximum=2**20
  )
  run_model_file: bool = hparam(
    False,
    "Run the Python file that a run's --model=FILE.py:function names. Only for"
    ' runs of your own: the flags that name it come with the folder.',
  )
  verbose: bool = hparam(False, "Show TensorFlow's messages.")

  def __post_init__(self):
    hparams.validate(self)


def evaluate_main(argv: Sequence[str]) -> int:
  """The program.

  Args:
    argv: Its arguments.

  Returns:
    The exit code.

  Raises:
    UsageError: If the user has to put something right.
  """
  groups = [flags.Group(EvaluateHparams, 'Flags')]
  if usage.wants_help(argv):
    print(usage.help_text(_USAGE, _ABOUT, groups))
    return main_lib.DONE
  parsed = flags.parse(argv, groups, allow_positional=True)
  settings = parsed.build(EvaluateHparams)
  if not parsed.positional:
    raise UsageError(
      'no folder was given; give one, a run or an exported model'
    )
  _check_round(settings.round)
  main_lib.quiet(settings.verbose)
  num_done, left_out = 0, []
  for path in parsed.positional:
    folder = os.path.normpath(path)
    try:
      rows = _evaluate(folder, settings, parsed.is_set('round'))
    except runs.NotARunError as error:
      left_out.append(str(error))
      continue
    print('\n' * bool(num_done) + console.table(rows), flush=True)
    num_done += 1
  if not num_done:
    more = f' (and {len(left_out) - 1} more)' if len(left_out) > 1 else ''
    raise UsageError(f'{left_out[0]}{more}')
  for reason in left_out:
    main_lib.warn(f'left out: {reason}')
  return main_lib.DONE


def _check_round(text: str) -> None:
  if text not in (_LAST, _BEST) and not re.fullmatch(
    r'0|-?[1-9]\d{0,8}', text, re.ASCII
  ):
    raise UsageError(
      f'--round={text}: allowed are {_LAST}, {_BEST} and the number of a round'
    )


def _evaluate(
  folder: str, settings: EvaluateHparams, has_round: bool
) -> dict[str, str]:
  """Evaluates a run or a model; raises `NotARunError` if it is neither."""
  if os.path.lexists(output_tree.OutputTree(folder).flags_file):
    return _evaluate_run(folder, settings)
  if not os.path.lexists(os.path.join(folder, exported.MANIFEST)):
    raise runs.NotARunError(
      f'{folder}: is neither a run (a folder with {output_tree.FLAGS}) nor an'
      f' exported model (with {exported.MANIFEST})'
    )
  if has_round:
    raise UsageError(
      '--round: an exported model has one round only; leave the flag out'
    )
  return _evaluate_model(folder, settings)


def _evaluate_run(folder: str, settings: EvaluateHparams) -> dict[str, str]:
  """Evaluates a checkpoint."""
  tree = output_tree.OutputTree(folder)
  arguments = [f'--flagfile={tree.flags_file}']
  if tree.read_flags().get('partition_file'):
    # The file may have changed; the run has a copy.
    arguments.append(f'--partition_file={tree.partition_json}')
  config = _config(folder, arguments, settings)
  round_num, leaves = _read_checkpoint(tree, config, settings)

  # pylint: disable=import-outside-toplevel
  from tff_fssl.program.loop import experiment

  frozen = warm_start.read_frozen(tree, ownership.of_config(config))
  task = experiment.build_task(config, frozen)
  path = checkpoint.path_of(tree.checkpoints, round_num)
  try:
    checkpoint.check_owner(
      path,
      ownership.with_model(ownership.of_config(config), task.model_fn()),
    )
  except checkpoint.CheckpointError as error:
    raise UsageError(f'{path}: {error}') from error
  return _evaluate_model_of(
    f'{folder}, round {round_num}',
    task,
    warm_start.from_leaves(leaves),
    experiment.prediction_of(config),
    settings,
    warm_start.table_from_leaves(leaves),
  )


def _evaluate_model(folder: str, settings: EvaluateHparams) -> dict[str, str]:
  """Evaluates an exported model from its Keras file, without running code."""
  problem = exported.problem(folder)
  if problem:
    raise UsageError(f'{folder}: is not a whole exported model ({problem})')
  about = exported.read_about(folder)
  given, round_num = about.get('flags'), about.get('round')
  if not isinstance(given, dict):
    raise UsageError(f'{folder}: {exported.ABOUT_FILE} does not have the flags')
  values = {name: hparams.to_text(v) for name, v in given.items()}
  # Test examples are the same in any partition.
  if values.pop('partition_file', '') and settings.examples != 'test':
    raise UsageError(
      f'--examples={settings.examples}: the partition of {folder} was taken'
      ' from a file; evaluate the run, which has a copy of it'
    )
  config = _config(folder, [f'--{n}={v}' for n, v in values.items()], settings)

  # pylint: disable=import-outside-toplevel
  from tff_fssl.models import server_model
  from tff_fssl.program.loop import experiment

  task = experiment.build_task(config)
  model_fn = experiment.build_exported_fn(config)
  task = dataclasses.replace(task, model_fn=model_fn)
  loaded = warm_start.load(warm_start.find(folder), model_fn())
  model = server_model.ServerModel(*loaded.weights)
  name = f'{folder}, of round {round_num}'
  # What is exported predicts by its network alone.
  return _evaluate_model_of(name, task, model, None, settings)


def _evaluate_model_of(
  name: str,
  task: Any,
  model: Any,
  prediction: Any,
  settings: EvaluateHparams,
  table: Any = (),
) -> dict[str, str]:
  """Evaluates a `ServerModel`; by its network alone, without a prediction."""
  # pylint: disable=import-outside-toplevel
  from tff_fssl.models import evaluate
  from tff_fssl.models import server_model

  held = task.examples(settings.examples)
  evaluate_fn = evaluate.build_evaluate_fn(
    task.model_fn,
    task.views,
    prediction=prediction or server_model.Prediction(),
    batch_size=settings.batch_size,
  )
  if prediction is None or not prediction.needs_table:
    table = ()
  result = evaluate_fn(model, held.x, held.y, table)
  rows = _rows(name, settings, len(held), result)
  if task.data.train.kind != data_names.IMAGES:
    rows['data'] = task.data.notes
  return rows


def _config(
  folder: str, arguments: list[str], settings: EvaluateHparams
) -> config_lib.Config:
  """The configuration of the run or model in a folder, by its own flags.

  The data are in this machine's folder.
  """
  for name in ('data_dir', 'cache_dir'):
    if here := getattr(settings, name):
      arguments = [*arguments, f'--{name}={here}']
  parsed = flags.parse(arguments, config_lib.groups())
  # Nobody typed these flags: some may have no effect.
  config = config_lib.from_flags(
    dataclasses.replace(
      parsed,
      command_line=frozenset(),
      files={**dict.fromkeys(parsed.command_line, folder), **parsed.files},
    )
  )
  model = config.run.model
  if model_names.file_and_function(model) and not settings.run_model_file:
    raise UsageError(
      f'{folder}: its --model={model} is a Python file, which has to be run; if'
      ' you trust it, give --run_model_file'
    )
  if settings.examples == 'validation' and not config.run.num_validation:
    raise UsageError(
      '--examples=validation: the run kept no validation examples'
      ' (--num_validation=0); test is allowed'
    )
  return config


def _read_checkpoint(
  tree: output_tree.OutputTree,
  config: config_lib.Config,
  settings: EvaluateHparams,
) -> tuple[int, Mapping[str, Any]]:
  """Reads the requested checkpoint, or the last complete one, of this run."""
  there = checkpoint.versions(tree.checkpoints)
  if not there:
    raise runs.NotARunError(f'{tree.path}: this run has no checkpoint yet')
  wanted = there
  if settings.round != _LAST:
    if settings.round == _BEST:
      round_num = summary.best_round_num(tree.eval_csv)
      if round_num is None:
        raise UsageError(
          f'--round={_BEST}: {tree.path} has no evaluation on validation data'
          ' (--num_validation)'
        )
    else:
      round_num = int(settings.round)
    if round_num not in there:
      of_round = f' (round {round_num})' if settings.round == _BEST else ''
      raise UsageError(
        f'--round={settings.round}{of_round}: there is no checkpoint of it in'
        f' {tree.checkpoints}; there are: {", ".join(map(str, there))}'
      )
    wanted = [round_num]
  try:
    return checkpoint.read_latest(
      tree.checkpoints, ownership.of_config(config), wanted
    )
  except checkpoint.CheckpointError as error:
    raise UsageError(
      f'{tree.path}: no checkpoint can be evaluated: {error}'
    ) from error


def _rows(
  name: str,
  settings: EvaluateHparams,
  count: int,
  result: Mapping[str, float],
) -> dict[str, str]:
  return {
    'model': name,
    'examples': f'{count} {settings.examples}',
    # `teacher/accuracy` is that of a further way to predict.
    **{
      re.sub('[/_]', ' ', name): f'{value:.4f}'
      for name, value in result.items()
    },
  }
