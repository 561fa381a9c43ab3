"""Compares (FL)^2's local step with the machine's peak and with bare maths.

    python benchmarks/local_step.py [--model=wrn28_2] [--batch_size=32]
        [--bfloat16]

Prints, for the complete step (views, gathering, loop, optimizer; every example
confident, the most expensive case), medians of interleaved repetitions in one
run: its time; its rate, counting 8 forward-equivalents of 2 x MACs x batch, as
a share of the float32 matrix peak (TF's 2048 x 2048 product, best of 20, same
threads); its ratio to a bare tf.function of the same mathematics (fixed images,
loss, gradients, update); the share of the strong view; and, with --bfloat16,
how much faster the complete step is if the network computes in bfloat16.
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

from tff_fssl.algorithms import fl2
from tff_fssl.algorithms import fl2_hparams
from tff_fssl.data import augment
from tff_fssl.local import algorithm as algorithm_lib
from tff_fssl.local import objective
from tff_fssl.local import optimizer
from tff_fssl.local import training
from tff_fssl.models import adapter
from tff_fssl.models import names

_SHAPE, _NUM_CLASSES = (32, 32, 3), 10


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


class Step:
  """The complete and the bare step of one network.

  Attributes:
    complete: Runs `num_steps` steps through the loop of local training.
    bare: Runs the same number of bare steps on fixed images.
    macs: `num_macs` of the network.
  """

  def __init__(
    self, model: str, batch_size: int, num_steps: int, compute_dtype: str
  ):
    """Builds both steps.

    Args:
      model: The name of the network.
      batch_size: Images in a batch.
      num_steps: Steps in a call.
      compute_dtype: The dtype that the network computes in.
    """
    self._network = network = adapter.Network(
      lambda: networks.build_network(model, _SHAPE, _NUM_CLASSES, 'bn'),
      seed=0,
      compute_dtype=compute_dtype,
    )
    self._weights = weights = network.initial_weights()
    self.macs = num_macs(network.model)
    num_images = batch_size * num_steps
    images = tf.constant(random_images(num_images))
    labels = tf.constant(np.arange(num_images) % _NUM_CLASSES, tf.int32)
    confident = tf.ones([num_images], tf.bool)
    hparams = fl2_hparams.Fl2Hparams()
    step = fl2.build_step(hparams)
    sgd = optimizer.Sgd(0.9, True, 5e-4, 1.0)
    views = build_views()

    def prepare(*_):
      return algorithm_lib.Prepared(
        tf.range(num_images), {'labels': labels, 'confident': confident}
      )

    local = training.LocalTraining(
      network,
      algorithm_lib.LocalAlgorithm(
        steps=(step,),
        step_ratios=fl2.step_ratios(hparams),
        prepare=prepare,
        streams={
          objective.UNLABELED: algorithm_lib.Stream({'strong': 'strong'})
        },
      ),
      views,
      training.LoopConfig(1, batch_size, 1, sgd),
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
    networks = algorithm_lib.Networks(network)
    part = algorithm_lib.Part(
      {'strong': views.plain(images[:batch_size])},
      labels[:batch_size],
      tf.ones([batch_size]),
      {'labels': labels[:batch_size], 'confident': confident[:batch_size]},
    )
    now = algorithm_lib.Clock(*tf.constant([1, 0, num_steps]))
    batch = algorithm_lib.Batch(
      {objective.UNLABELED: part}, {}, now, tf.constant([0, 1])
    )

    @tf.function
    def bare():
      gradients = step(networks, batch).gradients
      sgd.apply(network, slots, gradients, tf.constant(0.03))

    self._complete, self._bare, self._num_steps = complete, bare, num_steps

  def complete(self) -> None:
    """Runs the steps in the loop."""
    self._complete().numpy()

  def bare(self) -> None:
    """Runs the steps one by one."""
    for _ in range(self._num_steps):
      self._bare()

  def reset(self) -> None:
    """Restores untrained weights, so that nothing overflows."""
    self._network.assign(self._weights)


def random_images(num: int) -> np.ndarray:
  """uint8 [num, 32, 32, 3]."""
  return np.random.default_rng(0).integers(0, 256, [num, *_SHAPE], np.uint8)


def build_views() -> augment.Views:
  """CIFAR-10's."""
  mean, std = augment.normalization('cifar10')
  return augment.build_views(_SHAPE, mean=mean, std=std, flip=True)


def main() -> None:
  """Measures and prints."""
  parser = argparse.ArgumentParser(description=__doc__.split('\n\n')[0])
  parser.add_argument('--model', default='wrn28_2', choices=names.MODELS)
  parser.add_argument('--batch_size', type=int, default=32)
  parser.add_argument(
    '--bfloat16', action='store_true', help='compare with --compute_dtype'
  )
  parser.add_argument(
    '--steps', type=int, default=8, help='steps in a repetition'
  )
  parser.add_argument('--repetitions', type=int, default=5)
  args = parser.parse_args()
  size = args.batch_size

  step = Step(args.model, size, args.steps, 'float32')
  images, views = tf.constant(random_images(size)), build_views()
  strong = tf.function(lambda: views.strong(images, tf.constant([0, 1])))
  runs = {
    'complete': step.complete,
    'bare': step.bare,
    'strong': lambda: strong().numpy(),
  }
  steps = [step]
  if args.bfloat16:
    steps.append(Step(args.model, size, args.steps, 'bfloat16'))
    runs['bfloat16'] = steps[-1].complete
  times = {name: [] for name in runs}
  for fn in runs.values():
    fn()
  peak = timing.matrix_peak()
  for _ in range(args.repetitions):
    for name, fn in runs.items():
      for each in steps:
        each.reset()
      times[name].append(timing.seconds(fn))
  median = {name: statistics.median(values) for name, values in times.items()}
  complete_step = median['complete'] / args.steps
  bare_step = median['bare'] / args.steps
  flops = 8 * 2 * step.macs * size
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
  if args.bfloat16:
    bfloat16_step = median['bfloat16'] / args.steps
    print(f'complete, bfloat16       {bfloat16_step * 1e3:.1f} ms')
    print(f'  float32 / bfloat16     {complete_step / bfloat16_step:.2f}')


if __name__ == '__main__':
  main()
