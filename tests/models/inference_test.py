"""Inference over a client's data."""

import numpy as np
import pytest
import tensorflow as tf
import tiny_task

from tff_fssl import seeds
from tff_fssl.models import adapter
from tff_fssl.models import inference


def _vectors():
  """A network whose batch norm makes a single vector 0."""
  return tf.keras.Sequential(
    [
      tf.keras.Input([3]),
      tf.keras.layers.Dense(8),
      tf.keras.layers.BatchNormalization(),
      tf.keras.layers.Dense(2),
    ]
  )


def test_the_last_example_is_not_normalized_by_itself():
  network = adapter.Network(_vectors, seed=0)
  x = np.random.default_rng(0).normal(size=[9, 3]).astype(np.float32)

  def last(vector):
    rows = tf.constant(np.concatenate([x[:8], [vector]]), tf.float32)
    return inference.outputs(network, rows, lambda rows, _: rows, 8)[8]

  assert np.abs(last([5, -5, 1]) - last([-9, 2, 0])).max() > 0.1


@pytest.mark.parametrize('tracks', [True, False])
@pytest.mark.parametrize('num', [0, 1, 5])
def test_own_moments(num, tracks):
  """Whatever batch norm has; a single example takes what there is."""
  network = adapter.Network(_vectors, seed=0, track_moving_averages=tracks)
  one = tf.constant(1.0)
  network.assign(network.initial_weights()._replace(statistics_count=one))
  x = np.random.default_rng(0).normal(size=[num, 3]).astype(np.float32)

  def run(shift, own_moments):
    rows = tf.constant(x + np.float32(shift))
    return inference.outputs(
      network, rows, lambda rows, _: rows, 8, own_moments=own_moments
    )

  assert run(0.0, True).shape == [num, 2]
  if num > 1:  # The mean of own examples is taken off.
    np.testing.assert_allclose(run(0.0, True), run(9.0, True), atol=1e-3)
    assert np.abs(run(0.0, False) - run(9.0, False)).max() > 0.1
  else:
    np.testing.assert_array_equal(run(9.0, True), run(9.0, False))


@pytest.mark.parametrize('num', [0, 1, 4, 5, 9])
def test_outputs_do_not_depend_on_batches(num):
  network = adapter.Network(lambda: tiny_task.model_fn('none'), seed=0)
  x, _ = tiny_task.examples(9, 1)

  @tf.function(autograph=False)
  def predict(images):
    return inference.plain_probs(network, images, tiny_task.VIEWS, 4)

  probs = predict(tf.constant(x[:num]))
  assert probs.shape == [num, tiny_task.NUM_CLASSES]
  logits = network.inference_logits(tiny_task.VIEWS.plain(x))
  np.testing.assert_allclose(probs, tf.nn.softmax(logits)[:num], atol=1e-6)


def test_each_batch_has_a_seed_of_its_own():
  network = adapter.Network(lambda: tiny_task.model_fn('none'), seed=0)
  image = tiny_task.examples(1, 1)[0]
  images = tf.constant(np.concatenate([image, image]))
  seed = tf.constant([1, 2])
  logits = inference.weak_logits(network, images, tiny_task.VIEWS, seed, 1)
  for i in range(2):
    view = tiny_task.VIEWS.weak(image, seeds.fold_in(seed, i))
    expected = network.inference_logits(view)
    np.testing.assert_allclose(logits[i : i + 1], expected, atol=1e-6)


def test_batches_are_counted_and_rows_prepended():
  assert [inference.num_batches(n, 4) for n in (0, 1, 4, 5)] == [0, 1, 1, 2]
  values = tf.constant([[1, 2]])
  for when, expected in ((True, [[0, 0], [1, 2]]), (False, [[1, 2]])):
    rows = inference.zero_row(values, tf.constant(when))
    assert rows.numpy().tolist() == expected
