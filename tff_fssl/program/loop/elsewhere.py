"""How another machine loads a run's clients: by the run's flags."""

import dataclasses
import hashlib
import os
import socket

import numpy as np

from tff_fssl.data import clients
from tff_fssl.data import partition as partition_lib
from tff_fssl.data import sources
from tff_fssl.hparams import UsageError
from tff_fssl.program.configuration import config as config_lib
from tff_fssl.program.configuration import flags
from tff_fssl.program.loop import holdings
from tff_fssl.rounds import sampling

# How many examples at the begin and the end of a data set are compared.
_NUM_COMPARED = 64


@dataclasses.dataclass(frozen=True)
class Loader:
  """Loads the clients of a run wherever it is called; small.

  Attributes:
    arguments: The run's flags.
    folder: The folder that relative paths begin at, where it exists.
    digest: What `digest` must give.
  """

  arguments: tuple[str, ...]
  folder: str
  digest: str

  def __call__(self) -> sampling.LoadClient:
    """Loads the data set and divides it; raises `UsageError`."""
    if os.path.isdir(self.folder):
      os.chdir(self.folder)
    config = config_lib.from_command_line(self.arguments)
    data = sources.load_found(config.info, config.run.data_dir or None)
    partition = holdings.partition_of(config, data)
    if digest(data, partition) != self.digest:
      raise UsageError(
        f'{socket.gethostname()}: its data set, or the division of it, is not'
        ' that of the program; copy the same files to each machine'
      )
    return load_client_fn(config, data, partition)


def loader(
  config: config_lib.Config,
  data: sources.DataSet,
  partition: partition_lib.Partition,
) -> Loader:
  """What loads a run's clients on other machines.

  Args:
    config: The run's configuration.
    data: Its data set.
    partition: Who holds what.

  Returns:
    The loader; it can be pickled.
  """
  arguments = tuple(flags.to_flagfile(config.flags()).splitlines())
  return Loader(arguments, os.getcwd(), digest(data, partition))


def load_client_fn(
  config: config_lib.Config,
  data: sources.DataSet,
  partition: partition_lib.Partition,
) -> sampling.LoadClient:
  """The function that gives a client's examples in a round."""
  streaming = config.streaming
  return lambda round_num, client_id: clients.client_examples(
    data, partition, client_id, round_num, streaming
  )


def digest(data: sources.DataSet, partition: partition_lib.Partition) -> str:
  """A digest of who holds what, of labels, and of a few examples."""
  result = hashlib.sha256()
  train = data.train
  result.update(repr((train.x.shape, str(train.x.dtype))).encode())
  for part in (
    train.y,
    train.x[:_NUM_COMPARED],
    train.x[-_NUM_COMPARED:],
    partition.server_labeled,
    *partition.client_labeled,
    *partition.client_unlabeled,
  ):
    array = np.ascontiguousarray(part)
    result.update(f'{array.dtype} {array.shape}'.encode())
    result.update(array.tobytes())
  return result.hexdigest()
