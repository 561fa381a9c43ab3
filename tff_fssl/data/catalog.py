"""Finds the data set that `--dataset` names, without loading it."""

from tff_fssl.data import data_hparams
from tff_fssl.data import names
from tff_fssl.hparams import import_function

# By name, since readers import NumPy, which `--help` does not need.
_BY_PREFIX = {
  names.FOLDER: 'folder:find',
  names.CLIENT_DATA: 'client_data:find',
  names.HUB: 'hub:find',
  names.FEATURES: 'vectors:find',
  names.TEXT: 'text:find',
  names.AG_NEWS: 'text:find_ag_news',
}


def find(
  name: str, data_dir: str, settings: data_hparams.DataHparams
) -> names.DataSetInfo:
  """Finds a data set.

  This reads folders, JSON and files of vectors or texts, but no images. Only
  the images of `clientdata:` and `huggingface:` are decoded, when they are
  found for the first time.

  Args:
    name: The value of `--dataset` (see `sources.load`).
    data_dir: `--data_dir`, perhaps ''.
    settings: How examples are read.

  Returns:
    Its facts, for `sources.load_found`.

  Raises:
    UsageError: If there is no such data set, or it is of another kind.
  """
  known = names.DATA_SETS.get(name)
  if known is not None and known.loader:
    return known
  start, colon, _ = name.partition(':')
  reader = _BY_PREFIX.get(start + colon, 'tfds:find')
  find_fn = import_function(f'tff_fssl.data.sources.{reader}')
  return find_fn(name, data_dir, settings)
