"""The plan of a process: what travels, and what is done."""

import numpy as np
import pytest
import tensorflow as tf
import tiny_plan
import tiny_task

from tff_fssl.algorithms import fedswitch
from tff_fssl.algorithms import supervised
from tff_fssl.interface import round_hparams
from tff_fssl.models.weights import Weights

_WEIGHTS = Weights(
  (tf.constant([1.0, 2.0]), tf.constant([3.0]), tf.constant(4.0)),
  (tf.constant(5.0),),
  tf.constant(1.0),
)


def _hparams(scenario=round_hparams.LABELS_AT_CLIENTS, **settings):
  return round_hparams.RoundHparams(scenario=scenario, **settings)


def _supervised(**settings):
  return supervised.Supervised(round=_hparams(**settings))


def test_everything_travels_by_default():
  plan = tiny_plan.bare()
  sent = plan.select_weights(_WEIGHTS)
  assert sent == plan.restore_weights(sent) == _WEIGHTS
  assert not plan.kept


def test_kept_weights_arrive_as_zeros():
  head = {1: tf.TensorSpec([1]), 0: tf.TensorSpec([2])}
  plan = tiny_plan.bare(head=head)
  sent = plan.select_weights(_WEIGHTS)
  assert [float(t) for t in sent.trainable] == [4.0]
  received = plan.restore_weights(sent)
  for tensor, expected in zip(received.trainable, ([0, 0], [0], 4)):
    np.testing.assert_array_equal(tensor, expected)
  assert received.non_trainable == _WEIGHTS.non_trainable


def test_uploads_are_those_of_the_algorithm():
  algorithm = fedswitch.FedSwitch(round=_hparams())
  plan = tiny_plan.build(algorithm)
  assert plan.uploads and plan.uploads == algorithm.uploads(plan.setup)
  assert not plan.row_specs


@pytest.mark.parametrize(
  'norm, settings, has_last_phases',
  [
    ('bn', {}, True),
    ('bn', {'statistics_phase': 'training'}, False),
    ('bn', {'batch_norm_statistics': 'moving_average'}, False),
    ('none', {}, False),
  ],
)
def test_last_phases_gather_static_statistics(norm, settings, has_last_phases):
  plan = tiny_plan.build(_supervised(**settings), norm)
  assert plan.has_last_phases == has_last_phases


@pytest.mark.parametrize(
  'settings, size',
  [
    ({'batch_norm_statistics': 'batch_mean'}, 4),
    ({'statistics_batch_size': 100}, 100),
  ],
)
def test_only_means_of_batches_depend_on_their_size(settings, size):
  plan = tiny_plan.bare(_supervised(server_batch_size=4, **settings))
  assert plan.server_statistics_batch_size == size


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
  given = tiny_task.examples(9, 7) if labels else None
  plan = tiny_plan.build(_supervised(**settings), 'none', labels=given)
  assert plan.server_keeps_momentum == keeps
