"""Models of earlier rounds, and when clients get them."""

import numpy as np
import pytest
import tensorflow as tf

from tff_fssl.algorithms.fedmatch import FedMatch
from tff_fssl.interface import base
from tff_fssl.models.weights import Weights

_START = Weights(
  (tf.constant([[1.0, 2.0]]), tf.constant(3.0)), (), tf.constant(0.0)
)
_NOTHING = base.Aggregate((), {}, tf.constant(0.0), None)


class _Server(base.Server):
  """A server whose model grows by 1 in each round."""

  def __init__(self, round_num):
    self.round_num = tf.constant(round_num)

  def apply(self, weights, update):
    del update
    trainable = tuple(w + 1.0 for w in weights.trainable)
    return weights._replace(trainable=trainable)

  def train(self, weights, copy=0):
    del copy
    return weights


def _rounds(first_round, last_round, *, num, interval, variant='ours'):
  """What clients get in each round: the first elements of the models."""
  algorithm = FedMatch(
    helpers='past',
    num_helpers=num,
    helper_interval=interval,
    variant=variant,
    decomposition=False,
  )
  state, got = algorithm.initial_state(_START, base.Setup()), {}
  for round_num in range(first_round, last_round + 1):
    sent = algorithm.broadcasts(state)
    assert sorted(sent) == ['num_past_models', 'past_models']
    num_sent = int(state.memory.num_past_models)
    assert sent['num_past_models'].when is None
    assert bool(sent['past_models'].when) == (num_sent > 0)
    rows = state.memory.past_models.numpy()
    assert rows.shape == (num, 3)
    np.testing.assert_array_equal(
      rows[:num_sent], rows[:num_sent, :1] + [[0, 1, 2]]
    )
    got[round_num] = rows[:num_sent, 0].tolist()
    state = algorithm.update(state, _NOTHING, _Server(round_num))
  return got


@pytest.mark.parametrize('first_round', [1, -2])
def test_the_models_of_multiples(first_round):
  got = _rounds(first_round, 10, num=2, interval=3)
  before = 1 - first_round  # What pre-training has added.
  assert {r: rows for r, rows in got.items() if rows} == {
    6: [before + 3],
    9: [before + 6, before + 3],
  }


def test_in_every_round():
  got = _rounds(1, 8, num=2, interval=3, variant='paper')
  assert got == {
    **dict.fromkeys((1, 2, 3), []),
    **dict.fromkeys((4, 5, 6), [3.0]),
    **dict.fromkeys((7, 8), [6.0, 3.0]),
  }


def test_every_round_is_a_multiple_of_one():
  got = _rounds(1, 4, num=3, interval=1)
  assert got == {1: [], 2: [1.0], 3: [2.0, 1.0], 4: [3.0, 2.0, 1.0]}
