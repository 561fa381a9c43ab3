"""(FL)^2's local step: how far it is from the machine's and from bare maths.

    python benchmarks/local_step.py [--model=wrn28_2] [--batch_size=32]

Prints, for the complete step (views, gathering, loop, optimizer; every example
confident, which is its dearest form), medians of interleaved repetitions in one
run: its time; its rate, counting 8 forward-equivalents of 2 x MACs x batch, as
a share of the float32 matrix peak (TF's 2048 x 2048 product, best of 20, same
threads); its ratio to a bare tf.function of the same mathematics (fixed images,
loss, gradients, update); and the share of the strong view.
"""

import argparse
import os
import pathlib
import statistics
import sys
import time

os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import numpy as np
import tensorflow as tf

from tff_fssl.algorithms import fl2
from tff_fssl.algorithms import fl2_hparams
from tff_fssl.data import augment
from tff_fssl.local import algorithm as algorithm_lib
from tff_fssl.local import optimizer
from tff_fssl.local import training
from tff_fssl.models import adapter
from tff_fssl.models import names
from tff_fssl.models import networks

_SHAPE, _NUM_CLASSES = (32, 32, 3), 10


def seconds(fn) -> float:
  """How long one call takes."""
  start = time.perf_counter()
  fn()
  return time.perf_counter() - start


def matrix_peak() -> float:
  """Floating-point operations a second of a large float32 product."""
  size = 2048
  a = tf.random.stateless_normal([size, size], [0, 1])
  multiply = tf.function(lambda: tf.reduce_sum(tf.matmul(a, a)))
  multiply()
  return (
    2 * size**3 / min(seconds(lambda: multiply().numpy()) for _ in range(20))
  )


def num_macs(model: tf.keras.Model) -> int:
  """Multiply-accumulates of one image's forward pass."""
  macs = 0
  for layer in model.layers:
    if isinstance(layer, tf.keras.layers.Conv2D):
      macs += int(
        np.prod(layer.kernel.shape) * np.prod(layer.output_shape[1:3])
      )
    elif isinstance(layer, tf.keras.layers.Dense):
      macs += int(np.prod(layer.kernel.shape))
  return macs


def main() -> None:
  """Measures and prints."""
  parser = argparse.ArgumentParser(description=__doc__.split('\n\n')[0])
  parser.add_argument('--model', default='wrn28_2', choices=names.MODEL_NAMES)
  parser.add_argument('--batch_size', type=int, default=32)
  parser.add_argument('--steps', type=int, default=8, help='in a repetition')
  parser.add_argument('--repetitions', type=int, default=5)
  args = parser.parse_args()
  size, steps = args.batch_size, args.steps

  mean, std = augment.normalization('cifar10')
  views = augment.build_views(_SHAPE, mean=mean, std=std, flip=True)
  network = adapter.Network(
    lambda: networks.build_network(args.model, _SHAPE, _NUM_CLASSES, 'bn'),
    seed=0,
  )
  weights = network.initial_weights()
  num_images = size * steps
  images = tf.constant(
    np.random.default_rng(0).integers(0, 256, [num_images, *_SHAPE], np.uint8)
  )
  labels = tf.constant(np.arange(num_images) % _NUM_CLASSES, tf.int32)
  confident = tf.ones([num_images], tf.bool)
  step = fl2.build_step(fl2_hparams.Fl2Hparams())
  sgd = optimizer.Sgd(0.9, True, 5e-4, 1.0)

  def prepare(*_):
    return algorithm_lib.Prepared(
      tf.range(num_images), {'labels': labels, 'confident': confident}
    )

  local = training.LocalTraining(
    network,
    algorithm_lib.LocalAlgorithm(
      step=step,
      step_ratios=('loss_unlabeled', 'loss_consistency'),
      prepare=prepare,
      views=('strong',),
    ),
    views,
    training.LoopConfig(1, size, 1, sgd),
  )

  @tf.function
  def complete():
    result = local.run(
      weights,
      algorithm_lib.Examples(images[:0], labels[:0]),
      algorithm_lib.Examples(images, labels),
      learning_rate=tf.constant(0.03),
      seed=tf.constant([0, 1]),
    )
    return result.num_examples

  slots = sgd.initialize(network)
  batch = algorithm_lib.Batch(
    None,
    None,
    None,
    {'strong': views.plain(images[:size])},
    labels[:size],
    {'labels': labels[:size], 'confident': confident[:size]},
    {},
  )

  @tf.function
  def bare():
    gradients = step(network, batch).gradients
    sgd.apply(network, slots, gradients, tf.constant(0.03))

  @tf.function
  def strong():
    return views.strong(images[:size], tf.constant([0, 1]))

  def bare_steps():
    for _ in range(steps):
      bare()

  runs = {
    'complete': lambda: complete().numpy(),
    'bare': bare_steps,
    'strong': lambda: strong().numpy(),
  }
  times = {name: [] for name in runs}
  for fn in runs.values():
    fn()
  peak = matrix_peak()
  for _ in range(args.repetitions):
    for name, fn in runs.items():
      network.assign(weights)  # Untrained weights: nothing overflows.
      times[name].append(seconds(fn))
  median = {name: statistics.median(values) for name, values in times.items()}
  complete_step, bare_step = median['complete'] / steps, median['bare'] / steps
  flops = 8 * 2 * num_macs(network.model) * size
  print(f'model                    {args.model}, batch {size}')
  print(f'matrix peak              {peak / 1e9:.0f} GFLOP/s')
  print(f'complete step            {complete_step * 1e3:.1f} ms')
  print(f'  of the matrix peak     {flops / complete_step / peak:.2f}')
  print(f'bare step                {bare_step * 1e3:.1f} ms')
  print(f'  bare / complete        {bare_step / complete_step:.2f}')
  print(
    f'strong view              {median["strong"] * 1e3:.2f} ms,'
    f' {median["strong"] / complete_step:.1%} of the complete step'
  )


if __name__ == '__main__':
  main()
