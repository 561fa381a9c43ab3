"""The loss with helpers: I2 of the FedMatch specification."""

import numpy as np
import pytest
import tensorflow as tf
import tiny_task

from tff_fssl.local import algorithm as algorithm_lib
from tff_fssl.local import helping
from tff_fssl.local import objective
from tff_fssl.models import adapter
from tff_fssl.models.weights import Weights

_LOCAL = np.array(
  [
    [0.80, 0.10, 0.05, 0.05],
    [0.05, 0.10, 0.05, 0.80],
    [0.10, 0.76, 0.10, 0.04],
    [0.60, 0.20, 0.10, 0.10],
    [0.05, 0.05, 0.86, 0.04],
  ]
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
  ]
)
_SETTINGS = {
  'confidence_threshold': 0.75,
  'label_weight': 1.0,
  'consistency_weight': 1.0,
  'agree': True,
  'tie': 'lowest',
}


def _batch(helpers=_HELPERS, weights=(1.0, 1.0), of_examples=(1.0,) * 5):
  part = algorithm_lib.Part(
    {},
    tf.constant([1, 1, 0, 0, 2]),
    tf.constant(of_examples),
    {helping.PROBS: tf.constant(helpers, tf.float32)},
  )
  return algorithm_lib.Batch(
    {objective.UNLABELED: part},
    {helping.WEIGHTS: tf.constant(weights)},
    None,
    None,
  )


def _loss(batch, plain=None, strong=None, **changed):
  plain = np.log(_LOCAL) if plain is None else plain
  strong = np.log(_STRONG) if strong is None else strong
  loss, ratios = helping.loss(
    batch,
    tf.constant(plain, tf.float32),
    tf.constant(strong, tf.float32),
    **{**_SETTINGS, **changed},
  )
  return float(loss), {
    name: (float(total), float(count))
    for name, (total, count) in ratios.items()
  }


@pytest.mark.parametrize(
  'changed, expected',
  [
    ({}, 1.861637),
    ({'label_weight': 1e-2, 'consistency_weight': 1e-2}, 0.018616),
    ({'consistency_weight': 0.0}, 0.932425),
    ({'label_weight': 0.0}, 0.929212),
    # The local network decides in row b: -log .2 instead of -log .6.
    ({'tie': 'local', 'consistency_weight': 0.0}, 1.207078),
    # Labels 0, 3, 1, 2: -log of .3, .2, .4, .5.
    ({'agree': False, 'consistency_weight': 0.0}, 1.105712),
    # Row e alone: its label is 0, -log .2.
    ({'confidence_threshold': 0.85}, (1.540006 + 0.895368) / 2 + 1.609438),
  ],
)
def test_i2(changed, expected):
  loss, _ = _loss(_batch(), **changed)
  np.testing.assert_allclose(loss, expected, atol=2e-6)


def test_the_divisor_is_the_number_of_confident_examples():
  """Fillers are neither confident nor counted."""
  with_filler = _batch(of_examples=(1.0, 1.0, 1.0, 1.0, 0.0))
  loss, ratios = _loss(with_filler)
  rows = np.array([1.292822, 0.745472, 0.511240])
  other = np.array([0.936426, 0.874034, 0.638326])
  of_labels = np.array([0.693147, 0.510826, 0.916291])
  expected = np.mean((rows + other) / 2) + np.mean(of_labels)
  np.testing.assert_allclose(loss, expected, atol=2e-6)
  assert ratios['pseudo_label_ratio'] == (3.0, 4.0)
  np.testing.assert_allclose(
    ratios['loss_pseudo_label'][0], of_labels.sum(), rtol=1e-5
  )
  assert ratios['loss_pseudo_label'][1] == ratios['loss_helpers'][1] == 3.0
  assert ratios['unmasked_cross_entropy'][1] == 4.0


def test_nothing_without_confident_examples_or_helpers():
  loss, ratios = _loss(_batch(), confidence_threshold=0.9)
  assert loss == 0.0
  # What drives the learning rate is there anyway: own labels, all examples.
  own = -np.log([0.3, 0.2, 0.4, 0.25, 0.5]).sum()
  np.testing.assert_allclose(
    ratios['unmasked_cross_entropy'][0], own, rtol=1e-6
  )
  loss, ratios = _loss(_batch(weights=(0.0, 0.0)))
  np.testing.assert_allclose(loss, 1.105712, atol=2e-6)
  assert ratios['loss_helpers'] == (0.0, 0.0)


@pytest.mark.parametrize(
  'label_weight, consistency_weight', [(1, 0), (0, 1), (0.7, 0.4)]
)
def test_gradients_by_finite_differences(label_weight, consistency_weight):
  settings = {
    'label_weight': float(label_weight),
    'consistency_weight': float(consistency_weight),
  }
  logits = [np.log(_LOCAL), np.log(_STRONG)]
  tensors = [tf.constant(v, tf.float32) for v in logits]
  with tf.GradientTape() as tape:
    tape.watch(tensors)
    loss, _ = helping.loss(_batch(), *tensors, **{**_SETTINGS, **settings})
  gradients = tape.gradient(
    loss, tensors, unconnected_gradients=tf.UnconnectedGradients.ZERO
  )
  size = 1e-3
  for which, gradient in enumerate(gradients):
    for index in np.ndindex(5, 4):
      values = []
      for sign in (1, -1):
        moved = [v.copy() for v in logits]
        moved[which][index] += sign * size
        values.append(_loss(_batch(), *moved, **settings)[0])
      slope = (values[0] - values[1]) / (2 * size)
      np.testing.assert_allclose(gradient[index], slope, atol=3e-4)
  # Plain examples learn from helpers only, strong ones from labels only.
  assert bool(np.any(gradients[0])) == bool(consistency_weight)
  assert bool(np.any(gradients[1])) == bool(label_weight)


def _data(size=7):
  x, y = tiny_task.examples(size, 3)
  examples = algorithm_lib.Examples(tf.constant(x), tf.constant(y))
  return algorithm_lib.ClientData(
    Weights((), (), tf.constant(0.0)),
    examples,
    examples,
    {},
    tf.constant(1),
    tf.constant([1, 2]),
  )


@pytest.fixture(scope='module')
def network():
  return adapter.Network(lambda: tiny_task.model_fn('none'), seed=1)


def _others(network, scale):
  return [scale * tf.ones(v.shape) for v in network.trainable_variables]


def test_helpers_predict_as_they_are_and_leave_the_network(network):
  data = _data()
  helpers = [_others(network, 0.1), _others(network, -0.2)]
  before = [v.numpy() for v in network.trainable_variables]
  probs, weights = helping.predict(
    network, helpers, tf.ones([2]), data, tiny_task.VIEWS, 3
  )
  images = tiny_task.VIEWS.plain(data.unlabeled.x)
  for index, helper in enumerate(helpers):
    with network.perturbed(helper):
      expected = tf.nn.softmax(network.logits(images, training=False))
    np.testing.assert_allclose(probs[:, index], expected, atol=1e-6)
  np.testing.assert_array_equal(weights, [1.0, 1.0])
  for a, b in zip(before, network.trainable_variables, strict=True):
    np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize('evil', [1e12, np.inf, np.nan])
def test_a_helper_that_predicts_no_numbers_does_not_count(network, evil):
  data = _data()
  helpers = [_others(network, evil), _others(network, 0.1)]
  probs, weights = helping.predict(
    network, helpers, tf.ones([2]), data, tiny_task.VIEWS, 4
  )
  assert np.all(np.isfinite(probs))
  assert weights.numpy().tolist() in ([0.0, 1.0], [1.0, 1.0])
  if not np.isfinite(evil):
    assert weights.numpy().tolist() == [0.0, 1.0]
    assert not np.any(probs[:, 0])


def test_without_helpers_nothing_is_computed(network):
  for helpers in ([], [_others(network, np.nan)]):
    probs, weights = helping.predict(
      network, helpers, tf.zeros([1]), _data(), tiny_task.VIEWS, 4
    )
    np.testing.assert_array_equal(probs, np.zeros([7, 1, 3]))
    assert weights.numpy() == [0.0]


def test_i16_the_image_of_noise():
  values = helping.noise(200_000) / 255
  np.testing.assert_allclose(values.mean(), 0.497047, atol=2e-3)
  np.testing.assert_allclose(values.std(), 0.269026, atol=2e-3)
  assert values.min() >= 0 and values.max() <= 1
  np.testing.assert_array_equal(helping.noise(50), helping.noise(50))
  assert all(helping.noise(n).shape == (n,) for n in (1, 2, 3072))


def test_embeddings_tell_networks_apart(network):
  data = _data()
  first = helping.embedding(network, data, tiny_task.VIEWS)
  again = helping.embedding(network, _data(3), tiny_task.VIEWS)
  np.testing.assert_array_equal(first, again)
  np.testing.assert_allclose(tf.reduce_sum(first), 1.0, atol=1e-6)
  with network.perturbed(_others(network, 0.1)):
    other = helping.embedding(network, data, tiny_task.VIEWS)
  assert np.max(np.abs(first - other)) > 1e-3
