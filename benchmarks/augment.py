"""Compares batched augmentation with a per-image map of the same operations.

    python benchmarks/augment.py [--batch_size=32] [--policy=fl2]

Prints the images per second of the strong view, batched in the graph as in
training, and of a `tf.data` map that applies the same view image by image
(parallel, then batched), interleaved in one run; and their ratio.
"""

import argparse
import os
import pathlib
import statistics
import sys

os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / 'tools'))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import numpy as np
import tensorflow as tf
import timing

from tff_fssl.data import augment
from tff_fssl.data import names

_SHAPE = (32, 32, 3)


def main() -> None:
  """Measures and prints."""
  parser = argparse.ArgumentParser(description=__doc__.split('\n\n')[0])
  parser.add_argument('--batch_size', type=int, default=32)
  parser.add_argument(
    '--policy', default=names.FL2, choices=names.AUGMENTATION_POLICIES
  )
  parser.add_argument('--num_images', type=int, default=2048)
  parser.add_argument('--repetitions', type=int, default=5)
  args = parser.parse_args()
  cifar10 = names.DATA_SETS['cifar10']
  views = augment.build_views(
    _SHAPE, policy=args.policy, mean=cifar10.mean, std=cifar10.std, flip=True
  )
  size, num_images = args.batch_size, args.num_images // args.batch_size
  num_images *= size
  images = tf.constant(
    np.random.default_rng(0).integers(0, 256, [num_images, *_SHAPE], np.uint8)
  )

  @tf.function
  def batched():
    total = tf.constant(0.0)
    for start in tf.range(0, num_images, size):
      batch = views.strong(images[start : start + size], tf.stack([0, start]))
      total += batch[0, 0, 0, 0]
    return total

  def one(index, image):
    return views.strong(image[None], tf.stack([0, tf.cast(index, tf.int32)]))[0]

  mapped = (
    tf.data.Dataset.from_tensor_slices(images)
    .enumerate()
    .map(one, num_parallel_calls=tf.data.AUTOTUNE)
    .batch(size)
    .prefetch(tf.data.AUTOTUNE)
  )

  @tf.function
  def per_image():
    total = tf.constant(0.0)
    for batch in iter(mapped):
      total += batch[0, 0, 0, 0]
    return total

  runs = {
    'batched': lambda: batched().numpy(),
    'per image': lambda: per_image().numpy(),
  }
  times = {name: [] for name in runs}
  for fn in runs.values():
    fn()
  for _ in range(args.repetitions):
    for name, fn in runs.items():
      times[name].append(timing.seconds(fn))
  rates = {n: num_images / statistics.median(t) for n, t in times.items()}
  print(f'policy {args.policy}, batch {size}, {num_images} images')
  for name, rate in rates.items():
    print(f'{name:24} {rate:,.0f} images/s')
  ratio = rates['batched'] / rates['per image']
  print(f'{"batched / per image":24} {ratio:.1f}')


if __name__ == '__main__':
  main()
