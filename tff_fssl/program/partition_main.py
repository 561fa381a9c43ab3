"""`programs/partition.py`: draws, describes and compares partitions.

It needs neither a model nor TensorFlow Federated.
"""

from collections.abc import Sequence
import dataclasses
import os
from typing import Any

from tff_fssl import durable
from tff_fssl import hparams
from tff_fssl.data import partition as partition_lib
from tff_fssl.data import partition_settings
from tff_fssl.data import sources
from tff_fssl.hparams import UsageError
from tff_fssl.hparams import hparam
from tff_fssl.program import config as config_lib
from tff_fssl.program import console
from tff_fssl.program import flags
from tff_fssl.program import main as main_lib
from tff_fssl.program import output_tree
from tff_fssl.program import partitions
from tff_fssl.program import run_data

_USAGE = 'programs/partition.py [FILE|RUN [FILE|RUN]] [--FLAG=VALUE ...]'
_ABOUT = (
  'Without FILE: draws the partition that programs/train.py draws with the same'
  ' flags, and describes it. All flags of programs/train.py but --restart are'
  ' accepted, so that its flagfiles work. The flags below have an effect.\n'
  'With FILE: describes the partition in a file that --output has written, or'
  ' that of a run (the --output_dir of programs/train.py). With two: also'
  ' compares them, the first before the slash.'
)
_DATA = ('dataset', 'data_dir', 'partition_file')


@dataclasses.dataclass(frozen=True)
class PartitionHparams:
  """Flags of `programs/partition.py`."""

  output: str = hparam(
    '',
    'Write the partition to this file, as JSON. Training uses it with'
    ' --partition_file=FILE.',
  )
  plot: str = hparam('', 'Draw the partition to this PNG file.')

  def __post_init__(self):
    hparams.validate(self)


@main_lib.command(
  _USAGE,
  _ABOUT,
  PartitionHparams,
  more=config_lib.groups,
  shown=lambda: [_drawing_group()],
  most=2,
)
def partition_main(
  settings: PartitionHparams, parsed: flags.ParsedFlags
) -> None:
  """Draws, describes or compares partitions."""
  main_lib.check_output('output', settings.output)
  main_lib.check_output('plot', settings.plot)
  if parsed.positional:
    _describe_files(parsed, settings)
  else:
    _draw(parsed, settings)


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


def _describe_files(
  parsed: flags.ParsedFlags, settings: PartitionHparams
) -> None:
  """Describes one partition, or two and their differences."""
  allowed = {'plot'} if len(parsed.positional) == 1 else set()
  # Flags of a flagfile are ignored here: it may serve training, too.
  typed = sorted(parsed.command_line - allowed)
  if typed:
    what = 'a partition' if allowed else 'two partitions'
    raise UsageError(
      f'--{typed[0]}: has no effect on {what} from a file; omit it'
    )
  found = []
  for path in map(os.path.normpath, parsed.positional):
    file = path
    if os.path.isdir(path):
      file = output_tree.OutputTree(path).partition_json
    found.append(partition_lib.read(file))
  tables = [
    {'file': path, **partitions.describe(partition)}
    for path, partition in zip(parsed.positional, found)
  ]
  if len(found) == 2:
    tables.append(partitions.compare(*found))
  else:
    tables[0] |= _plot(found[0], settings)
  console.show('\n\n'.join(map(console.table, tables)))


def _draw(parsed: flags.ParsedFlags, settings: PartitionHparams) -> None:
  """Draws the partition of a configuration, describes and writes it."""
  if not parsed.is_set('clients_per_round'):
    # The default may be more than all clients; rounds do not matter here.
    values = {**parsed.values, 'clients_per_round': 1}
    parsed = dataclasses.replace(parsed, values=values)
  config = config_lib.build_config(parsed)
  main_lib.quiet(config.run.verbose)
  data = sources.load_found(config.info, config.run.data_dir or None)
  partition = run_data.load_partition(config, data)
  rows = {'data set': data.name, **partitions.describe(partition)}
  if settings.output:
    with durable.storage_errors('--output'):
      partition.save_json(settings.output)
    rows['written'] = settings.output
  drawn = _plot(partition, settings, data.class_names)
  console.show(console.table({**rows, **drawn}))


def _plot(
  partition: Any, settings: PartitionHparams, class_names: Sequence[str] = ()
) -> dict[str, str]:
  """Draws a PNG file, if one is wanted, and returns the row about it."""
  if not settings.plot:
    return {}
  with durable.storage_errors('--plot'):
    durable.make_folder(os.path.dirname(os.path.abspath(settings.plot)))
    partition_lib.plot(partition, settings.plot, class_names)
  return {'drawn': settings.plot}
