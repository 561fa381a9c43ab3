"""Collection of clients' values: all of them, whole and in order."""

import collections

import numpy as np
import pytest
import tensorflow_federated as tff

from tff_fssl.aggregators import collecting

_TYPE = tff.to_type(
  collections.OrderedDict(pair=(np.int32, [2]), weight=np.float32)
)


@pytest.fixture(scope='module')
def collect():
  collect_fn, rows_type = collecting.build_collect(_TYPE)
  assert rows_type == tff.to_type(
    collections.OrderedDict(
      pair=(np.int32, [None, 2]), weight=(np.float32, [None])
    )
  )

  @tff.federated_computation(tff.FederatedType(_TYPE, tff.CLIENTS))
  def fn(sent):
    return collect_fn(sent)

  return fn


# Around the size of the buffer, at which rows are moved.
@pytest.mark.parametrize('num', [0, 1, 9, 10, 11, 25])
def test_rows_of_all_clients_stay_together(collect, num):
  sent = [
    collections.OrderedDict(pair=np.int32([i, -i]), weight=np.float32(i))
    for i in range(num)
  ]
  rows = collect(sent)
  assert rows['pair'].shape == (num, 2)
  # A runtime may split the cohort, and merge the parts.
  order = np.argsort(rows['weight'])
  np.testing.assert_array_equal(rows['weight'][order], np.arange(num))
  np.testing.assert_array_equal(
    rows['pair'][order], np.stack([np.arange(num), -np.arange(num)], axis=1)
  )


def test_a_client_may_send_any_number_of_rows():
  @tff.federated_computation(
    tff.FederatedType(tff.TensorType(np.float32, [None, 2]), tff.CLIENTS)
  )
  def fn(rows):
    return collecting.collect_rows(rows)

  sent = [np.full([num, 2], num, np.float32) for num in (1, 0, 3)]
  rows = fn(sent)
  assert sorted(map(tuple, rows)) == [(1.0, 1.0), *3 * [(3.0, 3.0)]]
  assert fn([sent[1]]).shape == (0, 2)
