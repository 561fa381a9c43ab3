"""The exchange: values that server and clients send besides the model.

An exchange is a table at the server. Each round, clients receive values from
it, and upload rows that change it.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from tff_fssl.algorithms import base
from tff_fssl.algorithms import names
from tff_fssl.hparams import UsageError
from tff_fssl.lazy import LazyImport, np, tf, tff
from tff_fssl.models import adapter
from tff_fssl.models import server_model
from tff_fssl.models.weights import Weights, all_finite
from tff_fssl.rounds import client_data
from tff_fssl.rounds import delivery as delivery_lib
from tff_fssl.rounds import states as states_lib

if TYPE_CHECKING:
  from tff_fssl.aggregators import collecting
  from tff_fssl.aggregators import guarded
else:  # They define classes of TFF, which algorithms need not import.
  collecting = LazyImport('tff_fssl.aggregators.collecting')
  guarded = LazyImport('tff_fssl.aggregators.guarded')

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


def build_exchange(
  algorithm: base.Algorithm,
  population: Population,
  specs_of: Callable[[Callable[[adapter.Network], tf.keras.Model]], Weights],
) -> Exchange | None:
  """Builds the exchange of an algorithm.

  Args:
    algorithm: The algorithm.
    population: The population, but for its `of_peers`.
    specs_of: `AuxiliaryNetwork.build` -> `tf.TensorSpec`s of its weights.

  Returns:
    The exchange, or None if the algorithm has none.
  """
  build = algorithm.exchange()
  if build is None:
    return None
  specs = {
    name: specs_of(declared.build)
    for name, declared in algorithm.networks().items()
    if declared.build is not None
  }
  return build(population._replace(of_peers=specs))


class Message(NamedTuple):
  """The message to all clients at the start of a round.

  Attributes:
    weights: The model's weights that travel, `Weights`. With groups, the rows
      that clients start from (`Groups.starts`).
    sets: Name -> a sequence of one element, the set, or of none.
    control: `ServerModel.control`.
    exchange: `Exchange.message`'s result. () without an exchange.
  """

  weights: Weights
  sets: Mapping[str, tf.data.Dataset]
  control: Mapping[str, tf.Tensor]
  exchange: Any


class Received(NamedTuple):
  """A message, as a client uses it.

  Attributes:
    weights: The weights to start from.
    values: Name -> value: sets, control values, and values from the exchange. A
      network that was not sent has the model's weights. Any other set that was
      not sent is 0.
  """

  weights: Weights
  values: Mapping[str, Any]


def make_message(
  exchange: Exchange | None,
  states: states_lib.States,
  table: Any,
  model: ServerModel,
  round_num: tf.Tensor,
  delivery: delivery_lib.Delivery = delivery_lib.Delivery(),
) -> Message:
  """Makes the message of a round."""
  sets: Any = collections.OrderedDict()
  for name, is_sent in states.sent(model).items():
    sets[name] = client_data.one_if(is_sent, model.sets[name])
  return Message(
    delivery.select_model(model),
    sets,
    collections.OrderedDict(model.control),
    () if exchange is None else exchange.message(table, model, round_num),
  )


def read_message(
  exchange: Exchange | None,
  message: Message,
  client_id: tf.Tensor,
  start: tf.Tensor | None = None,
  delivery: delivery_lib.Delivery = delivery_lib.Delivery(),
) -> Received:
  """Reads the parts of a message that a client uses.

  Args:
    exchange: The exchange, if there is one.
    message: The message.
    client_id: int32 scalar, -1 if clients have no ids.
    start: With groups, the index of the client's row, int32 scalar.
    delivery: The weights that travel.

  Returns:
    The weights to start from, and the values.
  """
  weights = delivery.received(message.weights, start)
  values: dict[str, Any] = dict(message.control)
  for name, dataset in message.sets.items():
    is_network = isinstance(dataset.element_spec, Weights)
    values[name] = client_data.read_one(
      dataset, weights if is_network else None
    )
  if exchange is not None:
    of_exchange = exchange.receive(message.exchange, client_id)
    values = names.join('values that clients receive', values, of_exchange)
  return Received(weights, values)


def build_distributor(
  model_type: tff.Type,
  states: states_lib.States,
  exchange: Exchange | None,
  first_round: int,
  delivery: delivery_lib.Delivery = delivery_lib.Delivery(),
) -> tff.learning.templates.DistributionProcess:
  """Builds the process that makes the message and broadcasts it.

  Args:
    model_type: The type of the `ServerModel`.
    states: The states of the algorithm.
    exchange: The exchange, if there is one.
    first_round: The number of the first round.
    delivery: The weights that travel.

  Returns:
    The process. Its state is (), or OrderedDict(table, round_num).
  """

  @tff.tensorflow.computation
  def initialize() -> Any:
    if exchange is None:
      return ()
    return collections.OrderedDict(
      table=exchange.initialize(), round_num=tf.constant(first_round, tf.int32)
    )

  state_type = initialize.type_signature.result

  @tff.tensorflow.computation(state_type, model_type)
  def message(state: Any, model: ServerModel) -> Message:
    table, round_num = (), tf.constant(0)
    if exchange is not None:
      table, round_num = state['table'], state['round_num']
    model = ServerModel(*model)
    return make_message(exchange, states, table, model, round_num, delivery)

  @tff.federated_computation
  def init_fn() -> tff.Value:
    return tff.federated_eval(initialize, tff.SERVER)

  @tff.federated_computation(
    init_fn.type_signature.result, tff.FederatedType(model_type, tff.SERVER)
  )
  def next_fn(
    state: tff.Value, model: tff.Value
  ) -> tff.templates.MeasuredProcessOutput:
    sent = tff.federated_map(message, (state, model))
    return tff.templates.MeasuredProcessOutput(
      # The round's end changes the table: see `build_accept`.
      state,
      tff.federated_broadcast(sent),
      tff.federated_value((), tff.SERVER),
    )

  return tff.learning.templates.DistributionProcess(init_fn, next_fn)


def row_type(exchange: Exchange) -> tff.Type:
  """Returns the type of a client's row: is_valid, client_id, values."""
  return tff.types.tensorflow_to_type(
    collections.OrderedDict(
      is_valid=tf.TensorSpec([], tf.bool),
      client_id=tf.TensorSpec([], tf.int32),
      values=collections.OrderedDict(sorted(exchange.row_specs.items())),
    )
  )


def is_possible_row(exchange: Exchange, row: Mapping[str, Any]) -> tf.Tensor:
  """Tells whether a row may be kept, whatever code the client ran.

  Its numbers must be within `guarded.MAX_ENTRY`, and its client must exist. Two
  clients that claim one id are found when the rows are together.
  """
  floats = [v for v in row['values'].values() if v.dtype.is_floating]
  conditions = [guarded.is_bounded(floats)]
  if exchange.num_clients:
    conditions += [
      row['client_id'] >= 0,
      row['client_id'] < exchange.num_clients,
    ]
  if exchange.is_possible is not None:
    conditions.append(exchange.is_possible(row['values']))
  return tf.reduce_all(conditions)


def build_accept(
  exchange: Exchange,
  distributor_state_type: tff.Type,
  model_type: tff.Type,
  aggregate_type: tff.Type | None = None,
) -> Callable[[tff.Value, tff.Value, tff.Value, tff.Value], tff.Value]:
  """Builds `(state, rows@CLIENTS, model, counts) -> (state, metrics)`.

  This is the end of a round. If the round does not count, no row is kept. If
  several clients of the cohort claim one id, all their rows are rejected, since
  the server cannot tell whose they are. With an exchange `in_sum`, the function
  takes the aggregator's result in place of rows.

  Args:
    exchange: The exchange.
    distributor_state_type: The type of `build_distributor`'s state.
    model_type: The type of the `ServerModel`.
    aggregate_type: The type of the aggregator's result, for `in_sum`.

  Returns:
    A function for use in a federated computation.
  """
  if exchange.in_sum:
    return _build_accept_sum(
      exchange, distributor_state_type, model_type, aggregate_type
    )
  collect, rows_type = collecting.build_collect(row_type(exchange))

  @tff.tensorflow.computation(
    distributor_state_type, rows_type, model_type, tf.bool
  )
  def accept(
    state: Mapping[str, Any],
    rows: Mapping[str, Any],
    model: ServerModel,
    counts: tf.Tensor,
  ) -> tuple[Mapping[str, Any], Mapping[str, tf.Tensor]]:
    rows = collections.OrderedDict(
      rows, is_valid=tf.logical_and(rows['is_valid'], counts)
    )
    undisputed = _is_undisputed(exchange, rows)
    # Rows can be large, and disputes are rare. Without one, none is copied.
    kept = tf.cond(
      tf.reduce_all(undisputed),
      lambda: tf.nest.map_structure(tf.identity, rows),
      lambda: tf.nest.map_structure(
        lambda t: tf.boolean_mask(t, undisputed), rows
      ),
    )
    table = exchange.accept(
      state['table'],
      Rows(kept['client_id'], kept['values']),
      ServerModel(*model),
      state['round_num'],
    )
    disputed = tf.logical_and(rows['is_valid'], tf.logical_not(undisputed))
    state = collections.OrderedDict(
      table=table, round_num=state['round_num'] + 1
    )
    return state, collections.OrderedDict(
      num_rows=tf.shape(kept['client_id'])[0],
      num_disputed_rows=tf.reduce_sum(tf.cast(disputed, tf.int32)),
    )

  def end_round(
    state: tff.Value, rows: tff.Value, model: tff.Value, counts: tff.Value
  ) -> tff.Value:
    return tff.federated_map(accept, (state, collect(rows), model, counts))

  return end_round


def _build_accept_sum(
  exchange: Exchange,
  distributor_state_type: tff.Type,
  model_type: tff.Type,
  aggregate_type: tff.Type | None,
) -> Callable[[tff.Value, tff.Value, tff.Value, tff.Value], tff.Value]:
  """Builds `build_accept`'s function for rows that the aggregator combined."""

  @tff.tensorflow.computation(
    distributor_state_type, aggregate_type, model_type, tf.bool
  )
  def accept(
    state: Mapping[str, Any],
    aggregate: Mapping[str, Any],
    model: ServerModel,
    counts: tf.Tensor,
  ) -> tuple[Mapping[str, Any], Mapping[str, tf.Tensor]]:
    values = {name: aggregate[name] for name in sorted(exchange.row_specs)}
    # If all weights were 0, the combined row is NaN.
    is_usable = all_finite(list(values.values()))
    usable = tf.cast(tf.logical_and(is_usable, counts), tf.int32)
    rows = Rows(
      # `usable` is the number of rows, 0 or 1.
      tf.zeros([usable], tf.int32),
      {name: value[None][:usable] for name, value in values.items()},
    )
    table = exchange.accept(
      state['table'], rows, ServerModel(*model), state['round_num']
    )
    state = collections.OrderedDict(
      table=table, round_num=state['round_num'] + 1
    )
    return state, collections.OrderedDict(
      num_rows=usable, num_disputed_rows=tf.constant(0)
    )

  def end_round(
    state: tff.Value, aggregate: tff.Value, model: tff.Value, counts: tff.Value
  ) -> tff.Value:
    return tff.federated_map(accept, (state, aggregate, model, counts))

  return end_round


def _is_undisputed(exchange: Exchange, rows: Mapping[str, Any]) -> tf.Tensor:
  """Tells for each row whether it is valid and unique by id: bool [n]."""
  valid = rows['is_valid']
  if not exchange.num_clients:
    return valid
  same = tf.equal(rows['client_id'][:, None], rows['client_id'][None])
  claims = tf.reduce_sum(
    tf.cast(tf.logical_and(same, valid[None]), tf.int32), axis=1
  )
  return tf.logical_and(valid, claims <= 1)
