"""Counts the floating-point operations (FLOPs) of a traced function.

Counted are matrix products and convolutions, 2 for each multiplication with
addition: nearly all that a network computes. Operations whose results nobody
uses are left out, as TensorFlow leaves them out when it runs the function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
import dataclasses
import math
from typing import TypeAlias

from tff_fssl.lazy import tf


class UnknownFlopsError(ValueError):
  """The FLOPs depend on what is only known when the function runs."""


@dataclasses.dataclass(frozen=True)
class Flops:
  """FLOPs, which may depend on the branches that are taken.

  Attributes:
    least: If the cheapest branches are taken, >= 0.
    most: If the most expensive ones are taken, >= `least`.
  """

  least: float = 0.0
  most: float = 0.0

  def __add__(self, other: Flops) -> Flops:
    return Flops(self.least + other.least, self.most + other.most)

  def __sub__(self, other: Flops) -> Flops:
    return Flops(self.least - other.least, self.most - other.most)

  def __mul__(self, factor: float) -> Flops:
    return Flops(factor * self.least, factor * self.most)


def of_graph(
  graph: tf.Graph,
  outputs: Iterable[tf.Tensor] | None = None,
  *,
  per_example: bool = False,
) -> Flops:
  """The FLOPs of a function's graph.

  Args:
    graph: The graph of a concrete function.
    outputs: Tensors of the graph: only what they need is counted. None: what
      the function returns, and its side effects.
    per_example: Whether dimensions that are not known count as 1, and the body
      of a loop once. If each loop passes over the same examples, batch by
      batch, the result is that for one example.

  Returns:
    The FLOPs.

  Raises:
    UnknownFlopsError: If the shape of an operand is not known, or a loop
      contains operations that count; not with `per_example`.
  """
  roots = [t.op for t in outputs or ()]
  if outputs is None:
    roots = [t.op for t in graph.outputs] + list(graph.control_outputs)
  total = Flops()
  for op in _needed(roots):
    total += _of_operation(op, per_example)
  return total


def _needed(roots: Sequence[tf.Operation]) -> Iterable[tf.Operation]:
  """The operations that are given, and all on which they depend."""
  seen = {id(op): op for op in roots}
  waiting = list(seen.values())
  while waiting:
    op = waiting.pop()
    for other in (*(t.op for t in op.inputs), *op.control_inputs):
      if id(other) not in seen:
        seen[id(other)] = other
        waiting.append(other)
  return seen.values()


def _of_operation(op: tf.Operation, per_example: bool) -> Flops:
  """The FLOPs of one operation, and of the functions that it calls."""

  def of_function(attribute: str) -> Flops:
    return _of_function(op.graph, op.get_attr(attribute).name, per_example)

  if op.type in ('PartitionedCall', 'StatefulPartitionedCall'):
    return of_function('f')
  if op.type in ('If', 'StatelessIf'):
    return _either([of_function('then_branch'), of_function('else_branch')])
  if op.type in ('Case', 'StatelessCase'):
    return _either(
      [
        _of_function(op.graph, branch.name, per_example)
        for branch in op.get_attr('branches')
      ]
    )
  if op.type in ('While', 'StatelessWhile'):
    once = of_function('cond') + of_function('body')
    if once.most and not per_example:
      raise UnknownFlopsError(f'{op.name}: how often it repeats is not known')
    return once
  if op.type not in _MULTIPLICATIONS:
    return Flops()
  flops = 2.0 * _MULTIPLICATIONS[op.type](op, _Sizes(op, per_example))
  return Flops(flops, flops)


def _of_function(graph: tf.Graph, name: str, per_example: bool) -> Flops:
  """The FLOPs of a function in a graph's library."""
  function = graph._get_function(name)  # pylint: disable=protected-access
  return of_graph(function.graph, per_example=per_example)


def _either(branches: Sequence[Flops]) -> Flops:
  """The FLOPs of one of several branches."""
  return Flops(min(b.least for b in branches), max(b.most for b in branches))


class _Sizes:
  """The dimensions of an operation's tensors."""

  def __init__(self, op: tf.Operation, per_example: bool):
    self._op, self._per_example = op, per_example

  def of(self, tensor: tf.Tensor) -> list[int]:
    """The dimensions of a tensor."""
    if tensor.shape.rank is None:
      raise self._unknown()
    return [self._known(size) for size in tensor.shape.as_list()]

  def _known(self, size: int | None) -> int:
    if size is None and not self._per_example:
      raise self._unknown()
    return 1 if size is None else size

  def _unknown(self) -> UnknownFlopsError:
    return UnknownFlopsError(f'{self._op.name}: a shape is not known')


def _product(transposed: str) -> Callable[[tf.Operation, _Sizes], int]:
  """Multiplications of a (batched) matrix product."""

  def count(op: tf.Operation, sizes: _Sizes) -> int:
    inner = sizes.of(op.inputs[0])[-2 if op.get_attr(transposed) else -1]
    return math.prod(sizes.of(op.outputs[0])) * inner

  return count


# An operation -> one of its tensors.
_TensorOf: TypeAlias = 'Callable[[tf.Operation], tf.Tensor]'


def _convolution(
  images: _TensorOf,
  kernel: _TensorOf,
  spatial_only: bool = False,
) -> Callable[[tf.Operation, _Sizes], int]:
  """Multiplications of a convolution or of one of its gradients.

  Args:
    images: The tensor that has the shape of the convolution's output.
    kernel: The tensor that has the shape of its kernel: [..., in, out].
    spatial_only: Whether each output depends on one input channel (depthwise).

  Returns:
    The function that counts.
  """

  def count(op: tf.Operation, sizes: _Sizes) -> int:
    of_kernel = sizes.of(kernel(op))[: -2 if spatial_only else -1]
    return math.prod(sizes.of(images(op))) * math.prod(of_kernel)

  return count


def _einsum(op: tf.Operation, sizes: _Sizes) -> int:
  """Multiplications of a sum over products of one or two tensors."""
  terms = op.get_attr('equation').decode().split('->')[0].split(',')
  if len(terms) == 1:
    return 0
  ranges: dict[str, int] = {}
  for labels, operand in zip(terms, op.inputs):
    of_operand = sizes.of(operand)
    before, dots, after = labels.replace(' ', '').partition('...')
    names = list(before)
    if dots:
      # The dimensions of an ellipsis are numbered from the right.
      num = len(of_operand) - len(before) - len(after)
      names += [f'.{i}' for i in range(num, 0, -1)] + list(after)
    for name, size in zip(names, of_operand):
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
