"""Writes the reference of the site, from declarations, without TensorFlow."""

from collections.abc import Iterator, Sequence
import dataclasses
import pathlib
import re
from typing import Any
from unittest import mock

import tff_fssl
from tff_fssl import hparams
from tff_fssl.program import cli
from tff_fssl.program import flags
from tff_fssl.program import usage

_PACKAGE = pathlib.Path(tff_fssl.__file__)
# Modules among the exported names: their public functions are shown, too.
_MODULES = ('runtime', 'training')
# The title of a program's own flags.
_ONLY = 'Flags'


def index_page() -> str:
  """Makes the overview of the reference."""
  return """\
# Reference

With these pages you look up names, flags, columns, files and exit codes.

- [Python](api.md): every name of `import tff_fssl as fssl`
- [Flags](flags.md): every flag of every program, with default and range
- [Metrics](../metrics.md): every column of the tables
- [Files of a run](../runs.md#the-folder)
- [Exit codes](../runs.md#exit-codes)
- [Versions](../changelog.md): what has changed
"""


def api_page() -> str:
  """Makes the page of the exported names, for mkdocstrings to fill in."""
  lines = [
    '# Python',
    '',
    'With this page you look up the names of `import tff_fssl as fssl`.'
    ' TensorFlow is imported when the first name that needs it is used.'
    ' [Embedding](../embedding.md) shows how they work together,'
    ' [Extending](../extending.md) what authors of algorithms need.',
    '',
    'Fields of hyper-parameters are flags, too: see [Flags](flags.md).',
  ]
  for title, names in _sections().items():
    lines += ['', f'## {title}']
    for name in names:
      module = tff_fssl._EXPORTED[name]
      path = module if name in _MODULES else f'{module}.{name}'
      lines += ['', f'::: {path}', *_options(name)]
  return '\n'.join(lines) + '\n'


def _options(name: str) -> list[str]:
  lines = ['    options:', f'      heading: fssl.{name}']
  if name in _MODULES:
    lines += ['      show_root_members_full_path: false']
  return lines


def _sections() -> dict[str, list[str]]:
  """Returns the exported names by the comments among them."""
  text = _PACKAGE.read_text(encoding='utf-8')
  table = text.partition('_EXPORTED = {\n')[2].partition('\n}')[0]
  sections: dict[str, list[str]] = {}
  title = 'Errors'
  for line in table.splitlines():
    if comment := re.match(r' +# ([^.]+)\.', line):
      title = comment[1]
    elif entry := re.match(r" +'(\w+)': ", line):
      sections.setdefault(title, []).append(entry[1])
  found = sorted(sum(sections.values(), []))
  if found != sorted(tff_fssl._EXPORTED):
    raise ValueError(f'{_PACKAGE}: _EXPORTED has other names than {found}')
  return sections


def flags_page() -> str:
  """Makes the page of all flags of all programs."""
  lines = [
    '# Flags',
    '',
    'With this page you look up any flag. Each is given with its default.'
    ' `--helpfull` prints the same. `--flagfile=FILE` reads flags from a file;'
    ' those on the command line take precedence.',
    '',
    'This page is made from the declarations of the flags.',
  ]
  shown: set[str] = set()
  for program, about in cli._PROGRAMS.items():
    groups = [group for group in _groups(program) if group.named_fields()]
    lines += ['', f'## {program}.py', '', about]
    lines += _of_program(program, groups, shown)
  return '\n'.join(lines) + '\n'


def _groups(program: str) -> list[flags.Group]:
  """Returns the groups that `programs/PROGRAM.py --help` shows."""
  main = cli.load(program)
  seen: list[flags.Group] = []

  def keep(usage_line: str, about: str, groups: Sequence[flags.Group]) -> str:
    del usage_line, about
    seen.extend(groups)
    return ''

  with (
    mock.patch.object(usage, 'help_text', keep),
    mock.patch.object(usage.console, 'show'),
  ):
    main(['--helpfull'])
  return seen


def _of_program(
  program: str, groups: Sequence[flags.Group], shown: set[str]
) -> Iterator[str]:
  """Writes the flags of a program, except those that a program had before."""
  repeated = False
  for group in groups:
    title = group.title
    for name, field in group.named_fields():
      if field.metadata['group']:
        title = field.metadata['group']
      key = f'{group.hparams.__module__}.{group.hparams.__name__}.{name}'
      if key in shown:
        repeated = True
        continue
      shown.add(key)
      if title:
        # Of an algorithm, the summary follows in parentheses.
        short, _, summary = title.partition(' (')
        is_own = short.startswith('--')
        if title != _ONLY:
          yield from ('', f'### {_capital(short if is_own else title)}')
        if is_own and summary:
          yield from ('', f'{summary.removesuffix(")")}.')
        if title == group.title and group.note:
          yield from ('', _escaped(group.note))
        title = ''
      yield from ('', *_flag(program, name, field))
  if repeated:
    yield from ('', 'It also takes flags of `train.py`: see `--helpfull`.')


def _flag(
  program: str, name: str, field: dataclasses.Field[Any]
) -> Iterator[str]:
  anchor = name if program == 'train' else f'{program}-{name}'
  default = hparams.format_value(field.default)
  yield f'#### `--{name}={default}` {{: #{anchor} }}'
  yield ''
  yield _escaped(f'{field.metadata["help"]}{usage.allowed(field)}')


def _capital(text: str) -> str:
  return text if text.startswith('--') else text[:1].upper() + text[1:]


def _escaped(text: str) -> str:
  """Escapes what Markdown would read as markup."""
  return re.sub(r'([\\`*_{}\[\]<>#|])', r'\\\1', text)
