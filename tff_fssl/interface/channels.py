"""Values that travel between server and clients, declared by name."""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping
import dataclasses
from typing import Any, NamedTuple

from tff_fssl.lazy import tf

# The channels of a client's update that the machinery adds to those of an
# algorithm: the change of the model, and the client's place among groups.
MODEL = 'model'
PLACE = 'place'


def sort_by_name(
  values: Mapping[str, Any],
) -> collections.OrderedDict[str, Any]:
  """Orders the values that the aggregator combines, by the names of channels.

  TFF keeps the order of insertion, and `tf.nest` sorts names. Norms, clipping
  factors and noise depend on the order, so both must be the same.
  """
  return collections.OrderedDict(sorted(values.items()))


class Upload(NamedTuple):
  """A number that each client reports in addition to changes.

  The server gets the mean over clients. A client with a number outside of the
  limits is rejected. Numbers are not released as metrics. They leave clients
  outside of the aggregator's sum, so that `secure` and `dp` refuse algorithms
  that declare some.

  Attributes:
    low: The least number that an honest client can send.
    high: The greatest such number, or a function that computes it from
      {'classes': number of classes}.
  """

  low: float
  high: float | Callable[[Mapping[str, int]], float]

  def limits(self, num_classes: int) -> tuple[float, float]:
    """Returns the least and the greatest possible value."""
    # Algorithms are declared before the number of classes is known.
    if callable(self.high):
      return self.low, self.high({'classes': num_classes})
    return self.low, self.high


@dataclasses.dataclass(frozen=True, kw_only=True)
class Broadcast:
  """A field of the server's memory that clients receive besides the model.

  The field holds a network's `Weights`, a tensor, or any structure of tensors.

  Attributes:
    when: bool scalar, whether it is sent in this round. None sends it always.
      It travels as a sequence of at most one element, so that a value that is
      not sent costs nothing.
    own_statistics: Whether it is a network whose static batch norm statistics
      are gathered at the end of a round after which it is sent.
  """

  when: tf.Tensor | None = None
  own_statistics: bool = False
