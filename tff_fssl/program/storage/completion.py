"""Tells whether a run is finished, and whether it can finish."""

import contextlib
import os

from tff_fssl.hparams import UsageError
from tff_fssl.program.configuration import config as config_lib
from tff_fssl.program.storage import checkpoint
from tff_fssl.program.storage import csv_table
from tff_fssl.program.storage import exported
from tff_fssl.program.storage import output_tree
from tff_fssl.program.storage import summary


def is_finished(
  config: config_lib.Config, tree: output_tree.OutputTree
) -> bool:
  """Returns whether all rounds are saved, and all models exported.

  Where each client trains alone, there is no model to export.
  """
  last = config.run.total_rounds
  # The cheap test first: most runs that are started are not finished.
  if checkpoint.versions(tree.checkpoints)[-1:] != [last]:
    return False
  path = checkpoint.path_of(tree.checkpoints, last)
  try:
    checkpoint.read_own(path, checkpoint.run_owner(config))
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
  """Refuses, before loading, files that would be refused at the end.

  Raises:
    UsageError: If a table was changed, a model's folder holds other files,
      checkpoints are gone, or the last one belongs to another run or to a round
      after the last.
  """
  saved = max(checkpoint.versions(tree.checkpoints), default=None)
  for path in (tree.train_csv, tree.timing_csv):
    csv_table.check(path, saved, every_round=True)
  csv_table.check(tree.eval_csv, saved, every_round=False)
  _check_not_lost(tree)
  for folder in (tree.model, tree.model_best):
    exported.check_replaceable(folder)
  later = checkpoint.versions(tree.checkpoints)[-1:]
  for version in later:
    path = checkpoint.path_of(tree.checkpoints, version)
    with contextlib.suppress(checkpoint.DamagedError):
      try:
        # A program that uses the library without flags writes such ones.
        if checkpoint.read_header(path).owner != checkpoint.NOBODY:
          checkpoint.check_owner(path, checkpoint.run_owner(config))
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


def _check_not_lost(tree: output_tree.OutputTree) -> None:
  """Refuses to repeat rounds, and lose their rows, that had been saved.

  A kill can leave rows without a checkpoint, but at most up to the next one.

  Raises:
    UsageError: If there was a later checkpoint than there is now.
  """
  rounds = [
    int(row[csv_table.KEY]) for row in csv_table.read(tree.train_csv)[1]
  ]
  if not rounds:
    return
  kept = max(
    checkpoint.versions(tree.checkpoints, set_aside=True), default=None
  )
  # The last round may have been killed before it was saved.
  later = {n for n in rounds[:-1] if kept is None or n > kept}
  every = int(tree.read_flags().get('rounds_per_checkpoint', 1))
  # Rows after the last checkpoint are normal, unless one was due.
  was_saved = {n for n in later if n % max(every, 1) == 0}
  evaluated = csv_table.read(tree.eval_csv)[1]
  best = summary.best_round(
    [row for row in evaluated if int(row[csv_table.KEY]) < rounds[-1]]
  )
  if best is not None:
    was_saved |= later & {int(best[csv_table.KEY])}
  if was_saved or (kept is None and os.path.lexists(tree.summary_json)):
    there = 'none is' if kept is None else f'the last one is of round {kept}'
    raise UsageError(
      f'{tree.checkpoints}: checkpoints are gone: {there} there, though the'
      f' tables go to round {rounds[-1]}; put them back, or give --restart,'
      ' which keeps these files in another folder and begins again'
    )
