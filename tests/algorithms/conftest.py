"""Runs these tests in process."""

import pytest
import tensorflow_federated as tff

from tff_fssl import runtime


@pytest.fixture(scope='session', autouse=True)
def _context():
  tff.framework.set_default_context(runtime.build_context())
