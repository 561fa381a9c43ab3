"""What Keras leaves to global or implicit state, made explicit.

*   Initial values of variables follow from a seed: `seeded_creator`.
*   Layers compute in the precision that is asked for: `policy`.
*   Batch normalization uses the batch's moments, without moving averages:
    `normalize_batch`.
*   Dropout and other random layers draw from the training step's seed:
    `RandomLayers`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
import contextlib
import functools
import math
from typing import Any

from tff_fssl import hparams
from tff_fssl.lazy import tf


def seeded_creator(
  seed: int | None, created: list[tf.Variable]
) -> Callable[..., tf.Variable]:
  """Makes a variable creator that sets initial values.

  Args:
    seed: Seed of the initial values. None: zeros, which are cheap.
    created: The list to which the creator appends its variables.

  Returns:
    The creator.
  """
  num_seeded = 0

  def create(
    next_creator: Callable[..., tf.Variable], **kwargs: Any
  ) -> tf.Variable:
    nonlocal num_seeded
    initial_value = kwargs['initial_value']
    if isinstance(initial_value, functools.partial):
      if seed is None:
        # The round's weights overwrite it, so that drawing it would be waste.
        shape = initial_value.args[0] if initial_value.args else kwargs['shape']
        dtype = initial_value.keywords.get('dtype', tf.float32)
        kwargs['initial_value'] = functools.partial(tf.zeros, shape, dtype)
      elif hasattr(initial_value.func, 'get_config'):
        initializer: Any = initial_value.func
        config = initializer.get_config()
        if 'seed' in config:
          # Seeds follow the variable's place, not its name, since Keras's names
          # count all layers that the process ever built. Only random variables
          # count, since in eager mode Keras adds counters of its own.
          config['seed'] = (seed * 1_000_003 + num_seeded) % (2**31 - 1)
          kwargs['initial_value'] = functools.partial(
            type(initializer).from_config(config),
            *initial_value.args,
            **initial_value.keywords,
          )
          num_seeded += 1
    created.append(next_creator(**kwargs))
    return created[-1]

  return create


@contextlib.contextmanager
def policy(compute_dtype: str) -> Iterator[None]:
  """Enters a context in which Keras's layers compute in `compute_dtype`."""
  if compute_dtype == 'float32':
    # The policy that the caller has set stays.
    yield
    return
  before = tf.keras.mixed_precision.global_policy()
  tf.keras.mixed_precision.set_global_policy(f'mixed_{compute_dtype}')
  try:
    yield
  finally:
    tf.keras.mixed_precision.set_global_policy(before)


@functools.cache
def batch_norm_types() -> tuple[Any, ...]:
  """Returns Keras's classes of batch normalization layers."""
  return (
    tf.keras.layers.BatchNormalization,
    tf.keras.layers.experimental.SyncBatchNormalization,
    tf.compat.v1.keras.layers.BatchNormalization,
  )


def batch_norms(model: tf.keras.Model) -> list[tf.keras.layers.Layer]:
  """Lists the model's batch normalization layers, at any depth."""
  layers = model._flatten_layers()  # pylint: disable=protected-access
  return [layer for layer in layers if isinstance(layer, batch_norm_types())]


def trained_batch_norms(
  model: tf.keras.Model,
) -> tuple[tf.keras.layers.Layer, ...]:
  """Lists the model's batch normalization layers, except frozen ones."""
  return tuple(layer for layer in batch_norms(model) if layer.trainable)


def normalize_batch(
  layer: tf.keras.layers.Layer, inputs: tf.Tensor
) -> tuple[tf.Tensor, Callable[[], tuple[tf.Tensor, tf.Tensor, tf.Tensor]]]:
  """Computes a batch normalization layer's outputs with the batch's moments.

  Args:
    layer: One of `batch_norm_types`.
    inputs: Float tensor of any rank.

  Returns:
    The outputs, and a function without arguments that returns the mean float32
    [channels], the biased variance float32 [channels] and the number of values
    per channel, float32 scalar.
  """
  inputs = tf.cast(inputs, layer.compute_dtype)
  axis = [a % inputs.shape.rank for a in layer.axis]
  channels = math.prod(inputs.shape[a] for a in axis)
  gamma, beta = layer.gamma, layer.beta
  is_fused = inputs.shape.rank == 4 and axis == [3]
  if is_fused:
    # Much faster on images than `tf.nn.moments`.
    outputs, mean, variance = tf.compat.v1.nn.fused_batch_norm(
      inputs,
      tf.ones([channels]) if gamma is None else gamma,
      tf.zeros([channels]) if beta is None else beta,
      epsilon=layer.epsilon,
      is_training=True,
    )
  else:
    others = [a for a in range(inputs.shape.rank) if a not in axis]
    shape = [d if a in axis else 1 for a, d in enumerate(inputs.shape)]
    floats = tf.cast(inputs, tf.float32)
    mean, variance = tf.nn.moments(floats, others)

    def expand(values: tf.Tensor | None) -> tf.Tensor | None:
      return None if values is None else tf.reshape(values, shape)

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

  def moments() -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    count = tf.cast(tf.size(inputs), tf.float32) / channels
    biased = variance
    if is_fused:  # Its variance is not biased.
      biased *= (count - 1.0) / tf.maximum(count, 1.0)
    return mean, biased, count

  return outputs, moments


@functools.cache
def _generator_type() -> Any:
  """Returns Keras's class of generators, which has no public name."""
  layer = tf.keras.__internal__.layers.BaseRandomLayer(name='any')
  return type(layer._random_generator)  # pylint: disable=protected-access


class RandomLayers:
  """The random number generators of one model, which draw from given seeds.

  Keras's random layers draw with a `keras.backend.RandomGenerator` from global
  state or their own, so that runs would not repeat. Here each generator of a
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
      for value in vars(layer).values():
        if isinstance(value, _generator_type()):
          generators.setdefault(id(value), (value, layer))
      if hasattr(layer, 'reset_dropout_mask'):
        self._cells.append(layer)
    for place, (generator, layer) in enumerate(generators.values()):
      # pylint: disable=protected-access
      generator._rng_type = _generator_type().RNG_STATELESS
      generator._built = True
      # pylint: enable=protected-access
      generator.make_seed_for_stateless_op = self._seed_fn(place, layer)
    self._exist = bool(generators)

  def __bool__(self) -> bool:
    """Tells whether the model has generators."""
    return self._exist

  def _seed_fn(
    self, place: int, layer: tf.keras.layers.Layer
  ) -> Callable[[], tf.Tensor]:
    """Makes a function that returns the seeds of the generator at `place`."""

    def make_seed() -> tf.Tensor:
      if self._pass_seed is None:
        if isinstance(layer, tf.keras.layers.RandomCrop):
          # Its random branch is not taken here.
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
