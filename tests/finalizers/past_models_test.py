"""Models of earlier rounds, and when clients get them."""

import numpy as np
import pytest
import tensorflow as tf

from tff_fssl.finalizers import past_models
from tff_fssl.finalizers import server_algorithm
from tff_fssl.models.weights import Weights

_START = Weights(
  (tf.constant([[1.0, 2.0]]), tf.constant(3.0)), (), tf.constant(0.0)
)


def _add_one(model, aggregated, tools):
  del aggregated, tools
  trainable = tuple(w + 1.0 for w in model.trainable)
  return model._replace(trainable=trainable)


def _rounds(first_round, last_round, **settings):
  """What clients get in each round: the first elements of the models."""
  server = past_models.with_past_models(
    server_algorithm.ServerAlgorithm(update=_add_one), **settings
  )
  model, got = server.start(_START), {}
  for round_num in range(first_round, last_round + 1):
    num = int(model.control[past_models.NUM_SENT])
    assert bool(server.is_sent(past_models.MODELS, model)) == (num > 0)
    rows = model.sets[past_models.MODELS].numpy()
    assert rows.shape == (settings['num'], 3)
    np.testing.assert_array_equal(rows[:num], rows[:num, :1] + [[0, 1, 2]])
    got[round_num] = rows[:num, 0].tolist()
    tools = server_algorithm.ServerTools(None, None, tf.constant(round_num))
    model = server.update(model, None, tools)
  return got


@pytest.mark.parametrize('first_round', [1, -2])
def test_the_models_of_multiples(first_round):
  got = _rounds(first_round, 10, num=2, interval=3, in_every_round=False)
  before = 1 - first_round  # What pre-training has added.
  assert {r: rows for r, rows in got.items() if rows} == {
    6: [before + 3],
    9: [before + 6, before + 3],
  }


def test_in_every_round():
  got = _rounds(1, 8, num=2, interval=3, in_every_round=True)
  assert got == {
    **dict.fromkeys((1, 2, 3), []),
    **dict.fromkeys((4, 5, 6), [3.0]),
    **dict.fromkeys((7, 8), [6.0, 3.0]),
  }


def test_every_round_is_a_multiple_of_one():
  got = _rounds(1, 4, num=3, interval=1, in_every_round=False)
  assert got == {1: [], 2: [1.0], 3: [2.0, 1.0], 4: [3.0, 2.0, 1.0]}
