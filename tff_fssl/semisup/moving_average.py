"""Exponential moving averages (EMA) of weights: teachers, smoothed models."""

from __future__ import annotations

from collections.abc import Sequence

from tff_fssl import hparams
from tff_fssl.lazy import tf
from tff_fssl.models import adapter
from tff_fssl.models.weights import Weights


def moving_average(
  old: Sequence[tf.Tensor], new: Sequence[tf.Tensor], decay: float
) -> list[tf.Tensor]:
  """Computes alpha * old + (1 - alpha) * new, for each pair of tensors.

  See Tarvainen and Valpola, "Mean teachers are better role models", NeurIPS
  2017, and FedSwitch, eq. 1.

  Args:
    old: Tensors, the average so far. Tensors of other types than float
      (counters) have no average: for alpha < 1 they become the new ones.
    new: Tensors of the same shapes and dtypes.
    decay: alpha in [0, 1]. 1 gives exactly `old` and 0 exactly `new`, even if
      the other is not finite.

  Returns:
    The averages, of the same shapes and dtypes.

  Raises:
    UsageError: If the decay is out of range.
    ValueError: If there are more tensors of one than of the other.

  Examples:
    >>> import tensorflow as tf
    >>> from tff_fssl.semisup.moving_average import moving_average
    >>> old = [tf.constant([0.0, 1.0]), tf.constant(5)]  # Weights, a counter.
    >>> new = [tf.constant([1.0, 1.0]), tf.constant(6)]
    >>> [t.numpy().tolist() for t in moving_average(old, new, decay=0.75)]
    [[0.25, 1.0], 6]
  """
  if not 0 <= decay <= 1:
    raise hparams.UsageError(f'decay={decay}: must be from 0 to 1')

  def average(old: tf.Tensor, new: tf.Tensor) -> tf.Tensor:
    if decay == 1:
      return old
    if decay == 0 or not new.dtype.is_floating:
      return new
    # In this form, equal tensors stay equal to the bit.
    return old + (1.0 - decay) * (new - old)

  return [average(*pair) for pair in zip(old, new, strict=True)]


def follow(
  old: Weights, new: Weights, decay: float, *, started: tf.Tensor
) -> Weights:
  """Averages a network's weights over rounds: decay old + (1 - decay) new.

  Args:
    old: The average so far.
    new: The weights that it follows.
    decay: In [0, 1].
    started: bool scalar. If false, the result is a copy of `new`.

  Returns:
    The average.

  Examples:
    >>> import tensorflow as tf
    >>> from tff_fssl.models.weights import Weights
    >>> from tff_fssl.semisup import moving_average
    >>> old = Weights((tf.constant([0.0]),), (), tf.constant(1.0))
    >>> new = Weights((tf.constant([1.0]),), (), tf.constant(1.0))
    >>> for started in (False, True):  # A copy first, then the average.
    ...   average = moving_average.follow(old, new, 0.75, started=started)
    ...   print(average.trainable[0].numpy())
    [1.]
    [0.25]
  """
  # An average without batch norm statistics takes the model's.
  has_statistics = tf.logical_and(started, old.statistics_count > 0.0)
  trainable, non_trainable = (
    tf.nest.map_structure(
      lambda average, current: tf.where(averages, average, current),
      tuple(moving_average(before, after, decay)),
      tuple(after),
    )
    for averages, before, after in (
      (started, old.trainable, new.trainable),
      (has_statistics, old.non_trainable, new.non_trainable),
    )
  )
  return Weights(trainable, non_trainable, new.statistics_count)


def follow_network(
  average: adapter.Network, network: adapter.Network, decay: float
) -> None:
  """Moves a network's variables towards those of another, in place.

  Args:
    average: The network to move.
    network: The network that it follows.
    decay: In [0, 1]. 1 changes nothing.

  Examples:
    >>> import tensorflow as tf
    >>> from tff_fssl.models import adapter
    >>> from tff_fssl.models import networks
    >>> from tff_fssl.semisup import moving_average
    >>> model_fn = lambda: networks.build_network('linear', [2], num_classes=2)
    >>> teacher, student = (adapter.Network(model_fn, seed=0) for _ in range(2))
    >>> _ = student.trainable_variables[1].assign([8.0, 0.0])  # Its biases.
    >>> moving_average.follow_network(teacher, student, decay=0.75)
    >>> print(teacher.trainable_variables[1].numpy())
    [2. 0.]
  """
  if decay == 1.0:
    return
  old, new = average.trainable_variables, network.trainable_variables
  # Static batch norm statistics are gathered: each network has its own.
  if not network.is_static:
    old += average.non_trainable_variables
    new += network.non_trainable_variables
  for variable, value in zip(old, moving_average(old, new, decay), strict=True):
    variable.assign(value)
