"""Declarations of values that travel."""

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from tff_fssl.interface import channels


def test_uploads_of_one_kind():
  report = channels.Upload(0.0, 1.0)
  row = channels.Upload(how=channels.ROWS, spec=tf.TensorSpec([2]))
  uploads = {'a': report, 'b': row, 'c': report}
  assert channels.sent_as(uploads, channels.MEAN) == {'a': report, 'c': report}
  assert channels.sent_as(uploads, channels.ROWS) == {'b': row}
  assert not channels.sent_as(uploads, channels.SUM)


def test_names_are_in_the_order_of_both_libraries():
  values = channels.sort_by_name({'teacher': 3, 'model': (1, 2), 'place': 0})
  assert list(values) == ['model', 'place', 'teacher']
  assert tf.nest.flatten(values) == [1, 2, 0, 3]
  types = tff.to_type(tf.nest.map_structure(lambda _: np.float32, values))
  assert tff.structure.name_list(types) == list(values)
