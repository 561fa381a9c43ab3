"""Small data sets in TFDS's format, with random pixels."""

from collections.abc import Mapping
import os
import pathlib

import numpy as np
import tensorflow as tf
import tensorflow_datasets as tfds

from tff_fssl.data import names


def write(
  folder: str | os.PathLike[str],
  name: str,
  counts: Mapping[str, int],
  num_classes: int | None = None,
  shards: int = 2,
  shape: tuple[int | None, int | None, int] | None = None,
  keys: tuple[str, str] = ('image', 'label'),
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
  """Writes a data set; returns its arrays by split.

  Args:
    folder: The `--data_dir`.
    name: One of `names.DATA_SETS`, or with `num_classes` and `shape` any other.
    counts: Examples of each split; those of 'unlabelled' have the label -1.
    num_classes: Of the data set; None is as many as it should have. Classes are
      as frequent as each other, or nearly.
    shards: Files of each split.
    shape: Of the images; with None for a side, sizes differ. None: as it should
      be.
    keys: Names of the features that are image and class.

  Returns:
    Split -> (x, y int64 [N]), in the order of the files; x is uint8
    [N, H, W, C], or where sizes differ a list of images.
  """
  num_classes = num_classes or names.DATA_SETS[name].num_classes
  shape = shape or names.DATA_SETS[name].example_shape
  features = tfds.features.FeaturesDict(
    {
      keys[0]: tfds.features.Image(shape=shape),
      keys[1]: tfds.features.ClassLabel(num_classes=num_classes),
    }
  )
  splits, arrays = [], {}
  path = pathlib.Path(folder) / name / '1.0.0'
  path.mkdir(parents=True)
  for split, count in counts.items():
    rng = np.random.default_rng(len(split))
    if None in shape:
      sides = rng.integers(5, 12, (count, 2))
      x = [rng.integers(0, 256, (*s, shape[2]), np.uint8) for s in sides]
    else:
      x = rng.integers(0, 256, (count, *shape), np.uint8)
    y = rng.permutation(np.arange(count) % num_classes)
    if split == 'unlabelled':
      y = np.full(count, -1)
    arrays[split] = x, y
    template = tfds.core.ShardedFileTemplate(
      data_dir=path,
      dataset_name=name,
      split=split,
      filetype_suffix='tfrecord',
    )
    parts = np.array_split(np.arange(count), shards)
    for i, indices in enumerate(parts):
      file = template.sharded_filepath(shard_index=i, num_shards=shards)
      with tf.io.TFRecordWriter(str(file)) as writer:
        for j in indices:
          example = {keys[0]: x[j], keys[1]: int(y[j])}
          writer.write(
            features.serialize_example(features.encode_example(example))
          )
    splits.append(
      tfds.core.SplitInfo(
        name=split,
        shard_lengths=[len(indices) for indices in parts],
        num_bytes=0,
        filename_template=template,
      )
    )
  tfds.folder_dataset.write_metadata(
    data_dir=path,
    features=features,
    split_infos=splits,
    filename_template=template,
    description='Made for a test.',
    check_data=False,
  )
  return arrays
