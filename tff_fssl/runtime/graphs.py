"""Prepares the TensorFlow graphs of TFF computations for this process.

A `tff.tensorflow.computation` carries a `GraphDef` that was made to be the only
one in its session. Here many graphs share one process, and many clients run the
same graph at a time. Each graph therefore gets names of its own, and each
execution gets resources of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
import dataclasses
import functools
import hashlib
from typing import Any

from tff_fssl.lazy import tf

# The name that TensorFlow treats as 'no name': each execution makes a new
# variable for a handle with this name, and frees it when the execution ends.
_ANONYMOUS_NAME = 'cd2c89b7-88b7-44c8-ad83-06c2a9158347'
# Table -> its variant that belongs to one execution.
_ANONYMOUS_TABLES = {
  'HashTableV2': 'AnonymousHashTable',
  'MutableHashTableV2': 'AnonymousMutableHashTable',
  'MutableHashTableOfTensorsV2': 'AnonymousMutableHashTableOfTensors',
  'MutableDenseHashTableV2': 'AnonymousMutableDenseHashTable',
}
# The prefix of an operation's name where another asks for its device.
_PLACE = 'loc:@'
# Enough to tell graphs apart, and short in messages.
_DIGEST_LENGTH = 12


@dataclasses.dataclass(frozen=True, eq=False)
class Graph:
  """The graph of one TensorFlow computation.

  Attributes:
    graph_def: The graph. Importing it any number of times is safe.
    feeds: The names of the tensors of its parameter, in TFF's order.
    fetches: The names of the tensors of its result, in TFF's order.
    digest: Suffix of the names of its library functions, unique to this graph.
  """

  graph_def: tf.compat.v1.GraphDef
  feeds: tuple[str, ...]
  fetches: tuple[str, ...]
  digest: str

  @functools.cached_property
  def op_types(self) -> frozenset[str]:
    """Returns the types of all its operations, library functions included."""
    return frozenset(node.op for node in _nodes(self.graph_def))


def load_graph(proto: Any) -> Graph:
  """Prepares the graph of a TFF computation for import.

  Args:
    proto: The `pb.Computation` of a compiled computation.

  Returns:
    The graph. Its library functions have names of their own, its variables and
    tables are private to each execution, and each execution includes its
    initialisation.

  Raises:
    NotImplementedError: If the computation is not a TensorFlow computation, or
      has queues or other resources that cannot be private.
  """
  kind = proto.WhichOneof('computation')
  if kind != 'tensorflow':
    raise NotImplementedError(
      f'This runtime runs TensorFlow computations; found one of kind {kind!r}'
      ' (`tff.jax.computation` makes `xla` ones).'
    )
  # Deterministic, so that the same graph has the same digest everywhere.
  serialized = proto.SerializeToString(deterministic=True)
  digest = hashlib.sha256(serialized).hexdigest()[:_DIGEST_LENGTH]
  tensorflow = proto.tensorflow
  graph_def = tf.compat.v1.GraphDef()
  tensorflow.graph_def.Unpack(graph_def)
  _rename_functions(graph_def, digest)
  _make_resources_private(graph_def)
  if tensorflow.initialize_op:
    _run_after_initialization(graph_def, tensorflow.initialize_op)
  if tensorflow.session_token_tensor_name:
    _feed_constant(graph_def, tensorflow.session_token_tensor_name)
  feeds: tuple[str, ...] = ()
  if tensorflow.HasField('parameter'):
    feeds = tuple(_tensor_names(tensorflow.parameter))
  _wait_for_values(graph_def, feeds)
  fetches = tuple(_tensor_names(tensorflow.result))
  return Graph(graph_def, feeds, fetches, digest)


def _tensor_names(binding: Any) -> Iterator[str]:
  """Returns the tensors of a `pb.TensorFlow.Binding`, depth first."""
  kind = binding.WhichOneof('binding')
  if kind == 'tensor':
    yield binding.tensor.tensor_name
  elif kind == 'sequence':
    yield binding.sequence.variant_tensor_name
  elif kind == 'struct':
    for element in binding.struct.element:
      yield from _tensor_names(element)
  else:
    raise NotImplementedError(f'Unknown kind of tensor binding: {kind!r}.')


def _nodes(graph_def: tf.compat.v1.GraphDef) -> Iterator[Any]:
  """Returns all nodes of a graph and of its library functions."""
  yield from graph_def.node
  for function in graph_def.library.function:
    yield from function.node_def


def _rename_functions(graph_def: tf.compat.v1.GraphDef, digest: str) -> None:
  """Gives the library functions names that no other graph uses.

  A process has one function library. TensorFlow refuses a second function with
  the same name and another body.
  """
  library = graph_def.library
  names = {
    function.signature.name: f'{function.signature.name}_{digest}'
    for function in library.function
  }
  if not names:
    return
  for function in library.function:
    function.signature.name = names[function.signature.name]
  for gradient in library.gradient:
    gradient.function_name = names.get(
      gradient.function_name, gradient.function_name
    )
    gradient.gradient_func = names.get(
      gradient.gradient_func, gradient.gradient_func
    )
  for node in _nodes(graph_def):
    node.op = names.get(node.op, node.op)
    for attr in node.attr.values():
      if attr.HasField('func'):
        attr.func.name = names.get(attr.func.name, attr.func.name)
      for function in attr.list.func if attr.HasField('list') else ():
        function.name = names.get(function.name, function.name)


def _make_resources_private(graph_def: tf.compat.v1.GraphDef) -> None:
  """Gives each execution variables and tables of its own.

  Resources with names would be shared by all clients that run the graph at the
  same time on one device (measured: 57 of 64 results were wrong).
  """
  for node in _nodes(graph_def):
    if node.op == 'VarHandleOp':
      node.attr['shared_name'].s = _ANONYMOUS_NAME.encode()
      # Containers would be shared by name as well.
      node.attr['container'].s = b''
    elif node.op in _ANONYMOUS_TABLES:
      node.op = _ANONYMOUS_TABLES[node.op]
      for name in ('container', 'shared_name', 'use_node_name_sharing'):
        if name in node.attr:
          del node.attr[name]
    elif 'shared_name' in node.attr:
      raise NotImplementedError(
        f'This runtime does not support operations {node.op}: all clients and'
        ' rounds would share their state.'
      )


def find_ancestors(
  graph_def: tf.compat.v1.GraphDef, tensors: Iterable[str]
) -> set[str]:
  """Names the nodes that tensors or nodes depend on, their own included."""
  inputs = {
    node.name: [_node_name(name) for name in node.input]
    for node in graph_def.node
  }
  pending = [_node_name(name) for name in tensors]
  ancestors = set(pending)
  while pending:
    for name in inputs[pending.pop()]:
      if name not in ancestors:
        ancestors.add(name)
        pending.append(name)
  return ancestors


def keep_needed(
  graph_def: tf.compat.v1.GraphDef,
  feeds: Iterable[str],
  fetches: Iterable[str],
) -> None:
  """Removes the nodes that `fetches` do not need, and the nodes of `feeds`.

  Args:
    graph_def: The graph, which is changed in place.
    feeds: The names of the tensors that replace nodes.
    fetches: The names of the wanted tensors.
  """
  needed = find_ancestors(graph_def, fetches) - set(map(_node_name, feeds))
  kept = [node for node in graph_def.node if node.name in needed]
  for node in kept:
    # An operation may want to be where another one is, but need not be.
    places = node.attr['_class'].list.s if '_class' in node.attr else ()
    if any(p.decode().removeprefix(_PLACE) not in needed for p in places):
      del node.attr['_class']
  del graph_def.node[:]
  graph_def.node.extend(kept)


def _run_after_initialization(
  graph_def: tf.compat.v1.GraphDef, initialize_op: str
) -> None:
  """Makes nodes that use initialised resources run after the initialisation.

  Other nodes get no such edge: an edge to every node would break control flow
  frames.
  """
  initialize_op = _node_name(initialize_op)
  ancestors = find_ancestors(graph_def, [initialize_op])
  for node in graph_def.node:
    # The initialisation itself must not wait for its own end.
    if node.name not in ancestors and any(
      _node_name(name) in ancestors for name in node.input
    ):
      node.input.append(f'^{initialize_op}')


def _wait_for_values(
  graph_def: tf.compat.v1.GraphDef, feeds: Iterable[str]
) -> None:
  """Makes nodes that wait for a placeholder wait for the value in its place.

  An import replaces tensors, but not the nodes for which others only wait.
  """
  waiting: dict[str, list[tuple[Any, int]]] = {}
  for node in graph_def.node:
    for index, name in enumerate(node.input):
      if name.startswith('^'):
        waiting.setdefault(_node_name(name), []).append((node, index))
  nodes = {node.name: node for node in graph_def.node}
  for feed in feeds:
    if (name := _node_name(feed)) not in waiting:
      continue
    value = f'{name}/value'
    while value in nodes:
      value += '_'
    for node, index in waiting[name]:
      node.input[index] = f'^{value}'
    read = graph_def.node.add(name=value, op='Identity', input=[feed])
    read.attr['T'].type = nodes[name].attr['dtype'].type


def _node_name(tensor_name: str) -> str:
  return tensor_name.removeprefix('^').split(':')[0]


def _feed_constant(graph_def: tf.compat.v1.GraphDef, tensor_name: str) -> None:
  """Turns a placeholder of a string into a constant.

  TFF's own runtime names its session there. Nothing here depends on it.
  """
  for node in graph_def.node:
    if node.name == _node_name(tensor_name):
      node.op = 'Const'
      node.attr.clear()
      node.attr['dtype'].type = tf.string.as_datatype_enum
      node.attr['value'].tensor.CopyFrom(tf.make_tensor_proto('in_process'))
