"""Encodes values of slots for another process."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
import functools
from typing import Any, NamedTuple

from tff_fssl.lazy import tf, tff
from tff_fssl.runtime import operations
from tff_fssl.runtime import program as program_lib
from tff_fssl.runtime import recipes
from tff_fssl.runtime import sequences
from tff_fssl.runtime import values as values_lib


class Made(NamedTuple):
  """A client's value, as the arguments of its recipe.

  Attributes:
    recipe: The position among the recipes that travel along.
    arguments: The recipe's arguments.
  """

  recipe: int
  arguments: tuple[Any, ...]


def encode(value: tf.Tensor) -> Any:
  """Returns an array, or the graph of a dataset as bytes."""
  # A variant is a pointer, and means nothing in another process.
  if value.dtype == tf.variant:
    return sequences.graph_of(value)
  return value.numpy()


def decode(value: Any, leaf_type: tff.Type) -> tf.Tensor:
  """Decodes a result of `encode` to a tensor, a variant for a dataset."""
  if isinstance(leaf_type, tff.SequenceType):
    return tf.raw_ops.DatasetFromGraph(graph_def=value)
  return tf.constant(value, operations.element_spec(leaf_type).dtype)


def sent_slots(phase: program_lib.Phase) -> tuple[operations.Slot, ...]:
  """Lists the slots of the server that clients' work may read, in order.

  The same program gives the same order in every process.
  """
  return tuple(
    slot
    for slot in dict.fromkeys(
      (
        *phase.work.inputs,
        *phase.accumulate.inputs,
        *phase.updated.values(),
        *phase.initial.values(),
      )
    )
    if not slot.clients
  )


def encode_server(
  phase: program_lib.Phase, server: Mapping[operations.Slot, Any]
) -> list[Any]:
  """Encodes the server's values that clients' work reads, or None."""
  return [
    encode(server[slot]) if slot in server else None
    for slot in sent_slots(phase)
  ]


def decode_server(
  phase: program_lib.Phase, sent: Sequence[Any]
) -> dict[operations.Slot, Any]:
  """Decodes the values of `encode_server`."""
  return {
    slot: decode(value, slot.type)
    for slot, value in zip(sent_slots(phase), sent, strict=True)
    if value is not None
  }


def encode_client(
  argument: values_lib.Argument,
  index: int,
  wanted: frozenset[operations.Slot],
  known: list[recipes.Recipe],
) -> list[Any]:
  """Encodes a client's values: for each a `Made`, a list of leaves or None.

  Args:
    argument: The argument.
    index: The client.
    wanted: The slots that are needed.
    known: The recipes that travel along, to which new ones are appended.

  Returns:
    One element for each part of the argument that is placed at clients.
  """
  sent: list[Any] = []
  for name, values, type_spec, slots in argument.client_parts:
    # Data that no phase reads are not made: a recipe may read a disk.
    if not argument.is_wanted(slots, wanted):
      sent.append(None)
      continue
    if isinstance(values, recipes.MadeByRecipe) and values.recipe is not None:
      # By identity: comparing recipes may compare whole data sets.
      if not any(values.recipe is other for other in known):
        known.append(values.recipe)
      place = next(i for i, other in enumerate(known) if other is values.recipe)
      sent.append(Made(place, values.arguments_of(index)))
      continue
    value = values_lib.client_value(values, name, index)
    leaves = values_lib.read_leaves(value, type_spec, f'{name}, client {index}')
    sent.append([encode(_closed(leaf)) for leaf in leaves])
  return sent


def _closed(leaf: Any) -> tf.Tensor:
  if isinstance(leaf, tf.data.Dataset):
    return tf.data.experimental.to_variant(leaf)
  return leaf


def decode_clients(
  program: program_lib.Program,
  clients: Sequence[Sequence[Any]],
  makers: Sequence[Any],
) -> values_lib.Argument:
  """Builds an argument with some clients, from results of `encode_client`.

  Args:
    program: The program.
    clients: The result of `encode_client` for each client.
    makers: The functions that the recipes loaded.

  Returns:
    The argument, without values of the server.
  """

  def value_of(sent: Any, type_spec: tff.Type) -> Any:
    if isinstance(sent, Made):
      return makers[sent.recipe](*sent.arguments)
    leaves = (
      _open(decode(value, leaf_type), leaf_type)
      for value, leaf_type in zip(
        sent, operations.leaf_types(type_spec), strict=True
      )
    )
    return operations.pack(type_spec, leaves)

  parts = []
  described = values_lib.client_parts(program.parameter_type, program.parameter)
  for position, (name, type_spec, slots) in enumerate(described):
    column = [
      functools.partial(value_of, client[position], type_spec)
      for client in clients
    ]
    parts.append((name, column, type_spec, slots))
  return values_lib.Argument.clients_only(parts, program.readers)


def _open(tensor: tf.Tensor, leaf_type: tff.Type) -> Any:
  if isinstance(leaf_type, tff.SequenceType):
    return sequences.open_sequence(tensor, leaf_type.element)
  return tensor


def encode_kept(
  slots: Iterable[operations.Slot],
  kept: Mapping[operations.Slot, Sequence[Any]],
  indices: Iterable[int],
) -> list[Any]:
  """Encodes clients' values that earlier phases kept, None for other slots."""
  indices = list(indices)
  return [
    [encode(kept[slot][index]) for index in indices] if slot in kept else None
    for slot in slots
  ]


def kept_slots(program: program_lib.Program) -> tuple[operations.Slot, ...]:
  """Returns all slots that phases keep, in a fixed order."""
  return tuple(slot for phase in program.phases for slot in phase.kept)
