"""SemiFL: what it reduces to, its gradients, its empty fix set."""

import numpy as np
import pytest
import tensorflow as tf
import tiny_local
import tiny_task

from tff_fssl.algorithms import semifl
from tff_fssl.client import optimizer
from tff_fssl.client import training
from tff_fssl.data import augment
from tff_fssl.interface import base
from tff_fssl.models import adapter
from tff_fssl.models.weights import Weights
from tff_fssl.semisup import mixup


def _train(name, **own):
  """What a client without labels has after three epochs."""
  config = training.LoopConfig(3, 5, 5, optimizer.Sgd())
  element = tiny_task.client(0)
  return tiny_local.train(
    name, 'labels_at_server', element, config, norm='bn', **own
  )[1]


def test_without_mixup_it_is_the_fixmatch_client_of_fl2s_table_2():
  ours = _train('semifl', mixup_concentration=0.0, confidence_threshold=0.35)
  theirs = _train(
    'fl2',
    adaptive_threshold=False,
    confidence_threshold=0.35,
    consistency='none',
    learning_status_aggregation=False,
  )
  assert ours.metrics['pseudo_label_ratio'][0] > 0
  for a, b in zip(ours.update, theirs.update, strict=True):
    np.testing.assert_array_equal(a, b)


def test_a_client_with_an_empty_fix_set_sends_no_update():
  result = _train('semifl', confidence_threshold=1.0)
  assert result.num_examples == result.metrics['pseudo_label_ratio'][0] == 0
  assert not any(np.any(change) for change in result.update)


_K = np.array([0.7, -0.2])


def _model():
  return tf.keras.Sequential(
    [tf.keras.Input([1]), tf.keras.layers.Dense(2, use_bias=False)]
  )


@pytest.mark.parametrize('seed', [0, 1, 2])
def test_step_against_finite_differences(seed):
  """Flfl_semifl.md, 2.2, in float64."""
  fix_x, mix_x = np.array([1.0, -2.0, 0.5]), np.array([0.3, 1.5, -1.0])
  strong_x = np.array([1.1, -1.5, 0.9])
  fix_y, mix_y = np.array([0, 1, 1]), np.array([1, 1, 0])
  network = adapter.Network(_model)
  kernel = tf.constant(_K[None], tf.float32)
  network.assign(Weights((kernel,), (), tf.constant(1.0)))

  def part(labels, **views):
    return base.BatchExamples(
      {k: tf.constant(v[:, None], tf.float32) for k, v in views.items()},
      tf.fill([3], -1),
      tf.ones([3]),
      {'labels': tf.constant(labels, tf.int32)},
    )

  batch = base.Batch(
    {
      'unlabeled': part(fix_y, weak=fix_x, strong=strong_x),
      'mix': part(mix_y, weak=mix_x),
    },
    {},
    base.StepTime(*tf.constant([1, 0, 1])),
    tf.constant([seed, 7]),
  )
  result = semifl.SemiFl().step(base.Networks(network, {}), batch)
  lam = float(mixup.draw_shares([], 0.75, batch.seed))
  assert 0 < lam < 1

  def cross_entropy(k, x, y):
    logits = np.outer(x, k)
    log_sum = np.log(np.sum(np.exp(logits), -1))
    return np.mean(log_sum - logits[np.arange(3), y])

  def loss(k):
    mixed = lam * fix_x + (1 - lam) * mix_x
    return (
      cross_entropy(k, strong_x, fix_y)
      + lam * cross_entropy(k, mixed, fix_y)
      + (1 - lam) * cross_entropy(k, mixed, mix_y)
    )

  expected = [(loss(_K + d) - loss(_K - d)) / 2e-6 for d in 1e-6 * np.eye(2)]
  np.testing.assert_allclose(
    result.gradients[0][0], expected, rtol=1e-4, atol=1e-6
  )


def test_prepare_labels_all_and_selects_the_confident():
  network = adapter.Network(_model)
  weights = Weights((tf.constant([[3.0, -3.0]]),), (), tf.constant(1.0))
  network.assign(weights)
  x = tf.constant([[1.0], [-0.1], [0.0], [-2.0]])
  examples = base.Examples(x, tf.constant([0, 1, 0, 0]))
  plain = lambda images, seed=None: images
  client = base.Client(
    base.Networks(network, {}),
    weights,
    examples,
    examples,
    {},
    augment.Views(*[plain] * 3),
    tf.constant(1),
    tf.constant([0, 1]),
  )
  prepared = semifl.SemiFl().prepare(client)
  np.testing.assert_array_equal(prepared.selected, [0, 3])
  np.testing.assert_array_equal(prepared.per_example['labels'], [0, 1, 0, 1])
