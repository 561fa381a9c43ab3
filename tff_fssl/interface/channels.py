"""Values that travel between server and clients, declared by name."""

from __future__ import annotations

import collections
from collections.abc import Mapping
import dataclasses
import math
from typing import Any, NamedTuple

from tff_fssl.lazy import tf

# The channels of a client's update that the machinery adds to those of an
# algorithm: the change of the model, and the client's place among groups.
MODEL = 'model'
PLACE = 'place'
# What the server gets of an upload: see `Upload.how`.
MEAN, SUM, ROWS = 'mean', 'sum', 'rows'


def sort_by_name(
  values: Mapping[str, Any],
) -> collections.OrderedDict[str, Any]:
  """Orders the values that the aggregator combines, by the names of channels.

  TFF keeps the order of insertion, and `tf.nest` sorts names. Norms, clipping
  factors and noise depend on the order, so both must be the same.
  """
  return collections.OrderedDict(sorted(values.items()))


class Upload(NamedTuple):
  """A value that each client sends in addition to changes.

  The server finds in `Aggregate`, by name, what `how` says. A client with an
  entry outside of the limits is rejected. Uploads are not released as metrics.
  Those that are not SUM leave clients outside of the aggregator's sum, so that
  `secure` and `dp` refuse algorithms that declare some.

  Attributes:
    low: The least entry that an honest client can send.
    high: The greatest one.
    how: MEAN: the mean over the clients that report, of float32 tensors. SUM:
      what the aggregator makes of float32 tensors together with the changes,
      NaN if no client's weight was positive. ROWS: the tensors of the n clients
      that report, one by one, [n, ...].
    spec: The type of a client's tensor. None: a float32 scalar.
    is_known: Whether the server knows it already, from the changes, so that the
      figures of bytes do not contain it.
  """

  low: float = -math.inf
  high: float = math.inf
  how: str = MEAN
  spec: tf.TensorSpec | None = None
  is_known: bool = False


def sent_as(uploads: Mapping[str, Upload], how: str) -> dict[str, Upload]:
  """Selects the uploads of one kind."""
  return {name: u for name, u in uploads.items() if u.how == how}


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
