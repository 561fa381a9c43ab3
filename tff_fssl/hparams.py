"""Hyper-parameters as documented, checked, frozen dataclasses.

`--help` and every check that needs no data run before TensorFlow is imported,
which takes seconds.
"""

from collections.abc import Callable, Collection
import dataclasses
import difflib
import importlib
import math
from typing import Any, Optional, TypeVar, Union, cast

# TensorFlow computes in int32 and float32: outside these limits, numbers wrap
# around, become infinite or become 0.
_MAX_INT = 2**31 - 1
_MAX_FLOAT, _MIN_FLOAT = 3.4e38, 1.2e-38
INCREASE_ONLY = 'upwards'
_T = TypeVar('_T')


class UsageError(ValueError):
  """A user's mistake: programs print only its message and exit with code 2."""


def hparam(
  default: Any,
  help: str,  # pylint: disable=redefined-builtin
  *,
  minimum: Optional[float] = None,
  maximum: Optional[float] = None,
  exclusive_minimum: bool = False,
  choices: Optional[Collection[str]] = None,
  other_choices: bool = False,
  group: str = '',
  may_change: Union[bool, str] = False,
  when: Optional[Callable[[Any], Any]] = None,
) -> Any:
  """Makes a dataclass field that also describes a flag.

  Args:
    default: The default. Its type (bool, int, float, str) is the field's. If it
      is (), the flag may be given several times, and the value is the tuple of
      texts.
    help: Meaning, unit and source, as `--help` prints them.
    minimum: The least value allowed, if any.
    maximum: The greatest value allowed, if any.
    exclusive_minimum: Whether `minimum` itself is rejected.
    choices: The allowed values of a string field, if they are limited. If it is
      a table, entries may be added to it later.
    other_choices: Whether other values than `choices` are allowed, which are
      checked elsewhere.
    group: The heading in `--help` for this field and the following fields. '':
      the heading of the field before.
    may_change: Whether a run may be resumed with another value.
      `INCREASE_ONLY`: only with a larger one.
    when: The field has an effect only if this predicate is true. It takes an
      instance of the dataclass: `when=lambda run: run.partition == 'iid'`. In a
      run, it may also read flags of other dataclasses and properties of the
      whole `Config` as if they were the instance's: `run.scenario`,
      `run.trains_clients`. The flag that it reads last is named as the reason.

  Returns:
    A `dataclasses.field` with these as metadata.
  """
  return dataclasses.field(
    default=default,
    metadata={
      'help': help,
      'minimum': minimum,
      'maximum': maximum,
      'exclusive_minimum': exclusive_minimum,
      'choices': choices,
      'other_choices': other_choices,
      'group': group,
      'may_change': may_change,
      'when': when,
    },
  )


def build_from(source: Any, cls: type[_T], **others: Any) -> _T:
  """Builds a dataclass from an object that has fields of the same names.

  Args:
    source: The object. It may lack some of the fields, or have more.
    cls: The dataclass.
    **others: Fields that are not read from `source`.

  Returns:
    An instance.
  """
  names = [field.name for field in dataclasses.fields(cast(Any, cls))]
  read = {n: getattr(source, n) for n in names if hasattr(source, n)}
  return cls(**{**read, **others})


def borrow(cls: type[Any], name: str, when: Callable[[Any], Any]) -> Any:
  """Makes a field like one of another dataclass, with a condition of its own.

  Args:
    cls: The other dataclass of `hparam` fields.
    name: The field.
    when: See `hparam`.

  Returns:
    A `dataclasses.field`.
  """
  (field,) = (f for f in dataclasses.fields(cls) if f.name == name)
  metadata = {**field.metadata, 'when': when, 'group': ''}
  return dataclasses.field(default=field.default, metadata=metadata)


def documented_fields(cls: type[Any]) -> tuple[dataclasses.Field[Any], ...]:
  """Returns the fields of a hyper-parameter dataclass, in order.

  Args:
    cls: A dataclass, or an instance of one.

  Returns:
    Its fields, except fields whose metadata say that they are no flags.

  Raises:
    TypeError: If a field was not made by `hparam`, or has no help. This is a
      mistake of the dataclass's author, not of a user.
  """
  fields = tuple(
    field
    for field in dataclasses.fields(cls)
    if field.metadata.get('is_flag', True)
  )
  for field in fields:
    if not field.metadata.get('help'):
      name = cls.__name__ if isinstance(cls, type) else type(cls).__name__
      raise TypeError(
        f'{name}.{field.name} has no documentation; make the field by'
        " hparam(default, 'what it means')"
      )
  return fields


def format_value(value: Any) -> str:
  """Writes a value as flags write it."""
  if isinstance(value, bool):
    return str(value).lower()
  if isinstance(value, tuple):
    return ' '.join(value)
  return repr(value) if isinstance(value, float) else str(value)


def closest(name: str, names: Collection[str]) -> str:
  """Makes a hint ('; did you mean X?') at the closest of `names`, or ''."""
  matches = difflib.get_close_matches(name, names, n=1)
  return f'; did you mean {matches[0]!r}?' if matches else ''


def import_function(reference: str) -> Callable[..., Any]:
  """Imports 'module:function', the form in which tables name slow imports."""
  module, _, function = reference.partition(':')
  imported: Callable[..., Any] = getattr(
    importlib.import_module(module), function
  )
  return imported


def validate(instance: Any, prefix: str = '') -> None:
  """Checks every field of a hyper-parameter dataclass against its metadata.

  Args:
    instance: An instance of a dataclass made of `hparam` fields.
    prefix: Prefix of its flags in messages (`'name.'`).

  Raises:
    UsageError: If a value is out of range.
  """
  for field in documented_fields(instance):
    value = getattr(instance, field.name)
    metadata, flag = field.metadata, f'--{prefix}{field.name}'
    choices = metadata.get('choices')
    if choices and value not in choices and not metadata['other_choices']:
      raise UsageError(
        f'{flag}={value}: allowed are {", ".join(choices)}'
        f'{closest(str(value), choices)}'
      )
    low, high = metadata.get('minimum'), metadata.get('maximum')
    if isinstance(value, float) and not math.isfinite(value):
      raise UsageError(f'{flag}={value}: must be a finite number')
    if isinstance(value, float) and value:
      if not _MIN_FLOAT <= abs(value) <= _MAX_FLOAT:
        raise UsageError(
          f'{flag}={value}: must be 0, or of a size from {_MIN_FLOAT:g} to'
          f' {_MAX_FLOAT:g}, the range of float32'
        )
    elif isinstance(value, int) and abs(value) > _MAX_INT:
      least = -_MAX_INT if low is None else low
      most = _MAX_INT if high is None else high
      raise UsageError(
        f'{flag}={_shortened(value)}: must be from {least:,} to {most:,}'
      )
    strict = metadata.get('exclusive_minimum')
    if low is not None and (value < low or (strict and value == low)):
      bound = 'greater than' if strict else 'at least'
      raise UsageError(f'{flag}={value}: must be {bound} {low:g}')
    if high is not None and value > high:
      raise UsageError(f'{flag}={value}: must be at most {high:g}')


def _shortened(value: int) -> str:
  """Writes a whole number, shortened if it is very long."""
  text = str(value)
  return text if len(text) <= 20 else f'{text[:10]}...({len(text)} digits)'
