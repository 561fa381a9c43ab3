"""Loops in a graph, and calls of graphs with loops.

Graphs are traced without AutoGraph, which would rewrite the source of every
function that it meets: a third of the time that a run took to start.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
import contextlib
import functools
from typing import Any, TypeVar

from tff_fssl import lazy
from tff_fssl.lazy import tf

# No public name sets a function's RewriterConfig.
_context = lazy.LazyImport('tensorflow.python.eager.context')

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


@contextlib.contextmanager
def call_options() -> Iterator[None]:
  """Runs functions without the memory optimizer, and optimizes them once.

  If a function needs much memory, TensorFlow's memory optimizer replaces sums
  of three and more tensors by temporary variables. Their names are the same in
  all calls of a process, and a loop leaves those of its last iteration behind.
  Other calls, later or at the same time, fail with `AlreadyExistsError`
  (TensorFlow issue 37740).
  """
  context = _context.context()
  old = context.function_call_options
  context.function_call_options = _make_options(
    old.executor_type, old.config_proto_serialized
  )
  try:
    yield
  finally:
    context.function_call_options = old


@functools.cache
def _make_options(executor_type: Any, serialized: bytes) -> Any:
  config = tf.compat.v1.ConfigProto.FromString(serialized)
  rewriting = config.graph_options.rewrite_options
  # Its other work is to swap from a GPU's memory to the host's.
  rewriting.memory_optimization = (
    rewriting.SWAPPING_HEURISTICS
    if tf.config.list_logical_devices('GPU')
    else rewriting.NO_MEM_OPT
  )
  # A second pass takes a tenth of the time of a start, and finds nothing.
  rewriting.meta_optimizer_iterations = rewriting.ONE
  return _context.FunctionCallOptions(executor_type, config)
