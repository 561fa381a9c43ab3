"""Compares what this tree computes with what another commit computes.

  python tools/same_as.py COMMIT [--only PATTERN] [--jobs N] [--keep FOLDER]

Runs `programs/train.py` in both trees on a few digits: every algorithm in every
scenario, with and without static batch norm, further hyper-parameters,
aggregators and runtimes, and resumption in the middle. Compares, to the bit:
the tables, the partition, each leaf of the last checkpoint, and the exported
model's predictions for the test set. Prints a line for each case, and exits
with 1 if one differs. A maintainer runs it before a release, and after each
step of a change that is to keep results.

Figures of COMMIT are kept in FOLDER, so that they are computed once. The names
in `_RENAMED` may differ between the trees.
"""

from __future__ import annotations

import argparse
from concurrent import futures
import itertools
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys
import tempfile
from typing import Any

_ROOT = pathlib.Path(__file__).resolve().parents[1]
# (pattern of the older name, the newer name): leaves, columns and flags.
_RENAMED = (
  (r'sets/divergences/(\w+_divergence)', r'sets/\1'),
  (r'--fedmatch\.uploads=', '--fedmatch.uploads_in='),
  (r'--fl2.gradient_norms=true --fl2.class_thresholds', '--fl2.diagnostics'),
  (r'--local_(uda|fixmatch)\.', r'--\1.'),
  (r'--ts_(server|client)_ema\.', '--fedswitch.'),
  (r'labeler=farthest --fedswitch.teacher_probe=\w+', 'labeler=algorithms'),
)
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
  'supervised fixmatch uda mixmatch semifl fl2 fedswitch ts_server_ema'
  ' ts_client_ema fedcon fedrgd protofssl fedmatch sage proxyfl'
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
_DIGESTS = """
import hashlib, json, os, sys
import numpy as np
from tff_fssl.program.storage import checkpoint

def digest(content):
  return hashlib.sha256(content).hexdigest()[:16]

folder, found = sys.argv[1], {}
for name in ('partition.json', 'metrics/train.csv', 'metrics/eval.csv'):
  path = os.path.join(folder, name)
  if os.path.exists(path):
    with open(path, 'rb') as file:
      found[name] = digest(file.read())
checkpoints = os.path.join(folder, 'checkpoints')
last = checkpoint.versions(checkpoints)[-1]
path = checkpoint.path_of(checkpoints, last)
for name, leaf in checkpoint.read(path).items():
  if isinstance(leaf, bytes):
    found[f'leaf {name}'] = digest(leaf)
  else:
    leaf = np.asarray(leaf)
    about = f'{leaf.dtype} {leaf.shape}'.encode()
    found[f'leaf {name}'] = digest(about + np.ascontiguousarray(leaf).tobytes())
model = os.path.join(folder, 'model', 'model.keras')
if os.path.exists(model):
  import tensorflow as tf
  from tff_fssl.data import sources
  images = np.asarray(sources.load('digits').test.x[:64], np.float32)
  keras = tf.keras.models.load_model(model, compile=False)
  found['predictions'] = digest(keras(images, training=False).numpy().tobytes())
print(json.dumps(found))
"""


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


def _run(tree: pathlib.Path, commands: list[str], is_new: bool) -> Any:
  """Runs a case in a tree; returns digests by name, or an error's last line.

  Args:
    tree: The tree.
    commands: The flags of one or two runs, with their older names.
    is_new: Whether the tree knows the newer names only. If not, it may be from
      before or after the change of a name.

  Returns:
    Digest by name. 'error': the last line of an error.
  """
  environment = {
    **os.environ,
    'PYTHONPATH': str(tree),
    'TF_CPP_MIN_LOG_LEVEL': '3',
    # Results depend on the number of threads.
    'TF_NUM_INTRAOP_THREADS': '1',
    'TF_NUM_INTEROP_THREADS': '1',
  }

  def call(*arguments: str) -> str:
    done = subprocess.run(
      [sys.executable, *arguments],
      cwd=tree,
      env=environment,
      capture_output=True,
      text=True,
      check=False,
    )
    if done.returncode:
      lines = done.stderr.strip().splitlines() or ['no message']
      raise RuntimeError(lines[-1])
    return done.stdout

  with tempfile.TemporaryDirectory() as folder:
    output = os.path.join(folder, 'run')
    try:
      for flags in commands:
        flags = _rename(flags) if is_new else flags
        call('programs/train.py', *shlex.split(flags), f'--output_dir={output}')
      found = json.loads(call('-c', _DIGESTS, output).splitlines()[-1])
    except RuntimeError as error:
      newer = list(map(_rename, commands))
      if 'unknown flag' in str(error) and newer != commands:
        return _run(tree, newer, is_new=True)
      return {'error': str(error).replace(output, 'RUN')}
  return {_rename(name): value for name, value in found.items()}


def _compare(old: dict[str, str], new: dict[str, str]) -> list[str]:
  """Describes the differences between the digests of two runs."""
  if 'error' in old or 'error' in new:
    # A case that neither tree runs compares nothing.
    return [f'{old.get("error")} | {new.get("error")}']
  names = sorted(old.keys() | new.keys())
  return [n for n in names if old.get(n) != new.get(n)]


def _old_results(
  commit: str, cases: dict[str, list[str]], keep: pathlib.Path, jobs: int
) -> dict[str, Any]:
  """Returns the digests of a commit's tree; computes those not yet kept."""
  path = keep / f'{commit}.json'
  known = json.loads(path.read_text()) if path.exists() else {}
  missing = [name for name in cases if name not in known]
  if missing:
    with tempfile.TemporaryDirectory() as folder:
      tree = pathlib.Path(folder) / 'tree'
      git = ['git', '-C', str(_ROOT), 'worktree']
      subprocess.run([*git, 'add', '--detach', str(tree), commit], check=True)
      try:
        for name, found in _run_all(tree, cases, missing, jobs, is_new=False):
          known[name] = found
          keep.mkdir(parents=True, exist_ok=True)
          path.write_text(json.dumps(known, indent=1))
      finally:
        subprocess.run([*git, 'remove', '--force', str(tree)], check=True)
  return known


def _run_all(
  tree: pathlib.Path,
  cases: dict[str, list[str]],
  names: list[str],
  jobs: int,
  *,
  is_new: bool,
) -> Any:
  """Yields (name, digests) of cases, some at a time, in order."""
  with futures.ThreadPoolExecutor(jobs) as pool:
    runs = pool.map(lambda n: _run(tree, cases[n], is_new), names)
    yield from zip(names, runs, strict=True)


def main() -> int:
  """Compares the trees."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('commit')
  parser.add_argument('--only', default='', help='a regular expression')
  parser.add_argument('--jobs', type=int, default=2)
  parser.add_argument('--keep', default=str(_ROOT / 'build' / 'same_as'))
  args = parser.parse_args()
  commit = subprocess.run(
    ['git', '-C', str(_ROOT), 'rev-parse', args.commit],
    check=True,
    capture_output=True,
    text=True,
  ).stdout.strip()
  cases = {n: c for n, c in _cases().items() if re.search(args.only, n)}
  old = _old_results(commit, cases, pathlib.Path(args.keep), args.jobs)
  num_different = 0
  for name, new in _run_all(_ROOT, cases, list(cases), args.jobs, is_new=True):
    different = _compare(old[name], new)
    num_different += bool(different)
    about = f'{len(new)} values equal'
    if different:
      shown = ', '.join(itertools.islice(different, 5))
      about = f'{len(different)} of {len(new)} values differ: {shown}'
    print(f'{name}: {about}', flush=True)
  print(f'{num_different} of {len(cases)} cases differ')
  return 1 if num_different else 0


if __name__ == '__main__':
  sys.exit(main())
