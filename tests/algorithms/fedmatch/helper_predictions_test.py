"""Votes, and the loss with helpers: I1 and I2 of the FedMatch specification."""

import numpy as np
import pytest
import tensorflow as tf
import tiny_task

from tff_fssl.algorithms.fedmatch import helper_predictions
from tff_fssl.interface import base
from tff_fssl.models import adapter
from tff_fssl.models.weights import Weights
from tff_fssl.semisup import losses
from tff_fssl.semisup import thresholds

_LOCAL = np.array(
  [
    [0.80, 0.10, 0.05, 0.05],
    [0.05, 0.10, 0.05, 0.80],
    [0.10, 0.76, 0.10, 0.04],
    [0.60, 0.20, 0.10, 0.10],
    [0.05, 0.05, 0.86, 0.04],
  ],
  np.float32,
)
_STRONG = np.array(
  [
    [0.30, 0.50, 0.10, 0.10],
    [0.10, 0.60, 0.10, 0.20],
    [0.40, 0.40, 0.10, 0.10],
    [0.25, 0.25, 0.25, 0.25],
    [0.20, 0.20, 0.50, 0.10],
  ]
)
_HELPERS = np.array(
  [
    [[0.10, 0.70, 0.10, 0.10], [0.20, 0.60, 0.10, 0.10]],
    [[0.10, 0.20, 0.40, 0.30], [0.10, 0.50, 0.20, 0.20]],
    [[0.30, 0.30, 0.20, 0.20], [0.25, 0.25, 0.25, 0.25]],
    [[0.90, 0.05, 0.03, 0.02], [0.90, 0.05, 0.03, 0.02]],
    [[0.40, 0.40, 0.10, 0.10], [0.30, 0.10, 0.30, 0.30]],
  ],
  np.float32,
)
_SETTINGS = {
  'threshold': 0.75,
  'label_weight': 1.0,
  'consistency_weight': 1.0,
  'agree': True,
  'local_breaks_ties': False,
}


@pytest.mark.parametrize(
  'weights, local_breaks_ties, expected',
  [
    # Of three classes with a vote each: the lowest, or the local network's.
    ([1.0, 1.0], False, [1, 1, 0, 0, 0]),
    ([1.0, 1.0], True, [1, 3, 0, 0, 0]),
    # One helper: each disagreement is a tie.
    ([1.0, 0.0], False, [0, 2, 0, 0, 0]),
    ([1.0, 0.0], True, [0, 3, 1, 0, 2]),
    ([0.0, 0.0], False, [0, 3, 1, 0, 2]),
    ([0.0, 0.0], True, [0, 3, 1, 0, 2]),
  ],
)
def test_i1_votes(weights, local_breaks_ties, expected):
  labels = helper_predictions.vote(
    _LOCAL, _HELPERS, tf.constant(weights), local_breaks_ties
  )
  np.testing.assert_array_equal(labels, expected)


@pytest.mark.parametrize(
  'threshold, kept', [(0.75, [1, 1, 1, 0, 1]), (0.85, [0, 0, 0, 0, 1])]
)
def test_i1_only_the_local_network_is_asked_for_confidence(threshold, kept):
  np.testing.assert_array_equal(
    thresholds.fixed_mask(_LOCAL, threshold), np.array(kept, bool)
  )


def test_a_tie_between_others_goes_to_the_lowest():
  helpers = tf.one_hot([[2, 2, 1, 1]], 4)
  labels = helper_predictions.vote(
    tf.one_hot([3], 4), helpers, tf.ones([4]), 'local'
  )
  assert labels.numpy() == [1]


_MASK = tf.constant([1.0, 1.0, 1.0, 0.0, 1.0])


@pytest.mark.parametrize(
  'weights, mean',
  [([1, 0], 1.022385), ([0, 1], 0.836039), ([1, 1], 0.929212), ([0, 0], 0.0)],
)
def test_i2_divergence_from_helpers(weights, mean):
  of_examples = helper_predictions.divergence_from_helpers(
    _HELPERS, tf.constant(weights, tf.float32), tf.math.log(_LOCAL)
  )
  actual = losses.masked_mean(of_examples, _MASK)
  np.testing.assert_allclose(actual, mean, atol=1e-6)


def test_i2_rows():
  rows = helper_predictions.divergence_from_helpers(
    _HELPERS, tf.constant([1.0, 0.0]), tf.math.log(_LOCAL)
  ).numpy()
  np.testing.assert_allclose(
    rows[[0, 1, 2, 4]], [1.292822, 0.745472, 0.511240, 1.540006], atol=1e-6
  )


def _examples(weights=(1.0,) * 5):
  return base.BatchExamples(
    {},
    tf.constant([1, 1, 0, 0, 2]),
    tf.constant(weights),
    {helper_predictions.PROBS: tf.constant(_HELPERS, tf.float32)},
  )


def _loss(
  plain=None, strong=None, examples=None, weights=(1.0, 1.0), **changed
):
  plain = np.log(_LOCAL) if plain is None else plain
  strong = np.log(_STRONG) if strong is None else strong
  loss, metrics = helper_predictions.loss(
    _examples() if examples is None else examples,
    tf.constant(plain, tf.float32),
    tf.constant(strong, tf.float32),
    tf.constant(weights),
    **{**_SETTINGS, **changed},
  )
  return float(loss), {
    name: (float(total), float(count))
    for name, (total, count) in metrics.items()
  }


@pytest.mark.parametrize(
  'changed, expected',
  [
    ({}, 1.861637),
    ({'label_weight': 1e-2, 'consistency_weight': 1e-2}, 0.018616),
    ({'consistency_weight': 0.0}, 0.932425),
    ({'label_weight': 0.0}, 0.929212),
    # The local network decides in row b: -log .2 instead of -log .6.
    ({'local_breaks_ties': True, 'consistency_weight': 0.0}, 1.207078),
    # Labels 0, 3, 1, 2: -log of .3, .2, .4, .5.
    ({'agree': False, 'consistency_weight': 0.0}, 1.105712),
    # Row e alone: its label is 0, -log .2.
    ({'threshold': 0.85}, (1.540006 + 0.895368) / 2 + 1.609438),
  ],
)
def test_i2(changed, expected):
  loss, _ = _loss(**changed)
  np.testing.assert_allclose(loss, expected, atol=2e-6)


def test_the_divisor_is_the_number_of_confident_examples():
  """Fillers are neither confident nor counted."""
  with_filler = _examples((1.0, 1.0, 1.0, 1.0, 0.0))
  loss, metrics = _loss(examples=with_filler)
  rows = np.array([1.292822, 0.745472, 0.511240])
  other = np.array([0.936426, 0.874034, 0.638326])
  of_labels = np.array([0.693147, 0.510826, 0.916291])
  expected = np.mean((rows + other) / 2) + np.mean(of_labels)
  np.testing.assert_allclose(loss, expected, atol=2e-6)
  assert metrics['pseudo_label_ratio'] == (3.0, 4.0)
  np.testing.assert_allclose(
    metrics['loss_pseudo_label'][0], of_labels.sum(), rtol=1e-5
  )
  assert metrics['loss_pseudo_label'][1] == metrics['loss_helpers'][1] == 3.0
  assert metrics['unmasked_cross_entropy'][1] == 4.0


def test_nothing_without_confident_examples_or_helpers():
  loss, metrics = _loss(threshold=0.9)
  assert loss == 0.0
  # What drives the learning rate is there anyway: own labels, all examples.
  own = -np.log([0.3, 0.2, 0.4, 0.25, 0.5]).sum()
  np.testing.assert_allclose(
    metrics['unmasked_cross_entropy'][0], own, rtol=1e-6
  )
  loss, metrics = _loss(weights=(0.0, 0.0))
  np.testing.assert_allclose(loss, 1.105712, atol=2e-6)
  assert metrics['loss_helpers'] == (0.0, 0.0)


def _client(network, size=7):
  x, y = tiny_task.examples(size, 3)
  examples = base.Examples(tf.constant(x), tf.constant(y))
  return base.Client(
    base.Networks(network, {}),
    Weights((), (), tf.constant(0.0)),
    examples,
    examples,
    {},
    tiny_task.VIEWS,
    tf.constant(1),
    tf.constant([1, 2]),
  )


@pytest.fixture(scope='module')
def network():
  return adapter.Network(lambda: tiny_task.model_fn('none'), seed=1)


def _others(network, scale):
  return [scale * tf.ones(v.shape) for v in network.trainable_variables]


def test_helpers_predict_as_they_are_and_leave_the_network(network):
  client = _client(network)
  helpers = [_others(network, 0.1), _others(network, -0.2)]
  before = [v.numpy() for v in network.trainable_variables]
  probs, weights = helper_predictions.predict(client, helpers, tf.ones([2]), 3)
  images = tiny_task.VIEWS.plain(client.unlabeled.x)
  for index, helper in enumerate(helpers):
    with network.perturbed(helper):
      expected = tf.nn.softmax(network.logits(images, training=False))
    np.testing.assert_allclose(probs[:, index], expected, atol=1e-6)
  np.testing.assert_array_equal(weights, [1.0, 1.0])
  for a, b in zip(before, network.trainable_variables, strict=True):
    np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize('evil', [1e12, np.inf, np.nan])
def test_a_helper_that_predicts_no_numbers_does_not_count(network, evil):
  client = _client(network)
  helpers = [_others(network, evil), _others(network, 0.1)]
  probs, weights = helper_predictions.predict(client, helpers, tf.ones([2]), 4)
  assert np.all(np.isfinite(probs))
  assert weights.numpy().tolist() in ([0.0, 1.0], [1.0, 1.0])
  if not np.isfinite(evil):
    assert weights.numpy().tolist() == [0.0, 1.0]
    assert not np.any(probs[:, 0])


def test_without_helpers_nothing_is_computed(network):
  for helpers in ([], [_others(network, np.nan)]):
    probs, weights = helper_predictions.predict(
      _client(network), helpers, tf.zeros([1]), 4
    )
    np.testing.assert_array_equal(probs, np.zeros([7, 1, 3]))
    assert weights.numpy() == [0.0]


def test_i16_the_image_of_noise():
  values = helper_predictions.draw_noise(200_000) / 255
  np.testing.assert_allclose(values.mean(), 0.497047, atol=2e-3)
  np.testing.assert_allclose(values.std(), 0.269026, atol=2e-3)
  assert values.min() >= 0 and values.max() <= 1
  np.testing.assert_array_equal(
    helper_predictions.draw_noise(50), helper_predictions.draw_noise(50)
  )
  assert all(
    helper_predictions.draw_noise(n).shape == (n,) for n in (1, 2, 3072)
  )


def test_embeddings_tell_networks_apart(network):
  client = _client(network)
  first = helper_predictions.embedding(client)
  again = helper_predictions.embedding(_client(network, 3))
  np.testing.assert_array_equal(first, again)
  np.testing.assert_allclose(tf.reduce_sum(first), 1.0, atol=1e-6)
  with network.perturbed(_others(network, 0.1)):
    other = helper_predictions.embedding(client)
  assert np.max(np.abs(first - other)) > 1e-3
