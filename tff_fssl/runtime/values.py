"""Arguments to tensors, and tensors to results."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Optional

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from tff_fssl.runtime import errors
from tff_fssl.runtime import operations
from tff_fssl.runtime import sequences


def to_leaves(value: Any, type_spec: tff.Type, name: str) -> list[Any]:
  """The tensors and datasets of a value, depth first.

  Args:
    value: A value of `type_spec` in any of the forms that TFF takes.
    type_spec: A type without placements.
    name: What the value is, for messages.

  Returns:
    For each tensor type an eager tensor, for each sequence type a
    `tf.data.Dataset`.

  Raises:
    TypeError: If the value is not of the type; says where.
  """
  if isinstance(type_spec, tff.TensorType):
    return [_to_tensor(value, type_spec, name)]
  if isinstance(type_spec, tff.SequenceType):
    return [_to_dataset(value, type_spec, name)]
  if not isinstance(type_spec, tff.StructType):
    raise NotImplementedError(f'{name}: type {type_spec} is not supported.')
  types = tff.structure.to_elements(type_spec)
  elements = _elements(value, types, type_spec, name)
  leaves = []
  for index, ((key, element_type), element) in enumerate(
    zip(types, elements, strict=True)
  ):
    key = f'[{index}]' if key is None else f'.{key}'
    leaves.extend(to_leaves(element, element_type, f'{name}{key}'))
  return leaves


def _elements(
  value: Any, types: list[Any], type_spec: tff.Type, name: str
) -> list[Any]:
  """The elements of a structure, in the order of its type."""
  if isinstance(value, Mapping):
    names = [key for key, _ in types]
    if set(names) != set(value):
      raise TypeError(
        f'{name}: expected the keys {names} of {type_spec}, found'
        f' {list(value)}.'
      )
    return [value[key] for key in names]
  try:
    if not isinstance(value, tff.structure.Struct):
      value = tff.structure.from_container(value)
  except TypeError:
    raise TypeError(
      f'{name}: expected a structure {type_spec}, found {type(value)}.'
    ) from None
  elements = tff.structure.to_elements(value)
  if len(elements) != len(types) or any(
    found not in (None, expected)
    for (found, _), (expected, _) in zip(elements, types)
  ):
    raise TypeError(
      f'{name}: expected a structure {type_spec}, found one of'
      f' {[key for key, _ in elements]}.'
    )
  return [element for _, element in elements]


def _to_tensor(value: Any, type_spec: tff.TensorType, name: str) -> tf.Tensor:
  spec = operations.element_spec(type_spec)
  if isinstance(value, tf.Variable):
    value = value.read_value()
  if not isinstance(value, tf.Tensor):
    try:
      array = np.asarray(value)
      wanted = spec.dtype.as_numpy_dtype
      # Python's numbers have no width of their own; arrays have.
      if not hasattr(value, 'dtype') and np.issubdtype(wanted, np.number):
        array = array.astype(wanted, casting='same_kind')
      value = tf.convert_to_tensor(array)
    except (TypeError, ValueError) as error:
      raise TypeError(
        f'{name}: expected {type_spec}, found {type(value).__name__}: {error}'
      ) from error
  if value.dtype != spec.dtype or not spec.shape.is_compatible_with(
    value.shape
  ):
    raise TypeError(
      f'{name}: expected {type_spec}, found {value.dtype.name}'
      f'{value.shape.as_list()}.'
    )
  return value


def _to_dataset(
  value: Any, type_spec: tff.SequenceType, name: str
) -> tf.data.Dataset:
  expected = operations.element_spec(type_spec.element)
  if isinstance(value, (list, tuple)):
    return _dataset_of_list(value, type_spec, expected, name)
  if not isinstance(value, tf.data.Dataset):
    raise TypeError(
      f'{name}: expected a `tf.data.Dataset` or a list of its elements, for'
      f' {type_spec}; found {type(value)}.'
    )
  try:
    tf.nest.assert_same_structure(
      expected, value.element_spec, check_types=False
    )
    same = all(
      isinstance(b, tf.TensorSpec)
      and a.dtype == b.dtype
      and a.shape.is_compatible_with(b.shape)
      for a, b in zip(
        tf.nest.flatten(expected), tf.nest.flatten(value.element_spec)
      )
    )
  except (TypeError, ValueError):
    same = False
  if not same:
    raise TypeError(
      f'{name}: expected a dataset of elements {expected}, found one of'
      f' {value.element_spec}.'
    )
  return value


def _dataset_of_list(
  value: Sequence[Any], type_spec: tff.SequenceType, expected: Any, name: str
) -> tf.data.Dataset:
  """A dataset of the elements of a list."""
  elements = [
    to_leaves(element, type_spec.element, f'{name}[{index}]')
    for index, element in enumerate(value)
  ]
  leaf_types = list(operations.leaf_types(type_spec.element))
  columns = []
  for index, leaf_type in enumerate(leaf_types):
    column = [leaves[index] for leaves in elements]
    if len({tuple(tensor.shape) for tensor in column}) > 1:
      packed = [operations.pack(type_spec.element, iter(e)) for e in elements]
      return tf.data.Dataset.from_generator(
        lambda: packed, output_signature=expected
      )
    if column:
      columns.append(tf.stack(column))
    else:
      spec = operations.element_spec(leaf_type)
      shape = [0, *(size or 0 for size in spec.shape)]
      columns.append(tf.zeros(shape, spec.dtype))
  return tf.data.Dataset.from_tensor_slices(
    operations.pack(type_spec.element, iter(columns))
  )


class Argument:
  """The argument of one invocation.

  Attributes:
    server: The value of each of the server's slots.
    num_clients: The number of clients; 0 if the argument does not tell.
  """

  def __init__(
    self,
    value: Any,
    type_spec: Optional[tff.Type],
    slots: operations.Tree,
  ):
    """Reads the server's values; the clients' are read one client at a time.

    Args:
      value: The argument.
      type_spec: Its type, or None if there is no parameter.
      slots: The slots of the parameter.

    Raises:
      TypeError: If the argument is not of its type; says where.
      ValueError: If two client arguments differ in their number of clients.
    """
    self.server: dict[operations.Slot, Any] = {}
    self.num_clients = 0
    self._clients: list[tuple[str, Sequence[Any], tff.Type, Any]] = []
    # What variant tensors refer to must not be freed before them.
    self._datasets: list[tf.data.Dataset] = []
    if type_spec is not None:
      self._read(value, type_spec, slots, 'argument')
    sizes = {name: len(values) for name, values, _, _ in self._clients}
    if len(set(sizes.values())) > 1:
      raise ValueError(f'The numbers of clients differ: {sizes}.')
    self.num_clients = next(iter(sizes.values()), 0)

  def _read(
    self, value: Any, type_spec: tff.Type, slots: Any, name: str
  ) -> None:
    if isinstance(type_spec, tff.StructType) and tff.types.contains(
      type_spec, lambda t: isinstance(t, tff.FederatedType)
    ):
      types = tff.structure.to_elements(type_spec)
      elements = _elements(value, types, type_spec, name)
      for index, (key, element_type) in enumerate(types):
        child = f'{name}[{index}]' if key is None else f'{name}.{key}'
        self._read(elements[index], element_type, slots[index], child)
    elif (
      isinstance(type_spec, tff.FederatedType)
      and type_spec.placement is tff.CLIENTS
      and not type_spec.all_equal
    ):
      if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
        raise TypeError(
          f'{name}: expected a list (or another `Sequence`) with a value of'
          f' {type_spec.member} for each client, found {type(value)}.'
        )
      slots = operations.flatten(slots)
      self._clients.append((name, value, type_spec.member, slots))
    else:
      if isinstance(type_spec, tff.FederatedType):
        type_spec = type_spec.member
      leaves = to_leaves(value, type_spec, name)
      self.server.update(self._tensors(slots, leaves, self._datasets))

  def client(
    self, index: int, wanted: frozenset[operations.Slot]
  ) -> tuple[dict[operations.Slot, Any], list[Any]]:
    """The values of one client, made now.

    Args:
      index: The position of the client in the cohort.
      wanted: The slots that are needed; values with none of them are not made.

    Returns:
      The values of the client's slots, and what must live as long as they do.

    Raises:
      errors.ExecutionError: If the caller's sequence or function fails.
      TypeError: If the value is not of its type; says where.
    """
    result: dict[operations.Slot, Any] = {}
    datasets: list[tf.data.Dataset] = []
    for name, values, type_spec, slots in self._clients:
      if wanted.isdisjoint(slots):
        continue
      try:
        value = values[index]
        if callable(value):
          value = value()
      except Exception as error:
        raise errors.ExecutionError(
          f'Making {name}', error, client_index=index
        ) from error
      leaves = to_leaves(value, type_spec, f'{name}, client {index}')
      result.update(self._tensors(slots, leaves, datasets))
    return result, datasets

  def _tensors(
    self, slots: Any, leaves: list[Any], datasets: list[Any]
  ) -> Iterator[tuple[operations.Slot, tf.Tensor]]:
    for slot, leaf in zip(operations.flatten(slots), leaves, strict=True):
      if isinstance(leaf, tf.data.Dataset):
        datasets.append(leaf)
        leaf = tf.data.experimental.to_variant(leaf)
      yield slot, leaf


def to_result(
  type_spec: tff.Type, leaves: Iterator[Any], num_clients: int
) -> Any:
  """The result of an invocation, in Python's containers and NumPy's arrays.

  Args:
    type_spec: Its type, with containers.
    leaves: The values of its slots, depth first: a tensor, or for a slot of
      the clients a list of one a client.
    num_clients: The number of clients.

  Returns:
    The result: arrays and scalars of NumPy, `tf.data.Dataset`s for sequences,
    lists for values placed at clients.
  """

  def build(element: tff.Type) -> Any:
    if isinstance(element, tff.StructType):
      return tff.structure.Struct(
        [(key, build(t)) for key, t in tff.structure.iter_elements(element)]
      )
    if isinstance(element, tff.FederatedType) and not (
      element.placement is tff.SERVER or element.all_equal
    ):
      count = len(tuple(operations.leaf_types(element)))
      columns = [_per_client(next(leaves), num_clients) for _ in range(count)]
      return [
        to_result(element.member, iter([c[index] for c in columns]), 0)
        for index in range(num_clients)
      ]
    if isinstance(element, tff.FederatedType):
      return build(element.member)
    return _export(next(leaves), element)

  return tff.types.type_to_py_container(build(type_spec), type_spec)


def _per_client(leaf: Any, num_clients: int) -> Sequence[Any]:
  return leaf if isinstance(leaf, list) else [leaf] * num_clients


def _export(leaf: Any, type_spec: tff.Type) -> Any:
  if isinstance(type_spec, tff.SequenceType):
    return sequences.open_sequence(leaf, type_spec)
  return leaf.numpy()
