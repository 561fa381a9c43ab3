"""Creation of Keras's variables: initial values and precision."""

import numpy as np
import pytest
import tensorflow as tf

from tff_fssl.models import making


def _build(seed):
  created = []
  with (
    tf.Graph().as_default(),
    tf.variable_creator_scope(making.seeded_creator(seed, created)),
  ):
    layers = [tf.keras.layers.Dense(3), tf.keras.layers.Dense(3)]
    x = tf.keras.Input([3])
    for layer in layers:
      x = layer(x)
    with tf.compat.v1.Session() as session:
      session.run([v.initializer for v in created])
      return session.run(created)


def test_initial_values_follow_from_seed_and_place():
  first, again, other = _build(1), _build(1), _build(2)
  assert len(first) == 4
  for a, b in zip(first, again, strict=True):
    np.testing.assert_array_equal(a, b)
  assert np.any(first[0] != other[0])
  assert np.any(first[0] != first[2])


def test_without_a_seed_all_is_zero():
  assert not any(np.any(value) for value in _build(None))


@pytest.mark.parametrize('fails', [False, True])
def test_a_policy_ends_with_its_context(fails):
  before = tf.keras.mixed_precision.global_policy().name
  try:
    with making.policy('bfloat16'):
      assert tf.keras.layers.Dense(1).compute_dtype == 'bfloat16'
      if fails:
        raise KeyError
  except KeyError:
    pass
  assert tf.keras.mixed_precision.global_policy().name == before
  with making.policy('float32'):
    assert tf.keras.mixed_precision.global_policy().name == before
