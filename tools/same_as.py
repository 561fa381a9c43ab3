"""Compares what this tree computes with what another commit computes.

  python tools/same_as.py COMMIT [--only PATTERN] [--jobs N] [--keep FOLDER]
  python tools/same_as.py COMMIT --python PYTHON [--tolerance T] ...

Runs `programs/train.py` in both trees on a few digits: every algorithm in every
scenario, with and without static batch norm, further hyper-parameters,
aggregators and runtimes, and resumption in the middle. Compares, to the bit:
the tables by column, the partition, each leaf of the last checkpoint, and the
exported model's predictions for the test set. Prints a line for each case, and
exits with 1 if one differs. A maintainer runs it before a release, and after
each step of a change that is to keep results.

With --python, the other tree runs in another environment, of which this is the
Python: with another TensorFlow, say. Results are then equal but for rounding,
so each case runs one round (after those of pre-training), of a network whose
initial weights NumPy draws. Prints for each case the largest difference among
weights and other leaves, predictions and metrics, and where it is. Differences
are relative to the largest magnitude in the same leaf or column.

Figures of COMMIT are kept in FOLDER, so that they are computed once. The names
in `_RENAMED` may differ between the trees, and those in `_GONE` be missing.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from concurrent import futures
import csv
import hashlib
import io
import itertools
import os
import pathlib
import re
import shlex
import subprocess
import sys
import tempfile
from typing import Any, NamedTuple

import numpy as np

_ROOT = pathlib.Path(__file__).resolve().parents[1]
# (pattern of the older name, the newer name): leaves, columns and flags.
_RENAMED = (
  (r'sets/divergences/(\w+_divergence)', r'sets/\1'),
  (r'--fedmatch\.uploads=', '--fedmatch.uploads_in='),
  (r'--fl2.gradient_norms=true --fl2.class_thresholds', '--fl2.diagnostics'),
  (r'--local_(uda|fixmatch)\.', r'--\1.'),
  (r'--ts_(server|client)_ema\.', '--fedswitch.'),
  (r'labeler=farthest --fedswitch.teacher_probe=\w+', 'labeler=algorithms'),
  (
    r'distributor/table/(shares|mean_app_u|prior|(features|proxies)_\w+'
    r'|exists|prototypes)$',
    r'global_model_weights/control/\1',
  ),
  (r'distributor/table/sent/', 'global_model_weights/control/sent_'),
  (r'sets/(exists|prototypes)$', r'control/\1'),
)
# Columns and leaves that only one of the trees may have.
_GONE = r'exchange/num_(disputed_)?rows$|distributor/round_num$'
_SERVER, _CLIENTS = 'labels_at_server', 'labels_at_clients'
_COMMON = (
  '--dataset=digits --model=cnn --num_clients=8 --clients_per_round=4'
  ' --client_epochs=1 --total_rounds=3 --rounds_per_evaluation=1'
  ' --num_validation=40 --client_batch_size=50 --tensorboard=false'
  ' --progress=none'
)
_LABELS = {
  _SERVER: '--num_labels=40 --server_epochs=1',
  _CLIENTS: '--num_labels=20',
}
# Thresholds that a network reaches which has hardly been trained.
_LOW = (
  'fixmatch uda semifl fedswitch ts_server_ema ts_client_ema fedrgd sage'
  ' proxyfl'
)
_OWN = {
  **{name: f'--{name}.confidence_threshold=0.2' for name in _LOW.split()},
  'fl2': '--fl2.confidence_threshold=0.2',
  'cbafed': '--cbafed.threshold_base=0.2 --cbafed.warmup_rounds=1',
  'feddb': '--feddb.confidence_threshold=0.2',
  'feddure': (
    '--feddure.confidence_threshold=0.2 --feddure.finetuning_steps=1'
    ' --client_steps=0'
  ),
  'fedcon': '--fedcon.hidden_size=8',
  'fedmatch': '--fedmatch.confidence_threshold=0.2',
  'local_uda': '--local_uda.confidence_threshold=0.2',
  'local_fixmatch': '--local_fixmatch.confidence_threshold=0.2',
}
_SCENARIOS = {
  **dict.fromkeys(('semifl', 'fedcon'), (_SERVER,)),
  **dict.fromkeys(
    (
      'cbafed',
      'feddb',
      'feddure',
      'protofssl',
      'proxyfl',
      'local_supervised',
      'local_uda',
      'local_fixmatch',
    ),
    (_CLIENTS,),
  ),
}
_ALGORITHMS = (
  'supervised fixmatch freematch uda mixmatch semifl fl2 fedswitch'
  ' ts_server_ema ts_client_ema fedcon fedrgd protofssl fedmatch sage proxyfl'
  ' cbafed feddb feddure'
  ' local_supervised local_uda local_fixmatch'
).split()
# (algorithm, scenario, further flags).
_FURTHER = (
  (
    'fl2',
    _SERVER,
    '--fl2.pseudo_labels=per_step --fl2.gradient_norms=true'
    ' --fl2.class_thresholds=true',
  ),
  ('fl2', _CLIENTS, '--fl2.consistency=sam --fl2.adaptive_threshold=false'),
  (
    'fedmatch',
    _SERVER,
    '--fedmatch.helper_interval=1 --fedmatch.helpers=past'
    ' --fedmatch.evaluate_sets=true',
  ),
  (
    'fedmatch',
    _CLIENTS,
    '--fedmatch.helper_interval=1 --fedmatch.decomposition=false',
  ),
  ('fedmatch', _CLIENTS, '--fedmatch.remembered_clients=0'),
  (
    'fedmatch',
    _CLIENTS,
    '--fedmatch.helper_interval=1 --fedmatch.uploads=files',
  ),
  ('fedcon', _SERVER, '--fedcon.client_state=table'),
  ('fedrgd', _CLIENTS, '--fedrgd.pseudo_labels=each_view'),
  ('fedrgd', _SERVER, '--fedrgd.mode=two_level_mean --fedrgd.grouping=random'),
  ('protofssl', _CLIENTS, '--protofssl.prototypes=global'),
  ('protofssl', _CLIENTS, '--protofssl.helper_interval=2'),
  (
    'fedswitch',
    _SERVER,
    '--fedswitch.labeler=farthest --fedswitch.teacher_probe=always_send',
  ),
  ('mixmatch', _CLIENTS, '--mixmatch.ramp_rounds=2'),
  ('uda', _SERVER, '--average_decay=0.9 --min_clients=2'),
  ('fl2', _SERVER, '--aggregator=robust'),
  ('protofssl', _CLIENTS, '--aggregator=robust'),
  (
    'fixmatch',
    _SERVER,
    '--aggregator=secure --simulate_secure_aggregation --norm=gn'
    ' --max_client_examples=1000',
  ),
  # Not `dp`, whose noise is drawn without a seed.
  ('fl2', _SERVER, '--aggregator=compression'),
  ('fl2', _SERVER, '--runtime=tff_worker'),
  ('fedswitch', _CLIENTS, '--straggler_probability=0.5'),
  ('fixmatch', _SERVER, '--partition=dirichlet --alpha=0.3'),
)
# Run in both trees: arrays by name, of files their bytes.
_VALUES = """
import os, sys
import numpy as np
try:
  from tff_fssl.program import checkpoint
except ImportError:  # Before 0.6.0.
  from tff_fssl.program.storage import checkpoint

folder, path_of_values = sys.argv[1:]
found = {}
for name in ('partition.json', 'metrics/train.csv', 'metrics/eval.csv'):
  path = os.path.join(folder, name)
  if os.path.exists(path):
    with open(path, 'rb') as file:
      found[name] = np.frombuffer(file.read(), np.uint8)
checkpoints = os.path.join(folder, 'checkpoints')
last = checkpoint.versions(checkpoints)[-1]
path = checkpoint.path_of(checkpoints, last)
for name, leaf in checkpoint.read(path).items():
  if isinstance(leaf, bytes):
    leaf = np.frombuffer(leaf, np.uint8)
  found[f'leaf {name}'] = np.asarray(leaf)
model = os.path.join(folder, 'model', 'model.keras')
if os.path.exists(model):
  import tensorflow as tf
  from tff_fssl.data import sources
  images = np.asarray(sources.load('digits').test.x[:64], np.float32)
  keras = tf.keras.models.load_model(model, compile=False)
  found['predictions'] = keras(images, training=False).numpy()
np.savez(path_of_values, **found)
"""
# Keras's own initializers may draw other values in another version.
_NETWORK = """
def network(images, num_classes, norm):
  import numpy as np
  import tensorflow as tf

  layers = tf.keras.layers

  def draw(*shape):
    limit = (3 / np.prod(shape[:-1])) ** 0.5
    values = np.random.default_rng(shape).uniform(-limit, limit, shape)
    return tf.keras.initializers.Constant(values.astype(np.float32))

  x = images
  for width in (32, 64):
    kernel = draw(3, 3, x.shape[-1], width)
    x = layers.Conv2D(
      width, 3, padding='same', use_bias=False, kernel_initializer=kernel
    )(x)
    if norm == 'bn':
      x = layers.BatchNormalization()(x)
    if norm == 'gn':
      x = layers.GroupNormalization(8)(x)
    x = layers.MaxPooling2D()(layers.ReLU()(x))
  x = layers.Flatten()(x)
  kernel = draw(x.shape[-1], num_classes)
  return layers.Dense(num_classes, kernel_initializer=kernel)(x)
"""

# Arrays by name, or 'error': the last line of an error.
_Values = dict[str, Any]


class _Tree(NamedTuple):
  """A tree of sources.

  Attributes:
    path: Its root.
    python: The Python that runs it.
    is_new: Whether the tree knows the newer names only. If not, it may be from
      before or after the change of a name.
  """

  path: pathlib.Path
  python: str
  is_new: bool


def _cases() -> dict[str, list[str]]:
  """Returns the commands of each case: the flags of one or two runs."""
  result: dict[str, list[str]] = {}
  for name in _ALGORITHMS:
    for scenario in _SCENARIOS.get(name, (_SERVER, _CLIENTS)):
      for norm in ('sbn', 'gn'):
        flags = _flags(name, scenario, f'--norm={norm}')
        result[f'{name} {scenario} {norm}'] = [flags]
    flags = result[f'{name} {scenario} sbn'][0]
    first = flags.replace('--total_rounds=3', '--total_rounds=2')
    result[f'{name} {scenario} resumed'] = [first, flags]
  for name, scenario, further in _FURTHER:
    result[f'{name} {scenario} {further}'] = [_flags(name, scenario, further)]
  return result


def _flags(name: str, scenario: str, further: str) -> str:
  parts = [_COMMON, f'--algorithm={name}', f'--scenario={scenario}']
  parts += [_LABELS[scenario], _OWN.get(name, ''), further]
  return ' '.join(filter(None, parts))


def _rename(text: str) -> str:
  """Replaces older names by newer ones."""
  for old, new in _RENAMED:
    text = re.sub(old, new, text)
  return text


def _close_cases(network: pathlib.Path) -> dict[str, list[str]]:
  """Returns the cases for trees in two environments: one round of each."""
  network.write_text(_NETWORK)
  return {
    name: [
      commands[0]
      .replace('--total_rounds=3', '--total_rounds=1')
      .replace('--model=cnn', f'--model={network}:network')
    ]
    for name, commands in _cases().items()
    if len(commands) == 1
  }


def _run(tree: _Tree, commands: list[str]) -> _Values:
  """Runs a case in a tree: the flags of one or two runs, with older names."""
  environment = {
    **os.environ,
    'PYTHONPATH': str(tree.path),
    'TF_CPP_MIN_LOG_LEVEL': '3',
    # Results depend on the number of threads.
    'TF_NUM_INTRAOP_THREADS': '1',
    'TF_NUM_INTEROP_THREADS': '1',
  }

  def call(*arguments: str) -> None:
    done = subprocess.run(
      [tree.python, *arguments],
      cwd=tree.path,
      env=environment,
      capture_output=True,
      text=True,
      check=False,
    )
    if done.returncode:
      lines = done.stderr.strip().splitlines() or ['no message']
      raise RuntimeError(lines[-1])

  with tempfile.TemporaryDirectory() as folder:
    output = os.path.join(folder, 'run')
    path = os.path.join(folder, 'values.npz')
    try:
      for flags in commands:
        flags = _rename(flags) if tree.is_new else flags
        call('programs/train.py', *shlex.split(flags), f'--output_dir={output}')
      call('-c', _VALUES, output, path)
    except RuntimeError as error:
      newer = list(map(_rename, commands))
      if 'unknown flag' in str(error) and newer != commands:
        return _run(tree._replace(is_new=True), newer)
      return {'error': str(error).replace(output, 'RUN')}
    with np.load(path) as values:
      return {_rename(name): values[name] for name in values.files}


def _digests(values: _Values) -> dict[str, str]:
  """Returns a digest of each array."""
  if 'error' in values:
    return values
  result = {}
  for name, array in _by_column(values).items():
    about = f'{array.dtype} {array.shape}'.encode()
    content = about + np.ascontiguousarray(array).tobytes()
    result[name] = hashlib.sha256(content).hexdigest()[:16]
  return result


def _by_column(values: _Values) -> _Values:
  """Splits each table into its columns."""
  result: _Values = {}
  for name, array in values.items():
    columns = {name: array}
    if name.endswith('.csv'):
      rows = csv.reader(io.StringIO(array.tobytes().decode()))
      columns = {
        f'{name} {header}': np.array(cells) for header, *cells in zip(*rows)
      }
    result |= columns
  return result


def _compare(old: dict[str, str], new: dict[str, str]) -> list[str]:
  """Describes the differences between the digests of two runs."""
  if 'error' in old or 'error' in new:
    # A case that neither tree runs compares nothing.
    return [f'{old.get("error")} | {new.get("error")}']
  names = sorted(old.keys() | new.keys())
  return [
    n
    for n in names
    if old.get(n) != new.get(n)
    and (n in old and n in new or not re.search(_GONE, n))
  ]


def _columns(table: np.ndarray) -> dict[str, np.ndarray]:
  """Reads the numbers of a CSV file's bytes; texts become NaN."""

  def number(text: str) -> float:
    try:
      return float(text)
    except ValueError:
      return np.nan

  header, *rows = csv.reader(io.StringIO(table.tobytes().decode()))
  values = np.array([list(map(number, row)) for row in rows]).T
  return dict(zip(header, values, strict=True))


def _difference(old: np.ndarray, new: np.ndarray) -> float:
  """Returns the largest difference, relative to the largest magnitude."""
  if old.shape != new.shape or old.dtype != new.dtype:
    return np.inf
  if old.dtype.kind not in 'fiub':
    return 0.0 if old.tobytes() == new.tobytes() else np.inf
  old, new = old.astype(np.float64), new.astype(np.float64)
  differ = (old != new) & ~(np.isnan(old) & np.isnan(new))
  with np.errstate(invalid='ignore'):
    apart = np.max(np.abs(old - new), initial=0, where=differ)
  most = np.max(np.abs(old), initial=0, where=np.isfinite(old))
  return np.inf if np.isnan(apart) else float(apart / (most or 1))


def _differences(old: _Values, new: _Values) -> dict[str, tuple[float, str]]:
  """Returns what differs most in two runs, of each kind of values.

  Args:
    old: Values of a run.
    new: Those of the other run.

  Returns:
    Kind -> the difference (see `_difference`), and the leaf or column.
  """
  if 'error' in old or 'error' in new:
    return {'error': (np.inf, f'{old.get("error")} | {new.get("error")}')}

  def split(values: _Values) -> dict[tuple[str, str], np.ndarray]:
    result: dict[tuple[str, str], np.ndarray] = {}
    for name, array in values.items():
      kind, _, rest = name.partition(' ')
      if name.endswith('.csv'):
        columns = _columns(array)
        result |= {(name, c): numbers for c, numbers in columns.items()}
      else:
        result[kind, rest] = array
    return result

  one, other = split(old), split(new)
  result: dict[str, tuple[float, str]] = {}
  for key in sorted(one.keys() | other.keys()):
    kind, name = key
    found = np.inf
    if key in one and key in other:
      found = _difference(one[key], other[key])
    if kind not in result or found > result[kind][0]:
      result[kind] = found, name if found else ''
  return result


def _read_kept(path: pathlib.Path) -> _Values:
  with np.load(path) as values:
    return {
      name: values[name]
      if values[name].dtype.kind != 'U'
      else str(values[name])
      for name in values.files
    }


def _old_results(
  tree: _Tree,
  commit: str,
  cases: dict[str, list[str]],
  keep: pathlib.Path,
  run_all: Callable[..., Iterator[tuple[str, _Values]]],
) -> dict[str, _Values]:
  """Returns the results of a commit's tree; computes those not yet kept."""

  def path_of(name: str) -> pathlib.Path:
    about = repr((tree.python, cases[name])).encode()
    return keep / commit / f'{hashlib.sha256(about).hexdigest()[:16]}.npz'

  missing = [name for name in cases if not path_of(name).exists()]
  if missing:
    (keep / commit).mkdir(parents=True, exist_ok=True)
    git = ['git', '-C', str(_ROOT), 'worktree']
    command = [*git, 'add', '--detach', str(tree.path), commit]
    subprocess.run(command, check=True)
    try:
      for name, found in run_all(tree, missing):
        np.savez(path_of(name), **found)
    finally:
      subprocess.run([*git, 'remove', '--force', str(tree.path)], check=True)
  return {name: _read_kept(path_of(name)) for name in cases}


def _report(
  old: dict[str, str], new: dict[str, str], _: float
) -> tuple[bool, str]:
  """Says whether digests are equal, and which are not."""
  different = _compare(old, new)
  if not different:
    return True, f'{len(new)} values equal'
  shown = ', '.join(itertools.islice(different, 5))
  return False, f'{len(different)} of {len(new)} values differ: {shown}'


def _report_close(
  old: _Values, new: _Values, tolerance: float
) -> tuple[bool, str]:
  """Says whether values are close, and how far apart they are."""
  found = _differences(old, new)
  parts = [
    f'{kind} {apart:.1e} {name}'.strip()
    for kind, (apart, name) in found.items()
  ]
  return all(apart <= tolerance for apart, _ in found.values()), ', '.join(
    parts
  )


def _parse_args() -> argparse.Namespace:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('commit')
  parser.add_argument('--only', default='', help='a regular expression')
  parser.add_argument('--jobs', type=int, default=2)
  parser.add_argument('--keep', default=str(_ROOT / 'build' / 'same_as'))
  parser.add_argument('--python', help="the other tree's, in its environment")
  # An optimizer's accumulator is a difference of weights, of which rounding is
  # a greater part.
  parser.add_argument('--tolerance', type=float, default=1e-4)
  return parser.parse_args()


def main() -> int:
  """Compares the trees."""
  args = _parse_args()
  commit = subprocess.run(
    ['git', '-C', str(_ROOT), 'rev-parse', args.commit],
    check=True,
    capture_output=True,
    text=True,
  ).stdout.strip()
  keep = pathlib.Path(args.keep).resolve()
  keep.mkdir(parents=True, exist_ok=True)
  cases = _close_cases(keep / 'network.py') if args.python else _cases()
  cases = {n: c for n, c in cases.items() if re.search(args.only, n)}
  convert = dict if args.python else _digests
  report = _report_close if args.python else _report

  def run_all(tree: _Tree, names: list[str]) -> Iterator[tuple[str, _Values]]:
    with futures.ThreadPoolExecutor(args.jobs) as pool:
      runs = pool.map(lambda n: convert(_run(tree, cases[n])), names)
      yield from zip(names, runs, strict=True)

  num_different = 0
  with tempfile.TemporaryDirectory() as folder:
    path = pathlib.Path(folder) / 'tree'
    tree = _Tree(path, args.python or sys.executable, is_new=False)
    old = _old_results(tree, commit, cases, keep, run_all)
  for name, new in run_all(_Tree(_ROOT, sys.executable, True), list(cases)):
    is_same, about = report(old[name], new, args.tolerance)
    num_different += not is_same
    print(f'{name}: {about}', flush=True)
  print(f'{num_different} of {len(cases)} cases differ')
  return 1 if num_different else 0


if __name__ == '__main__':
  sys.exit(main())
