"""The search for the first non-finite tensor of a client's training."""

from __future__ import annotations

from collections.abc import Mapping
import math
from typing import NamedTuple

from tff_fssl.lazy import tf


class NonFinite(NamedTuple):
  """The first tensor of a client's training that is not finite.

  Attributes:
    step: The local step, from 1. 0 means before the first one.
    tensor: The name of the tensor.
    loss: The loss of that step. NaN if the step has none.
  """

  step: int
  tensor: str
  loss: float

  def __str__(self) -> str:
    where = f'at local step {self.step}' if self.step else 'before local step 1'
    known = not math.isnan(self.loss) and not self.tensor.startswith('loss')
    return f'{where}, {self.tensor}' + f' (loss {self.loss:.3g})' * known


class Watch:
  """A check of tensors in the order of training. It records the first bad one.

  It holds variables: create it where variables may be created, and call it
  inside a `tf.function`.
  """

  def __init__(self) -> None:
    self._names: list[str] = []
    self._index = tf.Variable(-1)
    self._step = tf.Variable(0)
    self._loss = tf.Variable(math.nan)

  def reset(self) -> None:
    """Forgets the recorded tensor."""
    self._index.assign(-1)

  def __call__(
    self, step: int | tf.Tensor, tensors: Mapping[str, tf.Tensor]
  ) -> None:
    """Checks a step's tensors. One whose name starts with 'loss' is the loss.

    Args:
      step: The local step, from 1. 0 means before the first one.
      tensors: Name -> float tensor, in the order in which they were made.
    """
    if not tensors:
      return
    # Each trace adds its own names, so that its indices stay valid when the
    # function is traced again.
    offset = len(self._names)
    self._names += tensors
    finite = tf.stack(
      [tf.reduce_all(tf.math.is_finite(t)) for t in tensors.values()]
    )
    # `argmin` of 0s and 1s is the first tensor that is not finite.
    first = tf.argmin(tf.cast(finite, tf.int32), output_type=tf.int32)
    is_new = tf.logical_and(
      self._index < 0, tf.logical_not(tf.reduce_all(finite))
    )
    losses = [t for name, t in tensors.items() if name.startswith('loss')]
    loss = losses[0] if losses else tf.constant(math.nan)
    for variable, value in (
      (self._step, step),
      (self._loss, loss),
      (self._index, offset + first),
    ):
      variable.assign(tf.where(is_new, value, variable))

  def found(self) -> NonFinite | None:
    """Returns the first tensor that was not finite, if any. Call it eagerly."""
    index = int(self._index)
    if index < 0:
      return None
    return NonFinite(int(self._step), self._names[index], float(self._loss))
