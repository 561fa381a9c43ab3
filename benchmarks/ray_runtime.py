"""Compares rounds on a Ray cluster of this machine with rounds in process.

    python benchmarks/ray_runtime.py [--sections=rounds,driver,memory]

- rounds: medians of interleaved (FL)^2 rounds, in_process and with as many
  workers as --num_workers, and their ratio. Clients' data are made by a recipe,
  so that no image travels.
- driver: clients that only sleep and send a model back, from workers that are
  never the bound: the driver's own seconds for each client, and from them how
  many clients a second it can serve.
- memory: resident memory of driver and workers over --num_rounds rounds.
"""

import argparse
import dataclasses
import functools
import os
import pathlib
import sys
import time
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / 'tools'))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import numpy as np
import round as round_lib

from tff_fssl import runtime
from tff_fssl.lazy import tf, tff

_SECTIONS = ('rounds', 'driver', 'memory')
# Weights of `cnn` and of WRN-28-2.
_SIZES = (187_114, 1_467_610)


class Cohort(list):
  """Clients that a recipe makes."""

  def __init__(self, recipe: Any, count: int):
    """Makes a cohort of `count` clients; in process, they are made alike."""
    make = recipe.load(lambda _: None)
    super().__init__(functools.partial(make, index) for index in range(count))
    self.recipe = recipe

  def arguments_of(self, index: int) -> tuple[int]:
    """The recipe's arguments for a client."""
    return (index,)


@dataclasses.dataclass(frozen=True)
class Images:
  """The recipe of clients with random images."""

  num_clients: int
  num_images: int

  def load(self, report):
    """Makes all clients' images, as a data set would be loaded."""
    del report
    _, cohort = round_lib.make_data(self.num_clients, self.num_images)
    return lambda index: tf.data.Dataset.from_tensors(cohort[index])


@dataclasses.dataclass(frozen=True)
class Sleepers:
  """The recipe of clients that only sleep."""

  seconds: float

  def load(self, report):
    """Sleeps for each client."""
    del report

    def make(index):
      time.sleep(self.seconds)
      return np.float32(index)

    return make


def rounds(args, model, num_images) -> None:
  """Compares rounds."""
  server, _ = round_lib.make_data(1, 1)
  process, *_ = round_lib.build_process(model, server)
  cohort = Cohort(Images(args.num_clients, num_images), args.num_clients)
  contexts = {
    'in_process': runtime.build_context(),
    'in_process, groups of 1': runtime.build_context(
      runtime.Settings(clients_per_group=1)
    ),
    'ray': runtime.build_context(
      runtime.Settings('ray', ray_workers=args.num_workers)
    ),
  }
  tff.framework.set_default_context(contexts['in_process'])
  state = process.initialize()

  def run(context):
    tff.framework.set_default_context(context)
    return process.next(state, cohort)

  runs = {
    name: functools.partial(run, context) for name, context in contexts.items()
  }
  while len(contexts['ray'].pool.names) < args.num_workers:
    runs['ray']()
  median = round_lib.median_seconds(runs, args.repetitions)
  results = [runs[name]() for name in list(runs)[1:]]
  weights = [tf.nest.flatten(r.state.global_model_weights) for r in results]
  same = all(np.array_equal(a, b) for a, b in zip(*weights, strict=True))
  print(
    f'{model}, {args.num_clients} clients of {num_images} images, 1 epoch,'
    f' {args.num_workers} workers'
  )
  for name, value in median.items():
    ratio = value / median['in_process']
    print(f'  {name:24} {value:6.2f} s   {ratio:.2f} of in_process')
  print(f'  ray equals in_process with groups of 1, to the bit: {same}')
  contexts['ray'].close()


def driver(args) -> None:
  """Measures what a client costs the driver."""
  for size in _SIZES:

    @tff.tensorflow.computation(np.float32, tff.TensorType(np.float32, [size]))
    def work(x, model):
      return model + x

    @tff.federated_computation(
      tff.FederatedType(tff.TensorType(np.float32, [size]), tff.SERVER),
      tff.FederatedType(np.float32, tff.CLIENTS),
    )
    def mean(model, x):
      at_clients = tff.federated_broadcast(model)
      # Traced at once, so that `work` is this size's.
      return tff.federated_mean(tff.federated_map(work, (x, at_clients)))

    settings = runtime.Settings('ray', ray_workers=args.sleeping_workers)
    with runtime.build_context(settings) as context:
      model = np.zeros(size, np.float32)
      while len(context.pool.names) < args.sleeping_workers:
        context.invoke(mean, (model, Cohort(Sleepers(0.0), 1)))
      count = 8 * args.sleeping_workers
      cohort = Cohort(Sleepers(args.sleep), count)
      context.invoke(mean, (model, cohort))  # Each worker compiles.
      wall, cpu = time.monotonic(), time.process_time()
      context.invoke(mean, (model, cohort))
      wall, cpu = time.monotonic() - wall, time.process_time() - cpu
      ideal = count * args.sleep / args.sleeping_workers
      print(
        f'{size:,} weights, {args.sleeping_workers} workers, {count} clients'
        f' that sleep {args.sleep:g} s: {wall:.2f} s (sleeping alone:'
        f' {ideal:.2f} s); driver {1000 * cpu / count:.1f} ms of CPU a client:'
        f' at most {count / cpu:.0f} clients a second'
      )


def memory(args) -> None:
  """Follows resident memory."""
  server, _ = round_lib.make_data(1, 1)
  process, *_ = round_lib.build_process('cnn', server)
  cohort = Cohort(Images(4, 40), 4)
  settings = runtime.Settings('ray', ray_workers=args.num_workers)
  with runtime.build_context(settings) as context:
    tff.framework.set_default_context(context)
    state = process.initialize()
    print(f'cnn, 4 clients of 40 images, {args.num_workers} workers, MB:')
    for number in range(1, args.num_rounds + 1):
      state = process.next(state, cohort).state
      if number in (10, 20, args.num_rounds // 2, args.num_rounds):
        workers = [
          _resident(int(name.rpartition('process ')[2].rstrip(')')))
          for name in sorted(context.pool.names)
        ]
        shown = ', '.join(f'{value:.0f}' for value in workers)
        print(
          f'  round {number:4}: driver {_resident(os.getpid()):.0f},'
          f' workers {shown}'
        )


def _resident(pid: int) -> float:
  """Resident memory of a process, in MB."""
  pages = pathlib.Path(f'/proc/{pid}/statm').read_text().split()[1]
  return int(pages) * os.sysconf('SC_PAGE_SIZE') / 1e6


def main() -> None:
  """Measures and prints."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawTextHelpFormatter
  )
  parser.add_argument('--sections', default=','.join(_SECTIONS))
  parser.add_argument('--num_workers', type=int, default=2)
  parser.add_argument('--num_clients', type=int, default=10)
  parser.add_argument('--repetitions', type=int, default=5)
  parser.add_argument('--sleeping_workers', type=int, default=16)
  parser.add_argument('--sleep', type=float, default=2.0, help='seconds')
  parser.add_argument('--num_rounds', type=int, default=200)
  args = parser.parse_args()
  for section in args.sections.split(','):
    if section not in _SECTIONS:
      parser.error(f'--sections={section}: allowed are {", ".join(_SECTIONS)}')
    if section == 'rounds':
      rounds(args, 'cnn', 500)
      rounds(args, 'wrn28_2', 64)
    elif section == 'driver':
      driver(args)
    else:
      memory(args)
    sys.stdout.flush()


if __name__ == '__main__':
  main()
