"""One forward pass over all views of a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from tff_fssl.algorithms import base
from tff_fssl.lazy import tf
from tff_fssl.models import adapter

# Network inputs -> outputs, float32 [B, D].
_Call: TypeAlias = 'Callable[[tf.Tensor], tf.Tensor]'


def logits(network: adapter.Network, batch: base.Batch) -> list[tf.Tensor]:
  """Predicts all views at once in training mode: see `outputs`."""
  return outputs(lambda images: network.logits(images, training=True), batch)


def outputs(call: _Call, batch: base.Batch) -> list[tf.Tensor]:
  """Computes outputs of all views at once, so that batch norm sees them all.

  Args:
    call: Computes the outputs of the network that is trained.
    batch: The batch, whose unlabelled examples have weak and strong views.

  Returns:
    Outputs, float32 [B, D], of weak views and of strong views. With labels at
    the clients, those of labelled examples follow. Those of fillers are 0.
  """
  rows = [(batch.unlabeled, 'weak'), (batch.unlabeled, 'strong')]
  if base.LABELED in batch.streams:
    rows.append((batch.labeled, 'weak'))
  weights = [examples.weights for examples, _ in rows]
  results = without_fillers(
    call,
    tf.concat([examples.views[view] for examples, view in rows], 0),
    tf.concat(weights, 0),
  )
  return list(tf.split(results, [tf.size(w) for w in weights]))


def without_fillers(
  call: _Call, images: tf.Tensor, weights: tf.Tensor
) -> tf.Tensor:
  """Computes outputs of examples, so that batch norm sees no filler.

  Args:
    call: Computes the outputs.
    images: float32 [B, ...], the network's inputs.
    weights: float32 [B], 0 for fillers. Not all may be 0.

  Returns:
    Outputs, float32 [B, D], 0 for fillers.
  """
  kept = weights > 0.0

  def leave_out() -> tf.Tensor:
    results = call(tf.boolean_mask(images, kept))
    shape = tf.stack([tf.size(weights), tf.shape(results)[1]])
    return tf.scatter_nd(tf.where(kept), results, tf.cast(shape, tf.int64))

  results: tf.Tensor = tf.cond(
    tf.reduce_all(kept), lambda: call(images), leave_out
  )
  return results
