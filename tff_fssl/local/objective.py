"""Objectives that are sums of terms, each minimized by one gradient step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeAlias

from tff_fssl.lazy import tf
from tff_fssl.local import algorithm as algorithm_lib
from tff_fssl.models import adapter
from tff_fssl.semisup import losses

# The streams that the terms of this package use.
LABELED, UNLABELED = 'labeled', 'unlabeled'

# (float32 scalar, weight included; name -> metric).
Loss: TypeAlias = 'tuple[tf.Tensor, Mapping[str, algorithm_lib.Ratio]]'


class Term(NamedTuple):
  """A term of an objective.

  Attributes:
    loss: (network, batch) -> `Loss`, differentiated with respect to the
      network's weights.
    ratios: The names of its metrics.
    streams: The streams that it uses; the same name in two terms is the same
      stream.
  """

  loss: Callable[[adapter.Network, algorithm_lib.Batch], Loss]
  ratios: tuple[str, ...]
  streams: Mapping[str, algorithm_lib.Stream]


def minimize(*terms: Term) -> algorithm_lib.LocalAlgorithm:
  """The local algorithm that makes a step on the sum of the terms."""

  def step(
    networks: algorithm_lib.Networks, batch: algorithm_lib.Batch
  ) -> algorithm_lib.StepResult:
    network = networks.local
    ratios: dict[str, algorithm_lib.Ratio] = {}
    with tf.GradientTape() as tape:
      total = None
      for term in terms:
        loss, of_term = term.loss(network, batch)
        total = loss if total is None else total + loss
        ratios.update(of_term)
    return algorithm_lib.StepResult(network.gradients(tape, total), ratios)

  streams: dict[str, algorithm_lib.Stream] = {}
  for term in terms:
    for name, stream in term.streams.items():
      views = {**streams.get(name, stream).views, **stream.views}
      streams[name] = stream._replace(views=views)
  return algorithm_lib.LocalAlgorithm(
    steps=(step,),
    streams=streams,
  )


def plus(
  algorithm: algorithm_lib.LocalAlgorithm, term: Term
) -> algorithm_lib.LocalAlgorithm:
  """The algorithm, in whose first step the loss has one term more."""
  first, *others = algorithm.steps
  (alone,) = minimize(term).steps

  def step(
    networks: algorithm_lib.Networks, batch: algorithm_lib.Batch
  ) -> algorithm_lib.StepResult:
    result, added = first(networks, batch), alone(networks, batch)
    assert result.gradients is not None and added.gradients is not None
    gradients = [
      a + b for a, b in zip(result.gradients, added.gradients, strict=True)
    ]
    return result._replace(
      gradients=gradients, ratios={**result.ratios, **added.ratios}
    )

  return algorithm._replace(
    steps=(step, *others),
    streams={**algorithm.streams, **term.streams},
  )


def training_logits(
  network: adapter.Network, part: algorithm_lib.Part, view: str
) -> tf.Tensor:
  """Logits, float32 [B, C], of a view in training; fillers leave no trace."""
  return network.logits(part.views[view], training=True, weights=part.weights)


def in_turn(
  *algorithms: algorithm_lib.LocalAlgorithm,
) -> algorithm_lib.LocalAlgorithm:
  """Makes the steps of several algorithms one after another on each batch."""
  streams: dict[str, algorithm_lib.Stream] = {}
  peers: dict[str, algorithm_lib.Peer] = {}
  for algorithm in algorithms:
    streams |= algorithm.streams
    peers |= algorithm.peers
  return algorithm_lib.LocalAlgorithm(
    steps=tuple(step for a in algorithms for step in a.steps),
    streams=streams,
    peers=peers,
  )


def supervised() -> Term:
  """The mean cross-entropy of labelled examples (weak view)."""

  def loss(network: adapter.Network, batch: algorithm_lib.Batch) -> Loss:
    part = batch.parts[LABELED]
    logits = training_logits(network, part, 'weak')
    return labeled_loss(logits, part)

  return Term(
    loss,
    LABELED_RATIOS,
    {LABELED: algorithm_lib.Stream({'weak': 'weak'}, labeled=True)},
  )


LABELED_RATIOS = ('loss_labeled', 'labeled_accuracy')


def labeled_loss(
  logits: tf.Tensor, part: algorithm_lib.Part
) -> tuple[tf.Tensor, dict[str, algorithm_lib.Ratio]]:
  """The mean cross-entropy of labelled examples; loss and accuracy metrics."""
  loss = losses.masked_mean(
    losses.cross_entropy(part.labels, logits), part.weights
  )
  correct = tf.cast(
    tf.equal(tf.argmax(logits, -1, tf.int32), part.labels), tf.float32
  )
  size = tf.reduce_sum(part.weights)
  return loss, {
    'loss_labeled': algorithm_lib.mean_metric(loss, size),
    'labeled_accuracy': (tf.reduce_sum(correct * part.weights), size),
  }


SUPERVISED = minimize(supervised())
