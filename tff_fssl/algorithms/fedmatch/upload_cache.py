"""The server's table of the clients' last uploads.

The table has one slot for each client that is remembered. If there are fewer
slots than clients, the client that has not taken part for longest is forgotten.
Only the functions of this file depend on the table's layout.

Large values may be kept outside of the table. The table then holds those of
some slots only, a window. `add_rows` fills the window before each round, and
`drop_rows` empties it after the round. The program keeps all others on disk.
"""

from __future__ import annotations

import collections
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple
import warnings

from tff_fssl.hparams import UsageError
from tff_fssl.interface import exchange as exchange_lib
from tff_fssl.lazy import np, tf
from tff_fssl.models.weights import no_values

# Values of `--fedmatch.uploads_in`.
AUTO, STATE, FILES = 'auto', 'state', 'files'

_MAX_BYTES = exchange_lib.MAX_TABLE_BYTES
# Larger tables slow rounds and checkpoints down.
_LARGE_BYTES = 2e8
# The owner of a free slot.
_NOBODY = -1
# OrderedDict(last_round int32 [slots], owner int32 [slots], values, window).
# The window is optional: name -> OrderedDict(slot int32 [n], values [n, ...]).
# Its slots are _NOBODY for rows of clients that are not remembered.
Table = Mapping[str, Any]


class Entry(NamedTuple):
  """The client and the round of a last upload."""

  client_id: int
  round_num: int


def is_outside(
  specs: Mapping[str, tf.TensorSpec],
  num_slots: int,
  where: str,
  flags: tuple[str, str],
) -> bool:
  """Tells whether large values are kept outside of the table.

  It warns of tables that slow down rounds.

  Args:
    specs: Name -> spec of the large values that a client sends.
    num_slots: The number of clients that are remembered.
    where: `AUTO`, `STATE` or `FILES`.
    flags: The flags that set `num_slots` and `where`.

  Returns:
    True if they are kept outside.

  Raises:
    UsageError: If the values are to be in the table, and are more than 1.5 GB.
  """
  size = sum(s.shape.num_elements() * s.dtype.size for s in specs.values())
  total = num_slots * size
  if where != STATE:
    return bool(size) and (where == FILES or total > _LARGE_BYTES)
  what = f'the last uploads of {num_slots} clients are {total / 1e9:.2g} GB'
  if total > _MAX_BYTES:
    raise UsageError(
      f'{what}; a state holds at most {_MAX_BYTES / 1e9} GB: give'
      f' {flags[1]}={FILES}, or {flags[0]} of at most'
      f' {int(_MAX_BYTES / size)}'
    )
  if total > _LARGE_BYTES:
    warnings.warn(
      f'{what}, which each round moves, and each checkpoint holds; with'
      f' {flags[1]}={FILES} they are kept beside the checkpoints',
      stacklevel=2,
    )
  return False


def initialize(
  specs: Mapping[str, tf.TensorSpec],
  num_slots: int,
  outside: Collection[str] = (),
) -> Table:
  """Makes a table without any client.

  Args:
    specs: Name -> spec of each value that a client sends.
    num_slots: The number of clients that are remembered.
    outside: The names of values that are kept outside of the table.

  Returns:
    The table.
  """
  table = collections.OrderedDict(
    last_round=tf.zeros([num_slots], tf.int32),
    owner=tf.fill([num_slots], _NOBODY),
    values=collections.OrderedDict(
      (name, tf.zeros([num_slots, *spec.shape], spec.dtype))
      for name, spec in sorted(specs.items())
      if name not in outside
    ),
  )
  if outside:
    table['window'] = collections.OrderedDict(
      (
        name,
        collections.OrderedDict(
          slot=no_values(tf.TensorSpec([], tf.int32)),
          values=no_values(specs[name]),
        ),
      )
      for name in sorted(outside)
    )
  return table


def find(table: Table, client_id: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
  """Returns (a client's slot int32 scalar, whether it has one bool scalar).

  The slot of a client without one is 0.
  """
  is_own = tf.equal(table['owner'], client_id)
  # A negative id would match free slots.
  is_known = tf.logical_and(client_id >= 0, tf.reduce_any(is_own))
  return tf.argmax(is_own, output_type=tf.int32), is_known


def read(
  table: Table, name: str, slots: tf.Tensor, is_wanted: tf.Tensor
) -> tf.Tensor:
  """Reads the values of a name in some slots, without copies of other rows.

  Args:
    table: The table.
    name: The name.
    slots: int32, of any shape.
    is_wanted: bool, of the same shape.

  Returns:
    [*slots.shape, ...], with zeros for slots that are not wanted.

  Raises:
    InvalidArgumentError: If values that are kept outside of the table have not
      been brought.
  """
  if name in table['values']:
    return _only(tf.gather(table['values'][name], slots), is_wanted)
  window = table['window'][name]
  is_there = tf.equal(window['slot'], slots[..., tf.newaxis])
  brought = tf.debugging.Assert(
    tf.reduce_all(tf.reduce_any(is_there, -1) | ~is_wanted),
    [
      'the last uploads of clients are kept outside of the state, and have not'
      ' been brought before the round: see `upload_cache.add_rows`'
    ],
  )
  values = window['values']
  shape = slots.shape + values.shape[1:]

  def found() -> tf.Tensor:
    index = tf.argmax(is_there, -1, output_type=tf.int32)
    return _only(tf.gather(values, index), is_wanted)

  with tf.control_dependencies([brought] if brought is not None else []):
    return tf.ensure_shape(
      # An empty window has no row to gather.
      tf.cond(tf.size(window['slot']) > 0, found, lambda: tf.zeros(shape)),
      shape,
    )


def _only(rows: tf.Tensor, is_wanted: tf.Tensor) -> tf.Tensor:
  missing = [1] * (rows.shape.rank - is_wanted.shape.rank)
  return tf.where(tf.reshape(is_wanted, [*is_wanted.shape, *missing]), rows, 0)


def write(table: Table, rows: exchange_lib.Rows, round_num: tf.Tensor) -> Table:
  """Writes the uploads of a round into the table.

  If the round has more new clients than there are slots, those with the lowest
  ids are kept. The order of the rows makes no difference.

  Args:
    table: The table.
    rows: The uploads of the round's clients.
    round_num: int32 scalar, the number of the round.

  Returns:
    The new table.
  """
  order = tf.argsort(rows.client_id, stable=True)
  ids = tf.gather(rows.client_id, order)
  num_slots = tf.shape(table['owner'])[0]
  is_own = tf.equal(table['owner'], ids[:, tf.newaxis])
  has_slot = tf.reduce_any(is_own, axis=1)
  # New clients get the slots that have not been used for longest.
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

  written = collections.OrderedDict(
    last_round=put(table['last_round'], tf.fill(tf.shape(ids), round_num)),
    owner=put(table['owner'], ids),
    values=collections.OrderedDict(
      (name, put(old, tf.gather(rows.values[name], order)))
      for name, old in table['values'].items()
    ),
  )
  if 'window' in table:
    # Large rows are not copied, and so keep their order.
    nobody = tf.fill(tf.shape(rows.client_id), _NOBODY)
    slot = tf.tensor_scatter_nd_update(nobody, order[:, tf.newaxis], slots)
    written['window'] = collections.OrderedDict(
      (name, collections.OrderedDict(slot=slot, values=rows.values[name]))
      for name in table['window']
    )
  return written


def entries(table: Table, slots: Iterable[int]) -> list[Entry]:
  """Lists the owners and rounds of slots of a table of NumPy arrays."""
  return [
    Entry(int(table['owner'][slot]), int(table['last_round'][slot]))
    for slot in slots
  ]


def add_rows(
  table: Table,
  slots: Mapping[str, Collection[int]],
  rows: Iterable[tuple[int, Mapping[str, Any]]],
) -> Table:
  """Puts rows into the window of a table.

  Args:
    table: The table.
    slots: Name -> the slots to fill with values of this name.
    rows: Each of the slots with its row, once, in any order.

  Returns:
    The new table. Its window holds tensors. A round would copy NumPy arrays.
  """
  found: dict[str, dict[int, tf.Tensor]] = {n: {} for n in table['window']}
  for slot, row in rows:
    for name, of_name in found.items():
      if slot in slots[name]:
        of_name[slot] = tf.constant(row[name])
  window = collections.OrderedDict(
    (
      name,
      collections.OrderedDict(
        slot=tf.constant(list(of_name), tf.int32, [len(of_name)]),
        values=tf.stack(list(of_name.values()))
        if of_name
        else tf.convert_to_tensor(table['window'][name]['values'][:0]),
      ),
    )
    for name, of_name in found.items()
  )
  return collections.OrderedDict(table, window=window)


def drop_rows(
  table: Table,
) -> tuple[Table, list[tuple[Entry, dict[str, np.ndarray[Any, Any]]]]]:
  """Removes the rows of a round from a table of NumPy arrays.

  Args:
    table: The table after a round.

  Returns:
    (the table without the rows, entry and row of each client of the round).
  """
  window = table['window']
  slot = next(iter(window.values()))['slot']  # `write` gives all the same.
  indices = np.flatnonzero(slot != _NOBODY)
  taken = [
    (entry, {name: rows['values'][i] for name, rows in window.items()})
    for i, entry in zip(indices, entries(table, slot[indices]))
  ]
  empty = tf.nest.map_structure(lambda array: array[:0].copy(), window)
  return collections.OrderedDict(table, window=empty), taken
