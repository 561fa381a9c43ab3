"""Proxies: the rows of a classifier, one for each class.

N rows of a batch, of which the last M are unlabelled. C classes. D features.
"""

from __future__ import annotations

from typing import NamedTuple

from tff_fssl import loops
from tff_fssl import seeds
from tff_fssl.lazy import tf

# Rows that are less similar than this are no negatives.
_LEAST_SIMILARITY = 1e-6
# The authors' bound on the margin.
_MAX_MARGIN = 100.0
# exp of it is exactly 0.
_NEVER = -1e9


class Choice(NamedTuple):
  """The classes that unlabelled examples may have.

  Attributes:
    sets: bool [M, C], the classes that an example may have.
    shares: float32 [M, C], the weights of the proxies that it is drawn to.
  """

  sets: tf.Tensor
  shares: tf.Tensor


def choose(
  probs: tf.Tensor, sure: tf.Tensor, prior: tf.Tensor, weights: tf.Tensor
) -> Choice:
  """Chooses the classes of examples: the likeliest, or all above the prior.

  Args:
    probs: float32 [M, C].
    sure: bool [M], which examples have only their most probable class.
    prior: float32 [C], the frequencies of classes.
    weights: float32 [M, C], the weights of the classes above the prior.

  Returns:
    The choice.

  Examples:
    >>> import tensorflow as tf
    >>> from tff_fssl.algorithms.proxyfl import proxies
    >>> probs = tf.constant([[0.9, 0.1, 0.0], [0.5, 0.4, 0.1]])
    >>> sure, prior = tf.constant([True, False]), tf.fill([3], 1 / 3)
    >>> print(proxies.choose(probs, sure, prior, weights=probs).shares.numpy())
    [[1.  0.  0. ]
     [0.5 0.4 0. ]]
  """
  num_classes = probs.shape[-1]
  likeliest = tf.one_hot(tf.argmax(probs, -1), num_classes)
  above = probs > prior
  sets = tf.where(sure[:, None], likeliest > 0.0, above)
  unsure_shares = tf.where(above, weights, 0.0)
  return Choice(sets, tf.where(sure[:, None], likeliest, unsure_shares))


def contrast(
  features: tf.Tensor,
  proxies: tf.Tensor,
  sets: tf.Tensor,
  shares: tf.Tensor,
  weights: tf.Tensor,
) -> tf.Tensor:
  """Computes the contrastive loss of each unlabelled row.

      -log(exp(p_i) / (exp(p_i) + sum_j exp(z_i z_j)))

  p_i = z_i . sum_c shares_i(c) v_c. j are the rows that share no class with i,
  and whose z points to the same side.

  Args:
    features: float32 [N, D]. z are these, of length 1.
    proxies: float32 [C, D]. v are these, of length 1.
    sets: bool [N, C], the classes that a row may have.
    shares: float32 [M, C].
    weights: float32 [N], 0 for fillers, which are no negatives.

  Returns:
    float32 [M].
  """
  z = tf.math.l2_normalize(features, axis=-1)
  v = tf.math.l2_normalize(proxies, axis=-1)
  num_labeled = tf.shape(z)[0] - tf.shape(shares)[0]
  own = z[num_labeled:]
  positive = tf.reduce_sum(own * tf.matmul(shares, v), axis=-1)
  similar = tf.matmul(own, z, transpose_b=True)
  in_set = tf.cast(sets, tf.float32)
  overlap = tf.matmul(in_set[num_labeled:], in_set, transpose_b=True)
  rows = tf.range(tf.shape(z)[0])
  is_negative = (
    tf.equal(overlap, 0.0)
    & (similar >= _LEAST_SIMILARITY)
    & (weights > 0.0)
    # A row with an empty set shares no class even with itself.
    & (rows[num_labeled:, None] != rows)
  )
  scores = tf.concat(
    [positive[:, None], tf.where(is_negative, similar, _NEVER)], axis=-1
  )
  return tf.reduce_logsumexp(scores, axis=-1) - positive


def distances(rows: tf.Tensor, proxies: tf.Tensor) -> tf.Tensor:
  """Computes Euclidean distances, float32 [n, C], of rows [n, D]."""
  squares = tf.reduce_sum(
    tf.math.squared_difference(rows[:, None], proxies[None]), axis=-1
  )
  # The root has no gradient at 0.
  return tf.where(squares > 0.0, tf.sqrt(tf.maximum(squares, 1e-30)), 0.0)


def margin(proxies: tf.Tensor) -> tf.Tensor:
  """Computes the largest distance of a proxy from its nearest other one."""
  between = distances(proxies, proxies)
  others = tf.linalg.set_diag(between, tf.fill([between.shape[0]], 1e30))
  return tf.minimum(tf.reduce_max(tf.reduce_min(others, axis=-1)), _MAX_MARGIN)


def tuning_gradient(
  proxies: tf.Tensor, rows: tf.Tensor, labels: tf.Tensor, by: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
  """Differentiates the mean cross-entropy of clients' proxies.

  The logits are minus the distances of a row from all proxies. That from the
  proxy of its own class counts with the margin.

  Args:
    proxies: float32 [C, D], the global ones.
    rows: float32 [n, D], clients' proxies.
    labels: int32 [n], their classes.
    by: float32 scalar, the margin.

  Returns:
    (loss, gradient float32 [C, D]).
  """
  own = by * tf.one_hot(labels, proxies.shape[0])
  with tf.GradientTape() as tape:
    tape.watch(proxies)
    logits = -(distances(rows, proxies) + own)
    loss = tf.reduce_mean(
      tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
    )
  return loss, tape.gradient(loss, proxies)


def tune(
  proxies: tf.Tensor,
  of_clients: tf.Tensor,
  *,
  num_epochs: int,
  batch_size: int,
  learning_rate: float,
  has_margin: bool,
  seed: tf.Tensor,
) -> tf.Tensor:
  """Trains global proxies to classify those of clients (GPT).

  Args:
    proxies: float32 [C, D], the mean of the clients'.
    of_clients: float32 [n, C, D].
    num_epochs: Passes over the clients' proxies.
    batch_size: Clients' proxies in a batch. The last batch may be smaller.
    learning_rate: The learning rate of SGD.
    has_margin: Whether the proxy of the own class has a margin.
    seed: int32 [2], of the order of rows.

  Returns:
    float32 [C, D]. The same proxies if there are no clients.
  """
  num_classes, size = proxies.shape
  # Sorted by content, so that the order of clients does not matter.
  order = tf.argsort(tf.reduce_sum(of_clients, axis=[1, 2]), stable=True)
  rows = tf.reshape(tf.gather(of_clients, order), [-1, size])
  num_rows = tf.shape(rows)[0]
  labels = tf.range(num_rows) % num_classes
  by = margin(proxies) if has_margin else tf.constant(0.0)
  num_batches = -(-num_rows // batch_size)

  def move(step: tf.Tensor, proxies: tf.Tensor) -> tf.Tensor:
    keys = tf.random.stateless_uniform(
      [num_rows], seeds.fold_in(seed, step // num_batches)
    )
    first = step % num_batches * batch_size
    batch = tf.argsort(keys, stable=True)[first : first + batch_size]
    _, gradient = tuning_gradient(
      proxies, tf.gather(rows, batch), tf.gather(labels, batch), by
    )
    return proxies - learning_rate * gradient

  return loops.fold(move, proxies, end=num_epochs * num_batches)
