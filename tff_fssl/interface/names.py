"""Names that an algorithm gives to streams, networks and values."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from tff_fssl import hparams


def check(name: str, known: Collection[str], where: str, what: str) -> None:
  """Checks a name that an algorithm gives.

  Args:
    name: The name.
    known: All names that exist.
    where: The place where the algorithm gives it.
    what: The things that have these names, in the plural.

  Raises:
    UsageError: If the name is not in `known`.
  """
  if name not in known:
    raise hparams.UsageError(
      f'{where}={name!r}: there is no such name; the {what}:'
      f' {", ".join(known) or "none"}{hparams.closest(name, known)}'
    )


def join(what: str, *parts: Mapping[str, Any]) -> dict[str, Any]:
  """Joins values by name.

  Args:
    what: The things that have these names, in the plural.
    *parts: Name -> value.

  Returns:
    Name -> value, of all parts.

  Raises:
    UsageError: If two parts have a name in common, so that one value would
      silently replace the other.
  """
  joined: dict[str, Any] = {}
  for part in parts:
    for name in part:
      if name in joined:
        raise hparams.UsageError(
          f'{name!r} is the name of two {what}; rename one of them'
        )
    joined |= part
  return joined


class Named(dict[str, Any]):
  """Values by name, with an error that lists the known names."""

  def __missing__(self, name: str) -> Any:
    known = ', '.join(self) or 'none'
    raise KeyError(
      f'{name!r}: there is no such name; there are: {known}'
      f'{hparams.closest(name, self)}'
    )
