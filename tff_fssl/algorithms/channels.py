"""Values that travel between server and clients, declared by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from tff_fssl.lazy import tf


class Upload(NamedTuple):
  """Declares a number that each client reports in addition to changes.

  The server gets the mean over the clients whose numbers are within the limits;
  the others are rejected. Numbers are not released as metrics. They leave
  clients outside of the aggregator's sum, so that `secure` and `dp` refuse
  algorithms that declare some.

  Attributes:
    low: The least number that an honest client can send.
    high: The greatest one; a function gets the number of `classes` by name.
  """

  low: float
  high: float | Callable[[Mapping[str, int]], float]

  def limits(self, num_classes: int) -> tuple[float, float]:
    """Returns the least and the greatest possible value."""
    if callable(self.high):
      return self.low, self.high({'classes': num_classes})
    return self.low, self.high


class Broadcast(NamedTuple):
  """A value that clients receive in addition to the model.

  Attributes:
    value: A network's `Weights`, a tensor, or any structure of tensors.
    when: bool scalar, whether it is sent in this round; None: always. It
      travels as a sequence of one element or of none, so that a value that is
      not sent costs nothing.
    own_statistics: Whether it is a network whose static batch norm statistics
      are gathered at the end of a round after which it is sent.
  """

  value: Any
  when: tf.Tensor | None = None
  own_statistics: bool = False
