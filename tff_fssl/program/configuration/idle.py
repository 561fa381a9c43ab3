"""Finds flags that have no effect.

`hparam(..., when=...)` says when a flag has one.
"""

import dataclasses
import functools
import inspect
import types
from typing import Any

from tff_fssl import hparams

# The field of `Config` that --dataset decides.
_DATA = 'info'


def find_idle(
  group: Any, prefix: str = '', config: Any = None
) -> dict[str, str]:
  """Finds the flags of a group that have no effect.

  Args:
    group: An instance of a dataclass of `hparam` fields.
    prefix: The prefix of its flags.
    config: The `run_config.Config` that the group is part of, if any.

  Returns:
    Name of each such flag -> the flag that is the reason, as it is written:
    '--partition=iid'.
  """
  idle = {}
  for field in hparams.documented_fields(group):
    last_read: list[str] = []
    when = field.metadata['when']
    if when and not when(_Reader(group, prefix, config, last_read)):
      # A predicate that is false has just read the flag that decides.
      idle[f'{prefix}{field.name}'] = last_read[-1]
  return idle


class _Reader:
  """Shows a predicate a group of flags, and notes the flags that it reads.

  Attributes that the group lacks come from the configuration and its groups.
  """

  def __init__(
    self, group: Any, prefix: str, config: Any, last_read: list[str]
  ):
    self._all = group, prefix, config, last_read

  def __getattr__(self, name: str) -> Any:
    group, prefix, config, last_read = self._all
    groups = [(config, ''), *config.groups()] if config else []
    # The group itself comes first: its own flags are read without a prefix.
    found = [
      pair
      for pair in ((group, prefix), *groups)
      if name in vars(pair[0]) or hasattr(type(pair[0]), name)
    ]
    if not found:
      whose = type(group).__name__
      raise AttributeError(f'{whose}: `when` reads {name!r}, which is no flag')
    owner, of_owner = found[0]
    reader = self
    if owner is not group:
      reader = _Reader(owner, of_owner, config, last_read)
    kind = inspect.getattr_static(type(owner), name, None)
    # Run on the reader, a property shows the flags that it reads.
    if isinstance(kind, property) and kind.fget:
      return kind.fget(reader)
    if isinstance(kind, types.FunctionType):
      return functools.partial(kind, reader)
    value = getattr(owner, name)
    if owner is config and name == _DATA:
      last_read.append(f'--dataset={config.run.dataset}')
    elif name in _flags(owner):
      last_read.append(f'--{of_owner}{name}={hparams.format_value(value)}')
    elif dataclasses.is_dataclass(value) and _flags(value):
      of_value = next((p for g, p in groups if g is value), '')
      return _Reader(value, of_value, config, last_read)
    return value


def _flags(group: Any) -> set[str]:
  """Returns the names of a dataclass's fields that are flags."""
  fields = dataclasses.fields(group)
  return {field.name for field in fields if 'help' in field.metadata}
