"""The rows of the papers' tables: configs/papers/PAPER.toml.

A file is one paper: flags that all of its runs share, and tables. A table has
axes. Each combination of their values with a cell in `figures` that is not ''
is a row. The values of an axis stand in the table, or the table lists some of
the paper's `axes`. A row merges, from strongest to weakest, the rules with
`rows` that match 'TABLE/ROW', the values of its axes, the table and the paper.
Each has flags and may say:

  differs  how the run differs from the paper's;
  needs    which data it needs that no program fetches;
  why      why it cannot be run.

The flags of other algorithms than the row's, such as fl2.rho, are dropped. A
figure is written as printed: '81.5(7.4)' is a mean and its spread in percent,
and words may follow. 'curve' is a figure that is only drawn, and '?' one that
we do not know.
"""

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import fnmatch
import functools
import itertools
import os
import re
from typing import Any

from tff_fssl import files
from tff_fssl.algorithms import registry
from tff_fssl.hparams import UsageError
from tff_fssl.hparams import closest
from tff_fssl.program.configuration import config as config_lib
from tff_fssl.program.configuration import flags

# Which round's test accuracy a paper reports.
LAST, BEST_VALIDATION = 'last', 'best_validation'
# What stands for a figure: it is only drawn, it is not known to us, or the
# table is ours.
CURVE, UNKNOWN, OURS = 'curve', '?', 'ours'
# The name of the paper's budget, and the dtype of all papers.
ALL_ROUNDS, FLOAT32 = 'paper', 'float32'

# A mean, perhaps its spread in parentheses, perhaps words.
_FIGURE = re.compile(r'(\d+\.?\d*)(?:\((\d+\.?\d*)\))?(?: (.+))?')
_NOTES = ('differs', 'needs', 'why')


@dataclasses.dataclass(frozen=True)
class Row:
  """A row of a table: one run of the paper, over seeds.

  Attributes:
    name: 'PAPER/TABLE/...'.
    title: The subject of the table.
    flags: The flags that the row sets, by name.
    printed: Its figure as the paper prints it, or `CURVE`, `UNKNOWN`, `OURS`.
    spread: The meaning of the figure in parentheses, or ''.
    reported: `LAST` or `BEST_VALIDATION`.
    differs: The differences from the paper's run.
    needs: The data that it needs and no program fetches, or ''.
    why: The reason why it cannot be run, or ''.
  """

  name: str
  title: str
  flags: dict[str, Any]
  printed: str
  spread: str
  reported: str
  differs: tuple[str, ...] = ()
  needs: str = ''
  why: str = ''

  @property
  def table(self) -> str:
    """Returns the name of its table, 'PAPER/TABLE'."""
    return '/'.join(self.name.split('/')[:2])

  @property
  def figure(self) -> tuple[float, float | None] | None:
    """Returns (mean, spread or None) in percent, if it is a number."""
    match = _FIGURE.fullmatch(self.printed)
    if match is None:
      return None
    return float(match[1]), None if match[2] is None else float(match[2])

  @property
  def short_figure(self) -> str:
    """Returns the figure without the words that follow it."""
    match = _FIGURE.fullmatch(self.printed)
    return self.printed.removesuffix(f' {match[3]}') if match else self.printed

  def config(self, more: Mapping[str, Any] | None = None) -> config_lib.Config:
    """Builds the configuration of the row's run.

    Args:
      more: Flags that take precedence over the row's.

    Returns:
      The configuration.

    Raises:
      UsageError: If the row cannot be run, or its data set has to be looked at
        and is not there.
    """
    if self.why:
      raise UsageError(f'{self.name}: cannot be run: {self.why}')
    given = {**self.flags, **(more or {})}
    parsed = flags.parse(flags.arguments(given), config_lib.groups())
    # As in a flagfile: some of a row's flags may have no effect.
    files_of = dict.fromkeys(parsed.command_line, self.name)
    return config_lib.build_config(
      dataclasses.replace(parsed, command_line=frozenset(), files=files_of)
    )

  def arguments(self, more: Mapping[str, Any] | None = None) -> list[str]:
    """Writes the row's arguments of the training program with an effect.

    Args:
      more: Flags that take precedence over the row's.

    Returns:
      '--NAME=VALUE' for each, in the order of `--help`.

    Raises:
      UsageError: As from `config`.
    """
    has_effect = self.config(more).flags()
    given = {**self.flags, **(more or {})}
    return flags.arguments({n: given[n] for n in has_effect if n in given})

  def folder(
    self, runs_dir: str, budget: str, seed: int, compute_dtype: str = FLOAT32
  ) -> str:
    """Returns the folder of a run of the row.

    Args:
      runs_dir: The folder of all runs of rows.
      budget: `ALL_ROUNDS`, or the name of a smaller budget.
      seed: Its seed.
      compute_dtype: The type in which the network computes.

    Returns:
      RUNS_DIR/PAPER/TABLE/.../BUDGET/seedN, or, if it does not compute in
      float32, RUNS_DIR/PAPER/TABLE/.../BUDGET,bfloat16/seedN.
    """
    if compute_dtype != FLOAT32:
      budget = f'{budget},{compute_dtype}'
    return os.path.join(runs_dir, self.name, budget, f'seed{seed}')


def names() -> list[str]:
  """Lists the papers: the files configs/papers/NAME.toml, in order."""
  files_here = os.listdir(flags.config_path('papers'))
  return sorted(
    n.removesuffix('.toml') for n in files_here if n.endswith('.toml')
  )


@functools.cache
def rows() -> dict[str, Row]:
  """Reads all rows, by name, in the order of the files.

  Returns:
    The rows.

  Raises:
    UsageError: If a file cannot be read.
  """
  return {row.name: row for paper in names() for row in _read_paper(paper)}


def matching(pattern: str) -> list[Row]:
  """Finds the rows with names that match a pattern.

  Args:
    pattern: A pattern as for file names ('fl2/table1/*'), or a part of a name.

  Returns:
    The rows, at least one.

  Raises:
    UsageError: If there is none.
  """
  glob = pattern if set(pattern) & set('*?[') else f'*{pattern}*'
  found = [r for name, r in rows().items() if fnmatch.fnmatchcase(name, glob)]
  if not found:
    tables = {row.table for row in rows().values()}
    raise UsageError(
      f'{pattern!r}: no row of a table has such a name'
      f'{closest(pattern, [*rows(), *tables])}'
    )
  return found


def find(name: str) -> Row:
  """Finds the row of a name, or raises `UsageError` if there is none."""
  row = rows().get(name.strip('/'))
  if row is None:
    parts = [n for n in rows() if name.strip('/') and name.strip('/') in n]
    hint = f'; those are e.g. {", ".join(parts[:2])}' if parts else ''
    raise UsageError(
      f'{name!r}: is not the name of a row{hint or closest(name, rows())}'
    )
  return row


def _read_paper(paper: str) -> Iterator[Row]:
  """Reads the rows of a file."""
  path = flags.config_path(f'papers/{paper}.toml')
  content = files.read_toml(path)
  for table in content['tables']:
    yield from _make_rows(paper, content, table)


def _make_rows(
  paper_name: str, paper: Mapping[str, Any], table_name: str
) -> Iterator[Row]:
  """Makes the rows of a table, given the content of the file."""
  table = paper['tables'][table_name]
  axes = {
    axis: {v: paper['axes'][axis][v] for v in values}
    if isinstance(values, list)
    else values
    for axis, values in table['axes'].items()
  }
  for values in itertools.product(*axes.values()):
    printed = _cell(table['figures'], axes, values)
    if not printed:
      continue
    row = table['row'].format(**dict(zip(axes, values)))
    name = f'{table_name}/{row}'
    layers = [
      paper,
      table,
      *(_layer(axes[axis][value]) for axis, value in zip(axes, values)),
      *(
        _layer(rule)
        for rule in paper.get('rules', ())
        if any(fnmatch.fnmatchcase(name, glob) for glob in rule['rows'])
      ),
    ]
    notes = {
      # Long texts are wrapped in the file.
      kind: [' '.join(layer[kind].split()) for layer in layers if kind in layer]
      for kind in _NOTES
    }
    yield Row(
      f'{paper_name}/{name}',
      table['title'],
      _flags(layers),
      printed,
      table.get('spread', paper['spread']) if '(' in printed else '',
      paper['reported'],
      tuple(notes['differs']),
      *(notes[kind][-1] if notes[kind] else '' for kind in ('needs', 'why')),
    )


def _cell(
  figures: Any, axes: Mapping[str, Mapping[str, Any]], values: Sequence[str]
) -> str:
  """Finds a row's figure: by its axes' values, the last one's by place."""
  # Nested tables by name, and a list for the last axis.
  *outer, last = values
  for value in outer:
    figures = figures.get(value, {})
  if isinstance(figures, str):  # The same for all values of the last axis.
    return figures
  place = list(list(axes.values())[-1]).index(last)
  return figures[place] if figures else ''


def _layer(values: Mapping[str, Any]) -> dict[str, Any]:
  """Splits a value of an axis, or a rule, into flags and notes."""
  said = {n: v for n, v in values.items() if n in _NOTES}
  other = {n: v for n, v in values.items() if n not in (*_NOTES, 'rows')}
  return {**said, 'flags': other}


def _flags(layers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
  """Merges the flags of a row, without those of other algorithms."""
  given: dict[str, Any] = {}
  for layer in layers:
    given |= flags.flatten(layer.get('flags', {}))
  algorithm = given.get('algorithm')
  if algorithm not in registry.REGISTRY:
    return {n: v for n, v in given.items() if '.' not in n}
  prefix = registry.REGISTRY[algorithm].prefix
  foreign = config_lib.foreign_flags(algorithm)
  return {
    n: v
    for n, v in given.items()
    if '.' not in n or (n.startswith(prefix) and n not in foreign)
  }
