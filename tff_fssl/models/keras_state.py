"""What Keras leaves to global or implicit state, made explicit.

*   Initial values of variables follow from a seed: `seeded_variables`.
*   Layers compute in the precision that is asked for: `policy`.
*   Batch normalization uses the batch's moments, without moving averages:
    `normalize_batch`.
*   Dropout and other random layers draw from the training step's seed:
    `RandomLayers`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
import contextlib
from typing import Any

from tff_fssl import hparams
from tff_fssl.lazy import tf


@contextlib.contextmanager
def seeded_variables(
  seed: int | None, created: list[tf.keras.Variable]
) -> Iterator[None]:
  """Enters a context that sets the initial values of Keras's variables.

  Args:
    seed: Seed of the initial values. None: zeros, which are cheap.
    created: The list to which the variables are appended.

  Yields:
    Nothing.
  """
  num_seeded = 0
  variable = tf.keras.Variable
  keras_init = variable.__init__

  def init(
    self: tf.keras.Variable, initializer: Any, *args: Any, **kwargs: Any
  ) -> None:
    nonlocal num_seeded
    created.append(self)
    if isinstance(initializer, str):
      initializer = tf.keras.initializers.get(initializer)
    if seed is None and callable(initializer):
      # The round's weights overwrite it, so that drawing it would be waste.
      initializer = tf.keras.initializers.Zeros()
    # TensorFlow's initializers are no Keras classes.
    elif seed is not None and hasattr(initializer, 'get_config'):
      config = initializer.get_config()
      if 'seed' in config:
        # Seeds follow the variable's place, not its name, since Keras's names
        # count all layers that the process ever built.
        config['seed'] = (seed * 1_000_003 + num_seeded) % (2**31 - 1)
        initializer = type(initializer).from_config(config)
        num_seeded += 1
    keras_init(self, initializer, *args, **kwargs)

  variable.__init__ = init
  try:
    yield
  finally:
    variable.__init__ = keras_init


@contextlib.contextmanager
def policy(compute_dtype: str) -> Iterator[None]:
  """Enters a context in which Keras's layers compute in `compute_dtype`."""
  if compute_dtype == 'float32':
    # The policy that the caller has set stays.
    yield
    return
  before = tf.keras.config.dtype_policy()
  tf.keras.config.set_dtype_policy(f'mixed_{compute_dtype}')
  try:
    yield
  finally:
    tf.keras.config.set_dtype_policy(before)


def batch_norms(model: tf.keras.Model) -> list[tf.keras.layers.Layer]:
  """Lists the model's batch normalization layers, at any depth."""
  layers = model._flatten_layers()  # pylint: disable=protected-access
  kind = tf.keras.layers.BatchNormalization
  return [layer for layer in layers if isinstance(layer, kind)]


def trained_batch_norms(
  model: tf.keras.Model,
) -> tuple[tf.keras.layers.Layer, ...]:
  """Lists the model's batch normalization layers, except frozen ones."""
  return tuple(layer for layer in batch_norms(model) if layer.trainable)


def _is_fused(layer: tf.keras.layers.Layer, inputs: tf.Tensor) -> bool:
  """Tells whether TensorFlow has one operation for a layer on `inputs`."""
  return bool(inputs.shape.rank == 4 and layer.axis % 4 == 3)


def _scale_and_offset(
  layer: tf.keras.layers.Layer, channels: int
) -> tuple[tf.Tensor, tf.Tensor]:
  gamma, beta = layer.gamma, layer.beta
  return (
    tf.ones([channels]) if gamma is None else gamma.value,
    tf.zeros([channels]) if beta is None else beta.value,
  )


def normalize(
  layer: tf.keras.layers.Layer,
  keras_call: Callable[..., tf.Tensor],
  inputs: tf.Tensor,
) -> tf.Tensor:
  """Computes a batch normalization layer's outputs with its moving averages.

  Args:
    layer: The layer.
    keras_call: Its `call` as Keras made it.
    inputs: Float tensor of any rank.

  Returns:
    The outputs.
  """
  if not _is_fused(layer, inputs):
    outputs: tf.Tensor = keras_call(inputs, training=False)
    return outputs
  # Keras 3 takes several operations.
  scale, offset = _scale_and_offset(layer, inputs.shape[-1])
  return tf.compat.v1.nn.fused_batch_norm(
    tf.cast(inputs, layer.compute_dtype),
    scale,
    offset,
    layer.moving_mean.value,
    layer.moving_variance.value,
    epsilon=layer.epsilon,
    is_training=False,
  )[0]


def normalize_batch(
  layer: tf.keras.layers.Layer,
  inputs: tf.Tensor,
  *,
  moves_averages: bool = False,
) -> tuple[tf.Tensor, Callable[[], tuple[tf.Tensor, tf.Tensor, tf.Tensor]]]:
  """Computes a batch normalization layer's outputs with the batch's moments.

  Args:
    layer: The layer.
    inputs: Float tensor of any rank.
    moves_averages: Whether the layer's moving averages move. On images, the
      moving variance is of unbiased variances, as in TensorFlow and PyTorch.

  Returns:
    The outputs, and a function without arguments that returns the mean float32
    [channels], the biased variance float32 [channels] and the number of values
    per channel, float32 scalar.
  """
  inputs = tf.cast(inputs, layer.compute_dtype)
  axis = layer.axis % inputs.shape.rank
  channels = inputs.shape[axis]
  is_fused = _is_fused(layer, inputs)
  if is_fused:
    # Much faster on images than `tf.nn.moments`.
    outputs, mean, variance = tf.compat.v1.nn.fused_batch_norm(
      inputs,
      *_scale_and_offset(layer, channels),
      epsilon=layer.epsilon,
      is_training=True,
    )
  else:
    others = [a for a in range(inputs.shape.rank) if a != axis]
    shape = [d if a == axis else 1 for a, d in enumerate(inputs.shape)]
    floats = tf.cast(inputs, tf.float32)
    mean, variance = tf.nn.moments(floats, others)

    outputs = tf.cast(
      tf.nn.batch_normalization(
        floats,
        *(
          None if values is None else tf.reshape(values, shape)
          for values in (mean, variance, layer.beta, layer.gamma)
        ),
        layer.epsilon,
      ),
      inputs.dtype,
    )

  if moves_averages:
    for average, now in (
      (layer.moving_mean, mean),
      (layer.moving_variance, variance),
    ):
      old = average.value
      old.assign_sub((old - now) * (1.0 - layer.momentum))

  def moments() -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    count = tf.cast(tf.size(inputs), tf.float32) / channels
    biased = variance
    if is_fused:  # Its variance is not biased.
      biased *= (count - 1.0) / tf.maximum(count, 1.0)
    return mean, biased, count

  return outputs, moments


class RandomLayers:
  """The random number generators of one model, which draw from given seeds.

  Keras's random layers draw with a `keras.random.SeedGenerator`, whose state is
  a variable of its own, so that runs would not repeat. Here each generator of a
  model draws statelessly. Its seed is a function of

  *   the seed of the training step, itself a function of (seed, round, client,
      step),
  *   the images of the forward pass: each new tensor of images within a step
      has draws of its own. A second pass of the same tensor repeats the draws
      of the first, so that a loss at W + eps is the same function of the
      weights as the loss at W,
  *   the generator's place in the model, and
  *   the number of its draws in this forward pass.

  A seed that was given to a layer (`Dropout(0.5, seed=1)`) has no effect.
  """

  def __init__(self, model: tf.keras.Model):
    """Takes control of the generators in the model's layers."""
    self._seed: tf.Tensor | None = None
    # Numbers the tensors of images in the current step.
    self._passes: dict[Any, int] = {}
    self._pass_seed: tf.Tensor | None = None
    self._num_draws: dict[int, int] = {}
    # By id, since several layers may share one generator.
    generators: dict[int, tuple[Any, tf.keras.layers.Layer]] = {}
    # Recurrent cells would keep a mask of one pass for the next.
    self._cells = []
    for layer in model._flatten_layers():  # pylint: disable=protected-access
      for value in layer._seed_generators:  # pylint: disable=protected-access
        generators.setdefault(id(value), (value, layer))
      if hasattr(layer, 'reset_dropout_mask'):
        self._cells.append(layer)
    for place, (generator, layer) in enumerate(generators.values()):
      generator.next = self._seed_fn(place, layer)
    self._exist = bool(generators)

  def __bool__(self) -> bool:
    """Tells whether the model has generators."""
    return self._exist

  def _seed_fn(
    self, place: int, layer: tf.keras.layers.Layer
  ) -> Callable[..., tf.Tensor]:
    """Makes a function that returns the seeds of the generator at `place`."""

    def make_seed(ordered: bool = True) -> tf.Tensor:
      del ordered
      if self._pass_seed is None:
        crops = isinstance(layer, tf.keras.layers.RandomCrop)
        if crops or layer in self._cells:
          # They draw in any case, and use it in training alone.
          return tf.constant([0, 0])
        raise hparams.UsageError(
          f'layer {layer.name!r} draws random numbers outside of a training'
          ' step; evaluation must not draw any: remove training=True from the'
          ' call of the layer'
        )
      fold_in = tf.random.experimental.stateless_fold_in
      count = self._num_draws.get(place, 0)
      self._num_draws[place] = count + 1
      return fold_in(fold_in(self._pass_seed, place), count)

    return make_seed

  @contextlib.contextmanager
  def seeded(self, seed: tf.Tensor) -> Iterator[None]:
    """Enters a context in which training draws from `seed`, int32 [2]."""
    self._seed = seed
    try:
      yield
    finally:
      self._seed = None
      self._passes.clear()

  @contextlib.contextmanager
  def forward_pass(self, images: tf.Tensor, training: bool) -> Iterator[None]:
    """Enters a context in which the model is called once, on `images`."""
    for cell in self._cells:
      cell.reset_dropout_mask()
      cell.reset_recurrent_dropout_mask()
    if not training:
      yield
      return
    if self._seed is None:
      raise ValueError('random layers can be trained only in `Network.draws`')
    number = self._passes.setdefault(images.ref(), len(self._passes))
    self._pass_seed = tf.random.experimental.stateless_fold_in(
      self._seed, number
    )
    self._num_draws = {}
    try:
      yield
    finally:
      self._pass_seed = None
