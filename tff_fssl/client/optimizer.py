"""The optimizers of clients and server, and their learning rates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
import dataclasses
import math

from tff_fssl.lazy import tf
from tff_fssl.models import adapter

# RMSprop's constants, Keras's defaults.
_RHO, _EPSILON = 0.9, 1e-7
# Adam's constants, those of its paper and of PyTorch.
_BETA_1, _BETA_2, _ADAM_EPSILON = 0.9, 0.999, 1e-8


@dataclasses.dataclass(frozen=True)
class Sgd:
  """SGD as in PyTorch: m <- momentum m + g, w <- w - rate (g + momentum m).

  g is the gradient, clipped to `max_gradient_norm` (0: not clipped), plus
  weight_decay * w. Without `nesterov`, w <- w - rate m.

  Attributes:
    momentum: In [0, 1].
    nesterov: Whether the momentum is Nesterov's.
    weight_decay: L2 penalty, added after clipping.
    max_gradient_norm: Bound on the global norm. 0: no bound.
  """

  momentum: float = 0.0
  nesterov: bool = False
  weight_decay: float = 0.0
  max_gradient_norm: float = 0.0

  def initialize(self, network: adapter.Network) -> list[tf.Variable]:
    """Makes the momentum variables, if any. Call it where that is possible."""
    return _slots(network) if self.momentum else []

  def apply(
    self,
    network: adapter.Network,
    slots: Sequence[tf.Variable],
    gradients: Sequence[tf.Tensor],
    learning_rate: tf.Tensor,
  ) -> None:
    """Makes one step, in place."""
    penalized = _penalized(self, network, gradients)
    for i, (variable, gradient) in enumerate(penalized):
      # This operation has PyTorch's momentum. Keras's multiplies by the
      # learning rate before it accumulates.
      if slots:
        tf.raw_ops.ResourceApplyMomentum(
          var=variable.handle,
          accum=slots[i].handle,
          lr=learning_rate,
          grad=gradient,
          momentum=self.momentum,
          use_nesterov=self.nesterov,
        )
      else:
        tf.raw_ops.ResourceApplyGradientDescent(
          var=variable.handle, alpha=learning_rate, delta=gradient
        )


@dataclasses.dataclass(frozen=True)
class RmsProp:
  """RMSprop (Tieleman and Hinton 2012), as in `tf.keras.optimizers.legacy`.

  v <- 0.9 v + 0.1 g^2, w <- w - rate g / (sqrt(v) + 1e-7), v = 0 at first. g is
  as in `Sgd`. Keras's optimizer that is not legacy divides by sqrt(v + 1e-7).

  Attributes:
    weight_decay: L2 penalty, added after clipping.
    max_gradient_norm: Bound on the global norm. 0: no bound.
  """

  weight_decay: float = 0.0
  max_gradient_norm: float = 0.0

  def initialize(self, network: adapter.Network) -> list[tf.Variable]:
    """Makes the variables v. Call it where that is possible."""
    return _slots(network)

  def apply(
    self,
    network: adapter.Network,
    slots: Sequence[tf.Variable],
    gradients: Sequence[tf.Tensor],
    learning_rate: tf.Tensor,
  ) -> None:
    """Makes one step, in place."""
    penalized = _penalized(self, network, gradients)
    for slot, (variable, gradient) in zip(slots, penalized, strict=True):
      square = _RHO * slot + (1.0 - _RHO) * tf.square(gradient)
      slot.assign(square)
      scaled = gradient / (tf.sqrt(square) + _EPSILON)
      variable.assign_sub(learning_rate * scaled)


@dataclasses.dataclass(frozen=True)
class Adam:
  """Adam (Kingma and Ba 2015), as in PyTorch.

  m <- 0.9 m + 0.1 g, v <- 0.999 v + 0.001 g^2, w <- w - rate m' / (sqrt(v') +
  1e-8), where m' = m / (1 - 0.9^t) and v' = v / (1 - 0.999^t) in step t = 1, 2,
  .... g is as in `Sgd`. m and v are 0 at first.

  Attributes:
    weight_decay: L2 penalty, added after clipping.
    max_gradient_norm: Bound on the global norm. 0: no bound.
  """

  weight_decay: float = 0.0
  max_gradient_norm: float = 0.0

  def initialize(self, network: adapter.Network) -> list[tf.Variable]:
    """Makes the variables t, m and v. Call it where that is possible."""
    count = tf.Variable(0.0, trainable=False)
    return [count, *_slots(network), *_slots(network)]

  def apply(
    self,
    network: adapter.Network,
    slots: Sequence[tf.Variable],
    gradients: Sequence[tf.Tensor],
    learning_rate: tf.Tensor,
  ) -> None:
    """Makes one step, in place."""
    count, *moments = slots
    num_variables = len(moments) // 2
    time = count + 1.0
    count.assign(time)
    first_scale, second_scale = 1.0 - _BETA_1**time, 1.0 - _BETA_2**time
    for first, second, (variable, gradient) in zip(
      moments[:num_variables],
      moments[num_variables:],
      _penalized(self, network, gradients),
      strict=True,
    ):
      mean = _BETA_1 * first + (1.0 - _BETA_1) * gradient
      square = _BETA_2 * second + (1.0 - _BETA_2) * tf.square(gradient)
      first.assign(mean)
      second.assign(square)
      scale = tf.sqrt(square / second_scale) + _ADAM_EPSILON
      variable.assign_sub(learning_rate * (mean / first_scale) / scale)


Optimizer = Sgd | RmsProp | Adam


def _slots(network: adapter.Network) -> list[tf.Variable]:
  """Makes a variable of zeros for each trainable one."""
  return [
    tf.Variable(tf.zeros(v.shape, v.dtype), trainable=False)
    for v in network.trainable_variables
  ]


def _penalized(
  optimizer: Optimizer,
  network: adapter.Network,
  gradients: Sequence[tf.Tensor],
) -> Iterator[tuple[tf.Variable, tf.Tensor]]:
  """Yields each variable with its gradient, clipped, then with L2 penalty."""
  if optimizer.max_gradient_norm:
    gradients, _ = tf.clip_by_global_norm(
      gradients, optimizer.max_gradient_norm
    )
  for variable, gradient in zip(
    network.trainable_variables, gradients, strict=True
  ):
    # The penalty comes after clipping, so that it has full strength in any
    # step.
    if optimizer.weight_decay:
      gradient += optimizer.weight_decay * variable
    yield variable, gradient


def learning_rate(
  initial: float, schedule: str, schedule_rounds: int, round_num: tf.Tensor
) -> tf.Tensor:
  """Computes the learning rate of a round.

  Args:
    initial: The initial rate.
    schedule: `constant`, or `cosine`: initial * (1 + cos(pi (t - 1) / T)) / 2
      in round t, `initial` before round 1 and 0 after round T.
    schedule_rounds: T.
    round_num: t, int32 scalar.

  Returns:
    The rate, float32 scalar.
  """
  if schedule == 'constant':
    return tf.constant(initial, tf.float32)
  progress = tf.cast(round_num - 1, tf.float32) / schedule_rounds
  progress = tf.clip_by_value(progress, 0.0, 1.0)
  return initial * (1.0 + tf.cos(math.pi * progress)) / 2.0
