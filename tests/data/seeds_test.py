import itertools

import numpy as np

from tff_fssl.data import seeds

_ROUND = seeds.Purpose.CLIENT_ROUND
_SPLIT = seeds.Purpose.LABEL_SPLIT
_KNOWN_PAIR = [-1564790824, -9488062]


def test_same_arguments_give_the_same_numbers():
  a, b = (seeds.generator(3, _ROUND, 1, 2).random(5) for _ in range(2))
  np.testing.assert_array_equal(a, b)


def test_known_values():
  # Seeds must not change: runs of earlier versions would no longer repeat.
  np.testing.assert_array_equal(seeds.seed_pair(0, _ROUND, 1, 0), _KNOWN_PAIR)


def test_seed_purpose_and_key_all_tell_apart():
  keys = [-(2**63), -1, 0, 1, 2**31, 2**32, 2**40]
  pairs = {
    tuple(seeds.seed_pair(seed, purpose, key, 7))
    for seed, purpose, key in itertools.product(keys, (_ROUND, _SPLIT), keys)
  }
  assert len(pairs) == 2 * len(keys) ** 2


def test_order_of_keys_matters():
  a, b = seeds.seed_pair(0, _ROUND, 1, 2), seeds.seed_pair(0, _ROUND, 2, 1)
  assert a.tolist() != b.tolist()
  assert a.dtype == np.int32
