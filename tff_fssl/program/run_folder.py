"""The files that a training run reads from its folder and writes to it."""

import os
from typing import Any

from tff_fssl import durable
from tff_fssl import files
from tff_fssl import hparams
from tff_fssl.data import partition as partition_lib
from tff_fssl.hparams import UsageError
from tff_fssl.program import checkpoint
from tff_fssl.program import config as config_lib
from tff_fssl.program import console
from tff_fssl.program import csv_table
from tff_fssl.program import inputs as inputs_lib
from tff_fssl.program import loggers
from tff_fssl.program import output_tree
from tff_fssl.program import run_hparams
from tff_fssl.program import runs as runs_lib
from tff_fssl.program import summary
from tff_fssl.program import training_types
from tff_fssl.program import warm_start
from tff_fssl.rounds import participation


def check_data(task: Any, tree: output_tree.OutputTree) -> None:
  """Raises `UsageError` if the run was made with other data."""
  recorded = inputs_lib.read(tree.inputs_json)
  if recorded and (differing := recorded.differences(task.inputs)):
    raise UsageError(
      f'{tree.path}: the {" and the ".join(differing)} are not those that the'
      ' run was made with, so it cannot be continued; give the same data'
      ' (--data_dir), or choose another --output_dir'
    )
  _check_partition(task, tree)


def _check_partition(task: Any, tree: output_tree.OutputTree) -> None:
  if not os.path.lexists(tree.partition_json):
    return
  text = files.read_text(tree.partition_json)
  try:
    recorded = partition_lib.Partition.parse_json(text)
    is_same = recorded.has_same_examples(task.partition)
  except UsageError:
    is_same = False
  if not is_same:
    raise UsageError(
      f'{tree.partition_json} is not the partition that the flags give now: the'
      ' file, the data or the code have changed since the run was made, so the'
      ' run cannot be continued; choose another --output_dir'
    )


def record_data(task: Any, tree: output_tree.OutputTree) -> None:
  """Writes digests and partition, unless an earlier start has written them."""
  if not os.path.lexists(tree.inputs_json):
    task.inputs.write(tree.inputs_json)
  if not os.path.lexists(tree.partition_json):
    task.partition.save_json(tree.partition_json)
  if not os.path.lexists(tree.partition_png):
    partition_lib.plot(
      task.partition, tree.partition_png, task.data.class_names
    )


def check_availability(
  config: config_lib.Config, tree: output_tree.OutputTree
) -> None:
  """Raises `UsageError` if the file is wrong, or not that of the run."""
  availability = participation.read_availability(
    config.participation, config.run.num_clients
  )
  if availability is None or not os.path.lexists(tree.availability_csv):
    return
  # Compared as parsed: spaces and comments may differ.
  if files.read_text(tree.availability_csv) != availability.format_csv():
    raise UsageError(
      f'--availability_file={config.participation.availability_file}: has'
      ' changed since the run was made, so the run cannot be continued; give'
      f' its copy, {tree.availability_csv}, or choose another'
      ' --output_dir'
    )


def record_availability(task: Any, tree: output_tree.OutputTree) -> None:
  """Writes a copy of the file, unless an earlier start has written it."""
  availability = participation.read_availability(
    task.config.participation, task.partition.num_clients
  )
  if availability and not os.path.lexists(tree.availability_csv):
    text = availability.format_csv()
    durable.write_file(tree.availability_csv, [text.encode()])


def read_frozen(
  config: config_lib.Config,
  tree: output_tree.OutputTree | None,
  loaded: warm_start.Loaded | None,
) -> Any:
  """Reads the weights that do not train, or None if all do.

  They are those that a new run starts from, or else those of the run `tree`.
  """
  if loaded:
    return loaded.frozen if config.run.train_layers else None
  return tree and warm_start.read_frozen(tree, checkpoint.run_owner(config))


def build_settings(task: Any) -> training_types.Settings:
  """Builds the settings of training."""
  config = task.config
  evaluated_on = f'{len(task.data.test):,} test'
  if config.run.num_validation:
    evaluated_on += f' and {config.run.num_validation:,} validation'
  return hparams.build_from(
    config.run,
    training_types.Settings,
    first_round=config.first_round,
    evaluated_on=f'{evaluated_on} examples',
  )


def build_outputs(
  task: Any,
  tree: output_tree.OutputTree,
  view: console.Console,
  also: Any,
) -> Any:
  """Builds the managers of a run's folder, with the given loggers."""
  # They import TensorFlow. pylint: disable=import-outside-toplevel
  from tff_fssl.program import managers
  from tff_fssl.program import training

  run, owner = task.config.run, task.owner
  return training.Outputs(
    managers.DurableProgramStateManager(
      tree.checkpoints,
      keep_total=run.keep_checkpoints,
      warn=view.say,
      owner=owner,
      keep_also_fn=lambda: summary.best_round_num(tree.eval_csv),
    ),
    csv_table.CsvTable(tree.train_csv),
    csv_table.CsvTable(tree.eval_csv),
    csv_table.CsvTable(tree.timing_csv),
    also,
    csv_table.RoundLines(tree.non_finite_txt),
    checkpoint.RowFiles(tree.client_rows, owner),
  )


def build_profiler(
  config: config_lib.Config, tree: output_tree.OutputTree, view: console.Console
) -> loggers.RoundProfiler:
  """Builds the profiler, and tells the user if its rounds are over."""
  run = config.run
  rounds = run_hparams.parse_rounds(run.profile, run.total_rounds)
  done = max(checkpoint.versions(tree.checkpoints), default=0)
  if rounds and max(rounds) <= done:
    view.say(f'--profile={run.profile}: these rounds are over (now: {done}).')
  return loggers.RoundProfiler(rounds, tree.tensorboard, view.say)


def export_models(
  task: Any,
  model: Any,
  round_num: int,
  best: int | None,
  tree: output_tree.OutputTree,
  view: console.Console,
) -> None:
  """Exports the model of the last round, and that of the round `best`."""
  # They import TensorFlow. pylint: disable=import-outside-toplevel
  from tff_fssl.program import export

  run = runs_lib.read_tree(tree)
  with view.phase(training_types.EXPORTING, round_num):
    export.export_model(task, model, tree.model, round_num, run, is_best=False)
  if best is None:
    return
  path = checkpoint.path_of(tree.checkpoints, best)
  try:
    leaves = checkpoint.read_own(path, task.owner)
  except checkpoint.CheckpointError as error:
    view.say(
      f'{tree.model_best} is not written: the checkpoint of round {best}, which'
      f' has the best validation accuracy, cannot be used ({path}: {error}).'
    )
    return
  model = warm_start.extract_model(leaves)
  with view.phase(training_types.EXPORTING, best):
    export.export_model(task, model, tree.model_best, best, run, is_best=True)
