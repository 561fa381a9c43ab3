"""Builds the data, the model and the process of a configuration."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
import contextlib
import dataclasses
import functools
from typing import Any, cast

import numpy as np

from tff_fssl import hparams
from tff_fssl import metrics as metrics_lib
from tff_fssl.aggregators import factory
from tff_fssl.aggregators import hparams as aggregator_hparams
from tff_fssl.data import augment
from tff_fssl.data import clients
from tff_fssl.data import data_hparams
from tff_fssl.data import inspection
from tff_fssl.data import names as data_names
from tff_fssl.data import partition as partition_lib
from tff_fssl.data import sources
from tff_fssl.data import text_views
from tff_fssl.data import vector_views
from tff_fssl.data.sources import vectors
from tff_fssl.interface import round_hparams
from tff_fssl.lazy import tf
from tff_fssl.models import adapter
from tff_fssl.models import evaluate
from tff_fssl.models import flops
from tff_fssl.models import model_fns
from tff_fssl.models import networks
from tff_fssl.models import server_model
from tff_fssl.models.weights import Weights
from tff_fssl.program import checkpoint
from tff_fssl.program import config as config_lib
from tff_fssl.program import inputs as inputs_lib
from tff_fssl.program import loggers
from tff_fssl.program import run_config
from tff_fssl.program import run_data
from tff_fssl.program import run_hparams
from tff_fssl.program import summary
from tff_fssl.program import training_types
from tff_fssl.program import warm_start
from tff_fssl.rounds import composer
from tff_fssl.rounds import compute as round_compute
from tff_fssl.rounds import network_factory
from tff_fssl.rounds import process as process_lib
from tff_fssl.rounds import sampling
from tff_fssl.rounds import states

# Classes are uneven if the largest is more than so many times the smallest.
_UNEVEN = 3


def prediction_of(config: config_lib.Config) -> server_model.Prediction:
  """Returns how the model of a configuration predicts."""
  algorithm = config.entry.configure(config.algorithm, config.round)
  return states.States(algorithm).prediction


@dataclasses.dataclass(frozen=True)
class Task:
  """The data and the network of a configuration, before there is a process.

  Attributes:
    config: The configuration.
    data: The data set.
    partition: The training examples of the server and of each client.
    views: How examples become the network's inputs.
    model_fn: Builds the network.
  """

  config: config_lib.Config
  data: sources.DataSet
  partition: partition_lib.Partition
  views: augment.Views
  model_fn: Callable[[], tf.keras.Model]

  @functools.cached_property
  def network(self) -> tf.keras.Model:
    """Builds a network for its names and shapes. Its weights mean nothing."""
    return self.model_fn()

  @functools.cached_property
  def owner(self) -> checkpoint.Owner:
    """Returns the owner of the task's checkpoints."""
    return checkpoint.model_owner(
      checkpoint.run_owner(self.config), self.network
    )

  @functools.cached_property
  def inputs(self) -> inputs_lib.Inputs:
    """Digests the data."""
    return inputs_lib.measure(self.data, self.partition)

  def examples(self, split: str) -> sources.Examples:
    """Returns the examples of 'test' or 'validation'."""
    if split == 'test':
      return self.data.test
    indices = self.partition.validation
    train = self.data.train
    return sources.Examples(train.x[indices], train.y[indices])


@dataclasses.dataclass(frozen=True)
class Experiment:
  """The arguments of `training.train`.

  Attributes:
    task: Data and model.
    process: The learning process.
    data_source: Clients of the process.
    evaluate_fn: Process state -> metrics by name: 'test/accuracy', ...
    failed_clients: The clients with unusable data.
  """

  task: Task
  process: composer.FsslProcess
  data_source: sampling.CohortDataSource
  evaluate_fn: Callable[[Any], Mapping[str, float]]
  failed_clients: sampling.FailedClients

  def start(self, weights: Weights) -> server_model.ServerModel:
    """Returns the model, of NumPy arrays, of a run that starts from weights."""
    tensors = tf.nest.map_structure(tf.convert_to_tensor, weights)
    model = self.process.start(Weights(*tensors))
    return tf.nest.map_structure(lambda tensor: tensor.numpy(), model)

  def explain_non_finite(
    self, state: Any, round_num: int, num_clients: int
  ) -> list[str]:
    """Repeats a round's clients to find those that were not finite.

    Args:
      state: The process's state before the round.
      round_num: The number of the round.
      num_clients: How many clients were not finite in it.

    Returns:
      Lines that say which clients these were, and where they failed.
    """
    seed, source, lines = self.task.config.run.seed, self.data_source, []
    called = self.task.partition.client_name
    for client_id, dataset in zip(
      source.client_ids(seed, round_num), source.cohort(seed, round_num)
    ):
      found = self.process.find_non_finite(state, dataset, round_num)
      if found is not None:
        lines.append(f'client {called(client_id)}: not finite: first {found}')
    if len(lines) < num_clients:
      # Rounding may differ slightly from that of TFF's computation.
      lines.append(
        f'{num_clients - len(lines)} of {num_clients} clients that were not'
        ' finite are finite when repeated'
      )
    return lines

  def counts(self, round_num: int) -> dict[str, int]:
    """Counts the unlabelled examples of known class in a round.

    Args:
      round_num: The number of the round.

    Returns:
      The column of train.csv. Empty if clients make no pseudo-labels, must stay
      hidden, or hold no example of known class.
    """
    config, partition = self.task.config, self.task.partition
    hidden = config.is_private or not config.learns_unlabeled
    if hidden or not partition.class_counts.any():
      return {}
    held = (
      clients.unlabeled_examples(
        partition, client_id, round_num, config.streaming
      )
      for client_id in self.data_source.client_ids(config.run.seed, round_num)
    )
    is_known = self.task.data.train.y >= 0
    num_known = sum(int(is_known[indices].sum()) for indices in held)
    return {metrics_lib.NUM_KNOWN: num_known}

  def explain_rejected(self, state: Any, round_num: int) -> list[str]:
    """Repeats a round's clients until one is rejected.

    Args:
      state: The process's state before the round.
      round_num: The number of the round.

    Returns:
      A line that says which client, and why. None if no client whose data are
      usable is rejected.
    """
    seed, source = self.task.config.run.seed, self.data_source
    for client_id, dataset in zip(
      source.client_ids(seed, round_num), source.cohort(seed, round_num)
    ):
      found = self.process.find_rejected(state, dataset, round_num)
      if found is not None:
        called = self.task.partition.client_name(client_id)
        return [f'client {called}: rejected: {found}']
    return []


class ExperimentHooks(training_types.Hooks):
  """The hooks of the training program."""

  def __init__(
    self,
    experiment: Experiment,
    context: Any,
    profiler: loggers.RoundProfiler,
    on_round_done: Callable[[Any, training_types.RoundReport], None],
  ):
    """Initializes the hooks.

    Args:
      experiment: The experiment.
      context: The execution context, which may have a `timing`.
      profiler: Profiles the chosen rounds.
      on_round_done: Called after each round, as `round_done` is.
    """
    self._experiment = experiment
    self._context = context
    self._profiler = profiler
    self._on_round_done = on_round_done

  def round_context(
    self, round_num: int
  ) -> contextlib.AbstractContextManager[None]:
    """Profiles the round, if it was chosen."""
    return self._profiler.round(round_num)

  def left_out_clients(self, round_num: int) -> list[tuple[str, str]]:
    """Returns the clients that the data source could not load."""
    called = self._experiment.task.partition.client_name
    failed = self._experiment.failed_clients.take(round_num)
    return [(called(client_id), reason) for client_id, reason in failed]

  def seconds(self) -> Mapping[str, float]:
    """Returns the times that the runtime reports, if any."""
    timing = getattr(self._context, 'timing', None)
    return {} if timing is None else dataclasses.asdict(timing)

  def counts(self, round_num: int) -> Mapping[str, int]:
    """Counts the examples by which pseudo-labels are judged."""
    return self._experiment.counts(round_num)

  def explain_rejected(self, state: Any, round_num: int) -> list[str]:
    """Finds the first client that was rejected, and why."""
    return self._experiment.explain_rejected(state, round_num)

  def explain_non_finite(
    self, state: Any, round_num: int, num_clients: int
  ) -> list[str]:
    """Finds the clients, with `--debug_non_finite`."""
    experiment = self._experiment
    if not experiment.task.config.run.debug_non_finite:
      return []
    return experiment.explain_non_finite(state, round_num, num_clients)

  def round_done(self, state: Any, report: training_types.RoundReport) -> None:
    """Passes the round on."""
    self._on_round_done(state, report)


def configure_devices(config: config_lib.Config) -> None:
  """Sets devices up, before their first use.

  GPUs share memory and repeat results. The flag sets the cores of operations.

  Args:
    config: The configuration.
  """
  if config.run.intra_op_threads:
    tf.config.threading.set_intra_op_parallelism_threads(
      config.run.intra_op_threads
    )
  gpus = tf.config.list_physical_devices('GPU')
  for gpu in gpus:
    # Else TensorFlow takes all memory of a GPU, also from other programs.
    tf.config.experimental.set_memory_growth(gpu, True)
  # Under differential privacy the noise must not repeat.
  if gpus and config.aggregator.aggregator != aggregator_hparams.DP:
    # Nothing uses the global seed, but TensorFlow demands that one is set.
    tf.random.set_seed(0)
    tf.config.experimental.enable_op_determinism()


def build_views(
  config: config_lib.Config,
  data: sources.DataSet,
  partition: partition_lib.Partition,
) -> augment.Views:
  """Builds the views of examples that `run_data.normalize` has returned."""
  settings, info = config.data, config.info
  if info.kind == data_names.TEXTS:
    return text_views.build_views(
      run_data.measured_examples(config, data, partition).x,
      settings.vocabulary_size,
      weak_deletion=settings.weak_deletion,
      strong_replacement=settings.strong_replacement,
      strong_swaps=settings.strong_edits,
      strong_deletion=settings.strong_edits,
    )
  if info.kind == data_names.VECTORS:
    info = cast(vectors.VectorInfo, info)
    return vector_views.build_views(
      data.mean,
      data.std,
      num_weak=info.num_weak,
      num_strong=info.num_strong,
      normalize=settings.normalization == data_hparams.STANDARD,
      weak_noise=settings.weak_noise,
      strong_noise=settings.strong_noise,
      strong_dropout=settings.strong_dropout,
    )
  return augment.build_views(
    data.example_shape,
    policy=config.run.augmentation,
    mean=data.mean,
    std=data.std,
    flip=info.flip,
    crop_and_flip=config.run.crop_and_flip,
  )


def build_model_fn(
  config: config_lib.Config, frozen_values: model_fns.FrozenValues | None = None
) -> adapter.ModelFn:
  """Returns the function that builds a configuration's network.

  Args:
    config: The configuration.
    frozen_values: The weights of layers that do not train. None: all train.

  Returns:
    The function.
  """
  info = config.info
  algorithm = config.entry.configure(config.algorithm, config.round)
  model_fn: adapter.ModelFn = functools.partial(
    networks.build_network,
    config.run.model,
    info.input_shape,
    info.num_classes,
    config.model_norm,
    vocabulary_size=config.data.vocabulary_size
    if info.kind == data_names.TEXTS
    else 0,
  )
  if frozen_values is not None:
    train_layers = config.run.train_layers
    model_fn = model_fns.FrozenFn(model_fn, train_layers, frozen_values)
  return network_factory.network_fn(model_fn, algorithm)


def load_weights(
  config: config_lib.Config, source: warm_start.Source
) -> warm_start.Loaded:
  """Loads the weights that a new run starts from, or raises `UsageError`."""
  model_fn = build_model_fn(config)

  def new_weights() -> Sequence[np.ndarray]:
    # A process with this seed would initialize the same weights. A session on
    # the CPU does not claim the GPU that training uses.
    on_cpu = tf.compat.v1.ConfigProto(device_count={'GPU': 0})
    with tf.Graph().as_default():
      network = adapter.Network(model_fn, seed=config.run.seed, trace=False)
      with tf.compat.v1.Session(config=on_cpu) as session:
        weights = [v.value for v in network.model.weights]
        session.run([v.initializer for v in weights])
        return session.run(weights)

  model, head = model_fn(), prediction_of(config).head
  whole = head and head.build(model, config.info.num_classes)
  constants: Mapping[str, tf.Variable] = {}
  if config.run.train_layers:
    model_fns.freeze(model, config.run.train_layers)
    constants = model_fns.frozen_variables(model)
  return warm_start.load(
    source, model, frozen=constants, whole=whole, new_weights=new_weights
  )


def build_exported_fn(
  config: config_lib.Config,
) -> Callable[[], tf.keras.Model]:
  """Returns the function that builds the exported model of logits."""
  model_fn, head = build_model_fn(config), prediction_of(config).head
  if head is None:
    return model_fn
  num_classes = config.info.num_classes
  return lambda: head.build(model_fn(), num_classes)


def build_task(
  config: config_lib.Config,
  frozen_values: model_fns.FrozenValues | None = None,
  *,
  elsewhere: bool = False,
) -> Task:
  """Loads and splits the data, and builds all that needs no process.

  Args:
    config: The configuration.
    frozen_values: See `build_model_fn`.
    elsewhere: Whether clients may have nothing in the data set.

  Returns:
    The task.

  Raises:
    UsageError: If the data are missing or cannot be split as requested.
  """
  run = config.run
  data = sources.load_found(config.info, run.data_dir or None)
  partition = run_data.load_partition(config, data, elsewhere=elsewhere)
  data = run_data.normalize(config, data, partition)
  run_config.check_cohort(config, partition.num_clients)
  run_config.check_labeled_majority(
    config, sum(map(bool, map(len, partition.client_labeled)))
  )
  return Task(
    config,
    data,
    partition,
    build_views(config, data, partition),
    build_model_fn(config, frozen_values),
  )


def measure_compute(task: Task) -> summary.Compute | None:
  """Measures the compute of a client of mean size and of the server.

  Args:
    task: Data and model.

  Returns:
    The figures, or None if they depend on the data.

  Raises:
    UsageError: If algorithm and model do not fit together.
  """
  config, partition = task.config, task.partition
  stored = clients.element_spec(task.data.example_shape)['unlabeled']['x']
  try:
    measured = round_compute.measure(
      task.model_fn,
      config.entry.configure(config.algorithm, config.round),
      views=task.views,
      stored=stored,
    )
  except flops.UnknownFlopsError:
    return None
  num_labeled, num_unlabeled = (
    sum(map(len, held)) / partition.num_clients
    for held in (partition.client_labeled, partition.client_unlabeled)
  )
  # A round sees one part of a stream.
  num_unlabeled /= config.streaming.steps
  if config.run.full_labels:
    num_labeled /= config.streaming.steps
  if partition.settings.labeled_also_unlabeled:
    num_unlabeled += num_labeled
  client = flops.Flops()
  if config.trains_clients:
    client = measured.count_client(num_labeled, num_unlabeled)
  server = measured.count_server(len(partition.server_labeled))
  return summary.Compute(
    measured.forward,
    client.most / measured.forward,
    client.least / measured.forward,
    server.most / measured.forward,
  )


def build_experiment(task: Task, server_data_dir: str) -> Experiment:
  """Builds the process and its data source.

  Args:
    task: Data and model.
    server_data_dir: Folder for the server's labelled images, if they are too
      many to be constants of the computation.

  Returns:
    The experiment.

  Raises:
    UsageError: If algorithm, model and data do not fit together.
  """
  config, data, partition = task.config, task.data, task.partition
  _check_streaming(config.streaming.steps, partition)
  server_data_fn = None
  if config.round.scenario == data_names.LABELS_AT_SERVER:
    held = partition.server_labeled
    server_data_fn = clients.build_server_data_fn(
      data.train.x[held],
      partition.given_labels(data.train.y, held),
      server_data_dir,
    )
  round_settings = bound_clients(config, partition)
  process = process_lib.build_process(
    task.model_fn,
    config.entry.configure(config.algorithm, round_settings),
    process_lib.DataSpec(
      clients.element_spec(
        data.example_shape,
        stragglers=bool(config.participation.straggler_probability),
      ),
      task.views,
      server_data_fn,
      data.num_classes,
      partition.num_clients,
    ),
    seed=config.run.seed,
    aggregator=_build_aggregator(config),
  )
  load = run_data.Loader(
    run_data.Held(config, data, partition), run_data.training_examples
  )
  failed_clients = sampling.FailedClients()
  # Which client failed depends on its data: only the noised sum may show that.
  is_noised = config.aggregator.aggregator == aggregator_hparams.DP
  data_source = sampling.build_data_source(
    process,
    load(),
    seed=config.run.seed,
    on_failure=(lambda *_: None) if is_noised else failed_clients.add,
    participation=config.participation,
    num_clients=partition.num_clients,
    # A run without clients' training may state more than there are.
    clients_per_round=min(config.run.clients_per_round, partition.num_clients),
    trains_clients=config.trains_clients,
    load_elsewhere=load,
  )
  return Experiment(
    task,
    process,
    data_source,
    _build_evaluate_fn(task, process.prediction),
    failed_clients,
  )


def _build_aggregator(
  config: config_lib.Config,
) -> factory.Factory | None:
  is_mean = config.aggregator.aggregator == aggregator_hparams.MEAN
  if is_mean or not config.aggregates:
    return None
  examples = (
    config.round.client_weighting == 'examples' and not config.sets_weights
  )
  return factory.build_aggregator(
    config.aggregator,
    # A weight that is set by the algorithm, or equal for all, is at most 1.
    max_weight=factory.MAX_EXAMPLES_WEIGHT if examples else 1.0,
    clients_per_round=config.run.clients_per_round,
    population=config.run.num_clients,
  )


def bound_clients(
  config: config_lib.Config, partition: partition_lib.Partition
) -> round_hparams.RoundHparams:
  """Sets the largest client's size as the bound of examples.

  Args:
    config: The configuration.
    partition: The partition.

  Returns:
    The hyper-parameters of a round.

  Raises:
    UsageError: If the given bound would reject honest clients.
  """
  pairs = zip(partition.client_labeled, partition.client_unlabeled)
  uses = 1 + partition.settings.labeled_also_unlabeled
  largest = max((uses * len(a) + len(b) for a, b in pairs), default=0)
  given = config.round.max_client_examples
  if given and largest > given:
    raise hparams.UsageError(
      f'--max_client_examples={given}: the largest client has {largest}'
      ' examples; give at least that number'
    )
  return dataclasses.replace(
    config.round, max_client_examples=given or max(largest, 1)
  )


def _check_streaming(steps: int, partition: partition_lib.Partition) -> None:
  """Refuses parts that no client could fill (`UsageError`)."""
  full = partition.settings.full_labels
  held = partition.client_labeled if full else partition.client_unlabeled
  most = max(map(len, held), default=0)
  if steps > max(most, 1):
    raise hparams.UsageError(
      f'--streaming_steps={steps}: no client has more than {most}'
      f' {"labelled" if full else "unlabelled"} examples, so that some parts'
      ' would be empty everywhere; give at most that'
    )


def chosen_figures(
  config: config_lib.Config, test_labels: np.ndarray
) -> tuple[str, ...]:
  """Returns the further figures of evaluations: names of `metrics.FIGURES`.

  Args:
    config: The configuration.
    test_labels: The classes of the test examples, int [N].

  Returns:
    Those of `--metrics`, or the balanced accuracy where classes are uneven, and
    that of `--best_by`.
  """
  run = config.run
  if config.trains_alone:
    return ()
  figures = run_hparams.parse_figures(run.metrics)
  _, counts = np.unique(test_labels, return_counts=True)
  is_uneven = len(counts) and max(counts) > _UNEVEN * min(counts)
  if is_uneven and not figures:
    figures = (metrics_lib.BALANCED_ACCURACY,)
  selects = run.num_validation and run.best_by in metrics_lib.FIGURES
  return tuple(dict.fromkeys([*figures, *[run.best_by] * bool(selects)]))


def _build_evaluate_fn(
  task: Task, prediction: server_model.Prediction
) -> Callable[[Any], Mapping[str, float]]:
  splits = ['test', *(['validation'] if task.config.run.num_validation else [])]
  examples = {split: task.examples(split) for split in splits}
  figures = chosen_figures(task.config, task.data.test.y)
  evaluate_model = evaluate.build_evaluate_fn(
    task.model_fn, task.views, prediction=prediction, figures=figures
  )
  if task.config.run.best_by == metrics_lib.AUROC:
    names = task.data.class_names
    counts = np.bincount(examples['validation'].y, minlength=len(names))
    if missing := [name for name, n in zip(names, counts) if not n]:
      raise hparams.UsageError(
        f'--best_by={metrics_lib.AUROC}: no validation example is of'
        f' {inspection.shown(missing)}, so that it is not defined; raise'
        ' --num_validation, or select by another figure'
      )

  def evaluate_fn(state: Any) -> Mapping[str, float]:
    model, result = state.global_model_weights, OrderedDict()
    # Each client may have a model of its own.
    table = state.distributor['table'] if prediction.member else ()
    for split, held in examples.items():
      measured = evaluate_model(model, held.x, held.y, table)
      for name, value in measured.items():
        result[f'{split}/{name}'] = value
    return result

  return evaluate_fn
