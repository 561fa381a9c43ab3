"""Data sets of Hugging Face's hub: `--dataset=huggingface:OWNER/NAME`.

The Parquet files of a data set are read from the folder in which the hub's
client or git has stored them. Nothing here uses the network. Files name the
splits and configurations:

    data/train-00000-of-00002.parquet   CONFIG/train-00000-of-00001.parquet
    train.parquet                       CONFIG/train/0000.parquet
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
import contextlib
import functools
import json
import os
import re
import shlex
from typing import Any

import numpy as np

from tff_fssl import files
from tff_fssl.data import data_hparams
from tff_fssl.data import names
from tff_fssl.data import sources
from tff_fssl.data.sources import images
from tff_fssl.data.sources import table
from tff_fssl.hparams import UsageError
from tff_fssl.hparams import closest

DataHparams = data_hparams.DataHparams
Row = images.Row
_NAME = re.compile(r'([\w.-]*\w)/([\w.-]*\w)(?:/([\w./-]*\w))?', re.ASCII)
_PARQUET, _DATA, _DEFAULT = '.parquet', 'data', 'default'
_SPLITS = (table.TRAIN, *images.TESTS, *images.UNLABELED)
_SHARD = re.compile(r'(.*?)-\d+-of-\d+.*')
_POINTER = b'version https://git-lfs'
# Deeper folders do not belong to a data set.
_MAX_DEPTH = 3
# A row contains a whole image file, so few rows are read at a time.
_BATCH = 64


def find(name: str, data_dir: str, settings: DataHparams) -> sources.Info:
  """Finds a data set, and decodes it the first time (see `sources.find`)."""
  return images.find(locate(name, data_dir, settings))


def folder_of(name: str, data_dir: str) -> str | None:
  """Finds the folder of a data set's files.

  Args:
    name: `names.HUB` and OWNER/NAME or OWNER/NAME/CONFIG.
    data_dir: `--data_dir`.

  Returns:
    DATA_DIR/OWNER/NAME, or the newest snapshot if DATA_DIR is the cache of the
    hub's client, or None if neither exists.

  Raises:
    UsageError: If the name is invalid.
  """
  owner, plain, _ = _parsed(name)
  base = os.path.expanduser(base_of(data_dir))
  folder = os.path.join(base, owner, plain)
  if os.path.isdir(folder):
    return folder
  cached = os.path.join(base, f'datasets--{owner}--{plain}')
  snapshots = os.path.join(cached, 'snapshots')
  if not os.path.isdir(snapshots):
    return None
  main = os.path.join(cached, 'refs', 'main')
  inside = files.list_folder(snapshots)
  found = [name for name, is_folder in inside.items() if is_folder]
  revision = found[0] if len(found) == 1 else ''
  # The hub's client writes the newest revision there.
  if os.path.lexists(main):
    revision = files.read_text(main, limit=1_000).strip()
  if revision not in found:
    raise UsageError(
      f'--dataset={name}: {snapshots} has no snapshot that {main} names; fetch'
      f' it again:\n  {fetch_command(name, data_dir)}'
    )
  return os.path.join(snapshots, revision)


def base_of(data_dir: str) -> str:
  """Returns the folder of all data sets, as given or the hub's default."""
  home = os.environ.get('HF_HOME') or os.path.join('~', '.cache', 'huggingface')
  cache = os.environ.get('HF_HUB_CACHE') or os.path.join(home, 'hub')
  return data_dir or cache


def fetch_command(name: str, data_dir: str) -> str:
  """Returns the command of the hub's client that fetches a data set."""
  owner, plain, _ = _parsed(name)
  words = ['hf', 'download', f'{owner}/{plain}', '--repo-type=dataset']
  if data_dir:
    # A shell does not expand '~' within a word.
    folder = os.path.expanduser(os.path.join(data_dir, owner, plain))
    words.append(f'--local-dir={folder}')
  return shlex.join(words)


def missing(name: str, data_dir: str) -> str:
  """Says that a data set was not found."""
  return f'{name} is not in --data_dir={base_of(data_dir)}'


def locate(name: str, data_dir: str, settings: DataHparams) -> images.Found:
  """Finds the files, without reading them.

  Args:
    name: `names.HUB` and OWNER/NAME or OWNER/NAME/CONFIG.
    data_dir: `--data_dir`.
    settings: The flags for reading.

  Returns:
    The data set.

  Raises:
    UsageError: If the files are missing.
  """
  folder = folder_of(name, data_dir)
  if folder is None:
    raise UsageError(
      f'--dataset={missing(name, data_dir)}; to fetch it, run'
      ' (after pip install huggingface_hub):'
      f'\n  {fetch_command(name, data_dir)}'
    )
  try:
    splits = _chosen(name, _configurations(folder))
    states = images.file_states(
      os.path.join(folder, path) for paths in splits.values() for path in paths
    )
  except UsageError as error:
    raise UsageError(f'--dataset={name}: {error}') from error
  return images.Found(
    name=name,
    root=folder,
    key=(states,),
    settings=settings,
    open=lambda: _open(folder, splits, settings),
    uses=images.SHAPED
    | {'class_words'}
    | {'test_share', 'max_unreadable'}
    | {'image_field', 'label_field', 'client_field'},
  )


def _parsed(name: str) -> tuple[str, str, str]:
  """Parses (owner, name, configuration or ''), or raises `UsageError`."""
  match = _NAME.fullmatch(name.removeprefix(names.HUB))
  # A name must not lead out of the folder.
  if match is None or '..' in name:
    raise UsageError(
      f'--dataset={name}: give {names.HUB}OWNER/NAME, as the hub calls it, or'
      f' {names.HUB}OWNER/NAME/CONFIG'
    )
  return match[1], match[2], match[3] or ''


def _configurations(folder: str) -> dict[str, dict[str, list[str]]]:
  """Maps configurations to splits to the paths of their files, in order."""
  found: dict[str, dict[str, list[str]]] = {}
  for path in sorted(_parquet_files(folder, '', _MAX_DEPTH)):
    *parents, file = path.split('/')
    stem = file.removesuffix(_PARQUET)
    shard = _SHARD.fullmatch(stem)
    split = shard[1] if shard else stem
    if parents and (parents[-1] in _SPLITS or split.isdigit()):
      split = parents.pop()
    config = '/'.join(part for part in parents if part != _DATA)
    group = found.setdefault(config or _DEFAULT, {})
    group.setdefault(split, []).append(path)
  return found


def _parquet_files(root: str, folder: str, depth: int) -> Iterator[str]:
  """Yields paths relative to `root`, and skips deeper folders."""
  entries = files.list_folder(os.path.join(root, folder))
  for name, is_folder in entries.items():
    path = f'{folder}/{name}' if folder else name
    if is_folder and depth:
      yield from _parquet_files(root, path, depth - 1)
    elif not is_folder and name.endswith(_PARQUET):
      yield path


def _chosen(
  name: str, found: Mapping[str, dict[str, list[str]]]
) -> dict[str, list[str]]:
  """Chooses the splits of the configuration in the name."""
  owner, plain, config = _parsed(name)
  if not found:
    raise UsageError(
      "it has no Parquet files; only the hub's Parquet form of a data set is"
      ' supported'
    )
  if config not in found:
    if not config and len(found) == 1:
      return next(iter(found.values()))
    if not config and _DEFAULT in found:
      return found[_DEFAULT]
    raise UsageError(
      f'it has the configurations {", ".join(found)}; give'
      f' {names.HUB}{owner}/{plain}/CONFIG{closest(config, found)}'
    )
  return found[config]


@contextlib.contextmanager
def _parquet(path: str) -> Iterator[Any]:
  """Opens a `pyarrow.parquet.ParquetFile`, or raises `files.FileError`."""
  from pyarrow import parquet  # pylint: disable=import-outside-toplevel

  with files.open_binary(path) as file:
    is_pointer = file.read(len(_POINTER)) == _POINTER
    if is_pointer:
      raise files.FileError(
        path, 'it only points to the file; run git lfs pull in its folder'
      )
    file.seek(0)
    try:
      yield parquet.ParquetFile(file)
    except UsageError:
      raise
    except Exception as error:  # pylint: disable=broad-except
      # pyarrow raises errors of many classes.
      reason = f'it is not Parquet, or damaged ({files.first_line(error)})'
      raise files.FileError(path, reason) from error


def _open(
  folder: str, splits: Mapping[str, Sequence[str]], settings: DataHparams
) -> images.Rows:
  """Reads the schema and the numbers of rows, or raises `UsageError`."""
  found: dict[str, images.Split] = {}
  columns: list[str] = []
  class_names: tuple[str, ...] = ()
  for split, paths in splits.items():
    size = 0
    for path in paths:
      with _parquet(os.path.join(folder, path)) as file:
        size += file.metadata.num_rows
        if not columns:
          columns, class_names = _columns(file.schema_arrow, settings)
    read = functools.partial(_rows, folder, paths, columns, settings)
    found[split] = images.Split(size, read)
  return images.open_splits(found, settings, class_names)


def _columns(
  schema: Any, settings: DataHparams
) -> tuple[list[str], tuple[str, ...]]:
  """Chooses columns by their types, names and the settings.

  Args:
    schema: The schema of a file.
    settings: The flags for reading.

  Returns:
    The columns of images, of classes and, if a flag names it, of owners. And
    the name of each class, or () if the file does not have them.
  """
  features = _features(schema.metadata or {})
  image = settings.image_field or _only(features, 'Image', schema.names)
  label = settings.label_field or _only(features, 'ClassLabel', schema.names)
  image, label = images.choose_fields(schema.names, image, label)
  columns, client = [image, label], settings.client_field
  if client:
    columns.append(images.choose_field(schema.names, client, 'client_field'))
  known = features.get(label, {}).get('names', ())
  return columns, tuple(map(str, known))


def _features(metadata: Mapping[bytes, bytes]) -> dict[str, dict[str, Any]]:
  """Maps columns to facts that the library `datasets` wrote."""
  try:
    features = json.loads(metadata[b'huggingface'])['info']['features']
    return {str(k): dict(v) for k, v in features.items()}
  # Files of other programs have no such facts.
  except (KeyError, TypeError, ValueError, AttributeError, RecursionError):
    return {}


def _only(
  features: Mapping[str, Mapping[str, Any]], kind: str, found: Collection[str]
) -> str:
  """Returns the only column of a kind, or '' for none or several."""
  columns = [
    name
    for name, facts in features.items()
    if facts.get('_type') == kind and name in found
  ]
  return columns[0] if len(columns) == 1 else ''


def _rows(
  folder: str,
  paths: Sequence[str],
  columns: Sequence[str],
  settings: DataHparams,
) -> Iterator[Row]:
  """Reads the rows of files, or raises `files.FileError`."""
  number = 0
  for path in paths:
    with _parquet(os.path.join(folder, path)) as file:
      absent = [name for name in columns if name not in file.schema_arrow.names]
      if absent:
        raise files.FileError(path, f'it has no column {absent[0]!r}')
      for batch in file.iter_batches(_BATCH, columns=columns):
        values = [batch.column(name).to_pylist() for name in columns]
        for row in zip(*values):
          yield _row(settings, str(number), *row)
          number += 1


def _row(
  settings: DataHparams, name: str, image: Any, label: Any, client: Any = None
) -> Row:
  """Makes the row of the values in Parquet."""
  if isinstance(image, dict):
    image = image.get('bytes')
  if isinstance(image, list):
    image = np.array(image)
  if not isinstance(image, (bytes, np.ndarray)):
    return Row(name, b'', problem='its image is not in the file')
  owner = None if client is None else str(client) or None
  return images.make_row(settings, name, image, label, owner)
