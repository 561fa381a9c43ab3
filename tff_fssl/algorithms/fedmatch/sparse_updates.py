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
  """(sigma, psi) with psi = factor sigma, whose sum is `weights` exactly.

  Args:
    weights: The weights.
    factor: In [0, 1].

  Returns:
    Two sets.
  """
  sigma = tuple(w / (1.0 + factor) for w in weights.trainable)
  psi = tuple(w - s for w, s in zip(weights.trainable, sigma, strict=True))
  return weights._replace(trainable=sigma), weights._replace(trainable=psi)


@dataclasses.dataclass(frozen=True)
class SparseUpdates:
  """How sets travel between the server and a client, by name.

  A client and the server both know what the client uploaded last, which a
  `helper_selection` table stands for. Elements that differ from it by more than
  `threshold` are sent. Shares are among the elements of one set; indices do not
  count.

  Attributes:
    threshold: Differences of at most this size are not sent; None: whole sets
      are.
    zero_below: Name -> elements of at most this size are sent as 0.
    applied: Whether a client keeps its own values where nothing is sent. If
      not, it gets the whole set, what is sent is only counted, and elements
      that it sends are not set to 0 (FedMatch's code).
  """

  threshold: float | None
  zero_below: Mapping[str, float]
  applied: bool

  def zero_small(self, name: str, weights: Tensors) -> tuple[tf.Tensor, ...]:
    """A set with small elements set to 0."""
    return sparsify(weights, self.zero_below.get(name, 0.0))

  def start(self, name: str) -> Start | None:
    """Makes (the server's set, received) -> what the client then has."""
    if self.threshold is None or not self.applied:
      return None
    threshold = self.threshold

    def start(weights: Weights, received: Mapping[str, tf.Tensor]) -> Weights:
      new = self.zero_small(name, weights.trainable)
      old = _own(name, new, received)
      kept = overwrite(old, new, threshold)
      is_known = received[IS_KNOWN] > 0.0
      return weights._replace(
        trainable=tuple(tf.where(is_known, k, n) for k, n in zip(kept, new))
      )

    return start

  def share_down(
    self, name: str, weights: Tensors, received: Mapping[str, tf.Tensor]
  ) -> tf.Tensor:
    """The share of a set that was sent to a client that now has `weights`.

    A client that the server does not remember is sent all.

    Args:
      name: The name of the set.
      weights: What the client has after `start`.
      received: What it received.

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
    """The sets of helpers, and how much was sent for them.

    Args:
      name: The name of the set.
      like: Tensors of its shapes.
      received: What the client received.

    Returns:
      For each helper, its set as the client has it, relative to its own where
      this is not 0; float32 scalar, the sum of the shares.
    """
    weights = received[HELPER_WEIGHTS]
    sets, total = [], tf.constant(0.0)
    for index in range(weights.shape[0]):
      given = unflatten(received[HELPERS][index], like)
      share = tf.constant(1.0)
      if self.threshold is not None:
        new = self.zero_small(name, given)
        own = self.zero_small(name, _own(name, like, received))
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
    """What the server knows of a set after a client's upload.

    Args:
      name: The name of the set.
      before: What the client had received.
      after: What it has.

    Returns:
      The set; the share of it that was sent, float32 scalar.
    """
    if self.threshold is None:
      return tuple(tf.convert_to_tensor(a) for a in after), tf.constant(1.0)
    seen = self.zero_small(name, after)
    sent = overwrite(before, seen, self.threshold)
    share = share_sent(before, seen, self.threshold)
    if not self.applied:
      changed = [tf.abs(s - b) > self.threshold for s, b in zip(seen, before)]
      sent = tuple(
        tf.where(c, a, s) for c, a, s in zip(changed, after, sent, strict=True)
      )
    return sent, share


def _own(
  name: str, like: Tensors, received: Mapping[str, tf.Tensor]
) -> tuple[tf.Tensor, ...]:
  """The client's last upload of a set."""
  return unflatten(received[f'own_{name}'], like)


def sparsify(weights: Tensors, threshold: float) -> tuple[tf.Tensor, ...]:
  """Sets what is at most `threshold` in size to 0; NaN stays NaN."""
  if not threshold:
    return tuple(tf.convert_to_tensor(w) for w in weights)
  return tuple(
    tf.where(tf.abs(w) <= threshold, tf.zeros_like(w), w) for w in weights
  )


def overwrite(
  base: Tensors, new: Tensors, threshold: float
) -> tuple[tf.Tensor, ...]:
  """What a receiver that has `base` has after the larger changes were sent.

  Args:
    base: What it has.
    new: What it shall have; a NaN is always sent.
    threshold: Changes of at most this size are not sent, >= 0.

  Returns:
    `new` where it differs from `base` by more than `threshold`, else `base`.
  """
  return tuple(
    tf.where(tf.abs(n - b) <= threshold, b, n)
    for b, n in zip(base, new, strict=True)
  )


def share_sent(first: Tensors, second: Tensors, threshold: float) -> tf.Tensor:
  """The elements that differ by more than `threshold`, among all.

  Args:
    first: Tensors.
    second: Tensors of the same shapes.
    threshold: At least 0.

  Returns:
    float32 scalar in [0, 1].
  """
  sent = [
    tf.math.count_nonzero(tf.abs(a - b) > threshold, dtype=tf.int32)
    for a, b in zip(first, second, strict=True)
  ]
  size = sum(t.shape.num_elements() for t in first)
  return tf.cast(tf.add_n(sent), tf.float32) / size
