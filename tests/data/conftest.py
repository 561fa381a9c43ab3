"""What tests of the data layer share."""

import os
import pathlib

import pytest

from tff_fssl.data import sources


@pytest.fixture(scope='session')
def tfds_dir() -> str:
  """The folder of real TFDS data; without it, the test is skipped."""
  root = pathlib.Path(__file__).resolve().parents[2]
  folder = os.environ.get('TFF_FSSL_TEST_DATA_DIR') or str(
    root.parent / 'shared' / 'data' / 'tfds'
  )
  if not os.path.isdir(os.path.join(folder, 'cifar10')):
    pytest.skip('no real CIFAR-10 (TFF_FSSL_TEST_DATA_DIR)')
  return folder


@pytest.fixture(scope='session')
def cifar10(tfds_dir) -> sources.DataSet:
  """The real CIFAR-10."""
  return sources.load('cifar10', tfds_dir)


@pytest.fixture(scope='session')
def digits() -> sources.DataSet:
  """The embedded digits."""
  return sources.load('digits')
