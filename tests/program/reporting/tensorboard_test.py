import os

import pytest
import tensorflow as tf

from tff_fssl.program.configuration import run_hparams
from tff_fssl.program.reporting import tensorboard


@pytest.mark.parametrize(
  'text, rounds',
  [
    ('', []),
    ('3', [3]),
    ('3-5', [3, 4, 5]),
    ('2,4', [2, 4]),
    ('9,1-2,2', [1, 2, 9]),
  ],
)
def test_rounds(text, rounds):
  assert sorted(run_hparams.parse_rounds(text, 9)) == rounds


def test_rounds_are_profiled_one_by_one(tmp_path):
  said = []
  profiler = tensorboard.RoundProfiler(
    frozenset({1, 2}), str(tmp_path), said.append
  )
  for round_num in range(4):
    with profiler.round(round_num):
      tf.linalg.matmul(tf.ones([9, 9]), tf.ones([9, 9]))
  assert sorted(os.listdir(tmp_path)) == ['round_1', 'round_2']
  assert [text.split(':')[0] for text in said] == [
    'Profile of round 1',
    'Profile of round 2',
  ]


def test_a_round_that_fails_ends_its_profile(tmp_path):
  profiler = tensorboard.RoundProfiler(
    frozenset({1}), str(tmp_path), lambda text: None
  )
  for _ in range(2):  # The second could not start were the first still on.
    with pytest.raises(KeyError):
      with profiler.round(1):
        raise KeyError
  assert os.listdir(tmp_path) == ['round_1']


def test_a_profile_that_cannot_be_does_not_stop_training(tmp_path):
  said, done = [], []
  profiler = tensorboard.RoundProfiler(
    frozenset({1}), str(tmp_path / 'a'), said.append
  )
  tf.profiler.experimental.start(str(tmp_path / 'b'))  # There can be one only.
  try:
    with profiler.round(1):
      done.append(1)
  finally:
    tf.profiler.experimental.stop(save=False)
  assert done == [1]
  assert len(said) == 1 and 'AlreadyExistsError' in said[0]
