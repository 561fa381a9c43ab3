"""Reads finished and unfinished runs from their folders."""

import collections
from collections.abc import Callable, Iterable, Sequence
import dataclasses
import functools
import os
from typing import TypeVar

import numpy as np

from tff_fssl import hparams
from tff_fssl import metrics
from tff_fssl.aggregators import hparams as aggregator_hparams
from tff_fssl.algorithms import registry
from tff_fssl.hparams import UsageError
from tff_fssl.program import config
from tff_fssl.program import csv_table
from tff_fssl.program import flags
from tff_fssl.program import inputs as inputs_lib
from tff_fssl.program import output_tree
from tff_fssl.program import summary

_T = TypeVar('_T')


@dataclasses.dataclass(frozen=True)
class Run:
  """A run's tables.

  Attributes:
    path: Folder of the run.
    flags: Flags of the run, as text.
    rows: Rows of train.csv, eval.csv and timing.csv.
    compute: The compute of a round, or None if not recorded.
    inputs: Digests of its data, or None if not recorded.
  """

  path: str
  flags: dict[str, str]
  rows: tuple[list[dict[str, str]], ...]
  compute: summary.Compute | None = None
  inputs: inputs_lib.Inputs | None = None

  @property
  def seed(self) -> str:
    """Returns its seed, as text."""
    return self.flags.get('seed', '')

  @property
  def is_private(self) -> bool:
    """Says whether the run protects its clients."""
    return self.flags.get('aggregator') in aggregator_hparams.PRIVATE

  @property
  def public(self) -> 'Run':
    """Drops all that depends on which examples clients hold."""
    inputs = self.inputs and self.inputs.public
    return dataclasses.replace(
      self, rows=self.rows[:2], compute=None, inputs=inputs
    )

  def curve(self, column: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns (rounds int [N], values float64 [N]) where they are known."""
    # The first table that has the column: no column is in two.
    for rows in self.rows:
      try:
        values = csv_table.column(rows, column)
      except UsageError as error:
        raise UsageError(f'{self.path}: {error}') from error
      known = np.isfinite(values)
      if known.any():
        rounds = csv_table.column(rows, csv_table.KEY)[known]
        return rounds.astype(np.int64), values[known]
    return np.zeros([0], np.int64), np.zeros([0])

  def used(self, x_axis: str) -> tuple[np.ndarray, np.ndarray]:
    """Sums up the use of bytes or hours: (rounds, used so far)."""
    if x_axis == 'hours':
      rounds, each = self.curve('seconds/round')
      return rounds, np.cumsum(each)
    rounds, clients = self.curve(f'{metrics.CLIENTS}/num_clients')
    each = np.zeros(len(rounds))
    for direction in ('up', 'down'):
      of, values = self.curve(f'communication/bytes_{direction}_per_client')
      # Rounds without clients send nothing.
      common = np.isin(rounds, of)
      # Bytes are recorded for each client of a round.
      each[common] += (clients * 1.0)[common] * values[np.isin(of, rounds)]
    return (rounds, np.cumsum(each)) if each.any() else (rounds[:0], each[:0])


@dataclasses.dataclass(frozen=True)
class RunGroup:
  """Runs that differ only in their seeds.

  Attributes:
    label: Text that distinguishes the group from the others.
    runs: Runs of the group.
    algorithm: The training algorithm.
    variant: The flags in the label.
  """

  label: str
  runs: tuple[Run, ...]
  algorithm: str = ''
  variant: str = ''

  def curve(
    self, column: str
  ) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
    """Computes (rounds, mean, sample standard deviation) over runs.

    Rounds are those that all runs have in common. It is None if a run lacks the
    column: a mean over some of the seeds would pass for one over all.
    """
    stacked = _stack(run.curve(column) for run in self.runs)
    if stacked is None:
      return None
    common, values = stacked
    spread = values.std(0, ddof=1) if len(values) > 1 else 0 * common
    return common, values.mean(0), spread

  def positions(self, x_axis: str) -> tuple[np.ndarray, np.ndarray] | None:
    """Averages the use over runs: (rounds, used so far), or None.

    Args:
      x_axis: 'bytes', sent and received by all clients, or 'hours', the time of
        rounds in seconds.
    """
    stacked = _stack(run.used(x_axis) for run in self.runs)
    return stacked and (stacked[0], stacked[1].mean(0))


def _stack(
  curves: Iterable[tuple[np.ndarray, np.ndarray]],
) -> tuple[np.ndarray, np.ndarray] | None:
  """Stacks the values of curves in the rounds that all of them have.

  Args:
    curves: (rounds [N], values [N]) of each, at least one.

  Returns:
    (rounds, values [curves, rounds]), or None if they have no round in common.
  """
  known = list(curves)
  common = functools.reduce(np.intersect1d, [rounds for rounds, _ in known])
  if not len(common):
    return None
  return common, np.array(
    [values[np.isin(rounds, common)] for rounds, values in known]
  )


NO_RUN = 'no run was given; give one folder or more'


class NotARunError(UsageError):
  """A path that is not a run, or a run that has nothing to show yet."""


def read_all(
  paths: Sequence[str], warn: Callable[[str], None], column: str = ''
) -> list[Run]:
  """Reads runs, and warns about paths that are not runs or have no rows yet.

  Args:
    paths: Folders, as a shell's RUNS/* gives them.
    warn: Called for each path that is skipped.
    column: A column in which each run must have values, if given.

  Returns:
    The runs, at least one.

  Raises:
    UsageError: If no run is left, or a run's files cannot be read.
  """

  def read(path: str) -> Run:
    run = read_run(path)
    if column and not len(run.curve(column)[0]):
      raise NotARunError(f'{path}: this run has no evaluation yet')
    return run

  return read_each(paths, read, warn)


def read_each(
  paths: Sequence[str], read: Callable[[str], _T], warn: Callable[[str], None]
) -> list[_T]:
  """Calls `read` for each path, and warns about those that are not runs.

  Args:
    paths: Folders, at least one.
    read: Reads a path, or raises `NotARunError`.
    warn: Called for each path that is skipped.

  Returns:
    The results of `read`, at least one.

  Raises:
    UsageError: If no path is left, or from `read`.
  """
  found, left_out = [], []
  for path in paths:
    try:
      found.append(read(path))
    except NotARunError as error:
      left_out.append(str(error))
  if not found:
    more = f' (and {len(left_out) - 1} more)' if len(left_out) > 1 else ''
    raise UsageError(f'{left_out[0]}{more}')
  for reason in left_out:
    warn(f'skipped: {reason}')
  return found


def read_run(path: str) -> Run:
  """Reads a run's folder.

  Args:
    path: The folder.

  Returns:
    The run.

  Raises:
    NotARunError: If it is not a run, or has no finished round.
    UsageError: If the run's files cannot be read.
  """
  tree = output_tree.OutputTree(path)
  if not os.path.lexists(tree.flags_file):
    raise NotARunError(
      f'{path}: is not a run (there is no {output_tree.FLAGS}); give the'
      ' --output_dir of a training run'
    )
  run = read_tree(tree)
  if not run.rows[0]:
    raise NotARunError(f'{path}: no round of this run is finished yet')
  return run


def read_tree(tree: output_tree.OutputTree) -> Run:
  """Reads a run's folder, finished or not, or raises `UsageError`."""
  paths = (tree.train_csv, tree.eval_csv, tree.timing_csv)
  return Run(
    tree.path,
    flags.read_flagfile(tree.flags_file),
    tuple(csv_table.read(p)[1] for p in paths),
    summary.read_compute(tree.compute_json),
    inputs_lib.read(tree.inputs_json),
  )


def usual_flags(algorithm: str = '') -> dict[str, str]:
  """Returns the defaults of all flags, as text.

  Args:
    algorithm: The algorithm with own defaults that are included. '' and unknown
      ones have none.

  Returns:
    Name -> text.
  """
  usual = {name: field.default for name, field in config.fields().items()}
  if algorithm in registry.REGISTRY:
    # An algorithm may have the defaults of its paper.
    usual |= registry.REGISTRY[algorithm].run_defaults
  return {name: hparams.format_value(value) for name, value in usual.items()}


def group_runs(runs: Sequence[Run]) -> list[RunGroup]:
  """Groups runs that differ only in their seeds, in order of appearance.

  A group's label has the algorithm and those flags in which groups differ,
  except flags at their defaults, which may be the algorithm's own.
  """
  # Many groups have one algorithm.
  usual_of = functools.cache(usual_flags)
  defaults = usual_of('')
  # Flags by which results do not differ, or only by chance.
  ignored = {*config.changeable_flags(), 'seed'}
  groups: dict[tuple[tuple[str, str], ...], list[Run]] = {}
  for run in runs:
    # A flag that was added after the run was made counts as its default.
    values = {**defaults, **run.flags}
    kept = {k: v for k, v in values.items() if k not in ignored}
    groups.setdefault(tuple(sorted(kept.items())), []).append(run)
  # A flag that all groups share does not tell them apart.
  counts = collections.Counter(pair for key in groups for pair in key)
  differing = {
    name for (name, _), count in counts.items() if count < len(groups)
  } - {'algorithm'}
  result = []
  for key, members in groups.items():
    values = dict(key)
    algorithm = values.get('algorithm', '?')
    parts, usual = [algorithm], usual_of(algorithm)
    parts += [
      f'{name.rpartition(".")[2]}={values[name]}'
      for name in sorted(differing & values.keys())
      if values[name] != usual.get(name)
    ]
    seeds = f' ({len(members)} seeds)' if len(members) > 1 else ''
    result.append(
      RunGroup(
        ' '.join(parts) + seeds,
        tuple(members),
        values.get('algorithm', ''),
        ' '.join(parts[1:]),
      )
    )
  return result
