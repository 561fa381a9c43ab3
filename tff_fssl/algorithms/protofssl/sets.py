"""Sets of prototypes that the server keeps, sends and predicts by.

There are H sets, K classes and embeddings of width D. In the first round there
is no prototype.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from tff_fssl.aggregators import hparams as aggregator_hparams
from tff_fssl.algorithms.protofssl import prototypes as prototypes_lib
from tff_fssl.interface import base
from tff_fssl.lazy import tf
from tff_fssl.models import adapter
from tff_fssl.models import server_model
from tff_fssl.models.weights import all_finite

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


class Sets(NamedTuple):
  """Sets of prototypes.

  Attributes:
    exists: bool [H, K].
    prototypes: float32 [H, K, D], 0 where they do not exist.
  """

  exists: tf.Tensor
  prototypes: tf.Tensor


class HeldSets(NamedTuple):
  """The last sets, which predict, and those that are sent for some rounds.

  Older prototypes belong to a network that is no longer the model.
  """

  exists: tf.Tensor
  prototypes: tf.Tensor
  sent_exists: tf.Tensor
  sent_prototypes: tf.Tensor


def empty(num_sets: int, setup: base.Setup) -> Sets:
  """Makes sets without any prototype."""
  shape = [num_sets, setup.num_classes]
  return Sets(tf.zeros(shape, tf.bool), tf.zeros([*shape, setup.num_outputs]))


def complete(sets: Mapping[str, Any]) -> dict[str, tf.Tensor]:
  """Completes all sets by `prototypes.complete`.

  Args:
    sets: The fields of `Sets`, by name.

  Returns:
    prototypes float32 [H, K, D], exists bool [K], used float32 [H].
  """
  whole = prototypes_lib.complete(sets['prototypes'], sets['exists'])
  return dict(zip(('prototypes', 'exists', 'used'), whole, strict=True))


def draw(
  old: Sets, exists: tf.Tensor, prototypes: tf.Tensor, seed: tf.Tensor
) -> Sets:
  """Takes the prototypes of single clients.

  If more clients than H sent prototypes, some of them are drawn. The draw
  depends on the seed and the prototypes, but not on their order.

  Args:
    old: The sets of the round before, which stay if no client sent prototypes.
    exists: bool [n, K].
    prototypes: float32 [n, K, D], 0 where they do not exist.
    seed: int32 [2].

  Returns:
    The sets.
  """
  num_sets = old.exists.shape[0]
  # Clients without labels send none.
  some = tf.where(tf.reduce_any(exists, axis=1))[:, 0]
  # Sorted by content, so that the order of arrival does not matter.
  sums = tf.reduce_sum(tf.gather(prototypes, some), axis=[1, 2])
  drawn = tf.argsort(
    tf.random.stateless_uniform(tf.shape(some), seed), stable=True
  )
  order = tf.gather(tf.argsort(sums, stable=True), drawn)[:num_sets]
  kept = tf.gather(some, order)
  missing = num_sets - tf.size(kept)

  def keep(values: tf.Tensor, old: tf.Tensor) -> tf.Tensor:
    empty = [[0, missing]] + [[0, 0]] * (old.shape.rank - 1)
    new = tf.pad(tf.gather(values, kept), empty)
    return tf.where(tf.size(kept) > 0, tf.ensure_shape(new, old.shape), old)

  return Sets(keep(exists, old.exists), keep(prototypes, old.prototypes))


def are_possible_rows(exists: tf.Tensor, prototypes: tf.Tensor) -> tf.Tensor:
  """Tells whether a client can have these prototypes: bool [K], [K, D]."""
  is_zero = tf.reduce_all(tf.equal(prototypes, 0.0), axis=-1)
  return tf.reduce_all(tf.logical_or(exists, is_zero))


def take_medians(old: Sets, exists: tf.Tensor, prototypes: tf.Tensor) -> Sets:
  """Makes the first set of the medians over clients, for a robust aggregator.

  It has for each class the median, entry by entry, of the prototypes of those
  clients that send the class. A minority of these cannot move it out of the
  others' range. Liars who are half or most of those that send a class determine
  its prototype, but not its length: one that is three times as long as those of
  the median client does not count. A class that fewer than three clients send
  keeps its old one.

  Args:
    old: The sets of the round before. All but the first are empty.
    exists: bool [n, K].
    prototypes: float32 [n, K, D].

  Returns:
    The sets.
  """
  exists = _are_of_usual_norm(exists, prototypes)
  missing = tf.fill(old.prototypes[:1].shape, float('inf'))
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
  new = Sets(
    tf.logical_or(enough, old.exists[0]),
    tf.where(enough[:, tf.newaxis], medians, old.prototypes[0]),
  )
  return Sets(
    *(tf.concat([n[tf.newaxis], o[1:]], axis=0) for n, o in zip(new, old))
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


def make_sum_row(
  sums: tf.Tensor, counts: tf.Tensor, norm: float
) -> dict[str, tf.Tensor]:
  """Makes a client's upload for `take_means`.

  Args:
    sums: float32 [K, D], of embeddings, class by class.
    counts: float32 [K], the numbers of embeddings.
    norm: The norm that both together are scaled down to. With 0, they are not
      scaled.

  Returns:
    The upload.
  """
  factor = tf.constant(1.0)
  if norm:
    length = tf.linalg.global_norm([sums, counts])
    factor = tf.minimum(1.0, tf.math.divide_no_nan(norm, length))
  return {'counts': factor * counts, 'sums': factor * sums}


def are_possible_sums(
  sums: tf.Tensor, counts: tf.Tensor, *, norm: float, max_examples: int
) -> tf.Tensor:
  """Tells whether a client can have made these by `make_sum_row`.

  Args:
    sums: float32 [K, D].
    counts: float32 [K], at least 0.
    norm: See `make_sum_row`.
    max_examples: The most examples that a client can have.

  Returns:
    bool scalar.
  """
  is_zero = tf.reduce_all(tf.equal(sums, 0.0), axis=-1)
  possible = tf.reduce_all(tf.logical_or(counts > 0.0, is_zero))
  if norm:
    length = tf.linalg.global_norm([sums, counts])
    return possible & (length <= _TOLERANCE * norm)
  # Numbers that are not scaled are whole.
  is_whole = tf.reduce_all(tf.equal(counts, tf.round(counts)))
  return possible & is_whole & (tf.reduce_sum(counts) <= max_examples)


def take_means(old: Sets, sums: tf.Tensor, counts: tf.Tensor) -> Sets:
  """Makes one set, of all clients' examples together.

  Its prototypes are combined sums / combined numbers. The aggregator may take
  any mean or sum of both.

  Args:
    old: The set of the round before.
    sums: float32 [K, D].
    counts: float32 [K].

  Returns:
    The set.
  """
  exists = counts > _LEAST_SHARE * tf.reduce_max(counts)
  exists = tf.logical_and(exists, counts > 0.0)
  means = sums / tf.where(exists, counts, 1.0)[:, tf.newaxis]
  means = tf.where(exists[:, tf.newaxis], means, 0.0)
  # Noise or a round without weights may leave nothing to use.
  usable = tf.logical_and(tf.reduce_any(exists), all_finite([sums, means]))
  return Sets(
    tf.where(usable, exists[tf.newaxis], old.exists),
    tf.where(usable, means[tf.newaxis], old.prototypes),
  )


def build_prediction(num_sets: int, distance: str) -> server_model.Prediction:
  """Builds the prediction as the mean over sets of prototypes.

  Without any prototype, all classes are equally probable.

  Args:
    num_sets: H.
    distance: See `prototypes.distances`.

  Returns:
    The prediction.
  """

  def sets_of(model: server_model.ServerModel) -> dict[str, tf.Tensor]:
    # Fields of the memory are in `control` if they are sent.
    return complete({**model.sets, **model.control})

  def logits(
    network: adapter.Network,
    model: server_model.ServerModel,
    images: tf.Tensor,
  ) -> tf.Tensor:
    embeddings = network.inference_logits(images)
    predicted = prototypes_lib.mean_probs(
      embeddings, **sets_of(model), distance=distance
    )
    return prototypes_lib.logits(predicted)

  return server_model.Prediction(
    logits=logits,
    head=server_model.Head(
      lambda network, num_classes: _build_head(
        network, num_classes, num_sets, distance
      ),
      lambda model: _head_values(sets_of(model), distance),
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
  prototypes, exists, used = sets['prototypes'], sets['exists'], sets['used']
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
