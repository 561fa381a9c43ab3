"""Turns groups of operations into one TensorFlow function each.

A call costs some hundred microseconds of Python, whatever the function does.
All operations that can run together are therefore put into one function.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import threading
from typing import Any, Optional

from tff_fssl import loops
from tff_fssl.lazy import tf
from tff_fssl.runtime import errors
from tff_fssl.runtime import graphs
from tff_fssl.runtime import operations


class Function:
  """Operations that run in one call, on the device of the call.

  Attributes:
    inputs: The slots that it reads, in the order of `__call__`'s arguments.
    outputs: The slots that it writes, in the order of its results.
  """

  def __init__(
    self,
    steps: Sequence[operations.Step],
    results: Sequence[operations.Slot],
  ):
    """Builds the function.

    Args:
      steps: The operations, in order.
      results: The wanted slots. Slots that no step writes are dropped.
    """
    self._operations = {step.label: step.description for step in steps}
    # Names of library functions end with them, see `graphs`.
    self._digests = {step.digest: step.label for step in steps if step.digest}
    written = {slot for step in steps for slot in step.outputs}
    # A fixed order, which is that of the arguments.
    self.inputs = operations.free_slots(steps)
    self.outputs = tuple(
      dict.fromkeys(slot for slot in results if slot in written)
    )
    self._function = None
    if steps:
      with loops.call_options():
        self._function = self._build(steps)
    self._first = threading.Lock()
    self._was_called = False

  def _build(
    self, steps: Sequence[operations.Step]
  ) -> Callable[..., Sequence[tf.Tensor]]:
    with tf.Graph().as_default() as graph:
      feeds = [
        tf.compat.v1.placeholder(slot.spec.dtype, slot.spec.shape)
        for slot in self.inputs
      ]
      values = operations.emit_steps(
        steps, dict(zip(self.inputs, feeds, strict=True))
      )
      given = {feed.ref() for feed in feeds}
      fetches = []
      for slot in self.outputs:
        value = values[slot]
        if slot.is_sequence:
          # Datasets live on the host, on whatever device the function runs.
          with tf.device('/device:CPU:0'):
            value = tf.identity(value)
        elif value.ref() in given:  # A feed is no node of the function.
          value = tf.identity(value)
        fetches.append(value)
    graph_def = graph.as_graph_def()
    # Nothing else of an imported graph may run.
    graphs.keep_needed(
      graph_def, [t.name for t in feeds], [t.name for t in fetches]
    )
    read = {name for node in graph_def.node for name in node.input}

    def import_graph(*arguments: tf.Tensor) -> Sequence[tf.Tensor]:
      return tf.graph_util.import_graph_def(
        graph_def,
        input_map={
          feed.name: argument
          for feed, argument in zip(feeds, arguments, strict=True)
          if feed.op.name in read
        },
        return_elements=[fetch.name for fetch in fetches],
        name='',
      )

    specs = [slot.spec for slot in self.inputs]
    # It adds no control dependencies: an imported graph has its own.
    imported = tf.compat.v1.wrap_function(import_graph, specs)
    return tf.function(
      # It makes calls four times as fast, because a wrapped function formats
      # its arguments at each call.
      lambda *args: imported(*args),  # pylint: disable=unnecessary-lambda
      input_signature=specs,
      # There is nothing to convert, and converting takes time.
      autograph=False,
    ).get_concrete_function()

  @property
  def is_empty(self) -> bool:
    """Tells whether it has no operations."""
    return self._function is None

  def trace(self, arguments: Sequence[tf.Tensor]) -> Sequence[tf.Tensor]:
    """Adds a call of it to the current graph."""
    assert self._function is not None
    return self._function(*arguments)

  def __call__(
    self,
    arguments: Sequence[tf.Tensor],
    *,
    device: str,
    client_index: Optional[int] = None,
  ) -> Sequence[tf.Tensor]:
    """Runs it.

    Args:
      arguments: The values of `inputs`.
      device: The device of all operations that can run on it.
      client_index: The client that it runs for, for messages.

    Returns:
      The values of `outputs`.

    Raises:
      errors.ExecutionError: If an operation fails, with its name.
    """
    if self._function is None:
      return ()
    if not self._was_called:
      # The first call optimizes the function; two threads would both do that.
      with self._first:
        outputs = self._call(arguments, device, client_index)
        self._was_called = True
        return outputs
    return self._call(arguments, device, client_index)

  def _call(
    self,
    arguments: Sequence[tf.Tensor],
    device: str,
    client_index: Optional[int],
  ) -> Sequence[tf.Tensor]:
    try:
      with tf.device(device), loops.call_options():
        return self._function(*arguments)  # type: ignore[misc]
    except Exception as error:
      operation = errors.find_operation(
        str(error), self._operations, self._digests
      )
      raise errors.ExecutionError(
        operation, error, client_index=client_index, place=device
      ) from error


class BoundFunction:
  """A function with some arguments that are the same in all calls."""

  def __init__(
    self, function: Function, constants: Mapping[operations.Slot, Any]
  ):
    """Binds a function.

    Args:
      function: The function.
      constants: The values of some of its inputs, and possibly of other slots.
    """
    self._function = function
    self._arguments = [constants.get(slot) for slot in function.inputs]
    self._varying = [
      (index, slot)
      for index, slot in enumerate(function.inputs)
      if slot not in constants
    ]

  def __call__(
    self,
    values: dict[operations.Slot, Any],
    *,
    device: str,
    client_index: Optional[int] = None,
  ) -> None:
    """Runs it on `values`, and adds the values of its outputs to them."""
    # A copy, since several threads call at a time.
    arguments = list(self._arguments)
    for index, slot in self._varying:
      arguments[index] = values[slot]
    outputs = self._function(
      arguments, device=device, client_index=client_index
    )
    values.update(zip(self._function.outputs, outputs))
