"""Seeds of random draws at clients and server, each for one purpose."""

from __future__ import annotations

from tff_fssl.lazy import tf

# One number for each purpose. A number is never reused: two purposes with the
# same number would draw alike.
(
  ORDER_UNLABELED,
  ORDER_LABELED,
  VIEWS,
  PREPARE,
  DRAWS,
  PARTNERS,
  STEP,
  FINISH,
  GROUP,
  COPY,
  UPDATE,
  MEMORY,
) = range(12)
# Separates the server's seeds from the clients', which the data source makes.
_SERVER = 1


def server_seed(run_seed: int, round_num: int | tf.Tensor) -> tf.Tensor:
  """Derives the server's seed of a round, int32 [2], from the run's."""
  return fold_in(tf.stack([run_seed, round_num]), _SERVER)


def fold_in(seed: tf.Tensor, purpose: int | tf.Tensor) -> tf.Tensor:
  """Derives another seed, int32 [2], for a purpose or a step."""
  return tf.random.experimental.stateless_fold_in(seed, purpose)
