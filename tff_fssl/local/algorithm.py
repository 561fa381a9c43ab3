"""The interface between an algorithm and local training."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tff_fssl.data import augment
from tff_fssl.models import adapter

# A metric that is a mean: (sum, count), both float32 scalars.
Ratio = tuple[tf.Tensor, tf.Tensor]


def ratio(total: tf.Tensor, count: tf.Tensor) -> Ratio:
  """A metric as the pair that is summed over batches and clients."""
  return (tf.cast(total, tf.float32), tf.cast(count, tf.float32))


def mean_metric(mean: tf.Tensor, size: tf.Tensor) -> Ratio:
  """A batch's mean (a loss) as a metric weighted by the batch's size."""
  size = tf.cast(size, tf.float32)
  return (tf.cast(mean, tf.float32) * size, size)


class Examples(NamedTuple):
  """Examples as a client holds them.

  Attributes:
    x: [N, ...] in its stored dtype (images: uint8 [N, H, W, C]).
    y: int32 [N]. For unlabelled examples, the hidden label, or -1 if it is
      unknown: for diagnostics only, never for training.
  """

  x: tf.Tensor
  y: tf.Tensor


class Prepared(NamedTuple):
  """Values that an algorithm computes from a client's data before training.

  Attributes:
    selected: int32 [M], indices of the unlabelled examples to train on.
    of_example: Name -> [N, ...], a value for each unlabelled example, which
      goes with it into batches (pseudo-labels, masks).
    constants: Name -> tensor, values that every batch contains.
    ratios: Name -> metric of the round, a mean over examples.
    ranges: Name -> float32 scalar in [0, 1] (thresholds, shares), reported as
      min, mean and max over clients; other values get the client rejected.
    weight: float32 scalar in [0, 1], the weight of the update in the
      aggregation, if the algorithm `weighs`; None: `client_weighting` decides.
  """

  selected: tf.Tensor
  of_example: Mapping[str, tf.Tensor] = {}
  constants: Mapping[str, tf.Tensor] = {}
  ratios: Mapping[str, Ratio] = {}
  ranges: Mapping[str, tf.Tensor] = {}
  weight: tf.Tensor | None = None


class Batch(NamedTuple):
  """The input of a training step.

  Attributes:
    labeled: Preprocessed labelled images float32 [L, ...], or None if the
      algorithm does not train on labels here.
    labels: int32 [L], or None.
    label_weights: float32 [L], or None. 1, but 0 for the filler that a client
      without labels gets.
    views: Name of view -> preprocessed unlabelled images float32 [U, ...].
    hidden_labels: int32 [U], for diagnostics only; or None.
    of_example: `Prepared.of_example` for these unlabelled examples.
    constants: `Prepared.constants`.
  """

  labeled: tf.Tensor | None
  labels: tf.Tensor | None
  label_weights: tf.Tensor | None
  views: Mapping[str, tf.Tensor]
  hidden_labels: tf.Tensor | None
  of_example: Mapping[str, tf.Tensor]
  constants: Mapping[str, tf.Tensor]


class StepResult(NamedTuple):
  """The result of a training step.

  Attributes:
    gradients: Gradients of the minimized loss, one per trainable variable.
    ratios: Name -> metric of the batch.
  """

  gradients: Sequence[tf.Tensor]
  ratios: Mapping[str, Ratio]


class LocalAlgorithm(NamedTuple):
  """The local part of an algorithm, as pure functions.

  Attributes:
    prepare: (network, weights, unlabeled Examples, views, seed) -> Prepared;
      called once a round. None: all examples are selected, nothing is computed.
    step: (network, Batch) -> StepResult. Must leave the network's weights as
      they were; the loop clips and applies the gradients.
    step_ratios: The names of the metrics that a step returns.
    views: The views of unlabelled examples in a batch, of `weak` and `strong`;
      empty: the algorithm trains on labels only.
    labeled: Whether a batch has labelled examples (weakly augmented).
    weighs: Whether `prepare` sets the weight of the update.
  """

  step: Callable[[adapter.Network, Batch], StepResult]
  step_ratios: tuple[str, ...]
  prepare: (
    Callable[
      [adapter.Network, adapter.Weights, Examples, augment.Views, Any],
      Prepared,
    ]
    | None
  ) = None
  views: tuple[str, ...] = ()
  labeled: bool = False
  weighs: bool = False
