"""Runs these tests in process, with secure sums that protect nothing."""

import contexts

_context = contexts.of_each_module(simulate_secure_aggregation=True)
