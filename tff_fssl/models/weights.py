"""A model's weights as values, and operations on structures of tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from tff_fssl.lazy import tf


class Weights(NamedTuple):
  """A model's weights, including its batch norm statistics.

  Attributes:
    trainable: Trainable variables, in Keras's order.
    non_trainable: All others (batch norm's moving moments, layers that do not
      train), in Keras's order; without those of a `frozen.FrozenFn`.
    statistics_count: float32 scalar, the number of examples or batches from
      which the batch norm statistics come (`statistics.Sums.count`); 0 means
      that there are none yet, so that inference has to normalize with the
      batch's own moments.
  """

  trainable: tuple[tf.Tensor, ...]
  non_trainable: tuple[tf.Tensor, ...]
  statistics_count: tf.Tensor


def all_finite(values: Any) -> tf.Tensor:
  """Whether every float in a structure of tensors is finite: bool scalar."""
  tensors = map(tf.convert_to_tensor, tf.nest.flatten(values))
  return tf.reduce_all(
    [
      tf.reduce_all(tf.math.is_finite(t))
      for t in tensors
      if t.dtype.is_floating
    ]
  )


def no_values(spec: tf.TensorSpec) -> tf.Tensor:
  """A tensor [0, ...] whose type is [None, ...]: it may grow."""
  nothing = tf.zeros([0, *spec.shape], spec.dtype)
  return tf.compat.v1.placeholder_with_default(nothing, [None, *spec.shape])


def flatten(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
  """All elements of float32 tensors, float32 [elements]."""
  return tf.concat([tf.reshape(t, [-1]) for t in tensors], axis=0)


def unflatten(
  flat: tf.Tensor, like: Sequence[tf.Tensor]
) -> tuple[tf.Tensor, ...]:
  """The inverse of `flatten`, for tensors of the shapes of `like`."""
  sizes = [t.shape.num_elements() for t in like]
  return tuple(
    tf.reshape(piece, t.shape)
    for piece, t in zip(tf.split(flat, sizes), like, strict=True)
  )


def select(condition: tf.Tensor, yes: Any, no: Callable[[], Any]) -> Any:
  """`yes` if `condition`, else `no()`, as a whole and without a copy.

  Args:
    condition: bool scalar.
    yes: A structure of tensors.
    no: Returns a structure of tensors of the same shapes.

  Returns:
    One of the two.
  """
  return tf.cond(condition, lambda: tf.nest.map_structure(tf.identity, yes), no)


def zero_unless(condition: tf.Tensor, values: Any) -> Any:
  """A structure of tensors if `condition`, a bool scalar, else zeros."""
  return select(
    condition, values, lambda: tf.nest.map_structure(tf.zeros_like, values)
  )
