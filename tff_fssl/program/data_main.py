"""`programs/data.py`: lists the data sets, or looks one over."""

import collections
from collections.abc import Callable, Mapping, Sequence
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
from tff_fssl.data import pictures
from tff_fssl.data import sources
from tff_fssl.data.sources import client_data
from tff_fssl.data.sources import folder
from tff_fssl.data.sources import hub
from tff_fssl.data.sources import images
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
  look_over = next(
    (f for prefix, f in _BY_PREFIX.items() if given[0].startswith(prefix)),
    _look_over_named,
  )
  problems = look_over(given[0], data_dir, settings)
  for problem in problems[:_MAX_LINES]:
    label = 'stops training' if problem.stops else 'training continues'
    console.show(f'{label}: {files.printable(problem.text)}')
  if len(problems) > _MAX_LINES:
    console.show(f'... and {len(problems) - _MAX_LINES:,} more')
  if any(problem.stops for problem in problems):
    return main_lib.FAILED
  console.show(f'OK. Train with --dataset={given[0]}')
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


def _look_over_folder(
  name: str, data_dir: str, settings: data_hparams.DataHparams
) -> list[Any]:
  """Describes a folder of images, and returns its problems."""
  info = folder.describe(name, data_dir, settings)
  listing, problems = info.listing, info.listing.marks.problems()
  rows = {
    'data set': f'{name}, by {listing.kind}',
    'where': os.path.abspath(listing.root),
  }
  if listing.num_ignored:
    rows['left out'] = f'{listing.num_ignored:,} files that are no images'
  if any(problem.stops for problem in problems):
    labels = listing.labels('train'), listing.labels('test')
    console.show(console.table(rows))
    _print_classes(listing.marks.class_names, *labels)
    return [*problems, *listing.unused()]
  data, unreadable, sizes, _ = info.decode()
  read = [
    row.path
    for row in (*listing.train, *listing.test)
    if row.path not in unreadable
  ]
  problems = _decoded_problems(
    rows, data, sizes, unreadable, settings, lambda i: read[i]
  )
  found = pictures.traits_of(
    os.path.join(listing.root, path) for path in read[: len(data.train)]
  )
  traits = {}
  texts: dict[str, list[Any]] = {
    '{} files': [one.encoding for one in found],
    '{} in their files': [one.size for one in found],
    'partly transparent': [one.is_transparent or None for one in found],
  }
  for text, values in texts.items():
    counts = collections.Counter(v for v in values if v is not None)
    for value, _ in counts.most_common(_MAX_LINES):
      traits[text.format(value)] = np.array([v == value for v in values])
  return [
    *listing.unused(),
    *problems,
    *inspection.trait_problems(data.class_names, data.train.y, traits),
  ]


def _look_over_rows(
  found: Any, settings: data_hparams.DataHparams
) -> list[Any]:
  """Describes the data set in the files `found`, and returns its problems."""
  data, unreadable, sizes, _ = images.decode(found)
  where = os.path.abspath(found.root)
  rows = {
    'data set': found.name,
    'where': f'{where} ({found.num_bytes / 1e6:,.1f} MB)',
  }
  return _decoded_problems(
    rows,
    data,
    sizes,
    unreadable,
    settings,
    _numbered(len(data.train)),
  )


def _shape(pixels: Sequence[int]) -> str:
  return ' x '.join(map(str, pixels))


def _look_over_client_data(
  name: str, data_dir: str, settings: data_hparams.DataHparams
) -> list[Any]:
  """Describes a file of TFF's `ClientData`, and returns its problems."""
  found = client_data.locate(name, data_dir, settings)
  return _look_over_rows(found, settings)


def _look_over_hub_set(
  name: str, data_dir: str, settings: data_hparams.DataHparams
) -> list[Any]:
  """Describes a set of Hugging Face's hub, and returns its problems."""
  # Nothing of the set is known before it is downloaded.
  if hub.folder_of(name, data_dir) is None:
    console.show(console.table({'data set': name}))
    _print_fetch_command(hub.fetch_command(name, data_dir))
    return [inspection.Problem(hub.missing(name, data_dir), True)]
  found = hub.locate(name, data_dir, settings)
  return _look_over_rows(found, settings)


def _print_fetch_command(command: str) -> None:
  # In one line, so that it can be copied.
  console.show(f'\nTo fetch it:\n  {command}\n')


def _decoded_problems(
  rows: dict[str, str],
  data: Any,
  sizes: Sequence[tuple[int, int, bool, int]],
  unreadable: Mapping[str, str],
  settings: data_hparams.DataHparams,
  name: Callable[[int], str],
) -> list[Any]:
  """Describes a decoded data set, and returns its problems."""
  if sizes:
    height, width, *_ = zip(*sizes)
    rows['stored'] = _shape((min(height), min(width)))
    if len(sizes) > 1:
      rows['stored'] += (
        f' to {_shape((max(height), max(width)))} ({len(sizes):,} sizes)'
      )
  _print_data(rows, data)
  problems = _problems(data, name)
  enlarged = sum(count for *_, is_enlarged, count in sizes if is_enlarged)
  if enlarged:
    size = _shape(data.example_shape[:2])
    text = (
      f'{enlarged:,} images are smaller than {size}, and are enlarged, which'
      ' blurs them and adds no detail; --image_size sets another size'
    )
    problems.insert(0, inspection.Problem(text, False))
  too_many = len(unreadable) > settings.max_unreadable
  meaning = '' if too_many else '; it is skipped'
  return problems + [
    inspection.Problem(f'{item}: {reason}{meaning}', too_many)
    for item, reason in unreadable.items()
  ]


def _look_over_named(
  name: str, data_dir: str, settings: data_hparams.DataHparams
) -> list[Any]:
  """Describes a data set, and returns its problems."""
  info = sources.find(name, data_dir, settings)
  rows = {'data set': name}
  known = data_names.DATA_SETS.get(name)
  is_file = name.startswith(data_names.PATHS) or name == data_names.AG_NEWS
  if not is_file and (known is None or not known.loader):
    version = tfds.stored_version(name, data_dir)
    if version is None:
      rows['images'] = _sizes(info)
      console.show(console.table(rows))
      _print_fetch_command(tfds.fetch_command(name, data_dir))
      where = tfds.root_folder(data_dir)
      text = f'{name} is not in --data_dir={where}'
      return [inspection.Problem(text, True)]
    folder = tfds.read_stored(name, data_dir).folder
    size = sum(size for _, size, _ in tfds.file_states(folder))
    rows['where'] = f'{folder} ({size / 1e6:,.1f} MB)'
  data = sources.load_found(info, data_dir or None)
  if name.startswith(data_names.FEATURES):
    vectors.check_range(info, data.mean, data.std)
  if is_file:
    rows['what'] = data.notes
  _print_data(rows, data)
  return _problems(data, _numbered(len(data.train)))


_BY_PREFIX = {
  data_names.FOLDER: _look_over_folder,
  data_names.CLIENT_DATA: _look_over_client_data,
  data_names.HUB: _look_over_hub_set,
}


def _numbered(num_train: int) -> Callable[[int], str]:
  """Names images by their numbers."""
  return lambda i: (
    f'test {i - num_train}' if i >= num_train else f'training {i}'
  )


def _problems(data: Any, name: Callable[[int], str]) -> list[Any]:
  """Finds the problems of a loaded data set."""
  images = data.train.x, data.test.x
  labels = data.train.y, data.test.y
  traits = {}
  if data.train.kind == data_names.IMAGES and data.example_shape[-1] > 1:
    traits['gray'] = inspection.is_gray(data.train.x)
  return [
    *inspection.label_problems(data.class_names, *labels),
    *inspection.duplicate_problems(images, labels, name),
    *inspection.trait_problems(data.class_names, data.train.y, traits),
  ]


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
    rows['clients'] = (
      f'{len(data.client_names):,}, of {np.min(sizes[1:]):,} to'
      f' {np.max(sizes[1:]):,} {data.train.kind.noun}'
      + (f'; {sizes[0]:,} are of nobody' if sizes[0] else '')
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
