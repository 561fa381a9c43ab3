"""Who holds which training examples in a run. TensorFlow-free."""

from tff_fssl.data import partition as partition_lib
from tff_fssl.data import partition_draw
from tff_fssl.data import sources
from tff_fssl.hparams import UsageError
from tff_fssl.program.configuration import config as config_lib


def partition_of(
  config: config_lib.Config, data: sources.DataSet
) -> partition_lib.Partition:
  """The partition of a configuration: from its file, or drawn.

  Args:
    config: The configuration.
    data: Its data set.

  Returns:
    The partition.

  Raises:
    UsageError: If the data cannot be split as requested, or the file is not a
      partition of these data.
  """
  path = config.run.partition_file
  if not path:
    return partition_draw.build_partition(
      data.train.y, config.partition_settings, data.owners, data.client_names
    )
  partition = partition_lib.read(path)
  try:
    partition.check(data.train.y)
  except UsageError as error:
    raise UsageError(f'--partition_file={path}: {error}') from error
  return partition
