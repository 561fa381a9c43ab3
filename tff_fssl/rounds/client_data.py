"""A client's data in TensorFlow graphs, and checks of it."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

from tff_fssl.interface import base
from tff_fssl.lazy import tf, tff

# (kind of examples, its least label). -1 is an unknown hidden label.
_LABELS = (('labeled', 0), ('unlabeled', -1))


def read_examples(examples: Any) -> base.Examples:
  """Converts `OrderedDict(x, y)`."""
  return base.Examples(examples['x'], examples['y'])


def read_one(dataset: tf.data.Dataset, default: Any = None) -> Any:
  """Reads the single element of a data set.

  Args:
    dataset: A data set of one element, or of none.
    default: The result for an empty data set. None: zeros, with no example
      where the number of examples is not static.

  Returns:
    The element.
  """
  if default is None:
    default = tf.nest.map_structure(
      lambda s: tf.zeros([d or 0 for d in s.shape], s.dtype),
      dataset.element_spec,
    )
  # `reduce` instantiates its function at each call, which takes 8 ms per
  # client.
  defaults = tf.data.Dataset.from_tensors(default)
  return dataset.concatenate(defaults).take(1).get_single_element()


def one_if(condition: tf.Tensor, value: Any) -> tf.data.Dataset:
  """Makes a sequence of one element, or of none if the condition is false.

  TFF's types are static, so an optional value travels as a sequence.
  """
  whole = tf.data.Dataset.from_tensors(value)
  return whole.take(tf.cast(condition, tf.int64))


def read_client(
  dataset: tf.data.Dataset,
  num_classes: int,
  accepts: Callable[[tf.Tensor], tf.Tensor] | None,
) -> tuple[Any, tf.Tensor]:
  """Reads a client's element, and checks it.

  Clients' data are not trusted. A label outside the range of classes, or a word
  outside of the vocabulary, would be an error on a CPU and give NaN on a GPU. A
  share of steps must be in [0, 1].

  Args:
    dataset: A data set of one element, as `data.clients.make_example` makes it.
    num_classes: Labels must be in [0, num_classes). Labels of unlabelled
      examples may also be -1.
    accepts: `augment.Views.accepts`.

  Returns:
    (element, whether it is usable: bool scalar). An unusable element has no
    examples.
  """
  data = read_one(dataset)
  checks = []
  for kind, lowest in _LABELS:
    x, y = data[kind]['x'], data[kind]['y']
    checks += [
      tf.equal(tf.shape(x)[0], tf.shape(y)[0]),
      tf.reduce_all(tf.logical_and(y >= lowest, y < num_classes)),
    ]
    if accepts is not None:
      checks.append(accepts(x))
  # Only processes for stragglers have a share.
  if 'share' in data:  # NaN is not in the range.
    checks += [data['share'] >= 0.0, data['share'] <= 1.0]
  usable = tf.reduce_all(checks)
  keep = lambda t: t[: tf.where(usable, tf.shape(t)[0], 0)]
  kept = {k: tf.nest.map_structure(keep, data[k]) for k, _ in _LABELS}
  return {**data, **kept}, usable


def add_ids(element_spec: Any, num_clients: int) -> Any:
  """Adds `client_id` to the spec of a client's element, if clients have ids."""
  return _add_number(element_spec, 'client_id') if num_clients else element_spec


def add_slots(element_spec: Any, needs_slots: bool) -> Any:
  """Adds `slot` to the spec of a client's element, if clients have slots."""
  return _add_number(element_spec, 'slot') if needs_slots else element_spec


def _add_number(element_spec: Any, name: str) -> Any:
  return collections.OrderedDict(
    element_spec, **{name: tf.TensorSpec([], tf.int32)}
  )


def data_type(element_spec: Any) -> tff.SequenceType:
  """Converts a result of `data.clients.element_spec` to a client's TFF type."""
  return tff.SequenceType(tff.types.tensorflow_to_type(element_spec))
