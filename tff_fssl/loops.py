"""A loop in a graph.

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
