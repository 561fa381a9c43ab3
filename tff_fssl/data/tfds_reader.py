"""Reads images that TensorFlow Datasets has put on disk. TF-free to import.

They are decoded once, into a file (`image_cache`). Nothing here uses the
network.
"""

from collections.abc import Iterator
from typing import Any, cast

import numpy as np

from tff_fssl.data import image_cache
from tff_fssl.data import inspection
from tff_fssl.data import names
from tff_fssl.data import pictures
from tff_fssl.data import seeds
from tff_fssl.data import sources
from tff_fssl.data import tfds_sets
from tff_fssl.hparams import UsageError

_TRAIN, _TEST, _EXTRA = 'train', 'test', 'extra'
_BATCH_SIZE = 1_000


def load(info: names.DataSetInfo, data_dir: str | None) -> sources.DataSet:
  """Decodes a set into a file, once; see `sources.load`."""
  info = cast(tfds_sets.TfdsInfo, info)
  found, settings = _stored(info, data_dir), info.settings
  form = pictures.Form(info.example_shape, settings.resize)

  def make(writer):
    try:
      return _decode(info, found, form, writer)
    except (UsageError, OSError):
      raise
    except Exception as error:  # pylint: disable=broad-except
      raise tfds_sets.damaged(
        info.name, data_dir, found.folder, error
      ) from error

  cached = image_cache.open_or_make(
    settings.cache_folder,
    image_cache.key_of(
      str(found.folder.resolve()),
      tfds_sets.files_of(found.folder),
      form,
      info.preset,
      info.extra,
      'test_share' in info.uses and settings.test_share,
    ),
    info.example_shape,
    sum(found.sizes[s] for splits in _splits(info, found) for s in splits),
    make,
  )
  try:
    y = cached.integers('y', 2**31)
    num_train = int(cached.facts['num_train'])
    if len(y) != len(cached.images) or not 0 <= num_train <= len(y):
      raise ValueError('counts differ')
  except (KeyError, TypeError, ValueError) as error:
    raise image_cache.foreign(cached) from error
  inspection.refuse(
    f'--dataset={info.name}',
    inspection.label_problems(found.class_names, y[:num_train], y[num_train:]),
  )
  return _data_set(
    info,
    found,
    sources.Examples(cached.images[:num_train], y[:num_train]),
    sources.Examples(cached.images[num_train:], y[num_train:]),
    # Known sets keep the moments of their tables.
    **({} if info.mean else {'mean': cached.mean, 'std': cached.std}),
  )


def _stored(info: names.DataSetInfo, data_dir: str | None) -> tfds_sets.Stored:
  """What is on disk; refuses what is not the set of `names.DATA_SETS`."""
  found = tfds_sets.stored(info.name, data_dir)
  num_classes = len(found.class_names)
  is_known = bool(info.mean)
  if is_known and (
    num_classes != info.num_classes or found.shape != info.example_shape
  ):
    raise UsageError(
      f'{found.folder} is not {info.name}: it has {num_classes} classes and'
      f' images of {list(found.shape)}, instead of {info.num_classes} and'
      f' {list(info.example_shape)}'
    )
  needed = [_TRAIN, _TEST] if is_known else []
  if getattr(info, 'extra', False):
    needed.append(_EXTRA)
  missing = [split for split in needed if split not in found.sizes]
  if missing:
    raise UsageError(
      f'{found.folder} has no split {missing[0]!r}; remove it and run:'
      f'\n  {tfds_sets.fetch_command(info.name, data_dir)}'
    )
  return found


def _data_set(
  info: names.DataSetInfo,
  found: tfds_sets.Stored,
  train: sources.Examples,
  test: sources.Examples,
  **moments: Any,
) -> sources.DataSet:
  return sources.DataSet(
    name=info.name,
    train=train,
    test=test,
    num_classes=info.num_classes,
    class_names=found.class_names,
    example_shape=info.example_shape,
    notes=f'TFDS {info.name} {found.version}: {found.about}',
    **moments,
  )


def _batches(
  found: tfds_sets.Stored, split: str, images: bool = True
) -> Iterator[tuple[Any, np.ndarray]]:
  """(images, labels) of a split in its stored order.

  Args:
    found: The data set.
    split: The split.
    images: Whether images are decoded; else they are bytes.

  Yields:
    Batches; of single images, if these differ in their sizes.

  Raises:
    ValueError: If there are more or fewer than there should be, or another
      error of TFDS.
  """
  import tensorflow_datasets as tfds  # pylint: disable=import-outside-toplevel

  image, label = found.image, found.label
  skip = {} if images else {image: tfds.decode.SkipDecoding()}
  dataset = tfds.builder_from_directory(str(found.folder)).as_dataset(
    split=split,
    shuffle_files=False,
    decoders=skip,
    # Shards are read one after the other: interleaving would change the order.
    read_config=tfds.ReadConfig(
      interleave_cycle_length=1, try_autocache=False, skip_prefetch=True
    ),
  )
  dataset = dataset.map(lambda element: (element[image], element[label]))
  batch_size = 1 if images and min(found.shape) < 1 else _BATCH_SIZE
  count = 0
  for pair in tfds.as_numpy(dataset.batch(batch_size).prefetch(2)):
    count += len(pair[1])
    if count > found.sizes[split]:
      break
    yield pair
  if count != found.sizes[split]:
    raise ValueError(f'{split} should have {found.sizes[split]} examples')


def _decode(
  info: tfds_sets.TfdsInfo,
  found: tfds_sets.Stored,
  form: pictures.Form,
  writer: image_cache.Writer,
) -> tuple[int, int, dict[str, Any]]:
  """Puts the images of all splits, those for training first."""
  pooled, further = _splits(info, found)
  hidden = tfds_sets.unlabeled_splits(found)
  labels = [
    np.full(found.sizes[split], names.UNKNOWN_LABEL)
    if split in hidden
    else np.concatenate([y for _, y in _batches(found, split, images=False)])
    for split in (*pooled, *further)
  ]
  y = sources.as_labels(np.concatenate(labels))
  train, tested = _split(info, labels[: len(pooled)])
  train = np.concatenate(
    [train, np.arange(sum(map(len, labels[: len(pooled)])), len(y))]
  )
  # Example -> its place in the file.
  places = np.full(len(y), -1)
  kept = np.concatenate([train, tested])
  places[kept] = np.arange(len(kept))
  start = 0
  with sources.progress(len(y)) as progress:
    for split in (*pooled, *further):
      for images, _ in _batches(found, split):
        for place, image in zip(places[start:], images):
          if place >= 0:
            writer.put(int(place), pictures.convert(image, form))
        start += len(images)
        progress.update(len(images))
  facts = {'num_train': len(train), 'y': y[kept].tolist()}
  return len(kept), len(train), facts


def _splits(
  info: tfds_sets.TfdsInfo, found: tfds_sets.Stored
) -> tuple[list[str], list[str]]:
  """(splits of training and test images, further ones for training)."""
  test = tfds_sets.test_split(found)
  further = [_EXTRA] if info.extra else []
  return (
    [split for split in (_TRAIN, test) if split],
    [*further, *tfds_sets.unlabeled_splits(found)],
  )


def _split(
  info: tfds_sets.TfdsInfo, labels: list[np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
  """(training, test) positions in the labels of training and test splits."""
  y = np.concatenate(labels)
  if info.preset is not None:
    return _by_preset(info, info.preset, y)
  if len(labels) > 1:
    return np.split(np.arange(len(y)), [len(labels[0])])  # type: ignore[return-value]
  in_test = tfds_sets.in_test_share(len(y), info.settings.test_share)
  return np.flatnonzero(~in_test), np.flatnonzero(in_test)


def _by_preset(
  info: tfds_sets.TfdsInfo, preset: names.SplitPreset, y: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
  """Shuffles all examples, or those of each class, and cuts them."""
  # Not the run's seed: runs with other seeds have the same test images.
  rng = seeds.generator(0, seeds.Purpose.SPLIT_PRESET)
  groups = [np.arange(len(y))]
  if preset.of_class:
    groups = [np.flatnonzero(y == c) for c in range(info.num_classes)]
  for_training = preset.train + preset.validation
  train, test = [], []
  for group in groups:
    if len(group) < for_training + preset.test:
      raise UsageError(
        f'--split_preset={info.settings.split_preset}: needs'
        f' {for_training + preset.test:,} images'
        f'{" of each class" if preset.of_class else ""}, but'
        f' --dataset={info.name} has {len(group):,}'
      )
    shuffled = rng.permutation(group)
    train.append(shuffled[:for_training])
    test.append(shuffled[for_training : for_training + preset.test])
  # In their stored order, as the published splits are.
  return np.sort(np.concatenate(train)), np.sort(np.concatenate(test))
