"""The exchange: values that server and clients send besides the model.

An exchange is a table at the server. Each round, clients receive values from
it, and upload rows that change it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from tff_fssl.hparams import UsageError
from tff_fssl.lazy import np, tf
from tff_fssl.models import server_model
from tff_fssl.models.weights import Weights

ServerModel = server_model.ServerModel
# TensorFlow's messages, and so values between computations, are limited to 2
# GB. A table must be smaller.
MAX_TABLE_BYTES = 1.5e9


class Rows(NamedTuple):
  """The rows that the n clients of a round have uploaded for the exchange.

  Attributes:
    client_id: int32 [n], in [0, num_clients), each at most once. Zeros if the
      exchange knows no clients.
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
  """A table (of clients, or of last uploads) that the server keeps.

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
    num_clients: The number of clients that the table knows by their ids. 0: it
      knows none.
    is_clients_own: Whether the table stands for values on the clients' own
      disks. In a deployment none of it travels, so no bytes are counted.
    is_possible: (name -> tensor, a row) -> bool scalar, whether an honest
      client can have sent it. If not, the client is rejected as a whole. The
      bound on numbers is checked in any case. None: nothing else is checked.
    in_sum: Whether the aggregator combines rows together with the updates, so
      that no row can be seen alone. Then `accept` gets the combined row as the
      only one, or no row if none was usable. All of `row_specs` must be
      float32.
    not_counted: Names of values, in `receive`'s results and in rows, that the
      figures of bytes do not contain. Their receiver knows them already (from
      its own disk, or from the update), or the algorithm counts them itself.
    outside: Loads and stores rows outside of the table, if there are any.
    for_update: Whether `Algorithm.update` gets the rows, too, as
      `Aggregate.rows`. They must not be `in_sum`, and clients have no ids.
  """

  initialize: Callable[[], Any]
  message: Callable[[Any, ServerModel, tf.Tensor], Any]
  receive: Callable[[Any, tf.Tensor], Mapping[str, tf.Tensor]]
  row_specs: Mapping[str, tf.TensorSpec]
  accept: Callable[[Any, Rows, ServerModel, tf.Tensor], Any]
  num_clients: int = 0
  is_clients_own: bool = False
  is_possible: Callable[[Mapping[str, tf.Tensor]], tf.Tensor] | None = None
  in_sum: bool = False
  not_counted: tuple[str, ...] = ()
  outside: Outside | None = None
  for_update: bool = False


class Population(NamedTuple):
  """The arguments of an exchange besides its hyper-parameters.

  Attributes:
    num_clients: The number of clients, whose ids are 0 .. num_clients - 1. 0:
      unknown.
    weights: `tf.TensorSpec`s of the model's weights.
    of_peers: Name of each auxiliary network with a `build` -> `tf.TensorSpec`s
      of its weights.
    num_classes: The number of classes.
    num_outputs: The width of the network's outputs, logits or embeddings.
    plain_mean: Whether the aggregator is TFF's mean, and changes no update.
    robust: Whether the aggregator is `robust`. Then no single client should
      determine the values that others receive. Where it does, the algorithm's
      page says so.
    seed: The run's seed.
  """

  num_clients: int
  weights: Weights
  of_peers: Mapping[str, Weights] = {}
  num_classes: int = 0
  num_outputs: int = 0
  plain_mean: bool = True
  robust: bool = False
  seed: int = 0

  def known_clients(self) -> int:
    """Returns the number of clients.

    Raises:
      UsageError: If the number is unknown.
    """
    if not self.num_clients:
      raise UsageError(
        'num_clients=None: the server of this algorithm keeps values for each'
        ' client; give the number of clients, whose ids are 0 to num_clients'
        ' - 1'
      )
    return self.num_clients


# Builds an algorithm's exchange.
BuildExchange = Callable[[Population], Exchange]
