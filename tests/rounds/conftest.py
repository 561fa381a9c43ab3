"""Runs these tests in process."""

import pytest
import tensorflow_federated as tff

from tff_fssl import runtime


@pytest.fixture(scope='session')
def _built():
  return runtime.build_context()


# For each module: those of another room may have run between them.
@pytest.fixture(scope='module', autouse=True)
def _context(_built):
  tff.framework.set_default_context(_built)
