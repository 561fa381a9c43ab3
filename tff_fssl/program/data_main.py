"""`programs/data.py`: lists the data sets, or looks one over."""

from collections.abc import Sequence
import dataclasses
import datetime
import os
from typing import Any

import numpy as np

from tff_fssl import files
from tff_fssl import hparams
from tff_fssl.data import data_hparams
from tff_fssl.data import image_cache
from tff_fssl.data import inspection
from tff_fssl.data import names as data_names
from tff_fssl.data import sources
from tff_fssl.data.sources import hub
from tff_fssl.data.sources import text as text_lib
from tff_fssl.data.sources import tfds
from tff_fssl.data.sources import vectors
from tff_fssl.hparams import UsageError
from tff_fssl.hparams import hparam
from tff_fssl.program import console
from tff_fssl.program import flags
from tff_fssl.program import main as main_lib

_USAGE = 'programs/data.py [DATASET] [--data_dir=DIR]'
_ABOUT = (
  'Without DATASET, lists the data sets. With one (a name, folder:PATH,'
  ' clientdata:PATH, features:PATH, text:PATH or huggingface:OWNER/NAME),'
  ' describes it, says whether it is present and how to fetch it, and inspects'
  ' it: examples of each class, files that cannot be read or are not used,'
  ' duplicates, examples in both splits, file types that reveal a class. Each'
  ' finding says its meaning, and whether training continues. With the same'
  ' flags as training, it decodes the images for it, and training then starts'
  ' at once.\n'
  'Exit code 0: it can be trained on; 1: it is missing, or a problem stops'
  ' training.'
)
# Longer lists of problems and classes are cut.
_MAX_LINES = 20
# Columns for the name of a class, and channels whose mean is shown.
_NAME_WIDTH, _MAX_VALUES = 40, 4


@dataclasses.dataclass(frozen=True)
class DataFlags:
  """Flags of `programs/data.py`, besides those of how data are read."""

  data_dir: str = hparam('', "The data's folder, as for training.")
  remove_caches: bool = hparam(
    False,
    'Instead, list the decoded images in --cache_dir, with their sizes, and'
    ' remove all. They are decoded again when needed; runs that use them'
    ' continue.',
  )

  def __post_init__(self):
    hparams.validate(self)


@main_lib.command(
  _USAGE,
  _ABOUT,
  DataFlags,
  more=lambda: [flags.Group(data_hparams.DataHparams)],
  most=1,
)
def data_main(own: DataFlags, parsed: flags.ParsedFlags) -> int:
  """Lists the data sets, or looks one over."""
  data_dir, given = own.data_dir, parsed.positional
  settings = parsed.build(data_hparams.DataHparams)
  if own.remove_caches:
    if given:
      raise UsageError(
        f'{given[0]!r}: --remove_caches removes the decoded images of all data'
        ' sets; omit the name'
      )
    _remove_caches(settings.cache_folder)
    return main_lib.DONE
  main_lib.quiet()
  if not given:
    console.show(_overview(data_dir))
    return main_lib.DONE
  problems = _look_over(given[0], data_dir, settings)
  lines, is_stopped = [], False
  for problem in problems:
    stops = problem.stops or problem.misleads and not settings.accept_findings
    is_stopped |= stops
    label = 'stops training' if stops else 'training continues'
    way = '; --accept_findings trains all the same' * problem.misleads
    lines.append(f'{label}: {problem.text}{way * stops}')
    lines += [f'  {item}' for item in problem.items]
  for line in lines[:_MAX_LINES]:
    console.show(files.printable(line))
  if len(lines) > _MAX_LINES:
    console.show(f'... and {len(lines) - _MAX_LINES:,} more')
  if is_stopped:
    return main_lib.FAILED
  found = ', but see above' if problems else ''
  console.show(f'OK{found}. Train with --dataset={given[0]}')
  return main_lib.DONE


def _remove_caches(folder: str) -> None:
  """Lists the decoded images in a folder, and removes them."""
  found = image_cache.made(folder)
  console.show(
    f'Decoded images in {folder}: {"" if found else "none"}'.rstrip()
  )
  rows = {
    os.path.basename(one.path)[:12]: (
      f'{one.shape[0]:,} images of {_shape(one.shape[1:])},'
      f' {one.num_bytes / 1e6:,.1f} MB, made'
      f' {datetime.datetime.fromtimestamp(one.time):%Y-%m-%d %H:%M}'
    )
    for one in found
  }
  if rows:
    console.show(console.table(rows), flush=True)
  image_cache.remove(folder, found)
  if rows:
    size = sum(one.num_bytes for one in found)
    console.show(f'Removed: {len(found):,}, of {size / 1e6:,.1f} MB in all')


def _overview(data_dir: str) -> str:
  """Lists the data sets."""
  rows = {}
  for name, info in data_names.DATA_SETS.items():
    is_there = info.loader or tfds.stored_version(name, data_dir)
    rows[name] = f'{_sizes(info)}{"" if is_there else "; not there"}'
  others = tfds.list_stored(data_dir)
  if os.path.isdir(text_lib.ag_news_folder(data_dir)):
    others = [data_names.AG_NEWS, *others]
  for name in others:
    if name not in rows:
      try:
        info = sources.find(name, data_dir, data_hparams.DataHparams())
        rows[name] = _sizes(info)
      except UsageError as error:
        rows[name] = f'cannot be used: {error}'
  command = console.command('data')
  return '\n'.join(
    [
      f'In --data_dir={tfds.root_folder(data_dir)}:',
      console.table(rows),
      '',
      f'{command} NAME looks one over,',
      f'{command} {data_names.FOLDER}PATH a folder of images,',
      f'{command} {data_names.FEATURES}PATH a file of vectors,',
      f'{command} {data_names.TEXT}PATH a file of texts.',
      f"{command} {data_names.CLIENT_DATA}PATH files of TFF's ClientData,",
      f'{command} {data_names.HUB}OWNER/NAME a set of Hugging Face.',
    ]
  )


def _sizes(info: data_names.DataSetInfo) -> str:
  return (
    f'{info.num_train:,} training and {info.num_test:,} test {info.kind.noun},'
    f' {data_names.shape_text(info.example_shape)}, {info.num_classes} classes'
  )


def _look_over(
  name: str, data_dir: str, settings: data_hparams.DataHparams
) -> list[inspection.Problem]:
  """Describes a data set, and returns its problems."""
  about = {'data set': name}
  if missing := _missing(name, data_dir, settings, about):
    return missing
  info = sources.describe(name, data_dir, settings)
  found = info if isinstance(info, sources.Info) else None
  if found:
    about |= found.about
    data = found.read()
  else:
    data = sources.load_found(info, data_dir or None)
  about |= data.about
  if data.notes:
    about['what'] = data.notes
  _print_data(about, data)
  problems = sources.find_problems(info, data)
  if not info.has_clients:
    text = 'there are no examples for clients; only deploy takes the data'
    problems.append(inspection.Problem(text, True))
  problems += inspection.near_problems(
    (data.train.x, data.test.x), inspection.name_of(data)
  )
  if data.train.kind == data_names.IMAGES and data.example_shape[-1] > 1:
    gray = {'gray': inspection.is_gray(data.train.x)}
    problems += inspection.trait_problems(data.class_names, data.train.y, gray)
  if data.train.kind == data_names.VECTORS:
    vectors.check_range(info, data.mean, data.std)
  if found:
    problems += found.look(data)
  return problems


def _missing(
  name: str,
  data_dir: str,
  settings: data_hparams.DataHparams,
  about: dict[str, str],
) -> list[inspection.Problem]:
  """Says how to fetch a data set that is not there."""
  if name.startswith(data_names.HUB):
    # Nothing of the set is known before it is downloaded.
    if hub.folder_of(name, data_dir) is not None:
      return []
    command, text = (
      hub.fetch_command(name, data_dir),
      hub.missing(name, data_dir),
    )
  elif name in data_names.DATA_SETS and not data_names.DATA_SETS[name].loader:
    if tfds.stored_version(name, data_dir) is not None:
      return []
    about['images'] = _sizes(sources.describe(name, data_dir, settings))
    command = tfds.fetch_command(name, data_dir)
    text = f'{name} is not in --data_dir={tfds.root_folder(data_dir)}'
  else:
    return []
  console.show(console.table(about))
  # In one line, so that it can be copied.
  console.show(f'\nTo fetch it:\n  {command}\n')
  return [inspection.Problem(text, True)]


def _shape(pixels: Sequence[int]) -> str:
  return ' x '.join(map(str, pixels))


def _print_data(rows: dict[str, str], data: Any) -> None:
  """Describes a loaded data set."""
  parts = data.train.x, data.train.y, data.test.x, data.test.y
  unknown = int((data.train.y < 0).sum())
  rows[data.train.kind.noun] = (
    f'{len(data.train):,} for training'
    + (f' ({unknown:,} without a label)' if unknown else '')
    + f', {len(data.test):,} for testing,'
    f' {data_names.shape_text(data.example_shape)}'
    f' ({sum(part.nbytes for part in parts) / 1e6:,.1f} MB)'
  )
  if data.client_names:
    sizes = np.bincount(data.owners + 1, minlength=len(data.client_names) + 1)
    if data.server is not None:
      known = data.server & (data.train.y >= 0)
      sizes[0] -= data.server.sum()
      rows['server'] = f'{data.server.sum():,} of them, {known.sum():,} with a'
      rows['server'] += (
        ' label: with --scenario=labels_at_server, its only labels'
      )
    rows['clients'] = (
      f'{len(data.client_names):,}, of {np.min(sizes[1:]):,} to'
      f' {np.max(sizes[1:]):,} {data.train.kind.noun}'
      + (f'; {sizes[0]:,} are of nobody' if sizes[0] else '')
      + ' (with --partition=natural)'
    )
  for label, values in (('mean', data.mean), ('deviation', data.std)):
    if len(values) > _MAX_VALUES:
      rows[label] = f'{min(values):.4g} to {max(values):.4g}'
    elif values:
      rows[label] = ', '.join(f'{value:.4f}' for value in values)
  rows['sha256'] = inspection.checksum(*parts)
  console.show(console.table(rows))
  _print_classes(data.class_names, data.train.y, data.test.y)


def _print_classes(class_names: Sequence[str], train: Any, test: Any) -> None:
  """Prints the number of examples of each class."""
  counts = [inspection.class_counts(y, len(class_names)) for y in (train, test)]
  rows = [
    (files.printable(name)[:_NAME_WIDTH], f'{a:,}', f'{b:,}')
    for name, a, b in zip(class_names, *counts)
  ]
  shown = [('class', 'training', 'test'), *rows[:_MAX_LINES]]
  widths = [max(map(len, column)) for column in zip(*shown)]
  console.show()
  for name, *numbers in shown:
    cells = (number.rjust(w) for number, w in zip(numbers, widths[1:]))
    console.show('  ' + '  '.join([name.ljust(widths[0]), *cells]))
  if len(rows) > _MAX_LINES:
    least, most = int(counts[0].min()), int(counts[0].max())
    console.show(
      f'  ... and {len(rows) - _MAX_LINES:,} more; classes have {least:,} to'
      f' {most:,} training examples'
    )
  console.show()
