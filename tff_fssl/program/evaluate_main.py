"""`programs/evaluate.py`: accuracy of a run's checkpoint, or of a model."""

from collections.abc import Mapping, Sequence
import dataclasses
import os
from typing import Any

from tff_fssl import hparams
from tff_fssl.hparams import UsageError
from tff_fssl.hparams import hparam
from tff_fssl.program import checkpoint
from tff_fssl.program import config as config_lib
from tff_fssl.program import console
from tff_fssl.program import flags
from tff_fssl.program import main as main_lib
from tff_fssl.program import output_tree
from tff_fssl.program import warm_start

_USAGE = 'programs/evaluate.py RUN|MODEL [--FLAG=VALUE ...]'
_ABOUT = (
  'Evaluates a checkpoint of a run (RUN is the --output_dir of'
  ' programs/train.py) or an exported model (its folder model/, or a copy of'
  ' it), on the data set that it was trained for.'
)
_LATEST = 'latest'


@dataclasses.dataclass(frozen=True)
class EvaluateHparams:
  """Flags of `programs/evaluate.py`."""

  examples: str = hparam(
    'test', 'On what: the test set, or the run\'s validation examples.',
    choices=('test', 'validation'),
  )  # fmt: skip
  round: str = hparam(
    'latest',
    'Which checkpoint of a run: latest, the last one that is whole, or the'
    ' number of its round.',
  )
  data_dir: str = hparam(
    '', 'Folder with the TFDS data sets; empty: where the run had them.'
  )
  batch_size: int = hparam(256, 'Images at a time.', minimum=1)
  verbose: bool = hparam(False, "Whether TensorFlow's messages are shown.")

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
  groups = [flags.Group('Flags', EvaluateHparams)]
  if flags.wants_help(argv):
    print(flags.help_text(_USAGE, _ABOUT, groups))
    return main_lib.DONE
  parsed = flags.parse(argv, groups, allow_positional=True)
  settings = parsed.build(EvaluateHparams)
  if len(parsed.positional) != 1:
    raise UsageError(
      f'{len(parsed.positional)} folders were given; give one: a run or an'
      ' exported model'
    )
  folder = parsed.positional[0].rstrip('/')
  is_run = os.path.exists(output_tree.OutputTree(folder).flags_file)
  is_model = os.path.exists(os.path.join(folder, 'saved_model.pb'))
  if not is_run and not is_model:
    raise UsageError(
      f'{folder}: is neither a run (a folder with {output_tree.FLAGS}) nor an'
      ' exported model (with saved_model.pb)'
    )
  if is_model and parsed.is_set('round'):
    raise UsageError('--round: an exported model is of one round; leave it out')
  main_lib.quiet(settings.verbose)
  evaluate = _evaluate_run if is_run else _evaluate_model
  print(console.table(evaluate(folder, settings)))
  return main_lib.DONE


def _evaluate_run(folder: str, settings: EvaluateHparams) -> dict[str, str]:
  """Evaluates a checkpoint."""
  tree = output_tree.OutputTree(folder)
  config = _config([f'--flagfile={tree.flags_file}'], settings)
  round_num, leaves = _read_checkpoint(tree.checkpoints, settings)

  # pylint: disable=import-outside-toplevel
  from tff_fssl.models import evaluate
  from tff_fssl.program import experiment

  weights = warm_start.from_leaves(leaves)
  task = experiment.build_task(config)
  held = task.examples(settings.examples)
  evaluate_fn = evaluate.build_evaluate_fn(
    task.model_fn, task.views, batch_size=settings.batch_size
  )
  result = evaluate_fn(weights, held.x, held.y)
  return _rows(f'{folder}, round {round_num}', settings, len(held), result)


def _evaluate_model(folder: str, settings: EvaluateHparams) -> dict[str, str]:
  """Evaluates an exported model through its serving signature."""
  # pylint: disable=import-outside-toplevel
  import numpy as np
  import tensorflow as tf

  from tff_fssl.program import experiment
  from tff_fssl.program import export

  about = export.read_about(folder)
  values = {name: flags.to_text(v) for name, v in about['flags'].items()}
  config = _config([f'--{n}={v}' for n, v in values.items()], settings)
  held = experiment.build_task(config).examples(settings.examples)
  predict = tf.saved_model.load(folder).signatures['serving_default']
  probs = np.concatenate(
    [
      predict(images=tf.constant(held.x[i : i + settings.batch_size]))[
        'probabilities'
      ].numpy()
      for i in range(0, len(held), settings.batch_size)
    ]
  )
  of_label = probs[np.arange(len(held)), held.y].astype(np.float64)
  result = {
    'accuracy': float(np.mean(np.argmax(probs, -1) == held.y)),
    'loss': float(-np.mean(np.log(np.maximum(of_label, 1e-30)))),
  }
  name = f'{folder}, of round {about["round"]}'
  return _rows(name, settings, len(held), result)


def _config(
  arguments: list[str], settings: EvaluateHparams
) -> config_lib.Config:
  """The configuration of a run, with the data of this machine."""
  if settings.data_dir:
    arguments = [*arguments, f'--data_dir={settings.data_dir}']
  config = config_lib.from_command_line(arguments)
  if settings.examples == 'validation' and not config.run.num_validation:
    raise UsageError(
      '--examples=validation: the run kept no validation examples'
      ' (--num_validation=0); test is allowed'
    )
  return config


def _read_checkpoint(
  folder: str, settings: EvaluateHparams
) -> tuple[int, Mapping[str, Any]]:
  """The asked for, or the latest whole, checkpoint."""
  versions = checkpoint.versions(folder)
  if settings.round != _LATEST:
    versions = [v for v in versions if str(v) == settings.round]
    if not versions:
      there = ', '.join(map(str, checkpoint.versions(folder))) or 'none'
      raise UsageError(
        f'--round={settings.round}: there is no checkpoint of it in {folder};'
        f' there are: {there}'
      )
  try:
    return checkpoint.read_latest(folder, versions)
  except checkpoint.CheckpointError as error:
    raise UsageError(f'{folder}: no checkpoint can be read: {error}') from error


def _rows(
  name: str,
  settings: EvaluateHparams,
  count: int,
  result: Mapping[str, float],
) -> dict[str, str]:
  return {
    'model': name,
    'examples': f'{count} {settings.examples}',
    'accuracy': f'{result["accuracy"]:.4f}',
    'loss': f'{result["loss"]:.4f}',
  }
