"""Tells whether a run is finished, and whether it can be. TensorFlow-free."""

import contextlib

from tff_fssl.hparams import UsageError
from tff_fssl.program.configuration import config as config_lib
from tff_fssl.program.storage import checkpoint
from tff_fssl.program.storage import csv_table
from tff_fssl.program.storage import exported
from tff_fssl.program.storage import output_tree
from tff_fssl.program.storage import ownership
from tff_fssl.program.storage import summary


def is_finished(
  config: config_lib.Config, tree: output_tree.OutputTree
) -> bool:
  """Whether all rounds are saved and their models completely exported.

  Where each client trains alone, there is no model to export.
  """
  last = config.run.total_rounds
  if checkpoint.versions(tree.checkpoints)[-1:] != [last]:
    return False
  path = checkpoint.path_of(tree.checkpoints, last)
  try:
    checkpoint.read_own(path, ownership.of_config(config))
  except checkpoint.CheckpointError:
    return False
  models = {} if config.trains_alone else {tree.model: last}
  best = summary.best_round_num(tree.eval_csv)
  if best is not None and models:
    models[tree.model_best] = best
  return summary.summarize(tree).get('rounds') == last and not any(
    exported.problem(folder, of_round) for folder, of_round in models.items()
  )


def check_outputs(
  config: config_lib.Config, tree: output_tree.OutputTree
) -> None:
  """Refuses, before anything is loaded, what would be refused at the end.

  Raises:
    UsageError: If a table was changed, a model's folder holds other files, or
      the last checkpoint belongs to another run or to a round after the last.
  """
  for path in (tree.train_csv, tree.eval_csv, tree.timing_csv):
    csv_table.read(path)
  for folder in (tree.model, tree.model_best):
    exported.check_replaceable(folder)
  later = checkpoint.versions(tree.checkpoints)[-1:]
  for version in later:
    path = checkpoint.path_of(tree.checkpoints, version)
    with contextlib.suppress(checkpoint.DamagedError):
      try:
        if checkpoint.read_header(path).owner != ownership.NOBODY:
          checkpoint.check_owner(path, ownership.of_config(config))
      except checkpoint.ForeignError as error:
        raise UsageError(
          f'{path} cannot be used: {error}. Move it away, or choose another'
          ' --output_dir'
        ) from error
  if later and later[0] > config.run.total_rounds:
    raise UsageError(
      f'{checkpoint.path_of(tree.checkpoints, later[0])}: its round is after'
      f' --total_rounds={config.run.total_rounds}; give'
      f' --total_rounds={later[0]} or more, or move the file away'
    )
