"""Exponential moving averages (EMA) of weights: teachers, smoothed models."""

from __future__ import annotations

from collections.abc import Sequence

from tff_fssl import hparams
from tff_fssl.lazy import tf


def moving_average(
  old: Sequence[tf.Tensor], new: Sequence[tf.Tensor], decay: float
) -> list[tf.Tensor]:
  """Alpha * old + (1 - alpha) * new, for each pair of tensors.

  Tarvainen and Valpola, "Mean teachers are better role models", NeurIPS 2017;
  FedSwitch, eq. 1. It is computed as old + (1 - alpha) * (new - old), so that
  equal tensors stay equal to the bit.

  Args:
    old: Tensors, the average so far. Tensors that are not floats (counters)
      have no average: below alpha = 1, they become the new ones.
    new: Tensors of the same shapes and dtypes.
    decay: alpha in [0, 1]. 1 gives exactly `old` and 0 exactly `new`, whatever
      is in the other.

  Returns:
    The averages, of the same shapes and dtypes.

  Raises:
    UsageError: If the decay is out of range.
    ValueError: If there are more tensors of one than of the other.
  """
  if not 0 <= decay <= 1:
    raise hparams.UsageError(f'decay={decay}: must be from 0 to 1')

  def average(old: tf.Tensor, new: tf.Tensor) -> tf.Tensor:
    if decay == 1:
      return old
    if decay == 0 or not new.dtype.is_floating:
      return new
    return old + (1.0 - decay) * (new - old)

  return [average(*pair) for pair in zip(old, new, strict=True)]
