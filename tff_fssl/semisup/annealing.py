"""Schedules over the progress of training: TSA and ramps."""

from __future__ import annotations

from collections.abc import Callable

from tff_fssl import hparams
from tff_fssl.lazy import tf
from tff_fssl.semisup import losses

LINEAR, LOG, EXP = 'linear', 'log', 'exp'
TSA_SCHEDULES = (LINEAR, LOG, EXP)

# Training signal annealing: the share a(r) of the way from 1 / C to 1.
_SHARES: dict[str, Callable[[tf.Tensor], tf.Tensor]] = {
  LINEAR: lambda r: r,
  LOG: lambda r: 1.0 - tf.exp(-5.0 * r),
  EXP: lambda r: tf.exp(5.0 * (r - 1.0)),
}


def tsa_threshold(
  progress: float | tf.Tensor, schedule: str, num_classes: int
) -> tf.Tensor:
  """Computes UDA's threshold eta of training signal annealing (TSA).

      eta = a(r) (1 - 1/C) + 1/C

  a(r) is r (linear), 1 - exp(-5 r) (log) or exp(5 (r - 1)) (exp): Xie et al.
  2020, section 3.3. Only linear starts at 1/C, and log ends below 1.

  Args:
    progress: r, float32 scalar: the share of training that is done. It is
      clipped to [0, 1].
    schedule: One of `TSA_SCHEDULES`.
    num_classes: C.

  Returns:
    float32 scalar in [1/C, 1].

  Raises:
    UsageError: If the schedule is unknown.

  Examples:
    >>> from tff_fssl.semisup import annealing
    >>> for schedule in annealing.TSA_SCHEDULES:  # Halfway through training.
    ...   print(schedule, f'{annealing.tsa_threshold(0.5, schedule, 10):.2f}')
    linear 0.55
    log 0.93
    exp 0.17
  """
  if schedule not in _SHARES:
    raise hparams.UsageError(
      f'schedule={schedule}: allowed are {", ".join(_SHARES)}'
      f'{hparams.closest(schedule, _SHARES)}'
    )
  progress = tf.clip_by_value(tf.cast(progress, tf.float32), 0.0, 1.0)
  # So written, a share of 1 gives exactly 1, which drops no example.
  return 1.0 - (1.0 - _SHARES[schedule](progress)) * (1.0 - 1.0 / num_classes)


def tsa_cross_entropy(
  labels: tf.Tensor, logits: tf.Tensor, threshold: tf.Tensor, weights: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
  """Computes the cross-entropy of labelled examples not yet learned (UDA).

  An example is dropped if the predicted probability of its label exceeds the
  threshold. The loss is sum(kept CE) / max(number kept, 1).

  Args:
    labels: int32 [B], in [0, C).
    logits: float32 [B, C].
    threshold: eta, float32 scalar: `tsa_threshold`.
    weights: float32 [B], each example's weight >= 0, 0 for fillers. Kept
      examples count in the sum and in the number as much as they weigh.

  Returns:
    The loss, float32 scalar, which is 0 with gradient 0 if no example is kept.
    Then the weights of the kept examples, float32 [B], 0 for all others.

  Examples:
    >>> import tensorflow as tf
    >>> from tff_fssl.semisup import annealing
    >>> logits = tf.constant([[4.0, 0.0], [0.5, 0.0]])
    >>> loss, kept = annealing.tsa_cross_entropy(
    ...   tf.constant([0, 0]), logits, tf.constant(0.8), tf.ones([2])
    ... )
    >>> print(kept.numpy())  # 98% for the first label: it is already learned.
    [0. 1.]
    >>> print(loss.numpy().round(3))
    0.474
  """
  entropies = losses.cross_entropy(labels, logits)
  correct = tf.gather(tf.nn.softmax(logits), labels, batch_dims=1)
  kept = weights * tf.cast(correct <= threshold, weights.dtype)
  total = tf.reduce_sum(kept * entropies)
  return total / tf.maximum(tf.reduce_sum(kept), 1.0), kept


def linear_ramp(done: float | tf.Tensor, length: float) -> tf.Tensor:
  """Computes MixMatch's ramp of the unlabelled loss's weight.

  It is min(done / length, 1).

  Args:
    done: float32 scalar >= 0, how much of training is done: rounds, steps,
      examples or a share of all.
    length: The end of the ramp, in the same unit, >= 0. 0 gives 1 always.

  Returns:
    float32 scalar in [0, 1].

  Raises:
    UsageError: If the length is negative or not a number.

  Examples:
    >>> from tff_fssl.semisup import annealing
    >>> [float(annealing.linear_ramp(done, 16)) for done in (0, 4, 16, 40)]
    [0.0, 0.25, 1.0, 1.0]
  """
  if not length >= 0:
    raise hparams.UsageError(f'length={length}: must be at least 0')
  done = tf.cast(done, tf.float32)
  return tf.clip_by_value(done / length, 0.0, 1.0) if length else tf.ones([])


def sigmoid_ramp(progress: tf.Tensor) -> tf.Tensor:
  """Computes exp(-5 (1 - progress)^2), 1 from progress 1 on.

  See Laine and Aila, "Temporal Ensembling for Semi-Supervised Learning", ICLR
  2017. It is FedCon's weight of consistency at the server.

  Args:
    progress: float32 scalar, >= 0.

  Returns:
    float32 scalar, in [exp(-5), 1].

  Examples:
    >>> from tff_fssl.semisup import annealing
    >>> [f'{annealing.sigmoid_ramp(p):.3f}' for p in (0.0, 0.5, 1.0, 2.0)]
    ['0.007', '0.287', '1.000', '1.000']
  """
  return tf.exp(-5.0 * tf.square(1.0 - tf.minimum(progress, 1.0)))
