"""Prototypes, the mean embeddings of classes, and predictions by them.

A class without examples has no prototype. It is excluded from every softmax, so
that its probability is exactly 0. K is the number of classes, D the width of
embeddings, H the number of sets of prototypes.
"""

from __future__ import annotations

import math

from tff_fssl.lazy import tf

# The distance of an embedding from a prototype.
MEAN_SQUARED, EUCLIDEAN = 'mse', 'euclid'
# The probability of a class without a prototype in a cross-entropy.
_LEAST = 1e-7
LOG_LEAST = math.log(_LEAST)
# The gradient of the square root is infinite at 0, and cut off below this.
_LEAST_SQUARE = 1e-12


def class_sums(
  embeddings: tf.Tensor,
  labels: tf.Tensor,
  weights: tf.Tensor,
  num_classes: int,
) -> tuple[tf.Tensor, tf.Tensor]:
  """Sums embeddings class by class.

  Args:
    embeddings: float32 [N, D].
    labels: int32 [N], in [0, K).
    weights: float32 [N], 1 for examples that count, else 0.
    num_classes: K.

  Returns:
    (sums float32 [K, D], numbers of examples float32 [K]).
  """
  sums = tf.math.unsorted_segment_sum(
    embeddings * weights[:, tf.newaxis], labels, num_classes
  )
  return sums, tf.math.unsorted_segment_sum(weights, labels, num_classes)


def means(sums: tf.Tensor, counts: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
  """Computes prototypes from sums: (float32 [K, D], which exist bool [K]).

  Prototypes of classes without examples are 0.
  """
  return tf.math.divide_no_nan(sums, counts[:, tf.newaxis]), counts > 0.0


def class_means(
  embeddings: tf.Tensor,
  labels: tf.Tensor,
  weights: tf.Tensor,
  num_classes: int,
) -> tuple[tf.Tensor, tf.Tensor]:
  """Computes prototypes of examples: `means` of `class_sums`."""
  return means(*class_sums(embeddings, labels, weights, num_classes))


def distances(
  embeddings: tf.Tensor, prototypes: tf.Tensor, distance: str
) -> tf.Tensor:
  """Computes the distance of each embedding from each prototype.

  Args:
    embeddings: float32 [N, D].
    prototypes: float32 [K, D].
    distance: `MEAN_SQUARED` is the mean over dimensions of squared differences,
      `EUCLIDEAN` the root of their sum.

  Returns:
    float32 [N, K], >= 0.
  """
  squares = tf.math.squared_difference(
    embeddings[:, tf.newaxis], prototypes[tf.newaxis]
  )
  if distance == MEAN_SQUARED:
    return tf.reduce_mean(squares, axis=-1)
  return tf.sqrt(tf.maximum(tf.reduce_sum(squares, axis=-1), _LEAST_SQUARE))


def log_probs(
  embeddings: tf.Tensor,
  prototypes: tf.Tensor,
  exists: tf.Tensor,
  distance: str,
) -> tf.Tensor:
  """Computes the log softmax of negative distances over existing prototypes.

  Args:
    embeddings: float32 [N, D].
    prototypes: float32 [K, D], finite.
    exists: bool [K].
    distance: See `distances`.

  Returns:
    float32 [N, K], with the constant log 1e-7 for prototypes that do not exist.
  """
  # By hand: a masked `tf.nn.log_softmax` would need infinite scores.
  scores = -distances(embeddings, prototypes, distance)
  some = tf.reduce_any(exists)
  lowest = scores.dtype.min
  largest = tf.stop_gradient(
    tf.reduce_max(tf.where(exists, scores, lowest), axis=-1, keepdims=True)
  )
  shifted = tf.where(exists, scores - tf.where(some, largest, 0.0), 0.0)
  powers = tf.where(exists, tf.exp(shifted), 0.0)
  total = tf.reduce_sum(powers, axis=-1, keepdims=True)
  # The logarithm must be finite even if no prototype exists.
  total += tf.where(some, 0.0, 1.0)
  return tf.where(exists, shifted - tf.math.log(total), LOG_LEAST)


def probs(
  embeddings: tf.Tensor,
  prototypes: tf.Tensor,
  exists: tf.Tensor,
  distance: str,
) -> tf.Tensor:
  """Computes `log_probs` as probabilities, with exactly 0 for missing ones."""
  logs = log_probs(embeddings, prototypes, exists, distance)
  return tf.where(exists, tf.exp(logs), 0.0)


def complete(
  prototypes: tf.Tensor, exists: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
  """Replaces missing prototypes of each set by the mean of the other sets.

  Args:
    prototypes: float32 [H, K, D].
    exists: bool [H, K].

  Returns:
    (prototypes float32 [H, K, D], classes that any set has bool [K], sets that
    have any class float32 [H] with values 1 and 0).
  """
  counts = tf.cast(exists, tf.float32)[..., tf.newaxis]
  mean = tf.math.divide_no_nan(
    tf.reduce_sum(prototypes * counts, axis=0), tf.reduce_sum(counts, axis=0)
  )
  whole = tf.where(exists[..., tf.newaxis], prototypes, mean)
  used = tf.cast(tf.reduce_any(exists, axis=1), tf.float32)
  return whole, tf.reduce_any(exists, axis=0), used


def replace(
  own: tf.Tensor,
  own_exists: tf.Tensor,
  prototypes: tf.Tensor,
  exists: tf.Tensor,
  used: tf.Tensor,
) -> tuple[tf.Tensor, tf.Tensor]:
  """Replaces own prototypes by the mean over sets, for classes that a set has.

  ProtoFSSL, appendix B.1, algorithm 2: c_k = mean over j of c_(j,k).

  Args:
    own: float32 [K, D].
    own_exists: bool [K].
    prototypes: float32 [H, K, D], completed by `complete`.
    exists: bool [K].
    used: float32 [H], 1 for sets that count, else 0.

  Returns:
    (prototypes float32 [K, D], which exist bool [K]).
  """
  mean = tf.math.divide_no_nan(
    tf.tensordot(used, prototypes, 1), tf.reduce_sum(used)
  )
  return (
    tf.where(exists[:, tf.newaxis], mean, own),
    tf.logical_or(exists, own_exists),
  )


def mean_probs(
  embeddings: tf.Tensor,
  prototypes: tf.Tensor,
  exists: tf.Tensor,
  used: tf.Tensor,
  distance: str,
) -> tf.Tensor:
  """Computes the mean over sets of the probabilities by each set.

  Args:
    embeddings: float32 [N, D].
    prototypes: float32 [H, K, D], completed by `complete`.
    exists: bool [K].
    used: float32 [H], 1 for sets that count, else 0.
    distance: See `distances`.

  Returns:
    float32 [N, K]. Rows sum to 1, or are 0 if no set counts.
  """
  # Set by set, since all at once would take H times the memory.
  total = tf.add_n(
    [
      used[j] * probs(embeddings, prototypes[j], exists, distance)
      for j in range(prototypes.shape[0])
    ]
  )
  return tf.math.divide_no_nan(total, tf.reduce_sum(used))


def logits(predicted: tf.Tensor) -> tf.Tensor:
  """Computes logits of probabilities float32 [N, K], at least log 1e-7."""
  # Of tensors, and of Keras's symbolic ones.
  ops = tf.keras.ops
  return ops.log(ops.maximum(predicted, _LEAST))


def cross_entropy(targets: tf.Tensor, log_predicted: tf.Tensor) -> tf.Tensor:
  """Computes -sum_k t(k) log p(k) of each example.

  Gradients flow through the targets, too.

  Args:
    targets: float32 [N, K], rows sum to 1.
    log_predicted: float32 [N, K], finite.

  Returns:
    float32 [N], in nats.
  """
  return -tf.reduce_sum(targets * log_predicted, axis=-1)


def add_noise(
  prototypes: tf.Tensor, exists: tf.Tensor, deviation: float, seed: tf.Tensor
) -> tf.Tensor:
  """Adds Gaussian noise to the prototypes that exist.

  Args:
    prototypes: float32 [K, D].
    exists: bool [K].
    deviation: The standard deviation of the noise, >= 0.
    seed: int32 [2].

  Returns:
    float32 [K, D].
  """
  if not deviation:
    return prototypes
  noise = deviation * tf.random.stateless_normal(tf.shape(prototypes), seed)
  return tf.where(exists[:, tf.newaxis], prototypes + noise, 0.0)
