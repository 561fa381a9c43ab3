"""`programs/evaluate.py`: accuracy of checkpoints and of exported models."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import itertools
import json
import math
import os
import re
import types
from typing import Any, NamedTuple

from tff_fssl import durable
from tff_fssl import hparams
from tff_fssl import metrics as metrics_lib
from tff_fssl.aggregators import hparams as aggregator_hparams
from tff_fssl.data import data_hparams
from tff_fssl.data import names as data_names
from tff_fssl.hparams import UsageError
from tff_fssl.hparams import borrow
from tff_fssl.hparams import hparam
from tff_fssl.models import evaluate as evaluate_lib
from tff_fssl.models import names as model_names
from tff_fssl.models import server_model
from tff_fssl.program import checkpoint
from tff_fssl.program import config as config_lib
from tff_fssl.program import console
from tff_fssl.program import exported
from tff_fssl.program import flags
from tff_fssl.program import inputs as inputs_lib
from tff_fssl.program import main as main_lib
from tff_fssl.program import output_tree
from tff_fssl.program import run_hparams
from tff_fssl.program import runs
from tff_fssl.program import summary
from tff_fssl.program import warm_start

_USAGE = 'programs/evaluate.py RUN|MODEL [RUN|MODEL ...] [--FLAG=VALUE ...]'
_ABOUT = (
  'Evaluates checkpoints of runs (RUN is the --output_dir of programs/train.py)'
  ' or exported models (MODEL is a folder model/ or model_best/, or a copy of'
  ' it), on the data set that they were trained for. With --federated, at the'
  ' clients, on their held-out examples: mean, spread and deciles of their'
  ' accuracies. With --local_models, the models that clients train from it. A'
  ' path that is neither, or a run without a checkpoint, is skipped with a'
  ' warning. Only numbers are read from these files: they are safe to open.'
)
RunHparams = run_hparams.RunHparams
LAST, BEST = 'last', 'best'


def _uses_ray(settings: EvaluateHparams) -> bool:
  """Says whether the clients evaluate on a Ray cluster."""
  return settings.federated and settings.runtime == 'ray'


@dataclasses.dataclass(frozen=True)
class EvaluateHparams:
  """Flags of `programs/evaluate.py`."""

  examples: str = hparam(
    'test', 'Evaluate on the test set, or on the run\'s validation examples.',
    choices=('test', 'validation'),
  )  # fmt: skip
  round: str = hparam(
    LAST,
    'The checkpoint of a run. last: the last complete one; best: the one that'
    " is best on validation examples (the run's --best_by); or the number of a"
    ' round.',
  )
  metrics: str = hparam(
    '',
    'Further figures, as for train; if empty, those of the run.',
    when=lambda own: not (own.federated or own.local_models),
  )
  data_dir: str = hparam(
    '', "The data's folder, as for train; if empty, the run's own setting."
  )
  cache_dir: str = hparam(
    '', "Folder of decoded images; if empty, the run's own setting."
  )
  batch_size: int = hparam(
    256, 'Number of examples in a batch.', minimum=1, maximum=2**20
  )
  run_model_file: bool = hparam(
    False,
    "Run the Python file that a run's --model=FILE.py:function names. Only for"
    ' runs of your own: the flags that name it come with the folder.',
  )
  local_models: bool = hparam(
    False,
    'Evaluate the models that the clients of the next round train from it,'
    ' before averaging, all on the same examples: mean and spread over clients'
    ' (FedMatch: averaged local accuracy). A run only.',
    when=lambda own: not own.federated,
  )
  federated: bool = hparam(
    False,
    'Evaluate at the clients, on held-out examples (--client_test_fraction of'
    ' the training run), by a process of TFF that sees only sums over clients.',
  )
  clients_per_evaluation: int = hparam(
    0,
    "Number of clients that evaluate, drawn by the run's --seed; 0: all.",
    minimum=0,
    maximum=10**6,
    when=lambda own: own.federated,
  )
  runtime: str = borrow(RunHparams, 'runtime', lambda own: own.federated)
  ray_address: str = borrow(RunHparams, 'ray_address', _uses_ray)
  ray_workers: int = hparam(
    0,
    'Number of worker processes that evaluate clients, as for train.',
    minimum=0,
    maximum=10**5,
    when=_uses_ray,
  )
  ray_trusted_network: bool = borrow(
    RunHparams, 'ray_trusted_network', _uses_ray
  )
  client_devices: str = borrow(
    RunHparams,
    'client_devices',
    lambda own: own.federated and own.runtime != 'tff_worker',
  )
  client_threads: int = borrow(
    RunHparams, 'client_threads', lambda own: own.federated
  )
  output: str = hparam(
    '',
    'Also write the figures to this file, as JSON: a list with an entry for'
    ' each folder.',
  )
  verbose: bool = hparam(False, "Show TensorFlow's messages.")

  def __post_init__(self):
    hparams.validate(self)
    run_hparams.parse_figures(self.metrics)
    if self.round not in (LAST, BEST) and not re.fullmatch(
      r'0|-?[1-9]\d{0,8}', self.round, re.ASCII
    ):
      raise UsageError(
        f'--round={self.round}: allowed are {LAST}, {BEST} and the number of a'
        ' round'
      )


class LoadedRun(NamedTuple):
  """A checkpoint of a run, and all that predicting by it takes.

  Attributes:
    name: Its name for users.
    round_num: The round of the checkpoint.
    task: The `experiment.Task` of the run.
    model: The `ServerModel`.
    prediction: The way of predicting.
    table: The exchange's table.
    leaves: All leaves of the checkpoint.
    rows: The `checkpoint.RowFiles` of the run.
    changed: Parts of the data that are not those of the run.
  """

  name: str
  round_num: int
  task: Any
  model: Any
  prediction: Any
  table: Any
  leaves: Mapping[str, Any] = types.MappingProxyType({})
  rows: Any = None
  changed: Sequence[str] = ()


class Evaluation(NamedTuple):
  """The rows of an evaluation for users, and its figures by name."""

  rows: dict[str, str]
  figures: Mapping[str, Any]


def evaluate(
  folder: str,
  settings: EvaluateHparams,
  has_round: bool,
  warn: Callable[[str], None],
) -> Evaluation:
  """Evaluates a run or a model, or raises `NotARunError` if it is neither."""
  if os.path.lexists(output_tree.OutputTree(folder).flags_file):
    loaded = load_run(folder, settings)
    if changed := [c for c in loaded.changed if settings.examples in c]:
      warn(f'{folder}: the {" and ".join(changed)} are not those of the run')
    return _evaluate_loaded(loaded, settings, warn)
  if not os.path.lexists(os.path.join(folder, exported.MANIFEST)):
    raise runs.NotARunError(
      f'{folder}: is neither a run (a folder with {output_tree.FLAGS}) nor an'
      f' exported model (with {exported.MANIFEST})'
    )
  if has_round:
    raise UsageError(
      '--round: an exported model has one round only; omit the flag'
    )
  if settings.local_models:
    raise UsageError(
      f'--local_models: {folder} is an exported model, of which no client'
      ' trains; give the folder of its run'
    )
  return _evaluate_loaded(_load_model(folder, settings), settings, warn)


def load_run(folder: str, settings: EvaluateHparams) -> LoadedRun:
  """Loads a checkpoint and the data of its run.

  Args:
    folder: The run's folder.
    settings: Which checkpoint, and where the data are.

  Returns:
    These.

  Raises:
    NotARunError: If the run has no checkpoint yet.
    UsageError: If the checkpoint or the data cannot be used.
  """
  tree = output_tree.OutputTree(folder)
  config = read_run_config(tree, settings)
  round_num, leaves = _read_checkpoint(tree, config, settings)

  # pylint: disable=import-outside-toplevel
  from tff_fssl.program import experiment

  frozen = warm_start.read_frozen(tree, checkpoint.run_owner(config))
  task = experiment.build_task(config, frozen, elsewhere=True)
  recorded = inputs_lib.read(tree.inputs_json)
  _check_classes(folder, recorded and recorded.classes, task)
  if recorded and config.is_private:  # A report on it may be published.
    recorded = recorded.public
  path = checkpoint.path_of(tree.checkpoints, round_num)
  owner = task.owner
  try:
    # Once more, now that the network's weights are known.
    checkpoint.check_owner(path, owner)
  except checkpoint.CheckpointError as error:
    raise UsageError(f'{path}: {error}') from error
  return LoadedRun(
    f'{folder}, round {round_num}',
    round_num,
    task,
    warm_start.extract_model(leaves),
    experiment.prediction_of(config),
    warm_start.extract_table(leaves),
    leaves,
    checkpoint.RowFiles(tree.client_rows, owner),
    recorded.differences(task.inputs) if recorded else [],
  )


def read_run_config(
  tree: output_tree.OutputTree,
  settings: EvaluateHparams,
  more: Sequence[str] = (),
) -> config_lib.Config:
  """Reads the configuration of a run.

  Args:
    tree: The run.
    settings: The folder of the data, and permissions.
    more: Arguments that take precedence over the run's flags.

  Returns:
    The configuration.

  Raises:
    UsageError: If the flags cannot be used.
  """
  arguments = [f'--flagfile={tree.flags_file}']
  if tree.read_flags().get('partition_file'):
    # The file may have changed; the run has a copy.
    arguments.append(f'--partition_file={tree.partition_json}')
  return read_config(tree.path, [*arguments, *more], settings)


def _load_model(folder: str, settings: EvaluateHparams) -> LoadedRun:
  """Loads an exported model from its Keras file, without running code."""
  problem = exported.problem(folder)
  if problem:
    raise UsageError(f'{folder}: is not a whole exported model ({problem})')
  about = exported.read_about(folder)
  round_num = about['round']
  # Test examples are the same in any partition.
  flag = f'--examples={settings.examples}' * (settings.examples != 'test')
  flag = '--federated' if settings.federated else flag
  if about['flags'].get('partition_file') and flag:
    raise UsageError(
      f'{flag}: the partition of {folder} was taken'
      ' from a file; evaluate the run, which has a copy of it'
    )
  config = read_config(folder, recorded_flags(about), settings)

  # pylint: disable=import-outside-toplevel
  from tff_fssl.program import experiment

  task = experiment.build_task(config, elsewhere=True)
  _check_classes(folder, about.get('classes'), task)
  # The exported network may have layers after those of training.
  model_fn = experiment.build_exported_fn(config)
  task = dataclasses.replace(task, model_fn=model_fn)
  loaded = warm_start.load(warm_start.find(folder), model_fn())
  model = server_model.ServerModel(*loaded.weights)
  # An exported model predicts by its network alone.
  network_alone = server_model.Prediction()
  name = f'{folder}, of round {round_num}'
  return LoadedRun(name, round_num, task, model, network_alone, ())


def _check_classes(folder: str, classes: Any, task: Any) -> None:
  """Refuses data of other classes than a model's (`UsageError`)."""
  here = task.data.class_names
  # Older runs do not say them.
  if not classes or tuple(classes) == here:
    return
  pairs = zip(classes, here)
  number, (old, new) = next(
    ((i, pair) for i, pair in enumerate(pairs) if pair[0] != pair[1]),
    (0, (f'{len(classes)} classes', f'{len(here)}')),
  )
  raise UsageError(
    f'--dataset={task.config.run.dataset}: class {number} is {new!r}, but'
    f' {folder} was trained with {old!r}, and predicts classes by their'
    ' numbers; give the classes their old names'
  )


def recorded_flags(about: Mapping[str, Any]) -> list[str]:
  """Writes the flags of a model, but for the file of its partition.

  Args:
    about: The record of the export.
  """
  # Only texts of flags are taken from a record that may be downloaded.
  values = {n: hparams.format_value(v) for n, v in about['flags'].items()}
  values.pop('partition_file', '')
  return [*(f'--{n}={v}' for n, v in values.items()), *moment_flags(about)]


def moment_flags(about: Mapping[str, Any]) -> list[str]:
  """Writes the flags of a model's own mean and deviation, if it has them.

  Args:
    about: The record of the export.
  """
  inputs = about['inputs_of_model.keras']
  return [
    f'--{name}={",".join(map(str, inputs[name]))}'
    for name in ('mean', 'std')
    if name in inputs
  ]


def _evaluate_loaded(
  loaded: LoadedRun, settings: EvaluateHparams, warn: Callable[[str], None]
) -> Evaluation:
  """Evaluates a model on held examples, or at the clients."""
  if settings.federated:
    return _evaluate_clients(loaded, settings, warn)
  if settings.local_models:
    return _evaluate_local_models(loaded, settings)
  task, prediction = loaded.task, loaded.prediction
  # pylint: disable-next=import-outside-toplevel
  from tff_fssl.program import experiment

  held, own = task.examples(settings.examples), prediction.member is not None
  if not len(held):
    raise UsageError(
      f'--dataset={task.config.run.dataset}: has no {settings.examples}'
      ' examples; predict takes any data'
    )
  config = task.config
  if settings.metrics:
    run = dataclasses.replace(config.run, metrics=settings.metrics)
    config = dataclasses.replace(config, run=run)
  evaluate_fn = evaluate_lib.build_evaluate_fn(
    task.model_fn,
    task.views,
    prediction=prediction,
    batch_size=settings.batch_size,
    figures=experiment.chosen_figures(config, task.data.test.y),
  )
  table = loaded.table if own else ()
  result = evaluate_fn(loaded.model, held.x, held.y, table)
  rows = _rows(loaded.name, settings, len(held), result)
  figures: dict[str, Any] = {'num_examples': len(held), **result}
  if not own and math.isfinite(result['accuracy']):
    low, high = metrics_lib.accuracy_interval(result['accuracy'], len(held))
    figures['accuracy_interval'] = {'low': low, 'high': high}
    if metrics_lib.interval_of_few(result['accuracy'], len(held)):
      rows['accuracy'] += f' (95% interval: {low:.4f} to {high:.4f})'
  if task.data.train.kind != data_names.IMAGES:
    rows['data'] = task.data.notes
  return Evaluation(rows, figures)


def _evaluate_local_models(
  loaded: LoadedRun, settings: EvaluateHparams
) -> Evaluation:
  """Evaluates the models into which the next round's clients train a model."""
  # pylint: disable=import-outside-toplevel
  from tff_fssl.program import client_evaluation

  next_round = loaded.round_num + 1
  if next_round < 1:
    raise UsageError(
      f'--local_models: {loaded.name}: no clients train in pre-training; give a'
      ' --round from 0'
    )
  held = loaded.task.examples(settings.examples)
  figures = client_evaluation.evaluate_local_models(
    loaded.task,
    loaded.leaves,
    held,
    round_num=next_round,
    rows=loaded.rows,
    batch_size=settings.batch_size,
  )
  rows = {
    'model': loaded.name,
    'examples': f'{len(held)} {settings.examples}',
    "clients' models": f'{figures["num_clients"]}, of round {next_round}',
    'accuracy, mean': f'{figures["accuracy"]:.4f}',
    '  standard deviation': f'{figures["accuracy_deviation"]:.4f}',
    '  mean of the worst tenth': f'{figures["accuracy_worst_decile"]:.4f}',
    'loss, mean': f'{figures["loss"]:.4f}',
  }
  return Evaluation(rows, {'num_examples': len(held), **figures})


def _evaluate_clients(
  loaded: LoadedRun, settings: EvaluateHparams, warn: Callable[[str], None]
) -> Evaluation:
  """Evaluates a model at the clients."""
  # pylint: disable=import-outside-toplevel
  from tff_fssl import runtime
  from tff_fssl.program import client_evaluation

  run = loaded.task.config.run
  context = runtime.build_context(
    hparams.build_from(
      settings,
      runtime.Settings,
      simulate_secure_aggregation=run.simulate_secure_aggregation,
    ),
    warn=warn,
  )
  try:
    figures = client_evaluation.evaluate_clients(
      loaded.task,
      loaded.model,
      loaded.prediction,
      loaded.table,
      context=context,
      max_clients=settings.clients_per_evaluation,
      batch_size=settings.batch_size,
      on_failure=lambda _, client_id, reason: warn(
        f'client {loaded.task.partition.client_name(client_id)} is skipped:'
        f' {reason}'
      ),
    )
  except runtime.WorkerError as error:
    raise UsageError(
      f'--runtime={settings.runtime}: {error}; give the command again, or use'
      ' --runtime=in_process'
    ) from error
  finally:
    context.close()
  num_clients = loaded.task.partition.num_clients
  rows = client_evaluation.describe(figures, num_clients)
  return Evaluation({'model': loaded.name, **rows}, figures)


def read_config(
  folder: str, arguments: list[str], settings: EvaluateHparams
) -> config_lib.Config:
  """Reads the configuration of a run or model from its own flags.

  The data are in this machine's folder.
  """
  for name in ('data_dir', 'cache_dir'):
    if here := getattr(settings, name):
      arguments = [*arguments, f'--{name}={here}']
  config = parse_recorded(folder, arguments, settings.run_model_file)
  if settings.federated:
    _check_federated(folder, config)
  if settings.local_models:
    _check_local_models(folder, config)
  if settings.examples == 'validation' and not config.run.num_validation:
    raise UsageError(
      '--examples=validation: the run kept no validation examples'
      ' (--num_validation=0); test is allowed'
    )
  return config


def parse_recorded(
  folder: str,
  arguments: list[str],
  run_model_file: bool,
  info: data_names.DataSetInfo | None = None,
) -> config_lib.Config:
  """Makes the configuration of a run or model of its recorded flags.

  Args:
    folder: The run or model.
    arguments: Its flags.
    run_model_file: Whether a Python file that `--model` names may run.
    info: As for `config.build_config`.

  Returns:
    The configuration.

  Raises:
    UsageError: If the flags cannot be used, or name a file that may not run.
  """
  parsed = flags.parse(arguments, config_lib.groups())
  if not parsed.is_set('normalization'):
    # Older runs, whose images were all normalized.
    arguments = [*arguments, f'--normalization={data_hparams.STANDARD}']
    parsed = flags.parse(arguments, config_lib.groups())
  # Nobody typed these flags: some may have no effect.
  config = config_lib.build_config(parsed.mark_recorded(folder), info)
  model = config.run.model
  # The path comes with the folder, which may be a stranger's.
  if model_names.file_and_function(model) and not run_model_file:
    raise UsageError(
      f'{folder}: its --model={model} is a Python file, which has to be run; if'
      ' you trust it, give --run_model_file'
    )
  return config


def _check_federated(folder: str, config: config_lib.Config) -> None:
  """Refuses runs with clients that cannot evaluate (`UsageError`)."""
  if config.aggregator.aggregator == aggregator_hparams.DP:
    raise UsageError(
      f'--federated: {folder} was trained with --aggregator=dp, whose epsilon'
      ' would not hold for sums over held-out examples, which have no noise;'
      " leave --federated out: test data are nobody's"
    )
  if not config.run.client_test_fraction:
    raise UsageError(
      f'--federated: the clients of {folder} hold out no examples'
      ' (--client_test_fraction=0); train with --client_test_fraction=0.2, or'
      ' leave --federated out to evaluate on the test set'
    )


def _check_local_models(folder: str, config: config_lib.Config) -> None:
  """Refuses runs that hide single clients (`UsageError`)."""
  name = config.aggregator.aggregator
  if config.is_private:
    raise UsageError(
      f'--local_models: {folder} was trained with --aggregator={name}, which'
      ' hides the learning of single clients; omit the flag'
    )


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
  if settings.round != LAST:
    if settings.round == BEST:
      round_num = summary.best_round_num(tree.eval_csv, config.run.best_by)
      if round_num is None:
        raise UsageError(
          f'--round={BEST}: {tree.path} has no evaluation on validation data'
          ' (--num_validation)'
        )
    else:
      round_num = int(settings.round)
    if round_num not in there:
      of_round = f' (round {round_num})' if settings.round == BEST else ''
      raise UsageError(
        f'--round={settings.round}{of_round}: there is no checkpoint of it in'
        f' {tree.checkpoints}; there are: {", ".join(map(str, there))}'
      )
    wanted = [round_num]
  try:
    return checkpoint.read_latest(
      tree.checkpoints, checkpoint.run_owner(config), wanted
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
      metrics_lib.FIGURES.get(name, re.sub('[/_]', ' ', name)): (
        'not defined: a class has no example, or an output is not finite'
        if name == metrics_lib.AUROC and math.isnan(value)
        else f'{value:.4f}'
      )
      for name, value in result.items()
    },
  }


@main_lib.command(
  _USAGE,
  _ABOUT,
  EvaluateHparams,
  missing='no folder was given; give one, a run or an exported model',
)
def evaluate_main(settings: EvaluateHparams, parsed: flags.ParsedFlags) -> None:
  """Measures the accuracy of a run or of an exported model."""
  _check(settings, parsed)
  main_lib.quiet(settings.verbose)
  # An empty line between two tables, none before the first.
  breaks = itertools.chain([''], itertools.repeat('\n'))

  def evaluate_one(path: str) -> dict[str, Any]:
    done = evaluate(
      os.path.normpath(path), settings, parsed.is_set('round'), main_lib.warn
    )
    console.show(next(breaks) + console.table(done.rows), flush=True)
    return {'model': done.rows['model'], **_plain(done.figures)}

  records = runs.read_each(parsed.positional, evaluate_one, main_lib.warn)
  if settings.output:
    content = f'{json.dumps(records, indent=2)}\n'.encode()
    with durable.storage_errors('--output'):
      durable.write_file(settings.output, [content])


def _check(settings: EvaluateHparams, parsed: flags.ParsedFlags) -> None:
  """Refuses flags that do not fit together (`UsageError`)."""
  if settings.federated and 'examples' in parsed.command_line:
    raise UsageError(
      f'--examples={settings.examples}: with --federated, the examples are'
      ' those that clients hold out; omit one of the two'
    )
  main_lib.prepare_output('output', settings.output, '.json')


def _plain(figures: Mapping[str, Any]) -> dict[str, Any]:
  """Converts figures to JSON's types, with None for NaN."""
  plain: dict[str, Any] = {}
  for name, value in figures.items():
    if isinstance(value, Mapping):
      plain[name] = _plain(value)
    elif name.startswith('num_'):
      plain[name] = int(value)
    else:
      # Standard JSON has no NaN, and NumPy's scalars are not serializable.
      plain[name] = None if math.isnan(value) else float(value)
  return plain
