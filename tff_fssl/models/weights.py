"""A model's weights as values, and operations on structures of tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from tff_fssl.lazy import tf


class Weights(NamedTuple):
  """A model's weights, including its batch norm statistics.

  Attributes:
    trainable: Trainable variables, in Keras's order.
    non_trainable: All other variables (batch norm's moving moments, layers that
      do not train), in Keras's order, without the frozen ones of a
      `model_fns.FrozenFn`.
    statistics_count: float32 scalar, the number of examples or batches behind
      the batch norm statistics (`statistics.Sums.count`). 0 means that there
      are none yet. Inference then normalizes with the moments of the batch.
  """

  trainable: tuple[tf.Tensor, ...]
  non_trainable: tuple[tf.Tensor, ...]
  statistics_count: tf.Tensor


def all_finite(values: Any) -> tf.Tensor:
  """Tells whether all floats in a structure are finite: bool scalar.

  Examples:
    >>> import tensorflow as tf
    >>> from tff_fssl.models import weights
    >>> counter = tf.constant(7)
    >>> for value in (1.0, float('inf')):
    ...   print(bool(weights.all_finite([tf.constant(value), counter])))
    True
    False
  """
  tensors = map(tf.convert_to_tensor, tf.nest.flatten(values))
  return tf.reduce_all(
    [
      tf.reduce_all(tf.math.is_finite(t))
      for t in tensors
      if t.dtype.is_floating
    ]
  )


def no_values(spec: tf.TensorSpec) -> tf.Tensor:
  """Makes a tensor [0, ...] with the static shape [None, ...]."""
  nothing = tf.zeros([0, *spec.shape], spec.dtype)
  # A loop may then replace it by a longer one.
  return tf.compat.v1.placeholder_with_default(nothing, [None, *spec.shape])


def flatten(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
  """Concatenates all elements of float32 tensors: float32 [elements]."""
  return tf.concat([tf.reshape(t, [-1]) for t in tensors], axis=0)


def unflatten(
  flat: tf.Tensor, like: Sequence[tf.Tensor]
) -> tuple[tf.Tensor, ...]:
  """Inverts `flatten`, for tensors of the shapes of `like`.

  Examples:
    >>> import tensorflow as tf
    >>> from tff_fssl.models import weights
    >>> tensors = [tf.ones([2, 1]), tf.zeros([1])]
    >>> flat = weights.flatten(tensors)
    >>> print(flat.numpy())
    [1. 1. 0.]
    >>> [t.numpy().tolist() for t in weights.unflatten(flat, tensors)]
    [[[1.0], [1.0]], [0.0]]
  """
  sizes = [t.shape.num_elements() for t in like]
  return tuple(
    tf.reshape(piece, t.shape)
    for piece, t in zip(tf.split(flat, sizes), like, strict=True)
  )


def select(condition: tf.Tensor, yes: Any, no: Callable[[], Any]) -> Any:
  """Selects `yes` if `condition`, else `no()`, as a whole and without a copy.

  Args:
    condition: bool scalar.
    yes: A structure of tensors.
    no: Returns a structure of tensors of the same shapes.

  Returns:
    The selected structure.
  """
  return tf.cond(condition, lambda: tf.nest.map_structure(tf.identity, yes), no)


def zero_unless(condition: tf.Tensor, values: Any) -> Any:
  """Replaces a structure of tensors by zeros unless `condition`, a scalar.

  Examples:
    >>> import tensorflow as tf
    >>> from tff_fssl.models import weights
    >>> for accepted in (True, False):
    ...   value = weights.zero_unless(tf.constant(accepted), tf.constant([2.0]))
    ...   print(value.numpy())
    [2.]
    [0.]
  """
  return select(
    condition, values, lambda: tf.nest.map_structure(tf.zeros_like, values)
  )
