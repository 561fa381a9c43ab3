"""What the program makes of a configuration, on real digits."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tff_fssl import hparams
from tff_fssl import metrics
from tff_fssl import runtime
from tff_fssl.data import clients
from tff_fssl.data import sources
from tff_fssl.program import config as config_lib
from tff_fssl.program import experiment as experiment_lib

_BAD_CLIENT = 7


def _fragile_model():
  """NaN for images that are bright all over."""
  inputs = tf.keras.Input([8, 8, 1])
  bright = tf.keras.ops.mean(inputs, axis=[1, 2, 3], keepdims=True)
  hidden = tf.keras.layers.Flatten()(
    inputs + tf.keras.ops.where(bright > 1.5, np.nan, 0.0)
  )
  return tf.keras.Model(
    inputs, tf.keras.layers.Dense(10, name='logits')(hidden)
  )


@pytest.fixture(name='context')
def _context():
  previous = tff.framework.get_context_stack().current
  tff.framework.set_default_context(runtime.build_context())
  yield
  tff.framework.set_default_context(previous)


def test_the_one_client_that_is_not_finite_is_named(tmp_path, context):
  del context
  config = config_lib.parse_config(
    [
      '--algorithm=supervised',
      '--scenario=labels_at_clients',
      '--full_labels',
      '--dataset=digits',
      '--num_clients=20',
      '--clients_per_round=3',
      '--client_epochs=1',
      '--norm=none',
      '--debug_non_finite',
    ]
  )
  task = experiment_lib.build_task(config)
  task = dataclasses.replace(task, model_fn=_fragile_model)
  task.data.train.x[task.partition.client_labeled[_BAD_CLIENT]] = 255
  experiment = experiment_lib.build_experiment(task, str(tmp_path))
  source = experiment.data_source
  cohorts = {r: source.client_ids(config.run.seed, r) for r in range(1, 50)}
  with_it = next(r for r, ids in cohorts.items() if _BAD_CLIENT in ids)
  state = experiment.process.initialize()
  # The number of the next round.
  state = state._replace(client_work=np.int32(with_it))
  output = experiment.process.next(
    state, source.cohort(config.run.seed, with_it)
  )
  train = output.metrics['client_work']['train']
  assert train['num_clients'] == 3
  assert train['num_non_finite_clients'] == 1
  assert experiment.explain_non_finite(state, with_it, 1) == [
    f'client {_BAD_CLIENT}: not finite: first at local step 1, loss_labeled'
  ]
  # One more was counted than is found again.
  assert experiment.explain_non_finite(state, with_it, 2)[1:] == [
    '1 of 2 clients that were not finite are finite when repeated'
  ]
  without = next(r for r, ids in cohorts.items() if _BAD_CLIENT not in ids)
  assert experiment.explain_non_finite(state, without, 0) == []


def _owned_digits(monkeypatch):
  """Makes `digits` belong to 8 clients, two thirds of unknown class."""
  digits = sources.load('digits')
  y = digits.train.y.copy()
  y[np.arange(len(y)) % 3 > 0] = -1
  data = dataclasses.replace(
    digits,
    train=sources.Examples(digits.train.x, y),
    owners=np.arange(len(y)) % 8,
    client_names=tuple('abcdefgh'),
  )
  monkeypatch.setattr(sources, 'load_found', lambda *_: data)
  return data


_NATURAL = (
  '--algorithm=fixmatch',
  '--scenario=labels_at_clients',
  '--dataset=digits',
  '--partition=natural',
  '--num_labels=12',
  '--clients_per_round=8',
  '--client_epochs=1',
  '--norm=none',
)


def test_natural_clients_with_unknown_and_wrong_labels(
  tmp_path, context, monkeypatch
):
  del context
  data = _owned_digits(monkeypatch)
  config = config_lib.parse_config(
    [*_NATURAL, '--label_noise=0.25', '--streaming_steps=2']
  )
  task = experiment_lib.build_task(config)
  task = dataclasses.replace(task, model_fn=_fragile_model)
  partition = task.partition
  assert partition.num_clients == 8 and partition.client_names[3] == 'd'
  assert len(partition.wrong_labels) == 24
  experiment = experiment_lib.build_experiment(task, str(tmp_path))
  cohort = experiment.data_source.cohort(config.run.seed, 1)
  num_wrong = num_known = 0
  for client, dataset in enumerate(cohort):
    (element,) = dataset.as_numpy_iterator()
    held = partition.client_labeled[client]
    np.testing.assert_array_equal(element['labeled']['x'], data.train.x[held])
    num_wrong += np.sum(element['labeled']['y'] != data.train.y[held])
    assert len(element['labeled']['y']) == 12
    # A half of the rest; two thirds of all are of unknown class.
    unlabeled = partition.client_unlabeled[client]
    assert len(element['unlabeled']['y']) == len(unlabeled) // 2
    assert np.sum(data.train.y[unlabeled] < 0) > 100
    num_known += np.sum(element['unlabeled']['y'] >= 0)
  assert num_wrong == 24
  assert experiment.counts(1) == {metrics.NUM_KNOWN: num_known}
  state = experiment.process.initialize()
  output = experiment.process.next(state, cohort)
  train = output.metrics['client_work']['train']
  assert train['num_clients'] == 8 and train['num_rejected_clients'] == 0


def test_the_server_trains_on_wrong_labels(monkeypatch, tmp_path):
  given, build = [], clients.build_server_data_fn

  def record(x, y, directory):
    given.append(y)
    return build(x, y, directory)

  monkeypatch.setattr(clients, 'build_server_data_fn', record)
  config = config_lib.parse_config(
    [
      *('--dataset=digits', '--norm=none', '--num_clients=20'),
      *('--algorithm=supervised', '--label_noise=1'),
    ]
  )
  task = experiment_lib.build_task(config)
  task = dataclasses.replace(task, model_fn=_fragile_model)
  experiment_lib.build_experiment(task, str(tmp_path))
  truth = task.data.train.y[task.partition.server_labeled]
  assert len(given[0]) == 40 and np.all(given[0] != truth)
  with pytest.raises(hparams.UsageError, match='no client has more than 69'):
    experiment_lib.build_experiment(
      dataclasses.replace(
        task,
        config=config_lib.parse_config(
          [
            *('--dataset=digits', '--norm=none', '--num_clients=20'),
            '--streaming_steps=70',
          ]
        ),
      ),
      str(tmp_path),
    )


def test_parts_of_full_labels(tmp_path):
  flags = [
    *('--dataset=digits', '--norm=none', '--num_clients=20', '--num_labels=0'),
    *('--algorithm=supervised', '--scenario=labels_at_clients'),
    '--full_labels',
  ]
  parts, whole = (
    experiment_lib.measure_compute(
      experiment_lib.build_task(config_lib.parse_config([*flags, *more]))
    )
    for more in (['--streaming_steps=7'], [])
  )
  assert whole.client / parts.client == pytest.approx(7, rel=0.2)
  task = experiment_lib.build_task(
    config_lib.parse_config([*flags, '--streaming_steps=80'])
  )
  with pytest.raises(hparams.UsageError, match='more than 71 labelled'):
    experiment_lib.build_experiment(task, str(tmp_path))


def test_cohorts_of_more_clients_than_there_are(monkeypatch):
  _owned_digits(monkeypatch)
  config = config_lib.parse_config([*_NATURAL, '--clients_per_round=9'])
  with pytest.raises(hparams.UsageError, match='at most --num_clients=8'):
    experiment_lib.build_task(config)


def test_figures_of_evaluations():
  def chosen(labels, *flags):
    config = config_lib.parse_config(['--dataset=digits', *flags])
    return experiment_lib.chosen_figures(config, np.array(labels))

  assert chosen([0, 0, 0, 1]) == ()
  assert chosen([0, 0, 0, 0, 1]) == ('balanced_accuracy',)
  assert chosen([0, 0, 0, 0, 1], '--metrics=auroc') == ('auroc',)
  by = ('--best_by=macro_f1', '--num_validation=50')
  assert chosen([0, 1], '--metrics=auroc', *by) == ('auroc', 'macro_f1')


def test_no_round_is_selected_by_what_is_not_defined(tmp_path):
  config = config_lib.parse_config(
    [
      '--dataset=digits',
      '--algorithm=supervised',
      '--norm=none',
      '--num_clients=20',
      '--num_validation=5',
      '--best_by=auroc',
    ]
  )
  task = experiment_lib.build_task(config)
  task = dataclasses.replace(task, model_fn=_fragile_model)
  with pytest.raises(hparams.UsageError, match='--best_by=auroc: no valid'):
    experiment_lib.build_experiment(task, str(tmp_path))


def _compute(*flags, model_fn=_fragile_model):
  config = config_lib.parse_config(
    ['--dataset=digits', '--norm=none', '--num_clients=20', *flags]
  )
  task = experiment_lib.build_task(config)
  task = dataclasses.replace(task, model_fn=model_fn)
  return task, experiment_lib.measure_compute(task)


def test_compute_of_a_client_of_mean_size():
  # A forward pass is one product, and so is a backward pass: the images need
  # no gradient.
  task, found = _compute('--algorithm=fl2', '--client_epochs=3')
  mean = np.mean([len(held) for held in task.partition.client_unlabeled])
  assert found.forward_flops == 2 * 64 * 10
  # Five passes in each epoch, or two; pseudo-labels.
  np.testing.assert_allclose(found.client, 16 * mean)
  np.testing.assert_allclose(found.client_least, 7 * mean)
  num_labeled = len(task.partition.server_labeled)
  np.testing.assert_allclose(found.server, 2 * 5 * num_labeled)


def test_compute_where_only_the_server_trains():
  _, found = _compute('--algorithm=supervised')
  assert found.client == 0 and found.server


def test_compute_that_depends_on_the_data():
  def recurrent():
    return tf.keras.Sequential(
      [
        tf.keras.Input([8, 8, 1]),
        tf.keras.layers.Reshape([8, 8]),
        tf.keras.layers.SimpleRNN(4),
        tf.keras.layers.Dense(10),
      ]
    )

  assert _compute(model_fn=recurrent)[1] is None
