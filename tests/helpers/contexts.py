"""TFF contexts for the tests of a module."""

import functools

import pytest
import tensorflow_federated as tff

from tff_fssl import runtime


@functools.cache
def _built(**settings):
  return runtime.build_context(runtime.Settings(**settings))


def of_each_module(**settings):
  """A fixture that runs each module's tests in process.

  A module of another room may have set another context before. The context is
  built once, and so computations are compiled once.

  Args:
    **settings: See `runtime.Settings`.

  Returns:
    The fixture, to be bound to a name in a `conftest.py` or a module.
  """

  @pytest.fixture(scope='module', autouse=True)
  def context():
    previous = tff.framework.get_context_stack().current
    tff.framework.set_default_context(_built(**settings))
    yield
    tff.framework.set_default_context(previous)

  return context
