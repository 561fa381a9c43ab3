"""Sets of weights that travel as sparse differences (FedMatch, section 3.2)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import dataclasses
from typing import Any, TypeAlias

from tff_fssl.algorithms.fedmatch.helper_selection import HELPER_WEIGHTS
from tff_fssl.algorithms.fedmatch.helper_selection import HELPERS
from tff_fssl.algorithms.fedmatch.helper_selection import IS_KNOWN
from tff_fssl.lazy import tf
from tff_fssl.models.weights import Weights, unflatten

Tensors: TypeAlias = 'Sequence[tf.Tensor]'
Start = Callable[[Weights, Mapping[str, Any]], Weights]


def split(weights: Weights, factor: float) -> tuple[Weights, Weights]:
  """Splits weights into sigma and psi = factor sigma.

  Args:
    weights: The weights, exactly the sum of both sets.
    factor: In [0, 1].

  Returns:
    (sigma, psi).
  """
  sigma = tuple(w / (1.0 + factor) for w in weights.trainable)
  # The difference, not the product, so that the sum is exact.
  psi = tuple(w - s for w, s in zip(weights.trainable, sigma, strict=True))
  return weights._replace(trainable=sigma), weights._replace(trainable=psi)


@dataclasses.dataclass(frozen=True)
class SparseUpdates:
  """The rule by which sets travel between the server and a client, by name.

  A client and the server both know the client's last upload, for which a
  `helper_selection` table stands. Elements that differ from it by more than
  `threshold` are sent. Shares are relative to the elements of one set. Indices
  do not count.

  Attributes:
    threshold: Differences of at most this size are not sent. With None, whole
      sets are sent.
    zero_below: Name -> size up to which elements are sent as 0.
    applied: Whether a client keeps its own values where nothing is sent.
      Otherwise it gets the whole set, sent elements are only counted, and
      elements that the client sends are not set to 0 (the authors' code).
  """

  threshold: float | None
  zero_below: Mapping[str, float]
  applied: bool

  def zero_small(self, name: str, weights: Tensors) -> tuple[tf.Tensor, ...]:
    """Sets the small elements of a set to 0."""
    return sparsify(weights, self.zero_below.get(name, 0.0))

  def start(self, name: str) -> Start | None:
    """Returns the function that merges the server's set into the client's.

    Args:
      name: The name of the set.

    Returns:
      (the server's set, received values) -> the set that the client starts
      from. None if the client takes the server's set as it is.
    """
    if self.threshold is None or not self.applied:
      return None
    threshold = self.threshold

    def start(weights: Weights, received: Mapping[str, tf.Tensor]) -> Weights:
      new = self.zero_small(name, weights.trainable)
      old = _own(name, new, received)
      kept = overwrite(old, new, threshold)
      # A client that the server does not remember gets the whole set.
      is_known = received[IS_KNOWN] > 0.0
      return weights._replace(
        trainable=tuple(tf.where(is_known, k, n) for k, n in zip(kept, new))
      )

    return start

  def share_down(
    self, name: str, weights: Tensors, received: Mapping[str, tf.Tensor]
  ) -> tf.Tensor:
    """Computes the share of a set that was sent to a client.

    It is 1 for a client that the server does not remember.

    Args:
      name: The name of the set.
      weights: The client's set after `start`.
      received: The values that it received.

    Returns:
      float32 scalar.
    """
    if self.threshold is None:
      return tf.constant(1.0)
    old = self.zero_small(name, _own(name, weights, received))
    share = share_sent(self.zero_small(name, weights), old, self.threshold)
    return tf.where(received[IS_KNOWN] > 0.0, share, 1.0)

  def helpers(
    self, name: str, like: Tensors, received: Mapping[str, tf.Tensor]
  ) -> tuple[list[tuple[tf.Tensor, ...]], tf.Tensor]:
    """Returns the sets of helpers, and the share that was sent for them.

    Args:
      name: The name of the set.
      like: Tensors of its shapes.
      received: The values that the client received.

    Returns:
      (for each helper, its set as the client reconstructs it, the sum of the
      shares as float32 scalar).
    """
    weights = received[HELPER_WEIGHTS]
    sets, total = [], tf.constant(0.0)
    for index in range(weights.shape[0]):
      given = unflatten(received[HELPERS][index], like)
      share = tf.constant(1.0)
      if self.threshold is not None:
        new = self.zero_small(name, given)
        own = self.zero_small(name, _own(name, like, received))
        # Elements are relative to the client's own ones, but for zeros, which
        # cost nothing.
        old = [tf.where(tf.equal(n, 0.0), 0.0, o) for n, o in zip(new, own)]
        share = share_sent(new, old, self.threshold)
        if self.applied:
          given = overwrite(old, new, self.threshold)
      sets.append(given)
      total += weights[index] * share
    return sets, total

  def cut(
    self, name: str, before: Tensors, after: Tensors
  ) -> tuple[tuple[tf.Tensor, ...], tf.Tensor]:
    """Cuts small changes from a set that a client uploads.

    Args:
      name: The name of the set.
      before: The client's set before training.
      after: Its set after training.

    Returns:
      (the set as the server receives it, the share of it that was sent as
      float32 scalar).
    """
    if self.threshold is None:
      return tuple(tf.convert_to_tensor(a) for a in after), tf.constant(1.0)
    seen = self.zero_small(name, after)
    sent = overwrite(before, seen, self.threshold)
    share = share_sent(before, seen, self.threshold)
    if not self.applied:
      # As in the authors' code, sent elements keep their small values.
      changed = [tf.abs(s - b) > self.threshold for s, b in zip(seen, before)]
      sent = tuple(
        tf.where(c, a, s) for c, a, s in zip(changed, after, sent, strict=True)
      )
    return sent, share


def _own(
  name: str, like: Tensors, received: Mapping[str, tf.Tensor]
) -> tuple[tf.Tensor, ...]:
  """Returns the client's last upload of a set."""
  return unflatten(received[f'own_{name}'], like)


def sparsify(weights: Tensors, threshold: float) -> tuple[tf.Tensor, ...]:
  """Sets elements of at most `threshold` in size to 0, but keeps NaN."""
  if not threshold:
    return tuple(tf.convert_to_tensor(w) for w in weights)
  return tuple(
    tf.where(tf.abs(w) <= threshold, tf.zeros_like(w), w) for w in weights
  )


def overwrite(
  base: Tensors, new: Tensors, threshold: float
) -> tuple[tf.Tensor, ...]:
  """Overwrites the receiver's values with the changes that are sent.

  Args:
    base: The receiver's values.
    new: The sender's values. NaN is always sent.
    threshold: Changes of at most this size are not sent, >= 0.

  Returns:
    `new` where it differs from `base` by more than `threshold`, else `base`.
  """
  # Comparisons with NaN are false, so that NaN is sent.
  return tuple(
    tf.where(tf.abs(n - b) <= threshold, b, n)
    for b, n in zip(base, new, strict=True)
  )


def share_sent(first: Tensors, second: Tensors, threshold: float) -> tf.Tensor:
  """Computes the share of elements that differ by more than `threshold`.

  Args:
    first: Tensors.
    second: Tensors of the same shapes.
    threshold: >= 0.

  Returns:
    float32 scalar in [0, 1].
  """
  sent = [
    tf.math.count_nonzero(tf.abs(a - b) > threshold, dtype=tf.int32)
    for a, b in zip(first, second, strict=True)
  ]
  size = sum(t.shape.num_elements() for t in first)
  return tf.cast(tf.add_n(sent), tf.float32) / size
