"""Evaluates models on held-out examples of clients, or models of clients.

The first is a federated computation. The second repeats clients' work.
"""

from __future__ import annotations

from collections.abc import Mapping
import tempfile
from typing import Any

from tff_fssl import runtime
from tff_fssl.aggregators import hparams as aggregator_hparams
from tff_fssl.data import clients
from tff_fssl.data import sources
from tff_fssl.hparams import UsageError
from tff_fssl.lazy import tf
from tff_fssl.models import evaluate
from tff_fssl.models import server_model
from tff_fssl.program import checkpoint
from tff_fssl.program import config as config_lib
from tff_fssl.program import experiment
from tff_fssl.program import run_data
from tff_fssl.program import training
from tff_fssl.rounds import client_accuracy
from tff_fssl.rounds import client_work
from tff_fssl.rounds import composer
from tff_fssl.rounds import federated_evaluation
from tff_fssl.rounds import sampling

# TFF's worker gets the data of so many clients at once.
_COHORT_SIZE = 50
# No cohort of training is drawn in this round.
_ROUND = 0


def evaluate_clients(
  task: experiment.Task,
  model: server_model.ServerModel,
  prediction: server_model.Prediction,
  table: Any,
  *,
  context: Any,
  max_clients: int = 0,
  batch_size: int = 256,
  on_failure: sampling.OnFailure = sampling.warn_of_failure,
) -> Mapping[str, Any]:
  """Evaluates a model at clients, cohort by cohort.

  Args:
    task: Data and network. Its partition has held out examples of clients.
    model: The model, of arrays.
    prediction: The way of predicting.
    table: The table of the exchange, which holds clients' own models.
    context: The execution context, of `runtime.build_context`.
    max_clients: The number of clients, drawn by the run's seed. 0: all.
    batch_size: Examples in a batch.
    on_failure: See `sampling.OnFailure`.

  Returns:
    The figures of `client_accuracy.finalize`, as numbers.
  """
  config, partition = task.config, task.partition
  seed, population = config.run.seed, partition.num_clients
  whole = federated_evaluation.whole_model(prediction, model, table)
  process = federated_evaluation.build_evaluation_process(
    task.model_fn,
    whole,
    views=task.views,
    element_spec=clients.element_spec(task.data.example_shape),
    num_classes=task.data.num_classes,
    prediction=prediction,
    num_clients=population,
    batch_size=batch_size,
    max_client_examples=max(map(len, partition.client_test)),
    secure_sum=config.aggregator.aggregator == aggregator_hparams.SECURE,
  )
  held = run_data.Held(config, task.data, partition)
  load = run_data.Loader(held, run_data.test_examples)
  source = sampling.build_data_source(
    process,
    load(),
    load_elsewhere=load,
    seed=seed,
    num_clients=population,
    clients_per_round=population,
    on_failure=on_failure,
  )
  num_clients = min(max_clients or population, population)
  # By the seed, so that each call evaluates the same clients.
  chosen = sampling.sample_cohort(seed, _ROUND, population, num_clients)
  with runtime.installed(context):
    state = process.set_model_weights(process.initialize(), whole)
    for start in range(0, num_clients, _COHORT_SIZE):
      ids = chosen[start : start + _COHORT_SIZE]
      cohort = source.chosen(_ROUND, dict.fromkeys(ids, 0))
      state, metrics = process.next(state, cohort)
  figures: Mapping[str, Any] = metrics['client_work']['eval'][
    'total_rounds_metrics'
  ]
  return figures


def evaluate_local_models(
  task: experiment.Task,
  leaves: Mapping[str, Any],
  held: sources.Examples,
  *,
  round_num: int,
  rows: checkpoint.RowFiles,
  batch_size: int = 256,
) -> Mapping[str, Any]:
  """Evaluates the models that a round's clients make of a model.

  Each trains as it would in the round, but the updates are not averaged. This
  is FedMatch's averaged local accuracy, one round later.

  Args:
    task: Data and network.
    leaves: The leaves of the checkpoint before the round.
    held: The examples to evaluate on, the same for all clients.
    round_num: The round, >= 1, which decides its clients and their training.
    rows: What clients sent, if the run keeps it in files.
    batch_size: Examples in a batch.

  Returns:
    The figures of `evaluate.summarize_clients`, and `num_clients`, as numbers.

  Raises:
    UsageError: If clients make no whole models, the checkpoint is of another
      program, or a file of `rows` cannot be read.
  """
  config = task.config
  # The run's own folder stays as it is.
  with tempfile.TemporaryDirectory() as folder:
    made = experiment.build_experiment(task, folder)
    process, source = made.process, made.data_source
    make_model = _local_model_of(config, process)
    evaluate_fn = evaluate.build_evaluate_fn(
      task.model_fn,
      task.views,
      prediction=process.prediction._replace(also={}),
      batch_size=batch_size,
    )
    try:
      structure = training.state_structure(process, source)
      state = training.fill_structure(leaves, structure).process
    except checkpoint.CheckpointError as error:
      raise UsageError(f'--local_models: the checkpoint: {error}') from error
    if process.outside is not None:
      state = checkpoint.OutsideRows(process.outside, rows).load(
        state, source.client_ids(config.run.seed, round_num)
      )
    results = []
    for dataset in source.cohort(config.run.seed, round_num):
      own = make_model(state, dataset, round_num)
      of_client = evaluate_fn(own, held.x, held.y)
      results.append((of_client['accuracy'], of_client['loss']))
  if not results:
    raise UsageError(
      f'--local_models: round {round_num} has no clients that take part; give'
      ' another --round'
    )
  figures = evaluate.summarize_clients(
    *tf.unstack(tf.constant(results), axis=1)
  )
  return {
    'num_clients': len(results),
    **{name: float(value) for name, value in figures.items()},
  }


def _local_model_of(
  config: config_lib.Config, process: composer.FsslProcess
) -> client_work.LocalModel:
  """Returns `process.local_model`, or raises `UsageError` if there is none."""
  if process.local_model is not None and config.trains_clients:
    return process.local_model
  why = 'its clients keep models of their own, or have no whole ones'
  if not config.trains_clients:
    why = f'clients do not train with --scenario={config.round.scenario}'
  raise UsageError(
    f'--local_models: --algorithm={config.run.algorithm}: {why}; omit the flag'
  )


def describe(figures: Mapping[str, Any], num_clients: int) -> dict[str, str]:
  """Returns the rows of a summary, for `console.table`.

  Args:
    figures: A result of `evaluate_clients`.
    num_clients: The number of the run's clients.

  Returns:
    The rows.
  """
  num, num_with = figures['num_clients'], figures['num_clients_with_examples']
  rejected = figures['num_rejected_clients']
  parts = [f'{figures["num_examples"]:,}, held out by {num_with:,} clients']
  if num < num_clients:
    parts.append(f'{num:,} of {num_clients:,} clients were drawn')
  if without := num - num_with - rejected:
    parts.append(f'clients that hold out nothing: {without:,}')
  if rejected:
    parts.append(f'clients rejected: {rejected:,}')
  rows = {'examples': '; '.join(parts)}
  others = {name: v for name, v in figures.items() if isinstance(v, Mapping)}
  for name, of_way in {'': figures, **others}.items():
    prefix = f'{name} ' if name else ''
    labels = {
      'accuracy': 'accuracy',
      'loss': 'loss',
      'recall_mean': 'recall of classes, mean',
      'accuracy_mean': 'accuracy of clients, mean',
      'accuracy_deviation': '  standard deviation',
      'accuracy_worst_decile': '  mean of the worst tenth',
    }
    for figure, label in labels.items():
      rows[f'{prefix}{label}'] = f'{of_way[figure]:.4f}'
    rows[f'{prefix}  deciles'] = ' '.join(
      f'{of_way[f"accuracy_percentile_{percent}"]:.2f}'
      for percent in client_accuracy.PERCENTILES
    )
  return rows
