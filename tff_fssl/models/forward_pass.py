"""Checks of a user's Keras model that need the graph of a forward pass.

They judge layers by the operations in the graph, not by their names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
import re
from typing import Any

from tff_fssl.hparams import UsageError
from tff_fssl.lazy import tf
from tff_fssl.models import checks

_PYTHON = re.compile(r'(Eager)?PyFunc')
_ASSIGNS = re.compile(
  r'Assign\w*VariableOp|Resource(Scatter|Apply|SparseApply|Strided)'
)
# Operations that pass values on, up to their shape and precision.
_TRANSPARENT = (
  'Identity',
  'IdentityN',
  'Reshape',
  'Squeeze',
  'ExpandDims',
  'Cast',
  'StopGradient',
  'PreventGradient',
  'CheckNumerics',
)
_PROBABILITIES = ('Softmax', 'Sigmoid')


def _check_losses(model: tf.keras.Model) -> None:
  """Rejects losses that a forward pass has added."""
  # The innermost layer first, since that is the one to change.
  for layer in reversed(checks.layers(model)):
    # pylint: disable=protected-access
    if layer._losses or layer._eager_losses:
      raise UsageError(
        f'model {model.name!r}: layer {layer.name!r} ({type(layer).__name__})'
        ' adds a loss that depends on its input (activity_regularizer or'
        ' add_loss); only regularizers of weights are supported: remove it'
      )


class _Graph:
  """The nodes of a traced forward pass and of the functions that it calls."""

  def __init__(self, graph: tf.Graph):
    definition = graph.as_graph_def()
    self._nodes = {node.name: node for node in definition.node}
    self._functions = {
      function.signature.name: function
      for function in definition.library.function
    }

  def nodes(self) -> Iterator[Any]:
    """Yields all nodes, including nodes in functions."""
    yield from self._nodes.values()
    for function in self._functions.values():
      yield from function.node_def

  def assigns(self, name: str) -> bool:
    """Tells whether a node, or a function it calls, assigns to variables."""
    return self._assigns(self._nodes[name])

  def _assigns(self, node: Any) -> bool:
    called = [
      function.name
      for attr in node.attr.values()
      for function in (attr.func, *attr.list.func)
      if function.name in self._functions
    ]
    return bool(_ASSIGNS.match(node.op)) or any(
      self._assigns(inner)
      for name in called
      for inner in self._functions[name].node_def
    )

  def origin(self, name: str) -> Any:
    """Finds the node that made a tensor's values, up to shape and precision."""
    return self._origin(name, self._nodes)

  def _origin(self, name: str, nodes: Mapping[str, Any]) -> Any:
    node = nodes.get(name.split(':')[0])
    # A function's argument.
    if node is None:
      return None
    if node.op in _TRANSPARENT:
      return self._origin(node.input[0], nodes) or node
    if node.op in ('PartitionedCall', 'StatefulPartitionedCall'):
      function = self._functions[node.attr['f'].func.name]
      index = int(name.split(':')[-1]) if ':' in name else 0
      result = function.ret[function.signature.output_arg[index].name]
      inner = {n.name: n for n in function.node_def}
      return self._origin(result, inner) or node
    return node


def _layer_of(model: tf.keras.Model, node_name: str) -> str:
  """Names the layer of a node's scope, if it is known."""
  known = {layer.name: layer for layer in checks.layers(model)}
  # The innermost scope comes last.
  for part in reversed(node_name.split('/')):
    if part in known and known[part] is not model:
      return f'layer {part!r} ({type(known[part]).__name__})'
  return 'a layer'


def check(
  model: tf.keras.Model,
  logits_fn: Callable[[tf.Tensor], tf.Tensor],
  image_shape: Sequence[int | None],
  *,
  may_change: Sequence[tf.Variable] = (),
) -> None:
  """Traces a forward pass and checks its graph.

  Args:
    model: The model.
    logits_fn: Images float32 [B, ...] -> the model's outputs.
    image_shape: The shape of an image.
    may_change: The variables to which the pass may assign.

  Raises:
    UsageError: If the pass fails, draws from global random state, calls Python,
      uses variables of others than the model, changes other variables than
      `may_change`, adds losses, or returns probabilities.
  """
  what = f'model {model.name!r}'
  images = tf.TensorSpec([None, *image_shape], tf.float32)
  with checks.explained(model, images):
    traced = tf.function(logits_fn, autograph=False)
    concrete = traced.get_concrete_function(images)
  graph = _Graph(concrete.graph)
  for node in graph.nodes():
    if checks.RANDOM.match(node.op):
      raise UsageError(
        f'{what}: {_layer_of(model, node.name)} draws from global random state'
        f' ({node.op}), so that runs would not repeat; draw with Keras layers'
        ' (Dropout, GaussianNoise, ...) inside it, which are seeded'
      )
    if _PYTHON.match(node.op):
      raise UsageError(
        f'{what}: {_layer_of(model, node.name)} calls Python'
        f' ({node.op}), which cannot be sent to clients; use TensorFlow'
        ' operations'
      )
  _check_variables(model, concrete, graph, may_change)
  _check_losses(model)
  origin = graph.origin(concrete.outputs[0].name)
  if origin is not None and origin.op in _PROBABILITIES:
    raise UsageError(
      f'{what} ends in {_layer_of(model, origin.name)}, which gives'
      f' probabilities ({origin.op.lower()}); {checks.LOGITS}'
    )


def _reads_variables(tensor: tf.Tensor) -> bool:
  """Tells whether a tensor from outside of the pass depends on variables."""
  # Then it is a constant.
  if tf.executing_eagerly():
    return False
  waiting, seen = [tensor.op], set()
  while waiting:
    operation = waiting.pop()
    if operation.type in ('ReadVariableOp', 'VarHandleOp'):
      return True
    if operation not in seen:
      seen.add(operation)
      waiting += [t.op for t in operation.inputs]
  return False


def _check_variables(
  model: tf.keras.Model,
  concrete: Any,
  graph: _Graph,
  may_change: Sequence[tf.Variable],
) -> None:
  """Rejects variables of others than the model, and changes to variables."""
  allowed = {id(v.handle) for v in may_change}
  own = {id(v.handle): v.name.removesuffix(':0') for v in model.variables}
  captured = concrete.captured_inputs
  inner = concrete.inputs[len(concrete.inputs) - len(captured) :]
  handles = {i.name: outer for i, outer in zip(inner, captured)}
  # A weight's value that a layer read while it was built, and will not reread.
  stale = {
    name
    for name, outer in handles.items()
    if outer.dtype != tf.resource and _reads_variables(outer)
  }
  for operation in concrete.graph.get_operations():
    changes = graph.assigns(operation.name)
    for argument in operation.inputs:
      outer = handles.get(argument.name)
      if argument.name in stale:
        raise UsageError(
          f'model {model.name!r}: {_layer_of(model, operation.name)} read a'
          ' weight when it was built, and would not see it change; it must read'
          ' its weights in its call method'
        )
      if outer is None or outer.dtype != tf.resource:
        continue
      where = f'model {model.name!r}: {_layer_of(model, operation.name)}'
      if id(outer) not in own:
        raise UsageError(
          f'{where} uses a variable or table that is not among the weights of'
          ' the model; make it with add_weight as an attribute of a layer'
        )
      if changes and id(outer) not in allowed:
        raise UsageError(
          f'{where} changes {own[id(outer)]!r} in its forward pass; only the'
          ' moving averages of batch normalization may change there, and'
          ' everything else must be stateless'
        )
