"""Messages at the start and at the end of a run."""

from collections.abc import Mapping, Sequence
import os
from typing import Any

from tff_fssl.data import names as data_names
from tff_fssl.models import names as model_names
from tff_fssl.program import checkpoint
from tff_fssl.program import config as config_lib
from tff_fssl.program import console
from tff_fssl.program import flags
from tff_fssl.program import output_tree
from tff_fssl.program import summary
from tff_fssl.program import training_types
from tff_fssl.program import warm_start


def banner(
  task: Any,
  context: Any,
  source: warm_start.Source | None,
  loaded: warm_start.Loaded | None,
  compute: summary.Compute | None,
) -> str:
  """Describes the run that is about to start, in a few lines."""
  config, data, partition = task.config, task.data, task.partition
  run, round_hparams = config.run, config.round
  sizes = [
    len(labeled) + len(unlabeled)
    for labeled, unlabeled in zip(
      partition.client_labeled, partition.client_unlabeled
    )
  ]
  kind = data_names.kind_of(data.example_shape)
  held = [len(held) for held in partition.client_labeled if len(held)]
  labels = f'{_range(held or [0])} at each client'
  if len(held) < partition.num_clients:
    labels = f'{_range(held or [0])} at each of {len(held)} clients'
  if len(partition.server_labeled):
    at_server = f'{len(partition.server_labeled)} at the server'
    labels = f'{at_server}, {labels}' if held else at_server
  if len(partition.wrong_examples):
    labels += f'; {len(partition.wrong_examples)} are wrong'
  cohort = (
    f'{run.clients_per_round} of {partition.num_clients} clients in each'
    if config.trains_clients
    else 'only the server trains'
  )
  pretraining = round_hparams.num_pretraining_rounds
  if pretraining:
    cohort += f', after {pretraining} of server pre-training'
  model = task.network
  num_weights = sum(v.shape.num_elements() for v in model.trainable_weights)
  frozen = ''
  if run.train_layers:
    num_frozen = sum(v.shape.num_elements() for v in model.weights)
    frozen = f' that train ({num_frozen - num_weights:,} others do not)'
  start = source.about if source else ''
  if loaded and loaded.new_layer:
    start += f', without its last layer: {loaded.new_layer} is new'
  # The asynchronous context wraps the one that has the devices.
  devices = getattr(context, 'context', None)
  where = run.runtime
  if about := getattr(devices, 'about', ''):
    where += f', {about}'
  elif devices is not None:
    names = (d.rpartition('device:')[2].lower() for d in devices.client_devices)
    where += f' on {", ".join(names)}, {devices.client_threads} at a time'
  has_effect = config.flags()
  defaults = {
    name: has_effect[name]
    for name in config.entry.run_defaults
    if name in has_effect
  }
  validation = f', {run.num_validation} for validation'
  rows = {
    'algorithm': f'{run.algorithm}: {config.entry.summary}',
    'data': f'{data.name}: {len(data.train)} training and {len(data.test)}'
    f' test {kind.noun} of {data_names.shape_text(data.example_shape)},'
    f' {data.num_classes} classes' + (validation if run.num_validation else ''),
    **({'note': data.notes} if kind != data_names.IMAGES else {}),
    'labels': labels,
    'clients': f'{partition.num_clients}, {partition.settings.title},'
    f' {_range(sizes)} examples each'
    + (f', from {run.partition_file}' if run.partition_file else ''),
    **_streaming_row(config.streaming),
    'model': f'{run.model}, norm {run.norm}, {num_weights:,} weights'
    f'{frozen}, computing in {round_hparams.compute_dtype}',
    **({'starts from': start} if start else {}),
    'rounds': f'{run.total_rounds}, {cohort}',
    **_participation_row(config),
    **({'compute': compute.describe()} if compute else {}),
    **({'with': flags.join_arguments(defaults)} if defaults else {}),
    'runs': f'{where}, seed {run.seed}',
    'output': run.output_dir,
  }
  return console.table(rows)


def _streaming_row(streaming: Any) -> dict[str, str]:
  """Describes when clients have which examples, if not all at once."""
  if streaming.steps == 1:
    return {}
  rounds = (
    'one round' if streaming.rounds == 1 else f'{streaming.rounds} rounds'
  )
  end = 'again and again' if streaming.cycles else 'the last one until the end'
  return {
    'streaming': f"{streaming.steps} parts of each client's unlabelled"
    f' examples, {rounds} each, {end}'
  }


def _participation_row(config: config_lib.Config) -> dict[str, str]:
  """Describes participation, if not all take part fully."""
  settings, parts = config.participation, []
  if settings.availability_file:
    period = settings.availability_period
    again = f', again after {period} rounds' if period else ''
    parts.append(f'when {settings.availability_file} says so{again}')
  num_drawn = settings.num_drawn(config.run.clients_per_round)
  if num_drawn > config.run.clients_per_round:
    parts.append(f'{num_drawn} are drawn')
  for probability, what in (
    (settings.dropout_probability, 'drop out'),
    (settings.straggler_probability, 'make a part of their steps'),
  ):
    if probability:
      parts.append(f'{console.format_percent(probability)} {what}')
  if config.round.min_clients:
    parts.append(f'at least {config.round.min_clients}')
  return {'taking part': '; '.join(parts)} if parts else {}


def _range(numbers: Sequence[int]) -> str:
  low, high = min(numbers), max(numbers)
  return f'{low}' if low == high else f'{low} to {high}'


def unreached_parts(config: config_lib.Config) -> str:
  """Returns a warning if clients will not see all examples, or else ''."""
  streaming, total = config.streaming, config.run.total_rounds
  if total >= streaming.last_begins:
    return ''
  return (
    f'--total_rounds={total}: clients have {streaming.step(total) + 1} of'
    f' --streaming_steps={streaming.steps} parts of their examples; the last'
    f' one begins in round {streaming.last_begins}'
  )


def closing(
  config: config_lib.Config,
  tree: output_tree.OutputTree,
  results: Mapping[str, Any],
) -> str:
  """Describes the results of a run and how to look at them.

  Args:
    config: The run's configuration.
    tree: Its folder.
    results: What `summary.write` returned.

  Returns:
    A table.
  """
  has_best, has_model = map(os.path.isdir, (tree.model_best, tree.model))
  no_model = f'none, since each client has its own, in {tree.checkpoints}'
  return console.table(
    {
      **console.summary_rows(results),
      'metrics': tree.metrics,
      'model': tree.model if has_model else no_model,
      **({'best model': tree.model_best} if has_best else {}),
      'plot': console.command_line('plot', tree.path),
      'evaluate': evaluate_command(config, tree),
    }
  )


def evaluate_command(
  config: config_lib.Config, tree: output_tree.OutputTree
) -> console.Command:
  """Writes the command that evaluates a run."""
  # The user wrote this model, and may trust it.
  is_file = bool(model_names.file_and_function(config.run.model))
  trust = ['--run_model_file'] * is_file
  return console.command_line('evaluate', tree.path, *trust)


def how_to_resume(
  settings: training_types.Settings, tree: output_tree.OutputTree
) -> str:
  """Says how to resume, and from which round."""
  saved = checkpoint.versions(tree.checkpoints)[-1:]
  after = console.after(saved[0], settings) if saved else 'at the start'
  flagfile = f'--flagfile={tree.flags_file}'
  return f'To continue {after}:\n  {console.command_line("train", flagfile)}'
