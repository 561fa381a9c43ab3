"""Checks of a user's Keras model, which report failures in one clear line.

This module checks layers, variables and initial weights. `forward_pass.py`
checks forward passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
import contextlib
import re
import traceback
from typing import Any, NamedTuple, TypeAlias
import warnings

from tff_fssl.hparams import UsageError
from tff_fssl.lazy import np, tf
from tff_fssl.models import batch_norm

ModelFn: TypeAlias = 'Callable[[], tf.keras.Model]'

# TensorFlow's operations whose results depend on hidden state.
RANDOM = re.compile(
  r'Random(?!GammaGrad|IndexShuffle)|TruncatedNormal$|Multinomial$'
  r'|ParameterizedTruncatedNormal$|Stateful(?!PartitionedCall)|Rng'
  r'|NonDeterministicInts|Fractional(Max|Avg)Pool$|SampleDistortedBoundingBox'
  r'|Anonymous\w*SeedGenerator|\w*CandidateSampler'
)
LOGITS = (
  'a model must give logits: remove the last activation (in'
  ' keras.applications: classifier_activation=None)'
)


def layers(model: tf.keras.Model) -> list[tf.keras.layers.Layer]:
  """Lists the model and all layers in it, at any depth."""
  return list(model._flatten_layers())  # pylint: disable=protected-access


def _cause(error: Exception) -> str:
  """Finds the line of a Keras error that names the cause."""
  preamble = r'Exception encountered when calling layer .*? \(type \w+\)\.'
  text = re.sub(f'{preamble}|in user code:', '', str(error))
  lines = [line.strip() for line in text.splitlines() if line.strip()]
  # AutoGraph's message lists the calls first, then the error.
  named = [line for line in lines if re.match(r'\w*(Error|Exit): *\w', line)]
  line = (named or lines or [''])[0]
  prefix = '' if named else f'{type(error).__name__}: '
  return f'{prefix}{line}'[:300]


@contextlib.contextmanager
def _inference_phase() -> Iterator[None]:
  """Has Keras build layers for inference alone.

  In a graph it would otherwise build both branches of each layer that asks for
  the phase, and drop them: only later calls compute anything.
  """
  with contextlib.ExitStack() as stack:
    with warnings.catch_warnings():  # Keras calls the function deprecated.
      warnings.simplefilter('ignore')
      stack.enter_context(tf.keras.backend.learning_phase_scope(0))
    yield


def call_model_fn(model_fn: Callable[[], Any]) -> tf.keras.Model:
  """Calls `model_fn`.

  Raises:
    UsageError: If it raises, or does not return a Keras model.
  """
  try:
    with _inference_phase():
      model = model_fn()
  except UsageError:
    raise
  except Exception as e:
    raise UsageError(f'model_fn raised {_cause(e)}') from e
  if not isinstance(model, tf.keras.Model):
    what = repr(model) if isinstance(model, type) else type(model).__name__
    raise UsageError(
      f'model_fn returned {what if model is not None else None}; it must build'
      ' and return a tf.keras.Model'
    )
  return model


def check_is_new(model: tf.keras.Model, created: Sequence[tf.Variable]) -> None:
  """Rejects variables that were not made by this call of `model_fn`.

  Args:
    model: The model.
    created: The variables that this call made.

  Raises:
    UsageError: If the model has other variables.
  """
  # By handle, since Keras may wrap a variable (mixed precision).
  ours = {id(v.handle) for v in created}
  for layer in reversed(layers(model)):
    # Layers that are not built yet have no `weights`.
    # pylint: disable-next=protected-access
    for variable in layer._trainable_weights + layer._non_trainable_weights:
      if id(variable.handle) not in ours:
        raise UsageError(
          f'model {model.name!r}: layer {layer.name!r} is older than this'
          ' call of model_fn; each call of model_fn must build a new model'
          ' (to start from your own weights, use process.set_model_weights)'
        )


@contextlib.contextmanager
def explained(model: tf.keras.Model, images: Any) -> Iterator[None]:
  """Turns errors in a call of `model` on `images` into one-line errors."""
  try:
    yield
  except Exception as e:
    reason: BaseException | None = e
    # AutoGraph wraps our errors in its own.
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
      f'model {model.name!r} cannot be called on images {images.dtype.name}'
      f' {_dims(images.shape)}: '
      + (f'layer {inner.name!r} ({type(inner).__name__}): ' if inner else '')
      + _cause(e)
    ) from e


def _dims(shape: Any) -> str:
  return f'[{", ".join("B" if d is None else str(d) for d in shape)}]'


def _inputs(layer: tf.keras.layers.Layer) -> list[Any]:
  """Lists the symbolic inputs of a layer that is a model, else nothing."""
  return list(tf.nest.flatten(getattr(layer, 'inputs', None) or []))


class Symbolic(NamedTuple):
  """A model's symbolic call.

  Attributes:
    image_shape: (height, width, channels), None where unknown.
    images: The input.
    output: The output of the model.
  """

  image_shape: Sequence[int | None]
  images: Any
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
  inputs = _inputs(model)
  if not model._is_graph_network:  # pylint: disable=protected-access
    if image_shape is None and isinstance(model, tf.keras.Sequential):
      # The first layer may be a model that has an input shape.
      image_shape = next(
        (i.shape[1:].as_list() for x in model.layers[:1] for i in _inputs(x)),
        None,
      )
    if image_shape is None:
      raise UsageError(
        f'model {model.name!r} is not built, and the shape of the images is not'
        ' known here; build it in model_fn (call it on a batch)'
      )
    images = tf.keras.Input(image_shape)
    with explained(model, images):
      return Symbolic(image_shape, images, model(images))
  if len(inputs) > 1:
    raise UsageError(
      f'model {model.name!r} has {len(inputs)} inputs; it must have one, the'
      ' images'
    )
  own_shape = inputs[0].shape[1:]
  if inputs[0].shape[0] is not None or not inputs[0].dtype.is_floating:
    raise UsageError(
      f'model {model.name!r} takes images {inputs[0].dtype.name}'
      f' {_dims(inputs[0].shape)}; it must take float32 images, in batches of'
      ' any size'
    )
  if image_shape is None:
    image_shape = own_shape.as_list()
  elif not own_shape.is_compatible_with(image_shape):
    raise UsageError(
      f'model {model.name!r} takes images of shape {tuple(own_shape)}; the'
      f' views give {tuple(image_shape)}'
    )
  return Symbolic(image_shape, inputs[0], model.output)


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
  shape = output.shape
  if shape.rank != 2 or shape[1] is None or not output.dtype.is_floating:
    raise UsageError(
      f'model {model.name!r} gives {output.dtype.name} '
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
    UsageError: If nothing is trainable, a trainable weight is not float32, no
      layer computes in `compute_dtype`, a layer computes in float16, or a batch
      normalization uses other moments than the batch's.
  """
  what = f'model {model.name!r}'
  if not model.trainable_variables:
    raise UsageError(f'{what} has no trainable weights')
  for variable in model.trainable_variables:
    if variable.dtype != tf.float32:
      raise UsageError(
        f'{what}: weight {variable.name!r} is {variable.dtype.name}; trainable'
        ' weights must be float32 (to compute in less, set'
        ' compute_dtype=bfloat16)'
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
    if isinstance(layer, batch_norm.layer_types()):
      for name in ('renorm', 'virtual_batch_size', 'adjustment'):
        if getattr(layer, name, None):
          raise UsageError(
            f'{where} has {name}, which static batch norm does not support;'
            ' remove it'
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
    for variable in model.variables:
      _check_initial_value(model, variable)
    # On the CPU: a session would claim all memory of the process's GPU.
    config = tf.compat.v1.ConfigProto(device_count={'GPU': 0})
    with tf.compat.v1.Session(config=config) as session:
      session.run([v.initializer for v in model.variables])
      rows = session.run(symbolic.output, {symbolic.images: images})
  rows = rows.astype(np.float32)
  if np.all(rows >= 0) and np.allclose(rows.sum(axis=-1), 1.0, atol=1e-3):
    raise UsageError(
      f'model {model.name!r} gives probabilities: its outputs are not'
      f' negative and sum to 1; {LOGITS}'
    )


def _check_initial_value(model: tf.keras.Model, variable: tf.Variable) -> None:
  """Rejects an initial value from global random state."""
  waiting, seen = [variable.initializer], set()
  while waiting:
    operation = waiting.pop()
    if operation in seen:
      continue
    seen.add(operation)
    if RANDOM.match(operation.type):
      raise UsageError(
        f'model {model.name!r}: the initial value of'
        f' {variable.name.removesuffix(":0")!r} is drawn from global random'
        f' state ({operation.type}), so that runs would not repeat; make the'
        ' variable with add_weight and an initializer of Keras'
      )
    waiting += [t.op for t in operation.inputs]


def head(model: tf.keras.Model) -> tf.keras.layers.Layer:
  """Finds the last layer of a model, which makes logits of features [B, D].

  Args:
    model: The model.

  Returns:
    The layer.

  Raises:
    UsageError: If the model has no such layer.
  """
  last = model.layers[-1] if model._is_graph_network else None  # pylint: disable=protected-access
  if last is None or not last.weights or last.input.shape.rank != 2:
    raise UsageError(
      f'model {model.name!r}: this algorithm separates features from logits;'
      ' it needs a functional or sequential model whose last layer, with'
      ' weights, makes logits of features [B, D], such as Dense(num_classes)'
    )
  return last
