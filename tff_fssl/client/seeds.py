"""Seeds of a client's random draws, each for one purpose."""

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
) = range(9)


def fold_in(seed: tf.Tensor, purpose: int | tf.Tensor) -> tf.Tensor:
  """Derives another seed, int32 [2], for a purpose or a step."""
  return tf.random.experimental.stateless_fold_in(seed, purpose)
