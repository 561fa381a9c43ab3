"""The folder of a run, which one program at a time writes to.

The system releases the lock when the process ends, however that ends.

.lock               who writes to the folder
flags.txt           the flagfile that repeats the run
private.txt         files not to publish, if the aggregator protects clients
partition.json/png  the partition of the examples
inputs.json         digests of the data, versions of the software
availability.csv    which clients can be drawn when, if not all always
compute.json        the compute of clients and server in a round
summary.json        the results, once it has finished
frozen.ckpt         weights of layers that do not train, if any
checkpoints/        round_N.ckpt
client_rows/        the last rows of clients, if they are not in checkpoints
metrics/            train.csv, eval.csv: equal for equal commands;
                    timing.csv: seconds and memory;
                    non_finite.txt: report of --debug_non_finite
tensorboard/
tracking/           the run's names at trackers (--track)
model/              the model of the last round, for serving
model_best/         the model with the best validation accuracy, if any
report/
data/               data that the server's computation reads, if large
"""

from collections.abc import Sequence
import fcntl
import os
import time
from typing import Any

from tff_fssl import durable
from tff_fssl import files
from tff_fssl import hparams
from tff_fssl.aggregators import hparams as aggregator_hparams
from tff_fssl.hparams import UsageError
from tff_fssl.program import checkpoint
from tff_fssl.program import config as config_lib
from tff_fssl.program import flags

LOCK = '.lock'
# A folder with this file is a run.
FLAGS = 'flags.txt'
# Flags of every run, among them the first and the last in sorted order.
_NEEDED_FLAGS = ('algorithm', 'seed', 'weight_decay')
# Files that show more of clients than the sum of their updates, and why. All
# other files of a run that protects its clients may be published.
PRIVATE_FILES = {
  'partition.json': 'which examples each client holds',
  'inputs.json': 'digests, which confirm a guess of what clients hold',
  'partition.png': 'how many of each class each client holds',
  'availability.csv': 'when each client can take part',
  'compute.json': 'how many examples clients hold on average',
  'metrics/timing.csv': 'how long rounds take, which depends on how many'
  ' examples clients hold',
  'tensorboard': 'the partition, and how long rounds take',
  'data': 'the labelled examples of the server',
}
_PRIVATE_NOTE = """\
This run protects its clients (--aggregator={aggregator}). Some of its files
show more of them than the sum of their updates, or the data of the server. They
are for those who hold all the data of the simulation. Do not publish:

{files}

Nor the console's output, and no plots of hours or computation. Everything else
may be published.
"""
_SEED_NOTE = """
Who knows the seed (flags.txt, about.json, README.md) knows the cohorts. Epsilon
does not hold against them; a deployment draws cohorts secretly.
"""
# A sweep's runs are in its folder TRIALS/N/seedS.
TRIALS = 'trials'


class PathInside:
  """An attribute of a folder: the path of something in it.

  Attributes:
    names: The names of the path's parts.
  """

  def __init__(self, *names: str):
    self.names = names

  def __get__(self, folder: Any, owner: type[Any] | None = None) -> str:
    return os.path.join(folder.path, *self.names)


class LockedFolder:
  """A folder that is locked from `lock` until the end of a `with` block.

  Attributes:
    path: The folder.
  """

  def __init__(self, path: str):
    """Sets the path. Neither makes nor locks anything."""
    self.path = path
    self._lock: int | None = None

  def lock(self) -> None:
    """Locks the folder, which exists.

    Raises:
      UsageError: If another program has locked it, or it cannot be locked.
    """
    path = os.path.join(self.path, LOCK)
    with durable.storage_errors():
      lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
      try:
        # Locked before it is written: its text names the holder.
        _acquire(lock, self.path)
        me = f'process {os.getpid()} on {os.uname().nodename}'
        text = f'{me}, {time.strftime("since %Y-%m-%d %H:%M:%S")}'.encode()
        durable.write_all(lock, text, path)
        # The last holder's text may have been longer.
        os.ftruncate(lock, len(text))
      except BaseException:
        os.close(lock)
        raise
    self._lock = lock

  def close(self) -> None:
    """Lets another program use the folder."""
    if self._lock is not None:
      os.close(self._lock)
      self._lock = None

  def __enter__(self) -> Any:
    return self

  def __exit__(self, *exception: Any) -> None:
    self.close()

  def check_path(self) -> None:
    """Refuses a path that is not a folder (`UsageError`)."""
    if os.path.lexists(self.path) and not os.path.isdir(self.path):
      raise UsageError(
        f'--output_dir={self.path}: it is not a folder; choose another'
      )


def is_held(folder: str) -> bool:
  """Returns whether a program has locked a folder, as far as is known."""
  try:
    lock = os.open(os.path.join(folder, LOCK), os.O_RDONLY | os.O_NONBLOCK)
  except OSError:
    return False
  try:
    # A shared lock succeeds unless another program holds the folder.
    fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
  except OSError:
    return True
  finally:
    os.close(lock)
  return False


def holder(folder: str) -> tuple[str, float]:
  """Returns (who has locked a folder, since when in seconds since 1970)."""
  path = os.path.join(folder, LOCK)
  return files.read_text(path).partition(',')[0], os.path.getmtime(path)


def _acquire(lock: int, folder: str) -> None:
  """Locks an open file, or raises `UsageError` if that is not possible."""
  try:
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except BlockingIOError as error:
    text = os.read(lock, 200).decode(errors='replace')
    raise UsageError(
      f'--output_dir={folder}: another program ({text or "unknown"}) is'
      ' writing to it; wait for it, end it, or choose another folder'
    ) from error
  except OSError as error:
    raise UsageError(
      f'--output_dir={folder}: the file system cannot lock files'
      f' ({error.strerror}); choose a folder on another one'
    ) from error


class OutputTree(LockedFolder):
  """A run's folder, with the paths in it.

  Attributes:
    is_new: Whether the folder held no run when it was opened.
    old: The new path of the run that was in the folder, if it was set aside.
    is_recorded: Whether the folder belongs to this run.
  """

  flags_file = PathInside(FLAGS)
  checkpoints = PathInside('checkpoints')
  client_rows = PathInside('client_rows')
  metrics = PathInside('metrics')
  train_csv = PathInside('metrics', 'train.csv')
  eval_csv = PathInside('metrics', 'eval.csv')
  timing_csv = PathInside('metrics', 'timing.csv')
  non_finite_txt = PathInside('metrics', 'non_finite.txt')
  tensorboard = PathInside('tensorboard')
  tracking = PathInside('tracking')
  model = PathInside('model')
  model_best = PathInside('model_best')
  report = PathInside('report')
  summary_json = PathInside('summary.json')
  server_data = PathInside('data')
  frozen = PathInside('frozen.ckpt')
  private_txt = PathInside('private.txt')
  partition_json = PathInside('partition.json')
  partition_png = PathInside('partition.png')
  inputs_json = PathInside('inputs.json')
  availability_csv = PathInside('availability.csv')
  compute_json = PathInside('compute.json')

  def __init__(self, path: str):
    """Sets the path. Neither makes nor locks anything."""
    super().__init__(path)
    self.is_new = False
    self.old = ''
    self.is_recorded = False

  @property
  def name(self) -> str:
    """Names the run at a tracker: its folder's, with those of a sweep's trial.

    Examples:
      >>> from tff_fssl.program import output_tree
      >>> for path in ('runs/fl2', 'runs/rho/trials/003/seed0'):
      ...   print(output_tree.OutputTree(path).name)
      fl2
      rho/003/seed0
    """
    parts = ['', '', '', *os.path.abspath(self.path).split(os.sep)]
    *_, sweep, trials, trial, run = parts
    return f'{sweep}/{trial}/{run}' if trials == TRIALS else run

  def open(self, config: config_lib.Config, *, restart: bool = False) -> None:
    """Makes the folder, locks it, and checks that it belongs to this run.

    Args:
      config: The configuration of the run that is made or continued in it.
      restart: Whether a run in the folder is set aside, to begin a new one.

    Raises:
      UsageError: If another program uses the folder, it belongs to another run,
        it is not the folder of a run, or it cannot be written to.
    """
    self.check_path()
    if restart and os.path.lexists(self.flags_file):
      self._set_aside()
    self.is_new = not os.path.lexists(self.flags_file)
    if self.is_new:
      self._check_empty()
    try:
      durable.make_folder(self.path)
      self.lock()
      for folder in (self.path, self.checkpoints, self.metrics):
        durable.make_folder(folder)
        durable.remove_leftovers(
          folder, lambda n: n in _NAMES or checkpoint.is_name(n)
        )
      self._compare(config)
    except BaseException:
      self.close()
      raise

  def record(self, config: config_lib.Config) -> None:
    """Writes the flags, by which the folder belongs to this run."""
    text = flags.flagfile_text(config.flags())
    durable.write_file(self.flags_file, [text.encode()])
    if config.is_private:
      files_of = '\n'.join(f'  {n}: {why}' for n, why in PRIVATE_FILES.items())
      name = config.aggregator.aggregator
      note = _PRIVATE_NOTE.format(aggregator=name, files=files_of)
      if name == aggregator_hparams.DP:
        note += _SEED_NOTE
      durable.write_file(self.private_txt, [note.encode()])
    self.is_recorded = True

  def read_flags(self) -> dict[str, str]:
    """Reads the run's flags, name -> text, or raises `UsageError`."""
    values = flags.read_flagfile(self.flags_file)
    missing = [name for name in _NEEDED_FLAGS if name not in values]
    if missing:
      raise UsageError(
        f'{self.flags_file}: is not complete (--{missing[0]} is missing); give'
        ' --restart, or choose another --output_dir'
      )
    return values

  def _set_aside(self) -> None:
    """Renames the folder of a run, or raises `UsageError`."""
    path = os.path.abspath(self.path)
    # Relative paths would point into the renamed folder.
    if os.path.commonpath([path, os.getcwd()]) == path:
      raise UsageError(
        f'--restart: {path} is to be renamed, but it is the working directory,'
        ' or holds it; give the command in another folder'
      )
    with LockedFolder(path) as old:
      old.lock()
      number = 1
      while os.path.lexists(f'{path}.old_{number}'):
        number += 1
      durable.rename(path, f'{path}.old_{number}')
      self.old = f'{path}.old_{number}'

  def _check_empty(self) -> None:
    """Refuses a folder with files that no start of a run can have left."""
    # A start that fails leaves empty folders, and examples of the server.
    empty = [self.checkpoints, self.metrics]
    names = os.listdir(self.path) if os.path.isdir(self.path) else []
    others = [
      name
      for name in names
      if not name.startswith('.')
      and name != os.path.basename(self.server_data)
      and (
        (path := os.path.join(self.path, name)) not in empty or os.listdir(path)
      )
    ]
    if others:
      raise UsageError(
        f'--output_dir={self.path}: the folder holds other files'
        f' ({min(others)!r}) but no run (there is no {FLAGS}); choose another'
      )

  def _compare(self, config: config_lib.Config) -> None:
    """Refuses to continue a run of other flags."""
    if self.is_new:
      return
    old = self.read_flags()
    new = {name: hparams.format_value(v) for name, v in config.flags().items()}
    refused, _ = config_lib.differences(old, new)
    if refused:
      differing = config_lib.describe_differences(refused, old, new)
      raise UsageError(
        f'--output_dir={self.path}: holds a run of another configuration'
        f' ({differing}). Choose another folder, or give its own flags'
        f' (--flagfile={self.flags_file}). When a run is continued, these may'
        f' differ: {config_lib.changeable_text()}'
      )


def default_report(paths: Sequence[str], name: str) -> str:
  """Returns the default path of a report on runs.

  Args:
    paths: The runs' folders, at least one.
    name: The name of the report's file.

  Returns:
    A file in the run's folder report/, or in the common folder of several runs.
  """
  if len(paths) == 1:
    return os.path.join(OutputTree(paths[0]).report, name)
  folder = os.path.commonpath([os.path.abspath(path) for path in paths])
  return os.path.relpath(os.path.join(folder, name))


_INSIDE = [
  path.names
  for path in vars(OutputTree).values()
  if isinstance(path, PathInside)
]
# Names of files, and of folders.
_NAMES = frozenset(names[-1] for names in _INSIDE)
# Folders in which there are only files of the run itself.
FOLDERS = frozenset(first for first, *_ in _INSIDE if '.' not in first)
