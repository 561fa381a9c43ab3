"""The suite of TFF's cases, as a test."""

import pytest

from tests.runtime import tff_suite


@pytest.mark.slow
def test_no_result_is_wrong():
  assert tff_suite.main([]) == 0
