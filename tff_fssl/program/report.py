"""`programs/report.py`: runs on one HTML page, and their signs of trouble."""

import base64
from collections.abc import Callable, Iterator, Mapping, Sequence
import dataclasses
import functools
import io
import math
import os
from typing import Any, NamedTuple

import numpy as np

from tff_fssl import durable
from tff_fssl import files
from tff_fssl import hparams
from tff_fssl import metrics
from tff_fssl.algorithms import registry
from tff_fssl.data import partition as partition_lib
from tff_fssl.hparams import UsageError
from tff_fssl.hparams import borrow
from tff_fssl.hparams import hparam
from tff_fssl.program import catalogue
from tff_fssl.program import compare
from tff_fssl.program import config as config_lib
from tff_fssl.program import console
from tff_fssl.program import csv_table
from tff_fssl.program import evaluation
from tff_fssl.program import exported
from tff_fssl.program import flags
from tff_fssl.program import inputs
from tff_fssl.program import main as main_lib
from tff_fssl.program import output_tree
from tff_fssl.program import partitions
from tff_fssl.program import plots
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
_USAGE = 'programs/report.py RUN [RUN ...] [--output=FILE] [--noevaluate]'
_ABOUT = (
  'Writes one HTML page, which needs no network: signs of trouble, tables over'
  ' seeds with the tests of programs/compare.py, curves, partitions, confusion'
  ' matrices, calibration, accuracies of clients, pseudo-labelled examples,'
  ' costs, commands. RUN is the --output_dir of programs/train.py. Runs that'
  ' differ only in their seeds form a group; models and partitions are those of'
  " each group's first run. A path that is not a run, or a run without a"
  ' finished round, is skipped with a warning.'
)


EvaluateHparams = evaluation.EvaluateHparams
# More points of a line would only enlarge the page.
_MAX_POINTS = 150
# Partitions and models of more groups would be pages of the same.
MAX_PICTURES = 8
# How the description of a diagram says where better values are.
_BETTER = {
  metrics.HIGHER: ', higher is better',
  metrics.LOWER: ', lower is better',
}
# Further columns of the results are shown on demand.
_MAX_COLUMNS = 5
# Further groups are counted in the page's title.
_MAX_TITLES = 3
_VERSIONS = (
  'tensorflow',
  'tensorflow-federated',
  'numpy',
  'matplotlib',
  'jinja2',
)


class Finding(NamedTuple):
  """Something that looks wrong.

  Attributes:
    where: The run, or the runs.
    text: The finding with its column and rounds, and its possible meaning.
  """

  where: str
  text: str


# A name for the same sign in runs of other seeds, and its text.
_Sign = tuple[str, str]


def find_troubles(groups: Sequence[runs_lib.RunGroup]) -> list[Finding]:
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
  return partition_lib.read(path) if os.path.lexists(path) else None


def _lost_pseudo_labels(run: runs_lib.Run) -> Iterator[_Sign]:
  """Finds pseudo-labels all dropped, all kept, or no better than chance."""
  column = f'{_TRAIN}/pseudo_label_ratio'
  rounds, kept = (values[-_LAST:] for values in run.curve(column))
  if not len(rounds):
    return
  when = rounds_text(rounds)
  if not kept.any():
    yield (
      'none kept',
      f'no pseudo-label is kept in {when} ({column} is 0): unlabelled examples'
      ' teach nothing; is the threshold too high?',
    )
  if np.all(kept == 1) and _has_threshold(run):
    yield (
      'all kept',
      f'every pseudo-label is kept in {when} ({column} is 1): the threshold'
      ' does nothing',
    )
  accuracy_rounds, accuracy = run.curve(f'{_TRAIN}/pseudo_label_accuracy')
  late = np.isin(accuracy_rounds, rounds[kept > 0])
  partition = read_partition(run)
  if partition is None or run.is_private or not late.any():
    return
  share, counts = accuracy[late].mean(), partition.class_counts.sum(0)
  chance = counts.max() / max(counts.sum(), 1)
  # Rounds see the same examples again: each counts once. A few rounds of small
  # cohorts see a part of the clients.
  cohorts = run.curve(f'{_TRAIN}/num_clients')[1][-_LAST:]
  seen = min(1.0, cohorts.sum() / partition.num_clients) if len(cohorts) else 1
  unlabeled = min(sum(map(len, partition.client_unlabeled)), counts.sum())
  number = int(kept.mean() * seen * unlabeled)
  luck = _probability(share, number, chance)
  if predictions.is_below_chance(share, number, counts):
    yield (
      'misfit',
      'kept pseudo-labels are right far less often than by chance in'
      f' {rounds_text(accuracy_rounds[late])}'
      f' ({_TRAIN}/pseudo_label_accuracy is {100 * share:.1f}% on average, of'
      f' about {number:,}): the labels that the model learned do not mean what'
      " the clients' mean; are they of other classes, or shifted?",
    )
  elif luck > _LUCK:
    yield (
      'chance',
      'kept pseudo-labels are not significantly better than chance in'
      f' {rounds_text(accuracy_rounds[late])}'
      f' ({_TRAIN}/pseudo_label_accuracy is {100 * share:.1f}% on average, of'
      f' about {number:,}; the most frequent class is {100 * chance:.1f}%;'
      f' binomial test, p = {luck:.2g}): they may have collapsed to few'
      ' classes',
    )


def _probability(share: float, number: int, chance: float) -> float:
  """Computes how likely guesses are correct in this share of cases or more."""
  # Slow to import. pylint: disable-next=import-outside-toplevel
  from scipy import stats

  if not number:
    return 0.0
  correct = min(number, round(share * number))
  return float(
    stats.binomtest(correct, number, chance, alternative='greater').pvalue
  )


def _has_threshold(run: runs_lib.Run) -> bool:
  """Says whether its algorithm drops pseudo-labels at all."""
  entry = registry.REGISTRY.get(run.flags.get('algorithm', ''))
  fields = config_lib.own_group(entry).named_fields() if entry else []
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
      yield (
        column,
        f'{column} is 0 in {rounds_text(last)}: this loss teaches nothing',
      )
    elif np.ptp(values) == 0:
      yield (
        column,
        f'{column} is {values[0]:.6g} in {rounds_text(rounds)}: a loss that'
        ' never changes; is anything trained by it?',
      )
  entry = registry.REGISTRY.get(run.flags.get('algorithm', ''))
  if entry is None:
    return
  for name, field in config_lib.own_group(entry).named_fields():
    text = run.flags.get(name, '')
    if name.endswith('_weight') and field.default and _number(text) == 0:
      yield (
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
  test = compare.value_at(run, compare.TEST_ACCURACY, int(rounds[best]))
  # The share among so many examples deviates by this, and a run that is chosen
  # by it is above its mean.
  num = max(1.0, _number(run.flags.get('num_validation', ''), 1.0))
  deviation = np.sqrt(max(test * (1 - test), 0.01) / num)
  if values[best] - test > 0.05 + 3 * deviation:
    yield (
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
      yield (
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
    yield (
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
        yield (column, f'{column} is not finite in {rounds_text(bad)}')


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
)


class Diagram(NamedTuple):
  """A diagram of the page.

  Attributes:
    title: Its heading.
    picture: The URL of the picture.
    label: Its description, for those who do not see it.
    note: A sentence below it, if any.
  """

  title: str
  picture: str
  label: str
  note: str = ''


class Section(NamedTuple):
  """The view of one run among several.

  Attributes:
    title: Whose it is.
    diagrams: Its diagrams.
    tables: Its tables.
    rows: Figures by name.
    examples: Kind -> examples with pictures.
    note: A sentence in place of figures that cannot be shown.
  """

  title: str
  diagrams: Sequence[Diagram] = ()
  tables: Sequence[compare.Table] = ()
  rows: Mapping[str, str] = {}
  examples: Mapping[str, Sequence[Mapping[str, Any]]] = {}
  note: str = ''


class Model(NamedTuple):
  """A model of a group.

  Attributes:
    run: Folder of its run.
    figures: The figures, or None if they could not be found.
    reason: The reason why they could not be found.
  """

  run: str
  figures: predictions.ModelFigures | None
  reason: str = ''


def page(
  groups: Sequence[runs_lib.RunGroup], models: Sequence[Model] = ()
) -> str:
  """Writes the page.

  Args:
    groups: At least one group.
    models: A model of each group, or none if models were not inspected.

  Returns:
    HTML.
  """
  # First of all, so that nothing below can show more.
  groups = [_publishable(group) for group in groups]
  doubts = find_troubles(groups)
  for model in models:
    if model.figures is not None:
      found = model.figures.doubts
      doubts += [Finding(model.run, text) for text in found]
  tables, note = _results(groups)
  import jinja2  # Slow to import. pylint: disable=import-outside-toplevel

  environment = jinja2.Environment(
    loader=jinja2.PackageLoader('tff_fssl.program', '.'),
    # Names of classes, runs and flags may hold HTML.
    autoescape=True,
    trim_blocks=True,
    lstrip_blocks=True,
    undefined=jinja2.StrictUndefined,
  )
  members = [run for group in groups for run in group.runs]
  content = environment.get_template('report.html.j2').render(
    title=_title(groups),
    num_runs=len(members),
    doubts=doubts,
    results=tables,
    usual=_usual(tables[0]) if tables else None,
    results_note=note,
    legend=[
      (style.color, group.label)
      for style, group in zip(plots.styles(groups), groups)
    ],
    curves=_curves(groups),
    partitions=_partitions(groups[:MAX_PICTURES]),
    models=[
      _model(i, group, model)
      for i, (group, model) in enumerate(
        zip(groups[:MAX_PICTURES], models[:MAX_PICTURES])
      )
    ],
    num_left_out=max(0, len(groups) - MAX_PICTURES),
    cost=_cost(members),
    commands=[(run.path, _command(run)) for run in members],
    differing=_differing_flags(members),
    versions=_versions(members),
  )
  return files.printable(content, lines=True)


def _publishable(group: runs_lib.RunGroup) -> runs_lib.RunGroup:
  """Drops the figures of protected clients."""
  members = (run.public if run.is_private else run for run in group.runs)
  return dataclasses.replace(group, runs=tuple(members))


def _title(groups: Sequence[runs_lib.RunGroup]) -> str:
  """Writes 'digits, 40 labels at the server, IID, 20 clients: fl2, uda'."""
  subjects = ' / '.join(_few(list(dict.fromkeys(map(_subject, groups)))))
  return f'{subjects}: {", ".join(_few([group.label for group in groups]))}'


def _few(texts: list[str]) -> list[str]:
  more = len(texts) - _MAX_TITLES
  return texts[:_MAX_TITLES] + [f'{more} more'] * (more > 0)


def _subject(group: runs_lib.RunGroup) -> str:
  """Names the data of a group, the place of the labels and the partition."""
  run = group.runs[0]
  parts = [run.flags.get('dataset', '')]
  partition = read_partition(run)
  if partition is not None:
    parts += partitions.summarize(partition.settings)
  return ', '.join(parts)


def _results(
  groups: Sequence[runs_lib.RunGroup],
) -> tuple[list[compare.Table], str]:
  """Makes the tables of `compare.py`, and a sentence about them."""
  try:
    compare.check_seeds(groups)
    last = compare.last_common_round(groups)
  except UsageError as error:
    return [], f'{error}.'
  return compare.tables(groups, last), (
    f'Rounds up to {last}; mean ± sample standard deviation over runs.'
  )


def _usual(results: compare.Table) -> compare.Table | None:
  """Returns the most useful columns of the results, or None if it has no more.

  The labels and the numbers of runs come first.
  """
  figures = range(2, len(results.header))
  if len(figures) <= _MAX_COLUMNS:
    return None
  usual = compare.usual_columns(results)
  order = [*usual, *(i for i in figures if i not in usual)]
  return results.select([0, 1, *sorted(order[:_MAX_COLUMNS])])


def _curves(groups: Sequence[runs_lib.RunGroup]) -> list[Diagram]:
  """Draws the declared diagrams, then bytes and seconds."""
  declared = plots.known_panels(groups)
  drawn = {line.column for panel in declared for line in panel.lines}
  compared = [
    metrics.Panel(
      _capital(metric.compared.format(choice))
      + f', {metric.unit}' * (metric.unit != metrics.PERCENT),
      (metrics.Line(column, '', metrics.SOLID),),
      False,
      metric.better,
    )
    for metric in catalogue.all_metrics()
    if metric.compared
    for column, choice in metric.columns().items()
    if column not in drawn
    and any(group.curve(column) is not None for group in groups)
  ]
  return _drawn([*declared, *compared], groups, 'curve') + _heat_maps(groups)


def _heat_maps(groups: Sequence[runs_lib.RunGroup]) -> list[Diagram]:
  """Draws the figures of single classes: a diagram for each group."""
  result = []
  panels = metrics.panels(catalogue.all_metrics())
  for j, group in enumerate(groups[:MAX_PICTURES]):
    known = [c for c in _columns([group]) if group.curve(c) is not None]
    for i, panel in enumerate(panels):
      columns = metrics.numbered(panel.lines[0].column, known)
      if not columns:
        continue
      whose = f': {group.label}' if len(groups) > 1 else ''
      title = f'{panel.title}{whose}'
      names = _class_names(group)
      named = {
        names[n] if n < len(names) else str(n): column
        for n, column in columns.items()
      }
      ends = [f'class {name} {_ends(group, c)}' for name, c in named.items()]
      label = f'{title} over rounds: {"; ".join(ends)}'
      draw = functools.partial(plots.draw_classes, group, named)
      result.append(_diagram(title, draw, f'classes-{i}-{j}', label))
  return result


def _class_names(group: runs_lib.RunGroup) -> tuple[str, ...]:
  """Returns the names of classes that a run of the group has exported."""
  for run in group.runs:
    folder = output_tree.OutputTree(run.path).model
    if os.path.isdir(folder):
      return tuple(exported.read_about(folder)['classes'])
  return ()


def _columns(groups: Sequence[runs_lib.RunGroup]) -> list[str]:
  """Lists the columns of the last rows of each table of all runs."""
  names = dict.fromkeys(
    name
    for group in groups
    for run in group.runs
    for rows in run.rows
    for name in (rows[-1] if rows else ())
  )
  return list(names)


def _capital(text: str) -> str:
  return text[:1].upper() + text[1:]


def _drawn(
  panels: Sequence[metrics.Panel],
  groups: Sequence[runs_lib.RunGroup],
  name: str,
) -> list[Diagram]:
  """Draws diagrams over rounds."""
  result = []
  for i, panel in enumerate(panels):
    draw = functools.partial(plots.draw_alone, panel, groups, _MAX_POINTS)
    column = panel.lines[0].column
    ends = [
      f'{group.label} {_ends(group, column)}'
      for group in groups
      if group.curve(column) is not None
    ]
    better = _BETTER.get(panel.better, '')
    label = f'{panel.title} over rounds{better}: {"; ".join(ends)}'
    title = f'{panel.title} {metrics.ARROWS[panel.better]}'.rstrip()
    result.append(_diagram(title, draw, f'{name}-{i}', label))
  return result


def _ends(group: runs_lib.RunGroup, column: str) -> str:
  """Writes 'from 0.1 to 0.9'."""
  curve = group.curve(column)
  assert curve is not None
  return f'from {curve[1][0]:.4g} to {curve[1][-1]:.4g}'


def _diagram(
  title: str, draw: Callable[[], Any], name: str, label: str, note: str = ''
) -> Diagram:
  return Diagram(title, plots.svg_url(draw, name), label, note)


def _partitions(groups: Sequence[runs_lib.RunGroup]) -> list[Section]:
  """Shows the partition of each group's first run, equal ones once."""
  sharing: dict[tuple[bool, str], list[runs_lib.RunGroup]] = {}
  for group in groups:
    run = group.runs[0]
    path = output_tree.OutputTree(run.path).partition_json
    text = files.read_text(path) if os.path.lexists(path) else ''
    # A protected partition must not be shown under another run's title.
    sharing.setdefault((run.is_private, text), []).append(group)
  return [
    _partition(f'partition-{i}', members)
    for i, members in enumerate(sharing.values())
  ]


def _partition(name: str, groups: Sequence[runs_lib.RunGroup]) -> Section:
  """Shows the partition of groups, unless its clients are protected."""
  title, run = '; '.join(map(_first, groups)), groups[0].runs[0]
  partition = read_partition(run)
  if partition is None:
    return Section(title, note='there is no partition.json')
  if run.is_private:
    return Section(title, rows=partitions.describe_public(partition))
  rows = partitions.describe(partition)
  names = _class_names(groups[0])
  draw = functools.partial(partition_lib.make_figure, [partition], names)
  label = f'examples of each class at each client: {rows["partition"]}'
  diagram = _diagram('Classes at clients', draw, name, label)
  return Section(title, [diagram], rows=rows)


def _first(group: runs_lib.RunGroup) -> str:
  return f'{group.label}: {group.runs[0].path}'


def _model(i: int, group: runs_lib.RunGroup, model: Model) -> Section:
  figures = model.figures
  if figures is None:
    return Section(_first(group), note=model.reason)
  title = f'{group.label}: {figures.name}'
  if figures.test is None:
    return Section(title, note=figures.about_clients)
  counts = predictions.confusion(figures.test)
  of_class = predictions.class_figures(figures.test)
  bins = predictions.bins(figures.test)
  rows = {
    'accuracy': f'{figures.test.accuracy:.4f}',
    'macro-F1': f'{np.nanmean(of_class.f1):.4f}',
    'expected calibration error': f'{bins.calibration_error:.4f}',
    'test examples': f'{len(figures.test.labels):,}',
  }
  names = tuple(figures.class_names)
  diagrams = [
    _diagram(
      'Confusion matrix',
      lambda: plots.draw_confusion(counts, names),
      f'confusion-{i}',
      f'confusion matrix of {len(names)} classes; its figures are in the table'
      ' of classes',
    ),
    _diagram(
      'Reliability',
      lambda: plots.draw_reliability(bins),
      f'reliability-{i}',
      'accuracy by confidence; expected calibration error'
      f' {bins.calibration_error:.4f}',
    ),
  ]
  if len(figures.clients):
    worst = predictions.worst_decile(figures.clients)
    diagrams.append(
      _diagram(
        f'Accuracy at {len(figures.clients):,} clients',
        lambda: plots.draw_clients(figures.clients),
        f'clients-{i}',
        f'histogram of accuracies of clients: mean'
        f' {figures.clients.mean():.4f}, worst tenth {worst:.4f}',
        f'{figures.about_clients}.',
      )
    )
    rows['accuracy of clients, mean'] = f'{figures.clients.mean():.4f}'
    rows['  mean of the worst tenth'] = f'{worst:.4f}'
  if figures.pseudo is not None:
    rows['accuracy of its pseudo-labels, without threshold'] = (
      f'{figures.pseudo.accuracy:.4f} of {len(figures.pseudo.labels):,}'
    )
  return Section(
    title,
    diagrams,
    [_class_table(names, counts, of_class, figures.pseudo)],
    rows,
    {
      kind: [_shown(example) for example in examples]
      for kind, examples in (
        ('correct', figures.right),
        ('wrong', figures.wrong),
      )
      if examples
    },
    '' if len(figures.clients) else figures.about_clients,
  )


def _class_table(
  names: tuple[str, ...],
  counts: np.ndarray,
  figures: predictions.ClassFigures,
  pseudo: predictions.Predictions | None,
) -> compare.Table:
  """Shows figures of each class, and its pseudo-labels."""
  header = ['class', 'test examples', 'accuracy', 'precision', 'F1']
  rows = [
    [name, f'{counts[i].sum():,}']
    + [
      '' if np.isnan(values[i]) else f'{values[i]:.3f}'
      for values in (figures.recall, figures.precision, figures.f1)
    ]
    for i, name in enumerate(names)
  ]
  if pseudo is not None:
    header += ['unlabelled, true', 'pseudo-labels']
    for column in (pseudo.labels, pseudo.classes):
      each = np.bincount(column, minlength=len(names))
      rows = [[*row, f'{count:,}'] for row, count in zip(rows, each)]
  return compare.Table(header, rows)


def _shown(example: predictions.ShownExample) -> dict[str, Any]:
  return {
    'label': example.label,
    'predicted': example.predicted,
    'confidence': f'{100 * example.confidence:.1f}%',
    'weak': _png(example.weak),
    'strong': _png(example.strong),
  }


def _png(pixels: np.ndarray) -> str:
  """Writes an image as a URL that holds it."""
  from PIL import Image  # pylint: disable=import-outside-toplevel

  content = io.BytesIO()
  flat = pixels[..., 0] if pixels.shape[-1] == 1 else pixels
  Image.fromarray(flat).save(content, 'png')
  return (
    f'data:image/png;base64,{base64.b64encode(content.getvalue()).decode()}'
  )


def _cost(members: Sequence[runs_lib.Run]) -> compare.Table:
  """Shows the cost of each run."""
  header = [
    'run',
    'rounds',
    'time of rounds',
    'of it, the clients',
    'sent and received, MB',
    'peak memory, MiB',
    'at most, a round',
  ]
  rows = []
  for run in members:
    _, seconds = run.curve('seconds/round')
    _, clients = run.curve('seconds/clients')
    _, used = run.used('bytes')
    _, memory = run.curve('peak_memory_mb')
    rows.append(
      [
        run.path,
        str(max(int(row['round']) for row in run.rows[0])),
        console.format_seconds(float(seconds.sum())) if len(seconds) else '',
        console.format_seconds(float(clients.sum())) if len(clients) else '',
        f'{used[-1] / 1e6:,.1f}' if len(used) else '',
        f'{memory.max():,.0f}' if len(memory) else '',
        run.compute.describe() if run.compute else '',
      ]
    )
  return compare.Table(header, rows).drop_empty()


def _command(run: runs_lib.Run) -> str:
  """Writes the command that repeats a run, into another folder."""
  again = [f'--flagfile={output_tree.OutputTree(run.path).flags_file}']
  again.append('--output_dir=NEW')
  every = flags.arguments(dict(sorted(run.flags.items())))
  return '\n'.join(
    [
      console.command_line('train', *again),
      '# which is, but for the folder:',
      console.command_line('train', *every),
    ]
  )


def _differing_flags(members: Sequence[runs_lib.Run]) -> compare.Table | None:
  """Shows the flags in which runs differ, or None if there are none."""
  ignored = config_lib.neutral_flags()
  names = sorted({name for run in members for name in run.flags} - ignored)
  differing = [
    name
    for name in names
    if len({run.flags.get(name, '') for run in members}) > 1
    and name != 'output_dir'
  ]
  if not differing:
    return None
  return compare.Table(
    ['run', *(f'--{name}' for name in differing)],
    [
      [run.path, *(run.flags.get(name, '') for name in differing)]
      for run in members
    ],
  )


def _versions(members: Sequence[runs_lib.Run]) -> dict[str, str]:
  """Lists versions that runs have recorded, and those of this program."""
  rows = {
    run.path: ', '.join(f'{n} {v}' for n, v in run.inputs.made_by.items())
    for run in members
    if run.inputs
  }
  return {**rows, 'this report': inputs.installed(_VERSIONS)}


def _evaluates(settings: 'ReportHparams') -> bool:
  return settings.evaluate


@dataclasses.dataclass(frozen=True)
class ReportHparams:
  """Flags of `programs/report.py`."""

  output: str = hparam(
    '',
    'The HTML file. If empty: report/report.html in the run; for several runs,'
    ' report.html in the folder that holds them.',
  )
  evaluate: bool = hparam(
    True,
    'Also inspect data and models, which takes some seconds for each group.'
    ' false: use the files of figures only.',
  )
  data_dir: str = borrow(EvaluateHparams, 'data_dir', _evaluates)
  cache_dir: str = borrow(EvaluateHparams, 'cache_dir', _evaluates)
  run_model_file: bool = borrow(EvaluateHparams, 'run_model_file', _evaluates)
  verbose: bool = borrow(EvaluateHparams, 'verbose', _evaluates)

  def __post_init__(self):
    hparams.validate(self)


@main_lib.command(_USAGE, _ABOUT, ReportHparams, missing=runs_lib.NO_RUN)
def report_main(settings: ReportHparams, parsed: flags.ParsedFlags) -> None:
  """Reports on runs, as one HTML page."""
  paths = [os.path.normpath(path) for path in parsed.positional]
  run_groups = runs_lib.group_runs(runs_lib.read_all(paths, main_lib.warn))
  members = [run.path for group in run_groups for run in group.runs]
  output = settings.output or output_tree.default_report(members, 'report.html')
  main_lib.prepare_output('output', output, '.html')
  models = []
  if settings.evaluate:
    main_lib.quiet(settings.verbose)
    # The page shows no more, and each takes seconds.
    shown = run_groups[:MAX_PICTURES]
    models = [_look_over(group.runs[0].path, settings) for group in shown]
  content = page(run_groups, models).encode()
  with durable.storage_errors('--output'):
    durable.write_file(output, [content])
  console.show(output)


def _look_over(path: str, settings: ReportHparams) -> Any:
  """Examines the last model of a run, or says why it cannot."""
  try:
    loaded = evaluation.load_run(
      path, hparams.build_from(settings, EvaluateHparams)
    )
    from tff_fssl.program import inspection  # pylint: disable=C0415

    figures = inspection.look_over(
      loaded.name,
      loaded.task,
      loaded.model,
      loaded.prediction,
      loaded.changed,
    )
  except UsageError as error:
    main_lib.warn(f'not looked over: {error}')
    return Model(path, None, str(error))
  return Model(path, figures)
