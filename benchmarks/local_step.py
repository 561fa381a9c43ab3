"""Compares an algorithm's local step with the machine's peak and bare maths.

    python benchmarks/local_step.py [--algorithm=fl2] [--scenario=...]
        [--model=wrn28_2] [--batch_size=N] [--bfloat16]

Prints the forward-equivalents that the traced step spends for an example. Then,
for the complete step (views, gathering, loop, optimizer; in the most expensive
case, all examples kept), medians of interleaved repetitions in one run: its
time; its rate, by these FLOPs, as a share of the float32 matrix peak (TF's
2048 x 2048 product, best of 20, same threads); its ratio to a bare tf.function
of the same mathematics (fixed views, losses, gradients, update); the share of
views and gathering; and, with --bfloat16, how much faster the complete step is
if the network computes in bfloat16.
"""

import argparse
from collections.abc import Sequence
import dataclasses
import pathlib
import statistics
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / 'tools'))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import numpy as np
import timing

from tff_fssl.algorithms import registry
from tff_fssl.algorithms.fedmatch import helper_selection
from tff_fssl.client import batches
from tff_fssl.client import compute
from tff_fssl.client import training
from tff_fssl.data import augment
from tff_fssl.data import clients
from tff_fssl.data import names as data_names
from tff_fssl.interface import base
from tff_fssl.interface import round_hparams as round_hparams_lib
from tff_fssl.lazy import tf
from tff_fssl.models import names
from tff_fssl.models import networks
from tff_fssl.rounds import compute as round_compute
from tff_fssl.rounds import optimizers
from tff_fssl.rounds import plan as plan_lib

_SHAPE, _NUM_CLASSES = (32, 32, 3), 10
_MODELS = [n for n, m in names.MODELS.items() if data_names.IMAGES in m.inputs]
# What a client receives in the first round makes it do less in these cases:
# nobody helps it (FedMatch).
_MOST_EXPENSIVE = {helper_selection.HELPER_WEIGHTS: 1.0}


class Task:
  """An algorithm, a network and the number of steps.

  Attributes:
    entry: The algorithm's registry entry.
    hparams: The round's hyper-parameters.
    algorithm: The algorithm.
    views: The preprocessing: CIFAR-10's.
    batch_sizes: Unlabelled and labelled examples in a batch; 0 if not used.
    num_steps: Steps in a call.
    num_epochs: Passes in a call: one, but each episode is a pass of its own.
  """

  def __init__(self, args: argparse.Namespace):
    """Builds what the flags say."""
    self.entry = registry.REGISTRY[args.algorithm]
    # Where clients train; with labels at the server, if they can.
    scenario = args.scenario or self.entry.trains_clients[0]
    own = (
      {} if args.batch_size is None else {'client_batch_size': args.batch_size}
    )
    self.hparams = round_hparams_lib.RoundHparams(
      **{
        **self.entry.round_defaults,
        'scenario': scenario,
        'client_epochs': 1,
        **own,
      }
    )
    self.algorithm = self.entry.configure(None, self.hparams)
    cifar10 = data_names.DATA_SETS['cifar10']
    self.views = augment.build_views(
      _SHAPE, mean=cifar10.mean, std=cifar10.std, flip=True
    )
    streams = self.algorithm.streams()
    used = [batches.trains_on(streams, labeled=kind) for kind in (False, True)]
    sizes = self.hparams.client_batch_sizes(used[0])
    draws_episodes = batches.draws_episodes(streams)
    if draws_episodes:
      groups = streams[batches.own_stream(streams, labeled=True)].episode
      sizes = self.hparams.client_batch_size, _NUM_CLASSES * sum(groups)
    self.batch_sizes = tuple(
      n if is_used else 0 for n, is_used in zip(sizes, used)
    )
    self.num_steps = args.steps
    self.num_epochs = args.steps if draws_episodes else 1
    self._model = args.model

  def model_fn(self) -> tf.keras.Model:
    """The network."""
    return networks.build_network(self._model, _SHAPE, _NUM_CLASSES, 'bn')

  def examples(self, kind: int) -> base.Examples:
    """Noise for all steps; `kind` is 0 for unlabelled examples, else 1."""
    num = self.batch_sizes[kind] * self.num_steps
    images = np.random.default_rng(kind).integers(0, 256, [num, *_SHAPE], 'u1')
    labels = np.arange(num) % _NUM_CLASSES
    return base.Examples(tf.constant(images), tf.constant(labels, tf.int32))

  def cost(self) -> compute.Cost:
    """FLOPs of clients for an example."""
    stored = tf.TensorSpec([None, *_SHAPE], tf.uint8)
    return round_compute.measure(
      self.model_fn,
      self.algorithm,
      views=self.views,
      stored=stored,
    ).clients


def _with_prepared(algorithm, prepared):
  """The algorithm, for which everything is prepared, and without an end."""
  methods = {
    'prepare': lambda self, client: prepared,
    'finish': base.Algorithm.finish,
    'start': base.Algorithm.start,
  }
  cls = dataclasses.dataclass(frozen=True)(
    type('Prepared', (type(algorithm),), methods)
  )
  own = {
    field.name: getattr(algorithm, field.name)
    for field in dataclasses.fields(algorithm)
  }
  return cls(**own)


class Step:
  """The complete and the bare step of one network."""

  def __init__(self, task: Task, compute_dtype: str):
    """Builds both steps.

    Args:
      task: What is done.
      compute_dtype: The dtype that the network computes in.
    """
    algorithm = task.algorithm
    received, initial = self._receive(task, compute_dtype)
    self._num_steps = task.num_steps
    unlabeled, labeled = task.examples(0), task.examples(1)
    seed = tf.constant([0, 1])
    client = base.Client(
      self._networks,
      self._weights,
      labeled,
      unlabeled,
      received.values,
      task.views,
      tf.constant(1),
      seed,
    )
    self.reset()
    prepared = self._prepared(algorithm, client)
    feed = batches.Feed(
      algorithm.streams(),
      client,
      prepared,
      num_epochs=task.num_epochs,
      batch_sizes=task.batch_sizes,
      seed=seed,
      enabled=True,
    )
    self.steps_at_once = min(feed.steps_at_once, task.num_steps)
    self._views = views = tf.function(
      lambda: feed.batch(feed.ahead(tf.constant(0)), tf.constant(0)),
      autograph=False,
    )
    optimizer_of_clients = optimizers.client_optimizer(task.hparams)
    trained = training.LocalTraining(
      self._networks.model,
      _with_prepared(algorithm, prepared),
      task.views,
      training.LoopConfig(
        task.num_epochs,
        *(max(n, 1) for n in task.batch_sizes),
        optimizer_of_clients,
      ),
      self._networks.auxiliary,
      initial,
    )
    rate = tf.constant(0.03)
    self._complete = tf.function(
      lambda: (
        trained.run(
          received.weights,
          labeled,
          unlabeled,
          learning_rate=rate,
          seed=seed,
          received=received.values,
        ).num_examples
      ),
      autograph=False,
    )
    self._bare = self._build_bare(
      algorithm, views(), optimizer_of_clients, rate
    )

  def _receive(self, task, compute_dtype):
    """Makes the networks: (what a client receives, initial weights of peers).

    Sets the weights from which the networks start.
    """
    algorithm = task.algorithm
    hparams = dataclasses.replace(task.hparams, compute_dtype=compute_dtype)
    plan = plan_lib.build_plan(
      task.model_fn,
      dataclasses.replace(algorithm, round=hparams),
      plan_lib.DataSpec(
        clients.element_spec(_SHAPE), task.views, num_clients=1
      ),
      seed=0,
    )
    factory = plan.networks
    network, further, initial = factory.make_initial(), {}, {}
    for name, declared in algorithm.networks().items():
      if declared.build is None:
        further[name] = factory.make()
      else:
        further[name], initial[name] = factory.make_other(
          declared.build, network
        )
    self._networks = base.Networks(network, further)
    received = round_compute.receive(plan, network)
    more = {
      name: tf.fill(value.shape, _MOST_EXPENSIVE[name])
      for name, value in received.values.items()
      if name in _MOST_EXPENSIVE
    }
    received = received._replace(values={**received.values, **more})
    self._weights = algorithm.start(
      base.MODEL, received.weights, received.values
    )
    self._auxiliary_weights = {
      name: algorithm.start(
        name,
        initial[name]() if name in initial else self._weights,
        received.values,
      )
      for name in further
    }
    return received, initial

  def _prepared(self, algorithm, client):
    """What the algorithm prepares, but all examples are selected."""
    num = tf.shape(client.unlabeled.x)[0]
    prepared = tf.function(lambda: algorithm.prepare(client), autograph=False)()
    # Every other example passes a further test: no branch can be left out.
    passes = {
      name: tf.equal(tf.range(num) % 2, 0)
      for name, value in prepared.per_example.items()
      if value.dtype == tf.bool
    }
    return base.Prepared(
      tf.range(num),
      {**prepared.per_example, **passes},
      prepared.values,
    )

  def _build_bare(self, algorithm, batch, optimizer, rate):
    """The steps on one batch, and their updates."""
    slots = {
      name: optimizer.initialize(network)
      for name, network in self._networks.auxiliary.items()
    }
    model = self._networks.model
    own_slots = optimizer.initialize(model)

    def descend(name, gradients, rate_factor=1.0):
      is_model = name == base.MODEL
      optimizer.apply(
        model if is_model else self._networks[name],
        own_slots if is_model else slots[name],
        gradients,
        rate * rate_factor,
      )

    networks = dataclasses.replace(self._networks, descend=descend)

    @tf.function(autograph=False)
    def bare():
      result = algorithm.step(networks, batch)
      if result.gradients is not None:
        descend(base.MODEL, result.gradients)
      algorithm.after_step(networks, batch)

    return bare

  def complete(self) -> None:
    """Runs the steps in the loop."""
    self._complete().numpy()

  def bare(self) -> None:
    """Runs the steps one by one."""
    for _ in range(self._num_steps):
      self._bare()

  def views(self) -> None:
    """Gathers batches and makes their views, as often as the loop does."""
    self._views()

  def reset(self) -> None:
    """Restores untrained weights, so that nothing overflows."""
    self._networks.model.assign(self._weights)
    for name, weights in self._auxiliary_weights.items():
      self._networks[name].assign(weights)


def print_forward_equivalents(task: Task, cost: compute.Cost) -> float:
  """Prints them for each kind of example.

  Args:
    task: What is done.
    cost: What is spent.

  Returns:
    The most FLOPs of a step.
  """
  kinds = (('unlabelled', cost.unlabeled), ('labelled', cost.labeled))
  print('forward-equivalents')
  spent = 0.0
  for size, (kind, each) in zip(task.batch_sizes, kinds):
    if size:
      spent += size * each.most
      name = f'{kind} example'
      print(f'  {name:<23}{each.most / cost.forward:.2f}, at most')
  return spent


def main(argv: Sequence[str] | None = None) -> None:
  """Measures and prints.

  Args:
    argv: The arguments; those of the process by default.
  """
  parser = argparse.ArgumentParser(description=__doc__.split('\n\n')[0])
  parser.add_argument('--algorithm', default='fl2', choices=registry.REGISTRY)
  parser.add_argument(
    '--scenario',
    choices=(
      round_hparams_lib.LABELS_AT_SERVER,
      round_hparams_lib.LABELS_AT_CLIENTS,
    ),
  )
  parser.add_argument('--model', default='wrn28_2', choices=_MODELS)
  parser.add_argument('--batch_size', type=int, help="default: the paper's")
  parser.add_argument(
    '--bfloat16', action='store_true', help='compare with --compute_dtype'
  )
  parser.add_argument(
    '--steps', type=int, default=8, help='steps in a repetition'
  )
  parser.add_argument('--repetitions', type=int, default=5)
  args = parser.parse_args(argv)
  task = Task(args)
  if task.hparams.scenario not in task.entry.trains_clients:
    parser.error(f'clients of {args.algorithm} do not train in this scenario')
  print(
    f'{args.algorithm}, {task.hparams.scenario}; {args.model}, batch of'
    f' {" + ".join(str(n) for n in task.batch_sizes if n)}'
  )
  flops = print_forward_equivalents(task, task.cost())

  step = Step(task, 'float32')
  steps = [step]
  runs = {'complete': step.complete, 'bare': step.bare, 'views': step.views}
  if args.bfloat16:
    steps.append(Step(task, 'bfloat16'))
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
  print(f'matrix peak              {peak / 1e9:.0f} GFLOP/s')
  print(f'complete step            {complete_step * 1e3:.1f} ms')
  print(f'  of the matrix peak     {flops / complete_step / peak:.2f}')
  print(f'bare step                {bare_step * 1e3:.1f} ms')
  print(f'  bare / complete        {bare_step / complete_step:.2f}')
  views_step = median['views'] / step.steps_at_once
  print(
    f'views and gathering      {views_step * 1e3:.2f} ms,'
    f' {views_step / complete_step:.1%} of the complete step'
    f' ({step.steps_at_once} steps at once)'
  )
  if args.bfloat16:
    bfloat16_step = median['bfloat16'] / args.steps
    print(f'complete, bfloat16       {bfloat16_step * 1e3:.1f} ms')
    print(f'  float32 / bfloat16     {complete_step / bfloat16_step:.2f}')


if __name__ == '__main__':
  main()
