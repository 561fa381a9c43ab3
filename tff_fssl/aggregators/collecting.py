"""Collection of clients' values at the server, client by client."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tff_fssl.lazy import tf, tff
from tff_fssl.models.weights import no_values

# Appending to all rows would copy n rows n times. With a buffer of 10 rows,
# they are copied n / 10 + 1 times.
_LATEST_ROWS = 10


def build_collect(
  one: tff.Type,
) -> tuple[Callable[[tff.Value], tff.Value], tff.Type]:
  """Builds a function from `one@CLIENTS` to `rows@SERVER`.

  Args:
    one: The type of a client's value, a structure of tensors.

  Returns:
    A function for use in a federated computation, and the type of `rows`. It is
    the same structure of tensors with a new first dimension: the clients, in
    the order in which they are aggregated.

  Examples:
    >>> import numpy as np
    >>> import tensorflow_federated as tff
    >>> from tff_fssl.aggregators import collecting
    >>> one = tff.TensorType(np.float32, [2])
    >>> collect, rows_type = collecting.build_collect(one)
    >>> print(rows_type)
    float32[?,2]
    >>> at_clients = tff.FederatedType(one, tff.CLIENTS)
    >>> collected = tff.federated_computation(collect, at_clients)
    >>> print(collected([np.float32([1, 2]), np.float32([3, 4])]))
    [[1. 2.]
     [3. 4.]]
  """
  specs = tff.types.type_to_tf_tensor_specs(one)
  many = tff.types.tensorflow_to_type(
    tf.nest.map_structure(
      lambda s: tf.TensorSpec([None, *s.shape], s.dtype), specs
    )
  )
  # (most rows, buffer of the latest rows).
  both = tff.to_type((many, (many,) * _LATEST_ROWS))

  @tff.tensorflow.computation
  def no_rows() -> Any:
    first, *latest = (
      tf.nest.map_structure(no_values, specs) for _ in range(1 + _LATEST_ROWS)
    )
    return first, tuple(latest)

  @tff.tensorflow.computation(both, one)
  def append(rows: Any, row: Any) -> Any:
    row = tf.nest.map_structure(lambda t: t[None], row)
    latest = (*rows[1][1:], row)
    # A full buffer is emptied into the rows.
    return tf.cond(
      _count(latest[0]) > 0,
      lambda: (
        _concatenated(rows[0], *latest),
        tf.nest.map_structure(lambda t: t[:0], latest),
      ),
      lambda: tf.nest.map_structure(tf.identity, (rows[0], latest)),
    )

  @tff.tensorflow.computation(both, both)
  def merge(first: Any, second: Any) -> Any:
    # In the order of clients: the buffer of `first` precedes `second`.
    return _concatenated(first[0], *first[1], second[0]), second[1]

  @tff.tensorflow.computation(both)
  def report(rows: Any) -> Any:
    return _concatenated(rows[0], *rows[1])

  def collect(rows: tff.Value) -> tff.Value:
    return tff.federated_aggregate(rows, no_rows(), append, merge, report)

  return collect, many


def _count(rows: Any) -> tf.Tensor:
  """Counts rows: int32 scalar."""
  return tf.shape(tf.nest.flatten(rows)[0])[0]


def _concatenated(*rows: Any) -> Any:
  """Concatenates structures of tensors [n, ...]."""
  return tf.nest.map_structure(lambda *t: tf.concat(t, axis=0), *rows)


def collect_rows(rows: tff.Value) -> tff.Value:
  """Collects rows at the server, any number from each client.

  Args:
    rows: float32[?, D]@CLIENTS.

  Returns:
    float32[?, D]@SERVER, in the order in which clients are aggregated.

  Examples:
    >>> import numpy as np
    >>> import tensorflow_federated as tff
    >>> from tff_fssl.aggregators import collecting
    >>> rows_type = tff.TensorType(np.float32, [None, 2])
    >>> at_clients = tff.FederatedType(rows_type, tff.CLIENTS)
    >>> collect = tff.federated_computation(collecting.collect_rows, at_clients)
    >>> print(collect([np.float32([[1, 2]]), np.float32([[3, 4], [5, 6]])]))
    [[1. 2.]
     [3. 4.]
     [5. 6.]]
  """
  num_columns = rows.type_signature.member.shape[1]
  rows_type = tff.TensorType(np.float32, [None, num_columns])

  @tff.tensorflow.computation
  def no_rows() -> tf.Tensor:
    return no_values(tf.TensorSpec([num_columns]))

  @tff.tensorflow.computation(rows_type, rows_type)
  def concatenate(first: tf.Tensor, second: tf.Tensor) -> tf.Tensor:
    return tf.concat([first, second], axis=0)

  @tff.tensorflow.computation(rows_type)
  def report(collected: tf.Tensor) -> tf.Tensor:
    return collected

  return tff.federated_aggregate(
    rows, no_rows(), concatenate, concatenate, report
  )
