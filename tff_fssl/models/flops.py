"""Counts the floating-point operations (FLOPs) of a traced function.

Matrix products and convolutions are counted, which are nearly all of a
network's work. A multiplication with addition counts 2. Operations with unused
results are skipped, as TensorFlow skips them when it runs the function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
import dataclasses
import math
from typing import Any, TypeAlias

from tff_fssl.lazy import tf

# An operation -> one of its tensors.
_TensorOf: TypeAlias = 'Callable[[tf.Operation], tf.Tensor]'
# A tensor of an operation -> its dimensions.
_SizesOf: TypeAlias = 'Callable[[tf.Tensor], list[int]]'


class UnknownFlopsError(ValueError):
  """The FLOPs depend on values that are known only when the function runs."""


@dataclasses.dataclass(frozen=True)
class Flops:
  """FLOPs, which may depend on the taken branches.

  Attributes:
    least: The FLOPs of the cheapest branches, >= 0.
    most: The FLOPs of the most expensive branches, >= `least`.
  """

  least: float = 0.0
  most: float = 0.0

  def __add__(self, other: Flops) -> Flops:
    return Flops(self.least + other.least, self.most + other.most)

  def __sub__(self, other: Flops) -> Flops:
    return Flops(self.least - other.least, self.most - other.most)

  def __mul__(self, factor: float) -> Flops:
    return Flops(factor * self.least, factor * self.most)


def count_flops(
  graph: tf.Graph,
  outputs: Iterable[tf.Tensor] | None = None,
  *,
  per_example: bool = False,
) -> Flops:
  """Counts the FLOPs of a function's graph.

  Args:
    graph: The graph of a concrete function.
    outputs: Tensors of the graph. Only operations that they need are counted.
      None: the function's results and side effects.
    per_example: Whether unknown dimensions count as 1, and the body of a loop
      once. If each loop passes over the same examples, batch by batch, the
      result is the FLOPs of one example.

  Returns:
    The FLOPs.

  Raises:
    UnknownFlopsError: If `per_example` is false, and the shape of an operand is
      not known or a loop contains operations that count.
  """
  roots = [t.op for t in outputs or ()]
  if outputs is None:
    roots = [t.op for t in graph.outputs] + list(graph.control_outputs)
  total = Flops()
  for op in _needed(roots):
    total += _count_operation(op, per_example)
  return total


def _needed(roots: Sequence[tf.Operation]) -> Iterable[tf.Operation]:
  """Finds the given operations and all on which they depend."""
  seen = {id(op): op for op in roots}
  waiting = list(seen.values())
  while waiting:
    op = waiting.pop()
    for other in (*(t.op for t in op.inputs), *op.control_inputs):
      if id(other) not in seen:
        seen[id(other)] = other
        waiting.append(other)
  return seen.values()


def _count_operation(op: tf.Operation, per_example: bool) -> Flops:
  """Counts the FLOPs of one operation, and of the functions that it calls."""

  def count(function: Any) -> Flops:
    # A function of the graph's library.
    found = op.graph._get_function(function.name)  # pylint: disable=protected-access
    return count_flops(found.graph, per_example=per_example)

  if op.type in ('PartitionedCall', 'StatefulPartitionedCall'):
    return count(op.get_attr('f'))
  if op.type in ('If', 'StatelessIf'):
    branches = [op.get_attr('then_branch'), op.get_attr('else_branch')]
    return _combine_branches(map(count, branches))
  if op.type in ('Case', 'StatelessCase'):
    return _combine_branches(map(count, op.get_attr('branches')))
  if op.type in ('While', 'StatelessWhile'):
    once = count(op.get_attr('cond')) + count(op.get_attr('body'))
    if once.most and not per_example:
      raise UnknownFlopsError(f'{op.name}: its number of repeats is not known')
    return once
  if op.type not in _MULTIPLICATIONS:
    return Flops()
  flops = 2.0 * _MULTIPLICATIONS[op.type](op, _sizes(op, per_example))
  return Flops(flops, flops)


def _combine_branches(branches: Iterable[Flops]) -> Flops:
  """Combines the FLOPs of alternative branches."""
  branches = list(branches)
  return Flops(min(b.least for b in branches), max(b.most for b in branches))


def _sizes(op: tf.Operation, per_example: bool) -> _SizesOf:
  """Makes a function that returns the dimensions of an operation's tensors."""

  def sizes(tensor: tf.Tensor) -> list[int]:
    shape = tensor.shape
    if shape.rank is None or not (per_example or shape.is_fully_defined()):
      raise UnknownFlopsError(f'{op.name}: a shape is not known')
    return [1 if size is None else size for size in shape.as_list()]

  return sizes


def _product(transposed: str) -> Callable[[tf.Operation, _SizesOf], int]:
  """Makes a function that counts multiplications of a (batched) product."""

  def count(op: tf.Operation, sizes: _SizesOf) -> int:
    axis = -2 if op.get_attr(transposed) else -1
    inner = sizes(op.inputs[0])[axis]
    return math.prod(sizes(op.outputs[0])) * inner

  return count


def _convolution(
  images: _TensorOf,
  kernel: _TensorOf,
  spatial_only: bool = False,
) -> Callable[[tf.Operation, _SizesOf], int]:
  """Makes a function that counts a convolution, or one of its gradients.

  Args:
    images: Finds the tensor with the shape of the convolution's output.
    kernel: Finds the tensor with the shape of its kernel, [..., in, out].
    spatial_only: Whether each output depends on one input channel (depthwise).

  Returns:
    A function that counts multiplications.
  """

  def count(op: tf.Operation, sizes: _SizesOf) -> int:
    # Each output sums over the kernel, except over its output channels.
    summed = sizes(kernel(op))[: -2 if spatial_only else -1]
    return math.prod(sizes(images(op))) * math.prod(summed)

  return count


def _einsum(op: tf.Operation, sizes: _SizesOf) -> int:
  """Counts multiplications of a sum over products of one or two tensors."""
  terms = op.get_attr('equation').decode().split('->')[0].split(',')
  if len(terms) == 1:
    return 0
  ranges: dict[str, int] = {}
  for labels, operand in zip(terms, op.inputs):
    shape = sizes(operand)
    before, dots, after = labels.replace(' ', '').partition('...')
    names = list(before)
    if dots:
      # The dimensions of an ellipsis are numbered from the right.
      num = len(shape) - len(before) - len(after)
      names += [f'.{i}' for i in range(num, 0, -1)] + list(after)
    for name, size in zip(names, shape):
      ranges[name] = max(ranges.get(name, 1), size)
  return math.prod(ranges.values())


_OUTPUT: _TensorOf = lambda op: op.outputs[0]
_SECOND: _TensorOf = lambda op: op.inputs[1]
_THIRD: _TensorOf = lambda op: op.inputs[2]
_MULTIPLICATIONS = {
  'MatMul': _product('transpose_a'),
  'BatchMatMul': _product('adj_x'),
  'BatchMatMulV2': _product('adj_x'),
  'BatchMatMulV3': _product('adj_x'),
  'Einsum': _einsum,
  'DepthwiseConv2dNative': _convolution(_OUTPUT, _SECOND, True),
  'DepthwiseConv2dNativeBackpropInput': _convolution(_THIRD, _SECOND, True),
  'DepthwiseConv2dNativeBackpropFilter': _convolution(_THIRD, _OUTPUT, True),
}
for _kind, _version in (('Conv2D', ''), ('Conv3D', 'V2')):
  _MULTIPLICATIONS |= {
    _kind: _convolution(_OUTPUT, _SECOND),
    f'{_kind}BackpropInput{_version}': _convolution(_THIRD, _SECOND),
    f'{_kind}BackpropFilter{_version}': _convolution(_THIRD, _OUTPUT),
  }
