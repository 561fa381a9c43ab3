"""The data of a run: partition, statistics, and clients on other machines.

Statistics of examples become part of the model. They are measured only here. If
the aggregator protects clients, no client's examples are measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import dataclasses
import functools
import os
import socket
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from tff_fssl.data import clients
from tff_fssl.data import data_hparams
from tff_fssl.data import image_cache
from tff_fssl.data import inspection
from tff_fssl.data import names as data_names
from tff_fssl.data import partition as partition_lib
from tff_fssl.data import partition_draw
from tff_fssl.data import sources
from tff_fssl.data.sources import vectors
from tff_fssl.hparams import UsageError
from tff_fssl.program import config as config_lib
from tff_fssl.program import flags
from tff_fssl.program import inputs as inputs_lib

# Duplicates of larger data sets are searched for by programs/data.py alone.
_MOST_BYTES = 2**30

if TYPE_CHECKING:
  from tff_fssl.rounds import sampling


def load_partition(
  config: config_lib.Config, data: sources.DataSet, *, elsewhere: bool = False
) -> partition_lib.Partition:
  """Reads a configuration's partition from its file, or draws it.

  Args:
    config: The configuration.
    data: Its data set.
    elsewhere: Whether clients may have nothing in it.

  Returns:
    The partition.

  Raises:
    UsageError: If the data cannot be split as requested, or the file is not a
      partition of these data.
  """
  if not (config.info.has_clients or elsewhere):
    raise UsageError(
      f'--dataset={config.run.dataset}: has no examples for clients; only'
      ' deploy takes it, whose clients have their own'
    )
  path = config.run.partition_file
  if not path:
    return partition_draw.build_partition(
      data.train.y,
      config.partition_settings,
      data.owners,
      data.client_names,
      data.server,
    )
  partition = partition_lib.read(path)
  try:
    partition.check(data.train.y)
  except UsageError as error:
    raise UsageError(f'--partition_file={path}: {error}') from error
  return partition


def public_examples(partition: partition_lib.Partition) -> np.ndarray:
  """Returns indices of training examples for the server or validation."""
  held = [partition.server_labeled, partition.validation]
  return np.sort(np.concatenate(held))


def measured_examples(
  config: config_lib.Config,
  data: sources.DataSet,
  partition: partition_lib.Partition,
) -> sources.Examples:
  """Returns the training examples from which statistics are taken.

  Args:
    config: The configuration.
    data: Its data set.
    partition: The partition.

  Returns:
    All, or only those for validation and of the server if the run protects its
    clients.
  """
  if not config.is_private:
    return data.train
  held = public_examples(partition)
  return sources.Examples(data.train.x[held], data.train.y[held])


def normalize(
  config: config_lib.Config,
  data: sources.DataSet,
  partition: partition_lib.Partition,
) -> sources.DataSet:
  """Sets the mean and deviation by which networks see a data set.

  Args:
    config: The configuration, which has been checked.
    data: Its data set, as it was loaded.
    partition: The partition.

  Returns:
    The data set. `scale` sets a mean of 0 and a deviation of 1, `none` of 1 /
    255 for images. Texts have neither.

  Raises:
    UsageError: If a class is known from clients' examples alone, although the
      run protects clients, or a vector is too far from the mean.
  """
  examples = measured_examples(config, data, partition)
  if config.is_private and config.info.has_clients:
    _check_classes(config, data, examples)
  if config.is_private:
    if getattr(config.info, 'columns', ()):
      raise UsageError(
        f'--dataset={config.run.dataset}: how the columns of a table become'
        " numbers is learned from all rows, clients' too, but with"
        f' --aggregator={config.aggregator.aggregator} nothing about them may'
        ' become part of the model; write the vectors yourself (features: with'
        ' a column x)'
      )
  kind = data.train.kind
  if kind == data_names.TEXTS:
    return data
  mean, std = _moments(config, data, examples)
  if kind == data_names.VECTORS:
    looked_at = None
    if config.is_private:  # Clients look at theirs.
      of_test = len(data.train) + np.arange(len(data.test))
      looked_at = np.concatenate([public_examples(partition), of_test])
    vectors.check_range(config.info, mean, std, looked_at)
  return dataclasses.replace(data, mean=tuple(mean), std=tuple(std))


def _moments(
  config: config_lib.Config, data: sources.DataSet, examples: sources.Examples
) -> tuple[Sequence[float], Sequence[float]]:
  """Returns (mean, deviation) by which networks see images or vectors."""
  normalization, size = config.data.normalization, data.example_shape[-1]
  is_image = data.train.kind == data_names.IMAGES
  if is_image and normalization != data_hparams.STANDARD:
    unit = 1.0 if normalization == data_hparams.SCALE else 1 / 255
    return (0.0,) * size, (unit,) * size
  if given := config.data.moments(size):
    return given
  if config.info.mean or not config.is_private:
    return data.mean, data.std
  x = examples.x
  if not len(x):  # Vectors that are not normalized.
    return (0.0,) * size, (1.0,) * size
  return image_cache.moments(x) if is_image else vectors.moments(x[:, 0])


def _check_classes(
  config: config_lib.Config, data: sources.DataSet, examples: sources.Examples
) -> None:
  """Refuses classes that only clients' examples show."""
  y = np.concatenate([examples.y, data.test.y])
  counts = inspection.class_counts(y, data.num_classes)
  hidden = [name for name, n in zip(data.class_names, counts) if not n]
  if hidden:
    raise UsageError(
      f'--dataset={config.run.dataset}: only examples of clients are of'
      f' {inspection.shown(hidden)}, but with'
      f' --aggregator={config.aggregator.aggregator} nothing about them may'
      ' become part of the model; have a test example of each class'
    )


def find_problems(
  config: config_lib.Config,
  data: sources.DataSet,
  partition: partition_lib.Partition,
) -> list[inspection.Problem]:
  """Finds what `programs/data.py` finds in about a second.

  Args:
    config: The configuration. Of a run that protects its clients, only the
      files are looked at, not what is in their examples.
    data: Its data set.
    partition: Its partition.

  Returns:
    The problems.

  Raises:
    UsageError: If results would mean nothing, unless the user accepts it.
  """
  problems = sources.find_problems(
    config.info, data, inside=not config.is_private, most_bytes=_MOST_BYTES
  )
  if data.owners is not None and not config.is_private:
    held = [*partition.client_labeled, *partition.client_unlabeled]
    problems += inspection.owner_problems(
      data.owners[np.concatenate([partition.server_labeled, *held])],
      data.owners[partition.validation],
      'split_by' in config.info.uses,
      'validation',
    )
  if not config.data.accept_findings:
    inspection.refuse_misleading(f'--dataset={config.run.dataset}', problems)
  return problems


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
  def inputs(self) -> inputs_lib.Inputs:
    """Digests the data and the partition."""
    return inputs_lib.measure(self.data, self.partition)


# Makes a function that loads clients.
LoadFn: TypeAlias = 'Callable[[Held], sampling.LoadClient]'


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
      self._held.inputs,
      self._load_fn,
    )


@dataclasses.dataclass(frozen=True)
class _RemoteLoader:
  """A `Loader` on another machine.

  Attributes:
    arguments: The run's flags.
    folder: The folder that relative paths begin at, where it exists.
    inputs: What `Held.inputs` must be, but for the software.
    load_fn: See `Loader`.
  """

  arguments: tuple[str, ...]
  folder: str
  inputs: inputs_lib.Inputs
  load_fn: LoadFn

  def __call__(self) -> sampling.LoadClient:
    """Loads the data set and divides it, or raises `UsageError`."""
    # The machines of a cluster may share a file system, or not.
    if os.path.isdir(self.folder):
      os.chdir(self.folder)
    config = config_lib.parse_config(self.arguments)
    data = sources.load_found(config.info, config.run.data_dir or None)
    held = Held(config, data, load_partition(config, data))
    # Another order of files would train other clients without a word.
    is_same = held.inputs.partition == self.inputs.partition
    if not is_same or held.inputs.differences(self.inputs):
      raise UsageError(
        f'{socket.gethostname()}: its data set, or the division of it, is not'
        ' that of the program; copy the same files to each machine'
      )
    return self.load_fn(held)
