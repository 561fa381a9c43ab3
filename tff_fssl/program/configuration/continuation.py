"""The flags that may differ when a run is continued."""

from collections.abc import Mapping, Sequence

from tff_fssl import hparams
from tff_fssl.program.configuration import config
from tff_fssl.program.configuration import flags


def may_differ() -> dict[str, bool | str]:
  """Flags that may differ when a run is continued -> their `may_change`."""
  return {
    name: field.metadata['may_change']
    for group in config.groups()
    for name, field in group.named_fields()
    if field.metadata['may_change']
  }


def neutral_flags() -> frozenset[str]:
  """Flags on which results do not depend: those that may differ at will."""
  return frozenset(name for name, may in may_differ().items() if may is True)


def may_differ_text() -> str:
  """Lists the names in `may_differ`, for users."""
  return ', '.join(
    name
    + (f' ({hparams.INCREASE_ONLY})' if may == hparams.INCREASE_ONLY else '')
    for name, may in sorted(may_differ().items())
  )


def differences(
  old: dict[str, str], new: dict[str, str]
) -> tuple[list[str], list[str]]:
  """Compares the flags of two runs.

  Args:
    old: Flags of the existing run, as text, perhaps by older names.
    new: Flags of the run that is to continue it, as text: all that have an
      effect.

  Returns:
    The names of flags that differ but must not, and of those that differ and
    may.
  """
  fields = {n: field for g in config.groups() for n, field in g.named_fields()}
  old = flags.renew(old)
  refused: list[str] = []
  allowed: list[str] = []
  for name in sorted(old.keys() | new.keys()):
    field = fields.get(name)
    if field and name not in new:
      # It has no effect now. If it had, the flag that is the reason differs.
      continue
    # A flag that was added after the run was made counts as its default.
    default = hparams.format_value(field.default) if field else None
    before, after = old.get(name, default), new.get(name, default)
    if before == after:
      continue
    may = field.metadata['may_change'] if field else False
    if may == hparams.INCREASE_ONLY:
      may = _is_at_least(after, before)
    (allowed if may else refused).append(name)
  return refused, allowed


def _is_at_least(after: str | None, before: str | None) -> bool:
  """Compares two values as numbers. Other texts give False."""
  try:
    # As texts, '9' would be larger than '10'.
    return float(after or 0) >= float(before or 0)
  except ValueError:
    return False


def describe(
  names: Sequence[str], old: Mapping[str, str], new: Mapping[str, str]
) -> str:
  """Describes differences: '--a=1 there, 2 now; --b only now'."""

  def describe_one(name: str) -> str:
    if name in flags.REMOVED:
      return f'--{name}={old[name]} there; {flags.REMOVED[name][1]}'
    if name in old and name in new:
      return f'--{name}={old[name]} there, {new[name]} now'
    return f'--{name} only {"there" if name in old else "now"}'

  return '; '.join(map(describe_one, names))
