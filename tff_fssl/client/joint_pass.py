"""One forward pass over all views of a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from tff_fssl.interface import base
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
  examples = batch.unlabeled
  groups = [
    (
      tf.concat([examples.views['weak'], examples.views['strong']], 0),
      tf.concat([examples.weights] * 2, 0),
    )
  ]
  if base.LABELED in batch.streams:
    groups.append((batch.labeled.views['weak'], batch.labeled.weights))
  unlabeled, *labeled = skip_fillers(call, *groups)
  return [*tf.split(unlabeled, 2), *labeled]


def skip_fillers(
  call: _Call, *groups: tuple[tf.Tensor, tf.Tensor]
) -> list[tf.Tensor]:
  """Computes outputs of examples at once, so that batch norm sees no filler.

  Args:
    call: Computes the outputs.
    *groups: One or two groups of (the network's inputs, float32 [B, ...], and
      the examples' weights, float32 [B]). Each group holds fillers alone, or
      none. One of the groups holds none.

  Returns:
    The outputs of each group, float32 [B, D], 0 for fillers.
  """
  images = [images for images, _ in groups]
  sizes = [tf.size(weights) for _, weights in groups]
  if len(groups) == 1:
    return [call(images[0])]

  def call_with(*kept: int) -> tf.Tensor:
    return call(tf.concat([images[i] for i in kept], 0))

  first, second = (tf.reduce_any(weights > 0.0) for _, weights in groups)
  results = tf.cond(
    second,
    lambda: tf.cond(
      first,
      lambda: call_with(0, 1),
      lambda: tf.pad(call_with(1), [[sizes[0], 0], [0, 0]]),
    ),
    lambda: tf.pad(call_with(0), [[0, sizes[1]], [0, 0]]),
  )
  return list(tf.split(results, sizes))
