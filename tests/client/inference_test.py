"""Inference over a client's data."""

import numpy as np
import pytest
import tensorflow as tf
import tiny_task

from tff_fssl.client import inference
from tff_fssl.client import seeds
from tff_fssl.models import adapter


@pytest.mark.parametrize('num', [0, 1, 4, 5, 9])
def test_outputs_do_not_depend_on_batches(num):
  network = adapter.Network(lambda: tiny_task.model_fn('none'), seed=0)
  weights = network.initial_weights()
  x, _ = tiny_task.examples(9, 1)

  @tf.function(autograph=False)
  def predict(images):
    return inference.plain_probs(
      network, images, weights.statistics_count, tiny_task.VIEWS, 4
    )

  probs = predict(tf.constant(x[:num]))
  assert probs.shape == [num, tiny_task.NUM_CLASSES]
  logits = network.inference_logits(
    tiny_task.VIEWS.plain(x), weights.statistics_count
  )
  np.testing.assert_allclose(probs, tf.nn.softmax(logits)[:num], atol=1e-6)


def test_each_batch_has_a_seed_of_its_own():
  network = adapter.Network(lambda: tiny_task.model_fn('none'), seed=0)
  weights = network.initial_weights()
  image = tiny_task.examples(1, 1)[0]
  images = tf.constant(np.concatenate([image, image]))
  seed = tf.constant([1, 2])
  logits = inference.weak_logits(
    network, weights, images, tiny_task.VIEWS, seed, 1
  )
  for i in range(2):
    view = tiny_task.VIEWS.weak(image, seeds.fold_in(seed, i))
    expected = network.inference_logits(view, weights.statistics_count)
    np.testing.assert_allclose(logits[i : i + 1], expected, atol=1e-6)


def test_batches_are_counted_and_rows_prepended():
  assert [inference.num_batches(n, 4) for n in (0, 1, 4, 5)] == [0, 1, 1, 2]
  values = tf.constant([[1, 2]])
  for when, expected in ((True, [[0, 0], [1, 2]]), (False, [[1, 2]])):
    rows = inference.zero_row(values, tf.constant(when))
    assert rows.numpy().tolist() == expected
