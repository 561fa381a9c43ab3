"""Converts arguments to tensors, and tensors to results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Optional

import numpy as np

from tff_fssl.lazy import tf, tff
from tff_fssl.runtime import errors
from tff_fssl.runtime import operations
from tff_fssl.runtime import sequences

# The most characters of a value that are shown in a message.
_MAX_SHOWN = 80


def read_leaves(value: Any, type_spec: tff.Type, name: str) -> list[Any]:
  """Returns the tensors and datasets of a value, depth first.

  Args:
    value: A value of `type_spec` in any of the forms that TFF takes.
    type_spec: A type without placements.
    name: Name of the value, for messages.

  Returns:
    For each tensor type an eager tensor, for each sequence type a
    `tf.data.Dataset`.

  Raises:
    TypeError: If the value is not of the type, and says where.
  """
  if isinstance(type_spec, tff.TensorType):
    return [_make_tensor(value, type_spec, name)]
  if isinstance(type_spec, tff.SequenceType):
    return [_make_dataset(value, type_spec, name)]
  if not isinstance(type_spec, tff.StructType):
    raise NotImplementedError(f'{name}: type {type_spec} is not supported.')
  types = tff.structure.to_elements(type_spec)
  elements = _elements(value, types, type_spec, name)
  leaves = []
  for index, ((key, element_type), element) in enumerate(
    zip(types, elements, strict=True)
  ):
    key = f'[{index}]' if key is None else f'.{key}'
    leaves.extend(read_leaves(element, element_type, f'{name}{key}'))
  return leaves


def _elements(
  value: Any, types: list[Any], type_spec: tff.Type, name: str
) -> list[Any]:
  """Returns the elements of a structure, in the order of its type.

  A mapping is read by its keys if the type has names. Everything else is read
  by position. Names, if there are any, must agree with those of the type.
  (TFF's own contexts read mappings by position, too, and ignore nested names.)
  """
  names = [key for key, _ in types]
  if isinstance(value, Mapping) and None not in names:
    if set(names) != set(value):
      raise TypeError(
        f'{name}: expected the keys {names} of {type_spec}, found'
        f' {list(value)}.'
      )
    return [value[key] for key in names]
  if isinstance(value, Mapping):
    # Mappings of Keras, TensorFlow and others: not all are dictionaries.
    value = dict(value)
  try:
    value = tff.structure.from_container(value)
  except TypeError:
    raise TypeError(
      f'{name}: expected a structure {type_spec}, found {type(value)}.'
    ) from None
  elements = tff.structure.to_elements(value)
  if len(elements) != len(types) or any(
    None not in (found, expected) and found != expected
    for (found, _), expected in zip(elements, names)
  ):
    raise TypeError(
      f'{name}: expected a structure {type_spec}, found one of'
      f' {[key for key, _ in elements]}.'
    )
  return [element for _, element in elements]


def _make_tensor(value: Any, type_spec: tff.TensorType, name: str) -> tf.Tensor:
  """Returns a tensor with a value that the type can hold. See `_fits`."""
  spec = operations.element_spec(type_spec)
  if isinstance(value, tf.keras.Variable):
    value = value.value
  if isinstance(value, tf.Variable):
    value = value.read_value()
  if (
    isinstance(value, tf.Tensor)
    and value.dtype == spec.dtype
    and spec.shape.is_compatible_with(value.shape)
  ):
    return value
  if isinstance(value, tf.Tensor):
    value = value.numpy()
  for number in _numbers(value):
    if not _fits(number, type_spec):
      raise TypeError(
        f'{name}: expected {type_spec}, found {_describe(number)}: a value must'
        ' be of the same kind and fit without loss.'
      )
  dtype = type_spec.dtype.type
  try:
    # NumPy's own strings lose zero bytes at their ends.
    array = np.asarray(value, np.object_ if dtype is np.str_ else dtype)
    tensor = tf.constant(array, spec.dtype)
  except (TypeError, ValueError) as error:
    raise TypeError(
      f'{name}: expected {type_spec}, found {type(value).__name__}: {error}'
    ) from error
  if not spec.shape.is_compatible_with(tensor.shape):
    raise TypeError(
      f'{name}: expected {type_spec}, found {tensor.dtype.name}'
      f'{tensor.shape.as_list()}.'
    )
  return tensor


def _numbers(value: Any) -> Iterator[Any]:
  """Returns the scalars and arrays in nested lists and tuples."""
  if isinstance(value, (list, tuple)):
    for element in value:
      yield from _numbers(element)
  elif isinstance(value, tf.Tensor):
    yield value.numpy()
  else:
    yield value


def _fits(value: Any, type_spec: tff.TensorType) -> bool:
  """Says whether a scalar or an array may become a tensor of a type.

  TFF's rule: the kind must be the same (bool, integer, float, complex, string).
  For Python scalars the value must be in range. For NumPy scalars and arrays,
  the dtype's range must be.
  """
  dtype = type_spec.dtype.type
  if isinstance(value, (np.ndarray, np.generic)):
    found = value.dtype.type
    # The usual case, and strings have no range to compare.
    if found is dtype:
      return True
    if issubclass(found, (np.character, np.object_)):
      return dtype is np.str_
    kinds = (np.bool_, np.integer, np.floating, np.complexfloating)
    return any(
      issubclass(found, kind) and issubclass(dtype, kind) for kind in kinds
    ) and np.can_cast(value.dtype, dtype)
  if isinstance(value, bool):
    return dtype is np.bool_
  if isinstance(value, int):
    if not issubclass(dtype, np.integer):
      return False
    info = np.iinfo(dtype)
    return info.min <= value <= info.max
  if isinstance(value, (float, complex)):
    kind = np.floating if isinstance(value, float) else np.complexfloating
    return issubclass(dtype, kind) and _is_in_range(value, dtype)
  return isinstance(value, (str, bytes)) and dtype is np.str_


def _is_in_range(value: complex, dtype: type[np.generic]) -> bool:
  """Says whether a Python scalar becomes no infinity; infinities may stay."""
  try:
    with np.errstate(over='raise'):
      np.asarray(value, dtype)
  except FloatingPointError:
    return False
  return True


def _describe(value: Any) -> str:
  """Describes a value, for messages."""
  if isinstance(value, (np.ndarray, np.generic)):
    return f'{value.dtype.name}{list(value.shape)}'
  text = repr(value)
  if len(text) > _MAX_SHOWN:
    text = text[:_MAX_SHOWN] + ' ...'
  return f'{type(value).__name__} {text}'


def _make_dataset(
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
    element = tff.types.tensorflow_to_type(value.element_spec)
    same = type_spec.element.is_assignable_from(element)
  except (NotImplementedError, TypeError, ValueError):
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
  """Returns a dataset of the elements of a list."""
  elements = [
    read_leaves(element, type_spec.element, f'{name}[{index}]')
    for index, element in enumerate(value)
  ]
  leaf_types = list(operations.leaf_types(type_spec.element))
  columns = []
  for index, leaf_type in enumerate(leaf_types):
    column = [leaves[index] for leaves in elements]
    # Elements of several shapes cannot be one tensor.
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
    num_clients: The number of clients.
  """

  def __init__(
    self,
    value: Any,
    type_spec: Optional[tff.Type],
    slots: operations.Tree,
    readers: Mapping[operations.Slot, Sequence[operations.Slot]],
    default_num_clients: int = 0,
  ):
    """Reads the server's values. `client` reads those of a client.

    Args:
      value: The argument.
      type_spec: Its type, or None if there is no parameter.
      slots: The slots of the parameter.
      readers: Slot of a sequence -> the slots from which operations read it.
        Each gets a sequence of its own, which starts from the beginning.
      default_num_clients: The number of clients if the argument does not
        determine it.

    Raises:
      TypeError: If the argument is not of its type, and says where.
      ValueError: If two client arguments differ in their number of clients.
    """
    self.server: dict[operations.Slot, Any] = {}
    self.num_clients = default_num_clients
    self._readers = readers
    # (name, values, type of a value, slots) of what is placed at clients.
    self.client_parts: list[tuple[str, Sequence[Any], tff.Type, Any]] = []
    # Objects that variant tensors refer to must outlive them.
    self._datasets: list[tf.data.Dataset] = []
    if type_spec is not None:
      self._read(value, type_spec, slots, 'argument')
    sizes = {name: len(values) for name, values, _, _ in self.client_parts}
    if len(set(sizes.values())) > 1:
      raise ValueError(f'The numbers of clients differ: {sizes}.')
    self.num_clients = next(iter(sizes.values()), default_num_clients)

  @classmethod
  def clients_only(
    cls,
    parts: Sequence[tuple[str, Sequence[Any], tff.Type, Any]],
    readers: Mapping[operations.Slot, Sequence[operations.Slot]],
  ) -> Argument:
    """Builds an argument without the server's values.

    Args:
      parts: (name, values, type of a value, slots) of clients' values.
      readers: See `__init__`.

    Returns:
      The argument.
    """
    argument = cls(None, None, (), readers)
    argument.client_parts = list(parts)
    return argument

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
    elif type_spec is not None and _is_of_clients(type_spec):
      if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
        raise TypeError(
          f'{name}: expected a list (or another `Sequence`) with a value of'
          f' {type_spec.member} for each client, found {type(value)}.'
        )
      slots = operations.flatten(slots)
      self.client_parts.append((name, value, type_spec.member, slots))
    else:
      if isinstance(type_spec, tff.FederatedType):
        type_spec = type_spec.member
      leaves = read_leaves(value, type_spec, name)
      self.server.update(self._tensors(slots, leaves, name, self._datasets))

  def client(
    self, index: int, wanted: frozenset[operations.Slot]
  ) -> tuple[dict[operations.Slot, Any], list[Any]]:
    """Returns the values of one client, made now.

    Args:
      index: The position of the client in the cohort.
      wanted: The slots that are needed. Other values are not made.

    Returns:
      The values of the client's slots, and objects that must live as long.

    Raises:
      errors.ExecutionError: If the caller's sequence or function fails.
      TypeError: If the value is not of its type, and says where.
    """
    result: dict[operations.Slot, Any] = {}
    datasets: list[tf.data.Dataset] = []
    for name, values, type_spec, slots in self.client_parts:
      if not self.is_wanted(slots, wanted):
        continue
      value = client_value(values, name, index)
      client_name = f'{name}, client {index}'
      leaves = read_leaves(value, type_spec, client_name)
      result.update(self._tensors(slots, leaves, client_name, datasets, wanted))
    return result, datasets

  def is_wanted(
    self,
    slots: Sequence[operations.Slot],
    wanted: frozenset[operations.Slot],
  ) -> bool:
    """Says whether any of some slots, or of their readers, is wanted."""
    return not wanted.isdisjoint(slots) or any(
      wanted.intersection(self._readers.get(slot, ())) for slot in slots
    )

  def _tensors(
    self,
    slots: Any,
    leaves: list[Any],
    name: str,
    datasets: list[Any],
    wanted: Optional[frozenset[operations.Slot]] = None,
  ) -> Iterator[tuple[operations.Slot, tf.Tensor]]:
    """Yields the tensors of slots and of their readers. None: of all slots."""
    for slot, leaf in zip(operations.flatten(slots), leaves, strict=True):
      if not isinstance(leaf, tf.data.Dataset):
        yield slot, leaf
        continue
      # A variant tensor does not keep its dataset alive.
      datasets.append(leaf)
      start = sequences.start_fn(leaf, name)
      for reader in (slot, *self._readers.get(slot, ())):
        if wanted is None or reader in wanted:
          yield reader, start()


def client_value(values: Sequence[Any], name: str, index: int) -> Any:
  """Makes a client's value, or raises `errors.ExecutionError`."""
  try:
    value = values[index]
    return value() if callable(value) else value
  except Exception as error:
    raise errors.ExecutionError(
      f'Making {name}', error, client_index=index
    ) from error


def client_parts(
  type_spec: Optional[tff.Type], slots: Any, name: str = 'argument'
) -> Iterator[tuple[str, tff.Type, tuple[operations.Slot, ...]]]:
  """Yields (name, type of a value, slots) of an argument's client values.

  Args:
    type_spec: The argument's type, or None if there is no argument.
    slots: Its slots.
    name: Its name, for messages.

  Yields:
    The parts, in the order of `Argument.client_parts`.
  """
  if isinstance(type_spec, tff.StructType):
    types = tff.structure.to_elements(type_spec)
    for index, (key, element_type) in enumerate(types):
      child = f'{name}[{index}]' if key is None else f'{name}.{key}'
      yield from client_parts(element_type, slots[index], child)
  elif type_spec is not None and _is_of_clients(type_spec):
    yield name, type_spec.member, operations.flatten(slots)


def _is_of_clients(type_spec: tff.Type) -> bool:
  """Says whether each client has a value of its own."""
  return (
    isinstance(type_spec, tff.FederatedType)
    and type_spec.placement is tff.CLIENTS
    and not type_spec.all_equal
  )


def build_result(
  type_spec: tff.Type, leaves: Iterator[Any], num_clients: int
) -> Any:
  """Builds the result of an invocation, of containers and NumPy arrays.

  Args:
    type_spec: Type of the result, with containers.
    leaves: The values of its slots, depth first: a tensor, or, for a slot of
      the clients, a list with one value per client.
    num_clients: The number of clients.

  Returns:
    The result: NumPy arrays (read-only) and scalars, `tf.data.Dataset`s for
    sequences, lists for values placed at clients.
  """
  value = operations.pack_structs(
    type_spec, lambda part: _result(part, leaves, num_clients)
  )
  return tff.types.type_to_py_container(value, type_spec)


def _result(
  type_spec: tff.Type, leaves: Iterator[Any], num_clients: int
) -> Any:
  """Does `build_result` for a type that is no struct, without containers."""
  if not isinstance(type_spec, tff.FederatedType):
    return _export(next(leaves), type_spec)
  if type_spec.placement is tff.SERVER or type_spec.all_equal:
    return operations.pack_structs(
      type_spec.member, lambda part: _export(next(leaves), part)
    )
  count = len(tuple(operations.leaf_types(type_spec)))
  columns = [_per_client(next(leaves), num_clients) for _ in range(count)]
  return [
    build_result(type_spec.member, iter([c[index] for c in columns]), 0)
    for index in range(num_clients)
  ]


def _per_client(leaf: Any, num_clients: int) -> Sequence[Any]:
  return leaf if isinstance(leaf, list) else [leaf] * num_clients


def _export(leaf: Any, type_spec: tff.Type) -> Any:
  if isinstance(type_spec, tff.SequenceType):
    return sequences.open_sequence(leaf, type_spec.element)
  if not leaf.shape.rank:
    return leaf.numpy()
  # Not a copy: large states would be in memory twice.
  array = np.asarray(leaf)
  array.flags.writeable = False
  return array
