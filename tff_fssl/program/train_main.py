"""`programs/train.py`: trains as the flags say, or continues a run."""

import asyncio
from collections.abc import Mapping, Sequence
import contextlib
import dataclasses
import os
import types
from typing import Any

from tff_fssl import durable
from tff_fssl import files
from tff_fssl import hparams
from tff_fssl.aggregators import hparams as aggregator_hparams
from tff_fssl.data import inspection
from tff_fssl.data import names as data_names
from tff_fssl.data import partition as partition_lib
from tff_fssl.data import sources
from tff_fssl.hparams import UsageError
from tff_fssl.hparams import hparam
from tff_fssl.models import names as model_names
from tff_fssl.program import checkpoint
from tff_fssl.program import config as config_lib
from tff_fssl.program import console
from tff_fssl.program import csv_table
from tff_fssl.program import exported
from tff_fssl.program import flags
from tff_fssl.program import inputs as inputs_lib
from tff_fssl.program import loggers
from tff_fssl.program import main as main_lib
from tff_fssl.program import output_tree
from tff_fssl.program import plots
from tff_fssl.program import run_hparams
from tff_fssl.program import runs as runs_lib
from tff_fssl.program import summary
from tff_fssl.program import training_types
from tff_fssl.program import usage
from tff_fssl.program import warm_start
from tff_fssl.rounds import participation

_USAGE = 'programs/train.py [--flagfile=FILE] [--FLAG=VALUE ...]'
_ABOUT = (
  'Trains a model by federated semi-supervised learning, simulated on this'
  " machine. A run's checkpoints, metrics, plots and exported model are in one"
  ' folder. The same command continues a run that was stopped.\n'
  'When a run is continued, its flags must be the same, but these may differ:'
  ' {may_differ}. A larger --total_rounds continues a run that has finished.'
)


def check_data(task: Any, tree: output_tree.OutputTree) -> None:
  """Raises `UsageError` if the run was made with other data."""
  recorded = inputs_lib.read(tree.inputs_json)
  if recorded is None:
    return
  differing = recorded.differences(task.inputs)
  if recorded.partition != task.inputs.partition:
    differing.append('partition')
  if differing:
    raise UsageError(
      f'{tree.path}: the run was made with other {" and ".join(differing)}, so'
      ' it cannot be continued; give the same data (--data_dir) to the same'
      ' version, or choose another --output_dir'
    )


def record_data(task: Any, tree: output_tree.OutputTree) -> None:
  """Writes digests and partition, unless an earlier start has written them."""
  if not os.path.lexists(tree.inputs_json):
    task.inputs.write(tree.inputs_json)
  if not os.path.lexists(tree.partition_json):
    task.partition.save_json(tree.partition_json)
  if not os.path.lexists(tree.partition_png):
    figure = partition_lib.make_figure([task.partition], task.data.class_names)
    plots.save(figure, tree.partition_png)


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
  from tff_fssl.program import training

  run, owner = task.config.run, task.owner
  return training.Outputs(
    training.DurableProgramStateManager(
      tree.checkpoints,
      keep_total=run.keep_checkpoints,
      warn=view.say,
      owner=owner,
      keep_also_fn=lambda: summary.best_round_num(tree.eval_csv, run.best_by),
    ),
    csv_table.CsvTable(tree.train_csv),
    csv_table.CsvTable(tree.eval_csv),
    csv_table.CsvTable(tree.timing_csv),
    also,
    csv_table.RoundLines(tree.non_finite_txt),
    checkpoint.RowFiles(tree.client_rows, owner),
    run.best_by,
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
    said = export.export_model(
      task, model, tree.model, round_num, run, is_best=False
    )
  if said:
    view.say(said)
  if best is None:
    return
  path = checkpoint.path_of(tree.checkpoints, best)
  try:
    leaves = checkpoint.read_own(path, task.owner)
  except checkpoint.CheckpointError as error:
    view.say(
      f'{tree.model_best} is not written: the checkpoint of round {best}, which'
      f' is best on validation examples, cannot be used ({path}: {error}).'
    )
    return
  model = warm_start.extract_model(leaves)
  with view.phase(training_types.EXPORTING, best):
    said = export.export_model(
      task, model, tree.model_best, best, run, is_best=True
    )
  if said:
    view.say(said)


def banner(
  task: Any,
  context: Any,
  source: warm_start.Source | None,
  loaded: warm_start.Loaded | None,
  compute: summary.Compute | None,
  findings: Mapping[str, str] = types.MappingProxyType({}),
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
  other = ' of other clients' * (config.data.split_by == data_names.CLIENT)
  validation = f', {run.num_validation}{other} for validation'
  rows = {
    'algorithm': f'{run.algorithm}: {config.entry.summary}',
    'data': f'{data.name}: {len(data.train)} training and {len(data.test)}'
    f' test {kind.noun} of {data_names.shape_text(data.example_shape)},'
    f' {data.num_classes} classes' + (validation if run.num_validation else ''),
    **({'note': data.notes} if kind != data_names.IMAGES else {}),
    **findings,
    'labels': _describe_labels(partition),
    **_server_row(partition, data),
    'clients': f'{partition.num_clients}, {partition.settings.title},'
    f' {_range(sizes)} examples each'
    + (f', from {run.partition_file}' if run.partition_file else ''),
    **_streaming_row(config),
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


def _describe_labels(partition: partition_lib.Partition) -> str:
  """Says who holds how many labels."""
  held = [len(held) for held in partition.client_labeled if len(held)]
  labels = f'{_range(held or [0])} at each client'
  if len(held) < partition.num_clients:
    labels = f'{_range(held or [0])} at each of {len(held)} clients'
  if len(partition.server_labeled):
    at_server = f'{len(partition.server_labeled)} at the server'
    labels = f'{at_server}, {labels}' if held else at_server
  if len(partition.wrong_examples):
    labels += f'; {len(partition.wrong_examples)} are wrong'
  return labels


def _server_row(
  partition: partition_lib.Partition, data: sources.DataSet
) -> dict[str, str]:
  """Says what the examples that the data put at the server are for."""
  if data.server is None:
    return {}
  held = {
    'labels': partition.server_labeled,
    'validation': partition.validation,
  }
  counts = {what: int(data.server[some].sum()) for what, some in held.items()}
  counts['nothing'] = int(data.server.sum()) - sum(counts.values())
  for_what = [f'{n} for {what}' for what, n in counts.items() if n]
  text = f'{data.server.sum()} {data.train.kind.noun} of its own:'
  text += f' {", ".join(for_what)}'
  labels = data.train.y[partition.server_labeled]
  missing = [c for i, c in enumerate(data.class_names) if i not in labels]
  if len(labels) and missing:
    text += f'; no label of {inspection.shown(missing)}'
  return {'server': text}


def _describe_findings(task: Any) -> dict[str, str]:
  """Says in a row what is found in the data, or raises `UsageError`."""
  # pylint: disable-next=import-outside-toplevel
  from tff_fssl.program import run_data

  problems = run_data.find_problems(task.config, task.data, task.partition)
  if not problems:
    return {}
  command = f'{console.command("data")} {task.config.run.dataset}'
  return {'findings': f'{inspection.brief(problems)}; see {command}'}


def _streaming_row(config: config_lib.Config) -> dict[str, str]:
  """Describes when clients have which examples, if not all at once."""
  streaming = config.streaming
  kind = 'labelled' if config.run.full_labels else 'unlabelled'
  if streaming.steps == 1:
    return {}
  rounds = (
    'one round' if streaming.rounds == 1 else f'{streaming.rounds} rounds'
  )
  end = 'again and again' if streaming.cycles else 'the last one until the end'
  return {
    'streaming': f"{streaming.steps} parts of each client's {kind}"
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


def emulated_dtype(config: config_lib.Config, context: Any) -> str:
  """Returns a warning if the processor has to emulate a dtype, or else ''."""
  # pylint: disable-next=import-outside-toplevel
  from tff_fssl.runtime import devices

  # Ray's are those of other machines. TFF's worker has the CPU alone.
  own = getattr(context, 'context', None)
  names = getattr(own, 'client_devices', ('cpu:0',))
  if (
    config.round.compute_dtype == 'float32'
    or hasattr(own, 'about')
    or not devices.is_bfloat16_emulated(names)
  ):
    return ''
  return (
    f'--compute_dtype={config.round.compute_dtype}: this processor has no'
    ' instructions for it, and takes 5 to 15 times as long as in float32'
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
      **console.summary_rows(
        results, 0 if config.trains_alone else config.info.num_test
      ),
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
  after = (
    console.describe_place(saved[0], settings) if saved else 'at the start'
  )
  flagfile = f'--flagfile={tree.flags_file}'
  return f'To continue {after}:\n  {console.command_line("train", flagfile)}'


@dataclasses.dataclass(frozen=True)
class StartHparams:
  """Flags of the start, which are no part of the run, nor of `flags.txt`."""

  restart: bool = hparam(
    False,
    'Begins again if --output_dir holds a run. That run is kept: its folder is'
    ' renamed, with .old_1 (.old_2, ...) at the end of its name.',
    group='Start',
  )


# The flags that most runs need, which `--help` shows.
_COMMON = (
  'restart',
  'algorithm',
  'model',
  'norm',
  'init_from',
  'seed',
  'dataset',
  'data_dir',
  'scenario',
  'num_labels',
  'num_validation',
  'num_clients',
  'partition',
  'alpha',
  'clients_per_round',
  'total_rounds',
  'num_pretraining_rounds',
  'client_epochs',
  'client_batch_size',
  'client_learning_rate',
  'server_epochs',
  'server_batch_size',
  'server_learning_rate',
  'proximal_strength',
  'aggregator',
  'output_dir',
  'rounds_per_evaluation',
  'rounds_per_checkpoint',
  'runtime',
  'compute_dtype',
)


def train_main(argv: Sequence[str]) -> int:
  """Trains a model, or continues a run that was stopped.

  Args:
    argv: The arguments.

  Returns:
    The exit code.

  Raises:
    UsageError: If the user has to put something right.
  """
  about = _ABOUT.format(may_differ=config_lib.changeable_text())
  groups = [flags.Group(StartHparams), *config_lib.groups()]
  parsed = usage.parse(
    argv, _USAGE, about, groups, common=_COMMON, allow_positional=False
  )
  if parsed is None:
    return main_lib.DONE
  config = config_lib.build_config(parsed)
  view = console.Console(config.run.progress)
  tree = output_tree.OutputTree(config.run.output_dir)

  def close(how: str) -> None:
    tree.close()
    main_lib.complain(how)

  # Until the folder is the run's, Ctrl-C ends the program at once.
  with tree, main_lib.exit_at_once(lambda: tree.is_recorded, close):
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
  if summary.is_finished(config, tree):
    view.say(
      f'This run has finished its {config.run.total_rounds} rounds; to'
      ' continue it, give a larger --total_rounds.'
    )
    _close(config, view, tree)
    return main_lib.DONE
  # Whatever the end would refuse is refused before hours of training.
  summary.check_outputs(config, tree)
  check_availability(config, tree)
  source = None
  # A resumed run has the weights in its first checkpoint.
  if config.run.init_from and not checkpoint.versions(tree.checkpoints):
    source = warm_start.find(config.run.init_from)
  main_lib.quiet(config.run.verbose)
  if config.run.dataset.startswith(data_names.FOLDER):
    # Damaged files are refused before TensorFlow starts.
    sources.load_found(config.info, config.run.data_dir or None)
  return _train(config, tree, view, source)


def _train(
  config: config_lib.Config,
  tree: output_tree.OutputTree,
  view: console.Console,
  source: warm_start.Source | None,
) -> int:
  """Trains, from `source` if given. This imports TensorFlow."""
  if warning := unreached_parts(config):
    main_lib.warn(warning)
  view.say('Starting TensorFlow ...')
  # pylint: disable=import-outside-toplevel
  from tff_fssl import runtime
  from tff_fssl.program import experiment as experiment_lib
  from tff_fssl.program import loggers
  from tff_fssl.program import run_loggers

  experiment_lib.configure_devices(config)
  context = runtime.build_async_context(
    hparams.build_from(
      config.run,
      runtime.Settings,
      is_deterministic=config.aggregator.aggregator != aggregator_hparams.DP,
    ),
    warn=view.say,
  )
  if warning := emulated_dtype(config, context):
    main_lib.warn(warning)
  with contextlib.ExitStack() as exits:
    exits.enter_context(runtime.installed(context))
    exits.callback(context.close)
    loaded = source and experiment_lib.load_weights(config, source)
    task = experiment_lib.build_task(config, read_frozen(config, tree, loaded))
    compute = experiment_lib.measure_compute(task)
    findings = _describe_findings(task)
    view.say(banner(task, context, source, loaded, compute, findings))
    # The data may have changed since the run was made.
    check_data(task, tree)
    experiment = experiment_lib.build_experiment(task, tree.server_data)
    for folder in (tree.model, tree.model_best):
      exported.remove_leftovers(folder)
    tree.record(config)
    if loaded and loaded.frozen:
      owner = checkpoint.run_owner(config)
      checkpoint.write(tree.frozen, loaded.frozen, owner)
    record_data(task, tree)
    record_availability(task, tree)
    if compute is not None:
      summary.write_compute(tree.compute_json, compute)
    initial_model = loaded and experiment.start(loaded.weights)
    watching = run_loggers.RunLoggers(experiment, tree, view.say)
    exits.enter_context(watching)
    code = _run_rounds(experiment, context, tree, view, initial_model, watching)
    if code == main_lib.DONE:
      watching.finish(loggers.FINISHED, _close(config, view, tree))
    elif code in (main_lib.INTERRUPTED, main_lib.TERMINATED):
      watching.finish(loggers.KILLED)
  return code


def _run_rounds(
  experiment: Any,
  context: Any,
  tree: output_tree.OutputTree,
  view: console.Console,
  initial_model: Any,
  watching: Any,
) -> int:
  """Runs the remaining rounds, exports the model, returns the exit code."""
  # pylint: disable=import-outside-toplevel
  from tff_fssl import runtime
  from tff_fssl.program import experiment as experiment_lib
  from tff_fssl.program import training

  task, config = experiment.task, experiment.task.config
  stop, settings = training_types.StopRequest(), build_settings(task)
  outputs = build_outputs(task, tree, view, watching)
  profiler = build_profiler(config, tree, view)
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
    result = asyncio.run(main_lib.run_until_stopped(logic, stop, view.say))
  except asyncio.CancelledError:
    view.say(f'Stopped at once. {how_to_resume(settings, tree)}')
    return main_lib.exit_code(stop.signal)
  except training.TrainingStoppedError as error:
    main_lib.complain(str(error))
    return main_lib.NOT_FINITE
  except runtime.WorkerError as error:
    main_lib.complain(f'{error} {how_to_resume(settings, tree)}')
    return main_lib.FAILED
  if result.stopped_by is not None:
    view.say(f'Stopped and saved. {how_to_resume(settings, tree)}')
    return main_lib.exit_code(result.stopped_by)
  if not config.trains_alone:  # Else there is no common model.
    model = result.state.process.global_model_weights
    export_models(
      task, model, result.round_num, outputs.best_round(), tree, view
    )
  return main_lib.DONE


def _close(
  config: config_lib.Config,
  view: console.Console,
  tree: output_tree.OutputTree,
) -> dict[str, Any]:
  """Writes, shows and returns the results."""
  results = summary.write(tree, config.run.best_by)
  view.say('')
  view.say(closing(config, tree, results))
  return results
