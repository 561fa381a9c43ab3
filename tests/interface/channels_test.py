"""Declarations of values that travel."""

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tff_fssl.interface import channels


def test_limits_may_depend_on_the_classes():
  fixed = channels.Upload(-1.0, 2.0)
  assert fixed.limits(10) == (-1.0, 2.0)
  by_classes = channels.Upload(0.0, lambda sizes: 2.0 * sizes['classes'])
  assert by_classes.limits(10) == (0.0, 20.0)
  with pytest.raises(KeyError):
    channels.Upload(0.0, lambda sizes: sizes['outputs']).limits(3)


def test_names_are_in_the_order_of_both_libraries():
  values = channels.sort_by_name({'teacher': 3, 'model': (1, 2), 'place': 0})
  assert list(values) == ['model', 'place', 'teacher']
  assert tf.nest.flatten(values) == [1, 2, 0, 3]
  types = tff.to_type(tf.nest.map_structure(lambda _: np.float32, values))
  assert tff.structure.name_list(types) == list(values)
