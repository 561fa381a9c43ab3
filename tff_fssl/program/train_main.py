"""`programs/train.py`: trains as the flags say, or continues a run."""

import asyncio
from collections.abc import Sequence
import contextlib
import dataclasses
from typing import Any

from tff_fssl import hparams
from tff_fssl.aggregators import hparams as aggregator_hparams
from tff_fssl.data import names as data_names
from tff_fssl.data import sources
from tff_fssl.hparams import hparam
from tff_fssl.program import checkpoint
from tff_fssl.program import config as config_lib
from tff_fssl.program import console
from tff_fssl.program import exported
from tff_fssl.program import flags
from tff_fssl.program import main as main_lib
from tff_fssl.program import messages
from tff_fssl.program import output_tree
from tff_fssl.program import run_folder
from tff_fssl.program import summary
from tff_fssl.program import training_types
from tff_fssl.program import usage
from tff_fssl.program import warm_start

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
  with flags.naming_own_file(argv, 'train', *argv):
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

  # Until the folder is the run's, Ctrl-C undoes the start.
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
  run_folder.check_availability(config, tree)
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
  if warning := messages.unreached_parts(config):
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
  with contextlib.ExitStack() as exits:
    exits.enter_context(runtime.installed(context))
    exits.callback(context.close)
    loaded = source and experiment_lib.load_weights(config, source)
    task = experiment_lib.build_task(
      config, run_folder.read_frozen(config, tree, loaded)
    )
    compute = experiment_lib.measure_compute(task)
    view.say(messages.banner(task, context, source, loaded, compute))
    # The data may have changed since the run was made.
    run_folder.check_data(task, tree)
    experiment = experiment_lib.build_experiment(task, tree.server_data)
    for folder in (tree.model, tree.model_best):
      exported.remove_leftovers(folder)
    tree.record(config)
    if loaded and loaded.frozen:
      owner = checkpoint.run_owner(config)
      checkpoint.write(tree.frozen, loaded.frozen, owner)
    run_folder.record_data(task, tree)
    run_folder.record_availability(task, tree)
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
  stop, settings = training_types.StopRequest(), run_folder.build_settings(task)
  outputs = run_folder.build_outputs(task, tree, view, watching)
  profiler = run_folder.build_profiler(config, tree, view)
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
    view.say(f'Stopped at once. {messages.how_to_resume(settings, tree)}')
    return main_lib.exit_code(stop.signal)
  except training.TrainingStoppedError as error:
    main_lib.complain(str(error))
    return main_lib.NOT_FINITE
  except runtime.WorkerError as error:
    main_lib.complain(f'{error} {messages.how_to_resume(settings, tree)}')
    return main_lib.FAILED
  if result.stopped_by is not None:
    view.say(f'Stopped and saved. {messages.how_to_resume(settings, tree)}')
    return main_lib.exit_code(result.stopped_by)
  if not config.trains_alone:  # Else there is no common model.
    model = result.state.process.global_model_weights
    run_folder.export_models(
      task, model, result.round_num, outputs.best_round(), tree, view
    )
  return main_lib.DONE


def _close(
  config: config_lib.Config,
  view: console.Console,
  tree: output_tree.OutputTree,
) -> dict[str, Any]:
  """Writes, shows and returns the results."""
  results = summary.write(tree)
  view.say('')
  view.say(messages.closing(config, tree, results))
  return results
