"""Measures how time and memory grow with cohorts, populations and rounds.

    python benchmarks/scale.py [--sections cohort population rounds start]

`cohort`: rounds of (FL)^2 with `cnn` and 10, 100 or 1,000 of 1,000 clients with
50 images each (32 x 32 x 3, random), each in a fresh process. Prints seconds
per round and per client (2 clients were trained before, so that nothing is
compiled), the growth of peak memory during the round, and the cohort's bytes.
`population`: the cost of 1,000 and 100,000 clients with 10 small images each
before the first round: splitting, writing and drawing the partition, building
the process, choosing the first cohort. `natural`: the same of 10,000 and
1,000,000 owners in a manifest, with an image of 8 x 8 each, in files on disk:
reading them the first time, and starting with what was kept then. `rounds`: the
training program's memory after 20 and 200 rounds of tiny clients. `start`:
seconds that the training program takes for `--help` and for a bad flag (and
whether they import TensorFlow), and from its start to the end of its first
round. `uploads`: rounds of FedMatch with its ResNet-9 and 5 of 100 clients with
100 such images each, whose last uploads (5.3 GB if all have taken part) are
files, and the same where the server remembers nobody; each in a fresh process,
after two rounds of the same clients.

Each figure is printed beside the one that it is compared with, from one call.
"""

import argparse
from collections.abc import Iterator
import contextlib
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from tff_fssl.program import main as main_lib

_ROOT = pathlib.Path(__file__).resolve().parent.parent
_SECTIONS = ('cohort', 'population', 'natural', 'rounds', 'start', 'uploads')
_TRAIN = (sys.executable, str(_ROOT / 'programs' / 'train.py'))
_COHORT_POPULATION, _COHORT_IMAGES = 1_000, 50
_POPULATION_IMAGES = 10
# Number of clients in a round -> number of rounds that are measured.
_COHORTS = {10: 5, 100: 2, 1_000: 1}
_POPULATIONS = (1_000, 100_000)
_OWNERS, _NUM_FILES = (10_000, 1_000_000), 1_000
# Names the folder of a measurement's images.
_FOLDER = 'TFF_FSSL_SCALE_FOLDER'
_TINY_RUN = (
  f'--flagfile={_ROOT / "configs" / "quickstart.flags"}',
  '--num_pretraining_rounds=0',
  '--progress=lines',
)


def memory(field: str, pid: int | str = 'self') -> int:
  """Bytes of a process: 'VmRSS' now, 'VmHWM' at its peak."""
  with open(f'/proc/{pid}/status', encoding='ascii') as file:
    line = next(line for line in file if line.startswith(f'{field}:'))
  return int(line.split()[1]) * 1024


def reset_peak() -> None:
  """Lets this process's 'VmHWM' start from what it holds now."""
  with open('/proc/self/clear_refs', 'w', encoding='ascii') as file:
    file.write('5')


def build_task(
  dataset: str, num_clients: int, images_each: int, *flags: str
) -> Any:
  """A task of the training program, with as many random images as it needs."""
  # pylint: disable=import-outside-toplevel
  import dataclasses

  import numpy as np

  from tff_fssl.data import partition_draw
  from tff_fssl.data import sources
  from tff_fssl.program import config as config_lib
  from tff_fssl.program import experiment

  config = config_lib.parse_config(
    ['--model=cnn', f'--dataset={dataset}', '--client_epochs=1', *flags]
  )
  # Replaced afterwards: no published data set has so many examples.
  run = dataclasses.replace(config.run, num_clients=num_clients)
  config = dataclasses.replace(config, run=run)
  info = config.info
  rng = np.random.default_rng(0)

  def examples(count):
    x = rng.integers(0, 256, (count, *info.example_shape), np.uint8)
    return sources.Examples(x, (np.arange(count) % 10).astype(np.int32))

  data = sources.DataSet(
    name=dataset,
    train=examples(num_clients * images_each + run.num_labels),
    test=examples(100),
    num_classes=10,
    class_names=tuple('0123456789'),
    example_shape=info.example_shape,
    mean=info.mean,
    std=info.std,
  )
  start = time.perf_counter()
  split = partition_draw.build_partition(
    data.train.y, config.partition_settings
  )
  seconds = time.perf_counter() - start
  task = experiment.Task(
    config,
    data,
    split,
    experiment.build_views(config, data, split),
    experiment.build_model_fn(config),
  )
  return task, seconds


def measure_cohort(size: int) -> dict[str, float]:
  """Rounds of `size` clients, in this process."""
  # pylint: disable=import-outside-toplevel
  import tensorflow_federated as tff

  from tff_fssl import runtime
  from tff_fssl.program import experiment

  tff.framework.set_default_context(runtime.build_context())
  task, _ = build_task('cifar10', _COHORT_POPULATION, _COHORT_IMAGES)
  built = experiment.build_experiment(task, '')
  process = built.process
  iterator = built.data_source.iterator()
  state = process.initialize()
  while iterator.round_num < 1:  # The server's pre-training.
    state = process.next(state, iterator.select()).state
  for _ in range(2):
    state = process.next(state, iterator.select(2)).state
  before = memory('VmRSS')
  reset_peak()
  times = []
  for _ in range(_COHORTS[size]):
    start = time.perf_counter()
    state = process.next(state, iterator.select(size)).state
    times.append(time.perf_counter() - start)
  return {
    'seconds': statistics.median(times),
    'before': before,
    'peak': memory('VmHWM') - before,
    'bytes': size * task.data.train.x[:_COHORT_IMAGES].nbytes,
  }


def measure_population(size: int) -> dict[str, float]:
  """The cost of a population before the first round, in this process."""
  # pylint: disable=import-outside-toplevel
  import tensorflow_federated as tff

  from tff_fssl import runtime
  from tff_fssl.data import partition as partition_lib
  from tff_fssl.program import experiment
  from tff_fssl.program import plots

  tff.framework.set_default_context(runtime.build_context())
  before = memory('VmRSS')
  task, seconds = build_task('digits', size, _POPULATION_IMAGES)
  result = {'split': seconds}

  @contextlib.contextmanager
  def timed(name: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    result[name] = time.perf_counter() - start

  with tempfile.TemporaryDirectory() as folder:
    with timed('partition.json'):
      task.partition.save_json(os.path.join(folder, 'partition.json'))
    with timed('partition.png'):
      figure = partition_lib.make_figure([task.partition])
      plots.save(figure, os.path.join(folder, 'partition.png'))
  with timed('process'):
    built = experiment.build_experiment(task, '')
  with timed('first cohort'):
    next(iter(built.data_source.cohort(0, 1)))
  result['in all'] = sum(result.values())
  return {**result, 'memory': memory('VmRSS') - before}


def write_owners(folder: str, num_owners: int) -> None:
  """Writes a manifest of images, one for each owner, and for testing."""
  # pylint: disable=import-outside-toplevel
  import numpy as np
  import PIL.Image

  rng = np.random.default_rng(0)
  rows = []
  for number in range(_NUM_FILES):
    label, name = number % 4, f'{number}.png'
    pixels = np.clip(rng.normal(60 + 40 * label, 30, (8, 8, 3)), 0, 255)
    PIL.Image.fromarray(pixels.astype(np.uint8)).save(f'{folder}/{name}')
    rows.append(f'{name},class {label}')
  with open(f'{folder}/manifest.csv', 'w', encoding='ascii') as file:
    file.write('path,label,client,split\n')
    for owner in range(num_owners):
      file.write(f'{rows[owner % _NUM_FILES]},owner {owner},train\n')
    file.writelines(f'{row},,test\n' for row in rows)


def measure_natural(num_owners: int) -> dict[str, float]:
  """The cost of owners of files before the first round, in this process."""
  # pylint: disable=import-outside-toplevel
  import tensorflow_federated as tff

  from tff_fssl import runtime
  from tff_fssl.program import config as config_lib
  from tff_fssl.program import experiment

  del num_owners  # They are in the folder.
  folder = os.environ[_FOLDER]
  tff.framework.set_default_context(runtime.build_context())
  start, before = time.perf_counter(), memory('VmRSS')
  config = config_lib.parse_config(
    [
      f'--dataset=folder:{folder}',
      f'--cache_dir={folder}/cache',
      '--image_size=8',
      '--partition=natural',
      '--num_labels=100',
      '--num_validation=0',
      '--algorithm=fixmatch',
      '--model=cnn',
      '--norm=gn',
    ]
  )
  laps = {'flags and files': time.perf_counter()}
  task = experiment.build_task(config)
  laps['data, partition'] = time.perf_counter()
  task.partition.save_json(os.path.join(folder, 'partition.json'))
  laps['partition.json'] = time.perf_counter()
  built = experiment.build_experiment(task, '')
  laps['process'] = time.perf_counter()
  list(built.data_source.cohort(0, 1))
  laps['first cohort'] = time.perf_counter()
  begins = [start, *laps.values()]
  result = {
    name: end - begin
    for (name, end), begin in zip(laps.items(), begins, strict=False)
  }
  result['in all'] = begins[-1] - start
  return {**result, 'memory': memory('VmRSS') - before}


def natural() -> None:
  """Prints the cost of owners of files that do not take part."""
  print('Owners in a manifest (an image of 8 x 8 each)')
  results = {}
  for size in _OWNERS:
    with tempfile.TemporaryDirectory() as folder:
      os.environ[_FOLDER] = folder
      write_owners(folder, size)
      for when in ('first', 'later'):
        results[f'{size:,} {when}'] = in_fresh_process('natural', size)
  print(f'{"":16}' + ''.join(f'{name:>16}' for name in results))
  for name in next(iter(results.values())):
    show = megabytes if name == 'memory' else '{:.2f} s'.format
    shown = (f'{show(r[name]):>16}' for r in results.values())
    print(f'{name:16}' + ''.join(shown))


def measure_uploads(remembered: int) -> dict[str, float]:
  """Rounds of FedMatch that remembers clients, or nobody."""
  # pylint: disable=import-outside-toplevel
  import tensorflow_federated as tff

  from tff_fssl import runtime
  from tff_fssl.program import checkpoint
  from tff_fssl.program import experiment

  tff.framework.set_default_context(runtime.build_context())
  task, _ = build_task(
    'cifar10',
    100,
    100,
    '--algorithm=fedmatch',
    '--model=resnet9',
    '--norm=none',
    '--clients_per_round=5',
    f'--fedmatch.remembered_clients={remembered}',
  )
  built = experiment.build_experiment(task, '')
  process, source = built.process, built.data_source
  state = process.initialize()
  while int(state.client_work) < 1:
    state = process.next(state, []).state
  times = []
  with tempfile.TemporaryDirectory() as folder:
    rows = None
    if process.outside is not None:
      files = checkpoint.RowFiles(folder)
      rows = checkpoint.OutsideRows(process.outside, files)
    for _ in range(5):
      start = time.perf_counter()
      if rows is not None:
        state = rows.load(state, source.client_ids(0, 1))
      state = process.next(state, source.cohort(0, 1)).state
      if rows is not None:
        state = rows.store(state)
      times.append(time.perf_counter() - start)
      if rows is not None:
        rows.retain_versions([int(state.client_work) - 1])
    kept = sum(file.stat().st_size for file in pathlib.Path(folder).iterdir())
  return {
    'seconds': statistics.median(times[2:]),
    'peak': memory('VmHWM'),
    'disk': kept,
  }


def in_fresh_process(what: str, size: int) -> dict[str, float]:
  """A measurement in a process of its own."""
  with tempfile.NamedTemporaryFile('r') as file:
    subprocess.run(
      [sys.executable, __file__, '--measure', what, str(size), file.name],
      check=True,
    )
    return json.load(file)


def megabytes(count: float) -> str:
  """Bytes as text, in MB."""
  return f'{count / 2**20:,.0f} MB'


def cohort() -> None:
  """Prints how rounds grow with their number of clients."""
  print(f'Clients in a round (cnn, {_COHORT_IMAGES} images each, 1 epoch)')
  print(
    f'{"clients":>9} {"s a round":>11} {"ms a client":>12}'
    f' {"cohort":>9} {"peak over before":>18} {"before":>10}'
  )
  results = {size: in_fresh_process('cohort', size) for size in _COHORTS}
  for size, result in results.items():
    print(
      f'{size:9,} {result["seconds"]:11.2f}'
      f' {1e3 * result["seconds"] / size:12.1f}'
      f' {megabytes(result["bytes"]):>9} {megabytes(result["peak"]):>18}'
      f' {megabytes(result["before"]):>10}',
      flush=True,
    )
  small, large = results[min(results)], results[max(results)]
  ratio = large['seconds'] / max(results) / (small['seconds'] / min(results))
  print(f'ms a client, of {max(results):,} / of {min(results)}: {ratio:.2f}')
  grown, data = (large[k] - small[k] for k in ('peak', 'bytes'))
  print(f'peak grows by {megabytes(grown)}, cohort by {megabytes(data)}')


def population() -> None:
  """Prints the cost of clients that do not take part."""
  print(f'Clients in all ({_POPULATION_IMAGES} images of 8 x 8 each)')
  results = [in_fresh_process('population', size) for size in _POPULATIONS]
  print(f'{"":16}' + ''.join(f'{size:>12,}' for size in _POPULATIONS))
  for name in results[0]:
    show = megabytes if name == 'memory' else '{:.2f} s'.format
    print(f'{name:16}' + ''.join(f'{show(r[name]):>12}' for r in results))
  more = results[-1]['in all'] - results[0]['in all']
  print(f'{"more":16}{more:22.2f} s')


@contextlib.contextmanager
def training_program(*flags: str) -> Iterator[tuple[Any, Iterator[int]]]:
  """The training program, and its rounds' numbers as they end."""
  with tempfile.TemporaryDirectory() as folder:
    program = subprocess.Popen(
      [*_TRAIN, *_TINY_RUN, *flags, f'--output_dir={folder}/run'],
      stdout=subprocess.PIPE,
      text=True,
    )

    def rounds() -> Iterator[int]:
      for line in program.stdout:
        if line.startswith('round'):
          yield int(line.split()[1].partition('/')[0])

    try:
      yield program, rounds()
    finally:
      program.kill()
      program.wait()


def rounds() -> None:
  """Prints whether a run's memory grows."""
  looked_at = (20, 50, 100, 150, 200)
  seen = {}
  with training_program(
    '--total_rounds=201', '--client_epochs=1', '--server_epochs=1'
  ) as (program, numbers):
    for number in numbers:
      if number in looked_at:
        seen[number] = memory('VmRSS', program.pid)
  if len(seen) < len(looked_at):
    raise SystemExit('the training program ended too early')
  print('Memory after a round (digits, cnn, 5 clients a round)')
  for number, size in seen.items():
    print(f'{number:9} {megabytes(size):>12}')
  print(f'of 200 / of 20: {seen[200] / seen[20]:.3f}')


def start() -> None:
  """Prints how quickly programs answer."""
  print('Start of programs/train.py')
  for flag in ('--help', '--datset=digits'):
    times = []
    for _ in range(3):
      begin = time.perf_counter()
      subprocess.run([*_TRAIN, flag], capture_output=True, check=False)
      times.append(time.perf_counter() - begin)
    traced = subprocess.run(
      [_TRAIN[0], '-X', 'importtime', _TRAIN[1], flag],
      capture_output=True,
      check=False,
      text=True,
    )
    imported = ' tensorflow\n' in traced.stderr
    print(
      f'{flag:28} {statistics.median(times):6.2f} s,'
      f' TensorFlow imported: {"yes" if imported else "no"}'
    )
  begin = time.perf_counter()
  with training_program() as (_, numbers):
    if next(numbers, None) != 1:
      raise SystemExit('the training program ended before its first round')
    seconds = time.perf_counter() - begin
  print(f'{"to the end of round 1 (cnn)":28} {seconds:6.2f} s')


def uploads() -> None:
  """Prints what it costs to remember clients."""
  print(
    'FedMatch, 5 of 100 clients a round (ResNet-9, 100 images each, 1 epoch)'
  )
  found = {what: in_fresh_process('uploads', what) for what in (0, 100)}
  for remembered, result in found.items():
    print(
      f'{remembered:3} clients remembered: {result["seconds"]:6.1f} s a round,'
      f' peak memory {megabytes(result["peak"])},'
      f' files {megabytes(result["disk"])}'
    )
  nobody, all_of_them = found.values()
  ratio = all_of_them['seconds'] / nobody['seconds']
  print(f'seconds, remembering / not: {ratio:.2f}')


def main() -> None:
  """Measures and prints."""
  parser = argparse.ArgumentParser(description=__doc__.split('\n\n')[0])
  parser.add_argument(
    '--sections', nargs='+', default=_SECTIONS, choices=_SECTIONS
  )
  parser.add_argument('--measure', nargs=3, help=argparse.SUPPRESS)
  args = parser.parse_args()
  if args.measure:
    main_lib.quiet()
    what, size, path = args.measure
    functions = {
      'cohort': measure_cohort,
      'population': measure_population,
      'natural': measure_natural,
      'uploads': measure_uploads,
    }
    result = functions[what](int(size))
    pathlib.Path(path).write_text(json.dumps(result), encoding='ascii')
    return
  show = {'cohort': cohort, 'population': population, 'rounds': rounds}
  show |= {'start': start, 'uploads': uploads, 'natural': natural}
  for i, section in enumerate(args.sections):
    if i:
      print()
    show[section]()


if __name__ == '__main__':
  main()
