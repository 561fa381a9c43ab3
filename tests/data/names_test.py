import subprocess
import sys

import numpy as np

from tff_fssl.data import names


def test_every_entry_is_consistent():
  for name, info in names.DATA_SETS.items():
    assert info.name == name
    channels = info.example_shape[2]
    assert len(info.mean) == len(info.std) == channels
    assert all(0 < v < 1 for v in (*info.mean, *info.std))


def test_moments_are_those_of_the_data():
  cifar10, cifar100 = names.DATA_SETS['cifar10'], names.DATA_SETS['cifar100']
  assert cifar10.mean == (0.4914, 0.4822, 0.4465)
  assert cifar10.std == (0.2470, 0.2435, 0.2616)
  expected = [0.26745, 0.25647, 0.27608]
  np.testing.assert_allclose(cifar100.std, expected, atol=1e-5)


def test_names_and_partition_import_without_tensorflow():
  code = (
    'import sys; from tff_fssl.data import names, partition, sources;'
    " sys.exit('tensorflow' in sys.modules or 'matplotlib' in sys.modules)"
  )
  subprocess.run([sys.executable, '-c', code], check=True)
