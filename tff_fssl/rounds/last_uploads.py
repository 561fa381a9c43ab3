"""What clients last uploaded, kept by the server: a table with few doors.

The table has one slot for each client that is remembered. If there are fewer
slots than clients, the client that has not taken part for longest is forgotten.
Only `initialize`, `find`, `read` and `write` know how it is stored.
"""

import collections
from collections.abc import Mapping, Sequence
from typing import Any
import warnings

import tensorflow as tf

from tff_fssl.hparams import UsageError
from tff_fssl.rounds import exchange as exchange_lib

_MAX_BYTES = exchange_lib.MAX_TABLE_BYTES
_LARGE_BYTES = 2e8
_NOBODY = -1
# OrderedDict(last_round int32 [slots], owner int32 [slots], values).
Table = Mapping[str, Any]


def check_size(
  specs: Mapping[str, tf.TensorSpec], num_slots: int, flag: str
) -> None:
  """Warns of tables that slow down rounds; refuses those that cannot be kept.

  Args:
    specs: Name -> spec of what a client sends.
    num_slots: The number of clients that are remembered.
    flag: The flag that sets it.

  Raises:
    UsageError: If the table is larger than 1.5 GB.
  """
  sizes = [s.shape.num_elements() * s.dtype.size for s in specs.values()]
  total = num_slots * sum(sizes)
  what = f'the last uploads of {num_slots} clients are {total / 1e9:.2g} GB'
  if total > _MAX_BYTES:
    raise UsageError(
      f'{what}; at most {_MAX_BYTES / 1e9} GB can be kept: set {flag} to at'
      f' most {int(_MAX_BYTES / sum(sizes))}, or take a smaller --model'
    )
  if num_slots * max(sizes) > _LARGE_BYTES:
    warnings.warn(
      f'{what}, which each round moves, and each checkpoint holds; a lower'
      f' {flag} makes them smaller',
      stacklevel=2,
    )


def initialize(specs: Mapping[str, tf.TensorSpec], num_slots: int) -> Table:
  """A table without any client."""
  return collections.OrderedDict(
    last_round=tf.zeros([num_slots], tf.int32),
    owner=tf.fill([num_slots], _NOBODY),
    values=collections.OrderedDict(
      (name, tf.zeros([num_slots, *spec.shape], spec.dtype))
      for name, spec in sorted(specs.items())
    ),
  )


def find(table: Table, client_id: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
  """A client's slot, int32 scalar, and whether it has one; if not, slot 0."""
  is_own = tf.equal(table['owner'], client_id)
  is_known = tf.logical_and(client_id >= 0, tf.reduce_any(is_own))
  return tf.argmax(is_own, output_type=tf.int32), is_known


def read(table: Table, name: str, slots: tf.Tensor) -> tf.Tensor:
  """What was sent as `name` from some slots; copies no other rows.

  Args:
    table: The table.
    name: The name.
    slots: int32, of any shape.

  Returns:
    [*slots.shape, ...]; of slots without a client, zeros.
  """
  return tf.gather(table['values'][name], slots)


def write(table: Table, rows: exchange_lib.Rows, round_num: tf.Tensor) -> Table:
  """The table after a round.

  Of more new clients than there are slots, those with the lowest ids are kept.

  Args:
    table: The table.
    rows: What the clients of the round sent.
    round_num: int32 scalar, the number of the round.

  Returns:
    The table, in which it makes no difference in which order the rows came.
  """
  order = tf.argsort(rows.client_id, stable=True)
  ids = tf.gather(rows.client_id, order)
  num_slots = tf.shape(table['owner'])[0]
  is_own = tf.equal(table['owner'], ids[:, tf.newaxis])
  has_slot = tf.reduce_any(is_own, axis=1)
  # Others get the slots that have not been used for longest.
  is_taken = tf.reduce_any(is_own, axis=0)
  age = tf.where(is_taken, tf.int32.max, table['last_round'])
  rank = tf.cumsum(tf.cast(tf.logical_not(has_slot), tf.int32), exclusive=True)
  is_kept = tf.logical_or(
    has_slot, rank < num_slots - tf.reduce_sum(tf.cast(is_taken, tf.int32))
  )
  free = tf.gather(
    tf.argsort(age, stable=True), tf.minimum(rank, num_slots - 1)
  )
  slots = tf.where(has_slot, tf.argmax(is_own, 1, tf.int32), free)
  slots, order, ids = (tf.boolean_mask(t, is_kept) for t in (slots, order, ids))

  def put(old: tf.Tensor, new: tf.Tensor) -> tf.Tensor:
    return tf.tensor_scatter_nd_update(old, slots[:, tf.newaxis], new)

  return collections.OrderedDict(
    last_round=put(table['last_round'], tf.fill(tf.shape(ids), round_num)),
    owner=put(table['owner'], ids),
    values=collections.OrderedDict(
      (name, put(old, tf.gather(rows.values[name], order)))
      for name, old in table['values'].items()
    ),
  )


def flatten(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
  """All elements of float32 tensors, float32 [elements]."""
  return tf.concat([tf.reshape(t, [-1]) for t in tensors], axis=0)


def unflatten(
  flat: tf.Tensor, like: Sequence[tf.Tensor]
) -> tuple[tf.Tensor, ...]:
  """The inverse of `flatten`, for tensors of the shapes of `like`."""
  sizes = [t.shape.num_elements() for t in like]
  return tuple(
    tf.reshape(piece, t.shape)
    for piece, t in zip(tf.split(flat, sizes), like, strict=True)
  )
