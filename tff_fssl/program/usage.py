"""The texts of `--help`, and flags without effect.

`hparam(..., when=...)` says when a flag has an effect.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
import dataclasses
import functools
import inspect
import re
import textwrap
import types
from typing import Any

from tff_fssl import hparams
from tff_fssl.program import console
from tff_fssl.program import flags

_WIDTH = 80
_HELP_FLAGS = ('--help', '-help', '-h', '--helpfull', '--helpshort')
_WORD = '--help='
# The columns of a flag with its default before a text beside it.
_NAME_WIDTH = 34
_Fields = list[tuple[str, dataclasses.Field]]


def wants_help(argv: Sequence[str]) -> bool:
  """Says whether a command line asks for help."""
  return any(a in _HELP_FLAGS or a.startswith(_WORD) for a in argv)


def parse(
  argv: Sequence[str],
  usage: str,
  description: str,
  groups: Sequence[flags.Group],
  shown: Sequence[flags.Group] | None = None,
  *,
  common: Collection[str] = (),
  allow_positional: bool = True,
) -> flags.ParsedFlags | None:
  """Parses a command line, and prints the help instead if that is asked for.

  Args:
    argv: The arguments, without the program's name.
    usage: See `help_text`.
    description: See `help_text`.
    groups: All flags that exist.
    shown: Those that the help shows, if not all.
    common: The flags that `--help` shows. All others are in `--helpfull`. If
      there are none, both show all.
    allow_positional: See `flags.parse`.

  Returns:
    The flags and positional arguments, or None if the help was printed.

  Raises:
    UsageError: See `flags.parse`.
  """
  if wants_help(argv):
    shown = groups if shown is None else shown
    words = [a.removeprefix(_WORD) for a in argv if a.startswith(_WORD)]
    if words:
      console.show(word_text(words[0], shown))
    elif common and '--helpfull' not in argv:
      console.show(help_text(usage, description, shown, common))
    else:
      console.show(help_text(usage, description, shown))
    return None
  return flags.parse(argv, groups, allow_positional=allow_positional)


def help_text(
  usage: str,
  description: str,
  groups: Sequence[flags.Group],
  common: Collection[str] = (),
) -> str:
  """Writes the text of `--helpfull`, at most 80 columns wide, or of `--help`.

  Args:
    usage: The command's syntax. `programs/X.py` is replaced by the command that
      the user types for that program.
    description: The program's purpose, with the same replacement. Each line is
      a paragraph.
    groups: Its flags, if any.
    common: The names of the flags that `--help` shows, in a line or two each,
      below the first paragraph. (): all flags are shown, with their texts.

  Returns:
    The text.
  """
  if common:
    lines = _head(usage, description.partition('\n')[0])
    lines += group_lines(
      *groups,
      is_shown=lambda _, name, __: name in common,
      lines_of=_short_lines,
    )
    more = sum(len(group.named_fields()) for group in groups) - len(common)
    last = '--helpfull', f'Shows all flags: {more} more.'
  else:
    lines = _head(usage, description)
    lines += ['', 'Each flag is given with its default.'] if groups else []
    lines += group_lines(*groups)
    last = '--help', 'Shows this help.'
  always = [
    (
      '--flagfile=FILE',
      'Reads flags from a file, one per line; # starts a comment. Flags on the'
      ' command line take precedence. A missing configs/NAME.flags is taken'
      ' from the package.',
    ),
    ('--help=WORD', 'Shows the flags whose texts have the word.'),
  ]
  lines += ['', 'Always:']
  for name, text in [*(always if groups else []), last]:
    lines += _columns(name, text)
  return '\n'.join(lines)


def word_text(word: str, groups: Sequence[flags.Group]) -> str:
  """Writes the text of `--help=WORD`.

  Args:
    word: A part of flags' names, topics or help texts, in any case.
    groups: The program's flags.

  Returns:
    The text.

  Raises:
    UsageError: If no flag has the word.
  """
  wanted = word.strip().lower()

  def has_word(title: str, name: str, field: dataclasses.Field) -> bool:
    return wanted in f'{title}\n{name}\n{field.metadata["help"]}'.lower()

  lines = group_lines(*groups, is_shown=has_word)
  if not wanted or not lines:
    names = [name for group in groups for name, _ in group.named_fields()]
    raise hparams.UsageError(
      f'--help={word}: no flag has this word in its name, topic or text'
      f'{hparams.closest(word, names)} (--helpfull lists all flags)'
    )
  return '\n'.join(lines[1:])


def _head(usage: str, description: str) -> list[str]:
  """Writes the lines before those on flags."""
  usage, description = (
    re.sub(
      r'programs/(\w+)\.py', lambda name: console.command(str(name[1])), text
    )
    for text in (usage, description)
  )
  lines = [f'usage: {usage}']
  for paragraph in description.splitlines():
    lines += ['', *textwrap.wrap(paragraph, _WIDTH, break_on_hyphens=False)]
  return lines


def group_lines(
  *groups: flags.Group,
  is_shown: Callable[[str, str, dataclasses.Field], bool] | None = None,
  lines_of: Callable[[str, dataclasses.Field], list[str]] | None = None,
) -> list[str]:
  """Writes the lines of the help on flags, under their topics.

  Args:
    *groups: The flags.
    is_shown: (topic, flag, field) -> whether the flag is shown. Without it, all
      flags and the notes of groups are shown.
    lines_of: (flag, field) -> its lines, by default the whole text.

  Returns:
    The lines. An empty one precedes each topic.
  """
  lines: list[str] = []
  for title, note, fields in _topics(groups):
    if is_shown:
      note = ''
      fields = [(n, field) for n, field in fields if is_shown(title, n, field)]
    if fields or note:
      lines += ['', *textwrap.wrap(f'{title}:', _WIDTH), *_indented(note, 2)]
    for name, field in fields:
      lines += (lines_of or _field_lines)(name, field)
  return lines


def _topics(
  groups: Sequence[flags.Group],
) -> Iterator[tuple[str, str, _Fields]]:
  """Yields each topic, its note and its flags. A field may begin one."""
  for group in groups:
    title, note, fields = group.title, group.note, _Fields()
    for name, field in group.named_fields():
      if field.metadata['group']:
        yield title, note, fields
        title, note, fields = field.metadata['group'], '', _Fields()
      fields.append((name, field))
    yield title, note, fields


def _field_lines(name: str, field: dataclasses.Field) -> list[str]:
  """Writes the lines on a flag: its default, its whole text, its range."""
  return [
    f'  --{name}={hparams.format_value(field.default)}',
    *_indented(f'{field.metadata["help"]}{allowed(field)}', 6),
  ]


def _short_lines(name: str, field: dataclasses.Field) -> list[str]:
  """Writes the lines on a flag: its default, and what its text begins with."""
  first = re.split(r'[.:;,] | \(', field.metadata['help'])[0].rstrip('.')
  if field.metadata.get('choices'):
    first += f': {", ".join(field.metadata["choices"])}'
  return _columns(f'--{name}={hparams.format_value(field.default)}', first)


def _columns(left: str, right: str) -> list[str]:
  """Writes two columns, the right one wrapped."""
  indent = ' ' * _NAME_WIDTH
  lines = textwrap.wrap(
    right,
    _WIDTH,
    initial_indent=indent,
    subsequent_indent=indent,
    break_on_hyphens=False,
  )
  left = f'  {left}'
  if len(left) >= _NAME_WIDTH:
    return [left, *lines]
  return [f'{left:{_NAME_WIDTH}}{lines[0].lstrip()}', *lines[1:]]


def _indented(text: str, indent: int) -> list[str]:
  return textwrap.wrap(
    text,
    _WIDTH,
    initial_indent=' ' * indent,
    subsequent_indent=' ' * indent,
    break_on_hyphens=False,
  )


def allowed(field: dataclasses.Field) -> str:
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
    if owner is config and name == 'info':  # --dataset decides it.
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
