"""Loops in a graph.

Graphs are traced without AutoGraph, which would rewrite the source of every
function that it meets: a third of the time that a run took to start.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from tff_fssl.lazy import tf

_Carry = TypeVar('_Carry')


def fold(
  body: Callable[[tf.Tensor, _Carry], _Carry],
  initial: _Carry,
  *,
  end: tf.Tensor | int,
  start: tf.Tensor | int = 0,
  step: tf.Tensor | int = 1,
) -> _Carry:
  """Repeats `carry = body(index, carry)` for each index of a range.

  Args:
    body: (index, int32 scalar; carry) -> the next carry, of the same types.
    initial: The first carry: tensors, or a structure of these.
    end: One past the last index, int32.
    start: The first index, int32.
    step: The distance of indices, int32, positive.

  Returns:
    The last carry; `initial` if the range is empty.
  """
  _, carry = tf.while_loop(
    lambda index, _: index < end,
    lambda index, carry: (index + step, body(index, carry)),
    (tf.convert_to_tensor(start, tf.int32), initial),
  )
  return carry


def num_batches(size: tf.Tensor, batch_size: int) -> tf.Tensor:
  """Counts the batches of `fold_batches`: int32 scalar."""
  if batch_size == 1:
    return size
  return tf.maximum(-(-(size - 1) // batch_size), tf.minimum(size, 1))


def fold_batches(
  body: Callable[[tf.Tensor, slice, _Carry], _Carry],
  initial: _Carry,
  *,
  size: tf.Tensor,
  batch_size: int,
) -> _Carry:
  """Repeats `carry = body(index, rows, carry)` for each batch of rows.

  A last batch of one row joins a larger one before it: the moments of a single
  row would normalize it to 0, whatever it is.

  Args:
    body: (index, int32 scalar; the batch's rows; carry) -> the next carry.
    initial: The first carry.
    size: The number of rows, int32 scalar.
    batch_size: Rows in a batch. The last may have fewer, or one more.

  Returns:
    The last carry.
  """
  num = num_batches(size, batch_size)

  def add(index: tf.Tensor, carry: _Carry) -> _Carry:
    end = tf.where(index + 1 < num, (index + 1) * batch_size, size)
    return body(index, slice(index * batch_size, end), carry)

  return fold(add, initial, end=num)
