"""Runs these tests in process; of heavy ones, few are quick."""

import contexts
import pytest

from tff_fssl.algorithms import registry

_context = contexts.of_each_module()

# What takes long for each algorithm and scenario: of these, `make test` runs
# one of each kind, `make test-slow` the others.
_QUICK = {
  'test_client_that_yields_nan_is_left_out_and_counted': (
    ('supervised', 'labels_at_clients'),
    ('fl2', 'labels_at_server'),
    ('fedmatch', 'labels_at_clients'),
    ('protofssl', 'labels_at_clients'),
    ('local_fixmatch', 'labels_at_clients'),
  ),
  'test_train_model_resumed_with_threads_is_rounds_by_hand': (
    ('fl2', 'labels_at_server'),
    ('fedmatch', 'labels_at_clients'),
  ),
}
# Clients without labels do a part of what clients with labels do.
_IN_BOTH_SCENARIOS = ('fixmatch', 'fl2')


def _is_quick(item):
  if item.path.name != 'conformance_test.py':
    return True
  name, scenario = (item.callspec.params[p] for p in ('name', 'scenario'))
  if item.originalname in _QUICK:
    return (name, scenario) in _QUICK[item.originalname]
  last = registry.REGISTRY[name].scenarios[-1]
  return scenario == last or name in _IN_BOTH_SCENARIOS


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
  """Marks the others as slow."""
  for item in items:
    if not _is_quick(item):
      item.add_marker(pytest.mark.slow)
