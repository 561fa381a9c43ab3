"""Places of clients in groups."""

import numpy as np
import pytest
import tensorflow as tf

from tff_fssl.interface import groups as groups_lib

_GROUPS = groups_lib.Groups(
  2, 3, lambda model: model, lambda slot, seed: groups_lib.Place(slot, seed[0])
)


def test_a_client_without_a_slot_has_slot_0():
  seed = tf.constant([2, 9])
  assert _GROUPS.place_of({'seed': seed}) == (0, 2)
  assert _GROUPS.place_of({'seed': seed, 'slot': tf.constant(1)}) == (1, 2)


@pytest.mark.parametrize(
  'place, possible',
  [
    ([0, 0], True),
    ([1, 2], True),
    ([2, 0], False),
    ([0, 3], False),
    ([-1, 0], False),
    ([0.5, 0], False),
    ([np.nan, 0], False),
    ([0, np.inf], False),
  ],
)
def test_possible_places(place, possible):
  place = tf.constant(place, tf.float32)
  assert bool(groups_lib.is_possible(_GROUPS, place)) == possible
