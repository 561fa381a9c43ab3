"""Groups of a round's clients, whose updates are combined separately."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from tff_fssl.lazy import tf
from tff_fssl.models import server_model
from tff_fssl.models.weights import Weights


class Place(NamedTuple):
  """A client's place in a round.

  Attributes:
    group: int32 scalar, in [0, `Groups.num_groups`).
    start: int32 scalar, in [0, `Groups.num_starts`).
  """

  group: tf.Tensor
  start: tf.Tensor


class ByGroup(NamedTuple):
  """The combined updates of each of several groups of clients.

  Attributes:
    update: `Aggregate.update` with a further first dimension, the groups. 0 for
      a group without a usable update.
    sizes: float32 [groups], the numbers of usable updates.
    starts: float32 [groups, rows], the share of a group's weight that started
      from each row of `Groups.starts`. 0 for a group without a usable update.
  """

  update: tuple[tf.Tensor, ...]
  sizes: tf.Tensor
  starts: tf.Tensor


class Groups(NamedTuple):
  """The groups of an algorithm.

  A client receives one row of `starts` instead of the model. Its update is
  combined only with those of its group. MapReduceForm and TFF's worker do not
  have TFF's `federated_select`, so all rows are broadcast and a client gathers
  its own.

  Attributes:
    num_groups: The number of groups.
    num_starts: The number of rows.
    starts: The model -> `Weights` whose tensors have a further first dimension,
      the rows.
    place: (slot int32 scalar, seed int32 [2]) -> the client's place. The slot
      is the client's position in the cohort, in an order drawn for the round.
    needs_slots: Whether `place` uses the slot. If not, the slot is 0.
  """

  num_groups: int
  num_starts: int
  starts: Callable[[server_model.ServerModel], Weights]
  place: Callable[[tf.Tensor, tf.Tensor], Place]
  needs_slots: bool = True

  def place_of(self, data: Mapping[str, Any]) -> Place:
    """Returns the place of the client with these data."""
    return self.place(data.get('slot', tf.constant(0)), data['seed'])


def is_possible(groups: Groups, place: tf.Tensor) -> tf.Tensor:
  """Tells whether a client can be at this place, float32 [2], perhaps NaN."""
  most = tf.constant([groups.num_groups, groups.num_starts], tf.float32)
  # A place is a part of the update, so it consists of floats.
  is_whole = tf.equal(place, tf.floor(place))
  return tf.reduce_all((place >= 0.0) & (place < most) & is_whole)
