"""Exports a computation as graphs that run without TensorFlow Federated.

They are the functions that the in-process runtime runs, so that results are
equal to the bit under the same version of TensorFlow, with as many threads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
import hashlib
import io
import json
import os
import pathlib
from typing import Any

import numpy as np

import tff_fssl
from tff_fssl import durable
from tff_fssl.hparams import UsageError
from tff_fssl.lazy import tf, tff
from tff_fssl.runtime import artefact
from tff_fssl.runtime import functions
from tff_fssl.runtime import operations
from tff_fssl.runtime import program as program_lib
from tff_fssl.runtime import sequences
from tff_fssl.runtime import values

_SERVER, _CLIENT = 'server', 'client'


def export(
  computation: Any,
  folder: str,
  *,
  initial: Any = None,
  simulate_secure_aggregation: bool = False,
) -> artefact.Program:
  """Writes a computation into a folder, from which `artefact.Program` runs it.

  `program.json` describes it, `artefact.py` runs it, `client/` has the graphs
  that clients need. `server/` has those of the server. They hold constants of
  the computation, such as the server's labelled examples.

  Args:
    computation: A computation whose only argument at clients is a sequence of
      one element, such as `next` of a process of `tff_fssl`, or one without
      clients.
    folder: The folder to write, which must be new or empty.
    initial: The first value of the server's argument, which
      `artefact.Program.initial` reads, such as the first state of a process.
      None: it is not written.
    simulate_secure_aggregation: Whether secure sums become plain ones, which
      protect nothing.

  Returns:
    The program that was written.

  Raises:
    NotImplementedError: If the computation has no such form, with the reason.
    UsageError: If the disk refuses, or the folder is not empty.
  """
  program = program_lib.compile_program(
    computation,
    simulate_secure_aggregation=simulate_secure_aggregation,
    exports=True,
  )
  writer = _Writer(folder, program)
  description = writer.describe()
  if initial is not None:
    writer.write_initial(initial)
  for name, content in (
    (artefact.PROGRAM, json.dumps(description, indent=1).encode()),
    ('artefact.py', pathlib.Path(artefact.__file__).read_bytes()),
  ):
    durable.write_file(os.path.join(folder, name), [content])
  return artefact.Program(folder)


class _Writer:
  """Writes the graphs of a program, and describes it."""

  def __init__(self, folder: str, program: program_lib.Program):
    self._folder, self._program = folder, program
    self._ids: dict[operations.Slot, int] = {}
    self._data = _client_data(program)
    # All slots from which the client's data are read.
    self._readers: set[operations.Slot] = set()
    if self._data is not None:
      self._readers = {self._data, *program.readers[self._data]}
    for name in (_SERVER, _CLIENT):
      path = os.path.join(folder, name)
      durable.make_folder(path)
      if os.listdir(path):
        raise UsageError(f'{path}: is not empty; export into a new folder')

  def describe(self) -> dict[str, Any]:
    """Writes all graphs, and returns the content of program.json."""
    program = self._program
    parameter = _named(program.parameter_type, program.parameter)
    result_type = program.result_type
    return {
      'format': artefact.FORMAT,
      'version': artefact.VERSION,
      'tff_fssl': tff_fssl.__version__,
      'tensorflow': tf.version.VERSION,
      'parameter': [
        [name, self._id(slot)] for name, slot in parameter if not slot.clients
      ],
      'result': [
        [name, self._id(slot)]
        for name, slot in zip(
          _names(result_type), self._results(program), strict=True
        )
      ],
      'data': [] if self._data is None else _describe_data(self._data.type),
      'stages': [
        self._write(f'{_SERVER}/stage{index}', stage)
        for index, stage in enumerate(program.stages)
      ],
      'phases': [
        self._phase(index, phase) for index, phase in enumerate(program.phases)
      ],
      # Last: all slots are known now.
      'slots': [
        {
          'name': slot.name,
          'is_at_clients': slot.clients,
          **_spec(_plain_spec(slot)),
        }
        for slot in self._ids
      ],
    }

  def write_initial(self, value: Any) -> None:
    """Writes the first value of the server's argument."""
    parameter_type = self._program.parameter_type
    (server_type,) = [
      inner.member
      for _, inner in tff.structure.iter_elements(parameter_type)
      if inner.placement is tff.SERVER
    ]
    leaves = values.read_leaves(value, server_type, 'initial')
    names = [
      name
      for name, slot in _named(parameter_type, self._program.parameter)
      if not slot.clients
    ]
    content = io.BytesIO()
    arrays = (leaf.numpy() for leaf in leaves)
    np.savez(content, **dict(zip(names, arrays, strict=True)))
    durable.write_file(
      os.path.join(self._folder, *artefact.INITIAL.split('/')),
      [content.getbuffer()],
    )

  def _results(self, program: program_lib.Program) -> Iterator[operations.Slot]:
    for slot in program.result:
      if slot.clients:
        raise NotImplementedError(
          'The computation returns values of clients, which stay there.'
        )
      yield slot

  def _id(self, slot: operations.Slot) -> int:
    """Returns the number of a slot."""
    return self._ids.setdefault(slot, len(self._ids))

  def _phase(self, index: int, phase: program_lib.Phase) -> dict[str, Any]:
    """Writes and describes a phase."""
    computed = {*phase.initial, *phase.accumulate.outputs, *phase.admit.outputs}
    replied = [
      slot
      for slot in dict.fromkeys(
        (
          *phase.admit.inputs,
          *phase.accumulate.inputs,
          *phase.updated.values(),
        )
      )
      if slot.clients and slot not in computed
    ]
    if not self._readers.isdisjoint(replied):
      raise NotImplementedError('The server reads the data of clients.')
    if any(slot.is_sequence for slot in replied):
      # Its graph would run at the server, and may do anything.
      raise NotImplementedError('The server reads a sequence of clients.')
    pairs = lambda slots: [[self._id(a), self._id(b)] for a, b in slots.items()]
    return {
      'work': self._write(f'{_CLIENT}/work{index}', phase.work),
      'admit': self._write(f'{_SERVER}/admit{index}', phase.admit),
      'accumulate': self._write(
        f'{_SERVER}/accumulate{index}', phase.accumulate
      ),
      'sent': [self._id(s) for s in phase.work.inputs if not s.clients],
      'replied': [self._id(slot) for slot in replied],
      'kept': [self._id(slot) for slot in phase.kept],
      'initial': pairs(phase.initial),
      'updated': pairs(phase.updated),
      'final': pairs(phase.final),
    }

  def _write(
    self, name: str, function: functions.Function
  ) -> dict[str, Any] | None:
    """Writes and describes a function, or returns None if it is empty."""
    if function.is_empty:
      return None
    graph = _trace(function, self._readers)
    graph_def = graph.as_graph_def()
    try:
      artefact.check_graph(graph_def)
    except artefact.ArtefactError as error:
      raise NotImplementedError(f'{error}.') from error
    content = graph_def.SerializeToString()
    path = f'{name}.pb'
    durable.write_file(os.path.join(self._folder, path), [content])
    return {
      'graph': path,
      'bytes': len(content),
      'sha256': hashlib.sha256(content).hexdigest(),
      'inputs': [
        None if slot in self._readers else self._id(slot)
        for slot in function.inputs
      ],
      'outputs': [self._id(slot) for slot in function.outputs],
      'feeds': [tensor.name for tensor in graph.inputs],
      'fetches': [tensor.name for tensor in graph.outputs],
    }


def _trace(
  function: functions.Function, readers: set[operations.Slot]
) -> tf.Graph:
  """Traces a function of arrays: data sets are arrays, or graphs as bytes."""
  specs = [
    spec
    for slot in function.inputs
    for spec in (
      _element_specs(slot.type) if slot in readers else [_plain_spec(slot)]
    )
  ]

  def call(*arguments: tf.Tensor) -> list[tf.Tensor]:
    given = iter(arguments)
    tensors = []
    for slot in function.inputs:
      if slot in readers:
        count = len(_element_specs(slot.type))
        element = operations.pack(
          slot.type.element, iter([next(given) for _ in range(count)])
        )
        dataset = tf.data.Dataset.from_tensors(element)
        tensors.append(tf.data.experimental.to_variant(dataset))
      else:
        tensors.append(sequences.decode_slot(slot, next(given)))
    outputs = function.trace(tensors)
    return [
      sequences.encode_slot(slot, output)
      for slot, output in zip(function.outputs, outputs, strict=True)
    ]

  concrete = tf.function(
    call, input_signature=specs, autograph=False
  ).get_concrete_function()
  assert not concrete.captured_inputs, 'a graph must hold all that it reads'
  return concrete.graph


def _client_data(program: program_lib.Program) -> operations.Slot | None:
  """Returns the slot of the clients' data, the only argument at clients."""
  slots = [s for s in operations.flatten(program.parameter) if s.clients]
  at_server = [s for s in program.readers if not s.clients]
  if not slots and not program.phases and not at_server:
    return None
  if len(slots) != 1 or slots[0] not in program.readers or at_server:
    raise NotImplementedError(
      'The argument at clients must be one sequence, and that at the server'
      f' tensors, not {program.parameter_type}.'
    )
  return slots[0]


def _describe_data(sequence: tff.SequenceType) -> list[dict[str, Any]]:
  """Describes the arrays that make a client's data."""
  return [
    {'name': name, **_spec(spec)}
    for name, spec in zip(
      _names(sequence.element), _element_specs(sequence), strict=True
    )
  ]


def _element_specs(sequence: tff.SequenceType) -> list[tf.TensorSpec]:
  """Lists the specs of a sequence's element, in TFF's order."""
  return list(
    map(
      tff.types.type_to_tf_tensor_specs,
      operations.leaf_types(sequence.element),
    )
  )


def _plain_spec(slot: operations.Slot) -> tf.TensorSpec:
  """Returns the spec of a slot's array, a string for a data set's graph."""
  if slot.is_sequence:
    return tf.TensorSpec([], tf.string)
  spec: tf.TensorSpec = slot.spec
  return spec


def _spec(spec: tf.TensorSpec) -> dict[str, Any]:
  """Describes a spec. A dimension of any size is None."""
  shape = spec.shape.as_list() if spec.shape.rank is not None else None
  return {'dtype': spec.dtype.name, 'shape': shape}


def _named(
  type_spec: tff.Type, tree: operations.Tree
) -> list[tuple[str, operations.Slot]]:
  return list(zip(_names(type_spec), operations.flatten(tree), strict=True))


def _names(type_spec: tff.Type, path: Sequence[str] = ()) -> list[str]:
  """Names the leaves of a type: 'state/global_model_weights/trainable/0'."""
  if isinstance(type_spec, tff.FederatedType):
    return _names(type_spec.member, path)
  if not isinstance(type_spec, tff.StructType):
    return ['/'.join(path)]
  return [
    name
    for index, (key, inner) in enumerate(tff.structure.iter_elements(type_spec))
    for name in _names(inner, [*path, str(index) if key is None else key])
  ]
