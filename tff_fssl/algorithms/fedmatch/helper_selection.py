"""An exchange that sends each client the uploads of similar clients."""

from __future__ import annotations

import collections
from collections.abc import Collection, Mapping, Sequence
import dataclasses
import functools
from typing import Any

from tff_fssl.algorithms.fedmatch import upload_cache
from tff_fssl.interface import exchange as exchange_lib
from tff_fssl.interface import setup as setup_lib
from tff_fssl.lazy import tf
from tff_fssl.models import server_model

EMBEDDING, IS_KNOWN, HELPERS, HELPER_WEIGHTS = (
  'embedding',
  'is_known',
  'helpers',
  'helper_weights',
)
# How far rounding may take an embedding from a distribution.
_TOLERANCE = 1e-3


@dataclasses.dataclass(frozen=True)
class Settings:
  """Settings of the server's table, and of the choice of helpers.

  Attributes:
    sets: Names of the sets of weights that are kept for each client. Each set
      is flat, float32 [elements of the trainable weights].
    scalars: Name -> (initial value, least, greatest) of the float32 scalars
      that are kept for each client.
    helper_set: The name of the set that is sent for each helper. With '', there
      are no helpers.
    num_helpers: The most helpers that a client gets.
    interval: Helpers are chosen anew in every round that is a multiple of it.
    in_every_round: Whether clients also get helpers in the rounds between.
    num_slots: The most clients that are remembered.
    where: The storage of the sets. See `upload_cache.is_outside`.
    flags: The flags that set `num_slots` and `where`.
  """

  sets: tuple[str, ...]
  scalars: Mapping[str, tuple[float, float, float]]
  helper_set: str
  num_helpers: int
  interval: int
  in_every_round: bool
  num_slots: int
  where: str
  flags: tuple[str, str]


def build_exchange(
  settings: Settings, setup: setup_lib.Setup
) -> exchange_lib.Exchange:
  """Builds the exchange.

  A client sends a row with its sets and its scalars. If there are helpers, the
  row also has an embedding of its network, a distribution float32 [C]. The
  client receives:

  *   `is_known`: float32 scalar, 1 if the server remembers it, else 0.
  *   `own_NAME`: Each of its sets, or zeros if it is not known.
  *   Its scalars, or their initial values if it is not known.
  *   `helpers`: float32 [H, D], the last uploads of its helpers. These are the
      other clients with the embeddings closest to its own at the last choice.
  *   `helper_weights`: float32 [H], 1, or 0 where there is no helper.

  Args:
    settings: Settings of the table, and of the choice of helpers.
    setup: The clients and the model.

  Returns:
    The exchange. None of its values counts as bytes. A client's own sets and
    scalars are on its disk in reality, and the algorithm itself counts the
    elements of helpers.

  Raises:
    UsageError: If the number of clients is not known, or the table too large.
  """
  specs = _row_specs(settings, setup)
  num_slots = min(settings.num_slots, setup.known_clients())
  sets = {name: specs[name] for name in settings.sets}
  is_outside = upload_cache.is_outside(
    sets, num_slots, settings.where, settings.flags
  )
  helping = _Helping(settings, specs, num_slots, sets if is_outside else {})
  return exchange_lib.Exchange(
    helping.initialize,
    helping.message,
    helping.receive,
    specs,
    helping.accept,
    setup.known_clients(),
    is_possible=helping.is_possible,
    not_counted=(
      *specs,
      *(f'own_{name}' for name in settings.sets),
      IS_KNOWN,
      HELPERS,
      HELPER_WEIGHTS,
    ),
    outside=(
      exchange_lib.Outside(helping.bring, helping.take) if is_outside else None
    ),
  )


def _row_specs(
  settings: Settings, setup: setup_lib.Setup
) -> dict[str, tf.TensorSpec]:
  weights = setup.weights.trainable
  size = sum(spec.shape.num_elements() for spec in weights)
  specs = {name: tf.TensorSpec([size], tf.float32) for name in settings.sets}
  specs |= {name: tf.TensorSpec([], tf.float32) for name in settings.scalars}
  if settings.helper_set:
    specs[EMBEDDING] = tf.TensorSpec([setup.num_classes], tf.float32)
  return specs


@dataclasses.dataclass(frozen=True)
class _Helping:
  """The functions of the exchange, as `exchange.Exchange` describes them.

  The table is OrderedDict(chosen, uploads). `uploads` is a table of
  `upload_cache`. `chosen` has the embeddings by which helpers are chosen until
  the next choice.
  """

  settings: Settings
  specs: Mapping[str, tf.TensorSpec]
  num_slots: int
  outside: Collection[str]

  def initialize(self) -> Mapping[str, Any]:
    uploads = upload_cache.initialize(self.specs, self.num_slots, self.outside)
    return collections.OrderedDict(
      chosen=self._chosen(uploads), uploads=uploads
    )

  def _chosen(self, uploads: upload_cache.Table) -> Mapping[str, tf.Tensor]:
    """Returns the embeddings of a choice of helpers, and their owners."""
    chosen: collections.OrderedDict[str, tf.Tensor] = collections.OrderedDict()
    if self.settings.helper_set:
      chosen['embedding'] = uploads['values'][EMBEDDING]
      chosen['owner'] = uploads['owner']
    return chosen

  def message(
    self,
    table: Mapping[str, Any],
    model: server_model.ServerModel,
    round_num: tf.Tensor,
  ) -> Mapping[str, Any]:
    del model
    return self._sent(table, round_num)

  def _sent(
    self, table: Mapping[str, Any], round_num: tf.Tensor
  ) -> Mapping[str, Any]:
    """Makes the message to the clients."""
    is_due = tf.equal(round_num % self.settings.interval, 0)
    helps = tf.logical_or(is_due, self.settings.in_every_round)
    return collections.OrderedDict(
      chosen=table['chosen'], helps=helps, uploads=table['uploads']
    )

  def receive(
    self, sent: Mapping[str, Any], client_id: tf.Tensor
  ) -> dict[str, tf.Tensor]:
    uploads = sent['uploads']
    slot, is_known = upload_cache.find(uploads, client_id)
    own = functools.partial(
      upload_cache.read, uploads, slots=slot, is_wanted=is_known
    )
    received = {IS_KNOWN: tf.cast(is_known, tf.float32)}
    for name in self.settings.sets:
      received[f'own_{name}'] = own(name)
    for name, (first, *_) in self.settings.scalars.items():
      received[name] = tf.where(is_known, own(name), first)
    if self.settings.helper_set:
      received |= self._helpers_of(sent, slot, is_known)
    return received

  def _helpers_of(
    self, sent: Mapping[str, Any], slot: tf.Tensor, is_known: tf.Tensor
  ) -> dict[str, tf.Tensor]:
    """Reads the sets and the weights of a client's helpers."""
    slots, helps = self._helping_slots(sent, slot, is_known)
    rows = upload_cache.read(
      sent['uploads'], self.settings.helper_set, slots, helps
    )
    return {HELPERS: rows, HELPER_WEIGHTS: tf.cast(helps, tf.float32)}

  def _helping_slots(
    self, sent: Mapping[str, Any], slot: tf.Tensor, is_known: tf.Tensor
  ) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns (slots of a client's helpers int32 [H], which help bool [H])."""
    uploads, chosen = sent['uploads'], sent['chosen']
    # Exclude clients that came after the choice, even in reused slots.
    is_old = tf.logical_and(
      chosen['owner'] >= 0, tf.equal(chosen['owner'], uploads['owner'])
    )
    slots, weights = nearest(
      chosen['embedding'], is_old, slot, self.settings.num_helpers
    )
    helps = tf.reduce_all([sent['helps'], is_known, is_old[slot]])
    return slots, tf.logical_and(weights > 0.0, helps)

  def bring(
    self,
    table: Mapping[str, Any],
    client_ids: Sequence[int],
    round_num: int,
    read: exchange_lib.ReadRow,
  ) -> Mapping[str, Any]:
    """Loads the rows that the cohort needs (`exchange.Outside`)."""
    # The same functions as in `receive`, so that both choose the same helpers.
    uploads, sent = table['uploads'], self._sent(table, tf.constant(round_num))
    own: set[int] = set()
    of_helpers: set[int] = set()
    for client_id in client_ids:
      slot, is_known = upload_cache.find(
        uploads, tf.constant(client_id, tf.int32)
      )
      if not is_known:
        continue
      own.add(int(slot))
      if self.settings.helper_set:
        slots, helps = self._helping_slots(sent, slot, is_known)
        of_helpers.update(int(s) for s, h in zip(slots, helps) if h)
    # Of clients that merely help, only one set is needed.
    wanted = {
      name: own | of_helpers if name == self.settings.helper_set else own
      for name in self.settings.sets
    }
    every = sorted(own | of_helpers)
    rows = (read(*entry) for entry in upload_cache.entries(uploads, every))
    uploads = upload_cache.add_rows(uploads, wanted, zip(every, rows))
    return collections.OrderedDict(table, uploads=uploads)

  def take(
    self, table: Mapping[str, Any], write: exchange_lib.WriteRow
  ) -> Mapping[str, Any]:
    """Stores the rows of the round's clients (`exchange.Outside`)."""
    uploads, taken = upload_cache.drop_rows(table['uploads'])
    for entry, row in taken:
      write(*entry, row)
    return collections.OrderedDict(table, uploads=uploads)

  def accept(
    self,
    table: Mapping[str, Any],
    rows: exchange_lib.Rows,
    model: server_model.ServerModel,
    round_num: tf.Tensor,
  ) -> Mapping[str, Any]:
    del model
    uploads = upload_cache.write(table['uploads'], rows, round_num)
    # Fixed for the whole interval, until the next round with a new choice.
    is_due = tf.equal((round_num + 1) % self.settings.interval, 0)
    chosen = tf.nest.map_structure(
      lambda new, old: tf.where(is_due, new, old),
      self._chosen(uploads),
      table['chosen'],
    )
    return collections.OrderedDict(chosen=chosen, uploads=uploads)

  def is_possible(self, row: Mapping[str, tf.Tensor]) -> tf.Tensor:
    """Tells whether an honest client can have sent a row's small values."""
    # The sets may have any finite values.
    conditions = [tf.constant(True)]
    for name, (_, least, most) in self.settings.scalars.items():
      conditions += [row[name] >= least, row[name] <= most]
    if self.settings.helper_set:
      embedding = row[EMBEDDING]
      conditions += [
        tf.reduce_all(embedding >= -_TOLERANCE),
        tf.abs(tf.reduce_sum(embedding) - 1.0) <= _TOLERANCE,
      ]
    return tf.reduce_all(conditions)


def nearest(
  embeddings: tf.Tensor, is_known: tf.Tensor, own: tf.Tensor, num: int
) -> tuple[tf.Tensor, tf.Tensor]:
  """Finds the rows closest to a row, by Euclidean distance.

  The comparison with all rows takes N C operations. A k-d tree, built anew in
  each round, would take more for the cohort's few queries.

  Args:
    embeddings: float32 [N, C].
    is_known: bool [N]. Other rows are never found.
    own: int32 scalar, the row that asks. It does not find itself.
    num: The number of rows to find, >= 1.

  Returns:
    (rows int32 [num], weights float32 [num]). Of equally close rows the first
    one is found. Weights are 1, and 0 at the end if fewer rows exist.
  """
  size = tf.shape(embeddings)[0]
  # In double precision, so that all runtimes find the same rows.
  embeddings = tf.cast(embeddings, tf.float64)
  squares = tf.math.squared_difference(embeddings, embeddings[own])
  distances = tf.reduce_sum(squares, axis=-1)
  is_other = tf.logical_and(is_known, tf.not_equal(tf.range(size), own))
  far = tf.constant(float('inf'), tf.float64)
  distances = tf.where(is_other, distances, far)
  # Room for `num` rows, even if the table has fewer.
  distances = tf.pad(distances, [[0, num]], constant_values=far)
  found, rows = tf.math.top_k(-distances, num)
  exists = tf.math.is_finite(found)
  return tf.where(exists, rows, 0), tf.cast(exists, tf.float32)
