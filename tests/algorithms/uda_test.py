"""UDA's losses: worked examples, the annealing of labels, limits."""

import numpy as np
import pytest
from scipy import special
import tensorflow as tf
import tiny_steps

from tff_fssl.algorithms import fixmatch
from tff_fssl.algorithms import uda
from tff_fssl.interface import base
from tff_fssl.interface.round_hparams import RoundHparams

_AT_CLIENTS = RoundHparams(scenario='labels_at_clients')


def _make(weight=1.0, threshold=0.5, **settings):
  return uda.Uda(
    confidence_threshold=threshold, unlabeled_loss_weight=weight, **settings
  )


def test_i7():
  examples = tiny_steps.examples(
    weak=[[2, 1, 0.1], [3, 0.5, 0.1]], strong=[[1, 0.5, 0.2], [1, 1, 0]]
  )
  loss, metrics = _make(2.0, 0.8).unlabeled_loss(
    tiny_steps.IDENTITY, tiny_steps.batch(unlabeled=examples)
  )
  np.testing.assert_allclose(loss, 2 * 0.421449, atol=2e-6)
  means = tiny_steps.means(metrics)
  np.testing.assert_allclose(
    means['loss_soft_pseudo_label'], 0.842897, atol=1e-6
  )
  assert means['pseudo_label_ratio'] == 0.5


def test_by_default_all_labels_count():
  """As in the CIFAR-10 scripts of UDA's authors, also in round 1."""
  time = base.StepTime(*tf.constant([1, 0, 4]))
  examples = tiny_steps.examples(labels=[0], weak=[[9.0, 0, 0]])
  loss, metrics = uda.Uda().labeled_loss(
    tiny_steps.IDENTITY, tiny_steps.batch(time, labeled=examples)
  )
  assert 0 < float(loss) == tiny_steps.means(metrics)['loss_labeled']


@pytest.mark.parametrize(
  'round_num, step, eta',
  [(1, 0, 0.106064), (11, 0, 0.121166), (21, 0, 0.173876), (31, 0, 0.357854)]
  + [(10, 4, 0.121166), (41, 0, 1.0), (99, 1, 1.0), (0, 1, 1.0), (-9, 0, 1.0)],
)
def test_i6_the_threshold_rises_with_rounds_and_steps(round_num, step, eta):
  """Forty rounds; before round 1 all labels count."""
  time = base.StepTime(*tf.constant([round_num, step, 4]))

  def kept(probability):
    rest = np.log((1 - probability) / 9)
    logits = [[np.log(probability), *[rest] * 9]]
    examples = tiny_steps.examples(labels=[0], weak=logits)
    loss, metrics = _make(tsa='exp', tsa_rounds=40).labeled_loss(
      tiny_steps.IDENTITY, tiny_steps.batch(time, labeled=examples)
    )
    means = tiny_steps.means(metrics)
    np.testing.assert_allclose(
      means['loss_labeled'], -np.log(probability), rtol=1e-5, atol=1e-6
    )
    assert bool(float(loss) > 0) == bool(means['tsa_ratio'])
    return bool(means['tsa_ratio'])

  assert kept(eta - 1e-5)
  assert eta == 1.0 or not kept(eta + 1e-5)


def _unlabeled(k):
  z = np.outer(tiny_steps.X['weak'], tiny_steps.K)
  kept = (special.softmax(z, -1).max(-1) > 0.75) * tiny_steps.WEIGHTS
  target = special.softmax(z / 0.4, axis=-1)
  log_target = special.log_softmax(z / 0.4, axis=-1)
  logs = tiny_steps.log_probs(k, tiny_steps.X['strong'])
  kl = np.sum(target * (log_target - logs), -1)
  return 1.5 * np.sum(kept * kl) / tiny_steps.WEIGHTS.sum()


def _annealed(k):
  x = tiny_steps.X['weak']
  labeled = -tiny_steps.log_probs(k, x)[np.arange(4), tiny_steps.LABELS]
  correct = tiny_steps.probs(tiny_steps.K, x)[np.arange(4), tiny_steps.LABELS]
  # Round 3, step 2 of 4, of 5 rounds: linear, half of the way from 1/2 to 1.
  kept = tiny_steps.WEIGHTS * (correct <= 0.75)
  return np.sum(kept * labeled) / max(kept.sum(), 1.0)


def test_step_against_finite_differences():
  tiny_steps.check_gradient(_make(1.5, 0.75), _unlabeled)


def test_step_with_labels_against_finite_differences():
  algorithm = _make(1.5, 0.75, tsa='linear', tsa_rounds=5, round=_AT_CLIENTS)
  tiny_steps.check_gradient(algorithm, lambda k: _unlabeled(k) + _annealed(k))


def test_the_weight_scales_the_gradient():
  tiny_steps.check_weight(_make)


@pytest.mark.parametrize('check', ['fillers', 'counts', 'xla'])
def test_step(check):
  getattr(tiny_steps, f'check_{check}')(_make())


def test_at_its_limit_it_is_pseudo_labelling():
  """Threshold 0, temperature to 0: FixMatch's loss with threshold 0."""
  x = tiny_steps.X
  examples = tiny_steps.examples(
    weak=x['weak'][:, None] * tiny_steps.K,
    strong=x['strong'][:, None] * tiny_steps.K,
  )
  ours, theirs = (
    algorithm.unlabeled_loss(
      tiny_steps.IDENTITY, tiny_steps.batch(unlabeled=examples)
    )[0]
    for algorithm in (
      _make(threshold=0.0, temperature=1e-4),
      fixmatch.FixMatch(confidence_threshold=0.0),
    )
  )
  np.testing.assert_allclose(ours, theirs, rtol=1e-6)
