"""Everything that travels between the server and the clients of a round.

Each value is a named channel, declared once. Screening, combining, byte counts,
and the rules of secure sums and differential privacy are loops over channels.
A value without a channel cannot travel.

In TFF's types, `V@CLIENTS` is one value of type V at each client, and
`V@SERVER` is one value at the server.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

from tff_fssl.lazy import tf

# How the server combines what clients upload.
# By the aggregator, in one value with the model's change: clipped, noised,
# compressed or summed securely together with it.
AVERAGE = 'average'
# By a plain mean over the clients that report. Never released.
REPORT = 'report'
# Not at all: the server keeps each client's value in a `RowTable`.
ROWS = 'rows'
# A metric, summed as (total, count). Released as total / count.
METRIC = 'metric'
# A metric, released as minimum, mean and maximum over clients.
RANGE = 'range'

# Kinds that leave a client outside of the aggregator's sum.
_UNPROTECTED = (REPORT, ROWS, METRIC, RANGE)
# float32 can hold sums of squares of entries up to this size.
MAX_ENTRY = 1e12

_ByName: TypeAlias = 'collections.OrderedDict[str, Any]'


class Upload(NamedTuple):
  """Declares a value that each client sends in addition to changes.

  The declaration needs no TensorFlow, so that flags which cannot work together
  are refused before it is imported.

  Attributes:
    combine: AVERAGE, REPORT or ROWS.
    meaning: A noun phrase for it. The algorithm's page and `--help`
      list it.
    shape: Sizes, as numbers or by name: `classes`, `outputs` (the width of the
      network's last layer), `weights` (elements of all trainable weights).
    dtype: The element type.
    low: The least entry that an honest client can send.
    high: The greatest entry; a function gets the sizes by name.
    keyed: Of rows: whether the server tells clients apart by their ids, so that
      no cross-device deployment can run the algorithm.
    counted: Whether it counts in the bytes of a round; see `Broadcast`.
    avoided_by: 'field=value', the hyper-parameter without which nothing of
      this kind is sent. Refusals name it.
  """

  combine: str
  meaning: str
  shape: tuple[int | str, ...] = ()
  dtype: str = 'float32'
  low: float = -MAX_ENTRY
  high: float | Callable[[Mapping[str, int]], float] = MAX_ENTRY
  keyed: bool = False
  counted: bool = True
  avoided_by: str = ''


class ClientKey(NamedTuple):
  """Tells the clients of a round apart.

  Attributes:
    client_id: int32 scalar; -1 if no upload is keyed.
    slot: int32 scalar, the position in the cohort; 0 unless
      `Algorithm.needs_slot`.
    seed: int32 [2], another one for each client and round.
  """

  client_id: tf.Tensor
  slot: tf.Tensor
  seed: tf.Tensor


class Broadcast(NamedTuple):
  """A value that clients receive in addition to the model.

  Attributes:
    value: A network's `Weights`, a tensor, or any structure of tensors.
    when: bool scalar, whether it is sent in this round; None: always. It
      travels as a sequence of one element or of none, so that a value that is
      not sent costs nothing.
    pick: (value, `ClientKey`) -> the parts that a client uses, by name, which
      replace this name in `Client.received`. The value is then a table of which
      a deployment sends each client these parts alone, and only they count.
    own_statistics: Whether it is a network whose static batch norm statistics
      are gathered at the end of a round after which it is sent.
    counted: Whether it counts in the bytes of a round. A simulation also moves
      what a real client keeps on its own disk; that does not count.
  """

  value: Any
  when: tf.Tensor | None = None
  pick: Callable[[Any, ClientKey], Mapping[str, Any]] | None = None
  own_statistics: bool = False
  counted: bool = True
