"""An exchange that keeps each client's own model at the server."""

from __future__ import annotations

import collections
from collections.abc import Mapping
from typing import Any

from tff_fssl.hparams import UsageError
from tff_fssl.interface import exchange as exchange_lib
from tff_fssl.interface import setup as setup_lib
from tff_fssl.lazy import tf
from tff_fssl.models import server_model
from tff_fssl.models.weights import flatten

_MAX_BYTES = exchange_lib.MAX_TABLE_BYTES
# Names of a row's values: a client receives both, and uploads the first.
_WEIGHTS, _NUM_ROUNDS = 'own_weights', 'own_num_rounds'


def build_exchange(
  setup: setup_lib.Setup, specs: Any = None
) -> exchange_lib.Exchange:
  """Builds the exchange that keeps a model for each client.

  Its table is OrderedDict(own_weights float32 [clients, D], own_num_rounds
  int32 [clients]), zeros until a client has taken part. A client receives its
  row, and uploads the result of `make_row`.

  Args:
    setup: The clients and the model.
    specs: `tf.TensorSpec`s of a client's kept weights, in any structure. None:
      the model's weights.

  Returns:
    The exchange.

  Raises:
    UsageError: If the number of clients is unknown, or the table is larger than
      1.5 GB.
  """
  num = setup.known_clients()
  specs = setup.weights if specs is None else specs
  size = sum(spec.shape.num_elements() for spec in _stored(specs))
  if num * size * 4 > _MAX_BYTES:
    raise UsageError(
      f'--num_clients={num}: their own models of {size:,} weights are'
      f' {num * size * 4 / 1e9:.1f} GB; at most {_MAX_BYTES / 1e9} GB are'
      f' possible, {int(_MAX_BYTES / 4 / size)} clients; take fewer clients'
      ' or a smaller --model'
    )

  def accept(
    table: Mapping[str, tf.Tensor],
    rows: exchange_lib.Rows,
    model: server_model.ServerModel,
    round_num: tf.Tensor,
  ) -> Mapping[str, tf.Tensor]:
    del model, round_num
    index = rows.client_id[:, None]
    return collections.OrderedDict(
      own_weights=tf.tensor_scatter_nd_update(
        table[_WEIGHTS], index, rows.values[_WEIGHTS]
      ),
      own_num_rounds=tf.tensor_scatter_nd_add(
        table[_NUM_ROUNDS], index, tf.ones_like(rows.client_id)
      ),
    )

  return exchange_lib.Exchange(
    initialize=lambda: collections.OrderedDict(
      own_weights=tf.zeros([num, size]),
      own_num_rounds=tf.zeros([num], tf.int32),
    ),
    message=lambda table, model, round_num: table,
    # A false id gets some row. The client's upload is then rejected.
    receive=lambda table, client_id: row_of(
      table, tf.clip_by_value(client_id, 0, num - 1)
    ),
    row_specs={_WEIGHTS: tf.TensorSpec([size], tf.float32)},
    accept=accept,
    num_clients=num,
  )


def make_row(weights: Any) -> dict[str, tf.Tensor]:
  """Makes the upload by which a client's weights are kept."""
  return {_WEIGHTS: flatten(_stored(weights))}


def row_of(
  table: Mapping[str, tf.Tensor], client_id: tf.Tensor
) -> dict[str, tf.Tensor]:
  """Returns the table's row of a client, int32 scalar in [0, clients)."""
  return {name: values[client_id] for name, values in table.items()}


def read_own(
  weights: Any, row: Mapping[str, tf.Tensor], *, is_last: bool = False
) -> Any:
  """Reads a client's own weights from its row.

  Args:
    weights: The common weights, for clients that have no weights yet. The row
      begins with weights of this structure, or ends with them if `is_last`.
    row: The row that the client received.
    is_last: See `weights`.

  Returns:
    The same structure as `weights`.
  """
  is_new = tf.equal(row[_NUM_ROUNDS], 0)
  sizes = [tensor.shape.num_elements() for tensor in _stored(weights)]
  values = row[_WEIGHTS]
  values = values[-sum(sizes) :] if is_last else values[: sum(sizes)]
  pieces = iter(tf.split(values, sizes))

  def own(common: tf.Tensor) -> tf.Tensor:
    # Counters are not in the row, since training does not change them.
    if common.dtype != tf.float32:
      return common
    return tf.where(is_new, common, tf.reshape(next(pieces), common.shape))

  return tf.nest.map_structure(own, weights)


def _stored(weights: Any) -> list[Any]:
  """Lists the tensors that a row holds, those of float32."""
  return [t for t in tf.nest.flatten(weights) if t.dtype == tf.float32]
