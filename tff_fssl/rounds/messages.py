"""The messages of a round: what the server sends, and clients' rows."""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from tff_fssl.aggregators import guarded
from tff_fssl.interface import base
from tff_fssl.interface import channels
from tff_fssl.interface import exchange as exchange_lib
from tff_fssl.interface import names
from tff_fssl.interface import setup as setup_lib
from tff_fssl.lazy import tf, tff
from tff_fssl.models import adapter
from tff_fssl.models import server_model
from tff_fssl.models.weights import Weights
from tff_fssl.rounds import client_data
from tff_fssl.rounds import delivery as delivery_lib
from tff_fssl.rounds import states as states_lib

ServerModel = server_model.ServerModel


def build_exchange(
  algorithm: base.Algorithm,
  setup: setup_lib.Setup,
  specs_of: Callable[[Callable[[adapter.Network], tf.keras.Model]], Weights],
) -> exchange_lib.Exchange | None:
  """Builds the exchange of an algorithm.

  Args:
    algorithm: The algorithm.
    setup: The setup, but for its `of_peers`.
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
  return build(setup._replace(of_peers=specs))


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
  exchange: exchange_lib.Exchange | None,
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
  exchange: exchange_lib.Exchange | None,
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
  exchange: exchange_lib.Exchange | None,
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


def row_specs(
  exchange: exchange_lib.Exchange | None,
  uploads: Mapping[str, channels.Upload],
) -> dict[str, tf.TensorSpec]:
  """Returns the spec of each value of a client's row, none without rows."""
  rows = channels.sent_as(uploads, channels.ROWS)
  specs = {name: upload.spec for name, upload in rows.items()}
  if exchange is not None:
    specs |= exchange.row_specs
  return specs


def row_type(specs: Mapping[str, tf.TensorSpec]) -> tff.Type:
  """Returns the type of a client's row: is_valid, client_id, values."""
  return tff.types.tensorflow_to_type(
    collections.OrderedDict(
      is_valid=tf.TensorSpec([], tf.bool),
      client_id=tf.TensorSpec([], tf.int32),
      values=collections.OrderedDict(sorted(specs.items())),
    )
  )


def split(sent: Any) -> tuple[Mapping[str, Any], Any]:
  """Splits what a client sends into (update by channel, its row or None)."""
  if channels.MODEL in sent:
    return sent, None
  return sent['update'], sent['row']


def is_possible_row(
  exchange: exchange_lib.Exchange | None, row: Mapping[str, Any]
) -> tf.Tensor:
  """Tells whether a row may be kept, whatever code the client ran.

  Its numbers must be within `guarded.MAX_ENTRY`. For an exchange, its client
  must exist. Two clients that claim one id are found when the rows are
  together.
  """
  floats = [v for v in row['values'].values() if v.dtype.is_floating]
  conditions = [guarded.is_bounded(floats)]
  if exchange is not None:
    conditions += [
      row['client_id'] >= 0,
      row['client_id'] < exchange.num_clients,
    ]
    if exchange.is_possible is not None:
      conditions.append(exchange.is_possible(row['values']))
  return tf.reduce_all(conditions)


def build_accept(
  exchange: exchange_lib.Exchange,
  distributor_state_type: tff.Type,
  model_type: tff.Type,
  rows_type: tff.Type,
) -> Callable[[tff.Value, tff.Value, tff.Value, tff.Value], tff.Value]:
  """Builds `(state, rows, model, counts) -> (state, metrics)`.

  This is the end of a round. If the round does not count, no row is kept. If
  several clients of the cohort claim one id, all their rows are rejected, since
  the server cannot tell whose they are.

  Args:
    exchange: The exchange.
    distributor_state_type: The type of `build_distributor`'s state.
    model_type: The type of the `ServerModel`.
    rows_type: The type of the rows.

  Returns:
    A function for use in a federated computation.
  """

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
    undisputed = _is_undisputed(rows)
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
      exchange_lib.Rows(kept['client_id'], kept['values']),
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
    return tff.federated_map(accept, (state, rows, model, counts))

  return end_round


def _is_undisputed(rows: Mapping[str, Any]) -> tf.Tensor:
  """Tells for each row whether it is valid and unique by id: bool [n]."""
  valid = rows['is_valid']
  same = tf.equal(rows['client_id'][:, None], rows['client_id'][None])
  claims = tf.reduce_sum(
    tf.cast(tf.logical_and(same, valid[None]), tf.int32), axis=1
  )
  return tf.logical_and(valid, claims <= 1)
