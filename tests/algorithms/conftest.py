"""Runs these tests in process."""

import contexts

_context = contexts.of_each_module()
