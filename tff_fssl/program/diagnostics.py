"""Signs of trouble in runs, from their files alone."""

from collections.abc import Callable, Iterator, Sequence
import math
import os
from typing import NamedTuple

import numpy as np

from tff_fssl import hparams
from tff_fssl import metrics
from tff_fssl.algorithms import registry
from tff_fssl.data import names as data_names
from tff_fssl.data import partition as partition_lib
from tff_fssl.hparams import UsageError
from tff_fssl.program import compare
from tff_fssl.program import config
from tff_fssl.program import csv_table
from tff_fssl.program import output_tree
from tff_fssl.program import partitions
from tff_fssl.program import predictions
from tff_fssl.program import runs as runs_lib
from tff_fssl.program import summary

_TRAIN = metrics.CLIENTS
# Shares of pseudo-labels are looked at over so many last rounds.
_LAST = 10
# Pseudo-labels are better than chance if this is less likely by luck.
_LUCK = 0.05
# Fewer rounds say nothing about whether a loss changes.
_FEWEST_ROUNDS = 3
# An aggregation weight stands out if it is this share or more, of so many
# clients or more.
_LARGE_SHARE, _FEWEST_CLIENTS = 0.6, 4
# Columns that count refused clients or updates -> their meaning.
_TROUBLES = {
  f'{_TRAIN}/num_rejected_clients': 'clients were rejected: they sent'
  ' impossible values, or had unusable data',
  f'{_TRAIN}/num_non_finite_clients': 'clients had updates that are not finite',
  'aggregator/num_rejected_clients': 'updates were rejected by the aggregation',
  'last_phase/num_rejected_clients': 'clients were rejected: they sent batch'
  ' norm sums that no client can have',
  'exchange/num_disputed_rows': 'rows were rejected: several clients claimed'
  ' the same id',
  'finalizer/server_non_finite': "rounds of the server's training were not"
  ' finite',
  'aggregator/inner/too_few_clients': 'rounds applied no update of clients: so'
  ' few weighed anything that liars could not have been outvoted',
  'participation/too_few_clients': 'rounds changed nothing: fewer clients than'
  ' --min_clients were usable',
  'bad_round': 'rounds had no usable update',
}
# Settings of a partition that are flags of the same name.
_SETTINGS = (
  'num_clients',
  'num_labels',
  'scenario',
  'partition',
  'alpha',
  'num_validation',
  'num_unlabeled',
  'client_label_classes',
  'client_test_fraction',
  'seed',
)


class Finding(NamedTuple):
  """Something that looks wrong.

  Attributes:
    where: The run, or the runs.
    text: The finding with its column and rounds, and its possible meaning.
  """

  where: str
  text: str


class _Sign(NamedTuple):
  """A sign of trouble in a run.

  Attributes:
    kind: A name for the same sign in runs of other seeds.
    text: See `Finding`.
  """

  kind: str
  text: str


def find(groups: Sequence[runs_lib.RunGroup]) -> list[Finding]:
  """Finds signs of trouble in groups, once for all seeds, and between runs."""
  found = []
  for group in groups:
    signs: dict[str, list[Finding]] = {}
    for check in _CHECKS:
      for run in group.runs:
        for kind, text in check(run):
          signs.setdefault(kind, []).append(Finding(run.path, text))
    for first, *others in signs.values():
      where = first.where
      if others:
        number = f'{1 + len(others)} of {len(group.runs)}'
        where = f'{number} runs of {group.label}; this is {first.where}'
      found.append(first._replace(where=where))
  return [*found, *_different_budgets(groups)]


def rounds_text(rounds: Sequence[int] | np.ndarray) -> str:
  """Writes 'round 3', 'rounds 3 to 9', or '4 rounds from 3 to 9'."""
  first, last = int(min(rounds)), int(max(rounds))
  if first == last:
    return f'round {first}'
  if last - first + 1 == len(rounds):
    return f'rounds {first} to {last}'
  return f'{len(rounds)} rounds from {first} to {last}'


def read_partition(run: runs_lib.Run) -> partition_lib.Partition | None:
  """Reads a run's partition, if it has one."""
  path = output_tree.OutputTree(run.path).partition_json
  if not os.path.lexists(path):
    return None
  try:
    return partition_lib.read(path)
  except UsageError:
    return None


def _lost_pseudo_labels(run: runs_lib.Run) -> Iterator[_Sign]:
  """Finds pseudo-labels all dropped, all kept, or no better than chance."""
  column = f'{_TRAIN}/pseudo_label_ratio'
  rounds, kept = (values[-_LAST:] for values in run.curve(column))
  if not len(rounds):
    return
  when = rounds_text(rounds)
  if not kept.any():
    yield _Sign(
      'none kept',
      f'no pseudo-label is kept in {when} ({column} is 0): unlabelled examples'
      ' teach nothing; is the threshold too high?',
    )
  if np.all(kept == 1) and _has_threshold(run):
    yield _Sign(
      'all kept',
      f'every pseudo-label is kept in {when} ({column} is 1): the threshold'
      ' does nothing',
    )
  accuracy_rounds, accuracy = run.curve(f'{_TRAIN}/pseudo_label_accuracy')
  late = np.isin(accuracy_rounds, rounds[kept > 0])
  partition = read_partition(run)
  if partition is None or run.is_private or not late.any():
    return
  share, chance = accuracy[late].mean(), _chance(partition)
  # Rounds see the same examples again: each counts once. A few rounds of small
  # cohorts see a part of the clients.
  cohorts = run.curve(f'{_TRAIN}/num_clients')[1][-_LAST:]
  seen = min(1.0, cohorts.sum() / partition.num_clients) if len(cohorts) else 1
  unlabeled = sum(map(len, partition.client_unlabeled))
  number = int(kept.mean() * seen * unlabeled)
  luck = _probability(share, number, chance)
  counts = partition.class_counts.sum(0)
  if predictions.is_below_chance(share, number, counts):
    yield _Sign(
      'misfit',
      'kept pseudo-labels are right far less often than by chance in'
      f' {rounds_text(accuracy_rounds[late])}'
      f' ({_TRAIN}/pseudo_label_accuracy is {100 * share:.1f}% on average, of'
      f' about {number:,}): the labels that the model learned do not mean what'
      " the clients' mean; are they of other classes, or shifted?",
    )
  elif luck > _LUCK:
    yield _Sign(
      'chance',
      'kept pseudo-labels are not significantly better than chance in'
      f' {rounds_text(accuracy_rounds[late])}'
      f' ({_TRAIN}/pseudo_label_accuracy is {100 * share:.1f}% on average, of'
      f' about {number:,}; the most frequent class is {100 * chance:.1f}%;'
      f' binomial test, p = {luck:.2g}): they may have collapsed to few'
      ' classes',
    )


def _chance(partition: partition_lib.Partition) -> float:
  """Computes the share of the most frequent class at the clients."""
  counts = partition.class_counts.sum(0)
  return counts.max() / counts.sum() if counts.any() else 1.0


def _probability(share: float, number: int, chance: float) -> float:
  """Computes how likely guesses are correct in this share of cases or more."""
  # Slow to import. pylint: disable-next=import-outside-toplevel
  from scipy import stats

  if not number or not np.isfinite(share):
    return 0.0
  correct = min(number, max(0, round(share * number)))
  return float(
    stats.binomtest(correct, number, chance, alternative='greater').pvalue
  )


def _has_threshold(run: runs_lib.Run) -> bool:
  """Says whether its algorithm drops pseudo-labels at all."""
  entry = registry.REGISTRY.get(run.flags.get('algorithm', ''))
  fields = config.own_group(entry).named_fields() if entry else []
  return not entry or any('threshold' in name for name, _ in fields)


def _dead_losses(run: runs_lib.Run) -> Iterator[_Sign]:
  """Finds losses that are 0 or never change, and weights of 0."""
  columns = dict.fromkeys(
    name for rows in run.rows for row in rows[:1] for name in row
  )
  for column in columns:
    if 'loss' not in column.rpartition('/')[2]:
      continue
    rounds, values = run.curve(column)
    if len(values) < _FEWEST_ROUNDS:
      continue
    # The rounds after the last value that is not 0.
    last = rounds[np.max(np.flatnonzero(values), initial=-1) + 1 :]
    if len(last) >= _FEWEST_ROUNDS:
      yield _Sign(
        column,
        f'{column} is 0 in {rounds_text(last)}: this loss teaches nothing',
      )
    elif np.ptp(values) == 0:
      yield _Sign(
        column,
        f'{column} is {values[0]:.6g} in {rounds_text(rounds)}: a loss that'
        ' never changes; is anything trained by it?',
      )
  entry = registry.REGISTRY.get(run.flags.get('algorithm', ''))
  if entry is None:
    return
  for name, field in config.own_group(entry).named_fields():
    text = run.flags.get(name, '')
    if name.endswith('_weight') and field.default and _number(text) == 0:
      yield _Sign(
        name,
        f'--{name}={text} switches this part of the loss off (its default is'
        f' {hparams.format_value(field.default)})',
      )


def _optimistic_selection(run: runs_lib.Run) -> Iterator[_Sign]:
  """Finds accuracy on validation far above that on test examples."""
  rounds, values = run.curve(summary.VALIDATION_ACCURACY)
  if not len(rounds):
    return
  best = int(np.argmax(values))
  test = compare.at(run, compare.TEST_ACCURACY, int(rounds[best]))
  # The share among so many examples deviates by this, and a run that is chosen
  # by it is above its mean.
  num = max(1.0, _number(run.flags.get('num_validation', ''), 1.0))
  deviation = np.sqrt(max(test * (1 - test), 0.01) / num)
  if values[best] - test > 0.05 + 3 * deviation:
    yield _Sign(
      'selection',
      f'validation accuracy is {100 * values[best]:.1f}% in round'
      f' {rounds[best]}, where test accuracy is {100 * test:.1f}%'
      f' ({summary.VALIDATION_ACCURACY}): selection misleads; are validation'
      ' examples among training ones, or unlike test ones?',
    )


def _number(text: str, default: float = math.nan) -> float:
  """Reads a flag's number. Other texts give the default."""
  try:
    return float(text)
  except ValueError:
    return default


def _troubled_clients(run: runs_lib.Run) -> Iterator[_Sign]:
  """Finds rejected clients, and those that decide a round alone."""
  told: list[list[float]] = []
  for column, what in _TROUBLES.items():
    rounds, counts = run.curve(column)
    # The aggregation counts clients again that were rejected before.
    if counts.any() and counts.tolist() not in told:
      told.append(counts.tolist())
      yield _Sign(
        column,
        f'{counts.sum():,.0f} {what} ({column}, in'
        f' {rounds_text(rounds[counts > 0])})',
      )
  column = f'{_TRAIN}/aggregation_weight_max'
  rounds, largest = run.curve(column)
  with_clients, clients = run.curve(f'{_TRAIN}/num_clients')
  # Among two or three clients, one has a large share anyway.
  many = with_clients[clients >= _FEWEST_CLIENTS]
  alone = (largest >= _LARGE_SHARE) & np.isin(rounds, many)
  if alone.any():
    yield _Sign(
      column,
      f'one client had {100 * largest[alone].max():.0f}% of the aggregation'
      f' ({column}, in {rounds_text(rounds[alone])}): it may lie about its'
      ' weight, or hold most of the examples; see --aggregator=robust',
    )


def _not_finite_results(run: runs_lib.Run) -> Iterator[_Sign]:
  """Finds results that are not numbers."""
  for rows in run.rows:
    for column in (compare.TEST_ACCURACY, 'test/loss'):
      bad = [
        int(row['round'])
        for row in rows
        if row.get(column) and not np.isfinite(csv_table.number(row, column))
      ]
      if bad:
        yield _Sign(column, f'{column} is not finite in {rounds_text(bad)}')


def _wrong_partition(run: runs_lib.Run) -> Iterator[_Sign]:
  """Finds a partition that contradicts itself or the flags."""
  path = output_tree.OutputTree(run.path).partition_json
  if not os.path.lexists(path):
    return
  try:
    partition = partition_lib.read(path)
  except UsageError as error:
    yield _Sign('no partition', str(error))
    return
  held = [
    partition.server_labeled,
    partition.validation,
    *partition.client_labeled,
    *partition.client_unlabeled,
    *partition.client_test,
  ]
  every = np.concatenate(held)
  twice = len(every) - len(np.unique(every))
  if twice:
    # A count would tell about clients' data.
    number = 'some' if run.is_private else f'{twice:,}'
    yield _Sign(
      'two holders',
      f'partition.json: {number} examples have two holders, so that'
      ' held-out examples may be trained on',
    )
  settings = partition.settings.recorded()
  if not run.flags.get('partition_file'):
    texts = {name: hparams.format_value(settings[name]) for name in _SETTINGS}
    if _number(run.flags.get('num_clients', '')) == 0:
      del texts['num_clients']  # All owners that the data have.
    wrong = [
      f'{name} {text} instead of {run.flags[name]}'
      for name, text in texts.items()
      if name in run.flags
      and text != run.flags[name]
      and _number(text) != _number(run.flags[name])
    ]
    if wrong:
      yield _Sign(
        'other flags',
        f'partition.json differs from the flags: {", ".join(wrong)}',
      )
  if run.is_private:
    return
  distance, _ = partitions.unevenness(partition)
  usual = _usual_unevenness(partition.class_counts)
  if settings['partition'] == data_names.IID and distance > 2 * usual + 0.02:
    yield _Sign(
      'uneven',
      f"partition.json: clients' classes are uneven ({distance:.2f}), though"
      f' --partition=iid would give {usual:.2f} (mean total variation'
      ' distance)',
    )


def _usual_unevenness(counts: np.ndarray) -> float:
  """Estimates `partitions.unevenness` of examples drawn evenly."""
  counts = counts[counts.sum(1) > 0]
  if not len(counts):
    return 0.0
  every = counts.sum(0) / counts.sum()
  sizes = counts.sum(1, keepdims=True)
  # The mean distance of a normal distribution from its mean, for each class.
  distances = np.sqrt(2 / np.pi * every * (1 - every) / sizes)
  return float(distances.sum(1).mean() / 2)


def _different_budgets(
  groups: Sequence[runs_lib.RunGroup],
) -> Iterator[Finding]:
  """Finds runs of different budgets, data or labels."""
  members = [run for group in groups for run in group.runs]
  all_runs = f'{len(members)} runs'
  last = {
    run.path: max(int(row['round']) for row in run.rows[0]) for run in members
  }
  if len(set(last.values())) > 1:
    short, long = (
      min(last, key=last.__getitem__),
      max(last, key=last.__getitem__),
    )
    yield Finding(
      all_runs,
      f'runs are of different length: {short} has {last[short]} rounds, {long}'
      f' {last[long]}; tables take the last round that all have evaluated',
    )
  for run in members:
    total = _number(run.flags.get('total_rounds', ''), last[run.path])
    if last[run.path] < total:
      yield Finding(
        run.path,
        f'it is not finished: {last[run.path]} of {total:.0f} rounds',
      )
  for text in compare.remarks(groups):
    yield Finding(all_runs, text)
  for group in groups:
    try:
      compare.check_seeds([group])
    except UsageError as error:
      yield Finding(group.label, str(error))


_CHECKS: tuple[Callable[[runs_lib.Run], Iterator[_Sign]], ...] = (
  _lost_pseudo_labels,
  _dead_losses,
  _optimistic_selection,
  _troubled_clients,
  _not_finite_results,
  _wrong_partition,
)
