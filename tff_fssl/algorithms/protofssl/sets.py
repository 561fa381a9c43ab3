"""Sets of prototypes that the server keeps, sends and predicts by.

The table is OrderedDict(exists bool [H, K], prototypes float32 [H, K, D]), with
H sets, K classes and embeddings of width D. It starts without any prototype.
With a helper interval, the sets that are sent are not those that predict. They
are then a second such table, `sent`, in the first.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping
from typing import Any, TypeAlias

from tff_fssl import seeds
from tff_fssl.aggregators import hparams as aggregator_hparams
from tff_fssl.algorithms.protofssl import prototypes as prototypes_lib
from tff_fssl.interface import exchange as exchange_lib
from tff_fssl.lazy import tf
from tff_fssl.models import adapter
from tff_fssl.models import server_model
from tff_fssl.models.weights import all_finite

_SET = 'prototypes'
# A class with a smaller share in a combined sum is noise.
_LEAST_SHARE = 1e-3
# With a robust aggregator, longer prototypes than this multiple of the median
# over clients do not count.
_USUAL_NORM = 3.0
# A client's rounding may exceed its norm by this factor.
_TOLERANCE = 1.001
# The distance of missing prototypes in an exported model. It is finite, as all
# numbers in files shall be, and exp(-1e30) is exactly 0, like exp(-inf).
_FAR = 1e30

_Table: TypeAlias = 'Mapping[str, tf.Tensor]'


def _initialize(num_sets: int, population: exchange_lib.Population) -> _Table:
  shape = [num_sets, population.num_classes]
  return collections.OrderedDict(
    exists=tf.zeros(shape, tf.bool),
    prototypes=tf.zeros([*shape, population.num_outputs]),
  )


def complete(table: Mapping[str, Any]) -> dict[str, tf.Tensor]:
  """Completes all sets of a table by `prototypes.complete`.

  Args:
    table: The server's table or its message. The table gives the sets that
      predict.

  Returns:
    prototypes float32 [H, K, D], exists bool [K], used float32 [H].
  """
  whole = prototypes_lib.complete(table['prototypes'], table['exists'])
  return dict(zip(('prototypes', 'exists', 'used'), whole, strict=True))


def build_list(
  population: exchange_lib.Population, *, num_sets: int, interval: int = 1
) -> exchange_lib.Exchange:
  """Builds the exchange that keeps prototypes of single clients.

  A client sends exists bool [K] and prototypes float32 [K, D], 0 where they do
  not exist. The server keeps those of the last cohort. If more clients than
  `num_sets` sent prototypes, the server draws some of them. The draw depends on
  the run's seed, the round and the prototypes, but not on their order. If no
  client sent prototypes, the server keeps the old ones.

  With a robust aggregator there is one set instead. It has for each class the
  median, entry by entry, of the prototypes of those clients that send the
  class. A minority of these cannot move it out of the others' range. Liars who
  are half or most of those that send a class determine its prototype, but not
  its length: one that is three times as long as those of the median client does
  not count. A class that fewer than three clients send keeps its old one.

  Args:
    population: The classes and the width of embeddings.
    num_sets: H, the most sets that are kept.
    interval: R_H >= 1, the rounds after which new prototypes are sent.

  Returns:
    The exchange.
  """
  shape = [population.num_classes, population.num_outputs]

  def is_possible(values: _Table) -> tf.Tensor:
    is_zero = tf.reduce_all(tf.equal(values['prototypes'], 0.0), axis=-1)
    return tf.reduce_all(tf.logical_or(values['exists'], is_zero))

  def accept(
    table: _Table,
    rows: exchange_lib.Rows,
    model: server_model.ServerModel,
    round_num: tf.Tensor,
  ) -> _Table:
    del model
    sent = collections.OrderedDict(sorted(rows.values.items()))
    if population.robust:
      return _replace_by_medians(table, **sent)
    # Clients without labels send none.
    some = tf.where(tf.reduce_any(sent['exists'], axis=1))[:, 0]
    # Sorted by content, so that the order of arrival does not matter.
    sums = tf.reduce_sum(tf.gather(sent['prototypes'], some), axis=[1, 2])
    seed = seeds.server_seed(population.seed, round_num)
    drawn = tf.argsort(
      tf.random.stateless_uniform(
        tf.shape(some), seeds.fold_in(seed, seeds.EXCHANGE)
      ),
      stable=True,
    )
    order = tf.gather(tf.argsort(sums, stable=True), drawn)[:num_sets]
    kept = tf.gather(some, order)
    missing = num_sets - tf.size(kept)

    def keep(values: tf.Tensor, old: tf.Tensor) -> tf.Tensor:
      empty = [[0, missing]] + [[0, 0]] * (old.shape.rank - 1)
      new = tf.pad(tf.gather(values, kept), empty)
      return tf.where(tf.size(kept) > 0, tf.ensure_shape(new, old.shape), old)

    return collections.OrderedDict(
      (name, keep(values, table[name])) for name, values in sent.items()
    )

  every_round = exchange_lib.Exchange(
    initialize=lambda: _initialize(num_sets, population),
    message=lambda table, model, round_num: table,
    receive=lambda table, client_id: dict(table),
    row_specs={
      'exists': tf.TensorSpec(shape[:1], tf.bool),
      'prototypes': tf.TensorSpec(shape),
    },
    accept=accept,
    is_possible=is_possible,
  )
  return every_round if interval == 1 else _held(every_round, interval)


def _replace_by_medians(
  table: _Table, exists: tf.Tensor, prototypes: tf.Tensor
) -> _Table:
  """Puts the medians over clients into a table, as its first set.

  Args:
    table: The table. Its other sets are empty.
    exists: bool [n, K].
    prototypes: float32 [n, K, D].

  Returns:
    The table.
  """
  exists = _are_of_usual_norm(exists, prototypes)
  missing = tf.fill(table['prototypes'][:1].shape, float('inf'))
  rows = tf.where(exists[..., tf.newaxis], prototypes, missing)
  # One more row, for rounds without any.
  ordered = tf.sort(tf.concat([rows, missing], axis=0), axis=0)
  num = tf.reduce_sum(tf.cast(exists, tf.int32), axis=0)
  # Missing prototypes are infinite, and so come last.
  last = tf.maximum(num - 1, 0)
  middle = tf.stack([last // 2, (last + 1) // 2], axis=1)
  medians = tf.reduce_mean(
    tf.gather(tf.transpose(ordered, [1, 0, 2]), middle, batch_dims=1), axis=1
  )
  enough = num >= aggregator_hparams.MIN_ROBUST_CLIENTS
  new = collections.OrderedDict(
    exists=tf.logical_or(enough, table['exists'][0]),
    prototypes=tf.where(enough[:, tf.newaxis], medians, table['prototypes'][0]),
  )
  return collections.OrderedDict(
    (name, tf.concat([value[tf.newaxis], table[name][1:]], axis=0))
    for name, value in new.items()
  )


def _are_of_usual_norm(exists: tf.Tensor, prototypes: tf.Tensor) -> tf.Tensor:
  """Says which prototypes count: those of no unusual length.

  Half of the few clients that send a class may lie, though few of the cohort
  do. The mean of the middle two would then have no bound.

  Args:
    exists: bool [n, K].
    prototypes: float32 [n, K, D], 0 where they do not exist.

  Returns:
    bool [n, K].
  """
  norms = tf.norm(prototypes, axis=-1)
  counts = tf.reduce_sum(tf.cast(exists, tf.float32), axis=1)
  means = tf.where(
    counts > 0.0, tf.reduce_sum(norms, axis=1) / counts, float('inf')
  )
  # One more, for rounds without any client. Infinite ones come last.
  ordered = tf.sort(tf.concat([means, [float('inf')]], axis=0))
  num = tf.math.count_nonzero(counts, dtype=tf.int32)
  median = ordered[tf.maximum(num - 1, 0) // 2]
  return tf.logical_and(exists, norms <= _USUAL_NORM * median)


def _held(
  every_round: exchange_lib.Exchange, interval: int
) -> exchange_lib.Exchange:
  """Builds the exchange that sends the sets of rounds R_H, 2 R_H, ...

  The server sends them from the next round on, until the next sets are due.

  Args:
    every_round: The exchange that sends the sets of the round before.
    interval: R_H.

  Returns:
    The exchange. It predicts like `every_round`, since older prototypes belong
    to a network that is no longer the model.
  """

  def initialize() -> Mapping[str, Any]:
    latest = every_round.initialize()
    return collections.OrderedDict(latest, sent=every_round.initialize())

  def accept(
    table: Mapping[str, Any],
    rows: exchange_lib.Rows,
    model: server_model.ServerModel,
    round_num: tf.Tensor,
  ) -> Mapping[str, Any]:
    latest = every_round.accept(table, rows, model, round_num)
    is_due = tf.equal(round_num % interval, 0)
    sent = collections.OrderedDict(
      (name, tf.where(is_due, value, table['sent'][name]))
      for name, value in latest.items()
    )
    return collections.OrderedDict(latest, sent=sent)

  return every_round._replace(
    initialize=initialize,
    message=lambda table, model, round_num: table['sent'],
    accept=accept,
  )


def make_sum_row(
  sums: tf.Tensor, counts: tf.Tensor, norm: float
) -> dict[str, tf.Tensor]:
  """Makes a client's upload to the exchange of `build_global`.

  Args:
    sums: float32 [K, D], of embeddings, class by class.
    counts: float32 [K], the numbers of embeddings.
    norm: The norm that both together are scaled down to. With 0, they are not
      scaled.

  Returns:
    The row.
  """
  factor = tf.constant(1.0)
  if norm:
    length = tf.linalg.global_norm([sums, counts])
    factor = tf.minimum(1.0, tf.math.divide_no_nan(norm, length))
  return {'counts': factor * counts, 'sums': factor * sums}


def build_global(
  population: exchange_lib.Population, *, norm: float, max_examples: int
) -> exchange_lib.Exchange:
  """Builds the exchange that keeps one set, of all clients' examples together.

  Its prototypes are combined sums / combined numbers. The aggregator may take
  any mean or sum of both.

  Args:
    population: The classes and the width of embeddings.
    norm: See `make_sum_row`.
    max_examples: The most examples that a client can have.

  Returns:
    The exchange.
  """
  shape = [population.num_classes, population.num_outputs]

  def is_possible(values: _Table) -> tf.Tensor:
    sums, counts = values['sums'], values['counts']
    is_zero = tf.reduce_all(tf.equal(sums, 0.0), axis=-1)
    conditions = [
      tf.reduce_all(counts >= 0.0),
      tf.reduce_all(tf.logical_or(counts > 0.0, is_zero)),
    ]
    if norm:
      length = tf.linalg.global_norm([sums, counts])
      conditions.append(length <= _TOLERANCE * norm)
    else:
      # Numbers that are not scaled are whole.
      conditions += [
        tf.reduce_all(tf.equal(counts, tf.round(counts))),
        tf.reduce_sum(counts) <= max_examples,
      ]
    return tf.reduce_all(conditions)

  def accept(
    table: _Table,
    rows: exchange_lib.Rows,
    model: server_model.ServerModel,
    round_num: tf.Tensor,
  ) -> _Table:
    del model, round_num
    # At most one row, which the aggregator made of all.
    sums, counts = (
      tf.reduce_sum(rows.values[name], axis=0) for name in ('sums', 'counts')
    )
    exists = counts > _LEAST_SHARE * tf.reduce_max(counts)
    exists = tf.logical_and(exists, counts > 0.0)
    means = sums / tf.where(exists, counts, 1.0)[:, tf.newaxis]
    means = tf.where(exists[:, tf.newaxis], means, 0.0)
    # Noise or a failed round may leave nothing to use.
    usable = tf.logical_and(tf.reduce_any(exists), all_finite(means))
    return collections.OrderedDict(
      exists=tf.where(usable, exists[tf.newaxis], table['exists']),
      prototypes=tf.where(usable, means[tf.newaxis], table['prototypes']),
    )

  return exchange_lib.Exchange(
    initialize=lambda: _initialize(1, population),
    message=lambda table, model, round_num: table,
    receive=lambda table, client_id: dict(table),
    row_specs={
      'counts': tf.TensorSpec(shape[:1]),
      'sums': tf.TensorSpec(shape),
    },
    accept=accept,
    is_possible=is_possible,
    in_sum=True,
  )


def build_prediction(num_sets: int, distance: str) -> server_model.Prediction:
  """Builds the prediction as the mean over sets of prototypes.

  Without any prototype, all classes are equally probable.

  Args:
    num_sets: H.
    distance: See `prototypes.distances`.

  Returns:
    The prediction, which needs the exchange's table.
  """

  def put_table(
    model: server_model.ServerModel, table: Any
  ) -> server_model.ServerModel:
    return model.replace_sets(**{_SET: complete(table)})

  def logits(
    network: adapter.Network,
    model: server_model.ServerModel,
    images: tf.Tensor,
  ) -> tf.Tensor:
    embeddings = network.inference_logits(images)
    predicted = prototypes_lib.mean_probs(
      embeddings, **model.sets[_SET], distance=distance
    )
    return prototypes_lib.logits(predicted)

  return server_model.Prediction(
    logits=logits,
    with_table=put_table,
    head=server_model.Head(
      lambda network, num_classes: _build_head(
        network, num_classes, num_sets, distance
      ),
      lambda model: _head_values(model.sets[_SET], distance),
    ),
  )


def _build_head(
  network: tf.keras.Model, num_classes: int, num_sets: int, distance: str
) -> tf.keras.Model:
  """Builds a Keras model of the network and the prediction by prototypes.

  |z - c|^2 = |z|^2 - 2 z c + |c|^2 is a dense layer of z, but for |z|^2. Only
  `EUCLIDEAN` needs |z|^2, which cancels out in the softmax of the mean square.
  """
  layers = tf.keras.layers
  embeddings = network.outputs[0]
  scores = layers.Dense(
    num_sets * num_classes, dtype='float32', name='prototypes'
  )(embeddings)
  if distance == prototypes_lib.EUCLIDEAN:
    squares = layers.Dot(1, dtype='float32', name='squares')(
      [embeddings, embeddings]
    )
    # Rounding may make a square negative.
    scores = layers.Add(name='distances')([scores, squares])
    scores = -tf.keras.ops.sqrt(layers.ReLU(name='not_negative')(scores))
  predicted = layers.Softmax(name='of_each')(
    layers.Reshape((num_sets, num_classes), name='sets')(scores)
  )
  mean = layers.Dense(1, use_bias=False, dtype='float32', name='mean')(
    layers.Permute((2, 1), name='classes')(predicted)
  )
  mean = layers.Reshape((num_classes,), name='probabilities')(mean)
  return tf.keras.Model(network.inputs, prototypes_lib.logits(mean))


def _head_values(
  sets: Mapping[str, tf.Tensor], distance: str
) -> dict[str, list[tf.Tensor]]:
  """Computes the weights of `_build_head`'s layers from completed sets."""
  prototypes = tf.convert_to_tensor(sets['prototypes'])
  exists = tf.convert_to_tensor(sets['exists'])
  used = tf.convert_to_tensor(sets['used'])
  num_outputs = prototypes.shape[-1]
  flat = tf.reshape(prototypes, [-1, num_outputs])
  # Scores are negative distances, but the root of `EUCLIDEAN` comes first.
  scale = {
    prototypes_lib.MEAN_SQUARED: -1.0 / num_outputs,
    prototypes_lib.EUCLIDEAN: 1.0,
  }[distance]
  far = _FAR if scale > 0.0 else -_FAR
  squares = scale * tf.reduce_sum(tf.square(prototypes), axis=-1)
  biases = tf.where(exists, squares, far)
  shares = tf.math.divide_no_nan(used, tf.reduce_sum(used))
  return {
    'prototypes': [
      tf.transpose(-2.0 * scale * flat),
      tf.reshape(biases, [-1]),
    ],
    'mean': [shares[:, tf.newaxis]],
  }
