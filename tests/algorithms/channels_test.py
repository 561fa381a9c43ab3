"""Declarations of values that travel."""

import pytest

from tff_fssl.algorithms import channels


def test_limits_may_depend_on_the_classes():
  fixed = channels.Upload(-1.0, 2.0)
  assert fixed.limits(10) == (-1.0, 2.0)
  by_classes = channels.Upload(0.0, lambda sizes: 2.0 * sizes['classes'])
  assert by_classes.limits(10) == (0.0, 20.0)
  with pytest.raises(KeyError):
    channels.Upload(0.0, lambda sizes: sizes['outputs']).limits(3)
