"""Data sets of images of TensorFlow Datasets, on disk.

Facts are read from its JSON files, images by TFDS itself. Nothing here uses the
network.
"""

from collections.abc import Iterator, Mapping
import contextlib
import dataclasses
import math
import os
import pathlib
import re
import stat
from typing import Any, NamedTuple

import numpy as np

from tff_fssl import files
from tff_fssl import processes
from tff_fssl.data import data_hparams
from tff_fssl.data import names
from tff_fssl.data import seeds
from tff_fssl.data import sources
from tff_fssl.data.sources import idx
from tff_fssl.data.sources import images
from tff_fssl.data.sources import table
from tff_fssl.hparams import UsageError
from tff_fssl.hparams import closest

DataHparams = data_hparams.DataHparams
# TFDS's default folder.
_DEFAULT_DATA_DIR = os.path.join('~', 'tensorflow_datasets')
_NAME = re.compile(r'\w+(?:/[\w.-]*\w)?', re.ASCII)
_SVHN, _NUM_EXTRA = 'svhn_cropped', 531_131
# Class of a feature in older files -> its kind.
_KINDS = {'Image': 'image', 'ClassLabel': 'classLabel'}
_TRAIN, _TEST, _EXTRA = 'train', 'test', 'extra'
_TESTS = (_TEST, 'validation')
_UNLABELED = ('unlabelled', 'unlabeled')
# Single images would spend most time between TensorFlow and NumPy.
_BATCH_SIZE, _BATCH_BYTES = 1_000, 2**26
# Facts of a data set are used before its files are read, so that a larger
# number could take all time or memory.
_MAX_ROWS = 2**31 - 1


class Stored(NamedTuple):
  """Facts in the files of a data set.

  Attributes:
    folder: The folder of its version.
    version: Its version.
    shape: (height, width, channels), -1 for a value that differs between
      images.
    class_names: The name of each class.
    sizes: Split -> number of examples.
    image: Name of the feature that is the image.
    label: Name of the feature that is the class.
    about: The first line of its description.
  """

  folder: pathlib.Path
  version: str
  shape: tuple[int, ...]
  class_names: tuple[str, ...]
  sizes: dict[str, int]
  image: str
  label: str
  about: str

  @property
  def test(self) -> str | None:
    """Returns the split for testing, or None."""
    return next((split for split in _TESTS if self.sizes.get(split)), None)

  @property
  def unlabeled(self) -> list[str]:
    """Lists the splits without known labels."""
    return [split for split in _UNLABELED if split in self.sizes]


_FASHION, _IDX = 'fashion_mnist', 'idx'
_CLOTHES = (
  *('T-shirt/top', 'Trouser', 'Pullover', 'Dress', 'Coat'),
  *('Sandal', 'Shirt', 'Sneaker', 'Bag', 'Ankle boot'),
)
# As Debian's package dataset-fashion-mnist has it.
_FASHION_MNIST = Stored(
  folder=pathlib.Path(),
  version=_IDX,
  shape=(28, 28, 1),
  class_names=_CLOTHES,
  sizes={_TRAIN: 60_000, _TEST: 10_000},
  image='image',
  label='label',
  about="Zalando's files, as Debian has them",
)


def find(name: str, data_dir: str, settings: DataHparams) -> sources.Info:
  """Finds a data set by its JSON or by our table (see `sources.find`)."""
  preset = _preset(name, settings)
  known = names.DATA_SETS.get(name)
  uses = {'cache_dir'}
  if any(name in splits for splits in names.SPLIT_PRESETS.values()):
    uses.add('split_preset')
  if known is not None:
    # The table is valid without the files, too.
    facts = dataclasses.asdict(known)
    del facts['loader']
    num_further = 0
    if name == _SVHN:
      uses.add('svhn_extra')
      num_further = _NUM_EXTRA * settings.svhn_extra
  else:
    stored = read_stored(name, data_dir)
    uses |= images.SHAPED
    num_train = stored.sizes[_TRAIN]
    num_test = stored.sizes.get(stored.test or '', 0)
    if stored.test is None:
      uses.add('test_share')
      num_test = int(_draw_test(num_train, settings.test_share).sum())
      num_train -= num_test
    facts = {
      'name': name,
      'num_classes': len(stored.class_names),
      'example_shape': settings.image_shape(stored.shape),
      'num_train': num_train,
      'num_test': num_test,
      'flip': settings.flip,
      'mean': (),
      'std': (),
    }
    num_further = sum(stored.sizes[split] for split in stored.unlabeled)
  if preset is not None:
    each = facts['num_classes'] if preset.of_class else 1
    facts |= {
      'num_train': (preset.train + preset.validation) * each,
      'num_test': preset.test * each,
      'num_validation': preset.validation * each,
    }
  facts['num_train'] += num_further
  facts['uses'] = frozenset(uses)
  info = names.DataSetInfo(**facts)
  return sources.Info(
    **facts, read=lambda: _decode(info, data_dir, settings, preset)
  )


def _preset(name: str, settings: DataHparams) -> names.SplitPreset | None:
  """Returns the chosen split, or None for the published one."""
  if settings.split_preset == names.OFFICIAL:
    return None
  splits = names.SPLIT_PRESETS[settings.split_preset]
  if name not in splits:
    raise UsageError(
      f'--split_preset={settings.split_preset}: exists for'
      f' {", ".join(splits)}, not for --dataset={name}'
    )
  return splits[name]


def _draw_test(count: int, share: float) -> np.ndarray:
  """Draws training examples for testing, bool [count]."""
  places = (f'{_TRAIN}:{i}' for i in range(count))
  return np.array([table.is_in_share(place, share) for place in places], bool)


def _decode(
  info: names.DataSetInfo,
  data_dir: str,
  settings: DataHparams,
  preset: names.SplitPreset | None,
) -> sources.DataSet:
  """Decodes a set, or rejects files that are not the set of our table."""
  stored = read_stored(info.name, data_dir)
  is_known = bool(info.mean)
  if is_known and (
    len(stored.class_names) != info.num_classes
    or stored.shape != info.example_shape
  ):
    raise UsageError(
      f'{stored.folder} is not {info.name}: it has {len(stored.class_names)}'
      f' classes and images of {list(stored.shape)}, instead of'
      f' {info.num_classes} and {list(info.example_shape)}'
    )
  further = [_EXTRA] if info.name == _SVHN and settings.svhn_extra else []
  needed = [_TRAIN, _TEST, *further] if is_known else []
  missing = [split for split in needed if split not in stored.sizes]
  if missing:
    raise UsageError(
      f'{stored.folder} has no split {missing[0]!r}; remove it and run:'
      f'\n  {fetch_command(info.name, data_dir)}'
    )
  further += stored.unlabeled
  found = images.Found(
    name=info.name,
    root=str(stored.folder),
    key=file_states(stored.folder),
    settings=settings,
    open=lambda: _open(info, stored, further, settings, preset),
    uses=info.uses,
    notes=f'TFDS {info.name} {stored.version}: {stored.about}',
    shape=info.example_shape,
    moments=(info.mean, info.std) if is_known else (),
  )
  try:
    return images.decode(found)[0]
  except (UsageError, OSError):
    raise
  except Exception as error:  # pylint: disable=broad-except
    raise _damaged(info.name, data_dir, stored.folder, error) from error


def _open(
  info: names.DataSetInfo,
  stored: Stored,
  further: list[str],
  settings: DataHparams,
  preset: names.SplitPreset | None,
) -> images.Rows:
  """Opens the rows, or raises errors of any class if files are damaged."""
  pooled = [_TRAIN, stored.test] if stored.test else [_TRAIN]
  sizes = [stored.sizes[split] for split in pooled]
  # For each of the pooled examples: 1 for testing, 0 for training, -1 unused.
  if preset is not None:
    labels = [label for split in pooled for label in _labels(stored, split)]
    roles = _draw_preset(info, preset, np.array(labels), settings)
  elif stored.test:
    roles = np.repeat(np.array([0, 1], np.int8), sizes)
  else:
    roles = np.array(_draw_test(sizes[0], settings.test_share), np.int8)

  def read(for_test):
    place = 0
    for split, size in zip(pooled, sizes):
      chosen = roles[place : place + size] == for_test
      # Splits without a chosen row are not read at all.
      if chosen.any():
        for row, is_chosen in zip(_rows(stored, split), chosen, strict=True):
          if is_chosen:
            yield row
      place += size
    for split in () if for_test else further:
      yield from _rows(stored, split)

  most = int((roles >= 0).sum()) + sum(stored.sizes[split] for split in further)
  has_test = preset is not None or stored.test is not None
  return images.Rows(most, read, stored.class_names, has_test=has_test)


def _rows(
  stored: Stored, split: str, decoders: Mapping[str, Any] | None = None
) -> Iterator[images.Row]:
  """Reads a split in its stored order.

  Args:
    stored: The data set.
    split: The split.
    decoders: Decoders of features, by default TFDS's own. (Pillow decodes JPEG
      files to other pixels.)

  Yields:
    Its rows.

  Raises:
    ValueError: If the number of rows is wrong. TFDS raises errors of other
      classes.
  """
  if stored.version == _IDX:
    for row in idx.rows(str(stored.folder), split):
      yield row._replace(name=f'{split} {row.name}')
    return
  import tensorflow_datasets as tfds  # pylint: disable=import-outside-toplevel

  image, label = stored.image, stored.label
  dataset = tfds.builder_from_directory(str(stored.folder)).as_dataset(
    split=split,
    shuffle_files=False,
    decoders=decoders,
    # Shards are read one after the other: interleaving would change the order.
    read_config=tfds.ReadConfig(
      interleave_cycle_length=1, try_autocache=False, skip_prefetch=True
    ),
  )
  dataset = dataset.map(lambda element: (element[image], element[label]))
  # Images of different sizes do not form a batch.
  size = _BATCH_SIZE
  if not decoders:
    is_fixed = min(stored.shape) > 0
    most = _BATCH_BYTES // math.prod(stored.shape) if is_fixed else 1
    size = min(size, max(1, most))
  count = 0
  for pixels, labels in tfds.as_numpy(dataset.batch(size).prefetch(2)):
    for x, y in zip(pixels, labels):
      if count == stored.sizes[split]:
        raise ValueError(f'{split} has more than {count} examples')
      is_known = y >= 0 and split not in _UNLABELED
      yield images.Row(f'{split} {count}', x, int(y) if is_known else None)
      count += 1
  if count < stored.sizes[split]:
    raise ValueError(f'{split} should have {stored.sizes[split]} examples')


def _labels(stored: Stored, split: str) -> list[int | str | None]:
  """Reads the classes of a split, without decoding its images."""
  import tensorflow_datasets as tfds  # pylint: disable=import-outside-toplevel

  decoders = {stored.image: tfds.decode.SkipDecoding()}
  return [row.label for row in _rows(stored, split, decoders)]


def _draw_preset(
  info: names.DataSetInfo,
  preset: names.SplitPreset,
  y: np.ndarray,
  settings: DataHparams,
) -> np.ndarray:
  """Shuffles all examples, or those of each class, and cuts them.

  Args:
    info: The data set.
    preset: The numbers of examples.
    y: The classes, [N].
    settings: The name of the preset.

  Returns:
    int8 [N]: 1 for testing, 0 for training, -1 for an unused example.
  """
  # Not the run's seed, so that runs with other seeds have the same test images.
  rng = seeds.generator(0, seeds.Purpose.SPLIT_PRESET)
  groups = [np.arange(len(y))]
  if preset.of_class:
    groups = [np.flatnonzero(y == c) for c in range(info.num_classes)]
  for_training = preset.train + preset.validation
  roles = np.full(len(y), -1, np.int8)
  for group in groups:
    if len(group) < for_training + preset.test:
      raise UsageError(
        f'--split_preset={settings.split_preset}: needs'
        f' {for_training + preset.test:,} images'
        f'{" of each class" if preset.of_class else ""}, but there are'
        f' {len(group):,}'
      )
    shuffled = rng.permutation(group)
    roles[shuffled[:for_training]] = 0
    roles[shuffled[for_training : for_training + preset.test]] = 1
  return roles


def root_folder(data_dir: str | None) -> str:
  """Returns TFDS's folder, as given or by default."""
  return data_dir or os.environ.get('TFDS_DATA_DIR') or _DEFAULT_DATA_DIR


def fetch_command(name: str, data_dir: str | None) -> str:
  """Returns the command that fetches a data set."""
  code = (
    'import tensorflow_datasets as tfds;'
    f' tfds.load({name!r}, data_dir={root_folder(data_dir)!r})'
  )
  return processes.python_code(code)


def stored_version(name: str, data_dir: str | None) -> str | None:
  """Finds the newest version of a data set on disk, or returns None.

  Fashion-MNIST may also be Debian's, of version 'idx'.
  """
  version = _newest_version(name, data_dir)
  is_debian = name == _FASHION and os.path.isdir(idx.FASHION_MNIST)
  return _IDX if version is None and is_debian else version


def _newest_version(name: str, data_dir: str | None) -> str | None:
  root = pathlib.Path(os.path.expanduser(root_folder(data_dir))) / name
  try:
    if not stat.S_ISDIR(os.stat(root).st_mode):
      raise files.FileError(str(root), 'it is not a folder')
    entries = os.listdir(root)
  except FileNotFoundError:
    return None
  except OSError as error:
    raise files.FileError(str(root), files.reason_of(error)) from error
  found = [
    tuple(int(n) for n in name.split('.'))
    for name in entries
    if re.fullmatch(r'\d{1,9}\.\d{1,9}\.\d{1,9}', name, re.ASCII)
    and os.path.lexists(root / name / 'dataset_info.json')
  ]
  return '.'.join(str(n) for n in max(found)) if found else None


def list_stored(data_dir: str | None) -> list[str]:
  """Lists the names of the data sets on disk."""
  folder = os.path.expanduser(root_folder(data_dir))
  try:
    entries = sorted(os.listdir(folder))
  except OSError:
    return []
  found = []
  for name in entries:
    # Unreadable entries are skipped.
    with contextlib.suppress(files.FileError):
      if _NAME.fullmatch(name) and stored_version(name, data_dir):
        found.append(name)
  return found


def read_stored(name: str, data_dir: str | None) -> Stored:
  """Reads the facts of a data set from its JSON files.

  Args:
    name: Its name, perhaps with a configuration: 'name/config'.
    data_dir: `--data_dir`.

  Returns:
    The facts.

  Raises:
    UsageError: If it is missing, damaged, or does not consist of images with
      classes.
  """
  given = root_folder(data_dir)
  version = stored_version(name, data_dir) if _NAME.fullmatch(name) else None
  if version is None and name in names.DATA_SETS:
    raise UsageError(
      f'data set {name} is not in --data_dir={given}; to fetch it, run:'
      f'\n  {fetch_command(name, data_dir)}'
    )
  if version is None:
    known, on_disk = tuple(names.DATA_SETS), list_stored(data_dir)
    raise UsageError(
      f'--dataset={name}: there is no such data set; known are'
      f' {", ".join(known)}, {names.AG_NEWS}, {"PATH, ".join(names.PATHS)}PATH,'
      f' {names.HUB}OWNER/NAME, and data sets of TFDS in'
      f' --data_dir={given} ({", ".join(on_disk) or "none"})'
      f'{closest(name, (*known, *on_disk))}'
    )
  if version == _IDX:
    return _FASHION_MNIST._replace(folder=pathlib.Path(idx.FASHION_MNIST))
  folder = pathlib.Path(os.path.expanduser(given)) / name / version
  try:
    # TFDS would hang on a pipe.
    for path in sorted(folder.iterdir()):
      if not path.is_dir():
        files.open_binary(str(path)).close()
    return _parse(folder, version)
  except OSError as error:
    raise files.FileError(str(folder), files.reason_of(error)) from error
  except (KeyError, TypeError, AttributeError, ValueError) as error:
    if isinstance(error, UsageError) and not isinstance(error, files.FileError):
      raise
    raise _damaged(name, data_dir, folder, error) from error


def _damaged(
  name: str, data_dir: str | None, folder: pathlib.Path, error: Exception
) -> UsageError:
  """Makes the error for files that cannot be read."""
  return UsageError(
    f'data set {name} {folder.name} in --data_dir={root_folder(data_dir)}'
    f' cannot be read ({type(error).__name__}: {files.first_line(error)});'
    f' remove {folder} and run:\n  {fetch_command(name, data_dir)}'
  )


def _parse(folder: pathlib.Path, version: str) -> Stored:
  """Parses the facts in a folder, or raises errors of many classes."""
  info = files.read_json(str(folder / 'dataset_info.json'))
  features = _features(files.read_json(str(folder / 'features.json')))
  image = _feature(folder, features, 'image', 'image')
  label = _feature(folder, features, 'classLabel', 'label')
  facts = features[image]['image']
  dtype = facts.get('dtype') or 'uint8'
  sides = facts['shape']
  sides = sides['dimensions'] if isinstance(sides, dict) else sides
  shape = tuple(-1 if n is None else int(n) for n in sides)
  if dtype != 'uint8' or len(shape) != 3 or shape[2] not in (1, 3, 4):
    raise UsageError(
      f'{folder}: its images are {dtype} {list(shape)}; they must be uint8'
      ' [height, width, 1, 3 or 4 channels]'
    )
  sizes = {
    str(split['name']): sum(int(n) for n in split['shardLengths'])
    for split in info['splits']
  }
  if not all(0 <= size <= _MAX_ROWS for size in sizes.values()):
    raise ValueError(f'its splits have {list(sizes.values())} rows')
  if not sizes.get(_TRAIN):
    raise UsageError(
      f'{folder}: has no split {_TRAIN!r}, but {", ".join(sizes) or "none"}'
    )
  facts = features[label]['classLabel']
  num_classes = int(facts.get('numClasses') or facts['num_classes'])
  if not 0 < num_classes <= images.MAX_CLASSES:
    raise ValueError(f'it has {num_classes} classes')
  file = folder / f'{label}.labels.txt'
  class_names = [str(i) for i in range(num_classes)]
  if os.path.lexists(file):
    class_names = files.read_text(str(file)).splitlines()
  if len(class_names) != num_classes:
    raise files.FileError(
      str(file), f'it names {len(class_names)} of {num_classes} classes'
    )
  about = (str(info.get('description') or '')).strip().splitlines()
  return Stored(
    folder,
    version,
    shape,
    tuple(class_names),
    sizes,
    image,
    label,
    about[0] if about else 'no description',
  )


def _features(content: Mapping[str, Any]) -> dict[str, Any]:
  """Returns feature -> kind -> facts, also of older versions of TFDS."""
  if 'featuresDict' in content:
    return content['featuresDict']['features']
  content = _content(content)
  if 'features' in content:
    return content['features']
  return {
    name: {_KINDS.get(feature['type'].rpartition('.')[2]): _content(feature)}
    for name, feature in content.items()
  }


def _content(feature: Mapping[str, Any]) -> dict[str, Any]:
  content = feature['content']
  if isinstance(content, str):
    return files.parse_json('features.json', content)
  return content


def _feature(
  folder: pathlib.Path, features: Mapping[str, Any], kind: str, usual: str
) -> str:
  """Finds the only feature of a kind."""
  found = [name for name, feature in features.items() if kind in feature]
  if usual in found:
    return usual
  if len(found) != 1:
    raise UsageError(
      f'{folder}: has {len(found)} features of kind {kind}; it must be a data'
      f' set of single images with one class each (it has'
      f' {", ".join(features)})'
    )
  return found[0]


def file_states(folder: pathlib.Path) -> list[tuple[str, int, int]]:
  """Returns (name, size, time) of each file of a data set."""
  found = ((path.name, path.stat()) for path in sorted(folder.iterdir()))
  return [(name, state.st_size, state.st_mtime_ns) for name, state in found]
