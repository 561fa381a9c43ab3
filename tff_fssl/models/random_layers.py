"""Makes dropout and other random layers draw from the training step's seed.

Keras's random layers draw with a `keras.backend.RandomGenerator` from global
state or their own, so that runs would not repeat. Here each generator of a
model draws statelessly. Its seed is a function of

*   the seed of the training step, itself a function of (seed, round, client,
    step),
*   the images of the forward pass: each new tensor of images within a step has
    draws of its own. A second pass of the same tensor repeats the draws of the
    first, so that a loss at W + eps is the same function of the weights as the
    loss at W,
*   the generator's place in the model, and
*   the number of its draws in this forward pass.

A seed that was given to a layer (`Dropout(0.5, seed=1)`) has no effect.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
import contextlib
import functools
from typing import Any

from tff_fssl import hparams
from tff_fssl.lazy import tf


@functools.cache
def _generator_type() -> Any:
  """Returns Keras's class of generators, which has no public name."""
  layer = tf.keras.__internal__.layers.BaseRandomLayer(name='any')
  return type(layer._random_generator)  # pylint: disable=protected-access


class RandomLayers:
  """The random number generators of one model."""

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
