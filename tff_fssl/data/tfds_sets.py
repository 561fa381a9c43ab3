"""What TensorFlow Datasets has put on disk: facts, from its JSON. TF-free."""

from collections.abc import Mapping
import contextlib
import dataclasses
import json
import os
import pathlib
import re
import stat
from typing import Any, NamedTuple

import numpy as np

from tff_fssl import files
from tff_fssl import processes
from tff_fssl.data import data_hparams
from tff_fssl.data import listings
from tff_fssl.data import names
from tff_fssl.hparams import UsageError
from tff_fssl.hparams import closest

DataHparams = data_hparams.DataHparams
# TFDS's default folder.
_DEFAULT_DATA_DIR = os.path.join('~', 'tensorflow_datasets')
_NAME = re.compile(r'\w+(?:/[\w.-]*\w)?', re.ASCII)
_SVHN, _NUM_EXTRA = 'svhn_cropped', 531_131
_LOADER = 'tff_fssl.data.tfds_reader:load'
# Class of a feature -> its kind today.
_KINDS = {'Image': 'image', 'ClassLabel': 'classLabel'}
_TRAIN, _TESTS = 'train', ('test', 'validation')
_UNLABELED = ('unlabelled', 'unlabeled')


class Stored(NamedTuple):
  """What a data set's files say of it.

  Attributes:
    folder: The folder of its version.
    version: Its version.
    shape: (height, width, channels), -1 for what differs between images.
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


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class TfdsInfo(names.DataSetInfo):
  """A data set that is decoded into a file.

  Attributes:
    settings: How its images are read.
    preset: How it is split anew; None: as published.
    extra: Whether the split 'extra' is for training, too.
  """

  settings: DataHparams
  preset: names.SplitPreset | None
  extra: bool = False


def find(name: str, data_dir: str, settings: DataHparams) -> names.DataSetInfo:
  """Facts of a data set; see `catalog.find`."""
  preset = _preset(name, settings)
  known = names.DATA_SETS.get(name)
  if known is None:
    return _of_stored(name, stored(name, data_dir), settings, preset)
  uses = {'cache_dir'} | ({'svhn_extra'} if name == _SVHN else set())
  if any(name in splits for splits in names.SPLIT_PRESETS.values()):
    uses.add('split_preset')
  extra = name == _SVHN and settings.svhn_extra
  facts = {
    field.name: getattr(known, field.name)
    for field in dataclasses.fields(names.DataSetInfo)
  }
  facts |= _sizes(preset, known.num_classes, known.num_train, known.num_test)
  if extra:
    facts['num_train'] += _NUM_EXTRA
  facts |= {'loader': _LOADER, 'uses': frozenset(uses)}
  return TfdsInfo(**facts, settings=settings, preset=preset, extra=extra)


def _preset(name: str, settings: DataHparams) -> names.SplitPreset | None:
  if settings.split_preset == names.OFFICIAL:
    return None
  splits = names.SPLIT_PRESETS[settings.split_preset]
  if name not in splits:
    raise UsageError(
      f'--split_preset={settings.split_preset}: is known for'
      f' {", ".join(splits)}, not for --dataset={name}'
    )
  return splits[name]


def _sizes(
  preset: names.SplitPreset | None,
  num_classes: int,
  num_train: int,
  num_test: int,
) -> dict[str, Any]:
  """The sizes in a `DataSetInfo`."""
  if preset is None:
    return {'num_train': num_train, 'num_test': num_test}
  each = num_classes if preset.of_class else 1
  return {
    'num_train': (preset.train + preset.validation) * each,
    'num_test': preset.test * each,
    'num_validation': preset.validation * each,
  }


def _of_stored(
  name: str,
  found: Stored,
  settings: DataHparams,
  preset: names.SplitPreset | None,
) -> TfdsInfo:
  """Facts of a data set that is in no table."""
  uses = {'image_size', 'resize', 'color', 'flip', 'cache_dir'}
  if any(name in splits for splits in names.SPLIT_PRESETS.values()):
    uses.add('split_preset')
  num_train, test = found.sizes[_TRAIN], test_split(found)
  if test is None:
    uses.add('test_share')
    num_test = int(in_test_share(num_train, settings.test_share).sum())
    num_train -= num_test
  else:
    num_test = found.sizes[test]
  sizes = _sizes(preset, len(found.class_names), num_train, num_test)
  unlabeled = unlabeled_splits(found)
  sizes['num_train'] += sum(found.sizes[split] for split in unlabeled)
  return TfdsInfo(
    name=name,
    num_classes=len(found.class_names),
    example_shape=settings.image_shape(found.shape),
    **sizes,
    flip=settings.flip,
    mean=(),
    std=(),
    loader=_LOADER,
    uses=frozenset(uses),
    settings=settings,
    preset=preset,
  )


def test_split(found: Stored) -> str | None:
  """The split that is for testing, if there is one."""
  return next((split for split in _TESTS if found.sizes.get(split)), None)


def unlabeled_splits(found: Stored) -> list[str]:
  """The splits whose labels are not known."""
  return [split for split in _UNLABELED if split in found.sizes]


def in_test_share(count: int, share: float) -> np.ndarray:
  """Which training examples are for testing, bool [count]."""
  return np.array(
    [listings.in_share(f'{_TRAIN}:{i}', share) for i in range(count)], bool
  )


def folder_of(data_dir: str | None) -> str:
  """TFDS's folder, as it was given."""
  return data_dir or os.environ.get('TFDS_DATA_DIR') or _DEFAULT_DATA_DIR


def fetch_command(name: str, data_dir: str | None) -> str:
  """The command that fetches a data set."""
  code = (
    'import tensorflow_datasets as tfds;'
    f' tfds.load({name!r}, data_dir={folder_of(data_dir)!r})'
  )
  return processes.python_code(code)


def stored_version(name: str, data_dir: str | None) -> str | None:
  """The newest version of a data set that is on disk, if there is any."""
  root = pathlib.Path(os.path.expanduser(folder_of(data_dir))) / name
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


def there(data_dir: str | None) -> list[str]:
  """The names of the data sets that are on disk."""
  folder = os.path.expanduser(folder_of(data_dir))
  try:
    entries = sorted(os.listdir(folder))
  except OSError:
    return []
  found = []
  for name in entries:
    # What cannot be read is no reason to list nothing.
    with contextlib.suppress(files.FileError):
      if _NAME.fullmatch(name) and stored_version(name, data_dir):
        found.append(name)
  return found


def stored(name: str, data_dir: str | None) -> Stored:
  """Reads what a data set says of itself, from its JSON files.

  Args:
    name: Its name, perhaps with a configuration: 'name/config'.
    data_dir: `--data_dir`.

  Returns:
    The facts.

  Raises:
    UsageError: If it is not there, is damaged, or is not one of images with
      classes.
  """
  given = folder_of(data_dir)
  version = stored_version(name, data_dir) if _NAME.fullmatch(name) else None
  if version is None and name in names.DATA_SETS:
    raise UsageError(
      f'data set {name} is not in --data_dir={given}; to fetch it, run:'
      f'\n  {fetch_command(name, data_dir)}'
    )
  if version is None:
    known, on_disk = tuple(names.DATA_SETS), there(data_dir)
    raise UsageError(
      f'--dataset={name}: there is no such data set; known are'
      f' {", ".join(known)}, {names.AG_NEWS}, {"PATH, ".join(names.PATHS)}PATH,'
      f' {names.HUB}OWNER/NAME, and what TFDS has put into'
      f' --data_dir={given} ({", ".join(on_disk) or "nothing"})'
      f'{closest(name, (*known, *on_disk))}'
    )
  folder = pathlib.Path(os.path.expanduser(given)) / name / version
  try:
    # TFDS would hang on some files, such as pipes.
    for path in sorted(folder.iterdir()):
      if not path.is_dir():
        files.open_binary(str(path)).close()
    return _parse(folder, version)
  except OSError as error:
    raise files.FileError(str(folder), files.reason_of(error)) from error
  except (files.FileError, KeyError, TypeError, AttributeError) as error:
    raise damaged(name, data_dir, folder, error) from error
  except ValueError as error:
    if isinstance(error, UsageError):
      raise
    raise damaged(name, data_dir, folder, error) from error


def damaged(
  name: str, data_dir: str | None, folder: pathlib.Path, error: Exception
) -> UsageError:
  """The error for files that cannot be read."""
  return UsageError(
    f'data set {name} {folder.name} in --data_dir={folder_of(data_dir)} cannot'
    f' be read ({type(error).__name__}: {files.first_line(error)}); remove'
    f' {folder} and run:\n  {fetch_command(name, data_dir)}'
  )


def _parse(folder: pathlib.Path, version: str) -> Stored:
  """The facts in a folder; errors of many classes if they are not there."""
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
  if not sizes.get(_TRAIN):
    raise UsageError(
      f'{folder}: has no split {_TRAIN!r}, but {", ".join(sizes) or "none"}'
    )
  facts = features[label]['classLabel']
  num_classes = int(facts.get('numClasses') or facts['num_classes'])
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
  """Feature -> kind -> facts, also of what older versions of TFDS wrote."""
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
  return json.loads(content) if isinstance(content, str) else content


def _feature(
  folder: pathlib.Path, features: Mapping[str, Any], kind: str, usual: str
) -> str:
  """The name of the one feature of a kind."""
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


def files_of(folder: pathlib.Path) -> list[tuple[str, int, int]]:
  """(name, size, time) of each file of a data set."""
  found = ((path.name, path.stat()) for path in sorted(folder.iterdir()))
  return [(name, state.st_size, state.st_mtime_ns) for name, state in found]
