"""The one way in which local training sees a Keras model.

A `Network` is one Keras model in one graph, through which any weight set is
put by assigning it to the model's variables. It decides three things that
Keras leaves to global or implicit state:

*   Initial weights are a function of (seed, place in the model). (Keras's own
    seeding differs from build to build inside a computation.)
*   Batch normalization in training normalizes with the batch's moments and,
    unless asked to, tracks none: `statistics.py` says where they come from.
*   Models that cannot be trained so are refused: see `_check_model`.
"""

from collections.abc import Callable, Iterator, Sequence
import contextlib
import functools
import math
from typing import Any, NamedTuple

import tensorflow as tf

from tff_fssl import hparams

ModelFn = Callable[[], tf.keras.Model]


class Weights(NamedTuple):
  """A model's weights and what its batch norm statistics rest on.

  Attributes:
    trainable: Trainable variables, in Keras's order.
    non_trainable: All others (batch norm's moving moments, frozen layers), in
      Keras's order.
    statistics_count: float32 scalar, how much the batch norm statistics rest
      on (`statistics.Sums.count`); 0 means that there are none yet, so that
      inference has to normalize with the batch's own moments.
  """

  trainable: tuple[tf.Tensor, ...]
  non_trainable: tuple[tf.Tensor, ...]
  statistics_count: tf.Tensor


class BatchMoments(NamedTuple):
  """Moments of one batch at one batch norm layer.

  Attributes:
    layer: Index of the layer in `Network.batch_norm_layers`.
    mean: float32 [channels].
    variance: float32 [channels], biased (divided by `count`).
    count: float32 scalar, values per channel.
  """

  layer: int
  mean: tf.Tensor
  variance: tf.Tensor
  count: tf.Tensor


def _seeded_creator(seed: int | None) -> Callable[..., tf.Variable]:
  """A variable creator: initial values from `seed`, or cheap zeros if None."""
  num_seeded = 0

  def create(next_creator: Callable[..., tf.Variable], **kwargs) -> tf.Variable:
    nonlocal num_seeded
    initial_value = kwargs['initial_value']
    if isinstance(initial_value, functools.partial):
      if seed is None:
        # About to be overwritten by the weights that the round broadcast.
        shape = initial_value.args[0] if initial_value.args else kwargs['shape']
        dtype = initial_value.keywords.get('dtype', tf.float32)
        kwargs['initial_value'] = functools.partial(tf.zeros, shape, dtype)
      elif isinstance(initial_value.func, tf.keras.initializers.Initializer):
        config = initial_value.func.get_config()
        if 'seed' in config:
          # A function of the place, not of the name: names that Keras makes up
          # count all layers that the process ever built. Only random ones
          # count: in eager mode Keras adds counters of its own.
          config['seed'] = (seed * 1_000_003 + num_seeded) % (2**31 - 1)
          kwargs['initial_value'] = functools.partial(
            type(initial_value.func).from_config(config),
            *initial_value.args,
            **initial_value.keywords,
          )
          num_seeded += 1
    return next_creator(**kwargs)

  return create


def _check_model(model: tf.keras.Model, num_classes: int | None) -> None:
  """Refuses models that cannot be trained as logits, purely.

  Raises:
    UsageError: If the model ends in softmax, its output has not the shape
      [batch, num_classes], or a layer draws from global random state.
  """
  layers = list(model._flatten_layers(include_self=False))  # pylint: disable=protected-access
  last = model.layers[-1]
  if isinstance(last, tf.keras.layers.Softmax) or (
    getattr(last, 'activation', None)
    in (tf.keras.activations.softmax, tf.keras.activations.sigmoid)
  ):
    raise hparams.UsageError(
      f'model {model.name!r} ends in {last.name!r}, which gives'
      ' probabilities; a model must give logits (in keras.applications:'
      ' classifier_activation=None)'
    )
  for layer in layers:
    random = isinstance(layer, tf.keras.__internal__.layers.BaseRandomLayer)
    if random and getattr(layer, 'rate', True):
      raise hparams.UsageError(
        f'model {model.name!r}: layer {layer.name!r}'
        f' ({type(layer).__name__}) draws from global random state, so that'
        ' runs would not repeat; remove it or set its rate to 0'
      )
  shape = model.output_shape
  if num_classes is not None and tuple(shape) != (None, num_classes):
    raise hparams.UsageError(
      f'model {model.name!r} has output shape {shape}; a data set of'
      f' {num_classes} classes needs (None, {num_classes})'
    )


def _build(model_fn: ModelFn, compute_dtype: str) -> tf.keras.Model:
  """The model, its layers made under Keras's policy for `compute_dtype`.

  Raises:
    UsageError: If no layer with weights took the policy up.
  """
  if compute_dtype == 'float32':
    return model_fn()  # Under whatever policy the caller has set.
  before = tf.keras.mixed_precision.global_policy()
  tf.keras.mixed_precision.set_global_policy(f'mixed_{compute_dtype}')
  try:
    model = model_fn()
  finally:
    tf.keras.mixed_precision.set_global_policy(before)
  layers = [
    layer
    for layer in model._flatten_layers()  # pylint: disable=protected-access
    if layer.weights and not isinstance(layer, tf.keras.Model)
  ]
  if layers and all(layer.compute_dtype != compute_dtype for layer in layers):
    raise hparams.UsageError(
      f'compute_dtype={compute_dtype}: no layer of model {model.name!r}'
      ' computes in it; make its layers without a dtype of their own, inside'
      ' model_fn'
    )
  return model


def all_finite(values: Any) -> tf.Tensor:
  """Whether every float in a structure of tensors is finite: bool scalar."""
  tensors = map(tf.convert_to_tensor, tf.nest.flatten(values))
  return tf.reduce_all(
    [
      tf.reduce_all(tf.math.is_finite(t))
      for t in tensors
      if t.dtype.is_floating
    ]
  )


def select(condition: tf.Tensor, yes: Any, no: Callable[[], Any]) -> Any:
  """`yes` if `condition`, else `no()`, as a whole and without a copy.

  Args:
    condition: bool scalar.
    yes: A structure of tensors.
    no: Gives a structure of tensors of the same shapes.

  Returns:
    One of the two.
  """
  return tf.cond(condition, lambda: tf.nest.map_structure(tf.identity, yes), no)


def zero_unless(condition: tf.Tensor, values: Any) -> Any:
  """A structure of tensors, or zeros unless `condition`, a bool scalar."""
  return select(
    condition, values, lambda: tf.nest.map_structure(tf.zeros_like, values)
  )


class Network:
  """One Keras model in the current graph, fed with explicit weights."""

  def __init__(
    self,
    model_fn: ModelFn,
    *,
    seed: int | None = None,
    num_classes: int | None = None,
    track_moving_averages: bool = False,
    compute_dtype: str = 'float32',
  ):
    """Builds the model in the current graph.

    Args:
      model_fn: Builds the Keras model, images float32 [B, H, W, C] -> logits
        [B, num_classes].
      seed: Of the initial weights; None if weights will be assigned.
      num_classes: Expected width of the output, if to be checked.
      track_moving_averages: Whether training moves Keras's moving averages.
      compute_dtype: 'bfloat16': layers compute in it, by Keras's mixed
        precision; variables, moments of batch norm and what this class returns
        stay float32. 'float32': the model is as `model_fn` makes it.

    Raises:
      UsageError: If the model cannot be trained; says why.
    """
    with tf.variable_creator_scope(_seeded_creator(seed)):
      self.model = _build(model_fn, compute_dtype)
    _check_model(self.model, num_classes)
    self.trainable_variables = tuple(self.model.trainable_variables)
    self.non_trainable_variables = tuple(self.model.non_trainable_variables)
    self._track_moving_averages = track_moving_averages
    self._recorded: list[BatchMoments] | None = None
    self._use_batch_moments = False
    self.batch_norm_layers = tuple(
      layer
      for layer in self.model._flatten_layers()  # pylint: disable=protected-access
      if isinstance(layer, tf.keras.layers.BatchNormalization)
      and layer.trainable
    )
    for index, layer in enumerate(self.batch_norm_layers):
      layer.call = self._batch_norm_call(index, layer, layer.call)

  def _batch_norm_call(
    self, index: int, layer: tf.keras.layers.Layer, keras_call: Callable
  ) -> Callable:
    """A batch norm layer's `call` that normalizes as the class says."""

    def call(inputs, training=None, mask=None):
      if not (training or self._use_batch_moments):
        return keras_call(inputs, training=False, mask=mask)
      if self._track_moving_averages and not self._use_batch_moments:
        return keras_call(inputs, training=True, mask=mask)
      inputs = tf.cast(inputs, layer.compute_dtype)
      axis = [a % inputs.shape.rank for a in layer.axis]
      channels = math.prod(inputs.shape[a] for a in axis)
      count = tf.cast(tf.size(inputs), tf.float32) / channels
      gamma, beta = layer.gamma, layer.beta
      if inputs.shape.rank == 4 and axis == [3]:
        outputs, mean, variance = tf.compat.v1.nn.fused_batch_norm(
          inputs,
          tf.ones([channels]) if gamma is None else gamma,
          tf.zeros([channels]) if beta is None else beta,
          epsilon=layer.epsilon,
          is_training=True,
        )
        variance *= (count - 1.0) / tf.maximum(count, 1.0)  # To biased.
      else:
        others = [a for a in range(inputs.shape.rank) if a not in axis]
        shape = [d if a in axis else 1 for a, d in enumerate(inputs.shape)]
        floats = tf.cast(inputs, tf.float32)
        mean, variance = tf.nn.moments(floats, others)
        expand = lambda v: None if v is None else tf.reshape(v, shape)
        outputs = tf.cast(
          tf.nn.batch_normalization(
            floats,
            expand(mean),
            expand(variance),
            expand(beta),
            expand(gamma),
            layer.epsilon,
          ),
          inputs.dtype,
        )
      if self._recorded is not None:
        self._recorded.append(BatchMoments(index, mean, variance, count))
      return outputs

    return call

  def assign(self, weights: Weights) -> None:
    """Puts a weight set into the model."""
    for variable, value in zip(self.trainable_variables, weights.trainable):
      variable.assign(value)
    for variable, value in zip(
      self.non_trainable_variables, weights.non_trainable
    ):
      variable.assign(value)

  def initial_weights(self) -> Weights:
    """The weights the model was built with, without statistics."""
    return Weights(
      tuple(tf.identity(v) for v in self.trainable_variables),
      tuple(tf.identity(v) for v in self.non_trainable_variables),
      # Moving averages are meant to be used from the start.
      tf.constant(float(self._track_moving_averages or not self.is_static)),
    )

  @property
  def variances(self) -> tuple[int, ...]:
    """Which non-trainable weights are batch norm's moving variances."""
    moving = {
      layer.moving_variance.ref()
      for layer in self.model._flatten_layers()  # pylint: disable=protected-access
      if isinstance(layer, tf.keras.layers.BatchNormalization)
    }
    return tuple(
      index
      for index, variable in enumerate(self.non_trainable_variables)
      if variable.ref() in moving
    )

  @property
  def is_static(self) -> bool:
    """Whether batch norm statistics have to be gathered after training."""
    return bool(self.batch_norm_layers) and not self._track_moving_averages

  def logits(self, images: tf.Tensor, *, training: bool) -> tf.Tensor:
    """The model's logits, float32 [B, C], of images float32 [B, H, W, C]."""
    return tf.cast(self.model(images, training=training), tf.float32)

  def inference_logits(
    self, images: tf.Tensor, statistics_count: tf.Tensor
  ) -> tf.Tensor:
    """Logits for evaluation: by statistics, or the batch's if there are none.

    Args:
      images: float32 [B, H, W, C].
      statistics_count: `Weights.statistics_count` of the assigned weights.

    Returns:
      float32 [B, C].
    """
    if not self.is_static:
      return self.logits(images, training=False)

    def from_batch():
      with self._batch_moments():
        return self.logits(images, training=False)

    return tf.cond(
      statistics_count > 0.0,
      lambda: self.logits(images, training=False),
      from_batch,
    )

  def moments(self, images: tf.Tensor) -> Sequence[BatchMoments]:
    """Moments at every batch norm layer of one forward pass over a batch."""
    with self._batch_moments():
      self._recorded = []
      self.logits(images, training=False)
      recorded, self._recorded = self._recorded, None
    return recorded

  @contextlib.contextmanager
  def _batch_moments(self) -> Iterator[None]:
    """In here, trainable batch norm layers use the batch's moments."""
    self._use_batch_moments = True
    try:
      yield
    finally:
      self._use_batch_moments = False

  @contextlib.contextmanager
  def perturbed(self, perturbation: Sequence[tf.Tensor]) -> Iterator[None]:
    """In here, trainable weights are w + `perturbation`; after it, w again."""
    saved = [v.read_value() for v in self.trainable_variables]
    for variable, value, change in zip(
      self.trainable_variables, saved, perturbation
    ):
      variable.assign(value + change)
    yield
    for variable, value in zip(self.trainable_variables, saved):
      variable.assign(value)
