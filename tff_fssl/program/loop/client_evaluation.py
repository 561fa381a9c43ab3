"""Evaluates a model on the examples that a run's clients hold out."""

from collections.abc import Mapping
from typing import Any

import tensorflow_federated as tff

from tff_fssl.aggregators import hparams as aggregator_hparams
from tff_fssl.data import clients
from tff_fssl.models import server_model
from tff_fssl.program.loop import elsewhere
from tff_fssl.program.loop import experiment
from tff_fssl.rounds import client_accuracy
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
  """Evaluates a model at clients, some of them at a time.

  Args:
    task: Data and network; its partition has held out examples of clients.
    model: The model; arrays.
    prediction: How it predicts.
    table: What the exchange keeps, if the prediction needs it.
    context: The execution context, of `runtime.build_context`.
    max_clients: The number of clients, drawn by the run's seed; 0, or more than
      there are: all.
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
  held = elsewhere.Held(config, task.data, partition)
  load = elsewhere.Loader(held, elsewhere.test_examples)
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
  chosen = sampling.sample_cohort(seed, _ROUND, population, num_clients)
  with tff.framework.get_context_stack().install(context):
    state = process.set_model_weights(process.initialize(), whole)
    for start in range(0, num_clients, _COHORT_SIZE):
      ids = chosen[start : start + _COHORT_SIZE]
      cohort = source.chosen(_ROUND, dict.fromkeys(ids, 0))
      state, metrics = process.next(state, cohort)
  figures: Mapping[str, Any] = metrics['client_work']['eval'][
    'total_rounds_metrics'
  ]
  return figures


def describe(figures: Mapping[str, Any], num_clients: int) -> dict[str, str]:
  """The rows of a summary, for `console.table`.

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
