"""Streams of random numbers, as functions of a seed, a purpose and a key.

Global random state is neither read nor written.
"""

import enum

import numpy as np

# Cohorts are older than `Purpose`, and keep their own words, so that old runs
# repeat.
_COHORT = 0x50C1A1


class Purpose(enum.IntEnum):
  """Purposes of streams, whose numbers are never reused."""

  # An old run repeats only as long as the numbers stay.
  LABEL_SPLIT = 1
  VALIDATION = 2
  PARTITION = 3
  CLIENT_ROUND = 4
  LABELED_CLIENTS = 5
  CLIENT_LABELS = 6
  SPLIT_PRESET = 20
  NATURAL_CLIENTS = 7
  UNKNOWN_LABELS = 8
  LABEL_NOISE = 9
  STREAMING = 10
  CLIENT_TEST = 30
  PARTICIPATION = 31
  UNLABELED = 32
  LABEL_CLASSES = 33
  LABEL_PARTITION = 34
  VALIDATION_CLIENTS = 35
  REPORT = 40
  SWEEP = 50


def _words(value: int) -> tuple[int, int]:
  # Every number has two words, negative ones in two's complement, so that no
  # two keys have the same words.
  value = int(value) % 2**64
  return value & 0xFFFFFFFF, value >> 32


def _sequence(seed: int, purpose: Purpose, *key: int) -> np.random.SeedSequence:
  words = [w for value in (seed, purpose, *key) for w in _words(value)]
  return np.random.SeedSequence(words)


def generator(seed: int, purpose: Purpose, *key: int) -> np.random.Generator:
  """Makes a separate generator for each `purpose` and `key`.

  Args:
    seed: Any integer, taken modulo 2**64.
    purpose: The purpose of the numbers.
    *key: Any integers, which distinguish the streams of one purpose. Taken
      modulo 2**64.

  Returns:
    A generator that depends only on these.

  Examples:
    >>> from tff_fssl.data import seeds
    >>> for client_id in (7, 8, 7):
    ...   rng = seeds.generator(0, seeds.Purpose.STREAMING, client_id)
    ...   print(client_id, rng.permutation(5))
    7 [0 4 2 3 1]
    8 [3 4 1 0 2]
    7 [0 4 2 3 1]
  """
  return np.random.Generator(np.random.Philox(_sequence(seed, purpose, *key)))


def cohort_generator(seed: int, round_num: int) -> np.random.Generator:
  """Makes the generator that draws a round's cohort.

  Args:
    seed: Seed of the run, >= 0.
    round_num: The round, >= 0.

  Returns:
    A generator that depends only on these.

  Examples:
    >>> from tff_fssl.data import seeds
    >>> for round_num in (1, 2):
    ...   print(seeds.cohort_generator(0, round_num).permutation(5))
    [1 4 3 0 2]
    [1 4 2 0 3]
  """
  sequence = np.random.SeedSequence([_COHORT, seed, round_num])
  return np.random.Generator(np.random.Philox(sequence))


def seed_pair(seed: int, purpose: Purpose, *key: int) -> np.ndarray:
  """Makes a seed for `tf.random.stateless_*`.

  Args:
    seed: Any integer, taken modulo 2**64.
    purpose: The purpose of the numbers.
    *key: Any integers, as for `generator`.

  Returns:
    int32 [2], which depends only on these.

  Examples:
    >>> from tff_fssl.data import seeds
    >>> for round_num in (1, 2):
    ...   print(seeds.seed_pair(0, seeds.Purpose.CLIENT_ROUND, round_num))
    [-2092965530 -1474394518]
    [1209165468  106378722]
  """
  state = _sequence(seed, purpose, *key).generate_state(2, np.uint32)
  return state.view(np.int32)
