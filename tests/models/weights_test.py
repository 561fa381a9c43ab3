"""Operations on structures of tensors."""

import numpy as np
import pytest
import tensorflow as tf

from tff_fssl.models import weights


def test_flatten_and_back():
  tensors = [tf.constant([[1.0, 2.0]]), tf.constant(3.0), tf.constant([4.0])]
  flat = weights.flatten(tensors)
  np.testing.assert_array_equal(flat, [1.0, 2.0, 3.0, 4.0])
  for a, b in zip(weights.unflatten(flat, tensors), tensors, strict=True):
    np.testing.assert_array_equal(a, b)
    assert a.shape == b.shape


@pytest.mark.parametrize('value', [np.nan, np.inf, -np.inf])
def test_one_float_that_is_not_finite_is_found(value):
  whole = {'counter': tf.constant(7), 'floats': [tf.ones([2]), [1.0, 2.0]]}
  assert bool(weights.all_finite(whole))
  assert not bool(weights.all_finite(whole | {'more': tf.constant([value])}))


def test_a_loop_may_add_rows_to_no_values():
  @tf.function
  def grow():
    rows = weights.no_values(tf.TensorSpec([2], tf.int32))
    for i in tf.range(3):
      rows = tf.concat([rows, [[i, i]]], axis=0)
    return rows

  np.testing.assert_array_equal(grow(), [[0, 0], [1, 1], [2, 2]])


@pytest.mark.parametrize('condition', [True, False])
def test_selects_a_whole_structure(condition):
  yes = weights.Weights((tf.ones([2]),), (), tf.constant(3.0))
  no = tf.nest.map_structure(lambda t: -t, yes)
  chosen = weights.select(tf.constant(condition), yes, lambda: no)
  tf.nest.map_structure(
    np.testing.assert_array_equal, chosen, yes if condition else no
  )
  kept = weights.zero_unless(tf.constant(condition), yes)
  assert float(kept.statistics_count) == (3.0 if condition else 0.0)
