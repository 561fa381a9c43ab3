"""What an algorithm gives to local training: three pure pieces."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tff_fssl.data import augment
from tff_fssl.models import adapter

# A metric that is a mean: (sum, count), both float32 scalars.
Ratio = tuple[tf.Tensor, tf.Tensor]


def ratio(total: tf.Tensor, count: tf.Tensor) -> Ratio:
  """A metric as the pair whose sums over batches and clients give its mean."""
  return (tf.cast(total, tf.float32), tf.cast(count, tf.float32))


def mean_metric(mean: tf.Tensor, size: tf.Tensor) -> Ratio:
  """A batch's mean (a loss) as a metric weighted by the batch's size."""
  size = tf.cast(size, tf.float32)
  return (tf.cast(mean, tf.float32) * size, size)


class Examples(NamedTuple):
  """Examples as a client holds them.

  Attributes:
    x: [N, ...] in its stored dtype (images: uint8 [N, H, W, C]).
    y: int32 [N]; of unlabelled examples the hidden label, or -1: for
      diagnostics only, never for training.
  """

  x: tf.Tensor
  y: tf.Tensor


class Prepared(NamedTuple):
  """What an algorithm made of a client's data before the first batch.

  Attributes:
    selected: int32 [M], which unlabelled examples are trained on.
    of_example: Name -> [N, ...], values that go along with the unlabelled
      examples into their batches (pseudo-labels, masks).
    constants: Name -> tensor, values that every batch sees.
    ratios: Name -> metric of the round, a mean over examples.
    ranges: Name -> float32 scalar in [0, 1] (thresholds, shares), reported as
      min, mean, max over clients; other values get the client rejected.
    weight: float32 scalar in [0, 1], what the update weighs in the aggregation,
      if the algorithm `weighs`; None: by `client_weighting`.
  """

  selected: tf.Tensor
  of_example: Mapping[str, tf.Tensor] = {}
  constants: Mapping[str, tf.Tensor] = {}
  ratios: Mapping[str, Ratio] = {}
  ranges: Mapping[str, tf.Tensor] = {}
  weight: tf.Tensor | None = None


class Batch(NamedTuple):
  """What a step sees.

  Attributes:
    labeled: Preprocessed labelled images float32 [L, ...], or None if the
      algorithm does not train on labels here.
    labels: int32 [L], or None.
    label_weights: float32 [L], 1, or 0 for the filler of a client without
      labels; or None.
    views: Name of view -> preprocessed unlabelled images float32 [U, ...].
    hidden_labels: int32 [U], for diagnostics only; or None.
    of_example: `Prepared.of_example` of these unlabelled examples.
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
  """A step's outcome.

  Attributes:
    gradients: One per trainable variable, of the loss that is minimized.
    ratios: Name -> metric of the batch.
  """

  gradients: Sequence[tf.Tensor]
  ratios: Mapping[str, Ratio]


class LocalAlgorithm(NamedTuple):
  """An algorithm's local work.

  Attributes:
    prepare: (network, weights, unlabeled Examples, views, seed) -> Prepared;
      once a round. None: all examples, nothing else.
    step: (network, Batch) -> StepResult. Leaves the network's weights as they
      were; the loop clips and applies the gradients.
    step_ratios: The names of the metrics that a step gives.
    views: Which views of unlabelled examples a step sees, of `weak`, `strong`;
      empty: it trains on labels alone.
    labeled: Whether a step sees labelled examples (weakly augmented).
    weighs: Whether `prepare` says what the update weighs.
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
