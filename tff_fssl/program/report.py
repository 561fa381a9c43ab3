"""The report of runs: one HTML page with all in it."""

import base64
from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
import io
import os
from typing import Any, NamedTuple

import jinja2
import numpy as np

from tff_fssl import files
from tff_fssl import metrics
from tff_fssl.data import partition as partition_lib
from tff_fssl.hparams import UsageError
from tff_fssl.program import catalogue
from tff_fssl.program import compare
from tff_fssl.program import config as config_lib
from tff_fssl.program import console
from tff_fssl.program import diagnostics
from tff_fssl.program import exported
from tff_fssl.program import flags
from tff_fssl.program import model_card
from tff_fssl.program import output_tree
from tff_fssl.program import partitions
from tff_fssl.program import plots
from tff_fssl.program import predictions
from tff_fssl.program import runs as runs_lib

# More points of a line would only enlarge the page.
_MAX_POINTS = 150
# Partitions and models of more groups would be pages of the same.
MAX_PICTURES = 8
# Further groups are counted in the page's title.
_MAX_TITLES = 3
_VERSIONS = (
  'tensorflow',
  'tensorflow-federated',
  'numpy',
  'matplotlib',
  'jinja2',
)


class Diagram(NamedTuple):
  """A diagram of the page.

  Attributes:
    title: Its heading.
    picture: The SVG element.
    note: A sentence below it, if any.
  """

  title: str
  picture: str
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
  doubts = diagnostics.find(groups)
  for model in models:
    if model.figures is not None:
      found = model.figures.doubts
      doubts += [diagnostics.Finding(model.run, text) for text in found]
  tables, note = _results(groups)
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
    results_note=note,
    legend=[
      (style.color, group.label)
      for style, group in zip(plots.page_styles(groups), groups)
    ],
    curves=_curves(groups),
    others=_other_columns(groups),
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
  partition = diagnostics.read_partition(run)
  if partition is not None:
    parts += partitions.summarize(partition.settings)
  return ', '.join(parts)


def _results(
  groups: Sequence[runs_lib.RunGroup],
) -> tuple[list[compare.Table], str]:
  """Makes the tables of `compare.py`, and a sentence about them."""
  try:
    compare.check_seeds(groups)
  except UsageError as error:
    return [], f'{error}.'
  try:
    last = compare.last_common_round(groups)
  except UsageError as error:
    if len(groups) == 1:
      return [], f'{error}.'
    alone = [_results([group]) for group in groups]
    notes = [
      f'{group.label}: {note}' for group, (_, note) in zip(groups, alone)
    ]
    return (
      [table for tables, _ in alone for table in tables],
      f'{error}. Each group alone: {" ".join(notes)}',
    )
  return compare.tables(groups, last), (
    f'Rounds up to {last}; mean ± sample standard deviation over runs.'
  )


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
      try:
        names = exported.read_about(folder).get('classes')
      except UsageError:
        continue
      # The file may be anybody's.
      if isinstance(names, list) and len({*map(str, names)}) == len(names):
        return tuple(map(str, names))
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


def _other_columns(groups: Sequence[runs_lib.RunGroup]) -> list[Diagram]:
  """Draws a diagram for each other column with changing values."""
  columns = _columns(groups)
  shown = {'round'}
  for panel in metrics.panels(catalogue.all_metrics()):
    for line in panel.lines:
      # Columns of single classes are in the heat maps.
      shown |= {line.column, *metrics.numbered(line.column, columns).values()}
  declared = metrics.index_columns(catalogue.all_metrics())
  panels = []
  for column in columns:
    if column in shown:
      continue
    curves = [group.curve(column) for group in groups]
    values = [curve[1] for curve in curves if curve is not None]
    metric = declared.get(column)
    if metric is not None and metric.compared:
      continue
    if values and np.ptp(np.concatenate(values)):
      better = metric.better if metric else ''
      line = metrics.Line(column, '', metrics.SOLID)
      panels.append(metrics.Panel(column, (line,), False, better))
  return _drawn(panels, groups, 'other')


def _drawn(
  panels: Sequence[metrics.Panel],
  groups: Sequence[runs_lib.RunGroup],
  name: str,
) -> list[Diagram]:
  """Draws diagrams over rounds."""
  result = []
  for i, panel in enumerate(panels):
    draw = functools.partial(plots.draw_alone, panel, groups, _MAX_POINTS)
    arrow = metrics.ARROWS[panel.better]
    means = {
      metrics.HIGHER: ', higher is better',
      metrics.LOWER: ', lower is better',
    }
    label = f'{panel.title} over rounds{means.get(panel.better, "")}: ' + (
      '; '.join(
        f'{group.label} {_ends(group, panel.lines[0].column)}'
        for group in groups
        if group.curve(panel.lines[0].column) is not None
      )
    )
    result.append(
      _diagram(f'{panel.title} {arrow}'.rstrip(), draw, f'{name}-{i}', label)
    )
  return result


def _ends(group: runs_lib.RunGroup, column: str) -> str:
  """Writes 'from 0.1 to 0.9'."""
  curve = group.curve(column)
  assert curve is not None
  return f'from {curve[1][0]:.4g} to {curve[1][-1]:.4g}'


def _diagram(
  title: str, draw: Callable[[], Any], name: str, label: str, note: str = ''
) -> Diagram:
  """Draws a diagram in the page's style."""
  with plots.suit_page():
    figure = draw()
  return Diagram(title, plots.render_svg(figure, name, label), note)


def _partitions(groups: Sequence[runs_lib.RunGroup]) -> list[Section]:
  """Shows the partition of each group's first run, each partition once."""
  found: list[_Partition] = []
  for group in groups:
    new = _Partition(
      [_first(group)],
      diagnostics.read_partition(group.runs[0]),
      group.runs[0].is_private,
      _class_names(group),
    )
    same = next(filter(new.is_same, found), None)
    if same is None:
      found.append(new)
    else:
      same.titles.extend(new.titles)
  return [_partition(f'partition-{i}', shown) for i, shown in enumerate(found)]


class _Partition(NamedTuple):
  """A partition to show.

  Attributes:
    titles: The groups that have it.
    partition: The partition, or None if it cannot be read.
    is_private: Whether its clients are protected.
    class_names: The name of each class, or () if not known.
  """

  titles: list[str]
  partition: partition_lib.Partition | None
  is_private: bool
  class_names: tuple[str, ...]

  def is_same(self, other: '_Partition') -> bool:
    """Tells whether both can be shown at once."""
    return (
      # A protected partition must not be shown under another run's title.
      self.is_private == other.is_private
      and self.partition is not None
      and other.partition is not None
      and self.partition.settings == other.partition.settings
      and self.partition.has_same_examples(other.partition)
    )


def _partition(name: str, shown: _Partition) -> Section:
  """Shows a partition, unless its clients are protected."""
  title, partition = '; '.join(shown.titles), shown.partition
  if partition is None:
    return Section(title, note='there is no partition.json that can be read')
  if shown.is_private:
    return Section(title, rows=partitions.describe_public(partition))
  rows = partitions.describe(partition)
  names = shown.class_names
  if len(names) != partition.settings.num_classes:
    names = ()
  draw = functools.partial(partition_lib.make_figure, partition, names)
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
  path = output_tree.OutputTree(run.path).flags_file
  again = [f'--flagfile={path}', '--output_dir=NEW']
  own_file = flags.own_file_of(path)
  return '\n'.join(
    [
      console.command_line('train', *again, own_file=own_file),
      '# which is, but for the folder:',
      console.command_line(
        'train',
        *flags.arguments(dict(sorted(run.flags.items()))),
        own_file=own_file,
      ),
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
  rows = {}
  for run in members:
    folder = output_tree.OutputTree(run.path).model
    if os.path.isdir(folder):
      try:
        about = exported.read_about(folder)
      except UsageError:
        continue
      # The file may be anybody's: missing values are shown as None.
      version = about.get('tff_fssl')
      rows[run.path] = (
        f'exported by tff_fssl {version}, round {about.get("round")}'
      )
  return {**rows, 'this report': model_card.installed(_VERSIONS)}
