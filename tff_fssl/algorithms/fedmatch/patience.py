"""A learning rate that falls when a loss has stopped falling."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from tff_fssl.lazy import tf

# The loss before the first one. Finite, since it travels.
_NEVER = 1e9


class Patience(NamedTuple):
  """The state of one learner.

  Attributes:
    lowest: float32 scalar, the lowest loss so far.
    remaining: float32 scalar, how many more losses may fail to be lower.
    rate: float32 scalar, the factor of the initial learning rate.
  """

  lowest: tf.Tensor
  remaining: tf.Tensor
  rate: tf.Tensor


@dataclasses.dataclass(frozen=True)
class Rule:
  """When the rate falls.

  Serra et al. 2018 (HAT), as FedMatch's code has it: a loss below the lowest
  one restores the patience; any other uses it up by 1, and once it is used up,
  the rate is divided by `factor`, and the patience restored. The lowest loss
  stays.

  Attributes:
    patience: >= 1.
    factor: >= 1.
  """

  patience: int
  factor: float

  def ranges(self) -> dict[str, tuple[float, float, float]]:
    """Field of `Patience` -> (its value at the start, the least, the most)."""
    most = float(self.patience)
    return {
      'lowest': (_NEVER, 0.0, _NEVER),
      'remaining': (most, 0.0, most),
      'rate': (1.0, 0.0, 1.0),
    }

  def start(self) -> Patience:
    """The state before the first loss."""
    return Patience(
      **{
        name: tf.constant(first) for name, (first, *_) in self.ranges().items()
      }
    )

  def update(self, state: Patience, loss: tf.Tensor) -> Patience:
    """Returns the state after one more loss; NaN changes nothing."""
    full = tf.constant(float(self.patience))
    remaining = tf.where(loss < state.lowest, full, state.remaining - 1.0)
    is_over = remaining <= 0.0
    new = Patience(
      tf.minimum(loss, state.lowest),
      tf.where(is_over, full, remaining),
      tf.where(is_over, state.rate / self.factor, state.rate),
    )
    some = tf.math.is_finite(loss)
    return Patience(
      *(tf.where(some, n, o) for n, o in zip(new, state, strict=True))
    )
