"""Nearest neighbours in a space of embeddings, by exact search."""

from __future__ import annotations

from tff_fssl.lazy import tf


def nearest(
  embeddings: tf.Tensor, is_known: tf.Tensor, own: tf.Tensor, num: int
) -> tuple[tf.Tensor, tf.Tensor]:
  """The rows closest to a row, by Euclidean distance.

  Comparing with all rows takes N C operations, fewer than a k-d tree, which is
  built anew in each round, needs for the cohort's few queries.

  Args:
    embeddings: float32 [N, C].
    is_known: bool [N]; the others are never found.
    own: int32 scalar, the row that asks; it does not find itself.
    num: How many are wanted, >= 1.

  Returns:
    (rows int32 [num], of equally close ones the first; float32 [num], 1, or 0
    where there are fewer: at the end).
  """
  size = tf.shape(embeddings)[0]
  # In double precision, so that whatever runs this finds the same rows.
  embeddings = tf.cast(embeddings, tf.float64)
  squares = tf.math.squared_difference(embeddings, embeddings[own])
  distances = tf.reduce_sum(squares, axis=-1)
  is_other = tf.logical_and(is_known, tf.not_equal(tf.range(size), own))
  far = tf.constant(float('inf'), tf.float64)
  distances = tf.where(is_other, distances, far)
  # Room for `num` rows, however few there are.
  distances = tf.pad(distances, [[0, num]], constant_values=far)
  found, rows = tf.math.top_k(-distances, num)
  exists = tf.math.is_finite(found)
  return tf.where(exists, rows, 0), tf.cast(exists, tf.float32)
