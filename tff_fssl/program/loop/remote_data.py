"""Loads a run's clients on another machine, by the run's flags."""

from collections.abc import Callable
import dataclasses
import functools
import hashlib
import os
import socket
from typing import Any

import numpy as np

from tff_fssl.data import clients
from tff_fssl.data import partition as partition_lib
from tff_fssl.data import sources
from tff_fssl.hparams import UsageError
from tff_fssl.program.configuration import config as config_lib
from tff_fssl.program.configuration import flags
from tff_fssl.program.loop import run_data
from tff_fssl.rounds import sampling

# How many examples at the start and the end of a data set are compared.
_NUM_COMPARED = 64


@dataclasses.dataclass(frozen=True)
class Held:
  """The data and the partition of a run.

  Attributes:
    config: The run's configuration.
    data: Its data set.
    partition: The partition.
  """

  config: config_lib.Config
  data: sources.DataSet
  partition: partition_lib.Partition

  @functools.cached_property
  def digest(self) -> str:
    """Computes a digest of the partition, of labels and of a few examples."""
    result = hashlib.sha256()
    train, partition = self.data.train, self.partition
    for part in (
      train.y,
      train.x[:_NUM_COMPARED],
      train.x[-_NUM_COMPARED:],
      np.array(train.x.shape),
      partition.server_labeled,
      *partition.client_labeled,
      *partition.client_unlabeled,
      *partition.client_test,
    ):
      # Dtype and shape, too: equal bytes can be different data.
      array = np.ascontiguousarray(part)
      result.update(f'{array.dtype} {array.shape}'.encode())
      result.update(array.tobytes())
    return result.hexdigest()


# Makes a function that loads clients.
LoadFn = Callable[[Held], sampling.LoadClient]


def training_examples(held: Held) -> sampling.LoadClient:
  """Returns the function that loads training examples of clients."""
  streaming = held.config.streaming
  return lambda round_num, client_id: clients.client_examples(
    held.data, held.partition, client_id, round_num, streaming
  )


def test_examples(held: Held) -> sampling.LoadClient:
  """Returns the function that loads clients' examples for evaluation."""
  return lambda _, client_id: (
    clients.client_test_examples(held.data, held.partition, client_id),
    None,
  )


class Loader:
  """Loads the clients of a run on any machine. Small when pickled."""

  def __init__(self, held: Held, load_fn: LoadFn):
    """Sets the data.

    Args:
      held: The data and the partition.
      load_fn: `training_examples` or `test_examples`.
    """
    self._held = held
    self._load_fn = load_fn

  def __call__(self) -> sampling.LoadClient:
    """Gives clients' examples, here."""
    return self._load_fn(self._held)

  def __reduce__(self) -> Any:
    # Only flags travel: each machine reads the data from its own disk.
    arguments = flags.flagfile_text(self._held.config.flags()).splitlines()
    return _RemoteLoader, (
      tuple(arguments),
      os.getcwd(),
      self._held.digest,
      self._load_fn,
    )


@dataclasses.dataclass(frozen=True)
class _RemoteLoader:
  """A `Loader` on another machine.

  Attributes:
    arguments: The run's flags.
    folder: The folder that relative paths begin at, where it exists.
    digest: What `Held.digest` must be.
    load_fn: See `Loader`.
  """

  arguments: tuple[str, ...]
  folder: str
  digest: str
  load_fn: LoadFn

  def __call__(self) -> sampling.LoadClient:
    """Loads the data set and divides it, or raises `UsageError`."""
    # The machines of a cluster may share a file system, or not.
    if os.path.isdir(self.folder):
      os.chdir(self.folder)
    config = config_lib.parse_config(self.arguments)
    data = sources.load_found(config.info, config.run.data_dir or None)
    held = Held(config, data, run_data.load_partition(config, data))
    # Another order of files would train other clients without a word.
    if held.digest != self.digest:
      raise UsageError(
        f'{socket.gethostname()}: its data set, or the division of it, is not'
        ' that of the program; copy the same files to each machine'
      )
    return self.load_fn(held)
