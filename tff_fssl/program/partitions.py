"""Partitions in words, and `programs/partition.py`, which draws them."""

from collections.abc import Sequence
import dataclasses
import os
from typing import Any

import numpy as np

from tff_fssl import durable
from tff_fssl import hparams
from tff_fssl.data import names
from tff_fssl.data import partition as partition_lib
from tff_fssl.data import partition_settings
from tff_fssl.data import sources
from tff_fssl.hparams import UsageError
from tff_fssl.hparams import format_value
from tff_fssl.hparams import hparam
from tff_fssl.program import config as config_lib
from tff_fssl.program import console
from tff_fssl.program import flags
from tff_fssl.program import main as main_lib
from tff_fssl.program import output_tree
from tff_fssl.program import plots
from tff_fssl.program import run_data

_USAGE = 'programs/partition.py [FILE|RUN ...] [--FLAG=VALUE ...]'
_ABOUT = (
  'Without FILE: draws the partition that programs/train.py draws with the same'
  ' flags, and describes it. All flags of programs/train.py but --restart are'
  ' accepted, so that its flagfiles work. The flags below have an effect.\n'
  'With FILE: describes the partition in a file that --output has written, or'
  ' that of a run (the --output_dir of programs/train.py). With two: also'
  ' compares them, the first before the slash. --plot draws them side by side.'
)
_DATA = ('dataset', 'data_dir', 'partition_file')
Partition = partition_lib.Partition
# Partitions that fit into a picture.
_MAX_FILES = 6
# Names of clients that fit into a few lines.
_NUM_NAMES = 8


def unevenness(partition: Partition) -> tuple[float, float]:
  """Measures how far clients' classes are from those of all clients.

  Args:
    partition: A partition.

  Returns:
    (the mean total variation distance over clients with examples of known
    class, the same if each such client had one class, in proportion to the
    examples of the class).
  """
  counts = partition.class_counts
  # Clients without examples of known class have no shares.
  counts = counts[counts.sum(1) > 0]
  if not len(counts):
    return 0.0, 0.0
  every = counts.sum(0) / counts.sum()
  shares = counts / counts.sum(1, keepdims=True)
  distances = np.abs(shares - every).sum(1) / 2
  return float(distances.mean()), float(1 - np.sum(every**2))


def describe(partition: Partition) -> dict[str, str]:
  """Describes a partition in rows for `console.table`."""
  settings, counts = partition.settings, partition.class_counts
  labeled = np.array([len(a) for a in partition.client_labeled])
  unlabeled = np.array([len(a) for a in partition.client_unlabeled])
  sizes = labeled + unlabeled
  held_out = np.array([len(a) for a in partition.client_test], np.int64)
  held = len(partition.server_labeled) + len(partition.validation) + sizes.sum()
  places = {
    'labelled at the server': len(partition.server_labeled),
    'for validation': len(partition.validation),
    'at clients': sizes.sum(),
    'of them of unknown class': sizes.sum() - counts.sum(),
    'held out at clients': held_out.sum(),
    'not used': partition.num_examples - held - held_out.sum(),
  }
  distance, most = unevenness(partition)
  rows = {
    'partition': f'{settings.title}, seed {settings.seed}',
    'examples': f'{partition.num_examples:,}: '
    + ', '.join(f'{n:,} {where}' for where, n in places.items() if n),
    'clients': f'{partition.num_clients:,}, with {_spread(sizes)} examples',
  }
  if len(held_out):
    rows['held out'] = f'{_spread(held_out)} at a client, for evaluation'
  if partition.client_names:
    shown = [
      f'{name} ({size:,})'
      for name, size in zip(partition.client_names, sizes[:_NUM_NAMES])
    ]
    more = ', ...' if len(shown) < partition.num_clients else ''
    rows['names'] = ', '.join(shown) + more
  if labeled.any():
    has = labeled[labeled > 0]
    rows['labels'] = (
      f'{_spread(has)} at {len(has):,} of {partition.num_clients:,} clients'
    )
    if settings.client_label_classes:
      rows['labels'] += f', of {settings.client_label_classes} classes each'
  if len(partition.wrong_labels):
    rows['wrong labels'] = (
      f'{len(partition.wrong_labels):,} of {len(partition.labeled):,}'
    )
  rows['classes'] = (
    f'{_spread((counts > 0).sum(1))} of {settings.num_classes} at a client'
  )
  rows['unevenness'] = (
    f"{distance:.2f}: mean total variation distance of a client's classes from"
    f' those of all (0: all alike; {most:.2f}: one class each)'
  )
  return rows


def summarize(settings: partition_settings.PartitionSettings) -> list[str]:
  """Names the place of the labels, the partition and the clients, briefly."""
  if settings.full_labels:
    labels = 'all labels at the clients'
  elif settings.scenario == names.LABELS_AT_CLIENTS:
    labels = f'{settings.num_labels} labels at each client'
  else:
    labels = f'{settings.num_labels or "all"} labels at the server'
  return [labels, settings.title, f'{settings.num_clients:,} clients']


def describe_public(partition: Partition) -> dict[str, str]:
  """Describes only facts that do not depend on clients' examples."""
  settings = partition.settings
  places = {
    'labelled at the server': len(partition.server_labeled),
    'for validation': len(partition.validation),
  }
  held = ', '.join(f'{n:,} {where}' for where, n in places.items() if n)
  return {
    'partition': f'{settings.title}, seed {settings.seed}',
    'examples': f'{held or "none"} without a client; the data of clients are'
    ' not shown',
    'clients': f'{partition.num_clients:,}',
  }


def _spread(numbers: np.ndarray) -> str:
  """Writes '12' if all are equal, else '2 to 9 (median 5)'."""
  low, middle, high = np.percentile(numbers, [0, 50, 100])
  if low == high:
    return f'{low:,g}'
  return f'{low:,g} to {high:,g} (median {middle:,g})'


def compare(first: Partition, second: Partition) -> dict[str, str]:
  """Compares two partitions of the same examples, in rows.

  Args:
    first: A partition.
    second: Another one.

  Returns:
    The rows, for `console.table`.

  Raises:
    UsageError: If they are of different numbers of examples.
  """
  if first.num_examples != second.num_examples:
    raise UsageError(
      f'one partition is of {first.num_examples:,} examples, the other of'
      f' {second.num_examples:,}: they are of different data, and cannot be'
      ' compared'
    )
  if first.has_same_examples(second):
    return {'differences': 'none: everybody holds the same'}
  old, new = first.settings.recorded(), second.settings.recorded()
  settings = [
    f'{name} {format_value(old[name])} / {format_value(new[name])}'
    for name in old
    if old[name] != new[name]
  ]
  labeled, others = first.labeled, second.labeled
  moved = int(np.sum(_holders(first) != _holders(second)))
  return {
    'settings': ', '.join(settings) or 'the same',
    'labelled': _shared(labeled, others),
    'wrong labels': _shared(first.wrong_examples, second.wrong_examples),
    'validation': _shared(first.validation, second.validation),
    'moved': f'{moved:,} of {first.num_examples:,} examples have another holder'
    f' ({100 * moved / max(first.num_examples, 1):.1f}%)',
  }


def _shared(first: np.ndarray, second: np.ndarray) -> str:
  """Counts the examples that are in both of two sets."""
  if np.array_equal(np.sort(first), np.sort(second)):
    return f'the same {len(first):,} examples' if len(first) else 'none'
  shared = len(np.intersect1d(first, second))
  return f'{len(first):,} / {len(second):,} examples, {shared:,} in both'


def _holders(partition: Partition) -> np.ndarray:
  """Numbers holders: nobody -1, server 0, validation 1, clients 2 ...

  Examples that clients hold out are -2 ...
  """
  holders = np.full(partition.num_examples, -1)
  holders[partition.server_labeled] = 0
  holders[partition.validation] = 1
  for held in (partition.client_labeled, partition.client_unlabeled):
    for client, examples in enumerate(held):
      holders[examples] = client + 2
  for client, examples in enumerate(partition.client_test):
    holders[examples] = -2 - client
  return holders


@dataclasses.dataclass(frozen=True)
class PartitionHparams:
  """Flags of `programs/partition.py`."""

  output: str = hparam(
    '',
    'Write the partition to this file, as JSON. Training uses it with'
    ' --partition_file=FILE.',
  )
  plot: str = hparam('', 'Draw the partition to this PNG, PDF or SVG file.')

  def __post_init__(self):
    hparams.validate(self)


def _drawing_group() -> flags.Group:
  """Collects the flags that decide the partition, for `--help`."""
  settings = dataclasses.fields(partition_settings.PartitionSettings)
  shown = {*_DATA, *(field.name for field in settings)}
  kept: list[Any] = [
    (
      name,
      field.type,
      dataclasses.field(
        default=field.default, metadata={**field.metadata, 'group': ''}
      ),
    )
    for name, field in config_lib.fields().items()
    if name in shown
  ]
  hparams_of_data = dataclasses.make_dataclass('DataHparams', kept)
  return flags.Group(hparams_of_data, 'As for training')


@main_lib.command(
  _USAGE,
  _ABOUT,
  PartitionHparams,
  more=config_lib.groups,
  shown=lambda: [_drawing_group()],
  most=_MAX_FILES,
)
def partition_main(
  settings: PartitionHparams, parsed: flags.ParsedFlags
) -> None:
  """Draws, describes or compares partitions."""
  if parsed.positional:
    _describe_files(parsed, settings)
  else:
    _draw(parsed, settings)


def _describe_files(
  parsed: flags.ParsedFlags, settings: PartitionHparams
) -> None:
  """Describes partitions, and the differences of two."""
  # Flags of a flagfile are ignored here: it may serve training, too.
  typed = sorted(parsed.command_line - {'plot'})
  if typed:
    raise UsageError(
      f'--{typed[0]}: has no effect on partitions from files; omit it'
    )
  main_lib.prepare_output('plot', settings.plot, *plots.FORMATS)
  found = []
  for path in map(os.path.normpath, parsed.positional):
    file = path
    if os.path.isdir(path):
      file = output_tree.OutputTree(path).partition_json
    found.append(partition_lib.read(file))
  tables = [
    {'file': path, **describe(partition)}
    for path, partition in zip(parsed.positional, found)
  ]
  if len(found) == 2:
    tables.append(compare(*found))
  tables[-1] |= _plot(found, settings)
  console.show('\n\n'.join(map(console.table, tables)))


def _draw(parsed: flags.ParsedFlags, settings: PartitionHparams) -> None:
  """Draws the partition of a configuration, describes and writes it."""
  if not parsed.is_set('clients_per_round'):
    # The default may be more than all clients; rounds do not matter here.
    values = {**parsed.values, 'clients_per_round': 1}
    parsed = dataclasses.replace(parsed, values=values)
  config = config_lib.build_config(parsed)
  main_lib.prepare_output('output', settings.output, '.json')
  main_lib.prepare_output('plot', settings.plot, *plots.FORMATS)
  main_lib.quiet(config.run.verbose)
  data = sources.load_found(config.info, config.run.data_dir or None)
  partition = run_data.load_partition(config, data)
  rows = {'data set': data.name, **describe(partition)}
  if settings.output:
    with durable.storage_errors('--output'):
      partition.save_json(settings.output)
    rows['written'] = settings.output
  drawn = _plot([partition], settings, data.class_names)
  console.show(console.table({**rows, **drawn}))


def _plot(
  partitions: Sequence[Partition],
  settings: PartitionHparams,
  class_names: Sequence[str] = (),
) -> dict[str, str]:
  """Draws a picture, if one is wanted, and returns the row about it."""
  if not settings.plot:
    return {}
  with durable.storage_errors('--plot'):
    figure = partition_lib.make_figure(partitions, class_names)
    plots.save(figure, settings.plot)
  return {'drawn': settings.plot}
