"""A table of the clients' own models, kept by the server, by client id."""

from __future__ import annotations

import collections
from collections.abc import Mapping
from typing import Any

from tff_fssl.hparams import UsageError
from tff_fssl.lazy import tf
from tff_fssl.models.weights import flatten
from tff_fssl.rounds import exchange as exchange_lib

_MAX_BYTES = exchange_lib.MAX_TABLE_BYTES
# Names of what a client is sent (both) and sends (the first).
_WEIGHTS, _NUM_ROUNDS = 'own_weights', 'own_num_rounds'


def build_exchange(
  population: exchange_lib.Population, specs: Any = None
) -> exchange_lib.Exchange:
  """The exchange that keeps a model for each client.

  Its table is OrderedDict(own_weights float32 [clients, D], own_num_rounds
  int32 [clients]): zeros until a client has taken part. A client receives its
  row, and sends what `make_row` returns.

  Args:
    population: The clients and the model.
    specs: `tf.TensorSpec`s of what a client keeps, in any structure; None: the
      model's weights.

  Returns:
    The exchange.

  Raises:
    UsageError: If the number of clients is not known, or the table is larger
      than 1.5 GB.
  """
  num = population.known_clients()
  specs = population.weights if specs is None else specs
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
    model: exchange_lib.ServerModel,
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
    # A false id gets some row; what its client sends is rejected.
    receive=lambda table, client_id: row_of(
      table, tf.clip_by_value(client_id, 0, num - 1)
    ),
    row_specs={_WEIGHTS: tf.TensorSpec([size], tf.float32)},
    accept=accept,
    num_clients=num,
  )


def make_row(weights: Any) -> dict[str, tf.Tensor]:
  """What a client sends to have its weights kept: `Finished.row`."""
  return {_WEIGHTS: flatten(_stored(weights))}


def row_of(
  table: Mapping[str, tf.Tensor], client_id: tf.Tensor
) -> dict[str, tf.Tensor]:
  """What the table holds of a client, int32 scalar in [0, clients)."""
  return {name: values[client_id] for name, values in table.items()}


def read_own(
  weights: Any, row: Mapping[str, tf.Tensor], *, is_last: bool = False
) -> Any:
  """A client's own weights; `weights`, the common ones, if it has none yet.

  Args:
    weights: What the row begins with, or, if `is_last`, ends with.
    row: What the client received.
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
    if common.dtype != tf.float32:
      return common
    return tf.where(is_new, common, tf.reshape(next(pieces), common.shape))

  return tf.nest.map_structure(own, weights)


def _stored(weights: Any) -> list[Any]:
  """What a row holds: all of float32. Training changes nothing else."""
  return [t for t in tf.nest.flatten(weights) if t.dtype == tf.float32]
