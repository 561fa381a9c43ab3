"""Seeds for purposes."""

import itertools

import tensorflow as tf

from tff_fssl import seeds


def test_runs_rounds_and_purposes_have_seeds_of_their_own():
  drawn = [
    tuple(seeds.fold_in(seeds.server_seed(run, tf.constant(r)), p).numpy())
    for run, r, p in itertools.product((0, 1), (0, 1, 2), range(12))
  ]
  assert len({*drawn}) == len(drawn) == 72
