"""Tests of `loops`."""

import pytest
import tensorflow as tf

from tff_fssl import loops


@pytest.mark.parametrize(
  'start, end, step, expected',
  [
    pytest.param(0, 5, 1, [0, 1, 2, 3, 4], id='each'),
    pytest.param(2, 9, 3, [2, 5, 8], id='step'),
    pytest.param(3, 3, 1, [], id='empty'),
  ],
)
def test_fold_visits_the_range_in_order(start, end, step, expected):
  def run(start, end, step):
    return loops.fold(
      lambda index, seen: tf.concat([seen, [index]], 0),
      tf.zeros([0], tf.int32),
      start=start,
      end=end,
      step=step,
    )

  # The size of the carry varies: eager loops allow that, graphs do not.
  assert run(start, end, step).numpy().tolist() == expected
  assert run(*map(tf.constant, (start, end, step))).numpy().tolist() == expected


def test_fold_carries_structures_in_a_graph():
  @tf.function(autograph=False)
  def run(end):
    def body(index, carry):
      return {
        'sum': carry['sum'] + index,
        'kept': carry['kept'].write(index, carry['sum']),
      }

    kept = tf.TensorArray(tf.int32, end, element_shape=[])
    carry = loops.fold(body, {'sum': 0, 'kept': kept}, end=end)
    return carry['sum'], carry['kept'].stack()

  total, kept = run(tf.constant(4))
  assert int(total) == 6
  assert kept.numpy().tolist() == [0, 0, 1, 3]
