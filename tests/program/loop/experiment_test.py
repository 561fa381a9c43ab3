"""What the program makes of a configuration, on real digits."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tff_fssl import runtime
from tff_fssl.program.configuration import config as config_lib
from tff_fssl.program.loop import experiment as experiment_lib

_BAD_CLIENT = 7


def _fragile_model():
  """NaN for images that are bright all over."""
  inputs = tf.keras.Input([8, 8, 1])
  bright = tf.reduce_mean(inputs, axis=[1, 2, 3], keepdims=True)
  hidden = tf.keras.layers.Flatten()(
    inputs + tf.where(bright > 1.5, np.nan, 0.0)
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
  config = config_lib.from_command_line(
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


def _compute(*flags, model_fn=_fragile_model):
  config = config_lib.from_command_line(
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
  # Five passes in each epoch, or two; pseudo-labels. The authors: eight.
  np.testing.assert_allclose(found.client, 16 * mean)
  np.testing.assert_allclose(found.client_least, 7 * mean)
  np.testing.assert_allclose(found.client_authors, 25 * mean)
  num_labeled = len(task.partition.server_labeled)
  np.testing.assert_allclose(found.server, 2 * 5 * num_labeled)


def test_compute_of_other_passes_than_the_authors():
  _, found = _compute('--algorithm=mixmatch', '--mixmatch.num_views=3')
  assert found.client and found.client_authors is None
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
