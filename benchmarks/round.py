"""Compares an (FL)^2 round with the sum of its parts, and with TFF's worker.

    python benchmarks/round.py [--model=cnn] [--num_clients=10] [--worker]

The bare parts are tf.functions called one after another, without TFF: each
client's pseudo-labels and local training, each client's statistics pass, the
server's training and its statistics pass. Prints medians of interleaved rounds
in one run, their ratio, and where the round's seconds went by the runtime's own
account.
"""

import argparse
import dataclasses
import functools
import pathlib
import statistics as statistics_lib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / 'tools'))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import numpy as np
import timing

from tff_fssl import runtime
from tff_fssl.algorithms import fl2
from tff_fssl.client import optimizer
from tff_fssl.client import training
from tff_fssl.data import augment
from tff_fssl.data import clients
from tff_fssl.data import names as data_names
from tff_fssl.interface import base
from tff_fssl.interface import round_hparams
from tff_fssl.lazy import tf, tff
from tff_fssl.models import adapter
from tff_fssl.models import names
from tff_fssl.models import networks
from tff_fssl.models import statistics
from tff_fssl.rounds import process as process_lib

_SHAPE, _NUM_CLASSES, _NUM_LABELS = (32, 32, 3), 10, 40
_MODELS = [n for n, m in names.MODELS.items() if data_names.IMAGES in m.inputs]
# All pseudo-labels are kept and confident: this is the most expensive round,
# and every path does the same work.
_FL2 = fl2.Fl2(adaptive_threshold=False, confidence_threshold=0.0)


def bare_round(views, model_fn, hparams, server, cohort):
  """A function that does the round's work without TFF."""
  sgd = optimizer.Sgd(
    hparams.momentum,
    hparams.nesterov,
    hparams.weight_decay,
    hparams.max_gradient_norm,
  )

  algorithm = dataclasses.replace(_FL2, round=hparams)

  def local_training(epochs, batch_size, at_server):
    network = adapter.Network(model_fn, seed=0)
    config = training.LoopConfig(epochs, batch_size, batch_size, sgd)
    local = training.LocalTraining(
      network, algorithm, views, config, at_server=at_server
    )

    @tf.function(autograph=False)
    def run(weights, labeled, unlabeled, seed):
      rate = tf.constant(hparams.client_learning_rate)
      result = local.run(
        weights, labeled, unlabeled, learning_rate=rate, seed=seed
      )
      return result.update

    return network, run

  network, train_client = local_training(
    hparams.client_epochs, hparams.client_batch_size, at_server=False
  )
  _, train_server = local_training(
    hparams.server_epochs, hparams.server_batch_size, at_server=True
  )
  weights = network.initial_weights()._replace(
    statistics_count=tf.constant(1.0)
  )

  @tf.function(autograph=False)
  def gather(images):
    return statistics.gather(
      network,
      weights,
      images,
      views,
      kind=statistics.POOLED,
      batch_size=hparams.statistics_batch_size,
    )

  def examples(x, y):
    return base.Examples(tf.constant(x), tf.constant(y))

  none = examples(server[0][:0], server[1][:0])

  def run():
    for element in cohort:
      unlabeled = examples(element['unlabeled']['x'], element['unlabeled']['y'])
      train_client(weights, none, unlabeled, tf.constant(element['seed']))
    train_server(weights, examples(*server), none, tf.constant([0, 0]))
    for element in cohort:
      gather(tf.constant(element['unlabeled']['x']))
    gather(tf.constant(server[0]))[-1].numpy()

  return run


def make_data(num_clients, num_images):
  """Random pixels: (the server's x and y, an example of each client)."""
  rng = np.random.default_rng(0)

  def make(num):
    x = rng.integers(0, 256, [num, *_SHAPE], np.uint8)
    return x, rng.integers(0, _NUM_CLASSES, num).astype(np.int32)

  server = make(_NUM_LABELS)
  cohort = [
    clients.make_example(
      seed=clients.client_seed(0, 1, i),
      labeled=None,
      unlabeled=make(num_images),
    )
    for i in range(num_clients)
  ]
  return server, cohort


def federated_rounds(process, cohort, contexts):
  """Name of a context -> a function that runs the round in it."""
  tff.framework.set_default_context(contexts['in_process'])
  state = process.initialize()

  def run(context):
    tff.framework.set_default_context(context)
    process.next(state, [tf.data.Dataset.from_tensors(e) for e in cohort])

  return {
    name: functools.partial(run, context) for name, context in contexts.items()
  }


def build_process(model, server):
  """(process, views, model_fn, hparams) of an (FL)^2 round with one epoch."""
  cifar10 = data_names.DATA_SETS['cifar10']
  views = augment.build_views(
    _SHAPE, mean=cifar10.mean, std=cifar10.std, flip=True
  )

  def model_fn():
    return networks.build_network(model, _SHAPE, _NUM_CLASSES, 'bn')

  hparams = round_hparams.RoundHparams(
    client_epochs=1, num_pretraining_rounds=0
  )
  process = process_lib.build_process(
    model_fn,
    dataclasses.replace(_FL2, round=hparams),
    process_lib.DataSpec(
      clients.element_spec(_SHAPE),
      views,
      clients.build_server_data_fn(*server),
    ),
    seed=0,
  )
  return process, views, model_fn, hparams


def median_seconds(runs, repetitions):
  """The median seconds of each function; they take turns."""
  times = {name: [] for name in runs}
  for fn in runs.values():
    fn()
  for _ in range(repetitions):
    for name, fn in runs.items():
      times[name].append(timing.seconds(fn))
  return {name: statistics_lib.median(t) for name, t in times.items()}


def main() -> None:
  """Measures and prints."""
  parser = argparse.ArgumentParser(description=__doc__.split('\n\n')[0])
  parser.add_argument('--model', default='cnn', choices=_MODELS)
  parser.add_argument('--num_clients', type=int, default=10)
  parser.add_argument('--num_images', type=int, default=500, help='per client')
  parser.add_argument('--repetitions', type=int, default=5)
  parser.add_argument('--worker', action='store_true', help="TFF's worker, too")
  args = parser.parse_args()

  server, cohort = make_data(args.num_clients, args.num_images)
  process, views, model_fn, hparams = build_process(args.model, server)
  contexts = {'in_process': runtime.build_context()}
  if args.worker:
    contexts['tff_worker'] = runtime.build_context(
      runtime.Settings('tff_worker')
    )
  runs = federated_rounds(process, cohort, contexts)
  runs['bare parts'] = bare_round(views, model_fn, hparams, server, cohort)
  median = median_seconds(runs, args.repetitions)
  print(
    f'{args.model}, {args.num_clients} clients of {args.num_images} images,'
    f' 1 epoch, {_NUM_LABELS} labels at the server'
  )
  for name, value in median.items():
    print(f'{name:24} {value:.2f} s')
  for name in contexts:
    ratio = median[name] / median['bare parts']
    print(f'{name + " / bare parts":24} {ratio:.2f}')
  spent = contexts['in_process'].timing
  print(
    f'in_process, last round:  clients {spent.clients:.2f} s, server'
    f' {spent.server:.2f} s, aggregation {spent.aggregation:.2f} s'
  )
  for context in contexts.values():
    getattr(context, 'close', lambda: None)()


if __name__ == '__main__':
  main()
