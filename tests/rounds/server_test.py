"""The server's side of a process: its first model, and its training."""

import functools

import contexts
import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff
import tiny_task

from tff_fssl.algorithms import supervised
from tff_fssl.data import clients
from tff_fssl.interface import round_hparams
from tff_fssl.rounds import network_factory
from tff_fssl.rounds import server
from tff_fssl.rounds import states

_context = contexts.of_each_module()


def _side(norm='bn', labels=True, seed=0, **settings):
  x, y = tiny_task.examples(9, 7)
  algorithm = supervised.Supervised(
    round=round_hparams.RoundHparams(
      scenario=round_hparams.LABELS_AT_SERVER,
      server_epochs=2,
      server_batch_size=4,
      **settings,
    )
  )
  networks = network_factory.NetworkFactory(
    functools.partial(tiny_task.model_fn, norm),
    algorithm.round,
    image_shape=tiny_task.IMAGE_SHAPE,
    num_classes=tiny_task.NUM_CLASSES,
    seed=seed,
  )
  return server.ServerSide(
    networks,
    algorithm,
    states.States(algorithm),
    tiny_task.VIEWS,
    clients.build_server_data_fn(x, y) if labels else None,
    seed,
  )


@pytest.mark.parametrize('labels', [True, False])
def test_the_first_model_has_the_statistics_of_the_labelled_data(labels):
  model = _side(labels=labels).build_initial_model()()
  assert (model.statistics_count > 0) == labels
  mean, variance = model.non_trainable
  assert np.any(mean != 0) == np.any(variance != 1) == labels


def test_the_first_model_is_that_of_the_seed():
  kernels = [
    _side(norm='none', seed=seed).build_initial_model()().trainable[0]
    for seed in (1, 1, 2)
  ]
  np.testing.assert_array_equal(kernels[0], kernels[1])
  assert np.any(kernels[0] != kernels[2])


@pytest.mark.parametrize(
  'settings, size',
  [
    ({'batch_norm_statistics': 'batch_mean'}, 4),
    ({'statistics_batch_size': 100}, 100),
  ],
)
def test_only_means_of_batches_depend_on_their_size(settings, size):
  assert _side(**settings).statistics_batch_size == size


@pytest.mark.parametrize(
  'labels, settings, keeps',
  [
    (True, {'server_keeps_momentum': True}, True),
    (True, {'server_keeps_momentum': True, 'momentum': 0.0}, False),
    (True, {}, False),
    (False, {'server_keeps_momentum': True}, False),
  ],
)
def test_momentum_is_kept_where_there_is_some(labels, settings, keeps):
  side = _side(norm='none', labels=labels, **settings)
  model_type = side.build_initial_model().type_signature.result
  vectors = [
    tf.nest.map_structure(tff.to_type, t) for t in model_type.trainable
  ]
  aggregate_type = tff.to_type(
    {
      'update': {'model': tuple(vectors)},
      'uploads': {},
      'num_reports': np.float32,
    }
  )
  step = side.build_step(model_type, aggregate_type, (), {})
  assert bool(step.initialize()['momentum']) == keeps
