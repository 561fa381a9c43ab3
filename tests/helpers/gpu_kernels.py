"""Operations that a GPU would send to the host, told without a GPU.

TensorFlow's wheel for CUDA knows which operations have a kernel on GPUs, and
for which types.
"""

from collections.abc import Iterable, Iterator

import tensorflow as tf
from tensorflow.python.framework import kernels

_LOOPS = ('While', 'StatelessWhile')


def are_known() -> bool:
  """Tells whether this TensorFlow was built for GPUs."""
  found = kernels.get_registered_kernels_for_op('MatMul').kernel
  return any(kernel.device_type == 'GPU' for kernel in found)


def missing(
  graph: tf.compat.v1.GraphDef, *, in_loops: bool = True
) -> set[tuple[str, ...]]:
  """Finds operations without a kernel on GPUs.

  Args:
    graph: The graph.
    in_loops: Whether to look only at loops, and what they call.

  Returns:
    (operation, its types) of each.
  """
  functions = {f.signature.name: f for f in graph.library.function}
  found, seen = set(), set()

  def walk(nodes: Iterable[tf.compat.v1.NodeDef], counts: bool) -> None:
    for node in nodes:
      calls = [name for name in _called(node) if name in functions]
      inside = counts or node.op in _LOOPS
      for name in calls:
        if (name, inside) not in seen:
          seen.add((name, inside))
          walk(functions[name].node_def, inside)
      if counts and not calls and not _runs_on_gpus(node):
        found.add((node.op, *_types(node)))

  walk(graph.node, not in_loops)
  return found


def _called(node: tf.compat.v1.NodeDef) -> Iterator[str]:
  yield node.op
  for value in node.attr.values():
    yield value.func.name
    for function in value.list.func:
      yield function.name


def _types(node: tf.compat.v1.NodeDef) -> list[str]:
  return [
    tf.dtypes.as_dtype(value.type).name
    for _, value in sorted(node.attr.items())
    if value.type
  ]


def _runs_on_gpus(node: tf.compat.v1.NodeDef) -> bool:
  for kernel in kernels.get_registered_kernels_for_op(node.op).kernel:
    if kernel.device_type not in ('GPU', 'DEFAULT'):
      continue
    if all(
      {node.attr[c.name].type, *node.attr[c.name].list.type}
      <= {0, *c.allowed_values.list.type}
      for c in kernel.constraint
    ):
      return True
  return False
