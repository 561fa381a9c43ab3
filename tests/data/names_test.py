import subprocess
import sys

import pytest

from tff_fssl.data import names
from tff_fssl.hparams import UsageError


def test_every_entry_is_consistent():
  for name, info in names.DATA_SETS.items():
    assert info.name == name
    channels = info.example_shape[2]
    assert len(info.mean) == len(info.std) == channels
    assert all(0 < v < 1 for v in (*info.mean, *info.std))


def test_unknown_name_suggests():
  with pytest.raises(UsageError, match="did you mean 'cifar10'"):
    names.data_set_info('cifar-10')


def test_names_and_partition_import_without_tensorflow():
  code = (
    'import sys; from tff_fssl.data import names, partition, sources;'
    " sys.exit('tensorflow' in sys.modules or 'matplotlib' in sys.modules)"
  )
  subprocess.run([sys.executable, '-c', code], check=True)
