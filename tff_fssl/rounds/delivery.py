"""The weights that travel between server and clients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tff_fssl.interface import groups as groups_lib
from tff_fssl.lazy import tf
from tff_fssl.models import server_model
from tff_fssl.models.weights import Weights


class Delivery(NamedTuple):
  """The weights that travel, by default those of the model.

  Attributes:
    groups: The groups of clients, if there are any. Each client starts from a
      row.
    kept: Index among the trainable weights -> `tf.TensorSpec` of each that
      stays at the server. Clients have zeros instead.
  """

  groups: groups_lib.Groups | None = None
  kept: Mapping[int, tf.TensorSpec] = {}

  @property
  def kept_bytes(self) -> int:
    """Computes the bytes of the weights that stay at the server."""
    return sum(
      s.shape.num_elements() * s.dtype.size for s in self.kept.values()
    )

  def select_model(self, model: server_model.ServerModel) -> Weights:
    """Selects the weights of a model that are sent."""
    weights = model.weights
    if self.groups is not None:
      weights = self.groups.starts(model)
    return self.select_weights(weights)

  def select_weights(self, weights: Weights) -> Weights:
    """Selects the sent part of any weights of the network."""
    return weights._replace(trainable=self.select_update(weights.trainable))

  def select_update(self, update: Sequence[tf.Tensor]) -> tuple[tf.Tensor, ...]:
    """Selects the sent part of an update, or of a list that begins like one."""
    return tuple(t for i, t in enumerate(update) if i not in self.kept)

  def restored(self, update: Sequence[tf.Tensor]) -> tuple[tf.Tensor, ...]:
    """Inserts zeros into an update for the weights that were not sent."""
    full = list(update)
    # In ascending order, each index is right when its tensor is inserted.
    for index, spec in sorted(self.kept.items()):
      full.insert(index, tf.zeros(spec.shape, spec.dtype))
    return tuple(full)

  def received(self, sent: Weights, start: tf.Tensor | None = None) -> Weights:
    """Makes the weights that a client starts from.

    Args:
      sent: The weights that were sent.
      start: With groups, the index of the client's row, int32 scalar.

    Returns:
      The weights.
    """
    weights = Weights(
      self.restored(sent.trainable),
      tuple(sent.non_trainable),
      sent.statistics_count,
    )
    if start is None:
      return weights
    # All rows were sent, and the client selects its own.
    row: Weights = tf.nest.map_structure(lambda t: t[start], weights)
    return row
