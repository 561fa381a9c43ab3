"""Streams of random numbers, each a function of a seed, a purpose and a key.

NumPy only. No global random state is read or written.
"""

import enum

import numpy as np


class Purpose(enum.IntEnum):
  """What a stream is for. Numbers are never reused: old runs must repeat."""

  LABEL_SPLIT = 1
  VALIDATION = 2
  PARTITION = 3
  CLIENT_ROUND = 4


def _words(value: int) -> tuple[int, int]:
  # Two words for every number, negative ones as two's complement, so that no
  # two keys share their words.
  value = int(value) % 2**64
  return value & 0xFFFFFFFF, value >> 32


def _sequence(seed: int, purpose: Purpose, *key: int) -> np.random.SeedSequence:
  words = [w for value in (seed, purpose, *key) for w in _words(value)]
  return np.random.SeedSequence(words)


def generator(seed: int, purpose: Purpose, *key: int) -> np.random.Generator:
  """A generator of its own for `purpose` and `key`.

  Args:
    seed: Any integer; taken modulo 2**64.
    purpose: What the numbers are for.
    *key: Integers that tell streams of one purpose apart, likewise.

  Returns:
    A generator that depends on nothing else.
  """
  return np.random.Generator(np.random.Philox(_sequence(seed, purpose, *key)))


def seed_pair(seed: int, purpose: Purpose, *key: int) -> np.ndarray:
  """A seed for `tf.random.stateless_*`, int32 [2], from the same arguments."""
  state = _sequence(seed, purpose, *key).generate_state(2, np.uint32)
  return state.view(np.int32)
