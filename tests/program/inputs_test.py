"""Digests of data, and the file that has them."""

import dataclasses
import json
import os

import numpy as np
import pytest

from tff_fssl import files
from tff_fssl.data import partition_draw
from tff_fssl.data import partition_settings
from tff_fssl.data import sources
from tff_fssl.program import inputs


@pytest.fixture(name='digits', scope='module')
def _digits():
  return sources.load('digits')


def _partition(data, **settings):
  return partition_draw.build_partition(
    data.train.y,
    partition_settings.PartitionSettings(
      10, 5, 40, num_validation=200, **settings
    ),
  )


def _with(data, split, x=None, y=None):
  old = getattr(data, split)
  new = sources.Examples(old.x if x is None else x, old.y if y is None else y)
  return dataclasses.replace(data, **{split: new})


def _changed(array, index):
  array = array.copy()
  array[index] = (array[index] + 1) % 10
  return array


def test_every_example_in_memory_counts(digits):
  partition = _partition(digits)
  same = _with(digits, 'train', digits.train.x.copy(), digits.train.y.copy())
  known = inputs.measure(digits, partition)
  assert known == inputs.measure(same, partition)
  held, trained = partition.validation[7], partition.client_unlabeled[0][3]
  for split, index, field, expected in (
    ('train', trained, 'x', ['training images']),
    ('train', trained, 'y', ['training labels']),
    ('train', held, 'x', ['training images', 'validation images']),
    ('train', held, 'y', ['training labels', 'validation labels']),
    ('test', 100, 'x', ['test images']),
    ('test', 100, 'y', ['test labels']),
  ):
    array = _changed(getattr(getattr(digits, split), field), index)
    other = _with(digits, split, **{field: array})
    assert known.differences(inputs.measure(other, partition)) == expected
  renamed = dataclasses.replace(digits, class_names=tuple('abcdefghij'))
  found = known.differences(inputs.measure(renamed, partition))
  assert found == ['names of classes']


def test_another_partition_is_not_other_data(digits):
  known, other = (
    inputs.measure(digits, _partition(digits, seed=seed)) for seed in (0, 1)
  )
  assert known.partition != other.partition
  name = 'validation images'
  assert known.digests[name] != other.digests[name]
  assert not known.differences(other)


def test_a_sample_of_mapped_examples_counts(digits, tmp_path, monkeypatch):
  monkeypatch.setattr(inputs, '_SAMPLE_BYTES', 10_000)
  partition, found = _partition(digits), []
  for number, x in enumerate([digits.train.x] * 2 + [255 - digits.train.x]):
    path = tmp_path / str(number)
    x.tofile(path)
    mapped = np.memmap(path, np.uint8, 'r', shape=x.shape)
    found.append(inputs.measure(_with(digits, 'train', mapped), partition))
  assert found[0] == found[1]
  names = ['training images', 'validation images']
  assert found[0].differences(found[2]) == names


def test_what_is_written_is_read(digits, tmp_path):
  path = str(tmp_path / 'inputs.json')
  assert inputs.read(path) is None
  known = inputs.measure(digits, _partition(digits))
  assert {'tff_fssl', 'tensorflow', 'cores'} < known.made_by.keys()
  known.write(path)
  assert inputs.read(path) == known
  assert os.listdir(tmp_path) == ['inputs.json']


def test_what_is_public_says_nothing_of_clients(digits):
  known = inputs.measure(digits, _partition(digits))
  assert known.public.digests.keys() == {
    'validation images', 'validation labels', 'test images', 'test labels'
  }  # fmt: skip
  assert not known.public.partition


def test_another_file_is_refused(digits, tmp_path):
  path = tmp_path / 'inputs.json'
  inputs.measure(digits, _partition(digits)).write(str(path))
  path.write_text(json.dumps(json.loads(path.read_text()) | {'format': 'x'}))
  with pytest.raises(files.FileError, match=str(path)):
    inputs.read(str(path))
