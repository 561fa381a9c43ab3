"""The error that names the failed operation of a computation."""

import asyncio
from collections.abc import Callable, Mapping
import re
from typing import Any, Optional

# The most characters of the original message that are repeated.
_MAX_MESSAGE_LENGTH = 2000


class ExecutionError(RuntimeError):
  """An operation of a computation failed.

  The original exception is its `__cause__`.

  Attributes:
    operation: The operation, as numbered in the compiled computation
      (`'federated_map_2'`: the second map), or a whole group, joined by ' or ',
      if TensorFlow's message does not tell it.
    client_index: The position of the client in the cohort, or None if the
      operation ran at the server.
  """

  def __init__(
    self,
    operation: str,
    cause: BaseException,
    *,
    client_index: Optional[int] = None,
    place: str = '',
  ):
    self.operation = operation
    self.client_index = client_index
    where = 'the server' if client_index is None else f'client {client_index}'
    on = f' on {place}' if place else ''
    message = str(cause)
    if len(message) > _MAX_MESSAGE_LENGTH:
      message = message[:_MAX_MESSAGE_LENGTH] + ' ...'
    super().__init__(
      f'{operation} failed at {where}{on}: {type(cause).__name__}: {message}'
    )

  def __reduce__(self) -> Any:
    # Its cause may be nothing that can be pickled.
    return _restore, (str(self), self.operation, self.client_index)


class WorkerError(RuntimeError):
  """Workers died or were too slow, more often than is tolerated."""


def _restore(
  message: str, operation: str, client_index: Optional[int]
) -> ExecutionError:
  # The message is complete: `__init__` would build it again.
  error = ExecutionError.__new__(ExecutionError)
  RuntimeError.__init__(error, message)
  error.operation, error.client_index = operation, client_index
  return error


def find_operation(
  message: str,
  operations: Mapping[str, str],
  digests: Mapping[str, str],
) -> str:
  """Finds which operation of a group a message of TensorFlow is about.

  Args:
    message: The message of the exception.
    operations: Label of each operation -> its description. The label is the
      name scope of its nodes.
    digests: Digest -> label of the operation. The names of its library
      functions end with the digest.

  Returns:
    The label and the description of the operation, or those of the group.
  """
  labels = []
  for node in re.findall(r"(?:\{\{node |node ')([^}']+)", message):
    label = node.split('/')[0]
    if label in operations:
      labels.append(label)
  # Errors in library functions name the function instead of the node.
  for digest, label in digests.items():
    if digest in message:
      labels.append(label)
  labels = list(dict.fromkeys(labels)) or list(operations)
  return ' or '.join(f'{label} ({operations[label]})' for label in labels)


class _Handler:
  """An asyncio exception handler that knows which errors were raised."""

  def __init__(self, before: Optional[Callable[[Any, Any], Any]]):
    self._before = before

  def __call__(
    self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]
  ) -> None:
    if getattr(context.get('exception'), '_tff_fssl_raised', False):
      return
    if self._before is None:
      loop.default_exception_handler(context)
    else:
      self._before(loop, context)


def raised_in_loop(error: Exception) -> None:
  """Keeps asyncio from reporting an error that an invocation raises.

  TFF's program context makes a task for each part of a computation's result.
  All tasks fail with the error. The code that awaits the result gets it from
  one task. For each other task, asyncio would report that its exception was
  never retrieved.

  Args:
    error: The error that is about to be raised in the running event loop.
  """
  error._tff_fssl_raised = True  # type: ignore[attr-defined]
  loop = asyncio.get_running_loop()
  handler = loop.get_exception_handler()
  if not isinstance(handler, _Handler):
    loop.set_exception_handler(_Handler(handler))
