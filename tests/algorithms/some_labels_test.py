"""Clients with labels only, or with none, where others have both."""

import numpy as np
import pytest
import tensorflow as tf
import tiny_local
import tiny_task

from tff_fssl.algorithms import registry
from tff_fssl.client import optimizer
from tff_fssl.client import training

_SERVER, _CLIENTS = 'labels_at_server', 'labels_at_clients'
_OF_BOTH = [
  name
  for name, entry in registry.REGISTRY.items()
  if {_SERVER, _CLIENTS} <= set(entry.trains_clients)
]
# So that all of an algorithm's terms have a value.
_OWN = {name: {'confidence_threshold': 0.34} for name in ('fixmatch', 'fl2')}
_AT_CLIENTS = [
  name
  for name, entry in registry.REGISTRY.items()
  if _CLIENTS in entry.trains_clients
]
_LABELS = {'loss_labeled', 'labeled_accuracy', 'loss_mixed_labeled'}


def _train(name, scenario, norm='none', **own):
  """Trains a client that has unlabelled examples only."""
  config = training.LoopConfig(2, 5, 4, optimizer.Sgd(max_gradient_norm=1.0))
  own = {**_OWN.get(name, {}), **own}
  return tiny_local.train(
    name, scenario, tiny_task.client(0), config, norm=norm, **own
  )[1]


@pytest.mark.parametrize('name', _OF_BOTH)
def test_the_objective_is_the_sum_that_its_data_allow(name):
  """A client without labels does what it does with labels at the server."""
  # Mixed, its examples would meet the filler, and other partners.
  own = {'mixup_concentration': 0.0} if name == 'mixmatch' else {}
  some, none = (_train(name, s, **own) for s in (_CLIENTS, _SERVER))
  assert some.is_finite and some.num_examples == none.num_examples > 0
  changes, alone = (
    tf.nest.flatten((r.update, r.auxiliary)) for r in (some, none)
  )
  assert any(np.any(u) for u in changes)
  for a, b in zip(changes, alone, strict=True):
    np.testing.assert_allclose(a, b, atol=1e-6)
  for metric, (total, count) in some.metrics.items():
    if metric in none.metrics:
      np.testing.assert_allclose(total, none.metrics[metric][0], atol=1e-5)
      assert count == none.metrics[metric][1]
    else:
      assert metric in {*_LABELS, 'tsa_ratio'}
      assert total == count == 0


def test_mixmatch_gives_the_filler_no_share():
  """Whatever stands in for labelled examples, nothing is learnt of it."""
  result = _train('mixmatch', _CLIENTS)
  assert result.is_finite
  assert result.metrics['loss_mixed_labeled'][1] == 0
  assert any(np.any(u) for u in result.update)


@pytest.mark.parametrize('name', sorted(set(_OF_BOTH) - {'mixmatch'}))
def test_moving_averages_do_not_see_the_filler(name):
  """`--norm=bn`: they are sent to the server with the update."""
  some, none = (_train(name, s, 'bn') for s in (_CLIENTS, _SERVER))
  for a, b in zip(some.non_trainable, none.non_trainable, strict=True):
    np.testing.assert_allclose(a, b, atol=1e-6)


_WITHOUT = {
  # Episodes are other batches, and sums of two sets other weights.
  *('supervised', 'protofssl', 'fedmatch'),
}


@pytest.mark.parametrize(
  'name, own',
  [
    *((n, {}) for n in _AT_CLIENTS if n not in {*_WITHOUT, 'mixmatch'}),
    ('mixmatch', {'mixup_concentration': 0.0}),
    ('fixmatch', {'joint_batch': True}),
  ],
)
def test_moving_averages_do_not_see_the_filler_for_unlabelled(name, own):
  """They are those of labels only, as long as the weights stay."""
  config = training.LoopConfig(1, 5, 12, optimizer.Sgd())
  client = tiny_task.client(0, unlabeled=0, labeled=12)
  results = [
    tiny_local.train(
      n, _CLIENTS, client, config, norm='bn', learning_rate=0.0, **o
    )[1].non_trainable
    for n, o in (('supervised', {}), (name, own))
  ]
  for expected, averages in zip(*results, strict=True):
    np.testing.assert_allclose(averages, expected, atol=1e-4)
