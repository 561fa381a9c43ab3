"""Tests of `loops`."""

import pytest
import tensorflow as tf
from tensorflow.python.eager import context

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


@pytest.mark.parametrize(
  'size, batch_size, expected',
  [
    (0, 4, []),
    (1, 4, [1]),
    (4, 4, [4]),
    (5, 4, [5]),
    (6, 4, [4, 2]),
    (9, 4, [4, 5]),
    (3, 1, [1, 1, 1]),
  ],
)
def test_batches_leave_no_row_alone(size, batch_size, expected):
  seen = []

  def body(index, rows, carry):
    seen.append((int(index), int(rows.start), int(rows.stop)))
    return carry

  size = tf.constant(size)
  loops.fold_batches(body, 0, size=size, batch_size=batch_size)
  assert [end - start for _, start, end in seen] == expected
  assert [i for i, _, _ in seen] == list(range(len(expected)))
  assert loops.num_batches(size, batch_size) == len(expected)


def test_options_of_calls_are_put_back():
  options = lambda: context.context().function_call_options
  before = options()
  with loops.call_options():
    assert options() is not before
  assert options().config_proto_serialized == before.config_proto_serialized
