"""The text of `--help`."""

from collections.abc import Sequence
import dataclasses
import re
import textwrap

from tff_fssl import hparams
from tff_fssl.program import console
from tff_fssl.program.configuration import flags

_WIDTH = 80
_HELP_FLAGS = ('--help', '-help', '-h', '--helpfull', '--helpshort')


def wants_help(argv: Sequence[str]) -> bool:
  """Says whether a command line asks for help."""
  return any(argument in _HELP_FLAGS for argument in argv)


def parse(
  argv: Sequence[str],
  usage: str,
  description: str,
  groups: Sequence[flags.Group],
  shown: Sequence[flags.Group] | None = None,
  *,
  allow_positional: bool = True,
) -> flags.ParsedFlags | None:
  """Parses a command line, and prints the help instead if that is asked for.

  Args:
    argv: The arguments, without the program's name.
    usage: See `help_text`.
    description: See `help_text`.
    groups: All flags that exist.
    shown: Those that the help shows, if not all.
    allow_positional: See `flags.parse`.

  Returns:
    The flags and positional arguments, or None if the help was printed.

  Raises:
    UsageError: See `flags.parse`.
  """
  if wants_help(argv):
    console.show(
      help_text(usage, description, groups if shown is None else shown)
    )
    return None
  return flags.parse(argv, groups, allow_positional=allow_positional)


def help_text(
  usage: str, description: str, groups: Sequence[flags.Group]
) -> str:
  """Writes the text of `--help`, at most 80 columns wide.

  Args:
    usage: The command's syntax. `programs/X.py` is replaced by the command that
      the user types for that program.
    description: The program's purpose, with the same replacement. Each line is
      a paragraph.
    groups: Its flags, if any.

  Returns:
    The text.
  """
  usage, description = (
    re.sub(
      r'programs/(\w+)\.py', lambda name: console.command(str(name[1])), text
    )
    for text in (usage, description)
  )
  lines = [f'usage: {usage}']
  for paragraph in description.splitlines():
    lines += ['', *textwrap.wrap(paragraph, _WIDTH, break_on_hyphens=False)]
  if groups:
    lines += ['', 'Each flag is given with its default.']
  for group in groups:
    lines += group_lines(group)
  lines += ['', 'Always:']
  from_file = [
    '  --flagfile=FILE',
    '      Reads flags from a file, one per line; # starts a comment. Flags on'
    ' the',
    '      command line take precedence. A missing configs/NAME.flags is taken'
    ' from',
    '      the package, if the package has that file.',
  ]
  lines += from_file if groups else []
  lines += ['  --help', '      Shows this help.']
  return '\n'.join(lines)


def group_lines(group: flags.Group) -> list[str]:
  """Writes the lines of `--help` on a group's flags."""
  lines: list[str] = []
  named_fields = group.named_fields()
  # A first field with a group brings its own heading.
  titled = named_fields and not named_fields[0][1].metadata['group']
  if titled or group.note:
    lines += ['', *textwrap.wrap(f'{group.title}:', _WIDTH)]
    lines += _indented(group.note, 2)
  for name, field in named_fields:
    if field.metadata['group']:
      lines += ['', *textwrap.wrap(f'{field.metadata["group"]}:', _WIDTH)]
    lines.append(f'  --{name}={hparams.format_value(field.default)}')
    lines += _indented(f'{field.metadata["help"]}{_allowed(field)}', 6)
  return lines


def _indented(text: str, indent: int) -> list[str]:
  return textwrap.wrap(
    text,
    _WIDTH,
    initial_indent=' ' * indent,
    subsequent_indent=' ' * indent,
    break_on_hyphens=False,
  )


def _allowed(field: dataclasses.Field) -> str:
  """Writes a field's range as a sentence, or ''."""
  choices = field.metadata.get('choices')
  if choices:
    of = '' if field.metadata['other_choices'] else 'One of '
    return f' {of}{", ".join(choices)}.'
  low, high = field.metadata.get('minimum'), field.metadata.get('maximum')
  if low is None and high is None:
    return ''
  strict = field.metadata.get('exclusive_minimum')
  above = (
    '' if low is None else f'{"above" if strict else "at least"} {low:.10g}'
  )
  below = '' if high is None else f'at most {high:.10g}'
  return f' ({", ".join(part for part in (above, below) if part)})'
