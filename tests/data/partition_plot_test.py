"""The plot of a partition."""

import numpy as np
import pytest

from tff_fssl.data import partition_draw
from tff_fssl.data import partition_plot
from tff_fssl.data import partition_settings


def _build(num_clients):
  return partition_draw.build_partition(
    np.repeat(np.arange(10, dtype=np.int32), 200),
    partition_settings.PartitionSettings(10, num_clients, num_labels=10),
  )


@pytest.mark.parametrize('num_clients', [3, 120, 1_500])
def test_plot(tmp_path, num_clients):
  p = _build(num_clients)
  partition_plot.plot(p, tmp_path / 'partition.png')
  assert (tmp_path / 'partition.png').read_bytes()[:4] == b'\x89PNG'


def test_many_clients_are_drawn_by_means():
  counts = np.array([[1, 0], [3, 2], [5, 4], [7, 6], [9, 8]])
  np.testing.assert_array_equal(
    partition_plot._means(counts, 2), [[2, 1], [6, 5], [9, 8]]
  )
  np.testing.assert_array_equal(partition_plot._means(counts[:, 0], 3), [3, 8])


def test_the_title_counts_all_examples():
  title = partition_plot.draw(_build(3)).get_suptitle()
  assert title == (
    'IID, 3 clients, each with 0 labelled and 663 unlabelled examples\n'
    '10 labelled at the server, 0 for validation, seed 0'
  )
