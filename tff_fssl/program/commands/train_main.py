"""`programs/train.py`: trains as the flags say, or continues a run."""

import asyncio
from collections.abc import Sequence
import contextlib
import dataclasses
import os
from typing import Any

from tff_fssl import durable
from tff_fssl import files
from tff_fssl.aggregators import hparams as aggregator_hparams
from tff_fssl.data import names as data_names
from tff_fssl.data import partition as partition_lib
from tff_fssl.hparams import UsageError
from tff_fssl.hparams import hparam
from tff_fssl.models import names as model_names
from tff_fssl.program import console
from tff_fssl.program import training_types
from tff_fssl.program.commands import main as main_lib
from tff_fssl.program.configuration import config as config_lib
from tff_fssl.program.configuration import continuation
from tff_fssl.program.configuration import flags
from tff_fssl.program.configuration import run_hparams
from tff_fssl.program.configuration import usage
from tff_fssl.program.loop import interrupts
from tff_fssl.program.reporting import tensorboard
from tff_fssl.program.storage import checkpoint
from tff_fssl.program.storage import completion
from tff_fssl.program.storage import compute as compute_lib
from tff_fssl.program.storage import csv_table
from tff_fssl.program.storage import exported
from tff_fssl.program.storage import heartbeat
from tff_fssl.program.storage import output_tree
from tff_fssl.program.storage import row_files
from tff_fssl.program.storage import summary
from tff_fssl.program.storage import warm_start
from tff_fssl.rounds import participation

_USAGE = 'programs/train.py [--flagfile=FILE] [--FLAG=VALUE ...]'
_ABOUT = (
  'Trains a model by federated semi-supervised learning, simulated on this'
  " machine. A run's checkpoints, metrics, plots and exported model are in one"
  ' folder. The same command continues a run that was stopped.\n'
  'When a run is continued, its flags must be the same, but these may differ:'
  ' {may_differ}. A larger --total_rounds continues a run that has finished.'
)


@dataclasses.dataclass(frozen=True)
class StartHparams:
  """How a command starts. It is no part of the run, nor of `flags.txt`."""

  restart: bool = hparam(
    False,
    'Begins again if --output_dir holds a run. That run is kept: its folder is'
    ' renamed, with .old_1 (.old_2, ...) at the end of its name.',
    group='Start',
  )


# Exit code -> what the heartbeat says at the end.
_STATES = {
  main_lib.DONE: heartbeat.FINISHED,
  main_lib.INTERRUPTED: heartbeat.STOPPED,
  main_lib.TERMINATED: heartbeat.STOPPED,
}


def train_main(argv: Sequence[str]) -> int:
  """The program.

  Args:
    argv: Its arguments.

  Returns:
    The exit code.

  Raises:
    UsageError: If the user has to put something right.
  """
  groups = [flags.Group(StartHparams), *config_lib.groups()]
  if usage.wants_help(argv):
    about = _ABOUT.format(may_differ=continuation.may_differ_text())
    console.show(usage.help_text(_USAGE, about, groups))
    return main_lib.DONE
  with flags.naming_own_file(argv, 'train', *argv):
    parsed = flags.parse(argv, groups)
    config = config_lib.from_flags(parsed)
  view = console.Console(config.run.progress)
  tree = output_tree.OutputTree(config.run.output_dir)

  def close(how: str) -> None:
    tree.close()
    main_lib.complain(how)

  with tree, interrupts.exit_at_once(lambda: tree.is_recorded, close):
    code = _start(config, tree, view, restart=parsed.values['restart'])
  return code


def _start(
  config: config_lib.Config,
  tree: output_tree.OutputTree,
  view: console.Console,
  *,
  restart: bool,
) -> int:
  """Opens the folder, and trains if rounds are left."""
  tree.open(config, restart=restart)
  if tree.old:
    view.say(f'The run that was in {tree.path} is in {tree.old} now.')
  if completion.is_finished(config, tree):
    view.say(
      f'This run has finished its {config.run.total_rounds} rounds; to'
      ' continue it, give a larger --total_rounds.'
    )
    _close(config, view, tree)
    return main_lib.DONE
  completion.check_outputs(config, tree)
  _check_availability(config, tree)
  source = None
  if config.run.init_from and not checkpoint.versions(tree.checkpoints):
    source = warm_start.find(config.run.init_from)
  main_lib.quiet(config.run.verbose)
  if config.run.dataset.startswith(data_names.FOLDER):
    # Damaged files are refused before TensorFlow starts. It needs NumPy.
    from tff_fssl.data import sources  # pylint: disable=C0415

    sources.load_found(config.info, config.run.data_dir or None)
  return _train(config, tree, view, source)


def _train(
  config: config_lib.Config,
  tree: output_tree.OutputTree,
  view: console.Console,
  source: warm_start.Source | None,
) -> int:
  """Trains, from `source` if given. This imports TensorFlow."""
  _warn_of_parts_not_reached(config)
  view.say('Starting TensorFlow ...')
  # pylint: disable=import-outside-toplevel
  import tensorflow_federated as tff

  from tff_fssl import runtime
  from tff_fssl.program.loop import experiment as experiment_lib
  from tff_fssl.program.loop import loggers as run_loggers
  from tff_fssl.program.reporting import loggers

  experiment_lib.configure_devices(config)
  context = runtime.build_async_context(
    runtime.Settings(
      config.run.runtime,
      client_devices=config.run.client_devices,
      client_threads=config.run.client_threads,
      simulate_secure_aggregation=config.run.simulate_secure_aggregation,
      call_timeout_secs=config.run.call_timeout_secs,
      clients_per_group=config.run.clients_per_group,
      intra_op_threads=config.run.intra_op_threads,
      ray_address=config.run.ray_address,
      ray_workers=config.run.ray_workers,
      clients_per_gpu=config.run.clients_per_gpu,
      ray_trusted_network=config.run.ray_trusted_network,
      is_deterministic=config.aggregator.aggregator != aggregator_hparams.DP,
    ),
    warn=view.say,
  )
  federated_context = tff.program.NativeFederatedContext(context)
  stack = tff.framework.get_context_stack()
  with contextlib.ExitStack() as exits:
    exits.enter_context(stack.install(federated_context))
    exits.callback(getattr(context, 'close', lambda: None))
    loaded = source and experiment_lib.load_weights(config, source)
    task = experiment_lib.build_task(config, _frozen(config, tree, loaded))
    compute = experiment_lib.measure_compute(task)
    view.say(_banner(task, context, source, loaded, compute))
    _check_partition(task, tree)
    experiment = experiment_lib.build_experiment(task, tree.server_data)
    for folder in (tree.model, tree.model_best):
      exported.remove_leftovers(folder)
    tree.record(config)
    # Not earlier: a start that is refused changes nothing.
    heart = heartbeat.Heart(tree.heartbeat_json, view.progress.to_json)
    exits.enter_context(heart)
    if loaded and loaded.frozen:
      owner = checkpoint.run_owner(config)
      checkpoint.write(tree.frozen, loaded.frozen, owner)
    _record_partition(task, tree)
    _record_availability(task, tree)
    if compute is not None:
      compute_lib.write(tree.compute_json, compute)
    initial_model = loaded and experiment.start(loaded.weights)
    watching = run_loggers.RunLoggers(experiment, tree, view.say)
    exits.enter_context(watching)
    code = _run_rounds(experiment, context, tree, view, initial_model, watching)
    heart.state = _STATES.get(code, heartbeat.FAILED)
    if code == main_lib.DONE:
      watching.finish(loggers.FINISHED, _close(config, view, tree))
    elif code in (main_lib.INTERRUPTED, main_lib.TERMINATED):
      watching.finish(loggers.KILLED)
  return code


def _frozen(
  config: config_lib.Config,
  tree: output_tree.OutputTree,
  loaded: warm_start.Loaded | None,
) -> Any:
  """The weights of layers that do not train; None if all layers do."""
  if loaded:
    return loaded.frozen if config.run.train_layers else None
  return warm_start.read_frozen(tree, checkpoint.run_owner(config))


def _run_rounds(
  experiment: Any,
  context: Any,
  tree: output_tree.OutputTree,
  view: console.Console,
  initial_model: Any,
  watching: Any,
) -> int:
  """Runs the rounds that are left and exports the model; the exit code."""
  # pylint: disable=import-outside-toplevel
  from tff_fssl import runtime
  from tff_fssl.program.loop import experiment as experiment_lib
  from tff_fssl.program.loop import training

  task, config = experiment.task, experiment.task.config
  stop, settings = training_types.StopRequest(), _settings(task)
  outputs = _outputs(task, tree, view, watching)
  profiler = _profiler(config, tree, view)
  logic = training.train(
    experiment.process,
    experiment.data_source,
    settings,
    outputs,
    evaluate_fn=experiment.evaluate_fn,
    reporter=view,
    stop=stop,
    initial_model=initial_model,
    hooks=experiment_lib.ExperimentHooks(
      experiment, context, profiler, watching.round_done
    ),
  )
  try:
    result = asyncio.run(interrupts.run_until_stopped(logic, stop, view.say))
  except asyncio.CancelledError:
    view.say(f'Stopped at once. {_how_to_resume(settings, tree)}')
    return interrupts.exit_code(stop.signal)
  except training.TrainingStoppedError as error:
    main_lib.complain(str(error))
    return main_lib.NOT_FINITE
  except runtime.WorkerError as error:
    main_lib.complain(f'{error} {_how_to_resume(settings, tree)}')
    return main_lib.FAILED
  if result.stopped_by is not None:
    view.say(f'Stopped and saved. {_how_to_resume(settings, tree)}')
    return interrupts.exit_code(result.stopped_by)
  if not config.trains_alone:  # Else there is no common model.
    process = result.state.process
    held = process.distributor['table'] if len(process.distributor) else ()
    model = experiment_lib.complete_model(
      config, process.global_model_weights, held
    )
    _export(task, model, result.round_num, outputs.best_round(), tree, view)
  return main_lib.DONE


def _export(
  task: Any,
  model: Any,
  round_num: int,
  best: int | None,
  tree: output_tree.OutputTree,
  view: console.Console,
) -> None:
  """Exports the model of the last round, and that of the round `best`."""
  # pylint: disable=import-outside-toplevel
  from tff_fssl.program.loop import experiment
  from tff_fssl.program.loop import export
  from tff_fssl.program.reporting import runs as runs_lib

  run = runs_lib.of_tree(tree)
  with view.phase(training_types.EXPORTING, round_num):
    export.export_model(task, model, tree.model, round_num, run, is_best=False)
  if best is None:
    return
  path = checkpoint.path_of(tree.checkpoints, best)
  try:
    leaves = checkpoint.read_own(path, _owner(task))
  except checkpoint.CheckpointError as error:
    view.say(
      f'{tree.model_best} is not written: the checkpoint of round {best}, which'
      f' has the best validation accuracy, is missing ({path}: {error}).'
    )
    return
  model = experiment.complete_model(
    task.config,
    warm_start.extract_model(leaves),
    warm_start.extract_table(leaves),
  )
  with view.phase(training_types.EXPORTING, best):
    export.export_model(task, model, tree.model_best, best, run, is_best=True)


def _owner(task: Any) -> checkpoint.Owner:
  """The owner of a task's checkpoints."""
  run = checkpoint.run_owner(task.config)
  return checkpoint.model_owner(run, task.model_fn())


def _settings(task: Any) -> training_types.Settings:
  """The settings of training in a task's configuration."""
  config = task.config
  evaluated_on = f'{len(task.data.test):,} test'
  if config.run.num_validation:
    evaluated_on += f' and {config.run.num_validation:,} validation'
  return training_types.Settings(
    first_round=config.first_round,
    total_rounds=config.run.total_rounds,
    rounds_per_evaluation=config.run.rounds_per_evaluation,
    rounds_per_checkpoint=config.run.rounds_per_checkpoint,
    max_bad_rounds=config.run.max_bad_rounds,
    strict_clients=config.run.strict_clients,
    evaluated_on=f'{evaluated_on} examples',
  )


def _outputs(
  task: Any,
  tree: output_tree.OutputTree,
  view: console.Console,
  also: Any,
) -> Any:
  """The outputs of a run's folder, and its loggers."""
  from tff_fssl.program.loop import training  # pylint: disable=C0415
  from tff_fssl.program.reporting import managers  # pylint: disable=C0415

  run, owner = task.config.run, _owner(task)
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
    row_files.RowFiles(tree.client_rows, owner),
  )


def _profiler(
  config: config_lib.Config, tree: output_tree.OutputTree, view: console.Console
) -> tensorboard.RoundProfiler:
  """The profiler of the chosen rounds; says if all of them are over."""
  run = config.run
  rounds = run_hparams.parse_rounds(run.profile, run.total_rounds)
  done = max(checkpoint.versions(tree.checkpoints), default=0)
  if rounds and max(rounds) <= done:
    view.say(f'--profile={run.profile}: these rounds are over (now: {done}).')
  return tensorboard.RoundProfiler(rounds, tree.tensorboard, view.say)


def _check_partition(task: Any, tree: output_tree.OutputTree) -> None:
  """Raises `UsageError` if the run was made with another partition."""
  if not os.path.lexists(tree.partition_json):
    return
  text = files.read_text(tree.partition_json)
  try:
    recorded = partition_lib.Partition.from_json(text)
    is_same = recorded.has_same_examples(task.partition)
  except UsageError:
    is_same = False
  if not is_same:
    raise UsageError(
      f'{tree.partition_json} is not the partition that the flags give now: the'
      ' file, the data or the code have changed since the run was made, so the'
      ' run cannot be continued; choose another --output_dir'
    )


def _record_partition(task: Any, tree: output_tree.OutputTree) -> None:
  """Writes the partition; one that is already there has been checked."""
  from tff_fssl.data import partition_plot  # pylint: disable=C0415

  if not os.path.lexists(tree.partition_json):
    task.partition.save_json(tree.partition_json)
  if not os.path.lexists(tree.partition_png):
    partition_plot.plot(task.partition, tree.partition_png)


def _check_availability(
  config: config_lib.Config, tree: output_tree.OutputTree
) -> None:
  """Raises `UsageError` if the file is wrong, or not that of the run."""
  availability = participation.read_availability(
    config.participation, config.run.num_clients
  )
  if availability is None or not os.path.lexists(tree.availability_csv):
    return
  if files.read_text(tree.availability_csv) != availability.to_csv():
    raise UsageError(
      f'--availability_file={config.participation.availability_file}: has'
      ' changed since the run was made, so the run cannot be continued; give'
      f' what is in its copy, {tree.availability_csv}, or choose another'
      ' --output_dir'
    )


def _record_availability(task: Any, tree: output_tree.OutputTree) -> None:
  """Writes a copy of the file; one that is already there has been checked."""
  availability = participation.read_availability(
    task.config.participation, task.partition.num_clients
  )
  if availability and not os.path.lexists(tree.availability_csv):
    text = availability.to_csv()
    durable.write_file(tree.availability_csv, [text.encode()])


def _banner(
  task: Any,
  context: Any,
  source: warm_start.Source | None,
  loaded: warm_start.Loaded | None,
  compute: compute_lib.Compute | None,
) -> str:
  """Describes what is about to happen, in a few lines."""
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
  model = task.model_fn()
  num_weights = sum(v.shape.num_elements() for v in model.trainable_variables)
  frozen = ''
  if run.train_layers:
    num_frozen = sum(v.shape.num_elements() for v in model.variables)
    frozen = f' that train ({num_frozen - num_weights:,} others do not)'
  start = source.about if source else ''
  if loaded and loaded.new_layer:
    start += f', without its last layer: {loaded.new_layer} is new'
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
    **({'with': flags.to_arguments(defaults)} if defaults else {}),
    'runs': f'{where}, seed {run.seed}',
    'output': run.output_dir,
  }
  return console.table(rows)


def _warn_of_parts_not_reached(config: config_lib.Config) -> None:
  """Says so if clients will not see all of their examples."""
  streaming, total = config.streaming, config.run.total_rounds
  if total < streaming.last_begins:
    main_lib.warn(
      f'--total_rounds={total}: clients have'
      f' {streaming.step(total) + 1} of --streaming_steps={streaming.steps}'
      f' parts of their examples; the last one begins in round'
      f' {streaming.last_begins}'
    )


def _streaming_row(streaming: Any) -> dict[str, str]:
  """What clients have when, if not all at once."""
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
  """Who takes part, if not all that are drawn, fully."""
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


def _close(
  config: config_lib.Config,
  view: console.Console,
  tree: output_tree.OutputTree,
) -> dict[str, Any]:
  """Writes, shows and returns the results."""
  results = summary.write(tree)
  has_best = os.path.isdir(tree.model_best)
  has_model = os.path.isdir(tree.model)
  no_model = f'none, since each client has its own, in {tree.checkpoints}'
  view.say('')
  view.say(
    console.table(
      {
        **console.summary_rows(results),
        'metrics': tree.metrics,
        'model': tree.model if has_model else no_model,
        **({'best model': tree.model_best} if has_best else {}),
        'plot': console.command_line('plot', tree.path),
        'evaluate': _evaluate_command(config, tree),
      }
    )
  )
  return results


def _evaluate_command(
  config: config_lib.Config, tree: output_tree.OutputTree
) -> console.Command:
  """The command that evaluates a run."""
  is_file = bool(model_names.file_and_function(config.run.model))
  trust = ['--run_model_file'] * is_file
  return console.command_line('evaluate', tree.path, *trust)


def _how_to_resume(
  settings: training_types.Settings, tree: output_tree.OutputTree
) -> str:
  """Says how to resume, and from which round."""
  saved = checkpoint.versions(tree.checkpoints)[-1:]
  after = console.after(saved[0], settings) if saved else 'at the start'
  flagfile = f'--flagfile={tree.flags_file}'
  return f'To continue {after}:\n  {console.command_line("train", flagfile)}'
