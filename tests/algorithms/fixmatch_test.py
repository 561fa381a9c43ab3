"""FixMatch's loss: the worked example, and what its flags change."""

import contexts
import numpy as np
import pytest
import tiny_steps
import tiny_task

from tff_fssl.algorithms import fixmatch
from tff_fssl.interface.round_hparams import RoundHparams

_context = contexts.of_each_module()

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


def _weights(norm='none', epochs=1, size=50, **hparams):
  """The model after two rounds."""
  process = tiny_task.build(
    'fixmatch',
    'labels_at_clients',
    norm=norm,
    client_epochs=epochs,
    client_learning_rate=0.3,
    client_batch_size=size,
    client_labeled_batch_size=size,
    hparams=(('confidence_threshold', 0.0), *hparams.items()),
  )
  state = process.initialize()
  for round_num in (0, 1, 2):
    cohort = tiny_task.cohort('labels_at_clients', round_num=round_num)
    cohort = [tiny_task.dataset(c, process) for c in cohort]
    state = process.next(state, cohort if round_num else []).state
  return np.concatenate([v.ravel() for v in tiny_task.flat(state)])


def test_the_received_model_labels_as_the_local_one_does_at_first():
  one_step = _weights()
  received = _weights(pseudo_labels_by='received')
  np.testing.assert_allclose(received, one_step, atol=1e-6)
  further = _weights(epochs=4)
  assert np.abs(further - one_step).max() > 1e-3
  received = _weights(epochs=4, pseudo_labels_by='received')
  assert np.abs(received - further).max() > 1e-5


def test_a_joint_batch_changes_only_batch_norm():
  np.testing.assert_allclose(_weights(joint_batch=True), _weights(), atol=1e-6)
  joint, apart = _weights('bn', joint_batch=True), _weights('bn')
  assert np.abs(joint - apart).max() > 1e-5
