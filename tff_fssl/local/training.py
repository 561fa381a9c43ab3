"""The batch loop that clients and server share."""

from collections.abc import Sequence
import contextlib
import dataclasses
from typing import NamedTuple

import tensorflow as tf

from tff_fssl.data import augment
from tff_fssl.local import algorithm as algorithm_lib
from tff_fssl.local import non_finite
from tff_fssl.local import optimizer as optimizer_lib
from tff_fssl.models import adapter

# The metric for the regularizers' part of the loss, if a model has some.
REGULARIZATION = 'loss_regularization'

# The purposes for which seeds are derived: one number each, never reused.
_ORDER_UNLABELED, _ORDER_LABELED, _VIEWS, _PREPARE, _DRAWS = range(5)


@dataclasses.dataclass(frozen=True)
class LoopConfig:
  """The configuration of the loop.

  Attributes:
    num_epochs: Passes over the longer stream of examples; the other repeats.
    batch_size: Unlabelled examples in a batch; the last batch of a pass may be
      smaller.
    labeled_batch_size: Labelled examples in a batch; the last batch of a pass
      may be smaller.
    optimizer: Applies the gradients.
    proximal_strength: mu of FedProx, >= 0.
    jit_compile: Whether XLA compiles the step.
    keeps_momentum: Whether the result contains the final momentum, from which
      the next round can start.
  """

  num_epochs: int
  batch_size: int
  labeled_batch_size: int
  optimizer: optimizer_lib.Sgd
  proximal_strength: float = 0.0
  jit_compile: bool = False
  keeps_momentum: bool = False


class LocalResult(NamedTuple):
  """The result of local training.

  Attributes:
    update: Per trainable variable, weights before minus weights after; all 0 if
      it is not finite.
    non_trainable: The non-trainable variables after training; unchanged if the
      update is not finite.
    is_finite: bool scalar, whether the update is finite.
    num_examples: float32 scalar, examples processed (over all epochs).
    weight: `Prepared.weight`.
    ratios: Name -> metric, summed over batches.
    ranges: `Prepared.ranges`.
    momentum: The optimizer's momentum, per trainable variable; unchanged if the
      update is not finite; empty if it is not kept.
  """

  update: tuple[tf.Tensor, ...]
  non_trainable: tuple[tf.Tensor, ...]
  is_finite: tf.Tensor
  num_examples: tf.Tensor
  weight: tf.Tensor | None
  ratios: dict[str, algorithm_lib.Ratio]
  ranges: dict[str, tf.Tensor]
  momentum: tuple[tf.Tensor, ...]


def fold_in(seed: tf.Tensor, purpose: int | tf.Tensor) -> tf.Tensor:
  """Derives from a seed another one, int32 [2], for a purpose or a step."""
  return tf.random.experimental.stateless_fold_in(seed, purpose)


def num_batches(
  size: int | tf.Tensor, batch_size: int | tf.Tensor
) -> int | tf.Tensor:
  """The number of batches for `size` examples; the last may be smaller."""
  return -(-size // batch_size)


def zero_row(values: tf.Tensor, when: tf.Tensor) -> tf.Tensor:
  """`values`, preceded by a row of zeros if `when` is true."""
  pad = [[tf.cast(when, tf.int32), 0]] + [[0, 0]] * (values.shape.rank - 1)
  return tf.pad(values, pad)


class _Stream:
  """Seeded permutations of some examples, cut into batches, pass after pass."""

  def __init__(self, indices, batch_size, num_steps, seed):
    self._size = tf.maximum(tf.shape(indices)[0], 1)
    self._batch_size = batch_size
    self._steps_per_pass = num_batches(self._size, batch_size)
    # An empty stream yields example 0, the filler that the data were given.
    padded = tf.cond(
      tf.shape(indices)[0] > 0, lambda: indices, lambda: tf.zeros([1], tf.int32)
    )
    num_passes = num_batches(num_steps, self._steps_per_pass)
    keys = tf.random.stateless_uniform([num_passes, self._size], seed)
    self._order = tf.gather(padded, tf.argsort(keys, axis=-1, stable=True))

  def batch(self, step):
    """Indices, int32 [<= batch_size], of a step's examples."""
    start = (step % self._steps_per_pass) * self._batch_size
    row = self._order[step // self._steps_per_pass]
    return row[start : start + self._batch_size]


def _with_filler(examples: algorithm_lib.Examples) -> algorithm_lib.Examples:
  """`examples`, or one blank example if empty; the loop gives it weight 0."""
  is_empty = tf.equal(tf.shape(examples.x)[0], 0)
  return algorithm_lib.Examples(*(zero_row(t, is_empty) for t in examples))


def _floats(prepared: algorithm_lib.Prepared) -> dict[str, tf.Tensor]:
  """The float tensors of `prepared`, by name."""
  named = {**prepared.ranges, **prepared.constants, **prepared.of_example}
  if prepared.weight is not None:
    named['aggregation weight'] = prepared.weight
  return {k: v for k, v in named.items() if v.dtype.is_floating}


def _named(
  what: str, variables: Sequence[tf.Variable], tensors: Sequence[tf.Tensor]
) -> dict[str, tf.Tensor]:
  """Float tensors, one per variable, by the variables' names."""
  return {
    f'{what} {variable.name.removesuffix(":0")}': tf.convert_to_tensor(tensor)
    for variable, tensor in zip(variables, tensors)
    if variable.dtype.is_floating
  }


class LocalTraining:
  """Trains one network on the data of one client (or the server).

  The constructor makes variables, so call it outside of `tf.function`s; call
  `run` inside one.
  """

  def __init__(
    self,
    network: adapter.Network,
    algorithm: algorithm_lib.LocalAlgorithm,
    views: augment.Views,
    config: LoopConfig,
  ):
    self._network = network
    self._algorithm = algorithm
    self._views = views
    self._config = config
    self._slots = config.optimizer.initialize(network)

    def step(batch, seed):
      # There is no seed if the network draws no random numbers.
      draws = contextlib.nullcontext() if seed is None else network.draws(seed)
      with draws:
        return algorithm.step(network, batch)

    self._step = tf.function(step, jit_compile=config.jit_compile or None)

  def _make_batch(
    self, prepared, labeled, unlabeled, streams, step, seed
  ) -> algorithm_lib.Batch:
    """Gathers the batch of a step and makes the views that the step needs."""
    seed = fold_in(fold_in(seed, _VIEWS), step)
    batch = algorithm_lib.Batch(None, None, None, {}, None, {}, {})
    if self._algorithm.labeled:
      examples, num_labeled = labeled
      index = streams['labeled'].batch(step)
      batch = batch._replace(
        labeled=self._views.weak(
          tf.gather(examples.x, index), fold_in(seed, 0)
        ),
        labels=tf.gather(examples.y, index),
        label_weights=tf.fill(
          tf.shape(index), tf.cast(num_labeled > 0, tf.float32)
        ),
      )
    if self._algorithm.views:
      index = streams['unlabeled'].batch(step)
      images = tf.gather(unlabeled.x, index)
      batch = batch._replace(
        views={
          name: getattr(self._views, name)(images, fold_in(seed, 1 + i))
          for i, name in enumerate(self._algorithm.views)
        },
        hidden_labels=tf.gather(unlabeled.y, index),
        of_example={
          k: tf.gather(v, index) for k, v in prepared.of_example.items()
        },
        constants=prepared.constants,
      )
    return batch

  def run(
    self,
    weights: adapter.Weights,
    labeled: algorithm_lib.Examples,
    unlabeled: algorithm_lib.Examples,
    *,
    learning_rate: tf.Tensor,
    seed: tf.Tensor,
    enabled: tf.Tensor | bool = True,
    momentum: Sequence[tf.Tensor] = (),
    watch: non_finite.Watch | None = None,
  ) -> LocalResult:
    """Trains from `weights`.

    Args:
      weights: The initial weights.
      labeled: Labelled examples, perhaps none.
      unlabeled: Unlabelled examples, perhaps none.
      learning_rate: float32 scalar.
      seed: int32 [2].
      enabled: bool scalar; if false, no step is made.
      momentum: The initial momentum of the optimizer; empty: 0.
      watch: If given, it checks all tensors computed from the client's data.

    Returns:
      The result.
    """
    network, algorithm, config = self._network, self._algorithm, self._config
    trainable = network.trainable_variables
    network.assign(weights)
    before = tuple(momentum) or tuple(map(tf.zeros_like, self._slots))
    for slot, value in zip(self._slots, before, strict=True):
      slot.assign(value)

    prepared = algorithm_lib.Prepared(tf.range(tf.shape(unlabeled.x)[0]))
    if algorithm.prepare is not None:
      prepared = algorithm.prepare(
        network, weights, unlabeled, self._views, fold_in(seed, _PREPARE)
      )

    if watch is not None:
      received = _named('received', trainable, weights[0])
      received |= _named(
        'received', network.non_trainable_variables, weights[1]
      )
      watch(0, received | _floats(prepared))

    num_labeled = tf.shape(labeled.x)[0]
    steps_per_epoch = tf.constant(0)
    if algorithm.views:
      steps_per_epoch = num_batches(
        tf.shape(prepared.selected)[0], config.batch_size
      )
    if algorithm.labeled:
      steps_per_epoch = tf.maximum(
        steps_per_epoch, num_batches(num_labeled, config.labeled_batch_size)
      )
    num_steps = tf.where(enabled, config.num_epochs * steps_per_epoch, 0)
    streams = {}
    if algorithm.views:
      # If labels are trained on, too, a client without a selected unlabelled
      # example still trains on its labels; its filler must have weight 0.
      streams['unlabeled'] = _Stream(
        prepared.selected,
        config.batch_size,
        num_steps,
        fold_in(seed, _ORDER_UNLABELED),
      )
      is_filler = tf.equal(tf.shape(prepared.selected)[0], 0)
      unlabeled = _with_filler(unlabeled)
      prepared = prepared._replace(
        of_example={
          k: zero_row(v, is_filler) for k, v in prepared.of_example.items()
        },
        constants={
          **prepared.constants,
          'unlabeled_weight': tf.where(is_filler, 0.0, 1.0),
        },
      )
    if algorithm.labeled:
      streams['labeled'] = _Stream(
        tf.range(num_labeled),
        config.labeled_batch_size,
        num_steps,
        fold_in(seed, _ORDER_LABELED),
      )
      labeled = _with_filler(labeled)

    names = algorithm.step_ratios
    if network.has_regularizers:
      names += (REGULARIZATION,)
    ratios = {name: (tf.constant(0.0), tf.constant(0.0)) for name in names}
    num_examples = tf.constant(0.0)
    for step in tf.range(num_steps):
      batch = self._make_batch(
        prepared, (labeled, num_labeled), unlabeled, streams, step, seed
      )
      draws = (
        fold_in(fold_in(seed, _DRAWS), step) if network.is_random else None
      )
      result = self._step(batch, draws)
      gradients = list(result.gradients)
      if network.has_regularizers:
        penalty, changes = network.regularization()
        gradients = [g + c for g, c in zip(gradients, changes)]
        result = result._replace(
          ratios={
            **result.ratios,
            REGULARIZATION: (penalty, tf.constant(1.0)),
          }
        )
      if config.proximal_strength:
        gradients = [
          g + config.proximal_strength * (v - start)
          for g, v, start in zip(
            gradients, network.trainable_variables, weights.trainable
          )
        ]
      config.optimizer.apply(network, self._slots, gradients, learning_rate)
      if watch is not None:
        watch(
          step + 1,
          {
            **{
              # A sum over no example may still be NaN.
              name: total / tf.where(count > 0.0, count, 1.0)
              for name, (total, count) in result.ratios.items()
            },
            **_named('gradient of', trainable, gradients),
            **_named('weights of', trainable, trainable),
          },
        )
      ratios = {
        name: (total + result.ratios[name][0], count + result.ratios[name][1])
        for name, (total, count) in ratios.items()
      }
      if algorithm.labeled:
        num_examples += tf.reduce_sum(batch.label_weights)
      if algorithm.views:
        size = tf.cast(tf.size(batch.hidden_labels), tf.float32)
        num_examples += size * prepared.constants['unlabeled_weight']

    update = [
      start - v
      for start, v in zip(weights.trainable, network.trainable_variables)
    ]
    is_finite = adapter.all_finite(update)
    if watch is not None:
      watch(num_steps, _named('update of', trainable, update))
    return LocalResult(
      adapter.zero_unless(is_finite, tuple(update)),
      adapter.select(
        is_finite,
        tuple(v.read_value() for v in network.non_trainable_variables),
        lambda: tuple(weights.non_trainable),
      ),
      is_finite,
      num_examples,
      prepared.weight,
      {**prepared.ratios, **ratios},
      dict(prepared.ranges),
      adapter.select(
        is_finite,
        tuple(slot.read_value() for slot in self._slots),
        lambda: before,
      )
      if config.keeps_momentum
      else (),
    )
