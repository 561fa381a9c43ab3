"""The folder that a run writes to. TensorFlow-free.

flags.txt           the flagfile that repeats the run
partition.json/png  who holds which examples
checkpoints/        round_N.ckpt
metrics/            train.csv, eval.csv: equal for equal commands;
timing.csv: seconds and memory; non_finite.txt: of --debug_non_finite
tensorboard/
model/              the trained model, for serving
report/
data/               what the server's computation reads, if large
"""

import fcntl
import os
import time
import types
from typing import Any

from tff_fssl import durable
from tff_fssl.hparams import UsageError
from tff_fssl.program import config as config_lib
from tff_fssl.program import flags
from tff_fssl.program import run_hparams

FLAGS = 'flags.txt'
_LOCK = '.lock'
# What a start that failed early may have left.
_NAMES = ('checkpoints', 'data', 'metrics')


class OutputTree:
  """A run's folder, locked as long as this lives.

  Attributes:
    path: The folder.
    is_new: Whether there was no run in it when it was opened.
  """

  def __init__(self, path: str):
    """Names the parts of a folder; neither makes nor locks anything.

    Args:
      path: The folder.
    """
    self.path = path
    self.is_new = False
    self._lock: int | None = None

  def _join(self, *names: str) -> str:
    return os.path.join(self.path, *names)

  @property
  def flags_file(self) -> str:
    """The flagfile that repeats the run."""
    return self._join(FLAGS)

  @property
  def checkpoints(self) -> str:
    """Folder of the checkpoints."""
    return self._join('checkpoints')

  @property
  def metrics(self) -> str:
    """Folder of the CSV files."""
    return self._join('metrics')

  @property
  def train_csv(self) -> str:
    """The metrics of training rounds."""
    return self._join('metrics', 'train.csv')

  @property
  def eval_csv(self) -> str:
    """The metrics of evaluations."""
    return self._join('metrics', 'eval.csv')

  @property
  def timing_csv(self) -> str:
    """Seconds and memory."""
    return self._join('metrics', 'timing.csv')

  @property
  def non_finite_txt(self) -> str:
    """Which clients failed, and where."""
    return self._join('metrics', 'non_finite.txt')

  @property
  def tensorboard(self) -> str:
    """Folder of TensorBoard's events."""
    return self._join('tensorboard')

  @property
  def model(self) -> str:
    """Folder of the exported model."""
    return self._join('model')

  @property
  def report(self) -> str:
    """Folder of plots."""
    return self._join('report')

  @property
  def summary_json(self) -> str:
    """What came out, in figures."""
    return self._join('summary.json')

  @property
  def server_data(self) -> str:
    """Folder of what the server's computation reads."""
    return self._join('data')

  @property
  def partition_json(self) -> str:
    """The partition."""
    return self._join('partition.json')

  @property
  def partition_png(self) -> str:
    """The partition, drawn."""
    return self._join('partition.png')

  def open(self, config: config_lib.Config) -> None:
    """Makes the folder, locks it, and checks that it is this run's.

    Args:
      config: The run that is to be made or continued in it.

    Raises:
      UsageError: If the folder is another program's, another run's, not a
        run's, or cannot be written to.
    """
    self.is_new = not os.path.exists(self.flags_file)
    if self.is_new and os.path.isdir(self.path):
      names = os.listdir(self.path)
      odd = [n for n in names if not n.startswith('.') and n not in _NAMES]
      if odd:
        raise UsageError(
          f'--output_dir={self.path}: the folder holds other files'
          f' ({min(odd)!r}) and no run (there is no {FLAGS}); choose another'
        )
    durable.make_folder(self.path)
    self._acquire()
    try:
      for folder in (self.path, self.checkpoints, self.metrics):
        durable.make_folder(folder)
        durable.remove_leftovers(folder)
      self._compare(config)
    except BaseException:
      self.close()
      raise

  def record(self, config: config_lib.Config) -> None:
    """Writes the flags; from now on the folder is this run's."""
    text = flags.to_flagfile(config.flags())
    durable.write_file(self.flags_file, [text.encode()])

  def close(self) -> None:
    """Lets another program use the folder."""
    if self._lock is not None:
      os.close(self._lock)
      self._lock = None

  def __enter__(self) -> 'OutputTree':
    return self

  def __exit__(
    self,
    exception_type: type[BaseException] | None,
    exception: BaseException | None,
    traceback: types.TracebackType | None,
  ) -> None:
    self.close()

  def _acquire(self) -> None:
    """Locks the folder; the lock ends with the process, however that ends."""
    with durable.storage_errors():
      lock = os.open(
        self._join(_LOCK), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666
      )
    try:
      fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
      holder = os.read(lock, 200).decode(errors='replace').strip()
      os.close(lock)
      if not isinstance(error, BlockingIOError):
        raise UsageError(
          f'--output_dir={self.path}: the file system cannot lock files'
          f' ({error.strerror}); choose a folder on another one'
        ) from error
      raise UsageError(
        f'--output_dir={self.path}: another program ({holder or "unknown"}) is'
        ' writing to it; wait for it, end it, or choose another folder'
      ) from error
    self._lock = lock
    me = f'process {os.getpid()} on {os.uname().nodename}'
    text = f'{me}, {time.strftime("since %Y-%m-%d %H:%M:%S")}'.encode()
    with durable.storage_errors():
      durable.write_all(lock, text, self._join(_LOCK))
      os.ftruncate(lock, len(text))

  def _compare(self, config: config_lib.Config) -> None:
    """Refuses if the run that is there has other flags."""
    if self.is_new:
      return
    old = flags.read_flagfile(self.flags_file)
    new = {name: flags.to_text(v) for name, v in config.flags().items()}
    refused, _ = config_lib.differences(old, new)
    if refused:
      raise UsageError(_refusal(self.path, refused, old, new))


def _refusal(
  path: str, names: list[str], old: dict[str, Any], new: dict[str, Any]
) -> str:
  """Says how a run differs from the one in the folder."""
  differing = '; '.join(
    f'--{name}={old[name]} there, {new[name]} now'
    if name in old and name in new
    else f'--{name} only {"there" if name in old else "now"}'
    for name in names
  )
  return (
    f'--output_dir={path}: holds a run of another configuration ({differing}).'
    ' Choose another folder, or give its own flags'
    f' (--flagfile={os.path.join(path, FLAGS)}). When a run is continued, these'
    f' may differ: {run_hparams.may_differ()}'
  )
