"""FreeMatch: thresholds, averages and the fairness loss, by hand."""

import numpy as np
import pytest
import tensorflow as tf
import tiny_rounds
import tiny_steps
import tiny_task

from tff_fssl.algorithms import freematch
from tff_fssl.interface import base
from tff_fssl.models.weights import Weights

_FREEMATCH = freematch.FreeMatch()
# tau 0.8; p; h.
_AVERAGES = np.float32([0.8, 0.5, 0.3, 0.2, 0.6, 0.4, 0.0])
_PROBS = np.float32(
  [[0.85, 0.1, 0.05], [0.7, 0.2, 0.1], [0.3, 0.5, 0.2], [0.3, 0.25, 0.45]]
)


class _Client:
  """A client whose predictions are given."""

  def __init__(self, probs):
    self._probs = tf.constant(probs, tf.float32)
    self.received = {'averages': tf.constant(_AVERAGES)}

  def predict(self, batch_size):
    return self._probs


def test_thresholds_and_a_clients_own_means():
  prepared = _FREEMATCH.prepare(_Client(_PROBS))
  np.testing.assert_allclose(
    prepared.values['limits'], [0.8, 0.48, 0.32], rtol=1e-6
  )
  # 0.5 / 0.6 and 0.3 / 0.4, of sum 1; nobody predicted the third class.
  np.testing.assert_allclose(
    prepared.values['expected'], [0.526316, 0.473684, 0], atol=1e-6
  )
  np.testing.assert_allclose(
    prepared.values['averages'],
    [0.625, 0.5375, 0.2625, 0.2, 0.5, 0.25, 0.25],
    rtol=1e-6,
  )


def test_a_client_without_examples_sends_nothing():
  prepared = _FREEMATCH.prepare(_Client(np.zeros([0, 3])))
  np.testing.assert_array_equal(prepared.values['averages'], np.zeros(7))


def test_the_threshold_is_that_of_the_predicted_class():
  """The first, third and fourth example reach it."""
  strong = np.float32([[0.6, 0.3, 0.1], [9, 9, 9], [0.2, 0.7, 0.1], [1, 1, 2]])
  strong /= strong.sum(1, keepdims=True)
  examples = tiny_steps.examples(weak=np.log(_PROBS), strong=np.log(strong))
  batch = tiny_steps.batch(unlabeled=examples)._replace(
    values=_FREEMATCH.prepare(_Client(_PROBS)).values
  )
  loss, metrics = _FREEMATCH.unlabeled_loss(tiny_steps.IDENTITY, batch)
  entropies = -np.log([0.6, 0.7, 0.5])
  # Mean predictions over h' = 1/3 each, of sum 1.
  mean = strong[[0, 2, 3]].mean(0)
  fairness = np.sum([0.526316, 0.473684, 0] * np.log(mean))
  np.testing.assert_allclose(
    loss, entropies.sum() / 4 + 0.001 * fairness, rtol=1e-5
  )
  means = tiny_steps.means(metrics)
  assert means['pseudo_label_ratio'] == 0.75
  np.testing.assert_allclose(means['loss_fairness'], fairness, rtol=1e-5)


def test_without_a_kept_example_there_is_no_fairness_loss():
  logits = tf.Variable([[1.0, 2.0], [0.0, 1.0]])
  with tf.GradientTape() as tape:
    loss, has_kept = freematch.fairness_loss(
      logits, tf.zeros([2]), tf.constant([0.5, 0.5])
    )
  assert float(loss) == float(has_kept) == 0
  np.testing.assert_array_equal(tape.gradient(loss, logits), np.zeros([2, 2]))


def test_the_fairness_loss_has_its_gradient():
  logits = np.random.default_rng(0).normal(size=(5, 3))
  kept, expected = np.float64([1, 1, 0, 1, 1]), np.float64([0.5, 0.2, 0.3])

  def loss(x):
    x = tf.constant(x, tf.float32)
    with tf.GradientTape() as tape:
      tape.watch(x)
      value, _ = freematch.fairness_loss(
        x, tf.constant(kept, tf.float32), tf.constant(expected, tf.float32)
      )
    return float(value), tape.gradient(value, x).numpy()

  _, gradient = loss(logits)
  for place in ((0, 0), (1, 2), (2, 1), (4, 1)):
    step = np.zeros_like(logits)
    step[place] = 1e-2
    slope = (loss(logits + step)[0] - loss(logits - step)[0]) / 2e-2
    np.testing.assert_allclose(gradient[place], slope, atol=2e-4)


@pytest.mark.parametrize('unit', [1.0, 30.0])
def test_averages_follow_the_clients_means(unit):
  """Whatever unit the aggregator's sum has."""
  new = unit * np.float32([0.6, 0.2, 0.2, 0.6, 0.1, 0.1, 0.8])
  state = base.ServerState(
    Weights((tf.constant([2.0]),), (), tf.constant(1.0)),
    freematch.FreeMatchMemory(tf.constant(_AVERAGES)),
  )
  moved = _moved(state, new)
  np.testing.assert_allclose(
    moved, 0.9 * _AVERAGES + 0.1 * new / unit, rtol=1e-5
  )
  np.testing.assert_array_equal(_moved(state, 0 * new), _AVERAGES)
  np.testing.assert_array_equal(_moved(state, np.nan * new), _AVERAGES)


def _moved(state, sums):
  aggregate = base.Aggregate(
    tuple(map(tf.zeros_like, state.weights.trainable)),
    {'averages': tf.constant(sums)},
    tf.constant(1.0),
    lambda: None,
  )
  return _FREEMATCH.update(state, aggregate, _Server()).memory.averages


class _Server:
  """A server without labels, which adds updates."""

  round_num = tf.constant(1)

  def apply(self, weights, update):
    del update
    return weights

  def train(self, weights, copy=0):
    del copy
    return weights


@pytest.mark.parametrize(
  'sent, allowed',
  [
    ([0.9, 0.5, 0.3, 0.2, 0.6, 0.4, 0.0], True),
    ([0.0] * 7, True),
    ([1.1, 0.5, 0.3, 0.2, 0.6, 0.4, 0.0], False),
    ([0.9, 0.9, 0.3, 0.2, 0.6, 0.4, 0.0], False),
    ([0.9, 0.5, 0.3, 0.2, 0.6, 0.6, 0.0], False),
    ([0.9, 0.5, 0.3, 0.2, 0.6, -0.1, 0.0], False),
    ([np.nan, 0.5, 0.3, 0.2, 0.6, 0.4, 0.0], False),
  ],
)
def test_what_a_client_may_send(sent, allowed):
  uploads = {'averages': tf.constant(sent, tf.float32)}
  assert tiny_rounds.is_possible(_FREEMATCH, uploads) == allowed


def test_with_averages_that_stay_it_is_fixmatch_that_keeps_all():
  """Thresholds of 1 / C."""
  ours, theirs = (
    tiny_rounds.run(tiny_rounds.build(name, own=own))[-1]
    for name, own in (
      ('freematch', {'decay': 1.0, 'fairness_weight': 0.0}),
      ('fixmatch', {'confidence_threshold': 0.0}),
    )
  )
  tiny_rounds.assert_same(
    tiny_rounds.model(ours).trainable, tiny_rounds.model(theirs).trainable
  )


def test_the_server_learns_the_cohorts_means():
  """Of clients who do not train, those of their predictions."""
  process = tiny_rounds.build(
    'freematch', own={'decay': 0.0}, client_learning_rate=0.0
  )
  state = tiny_rounds.run(process, num_rounds=1)[-1].state
  averages = state.global_model_weights.control['averages']
  tau, prediction, counts = freematch.split(tf.constant(averages))
  for part in (prediction, counts):
    np.testing.assert_allclose(np.sum(part), 1, atol=1e-5)
  assert 1 / tiny_task.NUM_CLASSES < float(tau[0]) <= 1
