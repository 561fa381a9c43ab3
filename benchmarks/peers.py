"""A FedAvg round of pfl-research's CIFAR-10 comparison, in several systems.

    python benchmarks/peers.py [--rounds=20] [--peers=bare,ours,pfl,tff_worker]

IID, 1,000 users with 50 images each (random pixels), 50 users per round,
batches of 10, one epoch, plain SGD, a network of two convolutions with 1.63 M
weights (pfl's, without its dropout). Each peer is a process of its own; they
take turns, one round each:

*   bare: one `tf.function` call per user, in a loop, and an average. No data
    source, no metrics, no checkpoints.
*   ours: `supervised` under `program.training.train` as `programs/train.py`
    runs it: metrics to CSV files and a durable checkpoint every round.
*   tff_worker: the same process in TFF's worker.
*   pfl: pfl 0.6 on TensorFlow, without metrics and checkpoints. It is installed
    into a folder that belongs to this script.

Prints medians of a round's seconds, their ratios, and the floor: the round's
floating-point operations at the rate of TF's 2048 x 2048 product.
"""

import argparse
import asyncio
import functools
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / 'tools'))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import numpy as np
import timing

from tff_fssl.lazy import tf
from tff_fssl.program import training_types

_ROOT = pathlib.Path(__file__).resolve().parents[1]
_SHAPE, _NUM_CLASSES = (32, 32, 3), 10
_POPULATION, _USER_SIZE, _COHORT, _BATCH = 1_000, 50, 50, 10
_RATE = 0.1
_PEERS = ('bare', 'ours', 'tff_worker', 'pfl')
_PFL = ('pfl==0.6.0', 'multiprocess==0.70.19', 'prv-accountant==0.2.0', 'dill')


def build_model() -> tf.keras.Model:
  """The `simple_cnn` of pfl without dropout: images -> logits."""
  layers = tf.keras.layers
  return tf.keras.Sequential(
    [
      tf.keras.Input(_SHAPE),
      layers.Conv2D(32, 3, activation='relu'),
      layers.Conv2D(64, 3, activation='relu'),
      layers.MaxPooling2D(),
      layers.Flatten(),
      layers.Dense(128, activation='relu'),
      layers.Dense(_NUM_CLASSES),
    ]
  )


def round_flops() -> int:
  """FLOPs of a round, both passes: 3 x 2 x multiply-accumulates."""
  convolutions = 30 * 30 * 32 * 27 + 28 * 28 * 64 * 288
  dense = 14 * 14 * 64 * 128 + 128 * _NUM_CLASSES
  return 6 * (convolutions + dense) * _USER_SIZE * _COHORT


@functools.cache
def user_data(user: int) -> tuple[np.ndarray, np.ndarray]:
  """uint8 [50, 32, 32, 3] and int32 [50] of a user."""
  rng = np.random.default_rng(user)
  x = rng.integers(0, 256, [_USER_SIZE, *_SHAPE], np.uint8)
  return x, rng.integers(0, _NUM_CLASSES, _USER_SIZE).astype(np.int32)


def normalize(x):
  """Converts stored images to the network's inputs, float32."""
  return tf.cast(x, tf.float32) / 127.5 - 1.0


def run_bare(take_turn) -> None:
  """The round by hand."""
  model = build_model()
  variables = model.trainable_variables
  total = [tf.Variable(tf.zeros_like(v)) for v in variables]
  loss_fn = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)

  @tf.function
  def train_user(weights, x, y):
    for variable, value in zip(variables, weights):
      variable.assign(value)
    for start in tf.range(0, _USER_SIZE, _BATCH):
      images = normalize(x[start : start + _BATCH])
      with tf.GradientTape() as tape:
        loss = loss_fn(y[start : start + _BATCH], model(images, training=True))
      gradients = tape.gradient(loss, variables)
      for variable, gradient in zip(variables, gradients):
        variable.assign_sub(_RATE * gradient)
    for sum_, variable, value in zip(total, variables, weights):
      sum_.assign_add(variable - value)

  @tf.function
  def average(weights):
    new = [w + t / _COHORT for w, t in zip(weights, total)]
    for sum_ in total:
      sum_.assign(tf.zeros_like(sum_))
    return new

  weights = [tf.identity(v) for v in variables]
  rng = np.random.default_rng(0)
  while take_turn():
    for user in rng.choice(_POPULATION, _COHORT, replace=False):
      x, y = user_data(int(user))
      train_user(weights, tf.constant(x), tf.constant(y))
    weights = average(weights)
    weights[0].numpy()


def build_ours():
  """Our process of the round, and its clients."""
  # pylint: disable=import-outside-toplevel
  from tff_fssl.algorithms import supervised
  from tff_fssl.data import augment
  from tff_fssl.data import clients
  from tff_fssl.interface import round_hparams
  from tff_fssl.rounds import process as process_lib
  from tff_fssl.rounds import sampling

  # pfl's comparison has no augmentation.
  unchanged = lambda x, seed: normalize(x)
  rounds = round_hparams.RoundHparams(
    scenario=round_hparams.LABELS_AT_CLIENTS,
    client_epochs=1,
    client_batch_size=_BATCH,
    client_learning_rate=_RATE,
    momentum=0.0,
    nesterov=False,
    weight_decay=0.0,
    max_gradient_norm=0.0,
    server_optimizer_momentum=0.0,
  )
  process = process_lib.build_process(
    build_model,
    supervised.Supervised(round=rounds),
    process_lib.DataSpec(
      clients.element_spec(_SHAPE),
      augment.Views(normalize, unchanged, unchanged),
      num_classes=_NUM_CLASSES,
    ),
    seed=0,
  )
  source = sampling.build_data_source(
    process,
    lambda _, client_id: (user_data(client_id), None),
    seed=0,
    num_clients=_POPULATION,
    clients_per_round=_COHORT,
  )
  return process, source


class TakeTurns(training_types.Hooks):
  """Waits after each round for its next turn."""

  def __init__(self, take_turn, stop):
    """Initializes the hooks, which set `stop` after the last turn."""
    self._take_turn, self._stop = take_turn, stop

  def begin(self, *_):
    """Waits for the first turn."""
    if not self._take_turn():
      self._stop.set(1)

  def round_done(self, *_):
    """Waits for the next one."""
    self.begin()


def run_ours(take_turn, runtime_name: str) -> None:
  """The round as the training program runs it."""
  # pylint: disable=import-outside-toplevel
  import tensorflow_federated as tff

  from tff_fssl import runtime
  from tff_fssl.program import console
  from tff_fssl.program import csv_table
  from tff_fssl.program import training

  process, source = build_ours()
  stop = training_types.StopRequest()

  context = runtime.build_async_context(runtime.Settings(runtime_name))
  tff.framework.set_default_context(tff.program.NativeFederatedContext(context))
  with tempfile.TemporaryDirectory() as folder:
    asyncio.run(
      training.train(
        process,
        source,
        training_types.Settings(
          total_rounds=10**6, rounds_per_evaluation=10**6
        ),
        training.Outputs(
          training.DurableProgramStateManager(os.path.join(folder, 'states')),
          *(
            csv_table.CsvTable(os.path.join(folder, name))
            for name in ('train.csv', 'eval.csv', 'timing.csv')
          ),
        ),
        evaluate_fn=lambda state: {},
        reporter=console.Console('none', sys.stderr),
        stop=stop,
        hooks=TakeTurns(take_turn, stop),
      )
    )
  getattr(context, 'close', lambda: None)()


def run_pfl(take_turn) -> None:
  """The round as pfl's `FederatedAveraging` runs it."""
  # pylint: disable=import-outside-toplevel
  from pfl.aggregate.simulate import SimulatedBackend
  from pfl.algorithm.base import NNAlgorithmParams
  from pfl.algorithm.federated_averaging import FederatedAveraging
  from pfl.callback.base import TrainingProcessCallback
  from pfl.data.dataset import Dataset
  from pfl.data.federated_dataset import FederatedDataset
  from pfl.data.sampling import get_user_sampler
  from pfl.hyperparam.base import NNTrainHyperParams
  from pfl.metrics import Metrics
  from pfl.model.tensorflow import TFModel

  @functools.cache
  def make_user(user):
    x, y = user_data(user)
    return Dataset((normalize(x), tf.constant(y)), user_id=str(user))

  class TakeTurns(TrainingProcessCallback):
    """Waits after each round for its next turn."""

    def after_central_iteration(self, metrics, model, *, central_iteration):
      del metrics, model, central_iteration
      return not take_turn(), Metrics()

  model = build_model()
  model.compile(
    optimizer=tf.keras.optimizers.SGD(_RATE),
    loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
  )
  sampler = get_user_sampler('random', list(range(_POPULATION)))
  if take_turn():
    FederatedAveraging().run(
      NNAlgorithmParams(
        central_num_iterations=10**6,
        evaluation_frequency=10**9,
        train_cohort_size=_COHORT,
        val_cohort_size=0,
      ),
      SimulatedBackend(FederatedDataset(make_user, sampler), val_data=None),
      TFModel(model, {}, tf.keras.optimizers.SGD(1.0)),
      NNTrainHyperParams(
        local_num_epochs=1,
        local_learning_rate=_RATE,
        local_batch_size=_BATCH,
      ),
      callbacks=[TakeTurns()],
    )


class Peer:
  """A peer's process, which runs one round for each line that it is sent."""

  def __init__(self, python: str, name: str):
    """Starts the process.

    Args:
      python: The interpreter.
      name: One of `_PEERS`.
    """
    self._process = subprocess.Popen(
      [python, __file__, f'--run={name}'],
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      text=True,
    )
    self._read()  # Ready.

  def _read(self) -> tuple[float, float]:
    line = self._process.stdout.readline()
    if not line:
      raise SystemExit('a peer died; its message is above')
    wall, processor = line.split()
    return float(wall), float(processor)

  def run_round(self) -> tuple[float, float]:
    """Runs a round; returns wall seconds and the process's CPU seconds."""
    self._process.stdin.write('go\n')
    self._process.stdin.flush()
    return self._read()

  def close(self) -> None:
    """Ends it."""
    self._process.stdin.close()
    self._process.wait()


def run_peer(name: str) -> None:
  """The main function of a peer's process."""
  # Nothing else may write to the pipe.
  out = os.fdopen(os.dup(1), 'w', buffering=1)
  os.dup2(2, 1)
  start = time.perf_counter(), time.process_time()

  def take_turn() -> bool:
    nonlocal start
    wall, processor = start
    print(time.perf_counter() - wall, time.process_time() - processor, file=out)
    go_on = bool(sys.stdin.readline())
    start = time.perf_counter(), time.process_time()
    return go_on

  for user in range(_POPULATION):
    user_data(user)
  if name == 'bare':
    run_bare(take_turn)
  elif name == 'pfl':
    run_pfl(take_turn)
  else:
    run_ours(take_turn, 'in_process' if name == 'ours' else name)


def install_pfl(folder: pathlib.Path) -> str:
  """Makes pfl's environment, on top of this one; returns its interpreter."""
  python = folder / 'bin' / 'python'
  if not (folder / '.installed').exists():
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([sys.executable, '-m', 'venv', folder], check=True)
    pip = [python, '-m', 'pip', 'install', '--quiet', '--no-deps', *_PFL]
    subprocess.run(pip, check=True)
    (site,) = folder.glob('lib/python*/site-packages')
    outer = pathlib.Path(np.__file__).parent.parent
    (site / 'outer.pth').write_text(f'{outer}\n', encoding='utf-8')
    (folder / '.installed').touch()
  return str(python)


def main() -> None:
  """Measures and prints."""
  parser = argparse.ArgumentParser(description=__doc__.split('\n\n')[0])
  parser.add_argument('--rounds', type=int, default=20)
  parser.add_argument('--peers', default=','.join(_PEERS))
  parser.add_argument(
    '--pfl_environment', type=pathlib.Path, default=_ROOT / '.pfl'
  )
  parser.add_argument('--run', choices=_PEERS, help=argparse.SUPPRESS)
  args = parser.parse_args()
  if args.run:
    run_peer(args.run)
    return
  names = args.peers.split(',')
  if unknown := set(names) - set(_PEERS):
    parser.error(
      f'--peers: {", ".join(unknown)}; known are {", ".join(_PEERS)}'
    )
  peers = {}
  for name in names:
    python = sys.executable
    if name == 'pfl':
      python = install_pfl(args.pfl_environment)
    peers[name] = Peer(python, name)
    peers[name].run_round()  # Traces.
    peers[name].run_round()
  times = {name: [] for name in names}
  for _ in range(args.rounds):
    for name, peer in peers.items():
      times[name].append(peer.run_round())
  for peer in peers.values():
    peer.close()
  walls = {name: [wall for wall, _ in times[name]] for name in names}
  median = {name: statistics.median(walls[name]) for name in names}
  peak = timing.matrix_peak()
  print(f'seconds a round: median of {args.rounds} (least, most; processor)')
  print(f'{"floor":12} {round_flops() / peak:.2f}  at {peak / 1e9:.0f} GFLOP/s')
  for name in names:
    low, high = min(walls[name]), max(walls[name])
    processor = statistics.median(processor for _, processor in times[name])
    print(
      f'{name:12} {median[name]:.2f}  ({low:.2f}, {high:.2f}; {processor:.2f})'
    )
  for name in names:
    if 'ours' in names and name != 'ours':
      print(f'ours / {name:12} {median["ours"] / median[name]:.2f}')


if __name__ == '__main__':
  main()
