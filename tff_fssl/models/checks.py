"""Checks of a user's Keras model, which report failures in one clear line.

Layers, variables and initial weights are checked first. `check_forward_pass`
then judges layers by the operations in the graph, not by their names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import contextlib
import re
import traceback
from typing import Any, NamedTuple, TypeAlias

from tff_fssl.data import augment
from tff_fssl.hparams import UsageError
from tff_fssl.lazy import np, tf

ModelFn: TypeAlias = 'Callable[[], tf.keras.Model]'

# TensorFlow's operations whose results depend on hidden state.
_RANDOM = re.compile(
  r'Random(?!GammaGrad|IndexShuffle)|TruncatedNormal$|Multinomial$'
  r'|ParameterizedTruncatedNormal$|Stateful(?!PartitionedCall)|Rng'
  r'|NonDeterministicInts|Fractional(Max|Avg)Pool$|SampleDistortedBoundingBox'
  r'|Anonymous\w*SeedGenerator|\w*CandidateSampler'
)
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
_LOGITS = (
  'a model must give logits: remove the last activation (in'
  ' keras.applications: classifier_activation=None)'
)


def layers(model: tf.keras.Model) -> list[tf.keras.layers.Layer]:
  """Lists the model and all layers in it, at any depth."""
  return list(model._flatten_layers())  # pylint: disable=protected-access


def own_weights(layer: tf.keras.layers.Layer) -> list[tf.keras.Variable]:
  """Lists a layer's own weights, without those of its inner layers."""
  # pylint: disable-next=protected-access
  return [*layer._trainable_variables, *layer._non_trainable_variables]


def _cause(error: Exception) -> str:
  """Finds the line of a Keras error that names the cause."""
  lines = [line.strip() for line in str(error).splitlines() if line.strip()]
  # A `tf.function`'s message lists the calls first, then the error.
  named = [line for line in lines if re.match(r'\w*(Error|Exit): *\w', line)]
  line = (named or lines or [''])[0]
  prefix = '' if named else f'{type(error).__name__}: '
  return f'{prefix}{line}'[:300]


@contextlib.contextmanager
def _plain_errors() -> Iterator[None]:
  """Enters a context in which Keras leaves errors as they are."""
  config = tf.keras.config
  filters = config.is_traceback_filtering_enabled()
  config.disable_traceback_filtering()
  try:
    yield
  finally:
    if filters:
      config.enable_traceback_filtering()


def call_model_fn(model_fn: Callable[[], Any]) -> tf.keras.Model:
  """Calls `model_fn`.

  Raises:
    UsageError: If it is a model, raises, or does not return a Keras model.
  """
  if isinstance(model_fn, tf.keras.Model):
    raise UsageError(
      f'model_fn is a model ({model_fn.name!r}); give a function that builds'
      ' and returns one (to start from its weights, use'
      ' process.set_model_weights)'
    )
  try:
    with _plain_errors():
      model = model_fn()
  except UsageError:
    raise
  except Exception as e:
    raise UsageError(f'model_fn raised {_cause(e)}') from e
  if not isinstance(model, tf.keras.Model):
    kind = model if isinstance(model, type) else type(model)
    what = repr(model) if kind is model else kind.__name__
    if kind.__module__.startswith('tf_keras.'):
      what += ' of tf_keras (Keras 2)'
    raise UsageError(
      f'model_fn returned {what if model is not None else None}; it must build'
      ' and return a keras.Model (of Keras 3)'
    )
  # Keras names a model after its class, and TensorFlow has no scope '__net'.
  model.name = model.name.lstrip('_') or 'model'
  return model


def check_is_new(
  model: tf.keras.Model, created: Sequence[tf.keras.Variable]
) -> None:
  """Rejects variables that were not made by this call of `model_fn`.

  Args:
    model: The model.
    created: The variables that this call made.

  Raises:
    UsageError: If the model has other variables.
  """
  ours = {id(v) for v in created}
  for layer in reversed(layers(model)):
    for variable in own_weights(layer):
      if id(variable) not in ours:
        raise UsageError(
          f'model {model.name!r}: layer {layer.name!r} is older than this'
          ' call of model_fn; each call of model_fn must build a new model'
          ' (to start from your own weights, use process.set_model_weights)'
        )


@contextlib.contextmanager
def _explained(model: tf.keras.Model, images: Any) -> Iterator[None]:
  """Turns errors in a call of `model` on `images` into one-line errors."""
  try:
    with _plain_errors():
      yield
  except Exception as e:
    reason: BaseException | None = e
    # TensorFlow wraps our errors in its own.
    while reason is not None:
      if isinstance(reason, UsageError):
        raise reason from None
      reason = reason.__context__
    # The innermost layer whose code was running names the place.
    owners = [
      frame.f_locals.get('self')
      for frame, _ in traceback.walk_tb(e.__traceback__)
    ]
    found = [x for x in owners if isinstance(x, tf.keras.layers.Layer)]
    inner = found[-1] if found and found[-1] is not model else None
    raise UsageError(
      f'model {model.name!r} cannot be called on images float32'
      f' {_dims(images.shape)}: '
      + (f'layer {inner.name!r} ({type(inner).__name__}): ' if inner else '')
      + _cause(e)
    ) from e


def _dims(shape: Any) -> str:
  return f'[{", ".join("B" if d is None else str(d) for d in shape)}]'


def inputs_of(model: tf.keras.Model) -> list[Any]:
  """Lists a functional or built sequential model's inputs, else nothing."""
  return list(getattr(model, 'inputs', None) or [])


class Symbolic(NamedTuple):
  """A model's symbolic call.

  Attributes:
    image_shape: (height, width, channels), None where unknown.
    output: The output of the model.
  """

  image_shape: Sequence[int | None]
  output: Any


def build(
  model: tf.keras.Model, image_shape: Sequence[int | None] | None
) -> Symbolic:
  """Builds a model, unless it is built already.

  Args:
    model: The model.
    image_shape: (height, width, channels) of its images, if known.

  Returns:
    Its symbolic call.

  Raises:
    UsageError: If the model does not take images of that shape as its only
      input.
  """
  inputs = inputs_of(model)
  if not inputs:
    if image_shape is None and isinstance(model, tf.keras.Sequential):
      # The first layer may be a model that has an input shape.
      image_shape = next(
        (i.shape[1:] for x in model.layers[:1] for i in inputs_of(x)), None
      )
    if image_shape is None:
      raise UsageError(
        f'model {model.name!r} is not built, and the shape of the images is not'
        ' known here; build it in model_fn (call it on a batch)'
      )
    images = tf.keras.Input(image_shape)
    with _explained(model, images):
      return Symbolic(image_shape, model(images))
  if len(inputs) > 1:
    raise UsageError(
      f'model {model.name!r} has {len(inputs)} inputs; it must have one, the'
      ' images'
    )
  own_shape = inputs[0].shape[1:]
  if inputs[0].shape[0] is not None or 'float' not in inputs[0].dtype:
    raise UsageError(
      f'model {model.name!r} takes images {inputs[0].dtype}'
      f' {_dims(inputs[0].shape)}; it must take float32 images, in batches of'
      ' any size'
    )
  if image_shape is None:
    image_shape = own_shape
  elif not tf.TensorShape(own_shape).is_compatible_with(image_shape):
    raise UsageError(
      f'model {model.name!r} takes images of shape {tuple(own_shape)}; the'
      f' views give {tuple(image_shape)}'
    )
  outputs = model.outputs
  return Symbolic(image_shape, outputs[0] if len(outputs) == 1 else outputs)


def check_output(
  model: tf.keras.Model, output: Any, num_classes: int | None
) -> int:
  """Rejects outputs other than logits [B, `num_classes`].

  Args:
    model: The model.
    output: Its symbolic output.
    num_classes: The number of classes of the data. None skips the check.

  Returns:
    The width of the output.

  Raises:
    UsageError: If the output is not logits of these classes.
  """
  expected = f'[B, {"classes" if num_classes is None else num_classes}]'
  if not hasattr(output, 'shape'):
    what = type(output).__name__
    if isinstance(output, Iterable):
      what += f' of {len(tf.nest.flatten(output))}'
    raise UsageError(
      f'model {model.name!r} gives {what if output is not None else None}; it'
      f' must give one tensor, logits {expected}'
    )
  shape, dtype = tf.TensorShape(output.shape), tf.as_dtype(output.dtype)
  if shape.rank != 2 or shape[1] is None or not dtype.is_floating:
    raise UsageError(
      f'model {model.name!r} gives {dtype.name} '
      f'{_dims(shape) if shape.rank is not None else "of any rank"}; it must'
      f' give logits, float32 {expected}'
    )
  if num_classes is not None and shape[1] != num_classes:
    raise UsageError(
      f'model {model.name!r} has output shape {tuple(shape)}; a data set of'
      f' {num_classes} classes needs (None, {num_classes})'
    )
  return int(shape[1])


def check_layers(model: tf.keras.Model, compute_dtype: str) -> None:
  """Rejects variables and layers that local training cannot handle.

  Args:
    model: The model, built.
    compute_dtype: The type in which the layers should compute.

  Raises:
    UsageError: If nothing is trainable, a trainable weight is not float32 or
      has a constraint, no layer computes in `compute_dtype`, a layer computes
      in float16, or a batch normalization uses other moments than the batch's.
  """
  what = f'model {model.name!r}'
  if not model.trainable_weights:
    raise UsageError(f'{what} has no trainable weights')
  for variable in model.trainable_weights:
    if variable.dtype != 'float32':
      raise UsageError(
        f'{what}: weight {variable.path!r} is {variable.dtype}; trainable'
        ' weights must be float32 (to compute in less, set'
        ' compute_dtype=bfloat16)'
      )
    if variable.constraint is not None:
      raise UsageError(
        f'{what}: weight {variable.path!r} has a constraint, which neither'
        ' local training nor a mean over clients keeps; remove it'
      )
  dtypes = {
    layer.compute_dtype
    for layer in layers(model)
    if layer.weights and not isinstance(layer, tf.keras.Model)
  }
  if compute_dtype != 'float32' and dtypes and compute_dtype not in dtypes:
    raise UsageError(
      f'compute_dtype={compute_dtype}: no layer of {what} computes in it; make'
      ' the layers inside model_fn, without a dtype'
    )
  for layer in layers(model):
    where = f'{what}: layer {layer.name!r} ({type(layer).__name__})'
    if layer.compute_dtype == 'float16' and layer.weights:
      raise UsageError(
        f'{where} computes in float16, in which small gradients become 0; use'
        ' compute_dtype=bfloat16 without a policy of your own'
      )
    if getattr(layer, 'renorm', False):
      raise UsageError(
        f'{where} has renorm, which static batch norm does not support; remove'
        ' it'
      )


def check_scale(
  model: tf.keras.Model, views: augment.Views, stored: tf.TensorSpec
) -> None:
  """Rejects a model that scales pixels which the views have scaled already.

  Args:
    model: The model.
    views: The preprocessing. Only `plain` is used.
    stored: The spec of a batch of stored examples, [None, ...].

  Raises:
    UsageError: If a layer `Rescaling` would make all images almost equal.
  """
  for layer in layers(model):
    if stored.dtype != tf.uint8 or not isinstance(
      layer, tf.keras.layers.Rescaling
    ):
      continue
    white = views.plain(tf.fill([1, *stored.shape[1:]], tf.uint8.max))
    largest = float(tf.reduce_max(tf.abs(white)))
    if largest * np.max(np.abs(layer.scale)) < 0.1:
      raise UsageError(
        f'model {model.name!r}: layer {layer.name!r} (Rescaling) expects pixels'
        f' up to 255, but the views give values up to {largest:.2g}; remove'
        ' the layer (or build views with mean=(0,) and std=(1/255,))'
      )


def check_initial_weights(model: tf.keras.Model, symbolic: Symbolic) -> None:
  """Rejects unseeded initial weights, and outputs that are probabilities.

  Args:
    model: The model.
    symbolic: Its symbolic call.

  Raises:
    UsageError: If initial weights come from global random state, or the outputs
      at these weights are probabilities, by whatever operations.
  """
  # Inside a function, or without a size of images, nothing can be computed.
  if tf.inside_function() or None in symbolic.image_shape:
    return
  shape = (4, *(d or 0 for d in symbolic.image_shape))
  # Not negative, since a text's model takes them for numbers of words.
  images = np.abs(np.random.default_rng(0).normal(size=shape))
  if tf.executing_eagerly():
    rows = np.asarray(model(tf.constant(images, tf.float32), training=False))
  else:
    for variable in model.weights:
      _check_initial_value(model, variable)
    rows = model(tf.constant(images, tf.float32), training=False)
    # On the CPU: a session would claim all memory of the process's GPU.
    config = tf.compat.v1.ConfigProto(device_count={'GPU': 0})
    with tf.compat.v1.Session(config=config) as session:
      session.run([v.value.initializer for v in model.variables])
      rows = session.run(rows)
  rows = rows.astype(np.float32)
  if np.all(rows >= 0) and np.allclose(rows.sum(axis=-1), 1.0, atol=1e-3):
    raise UsageError(
      f'model {model.name!r} gives probabilities: its outputs are not'
      f' negative and sum to 1; {_LOGITS}'
    )


def _ancestors(operation: tf.Operation) -> Iterator[tf.Operation]:
  """Yields an operation and all operations on which its inputs depend."""
  waiting, seen = [operation], set()
  while waiting:
    operation = waiting.pop()
    if operation not in seen:
      seen.add(operation)
      yield operation
      waiting += [t.op for t in operation.inputs]


def _check_initial_value(
  model: tf.keras.Model, variable: tf.keras.Variable
) -> None:
  """Rejects an initial value from global random state."""
  for operation in _ancestors(variable.value.initializer):
    if _RANDOM.match(operation.type):
      raise UsageError(
        f'model {model.name!r}: the initial value of'
        f' {variable.path!r} is drawn from global random'
        f' state ({operation.type}), so that runs would not repeat; make the'
        ' variable with add_weight and an initializer of Keras'
      )


def head(model: tf.keras.Model) -> tf.keras.layers.Layer:
  """Finds the last layer of a model, which makes logits of features [B, D].

  Args:
    model: The model.

  Returns:
    The layer.

  Raises:
    UsageError: If the model has no such layer.
  """
  last = model.layers[-1] if inputs_of(model) else None
  if last is None or not last.weights or len(last.input.shape) != 2:
    raise UsageError(
      f'model {model.name!r}: this algorithm separates features from logits;'
      ' it needs a functional or sequential model whose last layer, with'
      ' weights, makes logits of features [B, D], such as Dense(num_classes)'
    )
  return last


def _check_losses(model: tf.keras.Model) -> None:
  """Rejects losses that a forward pass has added."""
  # The innermost layer first, since that is the one to change.
  for layer in reversed(layers(model)):
    if layer._losses:  # pylint: disable=protected-access
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
  known = {layer.name: layer for layer in layers(model)}
  # The innermost scope comes last. Keras enters each twice, so that TensorFlow
  # numbers it.
  for part in reversed(node_name.split('/')):
    for name in (re.sub(r'_\d+$', '', part), part):
      if name in known and known[name] is not model:
        return f'layer {name!r} ({type(known[name]).__name__})'
  return 'a layer'


def check_forward_pass(
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
  with _explained(model, images):
    traced = tf.function(logits_fn, autograph=False)
    concrete = traced.get_concrete_function(images)
  graph = _Graph(concrete.graph)
  for node in graph.nodes():
    if _RANDOM.match(node.op):
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
      f' probabilities ({origin.op.lower()}); {_LOGITS}'
    )


def _reads_variables(tensor: tf.Tensor) -> bool:
  """Tells whether a tensor from outside of the pass depends on variables."""
  # Then it is a constant.
  if tf.executing_eagerly():
    return False
  reads = ('ReadVariableOp', 'VarHandleOp')
  return any(op.type in reads for op in _ancestors(tensor.op))


def _check_variables(
  model: tf.keras.Model,
  concrete: Any,
  graph: _Graph,
  may_change: Sequence[tf.Variable],
) -> None:
  """Rejects variables of others than the model, and changes to variables."""
  allowed = {id(v.handle) for v in may_change}
  own = {id(v.value.handle): v.path for v in model.variables}
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
