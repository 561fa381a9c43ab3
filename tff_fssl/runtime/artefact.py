"""Runs an exported computation. Needs TensorFlow and NumPy alone.

`export.export` copies this file beside the graphs, where it is used as it is:

    import artefact
    program = artefact.Program('.')
    result = program.run(program.initial(), clients)

`run` does everything in one process. A federation calls the parts of `run`: at
the server `stage`, `sent`, `begin`, `add` and `end`, at a client `work`. Values
are NumPy arrays, and `bytes` for the graph of a data set. Sums depend on the
order of clients: for equal results, add them in the order of the cohort.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator, Mapping, Sequence
import contextlib
import gzip
import hashlib
import json
import math
import os
from typing import Any
import zipfile
import zlib

from google.protobuf import message  # type: ignore[import-untyped]
import numpy as np
import tensorflow as tf
from tensorflow.python.eager import context as eager_context
from tensorflow.python.framework import op_def_registry

FORMAT, VERSION = 'tff_fssl.program', 2
PROGRAM = 'program.json'
# The first values of the server's arguments, if they were exported.
INITIAL = 'server/initial.npz'
# Files as one text, a result of `pack`. It is JSON, and a Python file, since
# some ways to send an app take no others.
PACKED = 'packed.py'

# The type of the graph of a data set.
_TEXT = 'string'

# What graphs may do besides plain arithmetic: see `check_graph`.
_OPERATIONS = frozenset(
  """Assert AssignAddVariableOp AssignSubVariableOp AssignVariableOp
  ConcatenateDataset DatasetFromGraph DatasetToGraphV2 DatasetToSingleElement
  If OptionalFromValue OptionalGetValue OptionalHasValue OptionalNone
  PartitionedCall RandomStandardNormal ReadVariableOp ReduceDataset
  ResourceApplyGradientDescent ResourceApplyMomentum StatefulPartitionedCall
  StatelessIf StatelessWhile TakeDataset TensorDataset TensorListConcatV2
  TensorListGetItem TensorListReserve TensorListSetItem TensorListStack
  VarHandleOp While _Retval""".split()
)
_GRAPH_READER, _GRAPH_WRITER = 'DatasetFromGraph', 'DatasetToGraphV2'
# Attributes of text that choose how to compute. Others may name a file, an
# address or another program.
_CHOICES = frozenset(
  """align bad_indices_policy data_format dst_format equation fill_mode
  interpolation kernel_type message method mode padding reduction_type
  round_mode src_format""".split()
)
_TEXTS_OF_ATTRIBUTES = ('string', 'list(string)', 'func', 'list(func)')

# Slot -> value.
Values = dict[int, Any]


class ArtefactError(Exception):
  """A folder that is not an exported computation, or was changed."""


class MessageError(Exception):
  """Values that cannot be those of a message: a phase's, or a reply's."""


def has_valid_bits(array: np.ndarray) -> bool:
  """Says whether all booleans are 0 or 1: NumPy reads other bytes, too.

  Operations would count such a true as up to 255.
  """
  return array.dtype != np.bool_ or bool((array.view(np.uint8) <= 1).all())


def check_graph(graph: Any) -> None:
  """Refuses a graph that could do more than compute.

  A graph is a program, and whoever sends one is not trusted. It may have the
  operations that exported graphs have, and any other without a state, text and
  data sets. So none reads or writes a file, connects to an address, or calls
  Python. This is no sandbox: an operation may have a flaw.

  Args:
    graph: The `GraphDef`. Nothing of it runs, nor is imported.

  Raises:
    ArtefactError: If it has another operation.
  """
  functions = {function.signature.name for function in graph.library.function}
  for nodes in (graph.node, *(f.node_def for f in graph.library.function)):
    # The graph of a data set must come from a feed, which is checked, too.
    sources = (_GRAPH_WRITER, *(['Placeholder'] if nodes is graph.node else []))
    checked = {node.name for node in nodes if node.op in sources}
    for node in nodes:
      definition = op_def_registry.get(node.op)
      if node.op == _GRAPH_READER:
        is_allowed = node.input[0].partition(':')[0] in checked
      elif definition is None:
        is_allowed = node.op in functions
      else:
        is_allowed = node.op in _OPERATIONS or _is_arithmetic(definition, node)
      # A function of that name would be called instead.
      if not is_allowed or (definition is not None and node.op in functions):
        raise ArtefactError(
          f'operation {node.op} ({node.name}) is refused: a graph may only'
          ' compute, and use no files, addresses or Python'
        )


def _is_arithmetic(operation: Any, node: Any) -> bool:
  """Says whether an operation's definition has numbers alone, and no state."""
  others = [t.as_datatype_enum for t in (tf.string, tf.resource, tf.variant)]
  arguments = (*operation.input_arg, *operation.output_arg)
  return not (
    operation.is_stateful
    or operation.name.startswith('_')  # TensorFlow's own, not for graphs.
    or any(argument.type in others for argument in arguments)
    or any(
      attribute.type in _TEXTS_OF_ATTRIBUTES
      and attribute.name not in _CHOICES
      # Newer versions of TensorFlow add some, which have defaults.
      and attribute.name in node.attr
      for attribute in operation.attr
    )
  )


def _parse_graph(content: bytes) -> Any:
  """Parses and checks a graph, or raises `ArtefactError`."""
  try:
    graph = tf.compat.v1.GraphDef.FromString(content)
  except message.DecodeError as error:
    raise ArtefactError(f'is no graph: {error}') from error
  check_graph(graph)
  return graph


def read_npz(path: str) -> dict[str, np.ndarray]:
  """Reads arrays from a file that may be torn, or raises `ArtefactError`."""
  # The errors are those of `files.read_npz`, which is not where this file runs.
  try:
    with np.load(path, allow_pickle=False) as arrays:
      return dict(arrays)
  except (
    ValueError,
    OSError,
    EOFError,
    KeyError,
    TypeError,
    AttributeError,
    NotImplementedError,
    MemoryError,
    zipfile.BadZipFile,
    zlib.error,
  ) as error:
    raise ArtefactError(f'{path}: cannot be read: {error}') from error


def pack(folder: str, names: Iterable[str]) -> str:
  """Packs files into the text of a file `PACKED`.

  Args:
    folder: The folder of an export.
    names: The files in it, such as 'client/work0.pb'.

  Returns:
    The text.
  """
  packed = {}
  for name in names:
    with open(os.path.join(folder, *name.split('/')), 'rb') as file:
      # Without a time, equal files have equal texts.
      content = gzip.compress(file.read(), mtime=0)
    packed[name] = base64.b64encode(content).decode()
  return json.dumps(packed, indent=1) + '\n'


@contextlib.contextmanager
def _call_options() -> Iterator[None]:
  """Runs functions without TensorFlow's memory optimizer."""
  # The reason is that of `loops.call_options`, which is not where this file
  # runs.
  context = eager_context.context()
  old = context.function_call_options
  config = tf.compat.v1.ConfigProto.FromString(old.config_proto_serialized)
  rewriting = config.graph_options.rewrite_options
  rewriting.memory_optimization = (
    rewriting.SWAPPING_HEURISTICS
    if tf.config.list_logical_devices('GPU')
    else rewriting.NO_MEM_OPT
  )
  context.function_call_options = eager_context.FunctionCallOptions(
    old.executor_type, config
  )
  try:
    yield
  finally:
    context.function_call_options = old


class Program:
  """An exported computation.

  Attributes:
    description: The content of program.json.
    digest: The digest of program.json, which has those of all graphs.
    parameter: Names of the server's arguments, such as 'state/.../0'.
    result: Names of the results.
    data: Names of the arrays that make a client's data.
  """

  def __init__(self, folder: str):
    """Reads program.json. Graphs are read at their first use.

    Args:
      folder: The folder of the export. Clients need no files of its `server`.

    Raises:
      ArtefactError: If it is not such a folder.
    """
    self._folder = folder
    path = self._path(PROGRAM)
    content = self.read(PROGRAM)
    try:
      description = json.loads(content)
    except ValueError as error:
      raise ArtefactError(f'{path}: cannot be read: {error}') from error
    if not isinstance(description, dict) or (
      description.get('format') != FORMAT
      or description.get('version') != VERSION
    ):
      raise ArtefactError(
        f'{path}: is not {FORMAT} of version {VERSION}; export it again'
      )
    self.description = description
    self.digest = hashlib.sha256(content).hexdigest()
    self.parameter = [name for name, _ in description['parameter']]
    self.result = [name for name, _ in description['result']]
    self.data = [leaf['name'] for leaf in description['data']]
    self.num_phases = len(description['phases'])
    self._functions: dict[str, tuple[Any, list[int]]] = {}

  def initial(self) -> dict[str, np.ndarray]:
    """Reads the first value for each name of `parameter`."""
    path = self._path(INITIAL)
    arrays = read_npz(path)
    try:
      return {name: arrays[name] for name in self.parameter}
    except KeyError as error:
      raise ArtefactError(f'{path}: cannot be read: {error}') from error

  def run(
    self,
    arguments: Mapping[str, Any],
    clients: Sequence[Sequence[np.ndarray]],
  ) -> dict[str, Any]:
    """Runs it for clients whose data are here.

    Args:
      arguments: A value for each name of `parameter`.
      clients: The arrays of `data` for each client, in order.

    Returns:
      A value for each name of `result`.
    """
    server = self.start(arguments)
    kept: list[Values] = [{} for _ in clients]
    for phase in range(self.num_phases):
      self.stage(phase, server)
      sent = self.sent(phase, server)
      totals = self.begin(phase, server)
      for client, data in enumerate(clients):
        reply, kept[client] = self.work(phase, sent, data, kept[client])
        totals = self.add(phase, server, totals, reply)
      self.end(phase, server, totals)
    self.stage(self.num_phases, server)
    return self.finish(server)

  def start(self, arguments: Mapping[str, Any]) -> Values:
    """Returns the server's values before the first stage."""
    slots = self.description['slots']
    return {
      slot: arguments[name]
      if slots[slot]['dtype'] == _TEXT
      else np.asarray(arguments[name], slots[slot]['dtype'])
      for name, slot in self.description['parameter']
    }

  def stage(self, index: int, server: Values) -> None:
    """Runs the server before phase `index`, or after the last phase."""
    server.update(self._call(self.description['stages'][index], server))

  def sent(self, phase: int, server: Values) -> list[Any]:
    """Returns the values that a phase sends to each client."""
    return [server[slot] for slot in self._phase(phase)['sent']]

  def work(
    self,
    phase: int,
    sent: Sequence[Any],
    data: Sequence[np.ndarray],
    kept: Values | None = None,
  ) -> tuple[list[Any], Values]:
    """Runs a client's work.

    Args:
      phase: The phase.
      sent: The result of `sent`.
      data: The arrays of the client's data, in the order of `data`.
      kept: The second result of the phase before, in the same round.

    Returns:
      (the values for the server, those that later phases need here).

    Raises:
      MessageError: If what was sent has other shapes, types or bits.
    """
    described = self._phase(phase)
    if problem := self._problem(described['sent'], sent):
      raise MessageError(problem)
    values = dict(zip(described['sent'], sent, strict=True)) | (kept or {})
    values |= self._call(described['work'], values, data)
    later = {slot: values[slot] for slot in described['kept']}
    return [values[slot] for slot in described['replied']], (kept or {}) | later

  def begin(self, phase: int, server: Values) -> Values:
    """Returns the totals of no client."""
    return {a: server[zero] for a, zero in self._phase(phase)['initial']}

  def add(
    self, phase: int, server: Values, totals: Values, reply: Sequence[Any]
  ) -> Values:
    """Returns the totals with a client's reply.

    What follows the last operation on a client's data runs here, on the reply:
    the checks that the computation has are out of the client's reach.

    Args:
      phase: The phase.
      server: The server's values.
      totals: The totals so far, which stay as they are.
      reply: The first result of `work`.

    Returns:
      The new totals.

    Raises:
      MessageError: If the reply's arrays have other shapes, types or bits.
    """
    described = self._phase(phase)
    if problem := self.problem(phase, reply):
      raise MessageError(problem)
    replied = dict(zip(described['replied'], reply, strict=True))
    values = {**server, **totals, **replied}
    values |= self._call(described['admit'], values)
    values |= self._call(described['accumulate'], values)
    return {a: values[updated] for a, updated in described['updated']}

  def end(self, phase: int, server: Values, totals: Values) -> None:
    """Gives the totals of all clients to the server."""
    server |= {slot: totals[a] for slot, a in self._phase(phase)['final']}

  def finish(self, server: Values) -> dict[str, Any]:
    """Returns the results by name, after the last stage."""
    return {name: server[slot] for name, slot in self.description['result']}

  def specs(self, phase: int) -> list[dict[str, Any]]:
    """Describes a reply: name, dtype and shape of each value."""
    slots = self.description['slots']
    return [slots[slot] for slot in self._phase(phase)['replied']]

  def problem(self, phase: int, reply: Sequence[Any]) -> str:
    """Says why values cannot be a reply, or ''. Numbers are not looked at."""
    return self._problem(self._phase(phase)['replied'], reply)

  def _problem(self, slots: Sequence[int], values: Sequence[Any]) -> str:
    """Says why values cannot be those of slots, or ''."""
    if len(values) != len(slots):
      return f'expected {len(slots)} values, found {len(values)}'
    for position, (slot, value) in enumerate(zip(slots, values)):
      spec = self.description['slots'][slot]
      array, shape = np.asarray(value), spec['shape']
      if spec['dtype'] == _TEXT:
        fits = isinstance(value, bytes)
      else:
        fits = array.dtype == np.dtype(spec['dtype'])
      if shape is not None:
        fits &= len(shape) == array.ndim and all(
          size in (None, found) for size, found in zip(shape, array.shape)
        )
      if not fits:
        return (
          f'value {position}: expected {spec["dtype"]} {shape}, found'
          f' {array.dtype} {list(array.shape)}'
        )
      if not has_valid_bits(array):
        return f'value {position}: has a boolean that is neither 0 nor 1'
    return ''

  def unusable(self, phase: int) -> list[Any]:
    """Returns a reply without a finite number, for a client without a reply.

    A computation that checks replies rejects it, and counts the client.
    """
    reply = []
    for spec in self.specs(phase):
      dtype = np.dtype(spec['dtype'])
      value = math.nan if dtype.kind == 'f' else 0
      reply.append(np.full([n or 0 for n in spec['shape']], value, dtype))
    return reply

  def _phase(self, phase: int) -> dict[str, Any]:
    described: dict[str, Any] = self.description['phases'][phase]
    return described

  def _call(
    self,
    function: Mapping[str, Any] | None,
    values: Mapping[int, Any],
    data: Sequence[np.ndarray] = (),
  ) -> Values:
    """Runs a function, and returns its outputs."""
    if function is None:
      return {}
    arguments: list[Any] = []
    for slot in function['inputs']:
      # None stands for all arrays of the client's data.
      arguments += data if slot is None else [values[slot]]
    loaded, datasets = self._load(function)
    for position in datasets:
      _parse_graph(arguments[position])
    given = [
      tf.constant(value, tensor.dtype)
      for value, tensor in zip(arguments, loaded.inputs, strict=True)
    ]
    with _call_options():
      outputs = loaded(*given)
    return {
      slot: output.numpy()
      for slot, output in zip(function['outputs'], outputs, strict=True)
    }

  def _load(self, function: Mapping[str, Any]) -> tuple[Any, list[int]]:
    """Reads a function, and which of its inputs are data sets, once."""
    name = function['graph']
    if name not in self._functions:
      path, content = self._path(name), self.read(name)
      if hashlib.sha256(content).hexdigest() != function['sha256']:
        raise ArtefactError(
          f'{path}: is not the file that was exported; copy it again'
        )
      try:
        graph = _parse_graph(content)
      except ArtefactError as error:
        raise ArtefactError(f'{path}: {error}') from error
      imported = tf.compat.v1.wrap_function(
        lambda: tf.import_graph_def(graph, name=''), []
      )
      tensor = imported.graph.get_tensor_by_name
      feeds = function['feeds']
      pruned = imported.prune(
        [tensor(feed) for feed in feeds],
        [tensor(fetch) for fetch in function['fetches']],
      )
      read = {
        node.input[0].partition(':')[0]
        for node in graph.node
        if node.op == _GRAPH_READER
      }
      datasets = [
        i for i, feed in enumerate(feeds) if feed.partition(':')[0] in read
      ]
      self._functions[name] = pruned, datasets
    return self._functions[name]

  def _path(self, name: str) -> str:
    """Returns the path of a file, which may not be outside of the folder."""
    path = os.path.join(self._folder, *name.split('/'))
    real, folder = os.path.realpath(path), os.path.realpath(self._folder)
    if os.path.commonpath([real, folder]) != folder:
      raise ArtefactError(f'{path}: is outside of {self._folder}')
    return path

  def read(self, name: str) -> bytes:
    """Reads a file of the folder, or its text in `PACKED`."""
    path, packed = self._path(name), self._path(PACKED)
    try:
      if os.path.exists(path) or not os.path.exists(packed):
        with open(path, 'rb') as file:
          return file.read()
      with open(packed, encoding='utf-8') as file:
        return gzip.decompress(base64.b64decode(json.load(file)[name]))
    except (OSError, ValueError, KeyError, EOFError) as error:
      raise ArtefactError(f'{path}: cannot be read: {error}') from error
