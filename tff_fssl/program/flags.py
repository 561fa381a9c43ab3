"""Flags made from dataclasses of `hparam` fields.

The syntax is absl's. The command line beats flagfiles wherever --flagfile
stands. Each error is one line with the given value and the allowed ones.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import difflib
import functools
import os
import pathlib
import textwrap
from typing import Any

import tff_fssl
from tff_fssl import files
from tff_fssl import hparams
from tff_fssl.hparams import UsageError
from tff_fssl.program import console

# The folder of flagfiles that come with the package.
_CONFIGS = 'configs'


@dataclasses.dataclass(frozen=True)
class Group:
  """The flags of a dataclass of `hparam` fields.

  Attributes:
    hparams: The dataclass.
    title: The heading in `--help` of fields before the first with a `group`.
    prefix: Prefix of the flags' names, such as 'NAME.'.
    note: A sentence below the title, if any.
  """

  hparams: type[Any]
  title: str = ''
  prefix: str = ''
  note: str = ''

  def named_fields(self) -> list[tuple[str, dataclasses.Field]]:
    """Returns (flag's name, field), or raises TypeError without a help."""
    return [
      (f'{self.prefix}{field.name}', field)
      for field in hparams.documented_fields(self.hparams)
    ]


@dataclasses.dataclass(frozen=True)
class ParsedFlags:
  """The content of a command line.

  Attributes:
    values: Every flag's value by name, defaults included.
    command_line: Names of the flags that the command line sets.
    files: Name of each flag that a flagfile sets -> that file.
    positional: Arguments that are not flags.
  """

  values: dict[str, Any]
  command_line: frozenset[str] = frozenset()
  files: dict[str, str] = dataclasses.field(default_factory=dict)
  positional: tuple[str, ...] = ()

  def is_set(self, name: str) -> bool:
    """Says whether the user gave the flag, even with its default value."""
    return name in self.command_line or name in self.files

  def source(self, name: str) -> str:
    """Says where a flag was set, for messages: '' or ' (in FILE)'."""
    if name in self.command_line or name not in self.files:
      return ''
    return f' (in {self.files[name]})'

  def mark_recorded(self, origin: str) -> 'ParsedFlags':
    """Returns the flags as if the file `origin` had set those that were typed.

    Flags of a file may have no effect.
    """
    files_of = {**dict.fromkeys(self.command_line, origin), **self.files}
    return dataclasses.replace(self, command_line=frozenset(), files=files_of)

  def refuse(
    self, reasons: Mapping[str, str], wherever: Sequence[str] = ()
  ) -> None:
    """Refuses flags without effect that were typed.

    Flags of a flagfile, which may serve several runs, are ignored.

    Args:
      reasons: Name of each flag without effect -> the reason.
      wherever: Those that are refused in flagfiles, too.

    Raises:
      UsageError: If there is one.
    """
    for name, reason in reasons.items():
      if name in self.command_line or (name in wherever and self.is_set(name)):
        raise UsageError(
          f'--{name}{self.source(name)}: has no effect with {reason}; omit it'
        )

  def build(self, cls: type[Any], prefix: str = '', **replaced: Any) -> Any:
    """Builds a dataclass from the flags that start with `prefix`."""
    given = {
      field.name: self.values[f'{prefix}{field.name}']
      for field in hparams.documented_fields(cls)
    }
    return cls(**{**given, **replaced})


def parse(
  argv: Sequence[str],
  groups: Sequence[Group],
  *,
  allow_positional: bool = False,
) -> ParsedFlags:
  """Parses a command line.

  Args:
    argv: The arguments, without the program's name.
    groups: All flags that exist.
    allow_positional: Whether arguments that are not flags are allowed.

  Returns:
    The values. Types and syntax have been checked. The dataclasses check
    ranges.

  Raises:
    UsageError: One line with the given value and the allowed ones.
  """
  fields = {n: field for group in groups for n, field in group.named_fields()}
  values = {name: field.default for name, field in fields.items()}
  from_files, typed = _split_flagfiles(argv)
  in_files: dict[str, str] = {}
  for argument, origin in from_files:
    # One argument at a time, so that an error can name its file.
    names, _ = _parse_into(values, fields, [argument], f' (in {origin})')
    in_files |= dict.fromkeys(names, origin)
  names, positional = _parse_into(values, fields, typed, '')
  if positional and not allow_positional:
    raise UsageError(
      f'{positional[0]!r} is not a flag; flags are written --name=value, and'
      ' nothing else is allowed here (--helpfull lists the flags)'
    )
  return ParsedFlags(values, frozenset(names), in_files, tuple(positional))


def _parse_into(
  values: dict[str, Any],
  fields: Mapping[str, dataclasses.Field],
  given: Sequence[str],
  origin: str,
) -> tuple[list[str], list[str]]:
  """Sets the values of flags: (names that were set, other arguments).

  Args:
    values: The values so far, which are changed. A flag of several values adds
      one.
    fields: All flags.
    given: Arguments: '--NAME=VALUE', '--NAME', 'VALUE', '--NAME' and '--noNAME'
      of a boolean. '--' ends the flags.
    origin: The file that they are from, for messages.
  """
  names: list[str] = []
  positional: list[str] = []
  todo = iter(given)
  for argument in todo:
    if argument == '--':
      positional += todo
      break
    if not argument.startswith('-') or argument == '-':
      _check_text('', argument)
      positional.append(argument)
      continue
    name, has_value, text = argument.lstrip('-').partition('=')
    negated = fields.get(name.removeprefix('no'))
    if name not in fields and negated and type(negated.default) is bool:
      name, has_value, text = name.removeprefix('no'), '=', 'false'
    if name not in fields:
      raise UsageError(_unknown(name, origin, list(fields)))
    kind = type(fields[name].default)
    if not has_value and kind is bool:
      text = 'true'
    elif not has_value:
      text = next(todo, '')
      if not text:
        raise UsageError(f'missing value for --{name}{origin}')
    _check_text(f'--{name}=', text)
    try:
      value = _read_value(kind, text)
    except ValueError as error:
      raise UsageError(f'--{name}={text}: {error}{origin}') from error
    values[name] = (*values[name], text) if kind is tuple else value
    names.append(name)
  return names, positional


def _read_value(kind: type[Any], text: str) -> Any:
  """Converts a flag's text, or raises ValueError with the allowed values."""
  if kind is bool:
    if text.lower() not in ('true', 't', '1', 'false', 'f', '0'):
      raise ValueError('must be true or false')
    return text.lower() in ('true', 't', '1')
  if kind not in (int, float):
    return text
  try:
    return kind(text)
  except ValueError as error:
    allowed = 'a whole number' if kind is int else 'a number'
    raise ValueError(f'must be {allowed}') from error


def _unknown(name: str, origin: str, names: Sequence[str]) -> str:
  """Writes the message on an unknown flag, with similar names."""
  close = functools.partial(difflib.get_close_matches, name.lower(), names)
  longer = [n for n in names if name.lower() in n][:3]
  matches = close(n=3, cutoff=0.8) or longer or close(n=1)
  hint = f'; did you mean --{", --".join(matches)}?' if matches else ''
  if ' ' in name:
    hint = '; flags are written --name=value'
  return f'unknown flag --{name}{origin}{hint} (--helpfull lists all flags)'


def _check_text(prefix: str, value: Any) -> None:
  """Refuses names that neither a flagfile nor a message could hold."""
  if isinstance(value, str) and not (
    value.isprintable() and value == value.strip()
  ):
    raise UsageError(
      f'{prefix}{ascii(value)}: names with line breaks, spaces at an end or'
      ' other unprintable characters are not allowed; rename it'
    )


def join_arguments(values: Mapping[str, Any]) -> str:
  """Writes the arguments that set `values`: '--a=1, --b=2'."""
  return ', '.join(arguments(values))


def arguments(values: Mapping[str, Any]) -> list[str]:
  """Writes the arguments that set `values`: '--NAME=VALUE' for each."""
  return [f'--{n}={hparams.format_value(value)}' for n, value in values.items()]


def flatten(
  table: Mapping[str, Any],
  is_value: Callable[[Mapping[str, Any]], bool] = lambda _: False,
  prefix: str = '',
) -> dict[str, Any]:
  """Joins names: {'a': {'b': 1}}, TOML's `a.b = 1`, becomes {'a.b': 1}.

  Args:
    table: The nested tables.
    is_value: Says which inner tables are values.
    prefix: What all names begin with.

  Returns:
    Flag -> value.
  """
  result: dict[str, Any] = {}
  for name, value in table.items():
    if isinstance(value, Mapping) and not is_value(value):
      result |= flatten(value, is_value, f'{prefix}{name}.')
    else:
      result[f'{prefix}{name}'] = value
  return result


def comments(texts: Sequence[str]) -> list[str]:
  """Wraps texts as the comments of a flagfile."""
  return [
    line
    for text in texts
    for line in textwrap.wrap(
      text,
      console.WIDTH,
      initial_indent='# ',
      subsequent_indent='# ',
      break_on_hyphens=False,
      break_long_words=False,
    )
  ]


def flagfile_text(values: Mapping[str, Any]) -> str:
  """Writes a flagfile of name -> value, sorted by name."""
  lines = arguments(dict(sorted(values.items())))
  return ''.join(f'{line}\n' for line in lines)


def read_flagfile(path: str) -> dict[str, str]:
  """Reads a flagfile that `flagfile_text` wrote: flag's name -> text.

  Args:
    path: The flagfile.

  Returns:
    The texts.
  """
  arguments, _ = _split_flagfiles([f'--flagfile={path}'])
  pairs = (argument.lstrip('-').partition('=') for argument, _ in arguments)
  return {name: value for name, _, value in pairs}


def _split_flagfiles(
  argv: Sequence[str],
) -> tuple[list[tuple[str, str]], list[str]]:
  """Splits arguments: ([(argument, flagfile)], [the other arguments])."""
  from_files, others = [], []
  arguments = iter(argv)
  for argument in arguments:
    name, equals, value = argument.partition('=')
    if name not in ('--flagfile', '-flagfile'):
      others.append(argument)
      continue
    if not equals:
      value = next(arguments, '')
    if not value:
      raise UsageError('--flagfile: must be followed by the name of a file')
    from_files += _read_flagfile(value, ())
  return from_files, others


def _read_flagfile(
  path: str, including: tuple[str, ...]
) -> list[tuple[str, str]]:
  """Reads a flagfile and those that it names: [(argument, file)]."""
  _check_text('--flagfile=', path)
  path = os.path.expanduser(path)
  # An included file is looked for beside the file that names it.
  if including and not os.path.isabs(path):
    beside = os.path.join(os.path.dirname(including[-1]), path)
    path = beside if os.path.exists(beside) else path
  path = find_config(path)
  # Links could hide that a file includes itself.
  if os.path.realpath(path) in map(os.path.realpath, including):
    raise UsageError(f'--flagfile={path}: the file includes itself')
  try:
    lines = files.read_text(path).splitlines()
  except files.FileError as error:
    raise UsageError(
      f'--flagfile={path}: cannot be read: {error.reason}{_similar_file(path)}'
    ) from error
  result = []
  for number, line in enumerate(lines, 1):
    line = line.strip()
    if not line or line.startswith(('#', '//')):
      continue
    if not line.startswith('-') or line.strip('-') == '':
      raise UsageError(
        f'{path}, line {number}: {line!r} is not a flag; flags are written'
        ' --name=value, comments start with #'
      )
    name, _, value = line.partition('=')
    if name in ('--flagfile', '-flagfile'):
      result += _read_flagfile(value, (*including, path))
    else:
      result.append((line, path))
  return result


def _similar_file(path: str) -> str:
  """Makes a hint at a file of a similar name, or ''."""
  if os.path.lexists(path):
    return ''
  folder = os.path.dirname(path) or '.'
  beside = os.listdir(folder) if os.path.isdir(folder) else []
  return hparams.closest(os.path.basename(path), beside) or hparams.closest(
    os.path.normpath(path), list_configs()
  )


def _configs_folder() -> str:
  """Returns the folder of the files of configs/."""
  package = os.path.dirname(os.path.abspath(tff_fssl.__file__))
  installed = os.path.join(package, _CONFIGS)
  # The wheel carries a copy of configs/ inside the package.
  if os.path.isdir(installed):
    return installed
  return os.path.join(os.path.dirname(package), _CONFIGS)


def config_path(name: str) -> str:
  """Returns the path of a file, given its path in configs/."""
  return os.path.join(_configs_folder(), name)


def list_configs() -> list[str]:
  """Lists all flagfiles, sorted, as --flagfile=configs/X.flags takes them."""
  folder = pathlib.Path(_configs_folder())
  return sorted(
    os.path.join(_CONFIGS, path.relative_to(folder))
    for path in folder.rglob('*.flags')
  )


def find_config(path: str) -> str:
  """Finds the file that the name of a flagfile refers to.

  Args:
    path: The name. A file of the file system comes first.

  Returns:
    `path`, unless only the package has a file of that name (configs/X.flags).
  """
  name = os.path.normpath(path)
  if os.path.lexists(path) or name not in list_configs():
    return path
  return config_path(os.path.relpath(name, _CONFIGS))
