"""Flags made from dataclasses of `hparam` fields.

Syntax and types are absl's. Beyond absl, the command line beats flagfiles
wherever --flagfile stands, positional arguments and unknown flags are errors,
and each error is one line with the given value and the allowed ones.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import dataclasses
import difflib
import functools
import os
import pathlib
import textwrap
from typing import Any

from absl import flags as absl_flags

import tff_fssl
from tff_fssl import files
from tff_fssl import hparams
from tff_fssl.hparams import UsageError
from tff_fssl.program import console

# A flagfile comes with a run's folder, and may be hostile.
_MAX_FLAGFILE_BYTES = 2**20
_MAX_FLAGFILES = 100
# Begins a flagfile, and names the Python file that wrote it.
_OWN_FILE = '# Written by '
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


class _NumberParser(absl_flags.ArgumentParser):
  """absl's parser, with a message that names the allowed values."""

  def __init__(self, number_type: type[Any]):
    self._number_type = number_type

  def parse(self, argument: Any) -> Any:
    try:
      return self._number_type(argument)
    except ValueError as error:
      allowed = 'a whole number' if self._number_type is int else 'a number'
      raise ValueError(f'must be {allowed}') from error


class _BooleanParser(absl_flags.BooleanParser):
  def parse(self, argument: Any) -> bool:
    try:
      return super().parse(argument)
    except (TypeError, ValueError) as error:
      raise ValueError('must be true or false') from error


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
  flag_values = _define(groups)
  from_files, typed = _split_flagfiles(argv)
  in_files = {}
  # One argument at a time, so that an error can name its file.
  for argument, origin in from_files:
    before = _present(flag_values)
    if _parse_into(flag_values, [argument], f' (in {origin})'):
      raise UsageError(f'{origin}: {argument!r} is not a flag')
    for name, count in _present(flag_values).items():
      if count != before[name]:
        in_files[name] = origin
  before = _present(flag_values)
  positional = _parse_into(flag_values, typed, '')
  if positional and not allow_positional:
    raise UsageError(
      f'{positional[0]!r} is not a flag; flags are written --name=value, and'
      ' nothing else is allowed here (--helpfull lists the flags)'
    )
  after = _present(flag_values)
  values = {name: flag_values[name].value for name in before}
  for name, value in [*values.items(), *(('', p) for p in positional)]:
    for text in value if isinstance(value, list) else [value]:
      _check_text(f'--{name}=' if name else '', text)
  values = {
    n: tuple(v) if isinstance(v, list) else v for n, v in values.items()
  }
  return ParsedFlags(
    values,
    frozenset(name for name in before if after[name] != before[name]),
    in_files,
    tuple(positional),
  )


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


def flagfile_text(values: dict[str, Any], own_file: str = '') -> str:
  """Makes a flagfile.

  Args:
    values: Name -> value of each flag.
    own_file: The user's Python file without which these flags mean nothing.

  Returns:
    Its text, with a comment that names the file. Flags are sorted by name.
  """
  # A path with a line feed could smuggle a flag into the file.
  head = f'{_OWN_FILE}{own_file}\n' if own_file.isprintable() else ''
  lines = arguments(dict(sorted(values.items())))
  return head * bool(own_file) + ''.join(f'{line}\n' for line in lines)


def own_file_of(path: str) -> str:
  """Reads the name of the user's Python file that wrote a flagfile.

  Args:
    path: The flagfile, perhaps a stranger's.

  Returns:
    The printable name in the flagfile, or '' if it has none or cannot be read.
    Nothing may be run because of it.
  """
  try:
    lines = files.read_text(path, limit=_MAX_FLAGFILE_BYTES).splitlines()
  except files.FileError:
    return ''
  first = lines[0] if lines else ''
  name = first.removeprefix(_OWN_FILE)
  return name if name != first and name.isprintable() else ''


@contextlib.contextmanager
def naming_own_file(
  argv: Sequence[str], program: str, *arguments: str
) -> Iterator[None]:
  """Adds to errors in flags that a user's Python file wrote them.

  Args:
    argv: Arguments, some of them `--flagfile=FILE`.
    program: The program with which the user continues.
    *arguments: Its arguments.

  Yields:
    Once, for the flags to be parsed and checked.

  Raises:
    UsageError: As the block does. If another file of the user's wrote one of
      the flagfiles, the error names it.
  """
  try:
    yield
  except UsageError as error:
    for argument in argv:
      path = argument.partition('=')[2]
      if not argument.startswith('--flagfile='):
        continue
      own_file = own_file_of(path)
      # The name is only shown: a stranger's file must not be run.
      if own_file not in ('', console.own_file()):
        raise UsageError(
          f'{path} was written by {own_file}, a program whose algorithms and'
          f' flags are not all known here ({error}); if you trust that file:'
          f'\n  {console.command_line(program, *arguments, own_file=own_file)}'
        ) from error
    raise


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


def is_value(field: dataclasses.Field, text: str) -> bool:
  """Says whether a text is a value of the flag's type, in any range."""
  kind = type(field.default)
  try:
    if kind is bool:
      _BooleanParser().parse(text)
    elif kind in (int, float):
      _NumberParser(kind).parse(text)
  except ValueError:
    return False
  return True


def _define(groups: Sequence[Group]) -> absl_flags.FlagValues:
  """Defines all flags, in a `FlagValues` of their own."""
  flag_values = absl_flags.FlagValues()
  for group in groups:
    for name, field in group.named_fields():
      default: Any = field.default
      kind, text = type(default), field.metadata['help']
      flag: absl_flags.Flag[Any]
      # The field's own type decides, not absl's: a bool is also an int.
      if kind is bool:
        flag = absl_flags.BooleanFlag(name, default, text)
        flag.parser = _BooleanParser()
      else:
        make = absl_flags.MultiFlag if kind is tuple else absl_flags.Flag
        parser: absl_flags.ArgumentParser[Any] = absl_flags.ArgumentParser()
        if kind in (int, float):
          parser = _NumberParser(kind)
        serializer = absl_flags.ArgumentSerializer[Any]()
        flag = make(parser, serializer, name, default, text)
      absl_flags.DEFINE_flag(flag, flag_values)
  return flag_values


def _names(flag_values: absl_flags.FlagValues) -> list[str]:
  special = ('flagfile', 'undefok')
  return [name for name in flag_values if name not in special]


def _present(flag_values: absl_flags.FlagValues) -> dict[str, int]:
  """Counts how often each flag was set."""
  return {name: flag_values[name].present for name in _names(flag_values)}


def _parse_into(
  flag_values: absl_flags.FlagValues, arguments: list[str], origin: str
) -> list[str]:
  """Parses arguments, and returns those that are not flags."""
  names = _names(flag_values)
  # Positional arguments may come before flags.
  flag_values.set_gnu_getopt(True)
  try:
    # absl's --undefok, which ignores unknown flags, would bypass this check.
    for argument in arguments:
      if argument.lstrip('-').partition('=')[0] == 'undefok' and (
        argument.startswith('-')
      ):
        raise absl_flags.UnrecognizedFlagError('undefok')
    return flag_values(['', *arguments])[1:]
  except absl_flags.UnrecognizedFlagError as error:
    name = error.flagname
    close = functools.partial(difflib.get_close_matches, name.lower(), names)
    longer = [n for n in names if name.lower() in n][:3]
    matches = close(n=3, cutoff=0.8) or longer or close(n=1)
    hint = f'; did you mean --{", --".join(matches)}?' if matches else ''
    if name.startswith('-') or ' ' in name:
      hint = '; flags are written --name=value'
    raise UsageError(
      f'unknown flag --{name}{origin}{hint} (--helpfull lists all flags)'
    ) from error
  except (absl_flags.Error, ValueError) as error:
    message = str(error)
    message = message.removeprefix('flag ').replace(' = ', '=', 1)
    message = message.replace('Missing value for flag ', 'missing value for ')
    raise UsageError(f'{message}{origin}') from error


def _split_flagfiles(
  argv: Sequence[str],
) -> tuple[list[tuple[str, str]], list[str]]:
  """Splits arguments: ([(argument, flagfile)], [the other arguments])."""
  from_files, others = [], []
  num_read: list[str] = []
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
    from_files += _read_flagfile(value, (), num_read)
  return from_files, others


def _read_flagfile(
  path: str, including: tuple[str, ...], already_read: list[str]
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
  already_read.append(path)
  # Files that each include two others would be exponentially many.
  if len(already_read) > _MAX_FLAGFILES:
    raise UsageError(
      f'--flagfile={already_read[0]}: it includes too many files; at most'
      f' {_MAX_FLAGFILES} are allowed in all'
    )
  try:
    lines = files.read_text(path, limit=_MAX_FLAGFILE_BYTES).splitlines()
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
      result += _read_flagfile(value, (*including, path), already_read)
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
