"""One pass over all views of a batch, so that batch norm sees them together."""

from __future__ import annotations

from collections.abc import Sequence

from tff_fssl.algorithms import base
from tff_fssl.lazy import tf
from tff_fssl.models import adapter


def logits(network: adapter.Network, batch: base.Batch) -> list[tf.Tensor]:
  """Predicts all views in one pass, so that batch norm sees them together.

  Args:
    network: The network that is trained.
    batch: The batch.

  Returns:
    Logits, float32 [B, C], of weak views and of strong views. With labels at
    the clients, those of labelled examples follow.
  """
  rows = [(batch.unlabeled, 'weak'), (batch.unlabeled, 'strong')]
  if base.LABELED not in batch.streams:
    return _predict(network, rows)
  labeled = batch.labeled

  def leave_out_labeled() -> list[tf.Tensor]:
    found = _predict(network, rows)
    shape = [tf.size(labeled.labels), found[0].shape[-1]]
    return [*found, tf.zeros(shape)]

  # Batch norm must not see the filler of a client without labels.
  result: list[tf.Tensor] = tf.cond(
    labeled.size > 0.0,
    lambda: _predict(network, [*rows, (labeled, 'weak')]),
    leave_out_labeled,
  )
  return result


def _predict(
  network: adapter.Network, rows: Sequence[tuple[base.BatchExamples, str]]
) -> list[tf.Tensor]:
  """Computes logits of several views as one batch in training mode."""
  images = [examples.views[view] for examples, view in rows]
  weights = [examples.weights for examples, _ in rows]
  found = network.logits(
    tf.concat(images, 0), training=True, weights=tf.concat(weights, 0)
  )
  return list(tf.split(found, [tf.size(weight) for weight in weights]))
