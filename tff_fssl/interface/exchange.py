"""The exchange: a table at the server, with a row for each client.

Each round, clients receive values from it, and upload rows that change it. What
is not kept for single clients is the server's memory instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from tff_fssl.interface import setup as setup_lib
from tff_fssl.lazy import np, tf
from tff_fssl.models import server_model

ServerModel = server_model.ServerModel
# TensorFlow's messages, and so values between computations, are limited to 2
# GB. A table must be smaller.
MAX_TABLE_BYTES = 1.5e9


class Rows(NamedTuple):
  """The rows that the n clients of a round have uploaded for the exchange.

  Attributes:
    client_id: int32 [n], in [0, num_clients), each at most once.
    values: Name -> [n, ...].
  """

  client_id: tf.Tensor
  values: Mapping[str, tf.Tensor]


# (client id, round) -> the row that the client uploaded in it, name -> array.
ReadRow: TypeAlias = 'Callable[[int, int], Mapping[str, np.ndarray[Any, Any]]]'
WriteRow: TypeAlias = (
  'Callable[[int, int, Mapping[str, np.ndarray[Any, Any]]], None]'
)


class Outside(NamedTuple):
  """The storage of large rows outside of the table, between rounds.

  Both functions run outside of TFF's computations. Tables hold NumPy arrays,
  except for the result of `bring`, which holds tensors.

  Attributes:
    bring: (table, ids of the round's clients, round number, read) -> the table
      with the rows that the round needs. Each is read once.
    take: (table after the round, write) -> the table without rows. It writes
      the rows of the round's clients.
  """

  bring: Callable[[Any, Sequence[int], int, ReadRow], Any]
  take: Callable[[Any, WriteRow], Any]


class Exchange(NamedTuple):
  """A table of clients that the server keeps.

  All functions are pure, and are called inside TFF's computations. The table is
  part of the process's state.

  Attributes:
    initialize: () -> the table, any structure of tensors.
    message: (table, model, round number) -> the value that all clients receive.
    receive: (message, client id) -> name -> tensor, the values that the client
      uses. Here a client picks its own rows.
    row_specs: Name -> `tf.TensorSpec` of each value in a client's row. These
      are the `ClientOutput.uploads` that the algorithm does not declare as
      `uploads`.
    accept: (table, rows, model after the round, round number) -> the table.
    num_clients: The number of clients, which the table knows by their ids.
    is_clients_own: Whether the table stands for values on the clients' own
      disks. In a deployment none of it travels, so no bytes are counted.
    is_possible: (name -> tensor, a row) -> bool scalar, whether an honest
      client can have sent it. If not, the client is rejected as a whole. The
      bound on numbers is checked in any case. None: nothing else is checked.
    not_counted: Names of values, in `receive`'s results and in rows, that the
      figures of bytes do not contain. Their receiver knows them already (from
      its own disk, or from the update), or the algorithm counts them itself.
    outside: Loads and stores rows outside of the table, if there are any.
  """

  initialize: Callable[[], Any]
  message: Callable[[Any, ServerModel, tf.Tensor], Any]
  receive: Callable[[Any, tf.Tensor], Mapping[str, tf.Tensor]]
  row_specs: Mapping[str, tf.TensorSpec]
  accept: Callable[[Any, Rows, ServerModel, tf.Tensor], Any]
  num_clients: int
  is_clients_own: bool = False
  is_possible: Callable[[Mapping[str, tf.Tensor]], tf.Tensor] | None = None
  not_counted: tuple[str, ...] = ()
  outside: Outside | None = None


# Builds an algorithm's exchange.
BuildExchange = Callable[[setup_lib.Setup], Exchange]
