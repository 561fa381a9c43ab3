"""A learning rate that falls when a loss has stopped falling."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from tff_fssl.lazy import tf

# The lowest loss before the first one. It is uploaded, and so must be finite.
_NEVER = 1e9


class Patience(NamedTuple):
  """The state of one learner.

  Attributes:
    lowest: float32 scalar, the lowest loss so far.
    remaining: float32 scalar, the patience left: the rate falls after so many
      more losses that are not lower.
    rate: float32 scalar, the factor of the initial learning rate.
  """

  lowest: tf.Tensor
  remaining: tf.Tensor
  rate: tf.Tensor


@dataclasses.dataclass(frozen=True)
class Rule:
  """The rule by which the rate falls.

  It is that of Serra et al. 2018 (HAT), as in FedMatch's code. A loss below the
  lowest one restores the patience. Any other loss reduces it by 1. At 0, the
  rate is divided by `factor`, and the patience is restored. The lowest loss
  stays.

  Attributes:
    patience: The number of losses, >= 1.
    factor: The divisor of the rate, >= 1.
  """

  patience: int
  factor: float

  def ranges(self) -> dict[str, tuple[float, float, float]]:
    """Returns (initial value, least, greatest) of each field of `Patience`."""
    most = float(self.patience)
    return {
      'lowest': (_NEVER, 0.0, _NEVER),
      'remaining': (most, 0.0, most),
      'rate': (1.0, 0.0, 1.0),
    }

  def start(self) -> Patience:
    """Returns the state before the first loss."""
    return Patience(
      **{
        name: tf.constant(first) for name, (first, *_) in self.ranges().items()
      }
    )

  def update(self, state: Patience, loss: tf.Tensor) -> Patience:
    """Returns the state after one more loss."""
    full = tf.constant(float(self.patience))
    remaining = tf.where(loss < state.lowest, full, state.remaining - 1.0)
    is_over = remaining <= 0.0
    new = Patience(
      tf.minimum(loss, state.lowest),
      tf.where(is_over, full, remaining),
      tf.where(is_over, state.rate / self.factor, state.rate),
    )
    # A client without examples has the loss NaN, which changes nothing.
    some = tf.math.is_finite(loss)
    return Patience(
      *(tf.where(some, n, o) for n, o in zip(new, state, strict=True))
    )
