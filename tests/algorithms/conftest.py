"""Runs these tests in process; of heavy ones, few are quick."""

import contexts
import pytest

_context = contexts.of_each_module()

# What builds further processes for each algorithm and scenario: of these,
# `make test` runs some of each kind, `make test-slow` the others.
_HEAVY = (
  'test_client_that_yields_nan_is_left_out_and_counted',
  'test_train_model_resumed_with_threads_is_rounds_by_hand',
)
_QUICK = {
  ('supervised', 'labels_at_clients'),
  ('fl2', 'labels_at_server'),
  ('fedmatch', 'labels_at_clients'),
  ('protofssl', 'labels_at_clients'),
  ('local_fixmatch', 'labels_at_clients'),
}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
  """Marks the others as slow."""
  for item in items:
    if getattr(item, 'originalname', '') in _HEAVY:
      given = item.callspec.params
      if (given['name'], given['scenario']) not in _QUICK:
        item.add_marker(pytest.mark.slow)
