"""What `--dataset` means: facts that are known without loading. TF-free."""

from tff_fssl.data import data_hparams
from tff_fssl.data import names
from tff_fssl.hparams import import_function

# They know `sources`, which knows this module.
_BY_PREFIX = {
  names.FOLDER: 'tff_fssl.data.folders:find',
  names.CLIENT_DATA: 'tff_fssl.data.client_data:find',
  names.HUB: 'tff_fssl.data.hub_sets:find',
  names.FEATURES: 'tff_fssl.data.vector_files:find',
  names.TEXT: 'tff_fssl.data.text_files:find',
}
_AG_NEWS = 'tff_fssl.data.text_files:find_ag_news'
_TFDS = 'tff_fssl.data.tfds_sets:find'


def find(
  name: str, data_dir: str, settings: data_hparams.DataHparams
) -> names.DataSetInfo:
  """Finds a data set.

  This reads folders, JSON and files of vectors or texts, but no images, except
  those of `clientdata:` and `huggingface:`: these are decoded when they are
  found for the first time.

  Args:
    name: What `--dataset` takes; see `sources.load`.
    data_dir: `--data_dir`; may be ''.
    settings: How examples are read.

  Returns:
    Its facts, for `sources.load_found`.

  Raises:
    UsageError: If there is no such data set, or it is of another kind.
  """
  for prefix, function in _BY_PREFIX.items():
    if name.startswith(prefix):
      return import_function(function)(name, data_dir, settings)
  if name == names.AG_NEWS:
    return import_function(_AG_NEWS)(name, data_dir, settings)
  known = names.DATA_SETS.get(name)
  if known is not None and known.loader:
    return known
  return import_function(_TFDS)(name, data_dir, settings)
