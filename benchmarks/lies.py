"""Measures what lying clients can do to each algorithm, on digits.

    python benchmarks/lies.py [--algorithms supervised fedmatch ...]
      [--aggregators mean robust] [--lies bias ...] [--num_liars=4]
      [--clients_per_round=5] [--total_rounds=60] [--seeds 0 ...] [--flags=...]

Trains on the quick start's data and network (20 clients), with labels at the
clients where the algorithm allows it. Clients 0 to `num_liars` - 1 lie in every
round in which they take part: with 4 liars and 5 clients a round, a quarter of
the cohorts have two liars or more. Prints a row for each algorithm and
aggregator: the test accuracy after the last round when nobody lies, and by how
many points each lie changes it.
"""

import argparse
import collections
import os
import pathlib
import shlex
import subprocess
import sys

os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')
_ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(_ROOT))

# The first half of a liar's seed is _MARK - i for the i-th of _LIES.
_MARK = -77_000
_LIES = {
  'honest': 'nobody lies',
  'silent': 'liars weigh nothing: what no aggregator can make up for',
  'flip': 'update times -1, at the largest weight',
  'minus6': 'update times -6',
  'minus10': 'update times -10',
  'bias': "six times the update's norm, all for the bias of the first class",
  'sign': 'minus the sign of the update, of six times its norm',
  'large': 'update 1e11 everywhere',
  'constant': 'update 1e30 everywhere',
  'alone': 'update times -6, the largest weight even without any example',
  'drag': 'rows for others: right for the first class, else 1e6 or times -6',
  'permute': 'rows for others: those of class k for class k + 1',
  'signals': 'reports: the largest value that is allowed',
  'counts': '100,000 examples',
  'statistics': 'batch norm sums of absurd moments',
  'all': 'update times -10, the largest weight, absurd moments',
}
# The quick start's rates, batches and clipping for all:
# docs/results/robustness.md.
_TEACHER = (
  '--max_gradient_norm=1 --proximal_strength=0 --server_optimizer_momentum=0.5'
)
_FLAGS = {
  'supervised': '',
  'fixmatch': '',
  'uda': '--uda.tsa=exp --uda.tsa_rounds={rounds}',
  'mixmatch': '--mixmatch.ramp_rounds={rounds}',
  'semifl': '--client_batch_size=32 --learning_rate_schedule=constant'
  ' --num_pretraining_rounds=10',
  'fl2': '',
  'fedswitch': f'{_TEACHER} --fedswitch.ema_decay=0.68',
  'ts_server_ema': f'{_TEACHER} --fedswitch.ema_decay=0.68',
  'ts_client_ema': f'{_TEACHER} --fedswitch.ema_decay=0.97',
  'fedcon': '--client_batch_size=32 --max_gradient_norm=1 --momentum=0.9'
  ' --nesterov --server_learning_rate=0.03 --server_optimizer_momentum=0.5'
  ' --weight_decay=0.0005 --server_epochs=5 --num_pretraining_rounds=10',
  'fedrgd': '--client_batch_size=32 --max_gradient_norm=1'
  ' --server_optimizer_momentum=0.5 --weight_decay=0.0005'
  ' --client_labeled_batch_size=10 --fedrgd.num_groups=1',
  'fedmatch': '--client_batch_size=32 --client_learning_rate=0.03'
  ' --max_gradient_norm=1 --momentum=0.9 --server_optimizer_momentum=0.5'
  ' --weight_decay=0.0005',
  'protofssl': '',
}
_AT_SERVER = ('semifl', 'fedcon')
# The least that lets an algorithm train: two labels of each class.
_NUM_LABELS = collections.defaultdict(lambda: 10, protofssl=20)


def _argv(options: argparse.Namespace, algorithm: str, aggregator: str):
  """The flags of a row."""
  flags = [
    f'--flagfile={_ROOT}/configs/quickstart.flags',
    f'--algorithm={algorithm}',
    f'--aggregator={aggregator}',
    f'--clients_per_round={options.clients_per_round}',
    f'--total_rounds={options.total_rounds}',
  ]
  if algorithm not in _AT_SERVER:
    flags += [
      '--scenario=labels_at_clients',
      f'--num_labels={_NUM_LABELS[algorithm]}',
    ]
  flags += _FLAGS[algorithm].format(rounds=options.total_rounds).split()
  return flags + shlex.split(options.flags)


def _is_lie(data, *names):
  """Whether a client's mark stands for one of these lies: bool scalar."""
  import tensorflow as tf

  lie = _MARK - data['seed'][0]
  order = list(_LIES)
  return tf.reduce_any([tf.equal(lie, order.index(name)) for name in names])


def _false_update(data, update, like, bias_index):
  """Makes what a client sends in place of an update, or of a part of it.

  Args:
    data: The client's element.
    update: The tensors.
    like: All tensors that travel, by whose norm lies are scaled.
    bias_index: The tensor that the lie `bias` is about; None: it is not here.

  Returns:
    The tensors.
  """
  import tensorflow as tf

  norm = tf.linalg.global_norm(like)
  sign = 6.0 * norm / float(sum(t.shape.num_elements() for t in like)) ** 0.5
  bias = [tf.zeros_like(t) for t in update]
  if bias_index is not None:
    first = tf.one_hot(0, tf.size(update[bias_index]))
    shape = update[bias_index].shape
    bias[bias_index] = tf.reshape(-6.0 * norm * first, shape)
  made = {
    ('flip',): [-t for t in update],
    ('minus6', 'alone'): [-6.0 * t for t in update],
    ('minus10', 'all'): [-10.0 * t for t in update],
    ('bias',): bias,
    ('sign',): [-sign * tf.sign(t) for t in update],
    ('large',): [tf.fill(t.shape, 1e11) for t in update],
    ('constant',): [tf.fill(t.shape, 1e30) for t in update],
  }
  for names, values in made.items():
    is_lie = _is_lie(data, *names)
    update = [tf.where(is_lie, v, u) for v, u in zip(values, update)]
  return tuple(update)


def _false_row(data, row, num_classes):
  """Makes what a client sends for others in place of its row."""
  import tensorflow as tf

  made = dict(row)
  for name, value in row.items():
    if value.dtype.is_floating and value.shape.rank and name != 'embedding':
      if name == 'counts':
        continue
      dragged = -6.0 * value
      if name in ('prototypes', 'sums'):
        others = tf.range(num_classes)[:, tf.newaxis] > 0
        dragged = tf.where(others, 1e6, value)
      rolled = tf.roll(value, 1, axis=0)
      value = tf.where(_is_lie(data, 'drag'), dragged, value)
      made[name] = tf.where(_is_lie(data, 'permute'), rolled, value)
  if 'exists' in row:
    made['exists'] = tf.logical_or(row['exists'], _is_lie(data, 'drag'))
  return made


def _false_result(data, result, num_classes):
  """Makes what a client sends in place of the result of its training."""
  import tensorflow as tf

  claims, silent = (
    _is_lie(data, 'flip', 'alone', 'all'),
    _is_lie(data, 'silent'),
  )
  # Without any, a client would weigh nothing.
  num_examples = tf.where(
    claims, tf.maximum(result.num_examples, 1.0), result.num_examples
  )
  num_examples = tf.where(_is_lie(data, 'counts'), 1e5, num_examples)
  num_examples = tf.where(silent, 0.0, num_examples)
  weight = result.weight
  if weight is not None:
    weight = tf.where(silent, 0.0, tf.where(claims, 1.0, weight))
  most = tf.math.log(float(num_classes))
  uploads = _false_row(data, result.uploads, num_classes)
  # Numbers are reports, of which the server gets means.
  uploads |= {
    name: tf.where(_is_lie(data, 'signals'), most, value)
    for name, value in result.uploads.items()
    if value.dtype.is_floating and not value.shape.rank
  }
  like = tf.nest.flatten((result.update, result.auxiliary))
  bias_index = max(
    (i for i, t in enumerate(result.update) if t.shape == [num_classes]),
    default=len(result.update) - 1,
  )
  auxiliary = {
    name: _false_update(data, update, like, None)
    for name, update in result.auxiliary.items()
  }
  return result._replace(
    update=_false_update(data, result.update, like, bias_index),
    auxiliary=auxiliary,
    num_examples=num_examples,
    weight=weight,
    uploads=uploads,
  )


def _false_sums(data, sums):
  """Makes what a client sends in place of its sums for batch norm."""
  import tensorflow as tf

  most = 1e5 / tf.maximum(sums.count, 1.0)
  scale = tf.where(_is_lie(data, 'counts'), most, 1.0)
  sums = tf.nest.map_structure(lambda t: scale * t, sums)
  absurd = _is_lie(data, 'statistics', 'all')
  mean, square = 1e4 * sums.count, 1e9 * sums.count
  return sums._replace(
    first=tuple(tf.where(absurd, mean, f) for f in sums.first),
    second=tuple(tf.where(absurd, square, s) for s in sums.second),
  )


def _let_clients_lie(num_classes: int) -> None:
  """Makes clients lie if their seed is marked, each as the mark says."""
  from tff_fssl.rounds import client_work
  from tff_fssl.rounds import statistics_phase

  honest_train = client_work.train
  honest_sums = statistics_phase.client_sums

  def train(plan, local, received, data, *args, **kwargs):
    result, finite = honest_train(plan, local, received, data, *args, **kwargs)
    return _false_result(data, result, num_classes), finite

  def client_sums(network, weights, data, **options):
    return _false_sums(data, honest_sums(network, weights, data, **options))

  client_work.train = train
  statistics_phase.client_sums = client_sums


def _run(argv: list[str], lies: list[str], num_liars: int) -> None:
  """Trains with each lie; prints 'LIE ACCURACY NUM_REJECTED' lines."""
  import numpy as np
  import tensorflow_federated as tff

  from tff_fssl import runtime
  from tff_fssl.data import clients
  from tff_fssl.program import config as config_lib
  from tff_fssl.program import experiment as experiment_lib
  from tff_fssl.program import training

  config = config_lib.parse_config(argv)
  tff.framework.set_default_context(runtime.build_context())
  task = experiment_lib.build_task(config)
  _let_clients_lie(task.data.num_classes)
  mark = _MARK
  honest_seed = clients.client_seed

  def client_seed(seed, round_num, client_id):
    pair = honest_seed(seed, round_num, client_id)
    if client_id < num_liars and mark != _MARK:
      pair = np.array([mark, pair[1]], np.int32)
    return pair

  clients.client_seed = client_seed
  experiment = experiment_lib.build_experiment(task, '')
  process = experiment.process
  start, iterator = process.initialize(), experiment.data_source.iterator()
  for _ in range(config.first_round, 1):
    start, _ = process.next(start, iterator.select())
  for lie in lies:
    mark = _MARK - list(_LIES).index(lie)
    state, iterator, rejected = start, experiment.data_source.iterator(), 0
    for round_num in range(config.first_round, config.run.total_rounds + 1):
      cohort = iterator.select()
      if round_num < 1:
        continue
      state, metrics = process.next(state, cohort)
      metrics = training.flatten(metrics)
      rejected += max(
        metrics['aggregator/num_rejected_clients'],
        metrics.get('last_phase/num_rejected_clients', 0),
      )
    accuracy = experiment.evaluate_fn(state)['test/accuracy']
    print(f'{lie} {100 * accuracy:.4f} {rejected}', flush=True)


def _applies(lie: str, algorithm: str, argv: list[str]) -> bool:
  """Whether a lie is about something that the algorithm's clients send."""
  has_static = '--norm=gn' not in argv and algorithm not in (
    'fedrgd',
    'fedmatch',
  )
  return {
    'drag': algorithm in ('fedmatch', 'protofssl'),
    'permute': algorithm == 'protofssl',
    'signals': algorithm == 'fedswitch',
    'alone': algorithm == 'semifl',
    'statistics': has_static,
    'all': has_static,
  }.get(lie, True)


def main() -> None:
  """Runs each row in a process of its own, and prints the table."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  add = parser.add_argument
  add('--algorithms', nargs='+', default=list(_FLAGS), choices=_FLAGS)
  add('--aggregators', nargs='+', default=['mean', 'robust'])
  add('--lies', nargs='+', default=list(_LIES)[1:], choices=_LIES)
  add('--num_liars', type=int, default=4)
  add('--clients_per_round', type=int, default=5)
  add('--total_rounds', type=int, default=60)
  add('--seeds', type=int, nargs='+', default=[0])
  add('--flags', default='', help='more flags of train.py')
  add('--argv', help=argparse.SUPPRESS)
  options = parser.parse_args()
  if options.argv is not None:
    _run(shlex.split(options.argv), options.lies, options.num_liars)
    return

  for lie in options.lies:
    print(f'{lie}: {_LIES[lie]}')
  columns = ['honest', *(n for n in options.lies if n != 'honest')]
  print('\n| | aggregator | ' + ' | '.join(columns) + ' |')
  print('|---' * (len(columns) + 2) + '|', flush=True)
  for algorithm in options.algorithms:
    for aggregator in options.aggregators:
      found = collections.defaultdict(list)
      argv = _argv(options, algorithm, aggregator)
      lies = [n for n in columns if _applies(n, algorithm, argv)]
      for seed in options.seeds:
        command = [sys.executable, __file__, f'--num_liars={options.num_liars}']
        command += ['--argv', shlex.join([*argv, f'--seed={seed}']), '--lies']
        with subprocess.Popen(
          [*command, *lies], stdout=subprocess.PIPE, text=True
        ) as process:
          assert process.stdout is not None
          lines = []
          for line in process.stdout:
            lines.append(line)
            print(
              f'{algorithm}, {aggregator}, {seed}: {line}',
              end='',
              file=sys.stderr,
            )
        if process.returncode:
          sys.exit(process.returncode)
        for line in lines:
          lie, *figures = line.split()
          found[lie].append([float(f) for f in figures])
      cells = []
      for lie in columns:
        if lie not in found:
          cells.append('')
          continue
        accuracy, rejected = (
          sum(column) / len(options.seeds) for column in zip(*found[lie])
        )
        if lie == 'honest':
          honest = accuracy
          cells.append(f'{accuracy:.1f}')
          continue
        mark = ' (rejected)' if rejected else ''
        cells.append(f'{accuracy - honest:+.1f}{mark}')
      print(f'| {algorithm} | {aggregator} | ' + ' | '.join(cells) + ' |')
      sys.stdout.flush()


if __name__ == '__main__':
  main()
