"""What a fifth of the clients can do to (FL)^2 on digits by lying.

    python benchmarks/lies.py [--seeds=0] [--flags="--total_rounds=60"]

Repeats the quick start (20 clients, 5 per round), but clients 0 to 3 lie in
every round in which they take part, so that a quarter of the cohorts have two
or more liars. Prints the test accuracy after the last round for each lie,
aggregator and norm, and how many points it differs from the honest run.
"""

import argparse
import os
import pathlib
import shlex
import subprocess
import sys

os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')
_ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(_ROOT))

_LIARS = range(4)
_MARK = -77  # First half of a liar's seed, which makes the client's code lie.
_LIES = {
  'honest': 'nobody lies',
  'flip': 'update times -1',
  'minus10': 'update times -10',
  'constant': 'update 1e30 everywhere',
  'large': 'update 1e11 everywhere',
  'weight': 'update times -1, weight 1',
  'statistics': 'batch norm sums of absurd moments',
  'counts': '100,000 examples',
  'all': 'update times -10, weight 1, absurd moments',
}
_AGGREGATORS = ('mean', 'robust')
_NORMS = ('sbn', 'gn')


def _lie(name: str) -> None:
  """Makes clients lie if their seed is marked."""
  import numpy as np
  import tensorflow as tf

  from tff_fssl.data import clients
  from tff_fssl.rounds import client_work
  from tff_fssl.rounds import statistics_phase

  honest_seed = clients.client_seed
  honest_train = client_work.ClientPart.train
  honest_sums = statistics_phase.client_sums

  def client_seed(seed, round_num, client_id):
    pair = honest_seed(seed, round_num, client_id)
    if client_id in _LIARS:
      pair = np.array([_MARK, pair[1]], np.int32)
    return pair

  def lies_if(data, lie, truth):
    return tf.where(tf.equal(data['seed'][0], _MARK), lie, truth)

  def train(part, local, received, data, *args, **kwargs):
    result, finite = honest_train(part, local, received, data, *args, **kwargs)
    factor = {'flip': -1.0, 'weight': -1.0, 'minus10': -10.0, 'all': -10.0}
    update = result.update
    if name in factor:
      update = [lies_if(data, factor[name] * u, u) for u in update]
    if name in ('constant', 'large'):
      value = {'constant': 1e30, 'large': 1e11}[name]
      update = [lies_if(data, tf.fill(u.shape, value), u) for u in update]
    result = result._replace(update=tuple(update))
    if name in ('weight', 'all'):
      result = result._replace(weight=lies_if(data, 1.0, result.weight))
    if name == 'counts':
      result = result._replace(
        num_examples=lies_if(data, 1e5, result.num_examples)
      )
    return result, finite

  def client_sums(network, weights, data, **options):
    sums = honest_sums(network, weights, data, **options)
    if name == 'counts':
      scale = lies_if(data, 1e5 / tf.maximum(sums.count, 1.0), 1.0)
      return tf.nest.map_structure(lambda t: scale * t, sums)
    if name not in ('statistics', 'all'):
      return sums
    mean, square = 1e4 * sums.count, 1e9 * sums.count
    return sums._replace(
      first=tuple(lies_if(data, tf.fill(f.shape, mean), f) for f in sums.first),
      second=tuple(
        lies_if(data, tf.fill(s.shape, square), s) for s in sums.second
      ),
    )

  clients.client_seed = client_seed
  client_work.ClientPart.train = train
  statistics_phase.client_sums = client_sums


def _run(name: str, argv: list[str]) -> str:
  """Trains; returns accuracy and number of rejected clients, as '93.1 2'."""
  import tensorflow_federated as tff

  from tff_fssl import runtime
  from tff_fssl.program.configuration import config as config_lib
  from tff_fssl.program.loop import experiment as experiment_lib
  from tff_fssl.program.reporting import managers

  if name != 'honest':
    _lie(name)
  config = config_lib.from_command_line(argv)
  tff.framework.set_default_context(runtime.build_context())
  task = experiment_lib.build_task(config)
  experiment = experiment_lib.build_experiment(task, '')
  state = experiment.process.initialize()
  iterator, rejected = experiment.data_source.iterator(), 0
  for _ in range(config.first_round, config.run.total_rounds + 1):
    state, metrics = experiment.process.next(state, iterator.select())
    metrics = managers.flatten(metrics)
    rejected += max(
      metrics['aggregator/num_rejected_clients'],
      metrics.get('last_phase/num_rejected_clients', 0),
    )
  accuracy = experiment.evaluate_fn(state)['test/accuracy']
  return f'{100 * accuracy:.1f} {rejected}'


def main() -> None:
  """Runs every cell in a process of its own, and prints the table."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('--seeds', type=int, nargs='+', default=[0])
  parser.add_argument('--flags', default='', help='more flags of train.py')
  parser.add_argument('--lie', choices=_LIES, help=argparse.SUPPRESS)
  options = parser.parse_args()
  if options.lie:
    print(_run(options.lie, shlex.split(options.flags)))
    return

  def cell(lie: str, norm: str, aggregator: str, seed: int) -> list[str]:
    flags = [
      f'--flagfile={_ROOT}/configs/quickstart.flags',
      f'--norm={norm}',
      f'--aggregator={aggregator}',
      f'--seed={seed}',
      options.flags,
    ]
    output = subprocess.run(
      [
        sys.executable,
        __file__,
        f'--lie={lie}',
        f'--flags={" ".join(flags)}',
      ],
      check=True,
      capture_output=True,
      text=True,
    ).stdout
    return output.split()

  columns = [(norm, a) for norm in _NORMS for a in _AGGREGATORS]
  print('| | ' + ' | '.join(f'{n}, {a}' for n, a in columns) + ' |')
  print('|---' * (len(columns) + 1) + '|')
  honest: dict[tuple[str, str], float] = {}
  for lie, meaning in _LIES.items():
    row = []
    for column in columns:
      results = [cell(lie, *column, seed) for seed in options.seeds]
      mean = sum(float(r[0]) for r in results) / len(results)
      rejected = sum(int(r[1]) for r in results) // len(results)
      honest.setdefault(column, mean)
      text = f'{mean:.1f}'
      if lie != 'honest':
        text += f' ({mean - honest[column]:+.1f})'
      row.append(text + (f', {rejected} rejected' if rejected else ''))
    print(f'| {meaning} | ' + ' | '.join(row) + ' |', flush=True)


if __name__ == '__main__':
  main()
