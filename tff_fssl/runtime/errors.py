"""The error that names the operation of a computation which failed."""

import asyncio
from collections.abc import Callable, Mapping
import re
from typing import Any, Optional

# How much of the original message is repeated.
_MAX_MESSAGE_LENGTH = 2000


class ExecutionError(RuntimeError):
  """An operation of a computation failed.

  The original exception is its `__cause__`.

  Attributes:
    operation: The operation, as numbered in the compiled computation
      (`'federated_map_2'`: the second map), or several, joined by ' or ',
      where TensorFlow's message does not tell which one of a group it was.
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


def find_operation(
  message: str,
  operations: Mapping[str, str],
  digests: Mapping[str, str],
) -> str:
  """Which operation of a group a message of TensorFlow's is about.

  Args:
    message: The message of the exception.
    operations: The label of each operation, which is the name scope of its
      nodes, with a description of it.
    digests: By the digest that ends the names of an operation's library
      functions, the operation's label.

  Returns:
    The label and the description of the operation, or those of all of them.
  """
  labels = []
  for node in re.findall(r"(?:\{\{node |node ')([^}']+)", message):
    label = node.split('/')[0]
    if label in operations:
      labels.append(label)
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
  All fail with the error, and whoever awaits the result gets it from one; of
  each of the others asyncio would say that nobody retrieved its exception.

  Args:
    error: What is about to be raised, in the running event loop.
  """
  error._tff_fssl_raised = True  # type: ignore[attr-defined]
  loop = asyncio.get_running_loop()
  handler = loop.get_exception_handler()
  if not isinstance(handler, _Handler):
    loop.set_exception_handler(_Handler(handler))
