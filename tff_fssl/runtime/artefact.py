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

from collections.abc import Mapping, Sequence
import hashlib
import json
import os
from typing import Any

import numpy as np
import tensorflow as tf

FORMAT, VERSION = 'tff_fssl.program', 2
PROGRAM = 'program.json'
# The first values of the server's arguments, if they were exported.
INITIAL = 'server/initial.npz'

# Slot -> value.
Values = dict[int, Any]


class ArtefactError(Exception):
  """A folder that is not an exported computation, or was changed."""


class ReplyError(Exception):
  """A client's reply that cannot be one."""


class Program:
  """An exported computation.

  Attributes:
    description: The content of program.json.
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
    path = os.path.join(folder, PROGRAM)
    try:
      with open(path, encoding='utf-8') as file:
        description = json.load(file)
    except (OSError, ValueError) as error:
      raise ArtefactError(f'{path}: cannot be read: {error}') from error
    if not isinstance(description, dict) or (
      description.get('format') != FORMAT
      or description.get('version') != VERSION
    ):
      raise ArtefactError(
        f'{path}: is not {FORMAT} of version {VERSION}; export it again'
      )
    self.description = description
    self.parameter = [name for name, _ in description['parameter']]
    self.result = [name for name, _ in description['result']]
    self.data = [leaf['name'] for leaf in description['data']]
    self.num_phases = len(description['phases'])
    self._folder = folder
    self._functions: dict[str, Any] = {}

  def initial(self) -> dict[str, np.ndarray]:
    """Reads the first value for each name of `parameter`."""
    path = os.path.join(self._folder, *INITIAL.split('/'))
    try:
      with np.load(path) as arrays:
        return {name: arrays[name] for name in self.parameter}
    except (OSError, KeyError, ValueError) as error:
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
    return {slot: arguments[n] for n, slot in self.description['parameter']}

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
    """
    described = self._phase(phase)
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
      ReplyError: If the reply's arrays are of other shapes or types.
    """
    described = self._phase(phase)
    self._check(described['replied'], reply)
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

  def _check(self, slots: Sequence[int], reply: Sequence[Any]) -> None:
    """Raises `ReplyError` for values that the slots cannot hold."""
    if len(reply) != len(slots):
      raise ReplyError(f'expected {len(slots)} values, found {len(reply)}')
    for position, (slot, value) in enumerate(zip(slots, reply)):
      spec = self.description['slots'][slot]
      array = np.asarray(value)
      shape, dtype = spec['shape'], np.dtype(spec['dtype'])
      if array.dtype.kind in 'OSU' or dtype.kind in 'OSU':
        fits = isinstance(value, bytes) and dtype.kind in 'OSU'
      else:
        fits = array.dtype == dtype
      if shape is not None:
        fits &= len(shape) == array.ndim and all(
          size in (None, found) for size, found in zip(shape, array.shape)
        )
      if not fits:
        raise ReplyError(
          f'value {position}: expected {spec["dtype"]} {shape}, found'
          f' {array.dtype} {list(array.shape)}'
        )

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
    loaded = self._load(function)
    given = [
      tf.constant(value, tensor.dtype)
      for value, tensor in zip(arguments, loaded.inputs, strict=True)
    ]
    outputs = loaded(*given)
    return {
      slot: output.numpy()
      for slot, output in zip(function['outputs'], outputs, strict=True)
    }

  def _load(self, function: Mapping[str, Any]) -> Any:
    """Reads the graph of a function, once."""
    name = function['graph']
    if name not in self._functions:
      path = os.path.join(self._folder, *name.split('/'))
      try:
        with open(path, 'rb') as file:
          content = file.read()
      except OSError as error:
        raise ArtefactError(f'{path}: cannot be read: {error}') from error
      if hashlib.sha256(content).hexdigest() != function['sha256']:
        raise ArtefactError(
          f'{path}: is not the file that was exported; copy it again'
        )
      graph = tf.compat.v1.GraphDef.FromString(content)
      imported = tf.compat.v1.wrap_function(
        lambda: tf.import_graph_def(graph, name=''), []
      )
      tensor = imported.graph.get_tensor_by_name
      self._functions[name] = imported.prune(
        [tensor(feed) for feed in function['feeds']],
        [tensor(fetch) for fetch in function['fetches']],
      )
    return self._functions[name]
