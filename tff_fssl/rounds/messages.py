"""The messages of a round: what the server sends, and clients' rows."""

from __future__ import annotations

import collections
from collections.abc import Mapping
from typing import Any, NamedTuple

from tff_fssl.aggregators import guarded
from tff_fssl.interface import channels
from tff_fssl.interface import exchange as exchange_lib
from tff_fssl.interface import names
from tff_fssl.lazy import tf, tff
from tff_fssl.models import server_model
from tff_fssl.models.weights import Weights
from tff_fssl.rounds import client_data
from tff_fssl.rounds import plan as plan_lib

ServerModel = server_model.ServerModel


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


def build_table(plan: plan_lib.Plan) -> tff.Computation:
  """Builds `( -> T)`, the table of clients before the first round.

  T is OrderedDict(table, round_num), or () without an exchange.
  """

  @tff.tensorflow.computation
  def initialize() -> Any:
    if plan.exchange is None:
      return ()
    return collections.OrderedDict(
      table=plan.exchange.initialize(),
      round_num=tf.constant(plan.hparams.first_round, tf.int32),
    )

  return initialize


def build_message(
  plan: plan_lib.Plan, table_type: tff.Type, model_type: tff.Type
) -> tff.Computation:
  """Builds `<T, M> -> Message` for a table T and a `ServerModel` M."""

  @tff.tensorflow.computation(table_type, model_type)
  def message(state: Any, model: ServerModel) -> Message:
    table, round_num = (), tf.constant(0)
    if plan.exchange is not None:
      table, round_num = state['table'], state['round_num']
    return make_message(plan, table, ServerModel(*model), round_num)

  return message


def make_message(
  plan: plan_lib.Plan, table: Any, model: ServerModel, round_num: tf.Tensor
) -> Message:
  """Makes the message of a round, int32 scalar."""
  sets: Any = collections.OrderedDict()
  for name, is_sent in plan.states.sent(model).items():
    sets[name] = client_data.one_if(is_sent, model.sets[name])
  weights = model.weights
  if plan.groups is not None:
    weights = plan.groups.starts(model)
  return Message(
    plan.select_weights(weights),
    sets,
    collections.OrderedDict(model.control),
    ()
    if plan.exchange is None
    else plan.exchange.message(table, model, round_num),
  )


def read_message(
  plan: plan_lib.Plan, message: Message, data: Mapping[str, Any]
) -> Received:
  """Reads the parts of a message that a client uses.

  Args:
    plan: The plan.
    message: The message.
    data: The client's element.

  Returns:
    The weights to start from, and the values.
  """
  weights = plan.restore_weights(message.weights)
  if plan.groups is not None:
    # All rows were sent, and the client selects its own.
    start = plan.groups.place_of(data).start
    weights = tf.nest.map_structure(lambda t: t[start], weights)
  values: dict[str, Any] = dict(message.control)
  for name, dataset in message.sets.items():
    is_network = isinstance(dataset.element_spec, Weights)
    values[name] = client_data.read_one(
      dataset, weights if is_network else None
    )
  if plan.exchange is not None:
    of_exchange = plan.exchange.receive(message.exchange, data['client_id'])
    values = names.join('values that clients receive', values, of_exchange)
  return Received(weights, values)


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
  table_type: tff.Type,
  rows_type: tff.Type,
  model_type: tff.Type,
) -> tff.Computation:
  """Builds `<T, rows, M, counts> -> <T, metrics>`, the end of a round.

  If the round does not count, a bool scalar, no row is kept. If several clients
  of the cohort claim one id, all their rows are rejected, since the server
  cannot tell whose they are.

  Args:
    exchange: The exchange.
    table_type: The type T of `build_table`'s result.
    rows_type: The type of the rows.
    model_type: The type M of the `ServerModel`.

  Returns:
    The computation.
  """

  @tff.tensorflow.computation(table_type, rows_type, model_type, tf.bool)
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

  return accept


def _is_undisputed(rows: Mapping[str, Any]) -> tf.Tensor:
  """Tells for each row whether it is valid and unique by id: bool [n]."""
  valid = rows['is_valid']
  same = tf.equal(rows['client_id'][:, None], rows['client_id'][None])
  claims = tf.reduce_sum(
    tf.cast(tf.logical_and(same, valid[None]), tf.int32), axis=1
  )
  return tf.logical_and(valid, claims <= 1)
