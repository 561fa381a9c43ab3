"""A run's clients evaluate on what they hold out."""

import asyncio
import dataclasses

import numpy as np
import pytest
import tensorflow as tf

from tff_fssl import runtime
from tff_fssl.algorithms import registry
from tff_fssl.data import clients
from tff_fssl.data import sources
from tff_fssl.hparams import UsageError
from tff_fssl.models import adapter
from tff_fssl.models import server_model
from tff_fssl.program import checkpoint
from tff_fssl.program import client_evaluation
from tff_fssl.program import config as config_lib
from tff_fssl.program import experiment
from tff_fssl.program import training
from tff_fssl.rounds import client_accuracy

_FLAGS = (
  '--dataset=digits',
  '--model=linear',
  '--norm=none',
  '--num_labels=40',
  '--num_clients=20',
  '--partition=dirichlet',
  '--alpha=0.3',
  '--min_client_examples=5',
  '--client_test_fraction=0.2',
)
_NO_ROWS = checkpoint.RowFiles('')


@pytest.fixture(scope='module')
def task():
  return experiment.build_task(config_lib.parse_config(_FLAGS))


@pytest.fixture(scope='module')
def model(task):
  """Prototypes of classes: right for some examples."""
  network = adapter.Network(task.model_fn, seed=0)
  return server_model.ServerModel(
    *tf.nest.map_structure(lambda t: t.numpy(), network.initial_weights())
  )


def _client_figures(task, model):
  """Of each client: number of examples, of correct ones, and the losses."""
  network = task.model_fn()
  network.set_weights([*model.trainable, *model.non_trainable])
  results = []
  for held in task.partition.client_test:
    x, y = task.data.train.x[held], task.data.train.y[held]
    logits = network.predict(task.views.plain(x), verbose=0)
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits)
    results.append((len(y), np.sum(logits.argmax(1) == y), losses.numpy()))
  return results


def _evaluate(task, model, **kwargs):
  context, prediction = runtime.build_context(), server_model.Prediction()
  return client_evaluation.evaluate_clients(
    task, model, prediction, (), context=context, **kwargs
  )


def test_figures_are_those_of_numpy(task, model, monkeypatch):
  # Three cohorts.
  monkeypatch.setattr(client_evaluation, '_COHORT_SIZE', 8)
  found = _evaluate(task, model)
  counts, correct, losses = zip(*_client_figures(task, model), strict=True)
  accuracies = np.array(correct) / counts
  assert len(set(accuracies)) > 3
  assert found['num_clients'] == found['num_clients_with_examples'] == 20
  assert found['num_examples'] == sum(counts)
  assert found['accuracy'] == sum(correct) / sum(counts)
  assert found['accuracy_mean'] == pytest.approx(accuracies.mean(), abs=1e-8)
  assert found['accuracy_deviation'] == pytest.approx(accuracies.std())
  assert found['loss'] == pytest.approx(np.concatenate(losses).mean(), rel=1e-4)
  for percent in client_accuracy.PERCENTILES:
    assert found[f'accuracy_percentile_{percent}'] == pytest.approx(
      np.percentile(accuracies, percent, method='inverted_cdf'), abs=0.0025
    )


def test_some_clients(task, model):
  found = _evaluate(task, model, max_clients=6)
  assert found['num_clients'] == 6
  rows = client_evaluation.describe(found, 20)
  assert rows['examples'].endswith('clients; 6 of 20 clients were drawn')
  assert len(rows['  deciles'].split()) == 9
  assert _evaluate(task, model, max_clients=6) == found


def test_clients_that_cannot_be_read_are_named(task, model, monkeypatch):
  examples_of = clients.client_test_examples

  def load(data, partition, client_id):
    if client_id == 3:
      raise OSError('gone')
    return examples_of(data, partition, client_id)

  monkeypatch.setattr(clients, 'client_test_examples', load)
  failed = []
  found = _evaluate(
    task, model, on_failure=lambda _, client, why: failed.append((client, why))
  )
  assert failed == [(3, 'OSError: gone')]
  assert found['num_rejected_clients'] == 1
  rows = client_evaluation.describe(found, 20)
  assert rows['examples'].endswith('by 19 clients; clients rejected: 1')


@pytest.mark.parametrize(
  'flags',
  [
    ['--streaming_steps=3', '--streaming_rounds=1'],
    ['--scenario=labels_at_clients', '--full_labels', '--num_labels=0'],
    [
      '--scenario=labels_at_clients',
      '--client_labels=own',
      '--num_labels=2',
    ],
    ['--num_validation=50', '--label_noise=0.5'],
  ],
  ids=' '.join,
)
def test_nobody_trains_on_what_is_held_out(flags):
  config = config_lib.parse_config([*_FLAGS, *flags, '--algorithm=fixmatch'])
  task = experiment.build_task(config)
  # Two pixels give the number of an example.
  images = task.data.train.x.copy()
  images[:, 0, 0, 0], images[:, 0, 1, 0] = np.divmod(range(len(images)), 256)
  data = dataclasses.replace(
    task.data, train=sources.Examples(images, task.data.train.y)
  )
  numbers = lambda x: x[:, 0, :2, 0].astype(int) @ [256, 1]
  streaming = config.streaming
  assert isinstance(streaming, clients.Streaming)
  trained = {int(i) for i in task.partition.server_labeled}
  held_out = set()
  for client_id in range(20):
    held_out |= set(task.partition.client_test[client_id])
    for round_num in range(1, 5):
      for x, _ in clients.client_examples(
        data, task.partition, client_id, round_num, streaming
      ):
        trained |= set(numbers(x))
  assert len(held_out) >= 20
  assert len(trained) > 500
  assert not held_out & trained
  x, y = clients.client_test_examples(data, task.partition, 5)
  assert set(numbers(x)) == set(task.partition.client_test[5])
  np.testing.assert_array_equal(y, data.train.y[numbers(x)])


def _leaves(folder, made, **replaced):
  """The leaves of a checkpoint before the first round."""
  state = made.process.initialize()._replace(**replaced)
  state = training.ProgramState(state, made.data_source.iterator(), 0)
  states = training.DurableProgramStateManager(str(folder))
  asyncio.run(states.save(state, 0))
  return checkpoint.read(checkpoint.path_of(str(folder), 0))


@pytest.mark.slow
def test_local_models_are_those_of_the_next_rounds_clients(model, tmp_path):
  """Each is evaluated on all test images."""
  task = experiment.build_task(
    config_lib.parse_config(
      [
        *_FLAGS,
        '--algorithm=fixmatch',
        '--scenario=labels_at_clients',
        '--num_labels=20',
        '--clients_per_round=3',
        '--client_epochs=1',
      ]
    )
  )
  held = task.data.test
  made = experiment.build_experiment(task, '')
  leaves = _leaves(tmp_path, made, global_model_weights=model)
  found = client_evaluation.evaluate_local_models(
    task, leaves, held, round_num=4, rows=_NO_ROWS
  )
  state = made.process.initialize()._replace(global_model_weights=model)
  accuracies = []
  for dataset in made.data_source.cohort(0, 4):
    own = made.process.local_model(state, dataset, 4)
    network = task.model_fn()
    network.set_weights([*own.trainable, *own.non_trainable])
    logits = network.predict(task.views.plain(held.x), verbose=0)
    accuracies.append(np.mean(logits.argmax(1) == held.y))
  assert found['num_clients'] == 3
  assert len(set(accuracies)) > 1
  assert found['accuracy'] == pytest.approx(np.mean(accuracies))
  assert found['accuracy_deviation'] == pytest.approx(np.std(accuracies))
  assert found['accuracy_worst_decile'] == pytest.approx(min(accuracies))


@pytest.mark.parametrize(
  'flags, expected',
  [
    (['--algorithm=supervised'], 'clients do not train'),
    (
      ['--algorithm=local_supervised', '--scenario=labels_at_clients'],
      'keep models of their own',
    ),
  ],
)
def test_runs_without_local_models(flags, expected):
  given = [*_FLAGS, '--clients_per_round=3', *flags]
  task = experiment.build_task(config_lib.parse_config(given))
  with pytest.raises(UsageError, match=f'^--local_models: .*{expected}'):
    client_evaluation.evaluate_local_models(
      task, {}, task.data.test, round_num=1, rows=_NO_ROWS
    )


def test_a_checkpoint_of_another_program_has_no_local_models():
  given = [*_FLAGS, '--clients_per_round=3', '--algorithm=supervised']
  given += ['--scenario=labels_at_clients', '--num_labels=20']
  task = experiment.build_task(config_lib.parse_config(given))
  with pytest.raises(UsageError, match='--local_models: the checkpoint: .*one'):
    client_evaluation.evaluate_local_models(
      task, {'x': np.zeros(1)}, task.data.test, round_num=1, rows=_NO_ROWS
    )


_AT_CLIENTS = ('--scenario=labels_at_clients', '--num_labels=20')
_NO_LOCAL_MODELS = (
  # Clients have no last layer; they do not train.
  ('fedcon', 'labels_at_server'),
  ('supervised', 'labels_at_server'),
)


@pytest.mark.slow
@pytest.mark.parametrize(
  'name, scenario',
  [
    (name, scenario)
    for name, entry in registry.REGISTRY.items()
    for scenario in entry.scenarios
  ],
)
def test_local_models_of_every_algorithm(name, scenario, tmp_path):
  flags = _AT_CLIENTS if scenario == 'labels_at_clients' else ()
  found = _check_local_models(tmp_path, f'--algorithm={name}', *flags)
  alone = name.startswith('local_')
  assert found == (not alone and (name, scenario) not in _NO_LOCAL_MODELS)


@pytest.mark.parametrize(
  'flags',
  [
    pytest.param(
      ('--algorithm=fedmatch', '--fedmatch.num_helpers=0'),
      marks=pytest.mark.slow,
    ),
    ('--algorithm=fedmatch', '--fedmatch.uploads_in=files', *_AT_CLIENTS),
    pytest.param(('--algorithm=fedrgd',), marks=pytest.mark.slow),
  ],
  ids=' '.join,
)
@pytest.mark.slow
def test_local_models_need_no_other_state_than_the_runs(flags, tmp_path):
  assert _check_local_models(tmp_path, *flags)


def _check_local_models(folder, *flags):
  """Whether there are figures; if not, it must be refused by `UsageError`."""
  given = [*_FLAGS, '--clients_per_round=3', '--client_steps=6', *flags]
  task = experiment.build_task(config_lib.parse_config(given))
  try:
    found = client_evaluation.evaluate_local_models(
      task,
      _leaves(folder, experiment.build_experiment(task, '')),
      task.data.test,
      round_num=1,
      rows=checkpoint.RowFiles(str(folder / 'rows')),
    )
  except UsageError as error:
    assert str(error).startswith('--local_models: --algorithm=')
    return False
  assert found['num_clients'] == 3
  assert 0 < found['accuracy'] < 1 and found['loss'] > 0
  return True
