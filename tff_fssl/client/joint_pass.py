"""One forward pass over all views of a batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from tff_fssl.algorithms import base
from tff_fssl.lazy import tf
from tff_fssl.models import adapter

# (network inputs, weights of the examples) -> outputs, float32 [B, D].
_Call: TypeAlias = 'Callable[[tf.Tensor, tf.Tensor], tf.Tensor]'


def logits(network: adapter.Network, batch: base.Batch) -> list[tf.Tensor]:
  """Predicts all views at once in training mode: see `outputs`."""
  return outputs(
    lambda images, weights: network.logits(
      images, training=True, weights=weights
    ),
    batch,
  )


def outputs(call: _Call, batch: base.Batch) -> list[tf.Tensor]:
  """Computes outputs of all views at once, so that batch norm sees them all.

  Args:
    call: Computes the outputs of the network that is trained.
    batch: The batch, whose unlabelled examples have weak and strong views.

  Returns:
    Outputs, float32 [B, D], of weak views and of strong views. With labels at
    the clients, those of labelled examples follow.
  """
  rows = [(batch.unlabeled, 'weak'), (batch.unlabeled, 'strong')]
  if base.LABELED not in batch.streams:
    return _call(call, rows)
  labeled = batch.labeled

  def leave_out_labeled() -> list[tf.Tensor]:
    results = _call(call, rows)
    shape = [tf.size(labeled.labels), results[0].shape[-1]]
    return [*results, tf.zeros(shape)]

  # Batch norm must not see the filler of a client without labels.
  results: list[tf.Tensor] = tf.cond(
    labeled.size > 0.0,
    lambda: _call(call, [*rows, (labeled, 'weak')]),
    leave_out_labeled,
  )
  return results


def _call(
  call: _Call, rows: Sequence[tuple[base.BatchExamples, str]]
) -> list[tf.Tensor]:
  """Computes outputs of several views as one batch."""
  images = [examples.views[view] for examples, view in rows]
  weights = [examples.weights for examples, _ in rows]
  results = call(tf.concat(images, 0), tf.concat(weights, 0))
  return list(tf.split(results, [tf.size(weight) for weight in weights]))
