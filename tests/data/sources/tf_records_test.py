import os

import numpy as np
import pytest
import tensorflow as tf

from tff_fssl import files
from tff_fssl.data.sources import tf_records


def _example(**features):
  return tf.train.Example(
    features=tf.train.Features(feature=features)
  ).SerializeToString()


def test_values_are_those_of_tensorflow():
  parsed = tf_records.parse(
    _example(
      floats=tf.train.Feature(float_list=tf.train.FloatList(value=[0.25, -3])),
      integers=tf.train.Feature(
        int64_list=tf.train.Int64List(value=[-(2**40), 7])
      ),
      text=tf.train.Feature(bytes_list=tf.train.BytesList(value=[b'a\xff'])),
      empty=tf.train.Feature(),
      two=tf.train.Feature(bytes_list=tf.train.BytesList(value=[b'a', b'b'])),
    )
  )
  assert sorted(parsed) == ['empty', 'floats', 'integers', 'text', 'two']
  floats = tf_records.read_value(parsed['floats'])
  assert floats.dtype == np.float32 and floats.tolist() == [0.25, -3]
  integers = tf_records.read_value(parsed['integers'])
  assert integers.dtype == np.int64 and integers.tolist() == [-(2**40), 7]
  assert tf_records.read_value(parsed['text']) == b'a\xff'
  for name in ('empty', 'two'):
    with pytest.raises(ValueError):
      tf_records.read_value(parsed[name])


@pytest.mark.parametrize('content', [b'\xff' * 9, 'text', None, 3])
def test_what_is_no_example(content):
  with pytest.raises(ValueError, match='no tf.train.Example'):
    tf_records.parse(content)


def _records(path):
  with files.open_binary(str(path)) as file:
    return list(tf_records.records(str(path), file))


def test_records(tmp_path):
  path = tmp_path / 'a'
  contents = [os.urandom(n) for n in (0, 1, 9, 70_000)]
  with tf.io.TFRecordWriter(str(path)) as writer:
    for content in contents:
      writer.write(content)
  assert _records(path) == contents
  whole = path.read_bytes()
  for size in (len(whole) - 1, len(whole) - 5, 50, 19):
    path.write_bytes(whole[:size])
    with pytest.raises(files.FileError, match='record at byte .* is damaged'):
      _records(path)
  # A length of 2 ** 60, with its checksum.
  path.write_bytes(bytes.fromhex('0000000000000010') + whole[8:12])
  with pytest.raises(files.FileError, match='no TFRecord file'):
    _records(path)
  huge = (2**60).to_bytes(8, 'little')
  checksum = tf_records._masked_crc(huge).to_bytes(4, 'little')
  path.write_bytes(huge + checksum + b'0' * 9)
  with pytest.raises(files.FileError, match='byte 0 is damaged'):
    _records(path)
