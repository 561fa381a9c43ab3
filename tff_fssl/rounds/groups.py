"""Groups of a round's clients, whose updates are combined apart."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from tff_fssl.lazy import tf
from tff_fssl.models import server_model
from tff_fssl.models.weights import Weights


class Place(NamedTuple):
  """Where a client belongs in a round.

  Attributes:
    group: int32 scalar, in [0, `Groups.num_groups`).
    start: int32 scalar, in [0, `Groups.num_starts`).
  """

  group: tf.Tensor
  start: tf.Tensor


class ByGroup(NamedTuple):
  """The combined updates of each of several groups of clients.

  Attributes:
    update: Like `Aggregate.update`, with one dimension more, the first: the
      groups. 0 for a group without a usable update.
    sizes: float32 [groups], the numbers of usable updates.
    starts: float32 [groups, rows], the share of a group's weight that started
      from each row of `Groups.starts`; 0 for a group without a usable update.
  """

  update: tuple[tf.Tensor, ...]
  sizes: tf.Tensor
  starts: tf.Tensor


class Groups(NamedTuple):
  """The groups of an algorithm.

  A client receives, instead of the model, one row of `starts`, and its update
  is added to those of its group alone. Without TFF's `federated_select`, which
  MapReduceForm and TFF's worker do not have, all rows are broadcast and a
  client gathers its own.

  Attributes:
    num_groups: The number of groups.
    num_starts: The number of rows.
    starts: The model -> `Weights` whose tensors have one dimension
      more, the first: the rows.
    place: (slot int32 scalar, seed int32 [2]) -> the client's place. The slot
      is its position in the cohort, in an order drawn for the round.
    needs_slots: Whether `place` uses the slot; if not, it is 0.
  """

  num_groups: int
  num_starts: int
  starts: Callable[[server_model.ServerModel], Weights]
  place: Callable[[tf.Tensor, tf.Tensor], Place]
  needs_slots: bool = True

  def place_of(self, data: Mapping[str, Any]) -> Place:
    """The place of the client with these data."""
    return self.place(data.get('slot', tf.constant(0)), data['seed'])


def is_possible(groups: Groups, place: tf.Tensor) -> tf.Tensor:
  """Whether a client can be at this place, float32 [2]; NaN never is."""
  most = tf.constant([groups.num_groups, groups.num_starts], tf.float32)
  is_whole = tf.equal(place, tf.floor(place))
  return tf.reduce_all((place >= 0.0) & (place < most) & is_whole)
