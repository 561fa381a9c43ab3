"""FixMatch's loss: the worked example, and what its flags change."""

import numpy as np
import pytest
import tiny_local
import tiny_steps
import tiny_task

from tff_fssl.algorithms import fixmatch
from tff_fssl.client import optimizer
from tff_fssl.client import training
from tff_fssl.interface.round_hparams import RoundHparams

_AT_CLIENTS = RoundHparams(scenario='labels_at_clients')


def _make(weight=1.0, threshold=0.5, **settings):
  return fixmatch.FixMatch(
    confidence_threshold=threshold, unlabeled_loss_weight=weight, **settings
  )


def test_i7():
  examples = tiny_steps.examples(
    weak=[[4, 0, 0], [5, 0, 0], [0, 2, 0], [0, 0, 6]],
    strong=[[1, 0, 0], [2, 1, 0], [0, 1, 0], [0, 0, 1]],
    labels=[0, 1, 1, 2],
  )
  loss, metrics = _make(threshold=0.95).unlabeled_loss(
    tiny_steps.IDENTITY, tiny_steps.batch(unlabeled=examples)
  )
  np.testing.assert_allclose(loss, 0.377624, atol=1e-6)
  means = tiny_steps.means(metrics)
  np.testing.assert_allclose(means['loss_pseudo_label'], 0.503498, atol=1e-6)
  assert means['pseudo_label_ratio'] == 0.75
  np.testing.assert_allclose(means['pseudo_label_accuracy'], 2 / 3, rtol=1e-6)


def _reference(k):
  q = tiny_steps.probs(tiny_steps.K, tiny_steps.X['weak'])
  kept = (q.max(-1) >= 0.75) * tiny_steps.WEIGHTS
  logs = tiny_steps.log_probs(k, tiny_steps.X['strong'])
  return 1.5 * np.mean(kept * -logs[np.arange(4), q.argmax(-1)])


def test_step_against_finite_differences():
  tiny_steps.check_gradient(_make(1.5, 0.75), _reference)


def test_the_weight_scales_the_gradient():
  tiny_steps.check_weight(_make)


def test_labels_of_clients_add_their_gradient():
  with_labels, alone = (
    tiny_steps.gradient(_make(weight, round=_AT_CLIENTS))
    for weight in (1.0, 0.0)
  )
  np.testing.assert_allclose(
    with_labels - alone, tiny_steps.gradient(_make()), rtol=1e-4
  )
  assert np.abs(alone).max() > 1e-3


@pytest.mark.parametrize('check', ['fillers', 'counts', 'xla'])
def test_step(check):
  getattr(tiny_steps, f'check_{check}')(_make())


def _update(norm='none', epochs=1, **own):
  """What a client sends after steps of a whole batch."""
  config = training.LoopConfig(epochs, 50, 50, optimizer.Sgd())
  _, result = tiny_local.train(
    'fixmatch',
    'labels_at_clients',
    tiny_task.client(0, labeled=4),
    config,
    norm=norm,
    learning_rate=0.3,
    confidence_threshold=0.0,
    **own,
  )
  return np.concatenate([np.ravel(change) for change in result.update])


def test_the_received_model_labels_as_the_local_one_does_at_first():
  one_step = _update()
  received = _update(pseudo_labels_by='received')
  np.testing.assert_allclose(received, one_step, atol=1e-6)
  further = _update(epochs=8)
  assert np.abs(further - one_step).max() > 1e-3
  received = _update(epochs=8, pseudo_labels_by='received')
  assert np.abs(received - further).max() > 1e-5


def test_a_joint_batch_changes_only_batch_norm():
  np.testing.assert_allclose(_update(joint_batch=True), _update(), atol=1e-6)
  joint, apart = _update('bn', joint_batch=True), _update('bn')
  assert np.abs(joint - apart).max() > 1e-5
